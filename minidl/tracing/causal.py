"""What happened before what, by sequence numbers and messages alone: a clock that is wrong changes no answer.

Interface: `Order(trace)` answers `before(event)`, `happened_before(a, b)` and `chain(event)`; `RULES` lists which event
of another thread or process an event follows; `story(trace, batch)` tells what led to a batch, as text. A Trace has the
first three as methods of its own. An event is its position in `Trace.events`, or its row.

Rules of use: within a process the sequence number orders events. Across processes a message does: what was stamped
before a put comes before what is stamped after the get of the same message. Two events that neither joins are
concurrent. A message is known by its loader, worker, task and epoch; where a damaged trace leaves two candidates, no
order is claimed. Clocks are used for one thing: which of several true causes came last. For that they are first set
right by the messages between the processes, so that one that is an hour off, or another host's, changes nothing there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing import lanes
from minidl.tracing.attachments import plain
from minidl.tracing.events import EVENTS, Actor, DoneEvent, Ending, Message, Phase, QueueId, Track
from minidl.tracing.reader import ends

if TYPE_CHECKING:
    from minidl.tracing.reader import Trace

Rows = npt.NDArray[np.void]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MESSAGE: Final = ("loader", "worker", "task", "epoch")
"""What tells one message from every other. Task numbers begin again with each epoch of a persistent loader."""


@dataclass(frozen=True, slots=True)
class Rule:
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
    Rule("into the index queue", (ev.INDEX_PUT, ev.RESUME_PUT, ev.SENTINEL_PUT), ev.INDEX_WRITE[0], _TASK),
    Rule("task", (ev.INDEX_PUT, ev.INDEX_WRITE[0]), ev.INDEX_GET[1], across=True, target_x=Message.TASK),
    Rule("new epoch", (ev.RESUME_PUT,), ev.INDEX_GET[1], _RESUMED, across=True, target_x=Message.RESUME),
    Rule("sentinel", (ev.SENTINEL_PUT,), ev.INDEX_GET[1], _WORKER, True, QueueId.INDEX, Message.SENTINEL),
    Rule("into the result queue", (ev.RESULT_PUT,), ev.RESULT_PICKLE[0], _TASK),
    Rule("into the result queue", (ev.RESUME_ACK,), ev.RESULT_WRITE[0], ("loader", "task")),
    Rule("result", (ev.RESULT_PUT, ev.RESULT_WRITE[0]), ev.RESULT_REBUILD[0], across=True),
    Rule("answer to a new epoch", (ev.RESUME_ACK,), ev.RESULT_GET[1], _RESUMED, across=True, target_x=Message.RESUME),
    Rule("pinned batch", (ev.READY_PUT,), ev.READY_GET[1], _TASK, target_x=Message.RESULT),
    Rule("answer, passed on", (ev.RESULT_GET[1],), ev.READY_GET[1], _WORKER, False, Message.RESUME, Message.RESUME),
    Rule("pin thread's sentinel", (ev.SENTINEL_PUT,), ev.RESULT_GET[1], ("loader",), False, QueueId.RESULT,
         Message.SENTINEL),
    Rule("workers' done event", (ev.DONE_EVENT_SET,), ev.DONE_EVENT_SEEN, ("loader",), True, DoneEvent.WORKERS,
         DoneEvent.WORKERS, several=True),
    Rule("pin thread's done event", (ev.DONE_EVENT_SET,), ev.PIN_EXIT, ("loader",), False, DoneEvent.PIN_THREAD,
         Ending.SENTINEL),
    Rule("pin thread's start", (ev.WORKER_START[1],), ev.PIN_START, ("loader",)),
    Rule("pin thread's end", (ev.PIN_EXIT,), ev.JOIN[1], ("loader",), target_x=Actor.PIN_THREAD),
)  # fmt: skip
"""Where the target is the rebuilding of a message, or the end of a get, its `result_read` takes its place. A process's
first event follows its `worker_start`; `worker_gone`, `found_dead` and a `join` that saw the end follow its last."""

LINK = np.dtype([("source", "<i8"), ("target", "<i8")])
"""Positions in Trace.events: source happened before target, in another thread or process."""

EventName = int | np.void

WITNESSES: Final = 9
"""Waits between two processes that tell how their clocks differ."""

MOST_LINES: Final = 40
"""Steps that a story tells, if not asked for more."""


class Order:
    """The causal order of a trace's events. Building it takes about as long as sorting them.

    links: array of LINK. previous: of each event the one before it in its thread, or -1.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: Rows = trace.events
        self.process: Ints = self.events["process"].astype(np.int64)
        order = np.lexsort((self.events["seq"], self.process))
        self._by_process = order
        self._first = np.searchsorted(self.process[order], np.arange(len(trace.processes) + 1))
        self.rank = np.empty(len(order), np.int64)
        """Place of each event in its process."""
        self.rank[order] = np.arange(len(order)) - self._first[self.process[order]]
        self.previous = self._previous()
        self.links = _Links(self).all()

    def _previous(self) -> Ints:
        out = np.full(len(self.events), -1, np.int64)
        order = np.lexsort((self.rank, self.events["tid"], self.process))
        same = (self.process[order][1:] == self.process[order][:-1]) & (
            self.events["tid"][order][1:] == self.events["tid"][order][:-1]
        )
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
    def before(self, event: EventName, task: int | None = None) -> Mask:
        """mask[i]: did event i of `Trace.events` happen before `event`? task: only what was done for that task."""
        at = self.position(event)
        mask: Mask = self.rank < self._reach(at)[self.process]
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
        reached = np.zeros(len(self.trace.processes), np.int64)
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
        bounds = np.searchsorted(self.process[target], np.arange(len(self.trace.processes) + 1))
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
        return max(causes, key=self.times.__getitem__, default=-1)

    @cached_property
    def _by_target(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.links["target"], kind="stable")
        return self.links["source"][order], self.links["target"][order]

    # --- clocks
    @cached_property
    def times(self) -> Ints:
        """ns of each event, on the clock of the trace's first process."""
        out: Ints = self.events["time"] + self.offsets[self.process]
        return out

    @cached_property
    def offsets(self) -> Ints:
        """ns to add to each process's clock to get the first one's, as the messages between them tell.

        Who has waited long for a message, by his own clock, gets it at once: the median of the `WITNESSES` longest
        waits says how the clocks differ, by about the time that a message takes. No message may come before it is sent.
        """
        bounds, guesses = self._bounds(), self._guesses()
        out = np.zeros(len(self.trace.processes), np.int64)
        neighbours: dict[int, list[int]] = {}
        for one, other in sorted(bounds):
            neighbours.setdefault(one, []).append(other)
        known: set[int] = set()
        for root in range(len(out)):
            front = deque([] if root in known else [root])
            known.add(root)
            while front:
                near = front.popleft()
                for other in neighbours.get(near, []):
                    if other not in known:
                        known.add(other)
                        out[other] = out[near] + _settle(bounds[near, other], guesses.get((near, other)))
                        front.append(other)
        return out

    def _bounds(self) -> dict[tuple[int, int], list[int | None]]:
        """For two processes: the least and the most, ns, that the second one's clock may be behind the first one's."""
        out: dict[tuple[int, int], list[int | None]] = {}
        for (sender, receiver), behind in self._behind(self.links).items():
            bound = int(behind.max())
            out.setdefault((sender, receiver), [None, None])[0] = bound
            out.setdefault((receiver, sender), [None, None])[1] = -bound
        return out

    def _behind(self, links: Rows) -> dict[tuple[int, int], Ints]:
        """For each sender and receiver: how far the receiver's clock is behind if its messages took no time, ns."""
        one, other = self.process[links["source"]], self.process[links["target"]]
        behind = self.events["time"][links["source"]] - self.events["time"][links["target"]]
        size = max(1, len(self.trace.processes))
        order = np.argsort(one * size + other, kind="stable")
        pairs, first = np.unique((one * size + other)[order], return_index=True)
        parts = np.split(behind[order], first[1:])
        found = ((divmod(pair, size), part) for pair, part in zip(pairs.tolist(), parts, strict=len(pairs) > 0))
        return {pair: part for pair, part in found if pair[0] != pair[1]}

    def _guesses(self) -> dict[tuple[int, int], int]:
        """For two processes: how far the second one's clock is behind the first one's, by what was long waited for."""
        links = self.links[np.isin(self.events["code"][self.links["source"]], [ev.INDEX_WRITE[0], ev.RESULT_WRITE[0]])]
        before = self.previous[links["target"]]
        waits = np.isin(self.events["code"][before], [ev.INDEX_GET[0], ev.RESULT_GET[0]]) & (before >= 0)
        links, before = links[waits], before[waits]
        waited = self.events["time"][links["target"]] - self.events["time"][before]
        longest = links[np.argsort(-waited, kind="stable")]
        found: dict[tuple[int, int], list[int]] = {}
        for source, target in longest.tolist():
            behind = int(self.events["time"][source] - self.events["time"][target])
            one, other = int(self.process[source]), int(self.process[target])
            if len(seen := found.setdefault((min(one, other), max(one, other)), [])) < WITNESSES:
                seen.append(behind if one < other else -behind)
        out = {}
        for (one, other), seen in found.items():
            out[one, other] = sorted(seen)[len(seen) // 2]
            out[other, one] = -out[one, other]
        return out


def _settle(bounds: list[int | None], guess: int | None) -> int:
    """The guess within its bounds; without one, what lies in the middle between them, or the only one."""
    known = [bound for bound in bounds if bound is not None]
    if guess is None:
        return sum(known) // len(known)
    least, most = bounds
    return max(guess if most is None else min(guess, most), guess if least is None else least)


# --- Links ------------------------------------------------------------------------------------------------------------
class _Links:
    """Finds the links of a trace."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.trace = order.trace
        self.events = order.events
        self.code = self.events["code"]
        self.lossy = np.array([p.lost > 0 for p in self.trace.processes] or [False])
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

        `names` must be the same. Where `early`, the first one after it.
        """
        rank = self.order.rank
        known, wanted = self.keys(("process", *names), sources, targets)
        return lanes.latest(known, rank[sources], wanted, rank[targets], np.full(len(targets), early))

    def _follow(self, rule: Rule) -> Ints:
        targets = self.at([rule.target], rule.target_x)
        parts = []
        for code in rule.sources:
            sources = self.at([code], rule.source_x)
            found = self._only(rule, sources, targets) if rule.across else self.last(rule.same, sources, targets)
            there = found >= 0
            parts.append(np.stack([sources[found[there]], self._came(targets[there])], axis=1))
        return np.concatenate(parts)

    def _only(self, rule: Rule, sources: Ints, targets: Ints) -> Ints:
        """For each target, the index of the one source with the same key; -1 where there is none, or no certainty."""
        known, wanted = self.keys(rule.same, sources, targets)
        size = int(max(known.max(initial=-1), wanted.max(initial=-1))) + 1
        sent, received = np.bincount(known, minlength=size), np.bincount(wanted, minlength=size)
        index = np.full(size, -1, np.int64)
        order = np.argsort(-self.order.rank[sources], kind="stable")  # of several, the earliest stays
        index[known[order]] = order
        return np.where(((sent == 1) & (received == 1))[wanted] | rule.several, index[wanted], -1)

    def _came(self, targets: Ints) -> Ints:
        """Where a whole message had been read before it was rebuilt, that moment."""
        before = self.order.previous[targets]
        read = (before >= 0) & (self.code[before] == ev.RESULT_READ)
        return np.where(read & np.isin(self.code[targets], [ev.RESULT_REBUILD[0], ev.RESULT_GET[1]]), before, targets)

    # --- epochs
    def _number_epochs(self) -> None:
        """The epoch of each event that MESSAGE may tell apart: sent by the loader's count, done by the worker's."""
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
        """As the event that put the message, which a feeder thread may write much later."""
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
        """The process that each worker_start made: by its pid, or, where its end is missing, by loader and worker."""
        ends = self.at([ev.WORKER_START[1]])
        end = self.last(_WORKER, ends, starts, early=True)
        out = []
        for at, found in zip(starts.tolist(), end.tolist(), strict=True):
            row = self.events[at]
            pid = int(self.events["x"][ends[found]]) if found >= 0 else -1
            out.append(self._child(int(row["process"]), pid, int(row["loader"]), int(row["worker"])))
        return out

    def _child(self, parent: int, pid: int, loader: int, worker: int) -> int:
        for index, process in enumerate(self.trace.processes):
            same = process.loader == loader and process.worker == worker
            if index != parent and (process.pid == pid if pid >= 0 else same) and (same or process.role == "other"):
                return index
        return -1

    def _deaths(self) -> Ints:
        """Who has seen a process to be gone comes after all of its threads' last events."""
        pairs: list[tuple[int, int]] = []
        ends = self._last_of_threads()
        starts = self.at([ev.WORKER_START[0]])
        child_of = dict(zip(self._names(starts), self._children(starts), strict=True))
        for at in self.at([ev.WORKER_GONE, ev.FOUND_DEAD, ev.JOIN[1]]).tolist():
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
        pid = int(row["x"] if row["code"] == ev.WORKER_GONE else row["y"])
        loader = int(row["loader"])
        found = [index for index, process in enumerate(self.trace.processes) if process.pid == pid]
        mine = [index for index in found if self.trace.processes[index].loader == loader]
        return (mine or found or [-1])[-1]

    def _last_of_threads(self) -> dict[int, list[int]]:
        """process -> the last event of each of its threads."""
        last = np.ones(len(self.events), bool)
        last[self.order.previous[self.order.previous >= 0]] = False
        out: dict[int, list[int]] = {}
        for at in np.flatnonzero(last).tolist():
            out.setdefault(int(self.order.process[at]), []).append(at)
        return out


# --- As text ----------------------------------------------------------------------------------------------------------
def story(
    trace: Trace, batch: int, *, loader: int | None = None, epoch: int | None = None, lines: int = MOST_LINES
) -> str:
    """What led to task `batch` being yielded, or to where it got: its own way, and always the cause that came last.

    loader, epoch: where several have such a task; the last one that was sent, if not given. lines: at most so many of
    the latest steps; 0 = all. Times are ms since the epoch began, on one clock. ValueError where it has no such batch.
    """
    order = trace.order
    put, last, title = _batch(order, batch, loader, epoch)
    chain = order.chain(last)
    names = _actors(trace)
    own = np.flatnonzero(order.before(last, batch) & ~order.before(put) & _about_task(order, put))
    own = np.append(own[np.argsort(order.times[own], kind="stable")], last)
    out = [title, *_told(order, own, int(chain[0]), names, 0)]
    out += ["", "The causes that came last, each of the next:", *_told(order, chain, int(chain[0]), names, lines)]
    return "\n".join([*out, _shares(order, chain, names)])


def _told(order: Order, way: Ints, start: int, names: dict[tuple[int, int], str], lines: int) -> list[str]:
    """A line for each step of `way`."""
    steps = list(_steps(order, way))
    left_out = max(0, len(steps) - lines) if lines else 0
    width = max(len(name) for name in names.values())
    out, before = [f"{'...':>13}  {left_out} earlier steps"] if left_out else [], ""
    for at, words in steps[left_out:]:
        who = names[order.thread(at)]
        ms = (order.times[at] - order.times[start]) / 1e6
        out.append(f"{ms:10.3f} ms  {who if who != before else '':<{width}}  {words}")
        before = who
    return out


def _about_task(order: Order, at: int) -> Mask:
    """Events of the loader of `at`, without those that only name the task that is waited for."""
    waits = np.isin(order.events["code"], [ev.RESULT_GET[0], ev.READY_GET[0], ev.NEXT[0], ev.TIMED_OUT])
    mask: Mask = (order.events["loader"] == order.events["loader"][at]) & ~waits
    return mask


def _batch(order: Order, task: int, loader: int | None, epoch: int | None) -> tuple[int, int, str]:
    """Where the batch was put; its yield, or the last that is known of it; and what to call it."""
    events, rank = order.events, order.rank
    mine = (events["task"] == task) & (True if loader is None else events["loader"] == loader)
    born = np.flatnonzero(mine & (events["code"] == ev.INDEX_PUT))
    if not len(born):  # a loader without workers, where nothing is sent
        born = np.flatnonzero(mine & (events["code"] == ev.FETCH[0]))
    born = born[np.argsort(order.times[born], kind="stable")]
    epochs = np.array([_epoch_of(order, at) for at in born.tolist()], np.int64)
    found = np.flatnonzero((epochs == epoch) | (epoch is None))
    if not len(found):
        have = _tasks_of(events if loader is None else events[events["loader"] == loader])
        of = "".join(f" of {what} {n}" for what, n in (("loader", loader), ("epoch", epoch)) if n is not None)
        raise ValueError(f"the trace has no batch {task}{of}: it has {have}")
    put = int(born[found[-1]])
    mine &= _about_task(order, put) & ~order.before(put)
    for later in born[born != put].tolist():
        if order.happened_before(put, later):
            mine &= order.before(later)
    name = f"batch {task} of loader {events['loader'][put]}, epoch {epochs[found[-1]]}"
    yields = np.flatnonzero(mine & (events["code"] == ev.YIELD))
    if len(yields):
        return put, int(yields[rank[yields].argmin()]), f"What led to {name}, being yielded; its own way:"
    known = np.flatnonzero(mine)
    last = int(known[order.times[known].argmax()])
    return put, last, f"B{name[1:]}, was never yielded. Its way as far as it is known:"


def _tasks_of(events: Rows) -> str:
    sent = events["task"][np.isin(events["code"], [ev.INDEX_PUT, ev.FETCH[0]]) & (events["task"] >= 0)]
    return f"tasks {sent.min()} to {sent.max()}" if len(sent) else "no batches"


def _epoch_of(order: Order, at: int) -> int:
    """Number of the epoch that an event of the loader's own process is in."""
    row = order.events[at]
    begins = (order.events["code"] == ev.EPOCH[0]) & (order.events["loader"] == row["loader"])
    begins &= (order.process == order.process[at]) & (order.rank < order.rank[at])
    found = np.flatnonzero(begins)
    return int(order.events["x"][found[order.rank[found].argmax()]]) if len(found) else 0


def _actors(trace: Trace) -> dict[tuple[int, int], str]:
    """What to call each thread."""
    events = trace.events
    several = len(trace.loaders) > 1
    feeds = np.isin(events["code"], [c for c, e in EVENTS.items() if e.track is Track.FEEDER])
    pins = np.isin(events["code"], [c for c, e in EVENTS.items() if e.track is Track.PIN])
    out: dict[tuple[int, int], str] = {}
    for kind, mask in (("pin thread", pins), ("feeder", feeds), ("", np.ones(len(events), bool))):
        rows = events[mask]
        for process, tid in np.unique(np.stack([rows["process"], rows["tid"]], axis=1).astype(np.int64), axis=0):
            who = trace.processes[process]
            number = f" {who.worker}" if who.role == "worker" else ""
            name = f"{kind or ('worker' if number else 'loader')}{number}"
            name = "queue feeder" if name == "feeder" else name
            out.setdefault((int(process), int(tid)), f"{name} of loader {who.loader}" if several and number else name)
    return out


def _steps(order: Order, chain: Ints) -> Iterator[tuple[int, str]]:
    """The chain's steps, each as its event and words. What lies within a step is told with it."""
    code, mates = order.events["code"], order.mates
    inside = {at: place for place, at in enumerate(chain.tolist())}
    place = 0
    while place < len(chain):
        at = int(chain[place])
        event, mate = EVENTS[int(code[at])], int(mates[at])
        if event.phase is Phase.BEGIN and mate in inside and event.code not in _FRAMES:
            within = [int(i) for i in chain[place + 1 : inside[mate]]]
            if all(order.thread(i) == order.thread(at) for i in within):
                yield at, f"{_about(order, mate, at)}: {_ms(order, at, mate)}{_parts(order, within)}"
                place = inside[mate] + 1
                continue
        if event.phase is Phase.BEGIN:
            yield at, f"{_about(order, at)} begins{'' if mate >= 0 else '; its end is not in the trace'}"
        elif event.phase is Phase.END:
            took = f", after {_ms(order, mate, at)}" if mate >= 0 else ""
            yield at, f"{_about(order, at, mate)} ends{took}"
        else:
            yield at, _about(order, at)
        place += 1


_FRAMES: Final = (ev.EPOCH[0], ev.SHUTDOWN[0])


def _about(order: Order, at: int, other: int = -1) -> str:
    """An event's name and task; what its begin does not know, its end does."""
    row = order.events[at]
    task = int(row["task"]) if row["task"] >= 0 or other < 0 else int(order.events["task"][other])
    words = EVENTS[int(row["code"])].name
    if row["code"] in ev.SAMPLE and row["y"] >= 0:
        words += f" {row['y']}"
    if task >= 0:
        words += f" of task {task}"
    text = order.trace.text(row)
    return f"{words} ({plain(text)})" if text else words


def _ms(order: Order, begin: int, end: int) -> str:
    return f"{(order.events['time'][end] - order.events['time'][begin]) / 1e6:.3f} ms"


def _parts(order: Order, within: list[int]) -> str:
    """What a step is made of: its inner steps by name, and the longest sample."""
    spent: dict[str, list[int]] = {}
    longest = (-1, -1)
    depth = 0
    for at in within:
        event, mate = EVENTS[int(order.events["code"][at])], int(order.mates[at])
        if event.phase is Phase.END:
            depth -= 1
            continue
        if event.phase is Phase.BEGIN:
            if depth == 0 and mate >= 0:
                took = int(order.events["time"][mate] - order.events["time"][at])
                spent.setdefault(event.name, []).append(took)
                if event.code == ev.SAMPLE[0]:
                    longest = max(longest, (took, int(order.events["y"][at])))
            depth += 1
    parts = [f"{len(took)} {name} {sum(took) / 1e6:.3f} ms" for name, took in spent.items()]
    if len(spent.get("sample", ())) > 1:
        parts.append(f"the longest sample {longest[0] / 1e6:.3f} ms, index {longest[1]}")
    return f" ({', '.join(parts)})" if parts else ""


def _shares(order: Order, chain: Ints, names: dict[tuple[int, int], str]) -> str:
    """Whose time it was, from the chain's first event to its last."""
    spent: dict[str, int] = {}
    for before, at in zip(chain[:-1].tolist(), chain[1:].tolist(), strict=True):
        same = order.thread(before) == order.thread(at)
        who = names[order.thread(at)] if same else "between them"
        spent[who] = spent.get(who, 0) + max(0, int(order.times[at] - order.times[before]))
    total = sum(spent.values())
    shares = [f"{who} {ns / total:.0%}" for who, ns in sorted(spent.items(), key=lambda item: -item[1]) if ns]
    return f"{total / 1e6:.3f} ms in all" + (f": {', '.join(shares)}" if shares else "")
