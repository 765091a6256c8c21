"""Questions and checks of 13_one_timeline. The job is recorded; clocks are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import minidl
from course.asking import Asked, Choice, Count, question, rows
from course.checking import Wrong, exercise, number, runs, whole
from minidl.tracefile.events import COMPUTE
from minidl.tracefile.join import Clock

ROUND_TRIPS = ((1_000, 51_900, 2_600), (3_000, 53_150, 3_300), (4_000, 54_700, 5_000))
"""Before, answer, after: what a rank read of its own clock, of rank 0's, and of its own again (nanoseconds)."""


def ranks_of(trace: minidl.Trace) -> dict[int, int]:
    """Iterator -> its rank, in the order of the ranks."""
    ranks = {number: int(facts["rank"]) for number, facts in trace.loaders.items()}
    return dict(sorted(ranks.items(), key=lambda one: one[1]))


def steps(trace: minidl.Trace, edge: str) -> Any:
    """When each training step began, or ended (edge: "begin" or "end"), ns: a row for each rank, a column a step."""
    spans = trace.spans()
    spans = spans[spans["code"] == COMPUTE[0]]
    return np.array([np.sort(spans[edge][spans["loader"] == number]) for number in ranks_of(trace)])


def spread(trace: minidl.Trace, edge: str) -> float:
    """By how much the ranks differ in that, ms, in the middle of all steps."""
    times = steps(trace, edge)
    return float(np.median(times.max(axis=0) - times.min(axis=0))) / 1e6


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def processes(trace: minidl.Trace) -> Asked:
    """Each rank has workers of its own."""
    ranks, workers = len(trace.loaders), int(next(iter(trace.loaders.values()))["num_workers"])
    return Asked(
        f"A job of {ranks} ranks, each with a loader of `num_workers={workers}`. How many processes are in its trace?",
        Count(len(trace.processes)),
        "A rank is a process with a loop of its own. Who fetches for it?",
        f"{ranks} loops, and {ranks} * {workers} workers. Ranks share no worker and no queue. On a machine with eight GPUs, `num_workers=8` starts 64 workers: count before you raise it.",
        rows(trace, "worker_start", "B")[-1],
        {workers: "Each rank has its own.", ranks * workers: "These are the workers. Who trains?"},
    )  # fmt: skip


@question
def named(trace: minidl.Trace, task: int = 3) -> Asked:
    """A batch's full name."""
    found = rows(trace, "yield", task=task)
    ranks = len(trace.loaders)
    return Asked(
        f"Each rank makes {len(found) // ranks} epochs. How many batches of this job have the task number {task}?",
        Count(len(found)),
        "Who gives the numbers, and when does it begin again at 0?",
        f"One in each epoch of each rank: {len(found) // ranks} * {ranks}. So a batch of a job is named by three numbers: (loader, epoch, task).",
        found[-1],
        {1: "Tasks are numbered by each rank's loader, from 0 in each epoch."},
    )  # fmt: skip


@question
def shifted(trace: minidl.Trace, rank: int = 1) -> Asked:
    """One machine, one clock."""
    (joined,) = [one for one in trace.manifest["ranks"] if one["rank"] == rank]
    measured = next(line for line in trace.described("clock") if line["rank"] == rank)
    off = measured["offset_ns"]
    return Asked(
        f"Both ranks were on one machine. Rank {rank} measured that its clock is {abs(off):,} ns {'behind' if off > 0 else 'ahead'}, and could be wrong by {measured['error_ns']:,} ns. By how many "
        "nanoseconds were its times shifted when the traces were joined?",
        Count(joined["offset_ns"]),
        "How many clocks has one machine?",
        "All processes of a machine read the same monotonic clock, and nothing measured is better than that. What was measured fits: it is less than its own error. Between two "
        "machines it is all there is.",
        None,
        {abs(off): "That is less than its own error. And what is known needs no measurement."},
    )  # fmt: skip


@question
def halfway(clock: Clock, at: int) -> Asked:
    """Drift."""
    moved = clock.one(at) - at
    first, last = clock.offset[0] / 1e6, clock.offset[-1] / 1e6
    return Asked(
        f"Another job, two machines. At the beginning rank 1's clock was {first:.0f} ms behind rank 0's, and {(clock.at[-1] - clock.at[0]) / 1e9:.0f} s later {last:.0f} ms. By how many milliseconds is an event "
        f"shifted that rank 1 wrote {(at - clock.at[0]) / 1e9:.0f} s after the beginning?",
        Count(round(moved / 1e6)),
        "Quartz crystals differ, and each keeps its own pace. So draw a straight line between the two readings.",
        f"Between two readings the offset is interpolated. {clock.drift_ppm:.0f} millionths of drift are usual; with one reading, at the beginning, events at the end would "
        "come before their causes. That is why `align_clocks` is called twice.",
        None,
        {round(first): "So it was at the beginning.", round(last): "So it is at the end."},
    )  # fmt: skip


@question
def together(trace: minidl.Trace) -> Asked:
    """The gradient's exchange."""
    begins, ends = spread(trace, "begin"), spread(trace, "end")
    return Asked(
        f"{len(trace.loaders)} ranks train one model, and exchange gradients in each step. In which are the ranks closer together?",
        Choice("the end of a step" if ends < begins else "the beginning of a step", {
            "the beginning of a step": ("A rank begins as soon as it has its batch, and asks no other rank.", "begin", "beginning", "the beginning", "start"),
            "the end of a step": ("What would make ranks begin together, and end apart?", "end", "the end", "finish"),
            "neither": ("Compare the two figures: one of them is bounded by an exchange between all ranks.", "both"),
        }),
        "A rank begins when it has its batch. What does it need to be done?",
        f"In the middle of all steps, the beginnings are {begins:.1f} ms apart, the ends {ends:.1f} ms. A step needs the gradients of all ranks: who began early waits inside its step. So a slow loader "
        "of *one* rank makes steps long in *all others*, where no loader is to blame.".replace("*", ""),
        rows(trace, "compute", "B")[-1],
    )  # fmt: skip


@question
def batches_each(trace: minidl.Trace) -> Asked:
    """A rank's share."""
    facts = next(iter(trace.loaders.values()))
    epochs = len({int(one) for one in trace.to_pandas().epoch[rows(trace, "share")]})
    each = len(rows(trace, "yield", loader=next(iter(trace.loaders)))) // epochs
    whole = int(facts["dataset_length"]) // int(facts["batch_size"])
    return Asked(
        f"{facts['dataset_length']} samples, {len(trace.loaders)} ranks, `batch_size={facts['batch_size']}`, a `DistributedSampler`. How many batches does one rank get in an epoch?",
        Count(each),
        "First the share, then the batches.",
        f"{facts['dataset_length']} / {len(trace.loaders)} / {facts['batch_size']} = {each}. The batch of a step is {len(trace.loaders)} * {facts['batch_size']} samples: more ranks mean fewer steps.",
        rows(trace, "yield")[-1],
        {whole: "So it would be without a `DistributedSampler`: each rank would see everything."},
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def clock_offset(function: Callable[[Sequence[tuple[int, int, int]]], tuple[int, int]]) -> str:
    """Round trips."""
    for trips in (
        ROUND_TRIPS,
        ((0, 10_000, 800), (2_000, 12_090, 2_200)),
        ((5_000, 1_100, 5_400),),
        ((1_000, 9_000, 3_000), (5_000, 9_000, 6_600)),
    ):
        before, answer, after = min(trips, key=lambda trip: trip[2] - trip[0])
        half = (after - before) // 2
        wanted = answer - (before + half), half
        pair = "The step `align_clocks`: an offset and its error, two numbers of nanoseconds."
        offset, error = (number(one, f"Of {len(trips)} round trips", pair) for one in function(trips))
        table = "\n".join(f"before {a:>6}  answer {b:>6}  after {c:>6}  took {c - a}" for a, b, c in trips)
        for said, right, words, step in (
            (offset, wanted[0], f"The offset is {wanted[0]} ns; your function says {offset}.",
             "The step `align_clocks`: of all round trips the shortest one is the best. The answer was read at some time between `before` and `after`: halfway is the best guess."),
            (error, wanted[1], f"The offset {wanted[0]} ns can be wrong by {wanted[1]} ns; your function says {error}.",
             "The step `align_clocks`: had the answer been read right after `before`, or right before `after`, the guess would be wrong by half of the round trip."),
        ):  # fmt: skip
            if round(said) != right:
                raise Wrong(words, step, evidence=table)
    return "The same as in `minidl.align_clocks`: the shortest round trip, half of it for each way, and half of it as the error."


@exercise
def last_to_begin(function: Callable[[minidl.Trace], Sequence[int]]) -> str:
    """Who delays each step."""
    for name, trace in runs("ranks-2-one-gpu", "ranks-4-one-gpu"):
        begins = steps(trace, "begin")
        wanted = begins.argmax(axis=0).tolist()
        given = [whole(rank, f"In {name}", "The step `compute`: one rank for each step.") for rank in function(trace)]
        if len(given) != len(wanted):
            raise Wrong(
                f"{name} has {len(wanted)} steps; you name {len(given)} ranks.",
                "The step `compute`: one of each rank, for each step of the training.",
            )
        if given != wanted:
            step = next(step for step, one in enumerate(given) if one != wanted[step])
            raise Wrong(
                f"{name}, step {step}: rank {wanted[step]} begins last; you say {given[step]}.",
                "The step `compute`: the n-th one of each rank belong together, as they exchange gradients. The number of an iterator is not its rank: `trace.loaders[number]['rank']`.",
                evidence="\n".join(f"rank {rank}: begins {(begins[rank][step] - begins[:, step].min()) / 1e6:.3f} ms after the first" for rank in range(len(begins))),
            )  # fmt: skip
    return "That rank sets the pace of the step. If it is always the same one, look at its loader first; here they take turns."
