"""What the notebooks share: datasets for their workers, a training that can be killed, the grading of predictions.

Datasets live here and not in the notebooks, because a spawned worker imports what it runs. Their work is waiting
(`time.sleep`, or for an event), so that a run has the shape that a notebook is about on any machine.
"""

from __future__ import annotations

import html
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import minidl

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

PATIENCE = 60
"""Seconds after which a wait for another process gives up."""

STEP = 0.05
"""Seconds of a training step."""


class Uneven(minidl.Dataset[torch.Tensor]):
    """`size` samples; sample i is `tensor(i)` and takes `seconds` of waiting, or `slow[i]` where it is named there."""

    def __init__(self, size: int, seconds: float = 0.01, slow: Mapping[int, float] | None = None) -> None:
        self.size = size
        self.seconds = seconds
        self.slow = dict(slow or {})

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.slow.get(index, self.seconds))
        return torch.tensor(index)


class Held(minidl.Dataset[int]):
    """`size` samples; sample i is i. Sample `held` is not ready before the event `gate` is set."""

    def __init__(self, size: int, held: int, gate: Event) -> None:
        self.size, self.held, self.gate = size, held, gate

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index == self.held and not self.gate.wait(PATIENCE):
            raise TimeoutError(f"sample {index}: the gate was not opened for {PATIENCE} s")
        return index


class Walk(Iterator[int]):
    """An iterator over numbers with a state: how many of them it has given."""

    def __init__(self, numbers: range, seconds: float) -> None:
        self.numbers, self.seconds, self.given = numbers, seconds, 0

    def __next__(self) -> int:
        if self.given == len(self.numbers):
            raise StopIteration
        time.sleep(self.seconds)
        self.given += 1
        return self.numbers[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Stream(minidl.IterableDataset[int]):
    """The numbers below `size`: worker w of W gives w, w + W, w + 2W, ... stateful: its iterator has a state."""

    def __init__(self, size: int, *, seconds: float = 0, stateful: bool = True) -> None:
        self.size, self.seconds, self.stateful = size, seconds, stateful

    def __iter__(self) -> Iterator[int]:
        info = minidl.get_worker_info()
        share = range(self.size) if info is None else range(info.id, self.size, info.num_workers)
        return Walk(share, self.seconds) if self.stateful else iter(list(share))


class Canonical(minidl.IterableDataset[int]):
    """One order of the samples for any number of ranks and workers, from the sample in the epoch at which to begin.

    The order is cut into global batches of `global_batch` samples, each of which is cut into a share for each rank.
    Worker w of W has the global batches w, w + W, w + 2W, ... A loader needs a batch_size of global_batch / ranks.
    state: epoch, sample_in_epoch (what all ranks together have been given), seed. slow: sample `slow` waits for `gate`.
    Upstream: the way of `streaming`, reduced to one canonical node.
    """

    def __init__(
        self, size: int, global_batch: int, state: Mapping[str, int], rank: int = 0, ranks: int = 1,
        slow: int | None = None, gate: Event | None = None,
    ) -> None:  # fmt: skip
        if global_batch % ranks or size % global_batch:
            raise ValueError(f"{size} samples in batches of {global_batch} do not divide evenly among {ranks} ranks")
        self.size, self.global_batch, self.state = size, global_batch, dict(state)
        self.rank, self.ranks, self.slow, self.gate = rank, ranks, slow, gate

    def order(self) -> list[int]:
        """The samples of the epoch, from its begin."""
        generator = torch.Generator().manual_seed(self.state["seed"] + self.state["epoch"])
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order

    def read(self, sample: int) -> int:
        """The sample; the slow one when its gate is open."""
        if sample == self.slow and self.gate is not None and not self.gate.wait(PATIENCE):
            raise TimeoutError(f"sample {sample}: the gate was not opened for {PATIENCE} s")
        return sample

    def __iter__(self) -> Iterator[int]:
        info = minidl.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        order, share = self.order(), self.global_batch // self.ranks
        begins = range(self.state["sample_in_epoch"], self.size, self.global_batch)
        for begin in begins[worker::workers]:
            yield from map(self.read, order[begin + self.rank * share :][:share])


def numbers(samples: list[Any]) -> list[int]:
    """Collate samples into a list of numbers."""
    return [int(sample) for sample in samples]


# --- A training that can be killed ------------------------------------------------------------------------------------
def train(lines: Path, trace: Path) -> None:
    """Train an epoch from the last whole line of the file on; after each batch, write it and the loader's state."""
    torch.manual_seed(3)
    loader = minidl.DataLoader(Uneven(48), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    before = written(lines)
    if before:
        loader.load_state_dict(before[-1]["state"])
    with minidl.trace(trace), loader, lines.open("a") as file:
        for batch in loader:
            time.sleep(STEP)  # the model's work
            file.write(json.dumps({"batch": batch.tolist(), "state": loader.state_dict()}) + "\n")
            file.flush()


def written(lines: Path) -> list[dict[str, Any]]:
    """The whole lines. What a kill has left of the last one is cut off, because the next life writes on behind it."""
    text = lines.read_text() if lines.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        lines.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def live(lines: Path, trace: Path, kill_at: int | None) -> int | None:
    """Let `train` run in a process of its own; kill it, with its workers, at so many lines. Return its exit code."""
    life = multiprocessing.get_context("fork").Process(target=_alone, args=(lines, trace))
    life.start()
    deadline = time.monotonic() + PATIENCE
    while kill_at is not None and life.is_alive() and time.monotonic() < deadline:
        if lines.exists() and lines.read_bytes().count(b"\n") >= kill_at:
            os.killpg(life.pid or 0, signal.SIGKILL)
            break
        time.sleep(0.001)
    life.join(PATIENCE)
    if life.is_alive():
        life.kill()
        raise TimeoutError(f"the training did not end within {PATIENCE} s")
    return life.exitcode


def _alone(lines: Path, trace: Path) -> None:
    os.setpgrp()  # so that a kill reaches the workers
    torch.set_num_threads(1)
    train(lines, trace)


# --- Grading ----------------------------------------------------------------------------------------------------------
WORDS = {
    "lost": (
        "How many tasks are outstanding while the loop works on a batch? See 05, section 1.",
        "The sampler had given {given} samples, the loop had received {yielded}: the others were on their way.",
    ),
    "lost late": (
        "A task is sent for each one that is yielded, as long as the sampler has any. How many has it?",
        "The sampler had given {given} samples, and had no more; the loop had received {yielded}.",
    ),
    "again": (
        "In turn, how many of the batches are worker 0's, how many worker 1's? With which does each send a state?",
        "For each worker, (batches yielded, number of the last one with a state): {workers}. What lies between them is "
        "fetched again; states of batches that were fetched and not yielded do not count.",
    ),
}
"""Hint and reason of a question, which a reader should not see beside it."""


@dataclass(frozen=True)
class Grade:
    """What is said to a prediction. answer: what the trace says and why; a notebook shows it folded."""

    verdict: str
    answer: str = ""

    def __repr__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        folded = f"<details><summary>show the answer</summary>{html.escape(self.answer)}</details>"
        return f"<p>{html.escape(self.verdict)}</p>" + (folded if self.answer else "")


def grade(prediction: object, recorded: object, why: str, hint: str = "") -> Grade:
    """Hold a prediction against what the trace says; `why` names the step of the protocol that makes it so.

    A wrong prediction gets the hint, and the answer folded, or at once if there is no hint.
    """
    if prediction is None:
        words = (
            "no prediction yet: write it in the place of None above, run that cell and this one, and the trace answers"
        )
        return Grade(words, f"{recorded}. {why}")
    if str(prediction).strip().casefold() == str(recorded).casefold():
        return Grade(f"right: {recorded}. {why}")
    if hint:
        return Grade(f"not {prediction}. {hint}", f"{recorded}. {why}")
    return Grade(f"you said {prediction}, the trace says {recorded}. {why}")


def grade_on(topic: str, prediction: object, recorded: object, **facts: object) -> Grade:
    """Grade with the words of `topic`; the reason shows the facts."""
    hint, why = WORDS[topic]
    return grade(prediction, recorded, why.format_map(facts), hint)


def table(rows: Iterable[tuple[object, ...]], columns: list[str]) -> Styler:
    """Show rows as a table."""
    import pandas as pd

    left = [{"selector": "th, td", "props": "text-align: left"}]
    return pd.DataFrame(list(rows), columns=columns).style.hide(axis="index").set_table_styles(left)
