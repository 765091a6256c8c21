"""A model's run as a trace: the same files that a recorder writes, so that every command and view reads it.

`write(directory, model, run)` writes one process's pair of files for the loader and for each worker. The manifest says
that the run was explored and never happened (`"explored"`), with its configuration, the guards that were taken away
and what goes wrong; each step is a line "step" in the loader's side file. Times are made up: 1 ms a step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from minidl.explore.guards import own
from minidl.explore.model import Model
from minidl.explore.search import Run
from minidl.explore.steps import MAIN, PIN_THREAD, Label, Step
from minidl.explore.threads import ThreadModel
from minidl.explore.world import State, World
from minidl.record.made_up import LOADER, LOADER_PID, MadeUpRun, Thread, pid_of
from minidl.tracefile import events as ev

STEP: Final = 1_000_000
"""Made-up length of a step, ns."""
SEED: Final = 0

ToldEvent = tuple[Thread, int, tuple[int, ...]]
"""Process and thread of an event, its code, its other arguments."""


class Telling(Model):
    """A model that keeps the events of each step it offers."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.configuration, model.protocol, reduced=model.reduced, driving=model.driving)
        self.told: dict[Step, list[ToldEvent]] = {}
        self._heard: list[ToldEvent] = []
        self.say = self._hear

    def _hear(self, thread: Thread, code: int, *arguments: int) -> None:
        self._heard.append((thread, code, arguments))

    def _took(self, out: list[Step], world: World, who: str, what: str, which: int = -1) -> None:
        super()._took(out, world, who, what, which)
        self.told[out[-1]], self._heard = self._heard, []


class ThreadTelling(Telling, ThreadModel):
    """The same of worker threads."""


def telling_of(model: Model) -> Telling:
    """A copy of a model that keeps the events of its steps."""
    return (ThreadTelling if model.configuration.threads else Telling)(model)


def told_by_step(model: Model, run: Run) -> list[list[ToldEvent]]:
    """The events of each step of a run."""
    telling = telling_of(model)
    out = []
    gone: set[int] = set()
    for before, label, after in zip(run.states[:-1], run.labels, run.states[1:], strict=True):
        events = told(telling, before, label, after)
        out.append([event for event in events if event[1] != ev.WORKER_GONE or event[2][1] not in gone])
        gone |= {event[2][1] for event in events if event[1] == ev.WORKER_GONE}
    return out


def told(telling: Telling, before: State, label: Label, after: State) -> list[ToldEvent]:
    """The events of one step."""
    telling.told.clear()
    telling.steps(before)
    telling.crashes(before)
    return telling.told[label, after]


def opening(model: Model) -> list[ToldEvent]:
    """What comes before a model's first step: all actors are started."""
    out: list[ToldEvent] = []
    for number in range(model.configuration.workers):
        out.append((MAIN, ev.WORKER_START[0], (-1, number)))
        out.append((MAIN, ev.WORKER_START[1], (-1, number, pid_of(number))))
        out.append(((number, 0), ev.WORKER_READY, (-1, number, pid_of(number), LOADER_PID, SEED + number)))
        out.append(((number, 0), ev.INDEX_GET[0], (-1, number)))
    if model.configuration.pin:
        out.append((PIN_THREAD, ev.PIN_START, (-1, -1, 1)))
        out.append((PIN_THREAD, ev.RESULT_GET[0], (-1, -1, 5_000_000_000)))
    return out


def write(directory: str | os.PathLike[str], model: Model, run: Run, **facts: Any) -> Path:
    """Write the run into `directory`, which is made for it; its path. `facts` go into the manifest.

    Raises TraceError if the directory holds a trace or cannot be written.
    """
    steps, ours = [opening(model), *told_by_step(model, run)], own(model.configuration)
    explored = {
        "configuration": model.configuration.describe(),
        "without": [name for name, there in vars(model.protocol).items() if there != getattr(ours, name)],
        "wrong": "" if run.bad is None else run.bad.what,
        "times": "made up: 1 ms a step",
    }
    made = MadeUpRun()
    for number, events in enumerate(steps):
        for place, (thread, code, arguments) in enumerate(events):
            made.add(number * STEP + place * (STEP * 4 // 5) // len(events), thread, code, arguments)
    lines = [{"kind": "step", "number": n, "who": who, "what": what, "which": which}
             for n, (who, what, which) in enumerate(run.labels, 1)]  # fmt: skip
    lines.append({"kind": "loader", "loader": LOADER, **_parameters(model)})
    return made.write(directory, lines, {"explored": explored, **facts}, host="a model, not a machine")


def _parameters(model: Model) -> dict[str, Any]:
    c = model.configuration
    return {"dataset": "a model's", "dataset_kind": "map" if c.streams is None else "iterable",
            "num_workers": c.workers, "in_order": c.in_order, "persistent_workers": c.persistent, "pin_memory": c.pin,
            "pin_memory_device": "simulated" if c.pin else None, "timeout_s": 0, "batch_size": 1,
            **({"transport": "thread"} if c.threads else {})}  # fmt: skip
