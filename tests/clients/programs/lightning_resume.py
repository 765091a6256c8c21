"""Lightning, one process: it saves the loader's state into its checkpoint in mid-epoch, and goes on from it."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning_trained import left_and_resumed
from seen import Log, Numbers, loader_class


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


def main() -> None:
    facts = {}
    cases = {"map": (Numbers(100), {"shuffle": True}), "sized stream": (SizedStream(), {}), "stream": (Stream(), {})}
    for name, (dataset, options) in cases.items():
        path = str(Path(os.environ["SEEN"]).parent / f"{name}.ckpt")
        loader = functools.partial(loader_class(), dataset, batch_size=5, num_workers=1, **options)
        facts[name] = left_and_resumed(loader, 7, path, seed=99, max_epochs=2)
    Log().write(0, resumed=facts)


if __name__ == "__main__":
    main()
