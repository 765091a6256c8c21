"""Rules on the device stage: its depth, the copy before the use, and that nothing which was enqueued is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidl.check.view import LoaderView, Violation, rule
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions
from minidl.tracefile.words import name_of


@rule(
    "device-depth",
    "the number of batches that are enqueued to a device and not handed out stays within the depth",
    "The device's memory is not bounded.",
    needs="all",
)
def device_depth(loader: LoaderView) -> Iterator[Violation]:
    under_way, depth = 0, 0
    for row in loader.pick(ev.DEVICE_START, ev.H2D[0], ev.HAND_OVER).tolist():
        code = loader.code[row]
        if code == ev.DEVICE_START:
            under_way, depth = 0, int(loader.x[row])
        else:
            under_way += 1 if code == ev.H2D[0] else -1
        if under_way > depth:
            yield loader.broken(f"{under_way} batches are under way; the depth is {depth}", row)
        elif under_way < 0:
            yield loader.broken("nothing was under way", row, missing=name_of(ev.H2D[0]))


@rule(
    "device-order",
    "the consumer's stream goes on with a batch only when its copy and its transform are done",
    "The training step reads memory that is still being written: its results are sometimes wrong.",
    needs="all",
)
def device_order(loader: LoaderView) -> Iterator[Violation]:
    waits = loader.pick(ev.DEVICE_WAIT[1])
    used = dict(zip(loader.x[waits].tolist(), waits.tolist(), strict=True))  # the last one: an interrupt may end a wait
    error = int(loader.y[loader.pick(ev.CLOCK_CALIBRATION)].max(initial=0))
    for code in (ev.COPY[1], ev.TRANSFORM[1]):
        done = loader.pick(code)
        of_turn = dict(zip(_turns(loader, done), done.tolist(), strict=True))
        for turn, row in used.items():
            late = int(loader.time[of_turn.get(turn, row)] - loader.time[row])
            if late > 2 * error:  # both were stamped by the device's clock, each give or take the error
                yield loader.broken(f"its {name_of(code)} comes {late} ns later", row, of_turn[turn])


@rule(
    "device-end",
    "when an iteration of the device stage ends, each batch that it enqueued was copied, and was handed out or dropped",
    "A batch was lost between the loader and the training step, or its memory was freed during its copy.",
    needs="all",
)
def device_end(loader: LoaderView) -> Iterator[Violation]:
    starts, ends = loader.pick(ev.DEVICE_START), loader.pick(ev.DEVICE_END)
    enqueued, left = loader.pick(ev.H2D[1]), loader.pick(ev.HAND_OVER)
    for start, end in zip(starts, ends, strict=False):
        its, gone = (rows[(rows > start) & (rows < end)] for rows in (enqueued, left))
        if (len(gone), len(its) - len(gone)) != (loader.x[end], loader.y[end]):
            told = f"{len(its)} were enqueued and {len(gone)} left, not {loader.x[end]} with {loader.y[end]} dropped"
            yield loader.broken(told, end, start)
    if loader.trace.device_failure(loader.number):
        return
    copied = set(_turns(loader, loader.pick(ev.COPY[1])))
    for row, turn in zip(enqueued.tolist(), loader.y[enqueued].tolist(), strict=True):
        over = ends[ends > row]
        if turn not in copied and len(over):
            yield loader.broken("a batch's copy did not end", over[0], row, missing=name_of(ev.COPY[1]))


def _turns(loader: LoaderView, rows: Positions) -> list[int]:
    """The turn of each row of a copy's or a transform's end."""
    in_y = loader.code[rows] == ev.COPY[1]
    turns: list[int] = np.where(in_y, loader.y[rows], loader.x[rows]).tolist()
    return turns
