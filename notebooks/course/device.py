"""Questions and checks of 07_device. All runs are recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import minidl
from course import opened
from course.asking import Asked, Choice, Count, Share, question, rows, yes_no
from course.checking import Wrong, exercise, runs, whole
from minidl.speed.device_use import device_use
from minidl.tracefile.events import COPY, DEVICE_COMPUTE, H2D

TASK = 5
"""A task of the runs: the host is two steps ahead of the device, and nothing starts up any more."""


def median_ms(trace: minidl.Trace, code: tuple[int, int]) -> float:
    """How long a step of this kind takes, ms, in the middle of all."""
    spans = trace.spans()
    mine = spans[spans["code"] == code[0]]
    return float(np.median(mine["end"] - mine["begin"])) / 1e6


@question
def pinner(trace: minidl.Trace, task: int = TASK) -> Asked:
    """Who pins."""
    (row,) = rows(trace, "pin", "B", task=task)
    return Asked(
        "Pinning copies a batch into page-locked memory, which takes time. Which thread does it?",
        Choice("another thread of the loop's process", {
            "the worker's": ("The device is told of locked memory by the process that uses it. A worker does not use it.", "worker", "workers"),
            "the loop's own, in `next`": ("It is in the right process. But then each copy would hold up the training.", "loop", "main", "loader", "next", "the loop's own"),
            "another thread of the loop's process": ("", "pin thread", "pin memory thread", "pin-memory thread", "other", "another"),
            "nobody: the device locks what it reads": ("The device cannot lock a page. The system has to, before the copy.", "nobody", "none", "device"),
        }),
        "Memory is locked for a device by the process that uses the device. Must your loop wait for it, though?",
        "The pin-memory thread, in your loop's process: it reads the result queue, copies the batch into locked memory, and puts it into the ready queue. Your loop trains meanwhile. "
        "(Locked memory need not be written by the process that locked it: with `transport=\"arena\"`, 11, workers write straight into slabs that the loop's process has locked.)",
        row,
    )  # fmt: skip


@question
def returns_early(trace: minidl.Trace, task: int = TASK) -> Asked:
    """From pageable memory, the host is busy until its memory has been read."""
    (begin,), (called,) = (rows(trace, "h2d", phase, task=task) for phase in "BE")
    pageable = int(trace.to_pandas().pageable[begin]) > 0
    call, copy = (median_ms(trace, code) for code in (H2D, COPY))
    why = (
        "The device can only read memory that stays where it is. Ordinary memory may be swapped out, so CUDA first copies it, piece by piece, into a pinned buffer of its own, and its call returns "
        f"once all data is staged there; the copy of the last piece may end later. In the middle of this run's batches the call takes {call:.1f} ms, the copy {copy:.1f} ms: they end together."
        if pageable
        else f"The memory stays where it is, so the device reads it by itself. The call only puts the copy into a stream. In the middle of this run's batches it takes {call:.2f} ms, the copy {copy:.2f} ms: "
        "`h2d` ends before `copy`."
    )
    return Asked(
        f"The batch lies in {'ordinary (pageable)' if pageable else 'pinned'} memory, and is copied with `non_blocking=True`. May the call return while a part of the batch is "
        "still to be read: yes or no?",
        yes_no(not pageable, "`non_blocking` is a wish. Who copies the data out of ordinary memory, and when?" if pageable else "Who reads the memory: a thread of the host, or the device?"),
        "Compare how long `h2d` (the call, on the host) takes with how long `copy` takes (on the device)."
        if pageable
        else "Compare the end of `h2d` (the call, on the host) with the begin and the end of `copy` (on the device).",
        why,
        called,
    )  # fmt: skip


@question
def copied_meanwhile(trace: minidl.Trace, task: int = TASK) -> Asked:
    """One batch ahead."""
    (handed,) = rows(trace, "hand_over", task=task)
    begun = [int(trace.events["task"][row]) for row in rows(trace, "copy", "B") if row < handed]
    return Asked(
        f"The loop is handed batch {task}, on the device. The copy of which batch has been started last, at that moment?",
        Count(begun[-1]),
        "If the copy of a batch began only when it is asked for, what would the device do meanwhile?",
        f"The `DeviceLoader` starts the next copy before it hands a batch over, so that it runs while the device computes on batch {task}.",
        handed,
        {task: "Then the device would wait for each copy. There is a loader that is one ahead."},
    )  # fmt: skip


@question
def who_waits(trace: minidl.Trace, task: int = TASK) -> Asked:
    """An event orders two streams."""
    (row,) = rows(trace, "device_wait", "B", task=task)
    return Asked(
        "Copy and computation are in two streams, which know nothing of each other. Who waits until the copy is done, before the computation reads the "
        "batch?",
        Choice("the computing stream", {
            "the host": ("Then the host could not prepare the next step meanwhile: nothing would be hidden.", "cpu", "loop", "main thread"),
            "the computing stream": ("", "stream", "device", "gpu", "compute stream"),
            "the copying stream": ("It has to run first: it has nothing to wait for.", "copy stream", "side stream"),
            "nobody": ("Then the computation might read a batch that is half there, and no error would say so.", "none", "no one"),
        }),
        "In which lane is `device_wait`: the consumer's, or the device's?",
        "An event is recorded behind the copy, and the computing stream is told to wait for it. The host goes on at once. Without it, the computation might "
        "read a batch that is half there, and no error would say so.",
        row,
    )  # fmt: skip


@question
def hidden(trace: minidl.Trace) -> Asked:
    """How much of the copying no stream has waited for."""
    (loader,) = trace.loaders
    used = device_use(trace, loader)
    assert used is not None
    return Asked(
        "How much of the time of all copies and transforms was hidden, that is: the computing stream did not wait for it? Nearly all, about half, or hardly any?",
        Share(used.hidden_share, 1),
        "A step takes the device fifty times as long as a copy, and the copy is one batch ahead.",
        f"{used.hidden_share:.0%}. {used.text()}. Hidden does not say that the device computed meanwhile: it may have had nothing to do for another reason.",
        slips={
            "hardly any": "So it is without a loader for the device: each copy is asked for when it is needed.",
            "about half": "The first copy is slow, but was the computing stream at its mark yet? And the other ones?",
        },
    )


@question
def times_the_bytes(floats: minidl.Trace, bytes_: minidl.Trace) -> Asked:
    """Where to make floats."""
    most = [int(trace.to_pandas().bytes[rows(trace, "copy", "B")].max()) for trace in (floats, bytes_)]
    return Asked(
        "One run sends images as float32, normalised by the workers. The other one sends them as bytes (uint8), and the device normalises. How many times as many bytes go over "
        "the bus in the first?",
        Count(round(most[0] / most[1])),
        "How many bytes has a float32, how many a uint8?",
        f"{most[0]:,} against {most[1]:,} bytes a batch. The same factor holds for shared memory and for pinning: the last step that makes data larger belongs to the "
        "device.",
        rows(floats, "copy", "B")[0],
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
def _moved() -> tuple[str, minidl.Trace]:
    """A made run of recorded copies, each moved to the end of a step: it begins in the step, and ends after it."""
    trace = opened("healthy-8-pinned")
    spans, is_copy, last = trace.spans(), np.isin(trace.events["code"], COPY), 0
    out, longest = trace.cut(~is_copy), 4e6 * median_ms(trace, COPY)
    ends = spans["end"][spans["code"] == DEVICE_COMPUTE[0]]
    for copy in spans[spans["code"] == COPY[0]]:
        middle = (copy["begin"] + copy["end"]) // 2
        later = ends[(ends >= middle) & (ends > last)]
        if len(later) and copy["end"] - copy["begin"] < longest:  # the first one is much longer: no two may overlap
            own, last = trace.events[is_copy & (trace.events["task"] == copy["task"])], int(later[0])
            own["time"] += last - middle
            out.events = np.concatenate([out.events, own])
    out.events = out.events[np.argsort(out.events["time"], kind="stable")]
    return "'healthy-8-pinned' with its copies at the ends of steps", out


@exercise
def overlap(function: Callable[[minidl.Trace], int]) -> str:
    """Nanoseconds of copies during which the device computed: not what `device_use` calls hidden."""
    told = []
    for name, trace in (*runs("healthy-8-pinned", "healthy-8-pageable", "workers-2"), _moved()):
        spans = trace.spans()
        copies, steps = (spans[spans["code"] == code[0]] for code in (COPY, DEVICE_COMPUTE))
        wanted = sum(
            max(0, int(min(copy["end"], step["end"])) - int(max(copy["begin"], step["begin"])))
            for copy in copies
            for step in steps
        )
        said = whole(
            function(trace), f"In {name}", "The steps `copy` and `device_compute`: whole nanoseconds, in one sum."
        )
        if said != wanted:
            of_all = int((copies["end"] - copies["begin"]).sum())
            about = " That is the time of all copies, whatever ran beside them." if said == of_all else ""
            raise Wrong(
                f"In {name}, the device computed during {wanted:,} ns of its copies; your function says {said:,}.{about}",
                "The steps `copy` and `device_compute`, both by the device's clock. Two spans overlap from the later begin to the earlier end, if that comes after.",
                trace, since=0.5, until=0.65,
            )  # fmt: skip
        used = device_use(trace, next(iter(trace.loaders)))
        told.append(
            f"{name}: {wanted / int((copies['end'] - copies['begin']).sum()):.1%} of the copies' time ran beside computation; {used.hidden_share if used else 0:.0%} was hidden"
        )
    del told[6:]  # the made run says nothing of a device
    return (
        f"{'. '.join(told[::2])}. The two figures differ: the stream did not wait for a copy, and yet had no step to do meanwhile. With eight workers that is so in the beginning: the first copy "
        "from pinned memory takes 10 ms, as much as twenty others, because CUDA starts up, and there is no step yet. With two workers it is so again and again: the device has done all steps before the next batch comes."
    )


@exercise
def ahead(function: Callable[[Iterable[Any], Callable[[Any], Any]], Iterator[Any]]) -> str:
    """A loop that is one copy ahead."""
    for count in (3, 1, 0, 7):
        told: list[str] = []
        taken: list[int] = []

        def copy(batch: int, told: list[str] = told) -> str:
            told.append(f"copy of batch {batch} begins")
            return f"batch {batch} on the device"

        def loader(count: int = count, taken: list[int] = taken) -> Iterator[int]:
            for batch in range(count):
                taken.append(batch)
                yield batch

        for number, batch in enumerate(itertools.islice(function(loader(), copy), count + 1)):  # it may never end
            told.append(f"{batch} is handed over")
            if len(taken) > number + 2:
                raise Wrong(
                    f"{count} batches: when {batch} was handed over, {len(taken)} had been taken from the loader.",
                    "The step `yield`: a batch that is taken lies in memory. To be one copy ahead takes one batch more.", evidence="\n".join(told),
                )  # fmt: skip
        begins = [f"copy of batch {n} begins" for n in range(count)]
        handed = [f"batch {n} on the device is handed over" for n in range(count)]
        wanted = [*begins[:1]]
        for n in range(count):
            wanted += [*begins[n + 1 : n + 2], handed[n]]
        if told != wanted:
            place = next(
                (n for n, (a, b) in enumerate(zip(told, wanted, strict=False)) if a != b), min(len(told), len(wanted))
            )
            raise Wrong(
                f"{count} batches. Step {place} should be: {wanted[place] if place < len(wanted) else 'none'}. Yours: {told[place] if place < len(told) else 'none'}.",
                "The steps `h2d` and `hand_over`: the copy of the next batch begins before a batch is handed over, and only of the next one: each copy that is ahead takes "
                "memory on the device.",
                evidence="\n".join(told),
            )  # fmt: skip
    return "One copy is ahead, never two, and the last batch is not lost. It is what `DeviceLoader` does, with a stream and an event around each copy."
