"""The byte ledger: every copy of every batch, the thread that made it, and whether it was necessary.

Interface: `ledger(trace)` -> `Ledger`; its `copies` (one row a copy) and `batches` (one row a batch) are structured
arrays; `text()` has a line for each kind of copy, with the remedy if copies were avoidable.

Rules of use: the figures come from the trace's events, to the byte; nothing is estimated. A copy that did not end is
left out, and mentioned in `notes`. A copy to a device is in a trace only if a DeviceLoader makes it.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows
from minidl.tracefile.batches import epochs, keys, keys_at, sums
from minidl.tracefile.loaders import in_slabs
from minidl.tracefile.words import counted, percent, size

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


LARGE_PAYLOAD = 65_536
"""The capacity of a Linux pipe in bytes. The writer of a larger message waits for the reader in the middle of it,
and meanwhile holds the write lock that all workers share."""

HANDLE_BYTES = 256
"""The most bytes of a tensor's handle in a message (measured: 52 to 250 by descriptor, 105 to 230 by file name)."""

MANY_TENSORS = 16
"""With more tensors in a message, the ledger remarks on one segment and one descriptor for each."""


class Copy(enum.IntEnum):
    """The kinds of copies, in the order of a batch's way."""

    INDEX_WRITE = 1
    COLLATE = 2
    FEEDER = 3
    SLAB = 10
    PICKLE = 4
    WRITE = 5
    READ = 6
    REBUILD = 7
    PIN = 8
    H2D = 9


class Why(enum.IntEnum):
    """Why a copy was avoidable."""

    NEEDED = 0
    NOT_SHARED_YET = 1  # the batch was in private memory when the worker sent it
    PICKLED_DATA = 2  # the message is too large for handles: it contains the data itself
    MANY_TENSORS = 3  # a message of handles, one for each of many tensors
    PAGEABLE = 4  # copied to a device from memory that is not pinned


WHAT = {
    Copy.INDEX_WRITE: "indices into a pipe, by an index feeder",
    Copy.COLLATE: "samples into shared memory, by the worker",
    Copy.FEEDER: "tensors into shared memory, by the feeder",
    Copy.SLAB: "tensors and large messages into a slab, by the worker",
    Copy.PICKLE: "the rest into a message, by the feeder",
    Copy.WRITE: "the message into the pipe, by the feeder",
    Copy.READ: "the message out of the pipe, by the reader",
    Copy.REBUILD: "the message into objects, by the reader",
    Copy.PIN: "tensors into pinned memory, by the pin thread",
    Copy.H2D: "tensors to the device, by the device stage",
}
"""The bytes of each copy, and the thread that makes it. Feeder: of the worker; reader: the loader or its pin thread."""

WHAT_WITH_SLABS = WHAT | {
    Copy.INDEX_WRITE: "indices into the worker's socket, by the loader",
    Copy.COLLATE: "samples into a slab, by the worker",
    Copy.PICKLE: "the rest into a message, by the worker",
    Copy.WRITE: "the message into the worker's socket, by the worker",
    Copy.READ: "the message out of the socket, by the reader",
}
"""The same with the transport "arena", which has no feeder thread."""

REMEDY = {
    Why.NOT_SHARED_YET: "default_collate stacks tensors and arrays straight into shared memory; numbers, unbatched "
    "samples and the results of your own collate_fn are in private memory until the feeder copies them",
    Why.PICKLED_DATA: "send the data as a tensor, which travels by handle, or send less data",
    Why.MANY_TENSORS: "join the tensors: each needs its own segment, descriptor and mapping",
    Why.PAGEABLE: "use pin_memory=True: from pageable memory the driver first copies into its staging buffer, and "
    "the host waits for that copy",
}

_REMEDY_WITH_SLABS = (
    "use default_collate, which stacks tensors and arrays straight into a slab: other large data is copied there"
)

COPY = np.dtype(
    [
        ("loader", "<u2"),
        ("epoch", "<i8"),  # -1 = the trace does not say
        ("task", "<i8"),
        ("worker", "<i8"),  # whose batch it is
        ("kind", "u1"),  # a Copy
        ("why", "u1"),  # a Why
        ("process", "<u4"),  # the copying process (index in Trace.processes) and thread
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("time", "<i8"),  # ns, CLOCK_MONOTONIC, of its begin
        ("bytes", "<i8"),
        ("tensors", "<i8"),  # the number of tensors of the bytes; for a message, of those with a handle in it
    ]
)
"""One copy of a batch, or of a part of it."""

BATCH = np.dtype(
    [
        ("loader", "<u2"),
        ("epoch", "<i8"),
        ("task", "<i8"),
        ("worker", "<i8"),
        ("outcome", "<i8"),  # an Outcome; -1 = not recorded
        ("yielded", "?"),  # handed to the consumer
        ("tensors", "<i8"),  # in the message
        ("by_handle", "<i8"),  # bytes that travelled in shared memory without a copy
        ("payload", "<i8"),  # bytes of the pickle: handles, and everything except tensors
        *((kind.name.lower(), "<i8") for kind in Copy),  # bytes of each kind of copy
        ("copied", "<i8"),  # of all kinds except COLLATE: after the batch was made
        ("avoidable", "<i8"),
    ]
)
"""One task, with the bytes of its copies."""


@dataclass(frozen=True, repr=False)
class Ledger:
    """Copies: array of COPY, by time. batches: array of BATCH, by loader, epoch and task.

    slabs: the life of the slabs, if all batches travelled in slabs. notes: what the figures do not show.
    """

    copies: Rows
    batches: Rows
    notes: list[str] = field(default_factory=list)
    slabs: Slabs | None = None

    @property
    def sent(self) -> Rows:
        """The batches that workers sent, without tasks that ended in an error or in exhaustion."""
        there = np.isin(self.batches["outcome"], [-1, ev.Outcome.DATA]) & (self.batches["payload"] > 0)
        return self.batches[there]

    @property
    def copies_per_byte(self) -> float:
        """How often a byte that reached the loader's process was copied after its batch was made; NaN without any.

        Collation makes the batch, so it is no such copy; the trace only has its bytes in shared memory.
        """
        reached = int(self.sent["by_handle"].sum() + self.sent["payload"].sum())
        return float(self.sent["copied"].sum() / reached) if reached else float("nan")

    def moved(self, *kinds: Copy) -> tuple[int, int]:
        """The bytes and the number of these kinds of copies."""
        rows = self.copies[np.isin(self.copies["kind"], kinds)]
        return int(rows["bytes"].sum()), len(rows)

    def text(self) -> str:
        """One line for each kind: total bytes, bytes per batch, copies, avoidable share; remedies below."""
        lines = [self._headline()]
        if len(self.copies):
            lines.append(f"  {'copy':<12}{'bytes':>11}{'per batch':>12}{'copies':>9}{'avoidable':>11}  what")
        for kind in Copy:
            lines += self._lines(kind, self.copies[self.copies["kind"] == kind])
        lines += [f"  {self.slabs.text()}"] if self.slabs is not None else []
        return "\n".join([*lines, *(line for note in self.notes for line in _wrapped(note, 2))])

    def _lines(self, kind: Copy, rows: Rows) -> Iterator[str]:
        """Yield the line of one kind of copy, and its remedies."""
        if not len(rows):
            return
        all_of, spared, sent = int(rows["bytes"].sum()), rows[rows["why"] != Why.NEEDED], len(self.sent)
        name = kind.name.lower().replace("_", " ")
        each = size(all_of / sent) if sent else "-"
        share = percent(int(spared["bytes"].sum()) / all_of) if all_of else "-"
        what = (WHAT if self.slabs is None else WHAT_WITH_SLABS)[kind]
        yield f"  {name:<12}{size(all_of):>11}{each:>12}{len(rows):>9}{share:>11}  {what}"
        for why in map(Why, np.unique(spared["why"]).tolist()):
            known = _REMEDY_WITH_SLABS if kind is Copy.SLAB else REMEDY[why]
            yield from _wrapped(f"{why.name.lower().replace('_', ' ')}: {known}", 8)

    def _headline(self) -> str:
        sent = self.sent
        if not len(sent):
            return "no worker sent a batch to the loader"
        by_handle, payload, tensors = (sent[name].mean() for name in ("by_handle", "payload", "tensors"))
        return (
            f"{counted(len(sent), 'batch was', 'batches were')} sent, on average {size(by_handle)} "
            f"{'by handle' if self.slabs is None else 'in slabs'} in {tensors:.3g} tensors and "
            f"{size(payload)} pickled; after collation each byte was copied {self.copies_per_byte:.2f} times"
        )

    def __repr__(self) -> str:
        avoidable = int(self.batches["avoidable"].sum())
        made, copied = int(self.batches["collate"].sum()), int(self.batches["copied"].sum())
        return (
            f"<Ledger: {len(self.batches)} batches, {size(made)} collated, {size(copied)} copied, "
            f"{size(avoidable)} of it avoidable>"
        )


@dataclass(frozen=True, slots=True)
class Slabs:
    """The life of slabs.

    made: new ones for repeated use; used: how often these were taken; alone: made for one batch only, with alone_bytes
    in all; kept, lost: taken out of use, because a forked child may see them, or their descriptor did not arrive;
    leaves: parts of batches that travelled in a segment each; most: the most slabs in use at a time; most_bytes: their
    bytes; budget: bytes of slabs that a worker may keep for repeated use, 0 = unknown; locked: page-locked for a
    device, with locked_bytes in all; simulated: whether that device is.
    """

    made: int
    used: int
    alone: int
    kept: int
    lost: int
    leaves: int
    most: int
    most_bytes: int
    alone_bytes: int = 0
    budget: int = 0
    locked: int = 0
    locked_bytes: int = 0
    simulated: bool = False

    def text(self) -> str:
        """One line: the number of slabs, and the exceptions."""
        used = f", each used {self.used / self.made:.3g} times on average" if self.made else ""
        budget = f" of {size(self.budget)} (MINIDL_ARENA_BYTES)" if self.budget else ""
        made, locked, alone, kept, lost = (
            counted(number, "slab") for number in (self.made, self.locked, self.alone, self.kept, self.lost)
        )
        parts = {
            f"{made} made{used}; at most {self.most} in use at once ({size(self.most_bytes)})": True,
            f"{locked} page-locked ({size(self.locked_bytes)}), so no pin copy{' (simulated)' * self.simulated}": (
                self.locked
            ),
            f"{alone} ({size(self.alone_bytes)}) for one batch only, beyond a worker's budget{budget} for reusable "
            "slabs": self.alone,
            f"{kept} given up, because a forked process may see them": self.kept,
            f"{lost} whose descriptor did not arrive": self.lost,
            f"{counted(self.leaves, 'part')} of batches in a segment each, as torch sends them": self.leaves,
        }
        return "slabs: " + "; ".join(text for text, there in parts.items() if there)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=" " * indent, subsequent_indent=" " * indent)


def slabs_of(events: Rows, loaders: Mapping[int, Mapping[str, Any]]) -> Slabs:
    """Count the life of the slabs in these events. loaders: the iterators' parameters, by number."""
    taken, released = (events[events["code"] == code] for code in (ev.SLAB_TAKE, ev.SLAB_RELEASE))
    ends = released["z"].tolist()
    alone = taken[taken["z"] == ev.SlabSource.ALONE]
    budgets = [loaders.get(number, {}).get("arena_bytes") for number in np.unique(events["loader"]).tolist()]
    sources = taken["z"].tolist()
    locked = events[(events["code"] == ev.SLAB_LOCK) & (events["x"] > 0)]
    changes = np.concatenate([np.ones(len(taken), np.int64), -np.ones(len(released), np.int64)])
    times = np.concatenate([taken["time"], released["time"]])
    _, in_use = sums(times, changes)
    _, in_bytes = sums(times, changes * np.concatenate([taken["y"], released["y"]]))
    return Slabs(
        made=sources.count(ev.SlabSource.NEW),
        used=len(taken) - len(alone),
        alone=len(alone),
        kept=ends.count(ev.SlabEnd.KEPT),
        lost=ends.count(ev.SlabEnd.LOST),
        leaves=int(events["x"][events["code"] == ev.SLAB_FALLBACK].sum()),
        most=int(in_use.max(initial=0)),
        most_bytes=int(in_bytes.max(initial=0)),
        locked=len(locked),
        locked_bytes=int(locked["x"].sum()),
        simulated=bool(locked["z"].any()),
        alone_bytes=int(alone["y"].sum()),
        budget=max((number for number in budgets if isinstance(number, int)), default=0),
    )


def ledger(trace: Trace) -> Ledger:
    """Account for the bytes of `trace`. Article 3 §summary lists the copies."""
    spans, reads = trace.spans(), _reads(trace)
    closed = spans[(spans["end"] >= 0) | _was_read(trace, spans, reads)]
    copies = np.concatenate([*_copies(trace, closed), reads])
    copies = copies[copies["task"] >= 0]  # the rest belongs to sentinels and to resumptions
    copies["epoch"] = epochs(trace.events, copies["loader"], copies["time"])
    copies["why"] = _why(copies, in_slabs(trace))
    copies = copies[np.argsort(copies["time"], kind="stable")]
    batches = _batches(trace, copies, closed)
    notes = [*_pageable(trace, batches), *_blind(copies, batches), *_left_out(trace, spans, closed, copies)]
    return Ledger(copies, batches, notes, _slabs(trace, np.unique(batches["loader"])))


def part(trace: Trace, account: Ledger, loaders: Sequence[int]) -> Ledger:
    """The part of the trace's ledger that is about these iterators, without notes."""
    copies, batches = (rows[np.isin(rows["loader"], loaders)] for rows in (account.copies, account.batches))
    return Ledger(copies, batches, [], _slabs(trace, np.unique(batches["loader"])))


def _slabs(trace: Trace, senders: Ints) -> Slabs | None:
    """The life of the slabs of iterators; None unless all of them send in slabs."""
    if not len(senders) or not np.isin(senders, in_slabs(trace)).all():
        return None
    return slabs_of(trace.events[np.isin(trace.events["loader"], senders)], trace.loaders)


def _copies(trace: Trace, spans: Rows) -> list[Rows]:
    """The copies of each kind. The event table declares which field of a span holds the bytes."""
    alloc, filled = trace.select("shm_alloc"), trace.select("slab_send")
    moved = filled[filled["z"] > 0]
    sent = spans[spans["code"] == ev.H2D[0]]
    pinned, pageable = sent[(sent["bx"] > 0) | (sent["by"] == 0)], sent[sent["by"] > 0]
    unpinned = _of(Copy.H2D, pageable, pageable["by"], np.where(pageable["bx"] > 0, 0, pageable["bz"]))
    unpinned["why"] = Why.PAGEABLE
    return [
        _of(Copy.H2D, pinned, pinned["bx"], pinned["bz"]),
        unpinned,
        _of(Copy.COLLATE, alloc, alloc["x"], 1, "time"),
        _of(Copy.COLLATE, filled, filled["y"] - filled["z"], 0, "time"),
        _of(Copy.SLAB, moved, moved["z"], 0, "time"),
        *(
            _of(kind, mine := spans[spans["code"] == code], mine[size_in], mine[count_in] if count_in else one)
            for kind, code, size_in, count_in, one in (
                (Copy.INDEX_WRITE, ev.INDEX_WRITE[0], "bx", "", 0),
                (Copy.FEEDER, ev.SHM_COPY[0], "bx", "", 1),
                (Copy.PICKLE, ev.RESULT_PICKLE[0], "ex", "ey", 0),
                (Copy.WRITE, ev.RESULT_WRITE[0], "bx", "", 0),
                (Copy.REBUILD, ev.RESULT_REBUILD[0], "bx", "ex", 0),
                (Copy.PIN, ev.PIN[0], "ex", "", 0),
            )
        ),
    ]


def _of(kind: Copy, rows: Rows, amount: Ints, tensors: Ints | int, time: str = "begin") -> Rows:
    out = np.zeros(len(rows), COPY)
    for name in ("loader", "task", "worker", "process", "pid", "tid"):
        out[name] = rows[name]
    out["kind"], out["time"], out["bytes"], out["tensors"] = kind, rows[time], amount, tensors
    return out


def _reads(trace: Trace) -> Rows:
    """The messages read from the result pipe. The rebuilding that follows in the same thread names the batch."""
    events = trace.events
    rows = events[np.isin(events["code"], [ev.RESULT_READ, ev.RESULT_REBUILD[0]])]
    rows = rows[np.lexsort((rows["seq"], rows["tid"], rows["process"]))]
    read, after = rows[:-1], rows[1:]
    its = (read["code"] == ev.RESULT_READ) & (after["code"] == ev.RESULT_REBUILD[0])
    for name in ("process", "tid", "loader"):
        its &= read[name] == after[name]
    out = _of(Copy.READ, read[its], read["x"][its], 0, "time")
    for name in ("task", "worker"):
        out[name] = after[name][its]
    return out


def _was_read(trace: Trace, spans: Rows, reads: Rows) -> Bools:
    """Mask the writes that ended without a record: a worker may exit before its feeder thread records the end."""
    read = keys_at(trace.events, reads, reads["time"])
    found: Bools = (spans["code"] == ev.RESULT_WRITE[0]) & (spans["end"] < 0) & (spans["task"] >= 0)
    found[found] = np.isin(keys_at(trace.events, spans[found], spans["begin"][found]), read)
    return found


def _why(copies: Rows, slab_users: list[int]) -> npt.NDArray[np.uint8]:
    """Why each copy was avoidable. The pickling gives a message's payload and tensors."""
    why = np.where(np.isin(copies["kind"], [Copy.FEEDER, Copy.SLAB]), Why.NOT_SHARED_YET, copies["why"])
    pickles = copies[copies["kind"] == Copy.PICKLE]
    handles = (pickles["tensors"] + 1) * HANDLE_BYTES
    data = (pickles["bytes"] > LARGE_PAYLOAD) & (pickles["bytes"] > handles)
    of_message = np.where(data, Why.PICKLED_DATA, Why.NEEDED)
    many = (pickles["tensors"] > MANY_TENSORS) & ~np.isin(
        pickles["loader"], slab_users
    )  # with slabs, these cost nothing
    of_message[~data & many] = Why.MANY_TENSORS
    known, first = np.unique(_keys(pickles), return_index=True)
    if len(known):
        mine = _keys(copies)
        place = np.minimum(np.searchsorted(known, mine), len(known) - 1)
        carries = np.isin(copies["kind"], [Copy.PICKLE, Copy.WRITE, Copy.READ, Copy.REBUILD]) & (known[place] == mine)
        why[carries] = of_message[first][place[carries]]
    return why.astype(np.uint8)


def _keys(rows: Rows) -> Ints:
    """One number for each (loader, epoch, task) of copies or batches."""
    return keys(rows["loader"], rows["epoch"], rows["task"])


def _batches(trace: Trace, copies: Rows, spans: Rows) -> Rows:
    known, first, place = np.unique(_keys(copies), return_index=True, return_inverse=True)
    out = np.zeros(len(known), BATCH)
    for name in ("loader", "epoch", "task", "worker"):
        out[name] = copies[name][first]
    for kind in Copy:
        of_kind = copies["kind"] == kind
        np.add.at(out[kind.name.lower()], place[of_kind], copies["bytes"][of_kind])
    out["copied"] = sum(out[kind.name.lower()] for kind in Copy if kind is not Copy.COLLATE)
    spared = copies["why"] != Why.NEEDED
    np.add.at(out["avoidable"], place[spared], copies["bytes"][spared])
    pickled = copies["kind"] == Copy.PICKLE
    np.add.at(out["tensors"], place[pickled], copies["tensors"][pickled])
    out["payload"] = out["pickle"]
    out["outcome"] = -1
    put, rebuilt = trace.select("result_put"), spans[spans["code"] == ev.RESULT_REBUILD[0]]
    for name, rows, value, time in (
        ("outcome", put, put["x"], put["time"]),
        ("by_handle", rebuilt, rebuilt["ey"], rebuilt["begin"]),
    ):
        at, there = _find(trace, known, rows, time)
        out[name][at] = value[there]
    out["by_handle"][np.isin(out["loader"], in_slabs(trace))] = 0  # it also counts the data inside of the message
    for name in ("slab_send", "slab_fallback"):
        rows = trace.select(name)
        at, there = _find(trace, known, rows, rows["time"])
        np.add.at(out["by_handle"], at, rows["y"][there])
    yielded = trace.select("yield")
    out["yielded"][_find(trace, known, yielded, yielded["time"])[0]] = True
    return out


def _find(trace: Trace, known: Ints, rows: Rows, time: Ints) -> tuple[Ints, Bools]:
    """The position in `known` of each row that it contains, and a mask of these rows."""
    mine = keys_at(trace.events, rows, time)
    there = np.isin(mine, known)
    return np.searchsorted(known, mine[there]).astype(np.int64), there


# --- What the numbers do not say --------------------------------------------------------------------------------------
def _pageable(trace: Trace, batches: Rows) -> Iterator[str]:
    """Notes on loaders that do not pin, if another loader of the run proves that there is an accelerator."""
    devices = {str(params.get("pin_memory_device")) for params in trace.loaders.values() if params.get("pin_memory")}
    proof = sorted(devices - {"None", "simulated", "mps"})
    for number, params in sorted(trace.loaders.items()) if proof else ():
        if params.get("pin_memory") is False and not params.get("slabs_locked"):
            own = batches[batches["loader"] == number]
            yield (
                f"iterator {number} does not pin, and the machine has an accelerator ({proof[0]}, for which another "
                f"iterator pins): its {size(int(own['by_handle'].sum()))} are pageable, so a copy to the device goes "
                f"through a staging buffer and blocks the host; use pin_memory=True"
            )


def _blind(copies: Rows, batches: Rows) -> Iterator[str]:
    """Note pinned batches whose pinned bytes the trace does not have."""
    pinned = copies[(copies["kind"] == Copy.PIN) & (copies["bytes"] == 0)]
    if blind := int(np.isin(_keys(batches[batches["by_handle"] > 0]), _keys(pinned)).sum()):
        yield (
            f"batches whose pinning shows no bytes: {blind}; the trace does not record the copies of an object's own "
            "pin_memory(), so they are missing here"
        )


def _left_out(trace: Trace, spans: Rows, closed: Rows, copies: Rows) -> Iterator[str]:
    kinds = [ev.INDEX_WRITE, ev.SHM_COPY, ev.RESULT_PICKLE, ev.RESULT_WRITE, ev.RESULT_REBUILD, ev.PIN, ev.H2D]
    begins = [begin for begin, _ in kinds]
    if opened := int(np.isin(spans["code"], begins).sum() - np.isin(closed["code"], begins).sum()):
        yield f"copies that did not end before the trace, left out: {opened}"
    for number, params in sorted(trace.loaders.items()):
        if params.get("num_workers") == 0:
            yield f"iterator {number} has no workers: it sends no batches, and the trace does not have its bytes"
    if unknown := int(np.count_nonzero((copies["epoch"] < 0) & (copies["kind"] != Copy.H2D))):
        yield f"{unknown} copies belong to an epoch whose begin is not in the trace"
    for what, code, column in (("pinning", ev.PIN[0], "by"), ("device", ev.H2D[0], "ez")):
        if spans[column][spans["code"] == code].any():
            yield f"the {what} is simulated"
