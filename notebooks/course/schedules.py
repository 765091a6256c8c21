"""A student's loader under a scheduler: each run takes its steps in another order, and a worker may be killed before any of them.

Interface: `executed(source, path)` -> the student's file as a module; `explored(program, given, dice)` runs a program that uses
it. The file has a `multiprocessing`, `threading`, `queue`, `os`, `signal` and `time` of this module. Its processes and threads are threads here, of which one runs at a time; before each step (a put, a
get, a join, a look at an event) the scheduler chooses who goes next. By itself it lets one go on until it waits. The runs
that are tried: each that differs from this in one choice, in a random order, then runs of random choices. Time passes only
when everybody waits: no timeout ends while another can go on. Simulated: a queue's feeder threads, pipes that hold one
message, half a message of a worker that has left, kills, SIGCHLD. Not simulated: other signals, memory that is shared, a copy of
the iterator in a worker, a kill in the middle of a step or of a message. A file that uses a name that is not simulated, in a worker too, is not tried.
"""

from __future__ import annotations

import builtins
import itertools
import linecache
import math
import multiprocessing
import os
import pickle
import queue
import random
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from course.checking import Wrong

RUNS = 400
"""How many orders of the steps a trial tries."""
STEPS = 3000
"""A run of more steps does not end."""
SPIN = 50
"""Who takes so many steps in turn lets the others go: it waits by looking again and again."""
VAIN = ": in vain"
"""The end of a step whose time was up."""
SHOWN = 40
"""How many of its last steps are shown of a run that goes wrong."""


class Ended(BaseException):
    """Raised at each step of one that was killed, or whose run is over."""


class Stuck(BaseException):
    """Nobody can go on, or the run has no end. Raised at each step of the loop."""


class Unknown(BaseException):
    """The student's file uses something that is not simulated."""


@dataclass(eq=False)
class Actor:
    """One thread of one process, or the loop. ready: whether its next step can be taken; deadline: when it gives up."""

    name: str
    process: Process | None = None
    doing: str = "begins"
    ready: Callable[[], bool] = lambda: True
    deadline: float = math.inf
    over: bool = False
    thread: threading.Thread | None = None
    go: threading.Semaphore = field(default_factory=partial(threading.Semaphore, 0))


@dataclass(eq=False)
class Feeder:
    """The thread that writes what one process has put into a queue; a worker's message in two steps, as it may be large."""

    queue: Queue
    process: Process | None
    buffer: deque[bytes] = field(default_factory=deque)
    joined: bool = True

    def ready(self) -> bool:
        return bool(self.buffer) and not self.queue.pipe and self.queue.writer in (None, self)

    def act(self) -> None:
        if self.process is not None and self.queue.writer is None:
            self.queue.writer = self
            HERE.trail.append(f"feeder thread of {self.process}: begins to write to {self.queue}")
            return
        self.queue.writer = None
        self.queue.pipe.append(self.buffer.popleft())
        HERE.trail.append(f"feeder thread of {self.process or 'the loop'}: writes to {self.queue}")


@dataclass(eq=False)
class Kill:
    """A worker is killed from outside."""

    process: Process

    def act(self) -> None:
        HERE.kills -= 1
        HERE.trail.append(f"{self.process} is killed")
        self.process.die(-9)


class World:
    """One run. choose: given how many can go on, which of them does."""

    def __init__(self, choose: Callable[[int], int] = lambda options: 0, kills: int = 0) -> None:
        self.choose, self.kills = choose, kills
        self.loop = Actor("the loop", thread=threading.current_thread())
        self.actors, self.processes, self.feeders = [self.loop], [], []
        self.trail: list[str] = []
        self.now, self.spun, self.stuck = 0.0, 0, ""
        self.unknown: Unknown | None = None
        self.names: dict[str, int] = {}
        self.handler: Any = signal.SIG_DFL
        self.signalled = False

    def me(self) -> Actor:
        """The actor that runs."""
        thread = threading.current_thread()
        return next((actor for actor in reversed(self.actors) if actor.thread is thread), Actor("", over=True))

    def step(self, doing: str, ready: Callable[[], bool] = lambda: True, timeout: float | None = None) -> bool:
        """Let the scheduler choose; take the step once it is ready. Returns False if it was not within `timeout`."""
        me = self.me()
        self._goes_on(me)
        me.doing, me.ready = doing, ready
        me.deadline = math.inf if timeout is None else self.now + max(0.0, timeout)
        self._wait(me)
        if me is self.loop and self.signalled:
            self.signalled = False
            self.trail.append("the loop: its handler of SIGCHLD runs")
            self.handler(signal.SIGCHLD, None)  # what it raises comes out of the step
            return self.step(doing, ready, timeout)
        done = ready()
        self.trail.append(f"{me.name}: {doing}{'' if done else VAIN}")
        return done

    def _wait(self, me: Actor) -> None:
        """Let others go, until this one is chosen."""
        chosen = self._next(me)
        if chosen is not me:
            chosen.go.release()
            if not me.over:  # or it was killed before this step
                me.go.acquire()
        self._goes_on(me)

    def _goes_on(self, me: Actor) -> None:
        if me.over:
            raise Ended
        if me is self.loop and (self.unknown or self.stuck):
            raise self.unknown or Stuck(self.stuck)

    def _next(self, me: Actor) -> Actor:
        while True:
            place = self.actors.index(me)
            order = [actor for actor in self.actors[place:] + self.actors[:place] if not actor.over]
            turns: list[Any] = [*order, *self.feeders]
            if self.spun > SPIN:  # a feeder thread first, or those who look again and again would keep it from writing
                turns, self.spun = [*self.feeders, *order[1:], *order[:1]], 0
            able = [one for one in turns if one.ready()]
            if self.signalled and self.loop in order and self.loop not in able:
                able.append(self.loop)
            if not able:
                soonest = min((actor.deadline for actor in order if actor.deadline < math.inf), default=self.now)
                self.now = soonest
                able = [actor for actor in order if actor.deadline == soonest]
            if not able or len(self.trail) > STEPS:
                why = "Nobody can go on" if not able else f"There is no end after {STEPS:,} steps"
                self.stuck = ". ".join([why, *(f"{actor.name}: {actor.doing}" for actor in order)])
                return self.loop
            if self.kills:
                busy = [feeder.process for feeder in self.feeders if feeder.queue.writer is feeder]
                able += [Kill(one) for one in self.processes if one.exitcode is None and one not in busy]
            chosen = able[self.choose(len(able)) if len(able) > 1 else 0]
            if isinstance(chosen, Actor):
                self.spun = self.spun + 1 if chosen is me else 0
                return chosen
            chosen.act()

    def begin(self, actor: Actor, function: Callable[[], object]) -> None:
        """Start an actor, which waits until it is chosen."""
        actor.thread = threading.Thread(target=self._life, args=(actor, function), daemon=True)
        self.actors.append(actor)
        actor.thread.start()

    def _life(self, actor: Actor, function: Callable[[], object]) -> None:
        actor.go.acquire()
        code = 0
        try:
            if not actor.over:
                function()
        except Ended:
            return
        except Unknown as name:
            self.unknown = name
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        try:
            if actor.process is not None and actor.process.actor is actor:
                actor.process.leave(code)
        except Ended:
            return
        actor.over = True
        self._next(actor).go.release()

    def end(self, actors: list[Actor]) -> None:
        """End these actors: each of their steps raises."""
        for actor in actors:
            if not actor.over and actor is not self.loop:
                actor.over = True
                if actor.thread is not threading.current_thread():
                    actor.go.release()
                    actor.thread.join(1)  # type: ignore[union-attr]

    def name(self, kind: str) -> str:
        """A name for an object: what the student's line assigns it to, with a number from the second on."""
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back  # type: ignore[assignment]
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        found = re.match(r"\s*(?:self\.)?(\w+)\s*=[^=]", line)
        name = found[1] if found else kind
        number = self.names[name] = self.names.get(name, -1) + 1
        return f"{name} {number}" if number else name


HERE = World()


# --- What stands in the places of multiprocessing, threading, queue, os and time --------------------------------------
class Named:
    """Something with a name. What it has not is not simulated."""

    kind = "queue"

    def __init__(self) -> None:
        self.label = HERE.name(self.kind)

    def __repr__(self) -> str:
        return self.label

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else Unknown(name)


class Inside(Named):
    """A queue between threads: what is put is there. writer: who is in the middle of a message, which never ends if its process does."""

    writer: Feeder | None = None

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.pipe: deque[Any] = deque()
        self.size, self.most = 0, maxsize if maxsize > 0 else math.inf

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._step(f"puts {_short(item)} into {self}", lambda: self.size < self.most, block, timeout, queue.Full)
        self.size += 1
        self._add(item)

    def _add(self, item: Any) -> None:
        self.pipe.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._step(f"takes from {self}", lambda: bool(self.pipe or self.writer), block, timeout, queue.Empty)
        item = self._take()
        self.size -= 1
        HERE.trail[-1] += f" {_short(item)}"
        return item

    def _take(self) -> Any:
        return self.pipe.popleft()

    def _step(self, doing: str, ready: Callable[[], bool], block: bool, timeout: float | None, error: type) -> None:
        HERE.step(doing, ready if block else lambda: True, timeout)
        if not ready():
            HERE.trail[-1] = VAIN
            raise error

    def empty(self) -> bool:
        HERE.step(f"looks whether {self} is empty")
        return not self.pipe

    def qsize(self) -> int:
        return self.size

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)


class Queue(Inside):
    """A queue between processes: a feeder thread of each process that puts writes into its pipe."""

    def __init__(self, maxsize: int = 0, ctx: object = None) -> None:
        super().__init__(maxsize)
        self.closed: set[Process | None] = set()

    def feeder(self) -> Feeder:
        """The feeder of this process."""
        process = HERE.me().process
        found = next((one for one in HERE.feeders if (one.queue, one.process) == (self, process)), None)
        if found is None:
            HERE.feeders.append(found := Feeder(self, process))
        return found

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if HERE.me().process in self.closed:
            raise ValueError(f"Queue {self!r} is closed")
        super().put(item, block, timeout)

    def _add(self, item: Any) -> None:
        self.feeder().buffer.append(pickle.dumps(item))

    def _take(self) -> Any:
        if not self.pipe:  # no timeout: it holds for the first byte
            HERE.step(f"reads the rest of a message in {self}", lambda: bool(self.pipe))
        return pickle.loads(self.pipe.popleft())

    def cancel_join_thread(self) -> None:
        self.feeder().joined = False

    def join_thread(self) -> None:
        feeder = self.feeder()
        if feeder.joined:
            HERE.step(f"waits for its feeder thread of {self}", lambda: not feeder.buffer)

    def close(self) -> None:
        self.closed.add(HERE.me().process)


class Event(Named):
    kind = "event"

    def __init__(self) -> None:
        super().__init__()
        self.flag = False

    def set(self) -> None:
        HERE.step(f"sets {self}")
        self.flag = True

    def clear(self) -> None:
        HERE.step(f"clears {self}")
        self.flag = False

    def is_set(self) -> bool:
        HERE.step(f"looks at {self}")
        return self.flag

    def wait(self, timeout: float | None = None) -> bool:
        return HERE.step(f"waits for {self}", lambda: self.flag, timeout)


class Task(Named):
    """What can be started and joined."""

    def __init__(
        self, group: None = None, target: Callable[..., object] | None = None, name: str | None = None, args: Any = (),
        kwargs: Any = None, *, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self.actor: Actor | None = None
        self.work: partial[Any] = partial(target or (lambda: None), *args, **kwargs or {})
        self.name, self.daemon = name or self._named(target), bool(daemon)

    def __repr__(self) -> str:
        return self.name

    def start(self) -> None:
        HERE.step(f"starts {self}")
        self.actor = Actor(self.name, self._process())
        HERE.begin(self.actor, self.run)

    def run(self) -> None:
        """What it does; a subclass may say something else."""
        vars(self).pop("work")()  # not kept: a dropped iterator may be in its arguments

    def join(self, timeout: float | None = None) -> None:
        HERE.step(f"joins {self}", lambda: self._over(), timeout)

    def is_alive(self) -> bool:
        HERE.step(f"looks whether {self} lives")
        return self.actor is not None and not self._over()


class Thread(Task):
    def _named(self, target: Any) -> str:
        return f"thread of {getattr(target, '__name__', 'no name')}"

    def _process(self) -> Process | None:
        return HERE.me().process

    def _over(self) -> bool:
        return self.actor is not None and self.actor.over


class Process(Task):
    exitcode: int | None = None

    def _named(self, target: Any) -> str:
        return f"worker {len(HERE.processes)}"

    def _process(self) -> Process:
        given = getattr(self.work.func, "__self__", None), *self.work.args, *self.work.keywords.values()
        if any(hasattr(type(one), "__del__") for one in given):  # the worker would have a copy of the iterator
            raise Unknown("a worker that is given the iterator")
        self.pid = LOOP + 1 + len(HERE.processes)
        HERE.processes.append(self)
        return self

    def _over(self) -> bool:
        return self.exitcode is not None

    def leave(self, code: int) -> None:
        """It has come to its end, and waits for its feeder threads."""
        mine = [feeder for feeder in HERE.feeders if feeder.process is self and feeder.joined]
        HERE.step("leaves once its feeder threads have written", lambda: not any(one.buffer for one in mine))
        self.die(code)

    def die(self, code: int) -> None:
        """It is no more: what it has not yet written is lost."""
        if self.exitcode is None:
            self.exitcode = code
            HERE.signalled = HERE.signalled or callable(HERE.handler)
            HERE.feeders = [feeder for feeder in HERE.feeders if feeder.process is not self]
            HERE.end([actor for actor in HERE.actors if actor.process is self])

    def terminate(self) -> None:
        HERE.step(f"terminates {self}")
        self.die(-15)

    def kill(self) -> None:
        HERE.step(f"kills {self}")
        self.die(-9)

    def close(self) -> None:
        pass


class Simulated(ModuleType):
    """A module of which some names are simulated. but: of the others, those that may not be used (None: all of them)."""

    def __init__(self, real: ModuleType, known: dict[str, Any], but: tuple[str, ...] | None = ()) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(known)
        self._real, self._but = real, but

    def __getattr__(self, name: str) -> Any:
        if name in self._but if self._but is not None else not name.startswith("__"):
            raise Unknown(f"{self.__name__}.{name}")
        return getattr(self._real, name)


def _kill(pid: int, number: int) -> None:
    HERE.step(f"sends signal {int(number)} to {pid}")
    for process in HERE.processes:
        if process.pid == pid and number:
            if process is HERE.me().process:
                raise Unknown("os.kill of the process itself")
            process.die(-number)


def _handle(number: int, handler: Any) -> Any:
    if number != signal.SIGCHLD:
        raise Unknown("signal.signal of another signal than SIGCHLD")
    previous, HERE.handler = HERE.handler, handler
    return previous


def _short(item: object) -> str:
    return textwrap.shorten(repr(item), 50, placeholder=" ...")


LOOP = 999
"""The process id of the loop."""
NS = "monotonic_ns", "perf_counter_ns", "time_ns"
LOCKS = "Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Timer"


def _modules() -> dict[str, ModuleType]:
    between = {
        "Queue": Queue, "Event": Event, "Process": Process, "get_context": lambda method=None: modules["multiprocessing"],
        "active_children": lambda: [process for process in HERE.processes if process.exitcode is None],
        "parent_process": lambda: HERE.me().process and SimpleNamespace(pid=LOOP, is_alive=lambda: True),
    }  # fmt: skip
    sleep = lambda seconds: HERE.step(f"sleeps {seconds:g} s", lambda: False, seconds)  # noqa: E731
    clock = lambda: HERE.now  # noqa: E731
    pids = {"getpid": lambda: getattr(HERE.me().process, "pid", LOOP), "getppid": lambda: LOOP if HERE.me().process else 1}
    handling = {"signal": _handle, "getsignal": lambda number: HERE.handler}
    modules: dict[str, ModuleType] = {
        "multiprocessing": Simulated(multiprocessing, between, None),
        "threading": Simulated(threading, {"Thread": Thread, "Event": Event}, LOCKS),
        "queue": Simulated(queue, {"Queue": Inside, "SimpleQueue": Inside}, ("LifoQueue", "PriorityQueue")),
        "os": Simulated(os, {**pids, "kill": _kill}, ("_exit", "killpg", "fork", "wait", "waitpid")),
        "signal": Simulated(signal, handling, ("set_wakeup_fd", "alarm", "setitimer", "pause")),
        "time": Simulated(time, {"sleep": sleep, "monotonic": clock, "perf_counter": clock, "time": clock}, NS),
    }
    return modules


def executed(source: str, path: str) -> ModuleType:
    """The student's file as a module, whose imports are of what is simulated. Raises Unknown if it imports more."""
    modules = _modules()
    torch.multiprocessing = sys.modules["torch.multiprocessing"] = modules["multiprocessing"]

    def imported(name: str, *more: Any) -> Any:
        top, _, rest = name.removeprefix("torch.").partition(".")
        if top in modules and rest:
            raise Unknown(name)
        return modules[name] if name in modules else builtins.__import__(name, *more)

    module = sys.modules["students_loader"] = ModuleType("students_loader")
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported}
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def _unraisable(what: Any) -> None:
    """Say nothing of what this module raises in a `__del__`."""
    if what.exc_type not in (Ended, Stuck):
        sys.__unraisablehook__(what)


# --- The runs ---------------------------------------------------------------------------------------------------------
class Choices:
    """What is chosen in a run: at each place what `at` says, else the first; how many could be, for the next runs."""

    def __init__(self, at: dict[int, int], dice: random.Random | None = None) -> None:
        self.at, self.dice = at, dice
        self.options: list[int] = []

    def __call__(self, options: int) -> int:
        self.options.append(options)
        if self.dice is not None and self.dice.random() < 0.3:
            return self.dice.randrange(options)
        return min(self.at.get(len(self.options) - 1, 0), options - 1)


def _orders(dice: random.Random) -> Iterator[Choices]:
    yield (first := Choices({}))
    single = [{place: other} for place, options in enumerate(first.options) for other in range(1, options)]
    dice.shuffle(single)
    yield from map(Choices, single)
    while True:
        yield Choices({}, dice)


def explored(program: Callable[[], None], given: str, dice: random.Random, kills: int = 0, soon: float = 10) -> None:
    """Run the program in RUNS orders of its steps. Raises Wrong for the first that goes wrong, with its steps.

    program: raises Wrong if something else came than it expects. kills: how many workers are killed in a run, at most. After
    it, nobody may be left for more than `soon` seconds.
    """
    global HERE
    sys.unraisablehook = _unraisable
    for number, choices in enumerate(itertools.islice(_orders(dice), RUNS)):
        HERE = World(choices, kills)
        try:
            program()
            others = [actor for actor in HERE.actors if actor is not HERE.loop]
            HERE.kills = 0
            HERE.step("is over", lambda: all(one.over for one in others), soon)  # noqa: B023
            left = [f"{one.name}: {one.doing}" for one in others if not one.over]
            if left:
                raise Wrong(f"Given: {given}. Expected: nobody is left. Got: {'; '.join(left)}.", "")
        except (Wrong, Stuck) as error:
            words = str(error) if isinstance(error, Wrong) else f"Given: {given}. Expected: an end. Got: {error}."
            raise Wrong(
                words, "", evidence="\n".join([f"Run {number + 1}, its steps in their order:", *_shown()])
            ) from None
        finally:
            HERE.end(HERE.actors)


def _shown() -> list[str]:
    """The last steps of the run that led to something."""
    steps = [step for step in HERE.trail if not step.endswith(VAIN)]
    if len(HERE.trail) > STEPS:  # up to the last step that is new: what follows is said again and again
        steps = steps[: max(map(steps.index, set(steps)), default=0) + 1]
    return [f"... {len(steps) - SHOWN} steps before", *steps[-SHOWN:]] if len(steps) > SHOWN else steps
