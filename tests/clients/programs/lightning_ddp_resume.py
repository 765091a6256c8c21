"""Lightning, two ranks: rank 0 saves a checkpoint within an epoch, and both go on from it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from seen import Log, Numbers, loader_class

LENGTH, STEPS, EPOCHS = 24, 4, 3


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The numbers, dealt out to ranks and workers, with a state."""

    def __init__(self) -> None:
        self.at, self.go_on = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        share = range(int(os.environ["LOCAL_RANK"]) * workers + worker, LENGTH, 2 * workers)
        self.at, self.go_on = self.go_on, 0
        while self.at < len(share):
            self.at += 1
            yield torch.tensor(float(share[self.at - 1]))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.go_on = state["at"]


class Module(lightning.LightningModule):
    """Saves a checkpoint after `stop` steps, if it is given its path."""

    def __init__(self, stop: int, path: str | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.stop, self.path, self.seen = stop, path, list[list[int]]()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append([self.current_epoch, *map(int, batch)])
        return (batch * self.weight).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.path is not None and self.global_step == self.stop:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(dataset: Any, options: dict[str, Any], stop: int, path: str, resumes: bool) -> tuple[int, list[list[int]]]:
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(stop, None if resumes else path)
    loader = loader_class()(dataset, batch_size=3, **options)
    trainer.fit(module, loader, ckpt_path=path if resumes else None)
    return trainer.global_rank, module.seen


def main() -> None:
    facts, rank = {}, 0
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "map": (Numbers(LENGTH), {"shuffle": True, "num_workers": 1}),
        "map, no workers": (Numbers(LENGTH), {"shuffle": True}),
        "stream": (Stream(), {"num_workers": 2, "state_every": 1}),
    }
    for name, (dataset, options) in cases.items():
        for stop in (STEPS - 2, STEPS, STEPS + 2):  # within an epoch, at the last batch of one, and in the next
            path = str(Path(os.environ["SEEN"]).parent / f"{name}-{stop}.ckpt")
            rank, whole_run = fit(dataset, options, stop, path, resumes=False)
            facts[f"{name}, {stop}"] = [whole_run[stop:], fit(dataset, options, stop, path, resumes=True)[1]]
    Log().write(rank, resumed=facts)


if __name__ == "__main__":
    main()
