"""What a client program saw: a dataset of numbers, and a log of the batches by rank and epoch.

A program logs each batch that its training step gets. `Log` writes one JSON file a rank into the directory that
the environment variable SEEN names; the test compares them between torch's loader and minidl's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

if os.environ.get("MINIDL_TRANSPORT") == "arena":
    import minidl.arena.arena

    minidl.arena.arena.INLINE = 0  # the programs' batches are small, and would all travel in the message


if os.environ.get("LOADER") == "hardened":
    import minidl

    minidl.harden()


class Numbers(torch.utils.data.Dataset[Any]):
    """`length` samples: sample i is the tensor i."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor(float(index))


def loader_class() -> Any:
    """The class that LOADER names: minidl's or mini's; else torch's, under `minidl run` and if it is hardened, too."""
    if os.environ.get("LOADER") == "minidl":
        import minidl

        return minidl.DataLoader
    if os.environ.get("LOADER") == "mini":
        from minidl import mini

        return mini.DataLoader
    return torch.utils.data.DataLoader


class Log:
    """The batches of one rank: epoch -> list of batches, each a list of sample numbers."""

    def __init__(self) -> None:
        self.epochs: dict[str, list[list[int]]] = {}

    def batch(self, epoch: int, batch: torch.Tensor) -> None:
        """Note one batch of sample numbers."""
        self.epochs.setdefault(str(epoch), []).append([int(value) for value in batch.flatten()])

    def write(self, rank: int, **facts: Any) -> None:
        """Write what rank `rank` saw, with further facts that the test compares."""
        folder = Path(os.environ["SEEN"])
        folder.mkdir(parents=True, exist_ok=True)
        spent = sum(os.times()[:4])  # processor seconds, own and of the workers that have ended
        text = json.dumps({"rank": rank, "epochs": self.epochs, "facts": facts, "spent": spent})
        (folder / f"rank-{rank}.json").write_text(text)


def logged(loader: Any, numbers: Callable[[Any], torch.Tensor] = torch.as_tensor) -> Log:
    """The batches of two epochs. numbers: the sample numbers of a batch."""
    log = Log()
    for epoch in range(2):
        for batch in loader:
            log.batch(epoch, numbers(batch))
    return log
