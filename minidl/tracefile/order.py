"""What happened before what, by sequence numbers and messages alone: a clock that is wrong changes no answer.

Interface: `Order(events, processes)` answers `before(event)`, `happened_before(a, b)` and `chain(event)`; `RULES` lists
which event of another thread or process an event follows. A Trace has the three as methods of its own. An event is its
position in `Trace.events`, or its row.

Rules of use: within a process the sequence number orders events. Across processes a message does: what was stamped
before a put comes before what is stamped after the get of the same message. Two events that neither joins are
concurrent. A message is known by its loader, worker, task and epoch; if a damaged trace leaves two candidates, no
order is claimed. A clock is asked for one thing: which of several true causes came last. Those are of one machine, a
loader's process and its workers', which share CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows, starts
from minidl.tracefile.batches import latest
from minidl.tracefile.events import Actor, DoneEvent, Ending, Message, QueueId
from minidl.tracefile.process import Process
from minidl.tracefile.spans import ends

MESSAGE: Final = ("loader", "worker", "task", "epoch")
"""What tells one message from every other. Task numbers begin again with each epoch of a persistent loader."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An event that follows one of another thread: `target` follows the source with the same values of `same`.

    across: the source is in another process, and there is exactly one; else it is the last one in the same process.
    source_x, target_x: the value that the event's first own field must have. several: one source may have many targets.
    """

    name: str
    sources: tuple[int, ...]
    target: int
    same: tuple[str, ...] = MESSAGE
    across: bool = False
    source_x: int | None = None
    target_x: int | None = None
    several: bool = False


_WORKER = ("loader", "worker")
_TASK = ("loader", "worker", "task")
_RESUMED = ("loader", "worker", "epoch")

RULES: Final = (
    Edge("into the index queue", (ev.INDEX_PUT, ev.RESUME_PUT, ev.SENTINEL_PUT), ev.INDEX_WRITE[0], _TASK),
    Edge("task", (ev.INDEX_PUT, ev.INDEX_WRITE[0]), ev.INDEX_GET[1], across=True, target_x=Message.TASK),
    Edge("new epoch", (ev.RESUME_PUT,), ev.INDEX_GET[1], _RESUMED, across=True, target_x=Message.RESUME),
    Edge("sentinel", (ev.SENTINEL_PUT,), ev.INDEX_GET[1], _WORKER, True, QueueId.INDEX, Message.SENTINEL),
    Edge("into the result queue", (ev.RESULT_PUT,), ev.RESULT_PICKLE[0], _TASK),
    Edge("into the result queue", (ev.RESUME_ACK,), ev.RESULT_WRITE[0], ("loader", "task")),
    Edge("result", (ev.RESULT_PUT, ev.RESULT_WRITE[0]), ev.RESULT_REBUILD[0], across=True),
    Edge("answer to a new epoch", (ev.RESUME_ACK,), ev.RESULT_GET[1], _RESUMED, across=True, target_x=Message.RESUME),
    Edge("pinned batch", (ev.READY_PUT,), ev.READY_GET[1], _TASK, target_x=Message.RESULT),
    Edge("answer, passed on", (ev.RESULT_GET[1],), ev.READY_GET[1], _WORKER, False, Message.RESUME, Message.RESUME),
    Edge("pin thread's sentinel", (ev.SENTINEL_PUT,), ev.RESULT_GET[1], ("loader",), False, QueueId.RESULT,
         Message.SENTINEL),
    Edge("workers' done event", (ev.DONE_EVENT_SET,), ev.DONE_EVENT_SEEN, ("loader",), True, DoneEvent.WORKERS,
         DoneEvent.WORKERS, several=True),
    Edge("pin thread's done event", (ev.DONE_EVENT_SET,), ev.PIN_EXIT, ("loader",), False, DoneEvent.PIN_THREAD,
         Ending.SENTINEL),
    Edge("pin thread's start", (ev.WORKER_START[1],), ev.PIN_START, ("loader",)),
    Edge("pin thread's end", (ev.PIN_EXIT,), ev.JOIN[1], ("loader",), target_x=Actor.PIN_THREAD),
)  # fmt: skip
"""If the target is the rebuilding of a message, or the end of a get, its `result_read` takes its place. A process's
first event follows its `worker_start`; `worker_gone`, `found_dead` and a `join` that saw the end follow its last."""

LINK = np.dtype([("source", "<i8"), ("target", "<i8")])
"""Positions in Trace.events: source happened before target, in another thread or process."""

EventName = int | np.void


class Order:
    """The causal order of a trace's events. Building it takes about as long as sorting them.

    links: array of LINK. previous: of each event the one before it in its thread, or -1.
    """

    def __init__(self, events: Rows, processes: Sequence[Process]) -> None:
        self.events = events
        self.processes = processes
        self.process: Ints = self.events["process"].astype(np.int64)
        order = np.lexsort((self.events["seq"], self.process))
        self._by_process = order
        self._first = np.searchsorted(self.process[order], np.arange(len(processes) + 1))
        self.rank = np.empty(len(order), np.int64)
        """Place of each event in its process."""
        self.rank[order] = np.arange(len(order)) - self._first[self.process[order]]
        self.previous = self._previous()
        self.links = _Links(self).all()

    def __repr__(self) -> str:
        return f"<Order of {len(self.events)} events in {len(self.processes)} processes: {len(self.links)} links>"

    def _previous(self) -> Ints:
        out = np.full(len(self.events), -1, np.int64)
        order = np.lexsort((self.rank, self.events["tid"], self.process))
        same = ~starts(self.process[order], self.events["tid"][order])[1:]
        out[order[1:][same]] = order[:-1][same]
        return out

    def position(self, event: EventName) -> int:
        """The position in `Trace.events` of an event that is given as such, or as its row. KeyError if not there."""
        if isinstance(event, (int, np.integer)):
            if not -len(self.events) <= event < len(self.events):
                raise KeyError(f"event {event}: the trace has {len(self.events)} events")
            return int(event) % len(self.events)
        found = np.flatnonzero((self.process == event["process"]) & (self.events["seq"] == event["seq"]))
        if not len(found):
            raise KeyError(f"the trace has no event {event['seq']} of process {event['process']}")
        return int(found[0])

    def thread(self, at: int) -> tuple[int, int]:
        """(process, tid) of an event."""
        return int(self.process[at]), int(self.events["tid"][at])

    @cached_property
    def mates(self) -> Ints:
        """Of each begin its end and of each end its begin, as positions; -1 = none."""
        out = ends(self.events)
        begins = np.flatnonzero(out >= 0)
        out[out[begins]] = begins
        return out

    # --- before
    def before(self, event: EventName, task: int | None = None) -> Bools:
        """mask[i]: did event i of `Trace.events` happen before `event`? task: only what was done for that task."""
        at = self.position(event)
        mask: Bools = self.rank < self._reach(at)[self.process]
        mask[at] = False
        return mask if task is None else mask & (self.events["task"] == task)

    def happened_before(self, a: EventName, b: EventName) -> bool | None:
        """True if `a` happened before `b`, False if after it (or they are one), None if nothing orders the two."""
        first, second = self.position(a), self.position(b)
        if self.process[first] == self.process[second]:
            return bool(self.rank[first] < self.rank[second])
        if self.rank[first] < self._reach(second)[self.process[first]]:
            return True
        return False if self.rank[second] < self._reach(first)[self.process[second]] else None

    def _reach(self, at: int) -> Ints:
        """Of each process, how many of its first events happened before `at`, which itself counts."""
        source_process, source_rank, target_rank, bounds = self._messages
        reached = np.zeros(len(self.processes), np.int64)
        wanted = reached.copy()
        wanted[self.process[at]] = self.rank[at] + 1
        while len(todo := np.flatnonzero(wanted > reached)):
            process = int(todo[0])
            ranks = target_rank[bounds[process] : bounds[process + 1]]
            first, last = np.searchsorted(ranks, (reached[process], wanted[process])) + bounds[process]
            reached[process] = wanted[process]
            np.maximum.at(wanted, source_process[first:last], source_rank[first:last] + 1)
        return reached

    @cached_property
    def _messages(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Links between processes, by target: process and rank of the source, rank of the target; each first link."""
        source, target = self.links["source"], self.links["target"]
        across = self.process[source] != self.process[target]
        source, target = source[across], target[across]
        order = np.lexsort((self.rank[target], self.process[target]))
        source, target = source[order], target[order]
        bounds = np.searchsorted(self.process[target], np.arange(len(self.processes) + 1))
        return self.process[source], self.rank[source], self.rank[target], bounds

    # --- the last causes
    def chain(self, event: EventName) -> Ints:
        """The event, and before it always the cause that came last, back to its epoch's begin: positions, in order.

        A cause is the event before it in its thread, or one that a link leads from. The way ends at the last begin of
        an epoch of the event's loader, and else at the trace's first events.
        """
        at = self.position(event)
        stop = self._epoch_begin(at)
        way = [at]
        seen = {at}
        while at != stop and (at := self._cause(at)) >= 0 and at not in seen:
            seen.add(at)
            way.append(at)
        return np.array(way[::-1], np.int64)

    def _epoch_begin(self, at: int) -> int:
        begins = np.flatnonzero(
            (self.events["code"] == ev.EPOCH[0]) & (self.events["loader"] == self.events["loader"][at])
        )
        reach = self._reach(at)
        past = begins[self.rank[begins] < reach[self.process[begins]]]
        return int(past[self.rank[past].argmax()]) if len(past) else -1

    def _cause(self, at: int) -> int:
        sources, targets = self._by_target
        first, last = np.searchsorted(targets, (at, at + 1))
        causes = sources[first:last].tolist()
        if self.previous[at] >= 0:
            causes.append(int(self.previous[at]))
        return max(causes, key=self.events["time"].__getitem__, default=-1)

    @cached_property
    def _by_target(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.links["target"], kind="stable")
        return self.links["source"][order], self.links["target"][order]


# --- Links ------------------------------------------------------------------------------------------------------------
class _Links:
    """Finds the links of a trace."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.processes = order.processes
        self.events = order.events
        self.code = self.events["code"]
        self.lossy = np.array([p.lost > 0 for p in self.processes] or [False])
        self.epoch = np.zeros(len(self.events), np.int64)
        self._number_epochs()

    def all(self) -> Rows:
        parts = [self._follow(rule) for rule in RULES] + [self._births(), self._deaths()]
        pairs = np.concatenate(parts)
        out = np.zeros(len(pairs), LINK)
        out["source"], out["target"] = pairs[:, 0], pairs[:, 1]
        process, rank = self.order.process, self.order.rank
        source, target = out["source"], out["target"]
        possible = (process[source] != process[target]) | (rank[source] < rank[target])
        links: Rows = out[possible]
        return links

    def at(self, codes: Iterable[int], x: int | None = None) -> Ints:
        """Positions of the events with one of these codes, and with that first own field."""
        mask = np.isin(self.code, list(codes))
        if x is not None:
            mask &= self.events["x"] == x
        return np.flatnonzero(mask)

    def keys(self, names: Iterable[str], *positions: Ints) -> list[Ints]:
        """A number for each event, the same for those that are the same in all of `names`."""
        every = np.concatenate(positions)
        key = np.zeros(len(every), np.int64)
        for name in names:
            column = self.epoch if name == "epoch" else self.events[name]
            _, code = np.unique(column[every], return_inverse=True)
            _, key = np.unique(key * (int(code.max(initial=0)) + 1) + code, return_inverse=True)
        return np.split(key, np.cumsum([len(part) for part in positions])[:-1])

    def last(self, names: Iterable[str], sources: Ints, targets: Ints, early: bool = False) -> Ints:
        """For each target, the index in `sources` of the last one before it in its process; -1 = none.

        `names` must be the same. If `early`, the first one after it.
        """
        rank = self.order.rank
        known, wanted = self.keys(("process", *names), sources, targets)
        return latest(known, rank[sources], wanted, rank[targets], early)

    def _follow(self, rule: Edge) -> Ints:
        targets = self.at([rule.target], rule.target_x)
        parts = []
        for code in rule.sources:
            sources = self.at([code], rule.source_x)
            found = self._only(rule, sources, targets) if rule.across else self.last(rule.same, sources, targets)
            there = found >= 0
            parts.append(np.stack([sources[found[there]], self._came(targets[there])], axis=1))
        return np.concatenate(parts)

    def _only(self, rule: Edge, sources: Ints, targets: Ints) -> Ints:
        """For each target, the index of the one source with the same key; -1 if there is none, or no certainty."""
        known, wanted = self.keys(rule.same, sources, targets)
        size = int(max(known.max(initial=-1), wanted.max(initial=-1))) + 1
        sent, received = np.bincount(known, minlength=size), np.bincount(wanted, minlength=size)
        index = np.full(size, -1, np.int64)
        order = np.argsort(-self.order.rank[sources], kind="stable")  # of several, the earliest stays
        index[known[order]] = order
        return np.where(((sent == 1) & (received == 1))[wanted] | rule.several, index[wanted], -1)

    def _came(self, targets: Ints) -> Ints:
        """Return the targets; in place of each whose whole message was read before, that reading."""
        before = self.order.previous[targets]
        read = (before >= 0) & (self.code[before] == ev.RESULT_READ)
        return np.where(read & np.isin(self.code[targets], [ev.RESULT_REBUILD[0], ev.RESULT_GET[1]]), before, targets)

    # --- epochs
    def _number_epochs(self) -> None:
        """Number what MESSAGE tells apart: the loader's sends by its count, a worker's work by its own"""
        puts, acks = self.at([ev.RESUME_PUT]), self.at([ev.RESUME_ACK])
        resumed = self.at([ev.INDEX_GET[1]], Message.RESUME)
        answers = self.at([ev.RESULT_GET[1]], Message.RESUME)
        for own in (puts, acks):
            self.epoch[own] = self.events["x"][own]
        sent = self.at([ev.INDEX_PUT])
        self._number(sent, puts, ("loader",))
        self._number_after(self.at([ev.INDEX_WRITE[0]]), sent, puts, ("loader",))
        after = self.last(_WORKER, acks, resumed, early=True)
        before = self.last(_WORKER, acks, resumed)
        numbers = np.append(self.epoch[acks], 0)
        self.epoch[resumed] = np.where(after >= 0, numbers[after], np.where(before >= 0, numbers[before] + 1, 1))
        done = self.at([ev.RESULT_PUT])
        self._number(self.at([ev.INDEX_GET[1]], Message.TASK), acks, _WORKER)
        self._number(done, acks, _WORKER)
        self._number_after(self.at([ev.RESULT_WRITE[0]]), done, acks, _WORKER)
        self._number_answers(puts, answers)
        self._number(self.at([ev.RESULT_REBUILD[0]]), answers[self.epoch[answers] >= 0], _WORKER)

    def _number(self, wanted: Ints, switches: Ints, names: tuple[str, ...]) -> None:
        """Of the last switch before; else one less than the next one; else the first epoch, or of a cut trace the last.

        Until its first epoch has ended, a loader has no switch.
        """
        before, after = self.last(names, switches, wanted), self.last(names, switches, wanted, early=True)
        numbers = np.append(self.epoch[switches], 0)
        newest = np.where(self.lossy[self.order.process[wanted]], self._newest[self.events["loader"][wanted]], 0)
        self.epoch[wanted] = np.where(before >= 0, numbers[before], np.where(after >= 0, numbers[after] - 1, newest))

    def _number_after(self, wanted: Ints, owners: Ints, switches: Ints, names: tuple[str, ...]) -> None:
        """Take over the number of the put: a feeder thread may write the message much later."""
        self._number(wanted, switches, names)
        owner = self.last(_TASK, owners, wanted)
        self.epoch[wanted] = np.where(owner >= 0, np.append(self.epoch[owners], 0)[owner], self.epoch[wanted])

    @cached_property
    def _newest(self) -> Ints:
        """The last epoch that is known of each loader."""
        out = np.zeros(1 << 16, np.int64)
        resumes = self.at([ev.RESUME_PUT, ev.RESUME_ACK])
        np.maximum.at(out, self.events["loader"][resumes], self.events["x"][resumes])
        return out

    def _number_answers(self, puts: Ints, answers: Ints) -> None:
        """A worker answers in the order in which it is told; an answer whose question is not in the trace: -1."""
        told: dict[tuple[int, ...], deque[int]] = {}
        both = np.concatenate([puts, answers])
        for at in both[np.lexsort((self.order.rank[both], self.order.process[both]))].tolist():
            row = self.events[at]
            waiting = told.setdefault((int(row["process"]), int(row["loader"]), int(row["worker"])), deque())
            if row["code"] == ev.RESUME_PUT:
                waiting.append(int(row["x"]))
            else:
                self.epoch[at] = waiting.popleft() if waiting else -1

    # --- processes
    def _births(self) -> Ints:
        """Each worker's first event follows the begin of its start."""
        starts = self.at([ev.WORKER_START[0]])
        pairs = [
            (at, self.order._by_process[self.order._first[child]])
            for at, child in zip(starts.tolist(), self._children(starts), strict=True)
            if child >= 0 and self.order._first[child] < self.order._first[child + 1]
        ]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _children(self, starts: Ints) -> list[int]:
        """The process that each worker_start made: by its pid, or, if its end is missing, by loader and worker."""
        ends = self.at([ev.WORKER_START[1]])
        end = self.last(_WORKER, ends, starts, early=True)
        out = []
        for at, found in zip(starts.tolist(), end.tolist(), strict=True):
            row = self.events[at]
            pid = int(self.events["x"][ends[found]]) if found >= 0 else -1
            out.append(self._child(int(row["process"]), pid, int(row["loader"]), int(row["worker"])))
        return out

    def _child(self, parent: int, pid: int, loader: int, worker: int) -> int:
        for index, process in enumerate(self.processes):
            same = process.loader == loader and process.worker == worker
            if index != parent and (process.pid == pid if pid >= 0 else same) and (same or process.role == "other"):
                return index
        return -1

    def _deaths(self) -> Ints:
        """Link the last event of each thread of a dead process to the events that report its death."""
        pairs: list[tuple[int, int]] = []
        ends = self._last_of_threads()
        starts = self.at([ev.WORKER_START[0]])
        child_of = dict(zip(self._names(starts), self._children(starts), strict=True))
        for at in self.at([*ev.DEATHS, ev.JOIN[1]]).tolist():
            row = self.events[at]
            if row["code"] == ev.JOIN[1]:
                gone = child_of.get(self._names([at])[0], -1) if row["x"] == Actor.WORKER and row["y"] else -1
            else:
                gone = self._dead(row)
            pairs += [(last, at) for last in ends.get(gone, ()) if gone != row["process"]]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _names(self, positions: Iterable[int]) -> list[tuple[int, int]]:
        return [(int(self.events["loader"][at]), int(self.events["worker"][at])) for at in positions]

    def _dead(self, row: np.void) -> int:
        pid, _ = ev.death_of(row)
        found = [index for index, process in enumerate(self.processes) if process.pid == pid]
        mine = [index for index in found if self.processes[index].loader == row["loader"]]
        return (mine or found or [-1])[-1]

    def _last_of_threads(self) -> dict[int, list[int]]:
        """process -> the last event of each of its threads."""
        last = np.ones(len(self.events), bool)
        last[self.order.previous[self.order.previous >= 0]] = False
        out: dict[int, list[int]] = {}
        for at in np.flatnonzero(last).tolist():
            out.setdefault(int(self.order.process[at]), []).append(at)
        return out
