"""A model's run as a trace: the same files that a recorder writes, so that every command and view reads it.

`write(directory, model, run)` writes one process's pair of files for the loader and for each worker. The manifest says
that the run was explored and never happened (`"explored"`), with its configuration, the guards that were taken away
and what goes wrong; each step is a line "step" in the loader's side file. Times are made up: 1 ms a step.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from minidl.explore.guards import OURS
from minidl.explore.model import Model
from minidl.explore.search import Run
from minidl.explore.steps import MAIN, PIN_THREAD, Label, Step
from minidl.explore.world import State, World
from minidl.record.recorder import create
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS
from minidl.tracefile.format import EVENTS_SUFFIX, PACK, SIDE_SUFFIX, Header, side_line, stem_of

START: Final = 1_000_000_000
"""Monotonic ns of a run's first event."""
STEP: Final = 1_000_000
"""Made-up length of a step, ns."""
LOADER_PID: Final = 1000
LOADER: Final = 1
SEED: Final = 0

Thread = tuple[int, int]
Told = tuple[Thread, int, tuple[int, ...]]
"""Process and thread of an event, its code, its other arguments."""


class Telling(Model):
    """A model that keeps the events of each step it offers."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.configuration, model.protocol, reduced=model.reduced, driving=model.driving)
        self.told: dict[Step, list[Told]] = {}
        self._heard: list[Told] = []
        self.say = self._hear

    def _hear(self, thread: Thread, code: int, *arguments: int) -> None:
        self._heard.append((thread, code, arguments))

    def _took(self, out: list[Step], world: World, who: str, what: str, which: int = -1) -> None:
        super()._took(out, world, who, what, which)
        self.told[out[-1]], self._heard = self._heard, []


def told_by_step(model: Model, run: Run) -> list[list[Told]]:
    """The events of each step of a run."""
    telling = Telling(model)
    out = []
    gone: set[int] = set()
    for before, label, after in zip(run.states[:-1], run.labels, run.states[1:], strict=True):
        events = told(telling, before, label, after)
        out.append([event for event in events if event[1] != ev.WORKER_GONE or event[2][1] not in gone])
        gone |= {event[2][1] for event in events if event[1] == ev.WORKER_GONE}
    return out


def told(telling: Telling, before: State, label: Label, after: State) -> list[Told]:
    """The events of one step."""
    telling.told.clear()
    telling.steps(before)
    telling.crashes(before)
    return telling.told[label, after]


def opening(model: Model) -> list[Told]:
    """What comes before a model's first step: all actors are started."""
    out: list[Told] = []
    for number in range(model.configuration.workers):
        out.append((MAIN, ev.WORKER_START[0], (-1, number)))
        out.append((MAIN, ev.WORKER_START[1], (-1, number, _pid(number))))
        out.append(((number, 0), ev.WORKER_READY, (-1, number, _pid(number), LOADER_PID, SEED + number)))
        out.append(((number, 0), ev.INDEX_GET[0], (-1, number)))
    if model.configuration.pin:
        out.append((PIN_THREAD, ev.PIN_START, (-1, -1, 1)))
        out.append((PIN_THREAD, ev.RESULT_GET[0], (-1, -1, 5_000_000_000)))
    return out


def _pid(process: int) -> int:
    return LOADER_PID + 1 + process


def _tid(thread: Thread) -> int:
    return _pid(thread[0]) if thread[1] == 0 else 10 * _pid(thread[0]) + thread[1]


def write(directory: str | os.PathLike[str], model: Model, run: Run, **facts: Any) -> Path:
    """Write the run into `directory`, which is made for it; its path. `facts` go into the manifest.

    Raises TraceError if the directory holds a trace or cannot be written.
    """
    steps = [opening(model), *told_by_step(model, run)]
    explored = {
        "configuration": model.configuration.describe(),
        "without": [name for name, there in vars(model.protocol).items() if there != getattr(OURS, name)],
        "wrong": "" if run.bad is None else run.bad.what,
        "times": "made up: 1 ms a step",
    }
    told_facts = {"explored": explored, "host": "a model, not a machine", "pid": LOADER_PID,
                  "cpus": None, "cpus_allowed": None, "cpu_quota": None,
                  "realtime_ns": START, "monotonic_ns": START, "detail": "sample", "ring_bytes": None}  # fmt: skip
    path = create(directory, **told_facts, **facts)
    records: dict[int, list[bytes]] = defaultdict(list)
    threads: dict[int, set[Thread]] = defaultdict(set)
    for number, events in enumerate(steps):
        for place, (thread, code, arguments) in enumerate(events):
            time = START + number * STEP + place * (STEP * 4 // 5) // len(events)
            threads[thread[0]].add(thread)
            own = records[thread[0]]
            own.append(_record(time, thread, code, arguments, len(own) + 1))
    lines = [{"kind": "step", "number": n, "who": who, "what": what, "which": which}
             for n, (who, what, which) in enumerate(run.labels, 1)]  # fmt: skip
    lines.append({"kind": "loader", "loader": LOADER, **_parameters(model)})
    for process, own in records.items():
        _write_process(path, process, own, sorted(threads[process]), lines if process < 0 else [])
    return path


def _record(time: int, thread: Thread, code: int, arguments: tuple[int, ...], seq: int) -> bytes:
    task, worker, *own = (*arguments, -1, -1)[:2] if len(arguments) < 2 else arguments
    xyz = [int(value) for value in (*own, 0, 0, 0)[:3]]
    for place, field in enumerate(EVENTS[code].fields):
        if field.name == "pid" and worker >= 0:
            xyz[place] = _pid(worker)
    return PACK.pack(time, code, LOADER, _tid(thread), task, worker, *xyz, seq)


def _parameters(model: Model) -> dict[str, Any]:
    c = model.configuration
    return {"dataset": "a model's", "dataset_kind": "map" if c.streams is None else "iterable",
            "num_workers": c.workers, "in_order": c.in_order, "persistent_workers": c.persistent, "pin_memory": c.pin,
            "pin_memory_device": "simulated" if c.pin else None, "timeout_s": 0, "batch_size": 1}  # fmt: skip


def _write_process(
    path: Path, process: int, records: list[bytes], threads: list[Thread], lines: list[dict[str, Any]]
) -> None:
    pid = _pid(process)
    stem = stem_of(pid, START + process + 1)
    role: dict[str, Any] = {"role": "loader"} if process < 0 else {"role": "worker", "worker": process}
    parent = LOADER_PID - 1 if process < 0 else LOADER_PID
    side = [side_line("process", pid=pid, ppid=parent, loader=LOADER, argv=[], **role)]
    side += [side_line("thread", tid=_tid(thread), name=_thread_name(thread)) for thread in threads]
    side += [side_line(**line) for line in lines]
    (path / (stem + SIDE_SUFFIX)).write_bytes(b"".join(side))
    header = Header(pid, START, START, slots=len(records))
    (path / (stem + EVENTS_SUFFIX)).write_bytes(header.page() + b"".join(records))


def _thread_name(thread: Thread) -> str:
    process, number = thread
    if number == 0:
        return "MainThread"
    if process < 0:
        return {1: "pin_memory", 2: "QueueFeederThread (results)"}.get(number, f"QueueFeederThread ({number - 3})")
    return "QueueFeederThread"
