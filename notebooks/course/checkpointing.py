"""Questions and checks of 12_checkpointing, and its training, which can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import minidl
from course import place, recorded
from course.asking import Asked, Choice, Count, question, rows
from course.checking import Wrong, exercise, whole
from course.data import PATIENCE, STEP, Uneven, numbers
from minidl.resume.position import EpochPosition, Position


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


# --- Questions --------------------------------------------------------------------------------------------------------
def given_and_yielded(trace: minidl.Trace) -> tuple[int, int, int]:
    """The row at which the program takes the state; samples that the sampler had given by then, and the loop received."""
    events = trace.to_pandas()
    row = rows(trace, "state_taken")[-1]
    drawn = [at for at in rows(trace, "sampler_next", "E") if at < row]
    return row, int(events["count"][drawn].sum()), int(events.yielded[row]) * 4


def _lost(trace: minidl.Trace, hint: str, why: str) -> Asked:
    row, given, yielded = given_and_yielded(trace)
    (facts,) = trace.loaders.values()
    return Asked(
        f"{facts['num_workers']} workers, `prefetch_factor={facts['prefetch_factor']}`, batches of 4. The state is taken after "
        f"{yielded // 4} of {facts['dataset_length'] // 4} batches, and holds the number of samples that the sampler has given. How many "
        "samples are lost?",
        Count(given - yielded), hint, why.format(given=given, yielded=yielded), row,
    )  # fmt: skip


@question
def lost(trace: minidl.Trace) -> Asked:
    """What is on its way is lost."""
    return _lost(
        trace,
        "How many tasks are outstanding while the loop works on a batch? See 05, section 1.",
        "The sampler had given {given} samples, the loop had received {yielded}: the others were on their way.",
    )


@question
def lost_late(trace: minidl.Trace) -> Asked:
    """... as far as the sampler has any."""
    return _lost(
        trace,
        "A task is sent for each one that is yielded, as long as the sampler has any. How many has it?",
        "The sampler had given {given} samples, and had no more; the loop had received {yielded}.",
    )


@question
def numbered(trace: minidl.Trace) -> Asked:
    """A resumed epoch's tasks."""
    (row,) = rows(trace, "resumed")
    yielded = int(trace.to_pandas().yielded[row])
    return Asked(
        f"The second life goes on after {yielded} batches that the first has yielded. Which number has its first task?",
        Count(int(trace.events["task"][rows(trace, "task_assigned")[0]])),
        "Task numbers are the dispatcher's: `send_idx`. Does it know of the first life?",
        f"`send_idx` begins at 0 in each process. The place in the epoch is another number, `yielded` = {yielded}, which `resumed` "
        "has told. Two counters with two meanings: a state that mixed them would be wrong after the second kill.",
        row,
        {yielded: "That is the batch's number in the epoch. The dispatcher is new, and counts its own tasks."},
    )  # fmt: skip


@question
def again(trace: minidl.Trace, state: Mapping[str, Any]) -> Asked:
    """What `state_every` costs."""
    (row,) = rows(trace, "resumed")
    behind = int(trace.to_pandas().behind[row])
    workers = [(worker["yielded"], worker["at"]) for worker in state["workers"]]
    return Asked(
        f"{len(workers)} workers. How many batches are fetched a second time after the resume?",
        Count(behind),
        "In turn, how many of the batches are worker 0's, how many worker 1's? With which does each send a state?",
        f"For each worker, (batches yielded, number of the last one with a state): {workers}. What lies between them is fetched again; "
        "states of batches that were fetched and not yielded do not count.",
        row,
    )


@question
def count_alone(state: Mapping[str, Any]) -> Asked:
    """Out of order, one number is not a place."""
    return Asked(
        f"This state says that {state['batches']} batches were yielded, out of order. Suppose a resumed loader had only this number, and "
        f"skipped the first {state['batches']} batches of the sampler. What would happen to samples?",
        Choice("some are lost and some repeated", {
            "nothing": ("So it is in order, where the number says which batches. Which ones were yielded here?", "none", "neither"),
            "some are lost": ("As many were skipped as were yielded. If one of the skipped was not yielded, what was yielded in its place?", "lost"),
            "some are repeated": ("As many were skipped as were yielded. If one that was yielded is not skipped, what was skipped in its place?", "repeated", "twice"),
            "some are lost and some repeated": ("", "both", "lost and repeated"),
        }),
        f"Which batches were yielded? See `ahead`. Which would be skipped: the first {state['batches']}.",
        f"Skipped would be draws 0 to {state['batches'] - 1}; yielded were {state['ahead']}. What was skipped and not yielded is lost; "
        "what was yielded and not skipped comes twice.",
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def naive_loss(function: Callable[[int, int, int, int], int]) -> str:
    """The loss of the naive state, held against recorded runs."""
    for workers, prefetch, yielded in ((1, 2, 3), (2, 2, 3), (3, 4, 5), (2, 2, 11)):
        directory = place("naive")
        loader = minidl.DataLoader(
            range(48), batch_size=4, num_workers=workers, prefetch_factor=prefetch, collate_fn=numbers,  # type: ignore[arg-type]
            multiprocessing_context="fork",
        )  # fmt: skip
        with minidl.trace(directory), loader:
            for _, _ in zip(range(yielded), loader, strict=False):
                pass
            loader.state_dict()
        trace = recorded(directory)
        _, given, had = given_and_yielded(trace)
        said = whole(
            function(workers, prefetch, yielded, 48),
            f"For {workers} workers",
            "The steps `sampler_next` and `yield`: one number of samples.",
        )
        if said != given - had:
            raise Wrong(
                f"{workers} workers, `prefetch_factor={prefetch}`, {yielded} of 12 batches yielded: {given - had} samples are lost; your "
                f"function says {said}.",
                f"The steps `sampler_next` and `yield`. When the state is taken, the sampler has given {given} samples, and {had} were "
                "yielded. One task is sent for each that is yielded, until the sampler has no more.",
                trace,
            )  # fmt: skip
    return "As many as are on their way: the capacity, or what is left of the epoch."


@exercise
def place_of(function: Callable[[int, int], tuple[list[int], int]]) -> str:
    """The place of every worker, from the number of batches."""
    for workers in range(1, 5):
        known = EpochPosition([Position() for _ in range(workers)], indexed=False)
        for task in range(3 * workers + 1):
            wanted = ([position.yielded for position in known.places], known.turn)
            step = (
                "The step `yield`: return a sequence with a number for each worker, and the worker whose turn is next."
            )
            try:
                places, turn = function(task, workers)
                said = (
                    [whole(one, f"For {task} batches", step) for one in places],
                    whole(turn, f"For {task} batches", step),
                )
            except (TypeError, ValueError) as error:
                raise Wrong(
                    f"After {task} batches of {workers} workers, your answer is no pair of a sequence and a number.",
                    step,
                ) from error
            if said != wanted:
                raise Wrong(
                    f"After {task} batches of {workers} workers, the loader says {wanted}; your function says {said}.",
                    "The step `yield`: in turn, task n is worker n % workers's.",
                )
            known.hand_out((task, task % workers))
            known.settle()
    return (
        "With deterministic turns, one number holds the place of every worker. It fails if a worker's stream ends before the others', "
        "or with `in_order=False`: the turns are no longer n % workers then."
    )
