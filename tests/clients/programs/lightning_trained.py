"""What Lightning's programs share: a module that notes its batches, and a trainer on the CPU that prints nothing."""

from collections.abc import Callable
from typing import Any

import lightning
import torch
from seen import Log


class Noting(lightning.LightningModule):
    """Notes each batch that it gets. path: of the checkpoint that it saves after `stop` steps; "" = none."""

    def __init__(self, stop: int = 0, path: str = "") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.stop, self.path = stop, path
        self.log_of_batches, self.seen = Log(), list[list[int]]()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.log_of_batches.batch(self.current_epoch, batch)
        self.seen.append([self.current_epoch, *map(int, batch)])
        return (batch * self.weight).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.path and self.global_step == self.stop:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **options)


def left_and_resumed(
    loader: Callable[[], Any], stop: int, path: str, seed: int = 3, **options: Any
) -> list[list[list[int]]]:
    """The batches after `stop` steps of a whole run, and those of one that goes on from there. seed: of the second."""
    runs = []
    for own_seed, resumes in ((3, False), (seed, True)):
        lightning.seed_everything(own_seed, verbose=False)
        module = Noting(stop, "" if resumes else path)
        trainer(**options).fit(module, loader(), ckpt_path=path if resumes else None)
        runs.append(module.seen)
    return [runs[0][stop:], runs[1]]
