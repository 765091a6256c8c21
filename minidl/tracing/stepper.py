"""A recorded run, stepped through: forwards and backwards, by events, by batches, or to a moment.

Interface: `replay(trace)` -> `Replay`. Position p means: the first p of the loader's events have happened; `state` is
what they led to (`state.ProtocolState`), `event` the last of them, `words` what it says, `changed` what it did.

Rules of use: one Replay is one loader's. Events are in the order of `causal_order`: no message is received before it is
sent. A state is worked out from a copy kept every `EVERY` events, so a step back costs no more than `EVERY` forward;
a run so long that `MOST_KEPT` copies would not do keeps them further apart.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from minidl.tracing import events as ev
from minidl.tracing.attachments import plain
from minidl.tracing.events import EVENTS, Event, Field, Outcome, Phase
from minidl.tracing.ledger import size
from minidl.tracing.reader import Trace, read_trace
from minidl.tracing.replay import as_dicts
from minidl.tracing.state import Follower, ProtocolState, Queued, Row, WorkerNow

if TYPE_CHECKING:
    from minidl.tracing.stepper_page import ReplayPage

EVERY: Final = 512
"""Events between two kept copies, at least: a step back takes a millisecond."""

MOST_KEPT: Final = 512
"""Copies that are kept of a long run: one takes some 5 KB, and 1 KB for each worker."""

LONG: Final = 250_000
"""Events that take about half a second to follow: of a way longer than that, `progress` is told."""


def replay(trace: Trace | str | os.PathLike[str], loader: int | None = None) -> Replay:
    """Step through a recorded run: of a trace, or of the path of one.

    loader: the number of the iterator to follow; None takes the one with the most events. Raises TraceError where the
    path holds no trace, ValueError where no such iterator has recorded anything.
    """
    return Replay(trace if isinstance(trace, Trace) else read_trace(trace), loader)


def causal_order(events: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """Positions in `events` (rows of `Trace.events`) in an order that could have been the real one.

    By time, but within a process by the order of emission: an event that was emitted later than another of its process
    did not come before it, though a thread that lost the processor may have read the clock earlier. A put is stamped
    before it is made and a get after it has returned, on one clock, so every message is sent before it is received.
    """
    order = np.lexsort((events["seq"], events["process"]))
    time, process = events["time"][order], events["process"][order]
    for one in np.unique(process):
        begin, end = np.searchsorted(process, (one, one + 1))
        np.maximum.accumulate(time[begin:end], out=time[begin:end])
    return order[np.argsort(time, kind="stable")]


@dataclass(frozen=True, slots=True)
class Change:
    """One field that an event changed, and how, in words."""

    field: str
    words: str

    def __str__(self) -> str:
        return f"{self.field}: {self.words}"


class Replay:
    """One loader's run at a position that moves. Made by `replay`."""

    def __init__(self, trace: Trace, loader: int | None = None) -> None:
        self.trace = trace
        self.loader = _choose(trace, loader)
        own = np.flatnonzero(trace.events["loader"] == self.loader)
        self.rows: npt.NDArray[np.intp] = own[causal_order(trace.events[own])]
        """Of each event in the order of the replay, its row in `trace.events`."""
        self._events = trace.events[self.rows]
        self._times = np.maximum.accumulate(self._events["time"])
        self._batches = _batches(self._events)
        self.progress: Callable[[int, int], None] | None = None
        """Called with (events followed, events to follow) on a long way, at every copy that is kept of it."""
        self._every = max(EVERY, -(-len(self.rows) // MOST_KEPT))
        self._kept = [Follower(trace, self.loader, self._events)]
        self._at = copy.copy(self._kept[0])
        self._block: tuple[int, list[Row]] = -1, []
        self._before: ProtocolState | None = None
        self._state = self._at.state()

    # --- where it is
    def __len__(self) -> int:
        return len(self.rows)

    @property
    def position(self) -> int:
        """How many events have happened, from 0 to len(self)."""
        return self._at.stepped

    @property
    def state(self) -> ProtocolState:
        """The state at this position."""
        return self._state

    @property
    def event(self) -> np.void | None:
        """The row of `trace.events` that led here; None at the beginning."""
        return self._events[self.position - 1] if self.position else None

    @property
    def words(self) -> str:
        """The event that led here, in words."""
        return (
            "nothing has happened yet"
            if self.event is None
            else describe(self.trace, self.event, pinned=self._at.pinned)
        )

    @property
    def changed(self) -> tuple[Change, ...]:
        """What the event that led here changed."""
        return () if self._before is None else changes(self._before, self._state)

    @property
    def batches(self) -> int:
        """How many batches (or errors in place of one) were handed out, in all epochs together."""
        return len(self._batches)

    @property
    def batch(self) -> int:
        """How many of them have been handed out by now."""
        return int(np.searchsorted(self._batches, self.position, side="right"))

    @property
    def ending(self) -> str:
        """How the run ended, "" where it did not: it was killed, or is still running."""
        codes = self._events["code"]
        if (codes == ev.SHUTDOWN[1]).any():
            return "shut down"
        alone = not np.isin(codes, (ev.TASK_ASSIGNED, ev.INDEX_PUT)).any()
        return "the epoch was over" if alone and (codes == ev.EPOCH[1]).any() else ""

    def __repr__(self) -> str:
        end = self.ending or "it did not end"
        return f"<Replay of loader {self.loader} of {self.trace.path}: at {self.position} of {len(self)} events; {end}>"

    @property
    def batch_positions(self) -> npt.NDArray[np.intp]:
        """Where `to_batch` goes for each batch."""
        return self._batches

    def __copy__(self) -> Replay:
        new = Replay.__new__(Replay)
        new.__dict__.update(self.__dict__, _at=copy.copy(self._at))
        return new

    # --- shown
    def html(
        self, path: str | os.PathLike[str] | None = None, *, begin: int | None = None, end: int | None = None
    ) -> ReplayPage | Path:
        """A page with a slider, which needs no network: as text, or written to `path`; see `stepper_page.html`."""
        from minidl.tracing.stepper_page import html

        return html(self, path, begin=begin, end=end)

    def _repr_html_(self) -> str:
        from minidl.tracing.stepper_page import ReplayPage

        page = self.html()
        assert isinstance(page, ReplayPage)
        return page._repr_html_()

    # --- moving
    def to(self, position: int) -> ProtocolState:
        """Go to a position. Raises IndexError where there is none."""
        if not 0 <= position <= len(self):
            raise IndexError(f"position {position}: this replay has positions 0 to {len(self)}")
        if position != self.position or (position and self._before is None):
            if position == 0:
                self._at, self._before = copy.copy(self._kept[0]), None
            else:
                if position - 1 != self.position:
                    self._run_to(position - 1)
                    self._state = self._at.state()
                self._before = self._state
                self._run_to(position)
            self._state = self._at.state()
        return self._state

    def forward(self, n: int = 1) -> ProtocolState:
        """Go n events on, at most to the end."""
        return self.to(min(max(self.position + n, 0), len(self)))

    def back(self, n: int = 1) -> ProtocolState:
        """Go n events back, at most to the beginning."""
        return self.forward(-n)

    def at(self, seconds: float) -> ProtocolState:
        """Go to a moment: all that was stamped up to `seconds` after the trace's first event has happened."""
        return self.to(self.position_at(seconds))

    def position_at(self, seconds: float) -> int:
        """The position of a moment."""
        start = int(self.trace.events["time"][0])
        return int(np.searchsorted(self._times, start + round(seconds * 1e9), side="right"))

    def to_batch(self, n: int) -> ProtocolState:
        """Go to where batch n (from 0, counted through all epochs) is in the consumer's hands. Raises IndexError."""
        if not 0 <= n < self.batches:
            raise IndexError(f"batch {n}: this run handed out {self.batches}, counted from 0")
        return self.to(int(self._batches[n]))

    def next_batch(self) -> ProtocolState:
        """Go to where the next batch is in the consumer's hands; to the end if there is none."""
        return self.to_batch(self.batch) if self.batch < self.batches else self.to(len(self))

    def previous_batch(self) -> ProtocolState:
        """Go back to where the batch before is in the consumer's hands; to the beginning if there is none."""
        before = int(np.searchsorted(self._batches, self.position, side="left"))
        return self.to_batch(before - 1) if before else self.to(0)

    def to_row(self, row: int) -> ProtocolState:
        """Go to just after the event at `row` in `trace.events`. Raises IndexError if it is another loader's."""
        return self.to(self.position_of(row))

    def position_of(self, row: int) -> int:
        """The position just after the event at `row` in `trace.events`. Raises IndexError if it is another loader's."""
        found = np.flatnonzero(self.rows == row)
        if not len(found):
            raise IndexError(f"row {row} is no event of loader {self.loader}")
        return int(found[0]) + 1

    def walk(self, begin: int = 0, end: int | None = None) -> Iterator[ProtocolState]:
        """Yield the state at each position from `begin` to `end` (default: the last), going there."""
        for position in range(begin, len(self) + 1 if end is None else end + 1):
            yield self.to(position)

    def _run_to(self, position: int) -> None:
        """Bring the follower to `position`, from where it is or from the nearest kept copy before it."""
        nearest = min(position // self._every, len(self._kept) - 1)
        if not nearest * self._every <= self._at.stepped <= position:
            self._at = copy.copy(self._kept[nearest])
        begin = self._at.stepped
        while self._at.stepped < position:
            block, done = divmod(self._at.stepped, self._every)
            for event in self._events_of(block)[done : position - block * self._every]:
                self._at.step(event)
            if self._at.stepped == len(self._kept) * self._every:
                self._kept.append(copy.copy(self._at))
            if self.progress is not None and position - begin > LONG:
                self.progress(self._at.stepped - begin, position - begin)

    def _events_of(self, block: int) -> list[Row]:
        """The events between one kept copy and the next."""
        if self._block[0] != block:
            rows = slice(block * self._every, (block + 1) * self._every)
            self._block = block, list(as_dicts(self._events, rows))
        return self._block[1]


def _choose(trace: Trace, loader: int | None) -> int:
    numbers, counts = np.unique(trace.events["loader"], return_counts=True)
    there = {int(n): int(count) for n, count in zip(numbers, counts, strict=True) if n > 0}
    if not there:
        raise ValueError(f"{trace.path}: no loader has recorded anything, so there is nothing to replay")
    if loader is None:
        return max(there, key=lambda number: (there[number], -number))
    if loader not in there:
        told = ", ".join(f"{number} ({count} events)" for number, count in there.items())
        raise ValueError(f"{trace.path} has no loader {loader}: it has {told}")
    return loader


def _batches(events: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """The positions at which each batch is in the consumer's hands: its consumer span has begun, if there is one."""
    codes = events["code"]
    handed = np.flatnonzero(codes == ev.YIELD)
    if not len(handed):  # an observed loader tells only how each call of next ended
        handed = np.flatnonzero((codes == ev.NEXT[1]) & (events["y"] != Outcome.EXHAUSTED))
    begins = np.append(np.flatnonzero(codes == ev.CONSUMER[0]), len(codes))
    begun = begins[np.searchsorted(begins, handed)]
    following = np.append(handed[1:], len(codes))
    return np.where(begun < following, begun, handed) + 1


# --- In words ---------------------------------------------------------------------------------------------------------
_WORDS: Final = {
    ev.EPOCH[0]: "epoch {epoch} begins",
    ev.EPOCH[1]: "epoch {epoch} ends after {yielded} batches: {ending}",
    ev.SAMPLER_NEXT[0]: "the sampler is asked for task {task}'s indices",
    ev.SAMPLER_NEXT[1]: "the sampler gives {count} indices for task {task}",
    ev.TASK_ASSIGNED: "task {task} is given to worker {worker}",
    ev.INDEX_PUT: "task {task} is put into worker {worker}'s index queue",
    ev.INDEX_WRITE[0]: "the index queue's feeder begins to write {what} for worker {worker}",
    ev.INDEX_WRITE[1]: "the index queue's feeder has written {what} for worker {worker}",
    ev.INDEX_GET[0]: "worker {worker} waits at its index queue",
    ev.INDEX_GET[1]: "worker {worker} takes {got} from its index queue",
    ev.FETCH[0]: "{who} begins to fetch task {task}: {count} samples",
    ev.FETCH[1]: "{who} has fetched task {task}: {outcome}",
    ev.SAMPLE[0]: "{who} asks the dataset for sample {index} of task {task}",
    ev.SAMPLE[1]: "{who} has sample {index} of task {task}",
    ev.COLLATE[0]: "{who} begins to collate task {task}",
    ev.COLLATE[1]: "{who} has collated task {task}",
    ev.SHM_ALLOC: "worker {worker} makes {bytes} of shared memory for task {task}",
    ev.SHM_COPY[0]: "worker {worker}'s feeder begins to copy {bytes} of task {task} into shared memory",
    ev.SHM_COPY[1]: "worker {worker}'s feeder has copied {bytes} of task {task} into shared memory",
    ev.RESULT_PUT: "worker {worker} puts the result of task {task} into the result queue: {outcome}",
    ev.RESULT_PICKLE[0]: "worker {worker}'s feeder begins to pickle task {task}'s result",
    ev.RESULT_PICKLE[1]: "worker {worker}'s feeder has pickled task {task}'s result: {bytes}",
    ev.RESULT_WRITE[0]: "a feeder begins to write {what} ({bytes}) to the result pipe",
    ev.RESULT_WRITE[1]: "a feeder has written {what} ({bytes}) to the result pipe",
    ev.RESULT_GET[0]: "{reader} waits at the result queue",
    ev.RESULT_READ: "a message of {bytes} has been read from the result pipe",
    ev.RESULT_REBUILD[0]: "task {task}'s result is being rebuilt",
    ev.RESULT_REBUILD[1]: "task {task}'s result is rebuilt: {tensors} tensors, {shared} of shared memory",
    ev.RESULT_GET[1]: "{reader} takes {got} from the result queue",
    ev.PIN[0]: "the pin thread begins to pin task {task}",
    ev.PIN[1]: "the pin thread has pinned task {task}",
    ev.READY_PUT: "the pin thread puts task {task} into the ready queue",
    ev.READY_GET[0]: "the loader waits for a pinned batch",
    ev.READY_GET[1]: "the loader takes {got} from the ready queue",
    ev.REORDER_STORE: "task {task} came before its turn: it goes into the reorder buffer",
    ev.REORDER_POP: "task {task}'s turn has come: it leaves the reorder buffer",
    ev.RCVD_ADVANCE: "rcvd_idx moves on to {rcvd_idx}",
    ev.NEXT[0]: "the training loop asks for a batch",
    ev.NEXT[1]: "next() returns: {outcome}",
    ev.YIELD: "task {task} is handed to the training loop: {outcome}",
    ev.CONSUMER[0]: "the training loop's own code runs",
    ev.CONSUMER[1]: "the training loop's own code is done",
    ev.WORKER_START[0]: "the loader starts worker {worker}",
    ev.WORKER_START[1]: "worker {worker} is started: pid {pid}",
    ev.WORKER_READY: "worker {worker} is ready",
    ev.WORKER_EXIT: "worker {worker} leaves its loop: {ending}",
    ev.WORKER_GONE: "worker {worker}'s process is gone: exit code {exit_code}",
    ev.PIN_START: "the pin thread runs",
    ev.PIN_EXIT: "the pin thread ends: {ending}",
    ev.RESUME_PUT: "worker {worker} is told that epoch {epoch} begins",
    ev.RESUME_ACK: "worker {worker} acknowledges epoch {epoch}",
    ev.WORKER_EXHAUSTED: "the loader learns that worker {worker}'s dataset has ended",
    ev.FOUND_DEAD: "{actor} {worker} is found dead: exit code {exit_code}",
    ev.TIMED_OUT: "the loader's timeout has passed while it waited for task {task} of worker {worker}",
    ev.TASK_ERROR: "task {task} has failed in worker {worker}: {text}",
    ev.SHUTDOWN[0]: "the shutdown begins",
    ev.SHUTDOWN[1]: "the shutdown is over: {still_alive} workers still alive",
    ev.DONE_EVENT_SET: "the done event of the {which} is set",
    ev.DONE_EVENT_SEEN: "worker {worker} skips task {task}: the done event is set",
    ev.SENTINEL_PUT: "a sentinel is put into {whose} queue",
    ev.SENTINEL_GET: "a sentinel has come out of {whose} queue",
    ev.JOIN[0]: "the loader begins to wait for {actor} {worker} to end",
    ev.JOIN[1]: "the loader has waited for {actor} {worker} to end",
    ev.CANCEL_JOIN_THREAD: "nobody will wait for the feeder of {whose} queue",
    ev.QUEUE_CLOSE: "{whose} queue is closed on one side",
    ev.TERMINATE: "worker {worker} is sent signal {signal}",
}


def describe(trace: Trace, event: np.void, *, pinned: bool = False) -> str:
    """An event in words. pinned: its loader has a pin thread, which then reads the result queue."""
    told = EVENTS[int(event["code"])]
    values: dict[str, Any] = {"task": int(event["task"]), "worker": int(event["worker"])}
    for column, own in zip("xyz", told.fields, strict=False):
        values[own.name] = _value(int(event[column]), own)
    task, worker = values["task"], values["worker"]
    values["what"] = f"task {task}" if task >= 0 else "a message"
    values["who"] = f"worker {worker}" if worker >= 0 else "the loader"
    values["reader"] = "the pin thread" if pinned else "the loader"
    values["whose"] = f"worker {worker}'s index" if worker >= 0 else f"the {values.get('queue', '')}"
    values["text"] = plain(trace.text(event))
    message = values.get("message")
    values["got"] = {"empty": "nothing", "task": f"task {task}", "result": f"task {task}'s result"}.get(
        str(message), f"a {message} message"
    )
    if told.name in ("found_dead", "join") and worker < 0:
        values["worker"] = ""
    pretence = " (simulated)" if values.get("simulated") == 1 else ""
    words = _WORDS.get(told.code) or _plainly(told)
    return " ".join(words.format_map(values).split()) + pretence


def _plainly(told: Event) -> str:
    """For an event without words of its own: its name, and its task."""
    return told.name.replace("_", " ") + (" of task {task}" if told.has_task else "") + _PHASES[told.phase]


_PHASES: Final = {Phase.BEGIN: " begins", Phase.END: " ends", Phase.INSTANT: ""}


def _value(value: int, own: Field) -> object:
    if own.enum is not None:
        return next((member.name.lower().replace("_", " ") for member in own.enum if member == value), value)
    return size(value) if own.unit == "B" else value


# --- What changed -----------------------------------------------------------------------------------------------------
def changes(before: ProtocolState, after: ProtocolState) -> tuple[Change, ...]:
    """What differs between two states, the clock and what is said about the state left out."""
    old, new = flat(before), flat(after)
    out = []
    for name in [*new, *(name for name in old if name not in new)]:
        was, now = old.get(name), new.get(name)
        if was != now:
            told = f"now {now}" if was is None else f"{was} → gone" if now is None else f"{was} → {now}"
            out.append(Change(name, told))
    return tuple(out)


def flat(state: ProtocolState) -> dict[str, str]:
    """A state as names and words, in the order of a batch's way: "task_info[3]" -> "worker 1, outstanding"."""
    out: dict[str, str] = {
        "epoch": _said(state.epoch),
        "loader": state.loader.name,
        **{name: _said(getattr(state, name)) for name in ("send_idx", "rcvd_idx", "tasks_outstanding")},
    }
    for task, info in state.task_info.items():
        out[f"task_info[{task}]"] = f"worker {info.worker_id}, {'fetched' if info.fetched else 'outstanding'}"
    for name in ("workers_num_tasks", "workers_status"):
        out |= {f"{name}[{worker}]": str(value) for worker, value in enumerate(getattr(state, name))}
    out["reorder_buffer"] = _listed(state.reorder_buffer)
    for name in ("sampling", "in_hand", "waiting_for", "consumer"):
        out[name] = _said(getattr(state, name))
    out["yielded"] = str(state.yielded)
    for worker in state.workers:
        out |= _flat_worker(worker)
    out |= _flat_queue("result_queue", state.result_queue)
    if state.pin is not None:
        out["pin.state"] = state.pin.state.name
        out["pin.task"] = _said(None if state.pin.task < 0 else state.pin.task)
    out |= _flat_queue("ready_queue", state.ready_queue)
    out["bytes_in_flight"] = size(state.bytes_in_flight)
    out["done_events"] = _listed(which.name.lower() for which in state.done_events)
    out["joining"] = _listed(f"{who.name.lower()} {n}" if n >= 0 else who.name.lower() for who, n in state.joining)
    return out


def _said(value: int | None) -> str:
    return "none" if value is None else str(value)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _flat_worker(worker: WorkerNow) -> dict[str, str]:
    name = f"workers[{worker.worker}]"
    return {
        f"{name}.state": worker.state.name,
        f"{name}.pid": str(worker.pid),
        f"{name}.activity": worker.doing,
        f"{name}.making": size(worker.making),
        **_flat_queue(f"{name}.index_queue", worker.index_queue),
    }


def _flat_queue(name: str, queue: Iterable[Queued]) -> dict[str, str]:
    out: dict[str, str] = {}
    for message in queue:
        of = f" of worker {message.worker}" if name == "result_queue" and message.worker >= 0 else ""
        key, again = f"{name}[{message.name}{of}]", 2
        while key in out:  # a task of an epoch that was left early, beside its namesake
            key, again = f"{name}[{message.name}{of}, {again}]", again + 1
        out[key] = message.stage.value
    return out
