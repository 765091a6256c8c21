"""Questions and checks of 10_bottleneck."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import minidl
from course import opened
from course.asking import Asked, Choice, Count, Worker, question, rows, yes_no
from course.asking import workers_of as workers
from course.checking import Wrong, exercise, number, runs
from course.device import median_ms
from minidl.speed.verdict import verdict
from minidl.speed.wall_clock import Bound, Cause, Waiting, waiting
from minidl.tracefile.events import CONSUMER, DEVICE_COMPUTE, FETCH, NEXT

FIRST = "the first batch"


def waited(trace: minidl.Trace) -> Waiting:
    """What the loop of the trace's only iterator waited for."""
    (loader,) = trace.loaders
    return waiting(trace, loader)


def milliseconds(trace: minidl.Trace) -> int:
    """From the first event to the last."""
    return (int(trace.events["time"].max()) - int(trace.events["time"].min())) // 1_000_000


def steady(found: Waiting) -> float:
    """The share of its time that the loop waited, without what is paid once."""
    without = found.total - found.once
    return without / max(1, without + found.consumer)


def causes(found: Waiting) -> dict[str, int]:
    """What the loop waited for, ns; the wait for the only first batch is a cause of its own."""
    later = {cause.value: ns - found.opening.get(cause, 0) for cause, ns in found.causes.items()}
    return later | {FIRST: sum(found.opening.values())}


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def inside_next(trace: minidl.Trace) -> Asked:
    """Without workers, all is waiting."""
    events = trace.to_pandas()
    fetches = rows(trace, "fetch", "B")
    inside = [row for row in fetches if events.role[row] == "loader"]
    return Asked(
        f"A loader with `num_workers=0` has fetched {len(fetches)} batches. During how many of these fetches did the loop wait in `next`?",
        Count(len(inside)),
        "In which thread does the fetcher run, if there is no worker?",
        "All of them: the thread that trains is the one that fetches. While it does the one, it cannot do the other, and the times add up.",
        fetches[-1],
    )


@question
def who_waits(trace: minidl.Trace) -> Asked:
    """The loop for the workers, or the workers for the loop."""
    found = waited(trace)
    share = steady(found)
    keeps_up = verdict(trace, next(iter(trace.loaders))).kind is Bound.NOT_INPUT
    (row, *_) = rows(trace, "ready_get", "B") or rows(trace, "result_get", "B")
    fetches = found.work[Cause.SAMPLES] + found.work[Cause.COLLATE]
    return Asked(
        f"{found.batches} batches. All the loop's own work took {found.consumer // 1_000_000} ms; all fetches together took {fetches // 1_000_000} ms, by {workers(trace)} "
        f"worker{'s' * (workers(trace) > 1)}. Who waits for whom?",
        Choice("the workers for the loop" if keeps_up else "the loop for the workers", {
            "the loop for the workers": ("Workers fetch at the same time: divide the time of all fetches by their number.", "loop", "the loop", "consumer", "device", "gpu"),
            "the workers for the loop": ("A worker can only wait if its queue is full. Do these fetch as fast as the loop takes?", "workers", "the workers"),
        }),
        "Divide the fetches' time by the number of workers. Which of the two sides is done later?",
        f"The loop waited {share:.0%} of its time (without what is paid once: the workers' start and end, the first batch). "
        + (
            "That is less than a tenth: the loader keeps up. Workers idle, because their queues are full. A faster loader would change next to nothing."
            if keeps_up
            else f"The workers were busy for {found.busy:.0%} of that time. Whatever makes the step faster is lost here."
        ),
        row,
    )  # fmt: skip


@question
def doing(trace: minidl.Trace) -> Asked:
    """Computing, or waiting."""
    used = waited(trace).cpu
    computing, starved = used.cpu / used.wall, used.no_cpu / used.wall
    options = {
        "computing": ("Compare the CPU time of the fetches (`cpu`) with how long they took.", "compute", "calculating", "decoding"),
        "ready but without a CPU": (f"The kernel counts that (`cpu_wait`). With one worker on {trace.manifest['cpus_allowed']} cores, there is nothing to compete with.", "waiting for a cpu", "without cpu"),
        "waiting for something else: a disk, a network, a lock": ("Compare the CPU time of the fetches (`cpu`) with how long they took.", "waiting", "waiting for something else", "disk", "a disk", "network", "io", "i/o", "lock"),
    }  # fmt: skip
    shares = dict(zip(options, (computing, starved, 1 - computing - starved), strict=True))
    return Asked(
        "The same run. What does the worker do for most of the time of its fetches: computing, or not?",
        Choice(max(shares, key=shares.__getitem__), options),
        "The worker counts the CPU time of each fetch (`cpu`), and the kernel counts how long it was ready and had none (`cpu_wait`). What is left?",
        ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        + ". The answer decides what helps. Workers that wait can wait at the same time: more of them help on the same cores. Workers that compute need cores, or less work.",
        rows(trace, "fetch", "E")[-1],
    )  # fmt: skip


@question
def fewest_workers(*runs: minidl.Trace) -> Asked:
    """Enough is enough."""
    fewest = min(workers(run) for run in runs if verdict(run, next(iter(run.loaders))).kind is Bound.NOT_INPUT)
    shares = ", ".join(f"{workers(run)}: {steady(waited(run)):.0%}" for run in runs)
    one, few = (next(run for run in runs if workers(run) == number) for number in (1, 4))
    fetch, beside, step = median_ms(one, FETCH), median_ms(few, FETCH), median_ms(one, DEVICE_COMPUTE)
    return Asked(
        f"The same training with {', '.join(str(workers(run)) for run in runs)} workers, on {one.manifest['cpus_allowed']} cores. With one, a fetch takes {fetch:.0f} ms, and a step takes the device {step:.0f} ms. With how many workers "
        "(of these) does the loop wait less than a tenth of its time, for the first time?",
        Count(fewest),
        f"How many fetches have to go on at a time, so that one ends every {step:.0f} ms?",
        f"{fetch:.0f} / {step:.0f} is {fetch / step:.1f}, and workers that compute at the same time slow each other down: with four, a fetch takes {beside:.0f} ms. Waiting, without what is paid once: {shares}. More workers do not help: "
        "the device is at work all the time.",
    )  # fmt: skip


@question
def fastest(*runs: minidl.Trace) -> Asked:
    """More is not faster."""
    best = min(runs, key=milliseconds)
    each = ", ".join(f"{workers(run)}: {milliseconds(run)} ms" for run in runs)
    return Asked(
        f"And with how many of them was this short run ({waited(best).batches} batches) over first?",
        Count(workers(best)),
        "What does a worker cost that is not needed?",
        f"All of them: {each}. Each worker has to be started and ended, one after the other, and no step is faster for it. In a run of hours the start is nothing; the "
        "memory of their batches stays.",
        None,
        {max(map(workers, runs)): "The loop did not wait for samples any more, long before that."},
    )  # fmt: skip


@question
def greatest(trace: minidl.Trace) -> Asked:
    """What was paid once."""
    found = waited(trace)
    by_name = causes(found)
    name = max(by_name, key=by_name.__getitem__)
    options = {
        Cause.SAMPLES.value: ("That is what it waits for in a long run. Did this one wait for a batch again, after the first?", "sample", "samples of later batches", "fetching", "decoding"),
        Cause.START_UP.value: ("Forking takes 10 to 20 ms a worker. What happens when all of them are there?", "start", "starting", "start-up", "starting workers", "ending workers"),
        FIRST: ("How long does a fetch take, and who can be fetching before it?", "first batch", "first"),
    }  # fmt: skip
    return Asked(
        f"{workers(trace)} workers send bytes, and the device makes floats of them; {found.batches} batches. What did the loop wait for longest: samples (after the first batch), starting and ending workers, or the first batch?",
        Choice(name, options),
        "How long does one fetch take here, how many workers are there, and how long is the whole run?",
        f"{by_name[name] / 1e6:.0f} ms of {found.total / 1e6:.0f} ms; starting and ending workers took {by_name[Cause.START_UP.value] / 1e6:.0f} ms, and after that the loop hardly waited. Both are paid once in a run, if workers persist. So the summary "
        "says it, but judges the rest by itself. Do not draw conclusions from the first batches of a run.",
        rows(trace, "yield")[0],
    )  # fmt: skip


@question
def blocked_by(trace: minidl.Trace) -> Asked:
    """One batch."""
    found = waited(trace)
    return Asked(
        f"{workers(trace)} workers, batches of {next(iter(trace.loaders.values()))['batch_size']}, in order. Sample {found.sample} takes 0.6 s longer than others. The loop stops, though finished "
        "batches are there. Whose batch does it wait for?",
        Worker(found.worker),
        "In which batch is that sample, counted from 0? And workers take turns.",
        f"Task {found.task} of worker {found.worker}, with sample {found.sample}: {found.share(Cause.HEAD_OF_LINE):.0%} of the waiting. The others are done, and may not have more tasks.",
        rows(trace, "fetch", "B", task=found.task)[0],
    )  # fmt: skip


@question
def helps(in_order: minidl.Trace, out_of_order: minidl.Trace) -> Asked:
    """Out of order."""
    before, after = (
        found.of(Bound.HEAD_OF_LINE) / max(1, found.total - found.once + found.consumer)
        for found in map(waited, (in_order, out_of_order))
    )
    rest = [f"{steady(waited(trace)):.0%}" for trace in (in_order, out_of_order)]
    return Asked(
        f"More workers would not help: they would wait for the same batch. The loop waited {before:.0%} of its time for one batch while later ones were ready. Does `in_order=False` bring that below a hundredth: yes or no?",
        yes_no(after < 0.01, "While worker 1 is busy, do the others have tasks, and does the loop take their batches?"),
        "Is there other work for the loop during these 0.6 s?",
        f"{after:.0%}: whoever is ready is yielded. All waiting together sinks from {rest[0]} to {rest[1]} of the loop's time; the rest is for samples, and more workers would help with that. The price is the order, which then depends on the "
        "machine's timing (05, section 4).",
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
MADE: tuple[tuple[dict[Any, int], int, Bound], ...] = (
    ({Cause.SAMPLES: 50}, 950, Bound.NOT_INPUT), ({Cause.START_UP: 1000, Cause.SAMPLES: 50}, 950, Bound.NOT_INPUT),
    ({FIRST: 1000, Cause.SAMPLES: 50}, 950, Bound.NOT_INPUT),
    ({Cause.SAMPLES: 105}, 1000, Bound.NOT_INPUT), ({Cause.SAMPLES: 120}, 1000, Bound.SUPPLY),  # 105 / 1105 is below a tenth
    ({Cause.SAMPLES: 100, Cause.COLLATE: 100, Cause.HEAD_OF_LINE: 150}, 100, Bound.SUPPLY),
    ({Cause.SAMPLES: 100, Cause.IPC: 100, Cause.HEAD_OF_LINE: 150}, 100, Bound.SUPPLY),
    ({Cause.SAMPLES: 100, Cause.HEAD_OF_LINE: 150, Cause.START_UP: 900}, 100, Bound.HEAD_OF_LINE),
)  # fmt: skip
"""Milliseconds of waiting by cause, the loop's own, and the verdict."""

RUNS = ("workers-0", "workers-2", "workers-8", "starved-gpu", "head-of-line-in-order", "head-of-line-out-of-order")


@exercise
def share_of_waiting(function: Callable[[minidl.Trace], float]) -> str:
    """The first figure of a summary."""
    for name, trace in runs(*RUNS):
        spans = trace.spans()
        took = {code: int((mine["end"] - mine["begin"]).sum()) for code in (NEXT[0], CONSUMER[0]) for mine in [spans[spans["code"] == code]]}  # fmt: skip
        if not took[NEXT[0]]:
            continue  # out of order, a `next` does not begin with its task: the part has none
        wanted = took[NEXT[0]] / (took[NEXT[0]] + took[CONSUMER[0]])
        said = number(function(trace), f"In {name}", "The steps `next` and `consumer`: one share, between 0 and 1.")
        if abs(said - wanted) > 0.005:
            raise Wrong(
                f"In {name}, the loop waited {wanted:.1%} of its time; your function says {said:.1%}.",
                "The steps `next` and `consumer` take turns, and are all that the loop does while it goes on. The share of the first: next / (next + consumer).",
                trace, until=0.3,
            )  # fmt: skip
    return "A summary begins with this figure, less what is paid once: start, end, first batch. Below a tenth, a perfect loader would not be worth the work."


@exercise
def rule(function: Callable[[Mapping[str, int], int], str]) -> str:
    """A verdict."""
    cases = []
    for name in RUNS[1:]:
        trace = opened(name)
        found = waited(trace)
        cases.append((name, causes(found), found.consumer, verdict(trace, next(iter(trace.loaders))).kind))
    for made, ms, kind in MADE:
        by_name = {cause.value: made.get(cause, 0) * 1_000_000 for cause in Cause}
        cases.append(("a made run", by_name | {FIRST: made.get(FIRST, 0) * 1_000_000}, ms * 1_000_000, kind))
    for name, of_causes, consumer, kind in cases:
        wanted = kind.value
        said = function(dict(of_causes), consumer)
        if said != wanted:
            raise Wrong(
                f"{name!r} is {wanted}; your rule says {said!r}.",
                "The steps `worker_start` and `shutdown` are paid once, and so is the first `yield`: leave 'starting and ending workers' and 'the first batch' out. Is the rest a tenth of the loop's time? Then `head of line` against all that makes "
                "batches: samples, collation, pickling and sending.",
                evidence="\n".join(f"{cause:<40} {ns / 1e6:8.1f} ms" for cause, ns in {**of_causes, "the loop's own": consumer}.items()),
            )  # fmt: skip
    return "The same verdicts as `minidl summary`, on five runs and on made ones. The package's rule knows a few more kinds: the sampler, rebuilding and pinning, too few batches to say."
