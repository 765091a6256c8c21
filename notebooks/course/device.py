"""Questions and checks of 07_device. All runs are recorded."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import minidl
from course import recording
from course.asking import Asked, Choice, Count, Share, question, rows
from course.checking import Wrong, exercise
from minidl.speed.device_use import device_use
from minidl.tracefile.events import COPY, DEVICE_COMPUTE

TASK = 5
"""A task in the middle of the runs."""

YES_NO = {"yes": (), "no": ()}


@question
def pinner(trace: minidl.Trace, task: int = TASK) -> Asked:
    """Who pins."""
    (row,) = rows(trace, "pin", "B", task=task)
    return Asked(
        "Pinning copies a batch into page-locked memory, which takes time. Which thread does it: the worker's, the loop's own (in `next`), or another one?",
        Choice("another one", {
            "the worker's": ("worker", "workers"),
            "the loop's own": ("loop", "main", "loader", "next", "the loop"),
            "another one": ("pin thread", "pin memory thread", "pin-memory thread", "other", "another"),
        }),
        "A worker cannot: page-locked memory belongs to one process. Must your loop wait for it, though?",
        "The pin-memory thread, in your loop's process: it reads the result queue, pins, and puts the batch into the ready queue. Your loop trains meanwhile.",
        row,
    )  # fmt: skip


@question
def returns_early(trace: minidl.Trace, task: int = TASK) -> Asked:
    """From pageable memory, the host waits for the copy."""
    (called,), (copied,) = rows(trace, "h2d", "E", task=task), rows(trace, "copy", "E", task=task)
    pageable = int(trace.to_pandas().pageable[rows(trace, "h2d", "B", task=task)[0]]) > 0
    early = trace.events["time"][called] < trace.events["time"][copied]
    why = (
        "The device can only read memory that stays where it is. Ordinary memory may be swapped out, so the driver copies it piece by piece through a pinned "
        "buffer of its own, and the host's thread is busy until the last piece is in there: `h2d` ends after `copy`."
        if pageable
        else "The memory stays where it is, so the device reads it by itself. The call only puts the copy into a stream: `h2d` ends before `copy`."
    )
    return Asked(
        f"The batch lies in {'ordinary (pageable)' if pageable else 'pinned'} memory, and is copied with `non_blocking=True`. Does the call return before the copy is "
        "done: yes or no?",
        Choice("yes" if early else "no", YES_NO),
        "Compare the end of `h2d` (the call, on the host) with the end of `copy` (on the device).",
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
        "Copy and computation are in two streams, which know nothing of each other. Who waits until the copy is done, before the computation reads the batch: the host, "
        "the computing stream, or nobody?",
        Choice("the computing stream", {
            "the host": ("host", "cpu", "the loop", "main thread"),
            "the computing stream": ("stream", "computing stream", "the device", "device", "gpu", "compute stream"),
            "nobody": ("none", "no one"),
        }),
        "In which lane is `device_wait`: the consumer's, or the device's?",
        "An event is recorded behind the copy, and the computing stream is told to wait for it. The host goes on at once. Without it, the computation might "
        "read a batch that is half there, and no error would say so.",
        row,
    )  # fmt: skip


@question
def hidden(trace: minidl.Trace) -> Asked:
    """How much of the copying costs nothing."""
    (loader,) = trace.loaders
    used = device_use(trace, loader)
    assert used is not None
    return Asked(
        "How much of the time of all copies and transforms was hidden, so that the computing stream did not stand still for it: nearly all, about half, or hardly any?",
        Share(used.hidden_share, 1),
        "A step takes ten times as long as a copy, and the copy is one batch ahead.",
        f"{used.hidden_share:.0%}. {used.text()}.",
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
def _opened(name: str) -> minidl.Trace:
    with contextlib.redirect_stdout(io.StringIO()):
        return recording(name)


@exercise
def overlap(function: Callable[[minidl.Trace], int]) -> str:
    """Nanoseconds of copies during which the device computed."""
    for name in ("healthy-8-pinned", "healthy-8-pageable"):
        trace = _opened(name)
        spans = trace.spans()
        copies, steps = (spans[spans["code"] == code[0]] for code in (COPY, DEVICE_COMPUTE))
        wanted = sum(
            max(0, int(min(copy["end"], step["end"])) - int(max(copy["begin"], step["begin"])))
            for copy in copies
            for step in steps
        )
        said = function(trace)
        if int(said) != wanted:
            whole = int((copies["end"] - copies["begin"]).sum())
            about = " That is the time of all copies, hidden or not." if int(said) == whole else ""
            raise Wrong(
                f"In {name!r}, the device computed during {wanted:,} ns of its copies; your function says {int(said):,}.{about}",
                "The steps `copy` and `device_compute`, both by the device's clock. Two spans overlap from the later begin to the earlier end, if that comes after.",
                trace, since=0.18, until=0.26,
            )  # fmt: skip
    return "A copy is hidden as far as it overlaps with computation. In the pageable run less of it is, though the copies take longer."


@exercise
def ahead(function: Callable[[Iterable[Any], Callable[[Any], Any]], Iterator[Any]]) -> str:
    """A loop that is one copy ahead."""
    for count in (3, 1, 0):
        told: list[str] = []

        def copy(batch: int, told: list[str] = told) -> str:
            told.append(f"copy of batch {batch} begins")
            return f"batch {batch} on the device"

        for batch in function(iter(range(count)), copy):
            told.append(f"{batch} is handed over")
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
