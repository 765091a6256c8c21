"""Lightning, one process: it saves the loader's state into its checkpoint in mid-epoch, and goes on from it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from seen import Log, Numbers, loader_class

STOP = 7


class Walk(Iterator[torch.Tensor]):
    """0, 1, ..., 99, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> torch.Tensor:
        if self.at == 100:
            raise StopIteration
        self.at += 1
        return torch.tensor(float(self.at - 1))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return Walk()


class SizedStream(Stream):
    def __len__(self) -> int:
        return 100


class Module(lightning.LightningModule):
    """Saves a checkpoint after STOP steps, if it is given its path."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.path, self.seen = path, list[list[int]]()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append([int(value) for value in batch])
        return (batch * self.weight).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.path and self.global_step == STOP:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(dataset: Any, options: dict[str, Any], seed: int, path: str, resumes: bool) -> list[list[int]]:
    lightning.seed_everything(seed, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module("" if resumes else path)
    loader = loader_class()(dataset, batch_size=5, num_workers=1, **options)
    trainer.fit(module, loader, ckpt_path=path if resumes else None)
    return module.seen


def main() -> None:
    facts = {}
    cases = {"map": (Numbers(100), {"shuffle": True}), "sized stream": (SizedStream(), {}), "stream": (Stream(), {})}
    for name, (dataset, options) in cases.items():
        path = str(Path(os.environ["SEEN"]).parent / f"{name}.ckpt")
        whole_run = fit(dataset, options, 3, path, resumes=False)
        facts[name] = [whole_run[STOP:], fit(dataset, options, 99, path, resumes=True)]
    Log().write(0, resumed=facts)


if __name__ == "__main__":
    main()
