"""Trainings that are killed at any moment and resumed from what they had written: is each sample delivered once?

A life is a process that appends a line to a file after each batch: the batch, and the loader's state after it. The next
life begins at the last whole line. The lines before it are what a training with such checkpoints has learnt from.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import minidl

LENGTH, BATCH, EPOCHS = 60, 3, 2


class Numbers(minidl.Dataset[int]):
    """0 to LENGTH - 1; a sample takes a little while, more or less."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        time.sleep(random.random() / 2000)
        return index


class Walk(Iterator[int]):
    """The iterator of a `Stream`, with a state."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        time.sleep(random.random() / 2000)
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(minidl.IterableDataset[int]):
    """The same numbers, dealt out to ranks and workers, the last of which gets only half of its share."""

    def __init__(self, rank: int = 0, ranks: int = 1, *, stateful: bool) -> None:
        self.rank, self.ranks, self.stateful = rank, ranks, stateful

    def __iter__(self) -> Iterator[int]:
        info = minidl.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        share = range(self.rank * workers + worker, LENGTH, self.ranks * workers)
        share = share[: len(share) // 2] if worker == workers - 1 > 0 else share
        return Walk(share) if self.stateful else iter(list(share))


class Dicey(torch.utils.data.Dataset[float]):
    """Draws from torch's generator, whose state is the dataset's."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"random": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(torch.tensor(state["random"], dtype=torch.uint8))


class Epochs(torch.utils.data.IterableDataset[tuple[int, int]]):
    """Counts its epochs, and gives the count along with each of nine numbers."""

    def __init__(self) -> None:
        self.epoch, self.at, self.go_on = 0, 0, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.at, self.go_on = self.go_on, 0
        while self.at < 9:
            self.at += 1
            yield self.epoch, self.at
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.go_on, self.epoch = state["at"], state["epoch"]


@dataclass(frozen=True)
class Case:
    """A loader. kind: "map", "iterable", or "iterable with state"."""

    kind: str
    workers: int = 0
    in_order: bool = True
    persistent: bool = False
    state_every: int | None = None
    ranks: int = 1

    def loader(self, rank: int = 0) -> Any:
        options: dict[str, Any] = {"num_workers": self.workers, "in_order": self.in_order, "batch_size": BATCH}
        options |= {"persistent_workers": self.persistent, "state_every": self.state_every, "collate_fn": list}
        if self.kind != "map":
            return minidl.DataLoader(Stream(rank, self.ranks, stateful=self.kind != "iterable"), **options)
        if self.ranks == 1:
            return minidl.DataLoader(Numbers(), shuffle=True, **options)
        return minidl.DataLoader(Numbers(), sampler=minidl.DistributedSampler(Numbers(), self.ranks, rank), **options)

    def name(self) -> str:
        order = "" if self.in_order else ", any order"
        persistent = ", persistent" if self.persistent else ""
        every = f", state_every {self.state_every}" if self.state_every else ""
        ranks = f"{self.ranks} ranks, " if self.ranks > 1 else ""
        return f"{ranks}{self.kind}, {self.workers} workers{persistent}{order}{every}"


def live(case: Case, rank: int, path: Path) -> None:
    """Train from the last line on to the end of the last epoch."""
    os.setpgrp()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    done = read(path)
    loader = case.loader(rank)
    epoch = done[-1]["epoch"] if done else 0
    if done:
        loader.load_state_dict(done[-1]["state"])
    with path.open("a") as file:
        for number in range(epoch, EPOCHS):
            sampler = loader.sampler
            if isinstance(sampler, minidl.DistributedSampler):
                sampler.set_epoch(number)
            for batch in loader:
                file.write(json.dumps({"epoch": number, "batch": batch, "state": loader.state_dict()}) + "\n")
                file.flush()
            # Where the next epoch begins.
            file.write(json.dumps({"epoch": number + 1, "batch": [], "state": loader.state_dict()}) + "\n")
            file.flush()
    loader.close()


def read(path: Path) -> list[Any]:
    """The whole lines. A torn one is cut off, because the next life writes on behind it."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def run(case: Case, path: Path, kills: int, dice: random.Random, rank: int = 0) -> tuple[list[list[list[int]]], int]:
    """One rank's batches in each epoch, and how often its training was killed: `kills`, or fewer if it ended before."""
    killed = 0
    lines = EPOCHS * (LENGTH // BATCH // case.ranks + 1)
    for at in [*sorted(dice.randrange(lines) for _ in range(kills)), None]:
        life = multiprocessing.get_context("fork").Process(target=live, args=(case, rank, path))
        life.start()
        while at is not None and life.is_alive() and _lines(path) <= at:
            time.sleep(0.001)
        if at is not None:
            time.sleep(dice.random() / 200)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(life.pid or 0, signal.SIGKILL)  # with its workers
        life.join()
        killed += life.exitcode == -signal.SIGKILL
    done = read(path)
    return [[line["batch"] for line in done if line["epoch"] == n and line["batch"]] for n in range(EPOCHS)], killed


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def lost_and_repeated(case: Case, ranks: list[list[list[list[int]]]]) -> tuple[int, int]:
    """Samples that no rank was given in an epoch, and those that were given too often."""
    lost = repeated = 0
    for epoch in range(EPOCHS):
        given = Counter(itertools.chain.from_iterable(batch for rank in ranks for batch in rank[epoch]))
        wanted = Counter(itertools.chain.from_iterable(batch for rank in whole(case) for batch in rank[epoch]))
        lost += sum((wanted - given).values())
        repeated += sum((given - wanted).values())
    return lost, repeated


def whole(case: Case) -> list[list[list[list[int]]]]:
    """What the ranks are given if nothing is killed."""
    ranks = []
    for rank in range(case.ranks):
        torch.manual_seed(3)
        with case.loader(rank) as loader:
            epochs = []
            for number in range(EPOCHS):
                if isinstance(loader.sampler, minidl.DistributedSampler):
                    loader.sampler.set_epoch(number)
                epochs.append(list(loader))
            ranks.append(epochs)
    return ranks
