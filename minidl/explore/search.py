"""Going through all runs of a model: depth first to judge every state, breadth first for the shortest run that is bad.

`explore(model)` visits each reachable state once. A run is bad if a step breaks a rule (the state's `fault`), if no
actor can go on though the run is not over (a hang, or a worker that outlives the loader), if a run without a crash has
to wait for a timeout, and if a state can come back: then a run need not end. `shortest(model)` gives the steps of a
shortest bad run, `counterexample(guard, configuration)` one of the loader without a guard.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from minidl.explore import world as at
from minidl.explore.configurations import Configuration
from minidl.explore.guards import Guard, own
from minidl.explore.model import Model
from minidl.explore.steps import RAN_OUT, Label, Step
from minidl.explore.threads import model_of
from minidl.explore.world import CRASHED, CREW, FAULT, PHASE, State

_State = TypeVar("_State")
_Label = TypeVar("_Label")
_Bad = TypeVar("_Bad")

Progress = Callable[[int], None]
"""Called now and then with the number of states seen."""

EVERY = 20_000
"""States between two calls of it."""


@dataclass(frozen=True)
class Bad:
    """What is wrong in a state: a word for its kind, and a sentence."""

    kind: str
    what: str


@dataclass
class Found:
    """What `explore` has seen: states, steps between them, states in which a run ends, and what is bad.

    seconds: of processor time.
    """

    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    ends: int = 0
    bad: list[Bad] = field(default_factory=list)


def judge(model: Model, state: State, steps: list[Step]) -> Bad | None:
    """What is wrong in `state`, from which `steps` lead on."""
    if state[FAULT]:
        return Bad("rule", state[FAULT])
    if not steps:
        return None if model.over(state) else _stands(state)
    waits = all(label[1] in RAN_OUT for label, _ in steps)
    if waits and (not state[CRASHED] or not model.configuration.crashes):
        return Bad("stall", f"no actor has crashed, and only a timeout lets the run go on: {_who(state)}")
    return None


def _stands(state: State) -> Bad:
    if state[PHASE] in at.OVER:
        return Bad("orphan", f"the loader's process is gone, and {_who(state).partition('; ')[2]}, forever")
    return Bad("hang", f"no actor can go on: {_who(state)}")


def _who(state: State) -> str:
    crew = ", ".join(f"worker {number} {_PLACES.get(w.place, w.place)}" for number, w in enumerate(state[CREW]))
    return f"the loader {_PLACES.get(state[PHASE], state[PHASE])}; {crew}"


_PLACES = {
    place: f"is {place}"
    for place in (
        *(at.GONE, at.BLOCKED, at.STUCK, at.SLEEPS, at.DYING, at.STOPPED),
        *(at.READING, at.ENDED, at.KILLED, at.CLOSED, at.IDLE),
    )
} | {at.RUNNING: "waits for a task"}


def explore(model: Model, progress: Progress | None = None) -> Found:
    """Visit every reachable state; stops at the first bad one."""
    found, began = Found(), time.process_time()
    open_now: dict[State, bool] = {model.initial: True}  # True: on the path from the beginning
    path: list[tuple[State, Iterator[Step]]] = []

    def enter(state: State) -> None:
        steps = model.steps(state)
        found.states += 1
        wrong = judge(model, state, steps)
        if wrong is not None:
            found.bad.append(wrong)
        following = [] if wrong is not None and wrong.kind == "rule" else [*steps, *model.crashes(state)]
        found.steps += len(following)
        found.ends += not steps
        path.append((state, iter(following)))
        if progress is not None and found.states % EVERY == 0:
            progress(found.states)

    enter(model.initial)
    while path and not found.bad:
        state, following = path[-1]
        for _, after in following:
            seen = open_now.get(after)
            if seen is None:
                open_now[after] = True
                enter(after)
                break
            if seen:
                found.bad.append(Bad("endless", f"the state comes back: {_who(after)}"))
                break
        else:
            open_now[state] = False
            path.pop()
    found.seconds = time.process_time() - began
    return found


@dataclass
class Path(Generic[_State, _Label, _Bad]):
    """A run: its steps' labels, the states before, between and after them, and what is wrong in the last one."""

    labels: list[_Label]
    states: list[_State]
    bad: _Bad

    def __len__(self) -> int:
        return len(self.labels)


Run = Path[State, Label, Bad | None]


def shortest(model: Model, progress: Progress | None = None) -> Run | None:
    """A shortest run into a bad state; None if there is none."""

    def look(state: State) -> tuple[Bad | None, Iterable[Step]]:
        steps = model.steps(state)
        return judge(model, state, steps), [*steps, *model.crashes(state)]

    return breadth_first(model.initial, look, progress)[1]


def counterexample(
    guard: Guard, configuration: Configuration, *, reduced: bool = True, progress: Progress | None = None
) -> tuple[Model, Run | None]:
    """The loader without a guard, and a shortest run of it that goes wrong; None if there is none."""
    model = model_of(configuration, own(configuration).without(guard.field), reduced=reduced)
    return model, shortest(model, progress)


def in_words(run: Run) -> Iterator[str]:
    """The steps of a run, each in words."""
    for who, what, which in run.labels:
        yield f"{who} {what}{f' {which}' if which >= 0 else ''}"


def breadth_first(
    begin: _State,
    look: Callable[[_State], tuple[_Bad, Iterable[tuple[_Label, _State]]]],
    progress: Progress | None = None,
) -> tuple[int, Path[_State, _Label, _Bad] | None]:
    """Visit states in order of their distance; how many there are, and a shortest run to a bad one, if there is one.

    look: what is wrong in a state (false if nothing is), and the steps that lead on, each with its label.
    """
    came: dict[_State, tuple[_State, _Label] | None] = {begin: None}
    todo = deque([begin])
    while todo:
        state = todo.popleft()
        wrong, steps = look(state)
        if wrong:
            return len(came), _run_to(state, came, wrong)
        for label, after in steps:
            if after not in came:
                came[after] = (state, label)
                todo.append(after)
        if progress is not None and len(came) % EVERY == 0:
            progress(len(came))
    return len(came), None


def _run_to(state: _State, came: dict[_State, tuple[_State, _Label] | None], wrong: _Bad) -> Path[_State, _Label, _Bad]:
    labels: list[_Label] = []
    states = [state]
    while (step := came[states[-1]]) is not None:
        labels.append(step[1])
        states.append(step[0])
    return Path(labels[::-1], states[::-1], wrong)
