"""Events and states in words, for the replay, the checker's report, the pages and `minidl top`.

Interface: `describe(trace, event)` gives an event as a sentence; `lines(state)` a state as a few named lines, each with
the fields that it shows; `fields(state)` all those fields as names and words; `changes(before, after)` what differs.
What a trace contains is untrusted: it is escaped here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from minidl.playback.state import ProtocolState, Queued, WorkerNow
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Event, Field, Phase
from minidl.tracefile.loaders import first_epochs
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import counted, plain, sample_asked_for, size, value_of

# --- An event ---------------------------------------------------------------------------------------------------------
_COUNTED: Final = (
    ("yielded", "batches", "batch", "batches"),
    ("count", "indices", "index", "indices"),
    ("count", "samples", "sample", ""),
    ("tensors", "in_tensors", "tensor", ""),
    ("still_alive", "survivors", "worker", ""),
)
"""Of a field that counts: the field, the name of the counted words in an event's sentence, and singular and plural."""


def describe(trace: Trace, event: np.void, *, pinned: bool = False) -> str:
    """An event in words. pinned: its loader has a pin thread, which then reads the result queue."""
    kind = EVENTS[int(event["code"])]
    values: dict[str, Any] = {"task": int(event["task"]), "worker": int(event["worker"])}
    for column, own in kind.columns.items():
        values[own.name] = _value(int(event[column]), own)
        if own.name == "epoch" and kind.code != ev.SHARE:  # whose epoch is what `set_epoch` was told
            values["epoch"] += first_epochs(trace).get(int(event["loader"]), 0)
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
    if kind.name in ("found_dead", "join") and worker < 0:
        values["worker"] = ""
    if kind.name == "slab_lock":
        values["locked"] = f"has page-locked the {values['bytes']} of" if event["x"] else "could not page-lock"
    if kind.name == "sample":
        values["sample"] = sample_asked_for(values["position"], values["index"])
    for field, name, one, many in _COUNTED:
        if field in values:
            values[name] = counted(values[field], one, many)
    simulated = " (simulated)" if values.get("simulated") == 1 else ""
    slabs = trace.loaders.get(int(event["loader"]), {}).get("transport") == "arena"
    words = (kind.with_slabs if slabs else "") or kind.words or _plainly(kind)
    return " ".join(words.format_map(values).split()) + simulated


def _plainly(kind: Event) -> str:
    """For an event without words of its own: its name, and its task."""
    return kind.name.replace("_", " ") + (" of task {task}" if kind.has_task else "") + _PHASES[kind.phase]


_PHASES: Final = {Phase.BEGIN: " begins", Phase.END: " ends", Phase.INSTANT: ""}


def _value(value: int, own: Field) -> object:
    if own.enum is not None:
        return str(value_of(own, value)).replace("_", " ")
    return size(value) if own.unit == "B" else value


# --- A state ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StateLine:
    """One line of a state: its name, its text ("" = there is nothing), and the fields that it shows, in words."""

    name: str
    text: str
    fields: dict[str, str]

    def __str__(self) -> str:
        return f"{self.name:<14} {self.text or '-'}"


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field that an event changed, and how, in words."""

    field: str
    words: str

    def __str__(self) -> str:
        return f"{self.field}: {self.words}"


def lines(state: ProtocolState) -> Iterator[StateLine]:
    """Yield a state's lines in the order of a batch's way: loader, tasks, workers, queues, training loop, the end."""
    yield _loader(state)
    if not state.alone:
        yield _tasks(state)
        hand = "" if state.in_hand is None else f"; in hand: task {state.in_hand}"
        early = _listed(state.reorder_buffer)
        shown = {"reorder_buffer": early, "in_hand": _or_none(state.in_hand)}
        yield StateLine("reorder buffer", early + hand if state.reorder_buffer or hand else "", shown)
    for worker in state.workers:
        yield _worker(state, worker)
    if not state.alone:
        yield StateLine("result queue", _messages(state.result_queue), _queue("result_queue", state.result_queue))
    if state.pin is not None:
        held = f", holds task {state.pin.task}" if state.pin.task >= 0 else ""
        simulated = " (simulated)" if state.pin.simulated else ""
        task = _or_none(None if state.pin.task < 0 else state.pin.task)
        shown = {"pin.state": state.pin.state.name, "pin.task": task}
        yield StateLine("pin thread", state.pin.state.name + held + simulated, shown)
        yield StateLine("ready queue", _messages(state.ready_queue), _queue("ready_queue", state.ready_queue))
    yield _training_loop(state)
    if state.kept or state.taken is not None or state.resumed:
        yield _state(state)
    yield StateLine("in flight", size(state.bytes_in_flight), {"bytes_in_flight": size(state.bytes_in_flight)})
    done, joined = _listed(map(name_of, state.done_events)), _listed(name_of(who, n) for who, n in state.joining)
    shown = {"done_events": done, "joining": joined}
    text = f"done event: {done}" if state.done_events else ""
    text += f"; waits for the end of {joined}" if state.joining else ""
    yield StateLine("shutdown", text.removeprefix("; "), shown)


def fields(state: ProtocolState) -> dict[str, str]:
    """Return a state as names and words: "task_info[3]" -> "worker 1, outstanding"."""
    return {name: words for line in lines(state) for name, words in line.fields.items()}


def changes(before: ProtocolState, after: ProtocolState) -> tuple[FieldChange, ...]:
    """Return what differs between two states, except the time and the notes on the state."""
    old, new = fields(before), fields(after)
    out = []
    for name in [*new, *(name for name in old if name not in new)]:
        was, now = old.get(name), new.get(name)
        if was != now:
            words = f"now {now}" if was is None else f"{was} → gone" if now is None else f"{was} → {now}"
            out.append(FieldChange(name, words))
    return tuple(out)


def name_of(member: enum.IntEnum, number: int = -1) -> str:
    """Return a member of an enumeration as a reader writes it: "pin thread", "worker 3"."""
    return member.name.lower().replace("_", " ") + (f" {number}" if number >= 0 else "")


def _loader(state: ProtocolState) -> StateLine:
    counts = {name: _or_none(getattr(state, name)) for name in ("send_idx", "rcvd_idx", "tasks_outstanding")}
    shown = {"epoch": _or_none(state.epoch), "loader": state.loader.name, **counts}
    shown |= {name: _or_none(getattr(state, name)) for name in ("sampling", "waiting_for")}
    text = f"{state.loader.name}, {state.doing}; {'no epoch' if state.epoch is None else f'epoch {state.epoch}'}"
    if not state.alone:
        known = (f"{name.removeprefix('tasks_')} {value}" for name, value in counts.items())
        text += "; " + ", ".join(known).replace("none", "unknown")
    return StateLine("loader", text, shown)


def _tasks(state: ProtocolState) -> StateLine:
    shown = {
        f"task_info[{task}]": f"worker {info.worker_id}, {'fetched' if info.fetched else 'outstanding'}"
        for task, info in state.task_info.items()
    }
    for name in ("workers_num_tasks", "workers_status"):
        shown |= {f"{name}[{worker}]": str(value) for worker, value in enumerate(getattr(state, name))}
    tasks = (
        f"{task} (worker {info.worker_id}{', fetched' if info.fetched else ''})"
        for task, info in state.task_info.items()
    )
    return StateLine("task_info", ", ".join(tasks), shown)


def _worker(state: ProtocolState, worker: WorkerNow) -> StateLine:
    number, name = worker.worker, f"workers[{worker.worker}]"
    shown = {
        f"{name}.state": worker.state.name,
        f"{name}.pid": str(worker.pid),
        f"{name}.activity": worker.doing,
        f"{name}.making": size(worker.making),
        **_queue(f"{name}.index_queue", worker.index_queue),
    }
    if number < 0:
        return StateLine("fetching", f"{worker.doing} (no workers: the loader's own process, pid {worker.pid})", shown)
    tasks = f", {counted(state.workers_num_tasks[number], 'task')}" if number < len(state.workers_num_tasks) else ""
    last = ", no more" if number < len(state.workers_status) and not state.workers_status[number] else ""
    queue = f"; queue: {_messages(worker.index_queue)}" if worker.index_queue else ""
    sampling = worker.position if worker.activity == ev.SAMPLE[0] else -1
    place = f", place {sampling + 1} in its batch" if sampling >= 0 else ""
    return StateLine(f"worker {number}", f"{worker.state.name}{tasks}{last}, {worker.doing}{place}{queue}", shown)


def _training_loop(state: ProtocolState) -> StateLine:
    shown = {"consumer": _or_none(state.consumer), "yielded": str(state.yielded)}
    doing = ""
    if state.consumer is not None:
        doing = f"works on task {state.consumer}, " if state.consumer >= 0 else "its own code runs, "
    batches = counted(state.yielded, "batch", "batches")
    return StateLine("training loop", f"{doing}{batches} of this epoch handed out", shown)


def _state(state: ProtocolState) -> StateLine:
    """The loader's state: of what was yielded, not of what was fetched."""
    shown = {f"kept[{worker}]": f"of task {task}" for worker, task in state.kept.items()}
    shown |= {"resumed": str(state.resumed), "taken": _or_none(state.taken)}
    phrases = [f"resumed after {counted(state.resumed, 'batch', 'batches')}"] if state.resumed else []
    for worker, task in state.kept.items():
        phrases.append(f"{f'worker {worker}' if worker >= 0 else 'the loader'}'s is of task {task}")
    phrases += [] if state.taken is None else [f"taken after {counted(state.taken, 'batch', 'batches')}"]
    return StateLine("state", ", ".join(phrases), shown)


def _queue(name: str, queue: Iterable[Queued]) -> dict[str, str]:
    out: dict[str, str] = {}
    for message in queue:
        of = f" of worker {message.worker}" if name == "result_queue" and message.worker >= 0 else ""
        key, again = f"{name}[{message.name}{of}]", 2
        while key in out:  # a task of the same number, of an epoch that was left early
            key, again = f"{name}[{message.name}{of}, {again}]", again + 1
        out[key] = message.stage.value
    return out


def _messages(queue: Iterable[Queued]) -> str:
    return ", ".join(f"{message.name} ({message.stage.value})" for message in queue)


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
