"""Lightning, two ranks: rank 0 saves a checkpoint within an epoch, and both go on from it."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning_trained import left_and_resumed
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


def main() -> None:
    facts = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "map": (Numbers(LENGTH), {"shuffle": True, "num_workers": 1}),
        "map, no workers": (Numbers(LENGTH), {"shuffle": True}),
        "stream": (Stream(), {"num_workers": 2, "state_every": 1}),
    }
    for name, (dataset, options) in cases.items():
        for stop in (STEPS - 2, STEPS, STEPS + 2):  # within an epoch, at the last batch of one, and in the next
            path = str(Path(os.environ["SEEN"]).parent / f"{name}-{stop}.ckpt")
            loader = functools.partial(loader_class(), dataset, batch_size=3, **options)
            run = {"devices": 2, "strategy": "ddp", "max_epochs": EPOCHS}
            facts[f"{name}, {stop}"] = left_and_resumed(loader, stop, path, **run)
    Log().write(int(os.environ["LOCAL_RANK"]), resumed=facts)


if __name__ == "__main__":
    main()
