"""A case of the lab: a program as users write it, with one fault, and a row with the expected finding.

A module of `minidl.prove.lab.cases` has a docstring (the story), `CASE` (the row), and the faulty part of a program:
the function `main(options)`; or only a dataset, its last class, over which the usual training loop then iterates. The
program runs as `train.py` in a folder of its own, with `LabOptions` as its arguments. In that copy, docstring and row
are blanked, so that the process shows only the user's program, and the lines that all cases share are added: see
`runner`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import Dataset

SAMPLES: Final = 64
FORK, ANY_METHOD = ("fork",), ("fork", "fork", "spawn", "forkserver")


@dataclass(frozen=True)
class LabOptions:
    """The options that vary between runs. at: the sample with the fault; pause: the duration of a sample in seconds."""

    workers: int = 2
    batch_size: int = 4
    at: int = 13
    pause: float = 0.01
    method: str = "fork"
    fixed: bool = False

    @property
    def worker(self) -> int:
        """The worker that gets the sample `at` of a map-style dataset, in order."""
        return self.at // self.batch_size % self.workers

    @property
    def loading(self) -> dict[str, Any]:
        """The options of the DataLoader."""
        return {"num_workers": self.workers, "batch_size": self.batch_size, "multiprocessing_context": self.method}

    def arguments(self) -> list[str]:
        """The options as arguments of a program."""
        given = [f"--{field.name.replace('_', '-')}={getattr(self, field.name)}" for field in dataclasses.fields(self)]
        return [text for text in given if not text.startswith("--fixed")] + ["--fixed"] * self.fixed


@dataclass(frozen=True)
class Truth:
    """The expected finding, in the doctor's words.

    role: "worker", "loop" (the process that iterates), "" = any; worker, sample: -1 = any. steps: the accepted
    places, () = any. causes: the accepted kinds of cause, the best first.
    """

    role: str
    worker: int
    sample: int
    steps: tuple[str, ...]
    causes: tuple[str, ...]

    def words(self) -> str:
        """The process, place and cause, for a person."""
        who = f"worker {self.worker}" if self.worker >= 0 else self.role or "any process"
        where = f"sample {self.sample}" if self.sample >= 0 else " or ".join(self.steps) or "any place"
        return f"{who}, {where}: {' or '.join(self.causes)}"


def in_sample(*causes: str) -> Callable[[LabOptions], Truth]:
    """The truth of a case whose fault is in the sample `at`."""
    return lambda options: Truth("worker", options.worker, options.at, ("sample",), causes)


@dataclass(frozen=True)
class LabCase:
    """One row. title: one line; users_see: what the user observes; thread: a report by users ("" = invented for the
    lab); fix: the remedy.

    truth: the expected finding; None for a healthy program. ours: the same on minidl's loader, if it differs. ends:
    whether the program ends by itself, by loader. simulated: a part that stands in for something else. needs: a module
    that is not among minidl's dependencies.
    """

    theme: str
    title: str
    users_see: str
    fix: str
    truth: Callable[[LabOptions], Truth] | None
    thread: str = ""
    ours: Callable[[LabOptions], Truth | None] | None = None
    ends: bool = False
    ends_ours: bool | None = None
    simulated: str = ""
    needs: str = ""
    methods: Sequence[str] = ANY_METHOD
    workers: tuple[int, int] = (1, 3)
    at: tuple[int, int] = (8, 24)

    @property
    def can_run(self) -> bool:
        """Whether the module that it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def expected(self, options: LabOptions, loader: str) -> Truth | None:
        """The expected finding on "torch" or "ours"; None = healthy."""
        made = self.ours if loader == "ours" and self.ours is not None else self.truth
        return None if made is None else made(options)

    def ended(self, loader: str) -> bool:
        """Whether the program ends by itself on this loader."""
        return self.ends_ours if loader == "ours" and self.ends_ours is not None else self.ends

    def draw(self, seed: int) -> LabOptions:
        """The options of the run with this seed; seed 0 has the default ones, as far as the case allows them."""
        least, most = self.workers
        if not seed:
            return LabOptions(workers=max(least, min(2, most)), method=self.methods[0])
        chance = random.Random(seed)
        return LabOptions(
            workers=chance.randint(least, most),
            batch_size=chance.choice((1, 2, 4, 5)),
            at=chance.randint(*self.at),
            pause=chance.choice((0.0, 0.005, 0.02, 0.05)),
            method=chance.choice(tuple(self.methods)),
        )


def launch(main: Callable[[LabOptions], None]) -> None:
    """Run a case's program with the options of the command line."""
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(LabOptions):
        kind: dict[str, Any] = {"action": "store_true"} if field.name == "fixed" else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", **kind)
    torch.set_num_threads(1)
    options = LabOptions(**vars(parser.parse_args()))
    print("ready", flush=True)
    main(options)
    print("the end", flush=True)


class Pictures(Dataset[Any]):
    """Small pictures in memory: the base of the cases' datasets, without a fault."""

    def __init__(self, options: LabOptions, samples: int = SAMPLES) -> None:
        self.options, self.samples = options, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 16, 16), float(index))


def step(number: int) -> None:
    """A minimal training step on a batch: it prints that it was done."""
    print("batch", number, flush=True)
