"""An exception at every place where a signal's handler may raise one: before each line, or each instruction.

`python tests/support/exceptions_everywhere.py [line|opcode] [stride] [scene[: loader]...]` sweeps the SCENES, each with
the LOADERS that it is for: a scene is run again and again, and interrupted one step later each time. Then the program
does what programs do after a Ctrl-C. Each sample must come once with its own content, or an error must say that some
may be lost; nothing may be left behind, and nothing may wait without an end.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import faulthandler
import functools
import gc
import itertools
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import Any
from unittest import mock

import torch
import torch.utils.data
from holdings import Holdings

import minidl
import minidl.loader.driver
import minidl.loader.pin_memory
import minidl.loader.worker
from minidl.arena.arena import TAKEN
from minidl.auto import loading
from minidl.auto.choice import Choice
from minidl.device import sim
from minidl.device.loader import DeviceLoader
from minidl.loader.pin_memory import PinMemoryThread
from minidl.wire import signal_handling

CODE = {
    f"minidl.{name}"
    for name in (
        "arena.arena", "arena.arena_queue", "arena.farewell", "arena.packets", "arena.pickling", "auto.loading",
        "data.fetch", "data.sampler", "device.loader", "device.streams", "loader.dataloader", "loader.dispatcher",
        "loader.driver", "loader.iterators", "loader.liveness", "loader.pin_memory", "loader.ports", "loader.progress",
        "loader.protocol", "loader.crew", "loader.threads", "loader.worker", "resume.frameworks", "resume.position",
        "resume.stateful", "wire.atomic", "wire.message", "wire.messages", "wire.queues", "wire.signal_handling",
        "wire.tensors",
    )
}  # fmt: skip

FEEDER = {"multiprocessing.queues", "minidl.wire.message", "minidl.wire.queues", "minidl.wire.tensors"}
"""What a worker's feeder thread runs."""

NOT_OURS = ("__del__", "handler", "_in_a_step")
"""CPython prints what is raised in a __del__. And an exception in the handler of SIGCHLD, which comes while a child is
waited for, makes `multiprocessing` lose its exit code: it takes the child for alive, and keeps its two descriptors. The
loader's own handler puts its error off there; a handler of the program that raises has this effect on any child."""

PUSH_EXC_INFO = dis.opmap.get("PUSH_EXC_INFO", -1)
"""The first instruction of an `except` or of a `with` that an error leaves. CPython calls no signal's handler there; a
trace function's exception leaves the error before as the one that is being handled, and so all its frames."""

BOUND = 60.0
"""Seconds that a run may take; a wait for what is lost has no end."""

MISSES = 8
"""Runs in a row that have ended before the step, after which a sweep ends."""

PASSES = 3
"""What a sweep takes for a place's `passes`: the worker's loop, for example, comes to each line for every batch."""

SAMPLES = 24


class Interruption(KeyboardInterrupt):
    """What is raised."""


class FaultError(Exception):
    """What is raised in a worker or in a thread, which no Ctrl-C reaches."""


class Interrupting:
    """In this thread and block, raises at the `at`-th step of the modules' code; counts the steps. at 0: at none.

    steps: "line" or "opcode" (an instruction). passes: a place that is passed more often is no step any more. where:
    the place where it has raised, also in a forked child; "" if nowhere. handed: whether that was after the last step
    of `__next__`, with the batch in the hands of CPython alone.
    """

    def __init__(
        self, at: int, modules: Collection[str], steps: str = "opcode", error: Any = Interruption, passes: int = 1 << 30
    ) -> None:
        self.at, self.modules, self.steps, self.error, self.passes = at, modules, steps, error, passes
        self._passed: collections.Counter[Any] = collections.Counter()
        self.count = 0
        self.handed = False
        self._process: int | None = os.getpid()
        self._told = mmap.mmap(-1, mmap.PAGESIZE)
        # Python 3.12 tells instructions only to a trace function that is set after a first frame has asked for them.
        sys._getframe().f_trace_opcodes = steps == "opcode"

    @property
    def where(self) -> str:
        return self._told[: self._told.find(b"\0")].decode()

    def __enter__(self) -> Interrupting:
        self._before = sys.gettrace()
        self._stream = sim.current_stream() if sim.is_loaded() else None
        sys.settrace(self.call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)
        if self._stream is not None:  # a line's exception may come before a block's __exit__, as no signal's does
            torch.accelerator.set_stream(self._stream)

    def from_here(self) -> None:
        """Begin in this thread for good, also in the functions that have called this one."""
        self._process = os.getpid()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self.call(frame, "call", None)
            frame = frame.f_back
        sys.settrace(self.call)

    def call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_globals.get("__name__") not in self.modules or frame.f_code.co_name in NOT_OURS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.steps == "opcode", self.steps == "line"
        frame.f_trace = self._step  # Python 3.13 tells no opcode of a first call, if it is only returned
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if os.getpid() != self._process:
            return None
        pushes = event == self.steps and _instructions(frame.f_code)[frame.f_lasti] == PUSH_EXC_INFO
        if event == self.steps and not pushes and signal.getsignal(signal.SIGINT) is not signal_handling._note:
            passed = self._passed[frame.f_code, frame.f_lasti] = self._passed[frame.f_code, frame.f_lasti] + 1
            if passed > self.passes:
                return self._step
            self.count += 1
            if self.count == self.at:
                name = f"{frame.f_code.co_name}+{frame.f_lasti}"
                place = f"{frame.f_globals['__name__']}:{frame.f_lineno} {name}".encode()
                self._told[: len(place)] = place
                self.handed = _is_handed_over(frame)
                sys.settrace(None)
                raise self.error
        return self._step


@functools.cache
def _instructions(code: types.CodeType) -> bytes:
    return code.co_code


def _is_handed_over(frame: FrameType) -> bool:
    own = frame.f_locals.get("self")
    module, name = frame.f_globals["__name__"], frame.f_code.co_name
    if name != "__next__":
        return False
    if module == "minidl.loader.iterators":
        pending, handed_out = own._pending, own._record.position.log
        return "data" in frame.f_locals and (pending.effect is None or pending.batch in handed_out)
    return module == "minidl.device.loader" and "batch" in frame.f_locals


# --- What is loaded ---------------------------------------------------------------------------------------------------
Sample = tuple[torch.Tensor, int]
"""A content that says which sample it is, and its index."""


def sample(index: int) -> Sample:
    return torch.full((3000,), float(index)), index


class Marked(torch.utils.data.Dataset[Sample]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


class Knowing(Marked):
    """Has a state."""

    count = 0

    def __getitem__(self, index: int) -> Sample:
        self.count += 1
        return sample(index)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Stream(torch.utils.data.IterableDataset[Sample]):
    """Two batches in turn for each of two workers; knows its place."""

    at = go_on = 0

    def __iter__(self) -> Iterator[Sample]:
        info = torch.utils.data.get_worker_info()
        begin, self.go_on = self.go_on, 0
        mine = [i for i in range(SAMPLES) if info is None or i // 2 % info.num_workers == info.id]
        for place, index in enumerate(mine[begin:], begin + 1):
            self.at = place
            yield sample(index)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.go_on = state["at"]


LOADERS: dict[str, dict[str, Any]] = {
    "arena": {"transport": "arena"},
    "arena, as they come": {"transport": "arena", "in_order": False},
    "arena, pinned": {"transport": "arena", "pin_memory": True},
    "arena, states": {"transport": "arena", "dataset": Knowing(), "state_every": 1},
    "arena, stream": {"transport": "arena", "dataset": Stream(), "state_every": 2},
    "upstream": {"transport": "upstream"},
    "upstream, as they come": {"transport": "upstream", "in_order": False},
    "upstream, pinned": {"transport": "upstream", "pin_memory": True},
    "upstream, stream": {"transport": "upstream", "dataset": Stream(), "state_every": 2},
    "threads": {"worker_method": "thread"},
    "threads, pinned": {"worker_method": "thread", "pin_memory": True},
    "threads, stream": {"worker_method": "thread", "dataset": Stream(), "state_every": 2},
    "auto": {"num_workers": "auto"},
    "alone": {"num_workers": 0},
    "alone, states": {"num_workers": 0, "dataset": Knowing(), "state_every": 1},
    "alone, stream": {"num_workers": 0, "dataset": Stream(), "state_every": 2},
}
"""Pinned: with MINIDL_SIMULATE_DEVICE=1."""


def made(options: dict[str, Any], library: Any = minidl, **more: Any) -> Any:
    return library.DataLoader(**{"dataset": Marked(), "batch_size": 2, "num_workers": 2} | options | more)


def kept(options: dict[str, Any]) -> Any:
    """A loader whose workers serve all the runs."""
    return made(options, persistent_workers=options.get("num_workers") != 0)


# --- What a run has come to -------------------------------------------------------------------------------------------
def taken_from(iterator: Any, most: int = SAMPLES) -> list[int]:
    """The indices of at most so many batches. Raises AssertionError if the content is another sample's."""
    seen = []
    for content, indices in itertools.islice(iterator, most):
        assert content.cpu().eq(indices[:, None].cpu()).all(), f"the content of other samples than {indices.tolist()}"
        seen += indices.tolist()
    return seen


def verdict(seen: list[int], *, ordered: bool = True, what: str = "") -> str:
    """ "again" if each sample came once, and in its order."""
    whole = sorted(seen) == list(range(SAMPLES)) and (seen == sorted(seen) or not ordered)
    return "again" if whole else f"{what}{len(seen)} of {SAMPLES} samples: {seen}"


def in_words(error: Exception) -> str:
    """ "error" if it says something to the program; AssertionErrors are the tool's own, or the package's mistakes."""
    mistake = isinstance(error, (AssertionError, AttributeError, TypeError, IndexError, KeyError))
    return f"{type(error).__name__}: {error}" if mistake or not str(error) else "error"


def slabs_taken(iterator: Any) -> str:
    """After an epoch, when no batch is held."""
    board = getattr(getattr(iterator, "_worker_result_queue", None), "_board", None)
    taken = 0 if board is None else int((board == TAKEN).sum())
    return f"{taken} slabs are still taken" if taken else ""


Counts = tuple[int, int, int, int, int]


def counts() -> Counts:
    """Children, threads, shared-memory files, descriptors, page-locked bytes."""
    now, locked = Holdings.now(), sim.registered_bytes()[0] if sim.is_loaded() else 0
    return len(now.children), len(now.threads), len(now.segments), now.descriptors, locked


def left(before: Counts) -> str:
    """What this process holds in addition, after a few seconds; "" if nothing."""
    for _ in range(100):
        gc.collect()
        now = counts()
        if all(new <= old for new, old in zip(now, before, strict=True)):
            return ""
        time.sleep(0.05)
    return f"left behind (children, threads, files, descriptors, locked): {before} -> {now}"


# --- The scenes -------------------------------------------------------------------------------------------------------
Tries = Iterator[Interrupting]


def tried(interrupting: Interrupting, call: Callable[[], Any]) -> Any:
    """What it returns; None if it was interrupted."""
    with contextlib.suppress(Interruption), interrupting:
        return call()
    return None


def one(iterator: Any, interrupting: Interrupting) -> list[int]:
    """The indices of the next batch; of none if next() was interrupted."""
    batch = tried(interrupting, lambda: next(iterator))
    return [] if batch is None else taken_from([batch])


def next_(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """next(), and the rest of the epoch."""
    with kept(options) as loader:
        for interrupting in tries:
            iterator = iter(loader)
            try:
                seen = taken_from(iterator, 2) + one(iterator, interrupting) + taken_from(iterator)
            except Exception as error:
                yield in_words(error)
                continue
            gc.collect()
            yield slabs_taken(iterator) or verdict(seen, ordered=options.get("in_order", True))


def changes(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """The calls of next() within which a loader that has one worker goes on with two, and the rest of the epoch."""
    two = mock.Mock(return_value=Choice(2, "for a test"))
    for interrupting in tries:
        with mock.patch.multiple(loading, ENOUGH=2, ENOUGH_SECONDS=0.0, choose=two), made(options) as loader:
            iterator, batches = iter(loader), []
            seen = taken_from(iterator, 3)
            tried(interrupting, lambda: batches.extend(itertools.islice(iterator, 4)))  # noqa: B023
            try:
                what = verdict(seen + taken_from(batches) + taken_from(iterator))
            except Exception as error:
                what = in_words(error)
            if what == "again" and loader.num_workers != 2:
                what = "no change"
        yield what


def next_state(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """next(), then state_dict(), and the rest by another loader."""
    with kept(options) as loader:
        for interrupting in tries:
            iterator = iter(loader)
            seen = taken_from(iterator, 2) + one(iterator, interrupting)
            yield verdict(seen + resumed(options, loader.state_dict()), ordered=options.get("in_order", True))


def resumed(options: dict[str, Any], state: Any) -> list[int]:
    """What the state leaves to another loader."""
    worker = {} if "dataset" in options else {"num_workers": 0, "transport": None, "pin_memory": False}
    with made(options, **worker) as other:
        other.load_state_dict(state)
        return taken_from(other)


def state_dict(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """state_dict(), which is called again; the rest by another loader, and by this one."""
    ordered = options.get("in_order", True)
    with kept(options) as loader:
        for interrupting in tries:
            iterator = iter(loader)
            seen = taken_from(iterator, 3)
            tried(interrupting, loader.state_dict)
            first = verdict(seen + resumed(options, loader.state_dict()), ordered=ordered, what="resumed: ")
            rest = verdict(seen + taken_from(iterator), ordered=ordered, what="gone on: ")
            yield first if first != "again" else rest


def load_state(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """load_state_dict(), which is called again, and iter()."""
    with made(options) as saved:
        seen = taken_from(iter(saved), 3)
        state = saved.state_dict()
    for interrupting in tries:
        with made(options) as loader:
            tried(interrupting, lambda: loader.load_state_dict(state))
            loader.load_state_dict(state)
            rest = taken_from(loader)
        yield verdict(seen + rest, ordered=options.get("in_order", True))


def create(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """iter(), which starts the workers, and is called again; or the program drops the loader."""
    for interrupting in tries:
        loader = made(options)
        tried(interrupting, functools.partial(iter, loader))
        if interrupting.at % 2:
            seen = list(range(SAMPLES))
        else:
            seen = taken_from(loader)
            loader.close()
        del loader
        yield verdict(seen, ordered=options.get("in_order", True))


def create_resumed(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """iter() after load_state_dict(), and again."""
    with made(options) as saved:
        seen = taken_from(iter(saved), 3)
        state = saved.state_dict()
    for interrupting in tries:
        with made(options) as loader:
            loader.load_state_dict(state)
            iterator = tried(interrupting, functools.partial(iter, loader))
            if iterator is None:
                iterator = iter(loader)
            rest = taken_from(iterator)
            del iterator
        yield verdict(seen + rest, ordered=options.get("in_order", True))


def reset(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """iter() with workers that are there already, and again."""
    loader = kept(options)
    for interrupting in tries:
        taken_from(loader, 3)
        tried(interrupting, lambda: iter(loader))  # noqa: B023
        try:
            yield verdict(taken_from(loader), ordered=options.get("in_order", True))
        except Exception as error:
            yield in_words(error)
            loader.close()
            loader = kept(options)
    loader.close()


def shut(end: Callable[[Any, Any], None], options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """One way to end an iteration; the garbage collection does the rest."""
    for interrupting in tries:
        loader = made(options)
        iterator = iter(loader)
        taken_from(iterator, 2)
        tried(interrupting, functools.partial(end, loader, iterator))
        if interrupting.at % 2:
            loader.close()
        del loader, iterator
        gc.collect()
        yield "again"


def _leave(loader: Any, iterator: Any) -> None:
    with loader:
        pass


def at_exit(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """close() in a program that ends then: in a child, which returns from `main`."""
    for interrupting in tries:
        sys.stdout.flush()
        faulthandler.cancel_dump_traceback_later()  # its thread is not in the child, which would wait for it at its end
        if not (child := os.fork()):
            os.setpgid(0, 0)
            interrupting._process = os.getpid()
            loader = made(options)
            iterator = iter(loader)
            taken_from(iterator, 2)
            tried(interrupting, loader.close)
            _of_the_exit.extend((loader, iterator))
            sys.exit(0)
        began, ended = time.monotonic(), 0
        while not ended and time.monotonic() - began < BOUND / 2:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.005)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            yield "again" if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"
        else:
            yield "left processes behind" if ended else "did not end"


_of_the_exit: list[Any] = []
"""What the program holds to its end."""


def whole(loader: Any) -> str:
    """The verdict of an epoch, after which the loader is closed."""
    with loader:
        try:
            return verdict(taken_from(loader))
        except Exception as error:
            return in_words(error)


def in_worker(error: Any, options: dict[str, Any], tries: Tries, *, feeder: bool = False) -> Iterator[str]:
    """In one of the workers, from its worker_init_fn on, or in its feeder thread."""
    for interrupting in tries:
        interrupting.error = error
        if feeder:
            interrupting.modules = FEEDER
        init = functools.partial(_interrupt_worker, interrupting, feeder)
        yield whole(made(options, worker_init_fn=init))


def _interrupt_worker(interrupting: Interrupting, feeder: bool, worker: int) -> None:
    if worker == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if feeder:
            interrupting._process = os.getpid()
            threading.settrace(interrupting.call)
        else:
            interrupting.from_here()


def in_pin_thread(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """In the pin-memory thread."""

    def call(*event: Any) -> Any:  # the loader has other threads: a feeder for each of its queues
        return interrupting.call(*event) if type(threading.current_thread()) is PinMemoryThread else None

    for interrupting in tries:
        interrupting.error = FaultError
        threading.settrace(call)
        what = whole(made(options))
        threading.settrace(None)  # type: ignore[arg-type]
        yield what


def device_next(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """next() of a DeviceLoader."""
    with kept(options | {"pin_memory": True}) as loader:
        for interrupting in tries:
            device = DeviceLoader(loader, "sim")
            try:
                iterator = iter(device)
                yield verdict(taken_from(iterator, 2) + one(iterator, interrupting) + taken_from(iterator))
            except Exception as error:
                yield in_words(error)


def device_state(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """next() of a DeviceLoader, then state_dict(), and the rest by another loader."""
    with kept(options | {"pin_memory": True}) as loader:
        for interrupting in tries:
            device = DeviceLoader(loader, "sim")
            iterator = iter(device)
            seen = taken_from(iterator, 2) + one(iterator, interrupting)
            yield verdict(seen + resumed(options, device.state_dict()))


def device_close(options: dict[str, Any], tries: Tries) -> Iterator[str]:
    """close() of a DeviceLoader, and again."""
    for interrupting in tries:
        device = DeviceLoader(made(options | {"pin_memory": True}), "sim")
        iterator = iter(device)
        taken_from(iterator, 2)
        tried(interrupting, device.close)
        if interrupting.at % 2:
            device.close()
        del device, iterator
        gc.collect()
        yield "again"


BOTH = ("arena", "upstream")
THREADS = ("threads", "threads, pinned")
PINNED = ("arena, pinned", "upstream, pinned")
ENDED = (*BOTH, *PINNED, *THREADS)
STATES = ("arena, states", "arena, stream", "upstream, stream")
ALONE = ("alone", "alone, states", "alone, stream")

SCENES: dict[str, tuple[Callable[..., Iterator[str]], tuple[str, ...]]] = {
    "next": (next_, tuple(LOADERS)),
    "next, other workers": (changes, ("auto",)),
    "next, state_dict": (next_state, (*BOTH, "arena, as they come", *STATES, *ALONE)),
    "state_dict": (state_dict, (*BOTH, "arena, as they come", *STATES, *ALONE)),
    "load_state_dict": (load_state, ("alone", "arena")),
    "iter": (create, (*BOTH, *PINNED, *THREADS, "alone")),
    "iter, resumed": (create_resumed, (*BOTH, "arena, stream", *ALONE)),
    "iter, persistent": (reset, (*BOTH, *PINNED, *THREADS, "arena, stream", "threads, stream")),
    "close": (functools.partial(shut, lambda loader, iterator: loader.close()), ENDED),
    "shutdown": (functools.partial(shut, lambda loader, iterator: iterator._shutdown_workers()), ENDED),
    "with": (functools.partial(shut, _leave), ENDED),
    "exit": (at_exit, ENDED),
    "worker, Ctrl-C": (functools.partial(in_worker, KeyboardInterrupt), (*BOTH, "arena, stream")),
    "worker, error": (functools.partial(in_worker, FaultError), (*BOTH, "arena, stream")),
    "feeder, error": (functools.partial(in_worker, FaultError, feeder=True), ("upstream",)),
    "pin thread, error": (in_pin_thread, PINNED),
    "device next": (device_next, BOTH),
    "device next, state_dict": (device_state, BOTH),
    "device close": (device_close, BOTH),
}
"""The scenes, with the loaders that they are for."""

KEPT = {"next", "next, state_dict", "state_dict", "iter, persistent", "device next", "device next, state_dict"}
"""Scenes whose workers serve all runs: what is left behind is seen at their end."""

Run = tuple[str, str]
"""What became of a run: "again", "error", "handed" (see `Interrupting`) or what is wrong; and the exception's place."""


def sweep(name: str, loader: str, steps: str = "line", stride: int = 1, first: int = 1) -> Iterator[Run]:
    """Interrupt the scene at every `stride`-th step. The first run goes without an exception."""
    scene, _ = SCENES[name]
    at, missed, current = 0, 0, Interrupting(0, CODE, steps, passes=PASSES)

    def tries() -> Tries:
        while missed < MISSES:
            yield current

    before = counts()
    for what in scene(LOADERS[loader], tries()):
        faulthandler.cancel_dump_traceback_later()
        where, behind = current.where, ""
        if at and name not in KEPT and (behind := left(before)):
            before = counts()  # the next run is not to blame
        if not at:
            assert what == "again", what
            gc.collect()
            before = counts()
        elif not where:  # a run may have more steps if a batch is not there yet
            missed += 1
            yield from [(what, "")] if what != "again" else []
        else:
            missed = 0
            yield behind or ("handed" if what not in ("again", "error") and current.handed else what), where
        if where or not at:
            at += stride if at else first
        current = Interrupting(at, CODE, steps, passes=PASSES)
        faulthandler.dump_traceback_later(BOUND, exit=True)
    faulthandler.cancel_dump_traceback_later()
    if behind := left(before) if name in KEPT else "":
        yield behind, "at the end"


@contextlib.contextmanager
def short_polls() -> Iterator[None]:
    """Workers that die are found dead soon."""
    modules: list[Any] = [minidl.loader.driver, minidl.loader.pin_memory, minidl.loader.worker]
    before = minidl.loader.driver.MP_STATUS_CHECK_INTERVAL
    for module in modules:
        module.MP_STATUS_CHECK_INTERVAL = 0.5
    try:
        yield
    finally:
        for module in modules:
            module.MP_STATUS_CHECK_INTERVAL = before


KINDS = ("again", "error", "handed")


def main(steps: str = "line", stride: str = "1", *names: str) -> int:
    """Sweep, print, and return how many runs are wrong."""
    os.environ["MINIDL_SIMULATE_DEVICE"] = "1"
    cells = [(scene, loader) for scene, (_, loaders) in SCENES.items() for loader in loaders]
    table: dict[str, collections.Counter[str]] = {}
    places = collections.defaultdict(set)
    for scene, loader in cells:
        cell = f"{scene}: {loader}"
        if names and scene not in names and cell not in names:
            continue
        began, table[cell] = time.monotonic(), collections.Counter()
        try:
            for what, where in sweep(scene, loader, steps, int(stride)):
                places[cell].add(where.partition(" ")[0])
                kind = what if what in KINDS else "left" if what.startswith("left") else "wrong"
                table[cell][kind] += 1
                if kind not in KINDS:
                    print(f"{cell}: {where}: {what}", flush=True)
        except Exception:
            table[cell]["wrong"] += 1
            print(f"{cell}: {traceback.format_exc()}", flush=True)
        except KeyboardInterrupt:
            print(f"{cell}: ended by Ctrl-C", flush=True)
        print(f"{cell}: {table[cell].total()} runs, {time.monotonic() - began:.0f} s", flush=True)
    columns = (*KINDS, "wrong", "left")
    print(f"{'scene':44}{'lines':>7}{'runs':>7}" + "".join(f"{kind:>7}" for kind in columns))
    for cell, found in table.items():
        print(f"{cell:44}{len(places[cell]):7}{found.total():7}" + "".join(f"{found[kind]:7}" for kind in columns))
    return sum(found["wrong"] + found["left"] for found in table.values())


if __name__ == "__main__":
    with short_polls():
        wrong = main(*sys.argv[1:])
    sys.exit(bool(wrong))
