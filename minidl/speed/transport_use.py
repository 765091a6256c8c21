"""The transport of a run's batches from the workers to the loader: memory made and mapped, threads, copies, counted.

Interface: `way(trace, loaders, ledger)` -> `Way`; `compared(a, b)`, the differences between two runs with
different transports, as phrases. It counts only; `diff` compares times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.speed.ledger import Copy, Ledger, Slabs
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.words import counted, size

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

_INTO_MEMORY = (Copy.COLLATE, Copy.FEEDER, Copy.SLAB, Copy.PIN)
"""Copies of the data itself. The other copies are of the message that says where the data is."""


@dataclass(frozen=True, slots=True)
class Way:
    """One run's transport.

    transport: "" without workers. batches: sent by workers; segments: new ones in shared memory, without slabs; maps:
    how often the reader received memory and mapped it. feeder: a feeder thread of the worker writes the messages. each:
    bytes of a batch in shared memory; times: how often such a byte was copied.
    """

    transport: str = ""
    batches: int = 0
    segments: int = 0
    slabs: Slabs | None = None
    maps: int = 0
    feeder: bool = False
    each: float = 0.0
    times: float = 0.0

    def memory(self) -> str:
        """The memory of the batches, in words."""
        parts = []
        if self.slabs is not None and self.slabs.made:
            times = self.slabs.used / self.slabs.made
            parts.append(f"{counted(self.slabs.made, 'slab')}, used {times:.3g} times each")
        if self.slabs is not None and self.slabs.alone:
            parts.append(f"{counted(self.slabs.alone, 'slab')} for one batch each")
        if self.segments or not parts:
            parts.append(f"{counted(self.segments, 'new segment')}")
        return " and ".join(parts)


def way(trace: Trace, loaders: tuple[int, ...], params: dict[str, Any], account: Ledger) -> Way:
    """Return the transport of these iterators' batches. account: their ledger."""
    events = trace.events[np.isin(trace.events["loader"], loaders)]
    sent = account.sent
    if params.get("num_workers") == 0 or not len(sent):
        return Way()
    transport = str(params.get("transport") or "upstream")
    made = int(np.isin(events["code"], [ev.SHM_ALLOC, ev.SHM_COPY[0]]).sum())
    slabs = account.slabs
    mapped = events[events["code"] == ev.SLAB_MAP]
    segments = made if slabs is None else slabs.leaves
    by_handle = float(sent["by_handle"].sum())
    copied = sum(float(sent[kind.name.lower()].sum()) for kind in _INTO_MEMORY)
    return Way(
        transport=transport,
        batches=len(sent),
        segments=segments,
        slabs=slabs,
        maps=segments + int(mapped["z"].sum()),
        feeder=bool(_threads(events, ev.RESULT_WRITE[0]) - _threads(events, ev.FETCH[0])),
        each=by_handle / len(sent),
        times=copied / by_handle if by_handle else 0.0,
    )


def _threads(events: Rows, code: int) -> set[tuple[int, int]]:
    rows = events[(events["code"] == code) & (events["worker"] >= 0)]
    return set(zip(rows["process"].tolist(), rows["tid"].tolist(), strict=True))


def compared(a: Way, b: Way) -> Iterator[str]:
    """The differences of B from A: one phrase each for memory, mappings, threads and copies."""
    yield f"its batches were in {b.memory()}, instead of {a.memory()}"
    if a.maps != b.maps:
        yield f"the reader received and mapped memory {_times(b.maps)} instead of {_times(a.maps)}"
    if a.feeder != b.feeder:
        who = "a feeder thread", "the worker itself, without a feeder thread,"
        yield f"{who[not b.feeder]} wrote the messages"
    if a.each and b.each:
        how_often = _rounded(b.times), _rounded(a.times)
        same = how_often[0] == how_often[1]
        yield f"{size(b.each)} per batch were copied {how_often[0]}" + (
            " in both" if same else f" instead of {how_often[1]}"
        )


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _rounded(times: float) -> str:
    return _times(round(times)) if abs(times - round(times)) < 0.05 else f"{times:.2f} times"
