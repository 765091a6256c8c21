"""The rules on whole states: the live loader's own dispatcher and lifecycles, driven by the trace.

They come last: a rule on a few events is preferred if it finds the same breach.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidl.check.dispatch import orderly
from minidl.check.view import LoaderView, Violation, rule
from minidl.loader.dispatcher import DispatchError
from minidl.loader.protocol import ProtocolError
from minidl.playback.actors import DispatcherReplay, LoaderReplay, PinReplay, WorkerReplay, as_dicts
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions
from minidl.tracefile.events import DoneEvent


@rule(
    "decisions",
    "the replayed dispatcher makes the decisions that the trace shows",
    "The loader did something that its own dispatcher would not do in this state.",
    needs="epoch",
)
def decisions(loader: LoaderView) -> Iterator[Violation]:
    if not loader.multiprocess or loader.capacity is None or not loader.records(loader.received):
        return
    replay = DispatcherReplay(*loader.capacity, loader.in_order, loader.received)
    rows = loader.pick(*DispatcherReplay.READS)
    rows = rows[loader.whole_epoch(rows) & orderly(loader, rows) & (rows >= loader.lacks.since)]
    lost = False
    for row, event in zip(rows.tolist(), as_dicts(loader.events, rows), strict=True):
        if event["code"] == ev.EPOCH[0]:
            lost = False
        if not lost:
            try:
                replay.step(event)
            except DispatchError as error:
                yield loader.broken(str(error), row)
                lost = True


@rule(
    "lifecycle",
    "loader, workers and pin thread do what the protocol's tables allow in their state",
    "An actor did something that its state forbids.",
    needs="all",
)
def lifecycles(loader: LoaderView) -> Iterator[Violation]:
    yield from _followed(loader, LoaderReplay(), loader.pick(*LoaderReplay.READS))
    if loader.pinned and loader.records(ev.PIN_START):
        yield from _followed(loader, PinReplay(), loader.pick(*PinReplay.READS))
    if not loader.multiprocess:
        return
    done = loader.about(ev.DONE_EVENT_SET, DoneEvent.WORKERS)
    set_at = int(loader.time[done[0]]) if len(done) else None
    rows = loader.pick(*WorkerReplay.READS)
    for worker in np.unique(loader.worker[rows]).tolist():
        if worker >= 0:
            yield from _followed(loader, WorkerReplay(worker, set_at), loader.of_worker(rows, worker))


def _followed(
    loader: LoaderView, replay: LoaderReplay | WorkerReplay | PinReplay, rows: Positions
) -> Iterator[Violation]:
    """Take the rows through a replay, up to its first error."""
    for row, event in zip(rows.tolist(), as_dicts(loader.events, rows), strict=True):
        try:
            replay.step(event)
        except ProtocolError as error:
            yield loader.broken(str(error), row)
            return
