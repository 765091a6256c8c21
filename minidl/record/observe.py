"""torch's own DataLoader, unmodified, recorded by the events of this package.

Interface: `DataLoader(..., num_workers=2, multiprocessing_context=minidl.observe())`. The context hands the loader the
queues, events and processes that it asks for, wrapped so that they record what passes through them and pass it on.
`observed_iterators()` gives every iterator of a program such a context. An event's row says whether it is seen, derived
or unseen in such a trace.

Rules of use: an iterator is recorded if a trace is on when it is made (`with minidl.trace(...)`, MINIDL_TRACE, or
`observe(trace=...)`); otherwise, and for all other users, it is the plain context. What the loader
decides between two calls is read from its own counters at the second (`_Loader`): it is never guessed, and may be
stamped late. A loader without workers has no context: only `observed_iterators()` records it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing.queues
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
import torch.multiprocessing
import torch.utils.data
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import _worker_loop
from torch.utils.data.dataloader import DataLoader as _TorchLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as _AnyIterator
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as _TorchIterator
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as _TorchSingle

from minidl.arena.arena import Mappings
from minidl.arena.arena_queue import ArenaQueue, ArenaWriter
from minidl.arena.packets import TaskQueue
from minidl.dataloader import checked_transport
from minidl.loader import ports as plain_ports
from minidl.loader.dataloader import users_line
from minidl.loader.iterators import _BaseDataLoaderIter as _MinidlIterator
from minidl.record import observed_single, recorder
from minidl.record.channels import Proxy
from minidl.record.cpu_time import choose
from minidl.record.group import rank_directory
from minidl.record.harmless import WithContext, harmless, say_once, substituted, without_a_place
from minidl.record.observed_channels import (
    ObservedDoneEvent,
    ObservedIndexQueue,
    ObservedProcess,
    ObservedResultQueue,
    ObservedShared,
    ResultsForLoader,
    ResultsForPinThread,
    watch_ready,
    watch_sharing,
)
from minidl.record.observed_loader import ObservedLoader
from minidl.record.observed_worker import Announced, AnnouncedFetchers, Announcer, ObservedWorker
from minidl.record.patches import patched_pickling
from minidl.record.ports import TracedPorts, enter_worker, facts
from minidl.record.recorder import TraceConfig
from minidl.record.sampling import TracedSampler
from minidl.record.session import current_recorder
from minidl.record.shared import live, number_loader
from minidl.record.slabs import TracedMappings
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS

UNSEEN: Final = frozenset(event.name for event in EVENTS.values() if event.unseen)
"""Events that a trace of torch's loader lacks."""


# --- The context ------------------------------------------------------------------------------------------------------
def observe(
    start_method: str | BaseContext | None = None,
    *,
    trace: str | os.PathLike[str] | None = None,
    transport: str | None = None,
) -> ObservedContext:
    """Make a multiprocessing context that records torch's DataLoader; pass it as its `multiprocessing_context`.

    start_method: "fork", "spawn", "forkserver", a context to be used, or None for the program's default. trace: a
    directory, made at once, that iterators are recorded into where no other trace is on; a rank of a distributed run
    has DIRECTORY/rank-N. transport: as `DataLoader` takes it; "arena" also works where no trace is on. One context
    serves any number of loaders. Raises ValueError for an unknown start method or transport, TraceError where `trace`
    cannot be begun.
    """
    if isinstance(start_method, str):
        multiprocessing.get_context(start_method)
    if trace is None or multiprocessing.parent_process() is not None:  # a spawned child imports the script again
        return ObservedContext(start_method, transport=transport)
    measured, about = choose()
    config = TraceConfig(str(recorder.create(rank_directory(trace), cpu_time=about)), cpu_time=measured)
    return ObservedContext(start_method, config, transport)


class ObservedContext(BaseContext):
    """See `observe`. Whatever torch's iterators do not ask for is the plain context's."""

    def __init__(
        self, chosen: str | BaseContext | None, trace: TraceConfig | None = None, transport: str | None = None
    ) -> None:
        self.chosen = chosen
        self.trace = trace
        self.transport = checked_transport(transport)

    def get_context(self, method: str | None = None) -> Any:
        """The plain context; where none was chosen, the module that torch's loader takes for one."""
        if method is not None:
            return multiprocessing.get_context(method)
        if isinstance(self.chosen, str):
            return multiprocessing.get_context(self.chosen)
        return torch.multiprocessing if self.chosen is None else self.chosen

    def get_start_method(self, allow_none: bool = False) -> str:
        return str(self.get_context().get_start_method())

    def Queue(self, *given: Any) -> Any:  # noqa: N802  # as its base class calls it
        """The result queue, if it is an iterator's first, else a worker's index queue."""
        caller = sys._getframe(1)
        plain = None if self._wants_arena(caller) else self.get_context().Queue(*given)
        ports, arena = self._ports(caller, plain), self._arena_of(caller)
        queue = plain if arena is None else arena.next_queue()
        return queue if ports is None else ports.queue_around(queue)

    def Event(self) -> Any:  # noqa: N802
        """The workers' done event."""
        event = self.get_context().Event()
        caller = sys._getframe(1)
        arena = self._arena_of(caller)
        if arena is not None:
            arena.queue.watch(event)
        ports = self._ports(caller)
        return event if ports is None else ObservedDoneEvent(ports, event, ev.DoneEvent.WORKERS)

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """A worker."""
        caller = sys._getframe(1)
        make, ports = self.get_context().Process, self._ports(caller)
        target, arena = kwargs.get("target"), self._arena_of(caller)
        if target is None or not kwargs.get("args"):
            return make(*args, **kwargs)
        if arena is not None:
            kwargs |= {"args": arena.with_writer(kwargs["args"])}
        if ports is not None and (names := names_of(target)) is not None:
            return ports.process(make, kwargs, names)
        kwargs |= {"args": tuple(each.inner if isinstance(each, Proxy) else each for each in kwargs["args"])}
        if arena is not None:
            kwargs |= {"target": _arena_loop, "args": (target, *kwargs["args"])}
        return make(*args, **kwargs)

    def _starts_processes(self) -> bool:
        """Whether its workers are processes: a program's own context may make threads that look like some."""
        process = self.get_context().Process
        return isinstance(process, type) and issubclass(process, BaseProcess)

    def _arena_of(self, caller: Any) -> _ArenaOfTorch | None:
        """The arena of torch's iterator whose method calls, if it is to have one."""
        if not self._wants_arena(caller):
            return None
        iterator = caller.f_locals["self"]
        if iterator not in _arenas:
            _arenas[iterator] = _ArenaOfTorch(iterator._num_workers, _observed.get(iterator))
        return _arenas[iterator]

    def _wants_arena(self, caller: Any) -> bool:
        if self.transport != "arena" or not isinstance(caller.f_locals.get("self"), _AnyIterator):
            return False
        context = self.get_context()
        modules = (multiprocessing, torch.multiprocessing)  # fastai gives one in a context's place
        plain = context in modules or getattr(type(context), "Queue", None) is BaseContext.Queue
        known = names_of(_worker_loop) is not None and patched_pickling() is None
        return plain and known and self._starts_processes()

    def _ports(self, caller: Any, queue: Any = None) -> ObservedPorts | None:
        """The ports of the iterator whose method calls; None where no iterator of torch's does, or no trace is on.

        queue: the first that it gets, if it calls for one.
        """
        iterator = caller.f_locals.get("self")
        if isinstance(iterator, _MinidlIterator) or not isinstance(iterator, _AnyIterator):
            return None
        if iterator not in _observed:
            _observed[iterator] = None  # if what follows fails
            _observed[iterator] = self._new_ports(iterator, caller.f_locals.get("loader"), queue)
        return _observed[iterator]

    @harmless(None)
    def _new_ports(self, iterator: Any, loader: Any, queue: Any) -> ObservedPorts | None:
        if names_of(_worker_loop) is None:
            return None
        if not self._starts_processes() or not isinstance(queue, (multiprocessing.queues.Queue, type(None))):
            _pass_over(iterator, f"with workers that {type(self.get_context()).__name__} starts: they may be threads")
            return None
        traced = plain_ports.new_ports()  # begins the trace that MINIDL_TRACE asks for
        if isinstance(traced, TracedPorts):
            made = ObservedPorts(traced.config, traced.loader)
        elif self.trace is not None:
            config = (recorder.active() or recorder.start(self.trace)).config
            made = ObservedPorts(config, number_loader(config.directory))
        else:
            return None
        made.begin(iterator, loader, self.transport)
        return made

    def __repr__(self) -> str:
        return f"minidl.observe({self.chosen!r})"


def names_of(worker_loop: Callable[..., None]) -> tuple[str, ...] | None:
    """The names of a worker's arguments in their order; None, said once on stderr, if some that we look for lack.

    A program that puts a function of its own in the place of torch's loop gets torch's arguments by their places.
    """
    loop = _worker_loop if worker_loop is torch_worker._worker_loop else worker_loop
    try:
        names = tuple(inspect.signature(loop).parameters)
    except (TypeError, ValueError):
        names = ()
    missing = _TAKEN - set(names)
    if missing:
        whose = f"torch {torch.__version__}'s workers" if loop is _worker_loop else f"workers that run {_name_of(loop)}"
        reason = f"{whose} take no {', '.join(sorted(missing))}"
        say_once(f"torch's loader is not recorded: {reason}. The run goes on")
    return None if missing else names


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


_TAKEN: Final = {
    *("dataset", "index_queue", "data_queue", "done_event", "worker_id", "base_seed", "dataset_kind"),
    *("auto_collation", "collate_fn"),
}

_observed: weakref.WeakKeyDictionary[Any, ObservedPorts | None] = weakref.WeakKeyDictionary()


class _ArenaOfTorch:
    """What the transport "arena" puts into one of torch's iterators. given: the iterator has its result queue."""

    def __init__(self, num_workers: int, ports: ObservedPorts | None) -> None:
        mappings = Mappings if ports is None else functools.partial(TracedMappings, ports)
        self.queue = ArenaQueue(num_workers, mappings=mappings)
        self.given = False
        self.workers = 0

    def next_queue(self) -> ArenaQueue | TaskQueue:
        """The result queue, then a queue for each worker."""
        if self.given:
            return TaskQueue()
        self.given = True
        return self.queue

    def with_writer(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the next worker's process, which gets its own end of the result queue."""
        worker, self.workers = self.workers, self.workers + 1
        queues = ArenaQueue, ObservedResultQueue
        return tuple(each.writer(worker) if isinstance(each, queues) else each for each in arguments)


def _arena_loop(target: Callable[..., None], *args: Any) -> None:
    """What a worker's process runs: torch's loop, whose batches go into slabs."""
    for argument in args:
        if isinstance(argument, ArenaWriter):
            argument.enter_worker()
    target(*args)


_arenas: weakref.WeakKeyDictionary[Any, _ArenaOfTorch] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def observed_iterators() -> Iterator[None]:
    """While this is open, each iterator of torch's kind that has workers gets an observing context around its own.

    One without workers is followed by its `_next_data` (see `observed_single`).
    The hook is where an iterator begins, so it finds iterators of a subclass of torch's loader (torchdata's
    StatefulDataLoader), of a class that is none (fastai's), and of a loader that was bound before under its own name.
    The trace names those that can't be followed.
    """
    plain_loader, plain_multi = _TorchLoader.__init__, _TorchIterator.__init__

    @without_a_place
    @functools.wraps(plain_loader)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_made_at"] = users_line(self)
        plain_loader(self, *args, **kwargs)

    @without_a_place
    @functools.wraps(plain_multi)
    def init_multi(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, _MinidlIterator):
            args, kwargs = _with_context(self, *args, **kwargs) or (args, kwargs)
        plain_multi(self, *args, **kwargs)

    with substituted(
        (_AnyIterator, "__init__", _and_then(_AnyIterator.__init__, _begin_foreign)),
        (_TorchIterator, "__init__", init_multi),
        (_TorchLoader, "__init__", init_loader),
        (_TorchSingle, "__init__", _and_then(_TorchSingle.__init__, _begin_single)),
    ):
        yield


def _and_then(init: Callable[..., None], begin: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of an iterator, after which `begin` has its arguments."""

    @without_a_place
    @functools.wraps(init)
    def init_and_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        begin(self, *args, **kwargs)

    return init_and_begin


@harmless(None)
def _with_context(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The arguments of torch's iterator with workers, the loader with an observing context; keep the iterator in mind.

    None where the loader has no context: torch says so.
    """
    _left.add(iterator)
    given = loader.multiprocessing_context
    return (loader if isinstance(given, ObservedContext) else WithContext(loader, _around(given)), *args), kwargs


_left: weakref.WeakSet[Any] = weakref.WeakSet()
"""Observed iterators that the program still has, of this process."""

os.register_at_fork(after_in_child=_left.clear)


def shut_down_observed() -> None:
    """Shut the iterators down that a program left when it ended.

    The collector would take them together with what else the program's globals held, in no certain order: their queues
    may be gone when the sentinels are to be sent, and each worker is then waited for in vain and terminated.
    """
    for iterator in tuple(_left):
        harmless(None)(iterator._shutdown_workers)()


def _around(context: Any) -> ObservedContext:
    """A context that observes; `context` may be None, or a module in the place of one, as fastai's loader has it."""
    return observe(context)


@harmless(None)
def _begin_foreign(iterator: Any, loader: Any, *_: Any) -> None:
    """Prepare for an iterator that is not torch's own with workers, which finds its context in its loader."""
    if isinstance(iterator, _MinidlIterator):
        return
    if iterator._num_workers == 0:
        if type(iterator)._next_data is not _TorchSingle._next_data:
            _pass_over(iterator, "without workers, by a class of its own")
    elif not isinstance(iterator, _TorchIterator) and not isinstance(loader.multiprocessing_context, ObservedContext):
        try:
            loader.multiprocessing_context = _around(loader.multiprocessing_context)
        except AttributeError:
            _pass_over(iterator, "by a class that no context can be given to")


@harmless(None)
def _begin_single(iterator: Any, loader: Any, *_: Any) -> None:
    """Follow an iterator without workers, if a trace is on."""
    if type(iterator)._next_data is not _TorchSingle._next_data:
        return
    ports = plain_ports.new_ports()
    if isinstance(ports, TracedPorts):
        observed_single.follow(iterator, loader, ports, UNSEEN | {"resumed"})


@harmless(None)
def _pass_over(iterator: Any, why: str) -> None:
    """Write down that an iterator is not recorded, once for each class in a trace."""
    recording, kind = current_recorder(), type(iterator)
    key = recording and (recording.config.directory, os.getpid(), kind)
    if recording is not None and key not in _passed_over:
        _passed_over.add(key)
        recording.describe("passed over", iterator=f"{kind.__module__}.{kind.__qualname__}", why=why)


_passed_over: set[Any] = set()


# --- The ports of one iterator ----------------------------------------------------------------------------------------
class ObservedPorts(ObservedShared):
    """Makes the observed things of one of torch's iterators."""

    has_result_queue = False
    index_queues = 0

    def begin(self, iterator: Any, loader: Any, transport: str) -> None:
        """In the loader's process."""
        self.loader_side = ObservedLoader(self, iterator)
        live.add(self)
        self._watch_calls(iterator)
        self.describe(observed=True, unseen=sorted(UNSEEN), **facts(iterator, loader, transport))

    def _watch_calls(self, iterator: Any) -> None:
        """Record the iterator's calls of two methods of its own. The functions stay out of reference cycles."""
        side, known, next_data = self.loader_side, weakref.ref(iterator), type(iterator)._next_data
        drawn = TracedSampler(self, _ObservedDraws(iterator))

        @without_a_place
        def _next_index() -> Any:
            if not side.open_epoch:
                watch_ready(self)
            self.next_task = side.drawing()
            return next(drawn)

        @without_a_place
        def _next_data() -> Any:
            side.enter_next()
            try:
                data = next_data(known())
            except BaseException as error:
                side.leave_next(error)
                raise
            side.leave_next()
            return data

        iterator._next_index, iterator._next_data = _next_index, _next_data

    def enter(self, worker_id: int, seed: int) -> ObservedWorker:
        """In a worker's process."""
        self.emit = recorder.emitter_for(self.config, self.loader)
        self.worker_side = ObservedWorker(self, worker_id, seed)
        watch_sharing()
        enter_worker(self, worker_id)
        return self.worker_side

    def queue_around(self, plain: Any) -> Any:
        """The iterator asks for the result queue first, then for a queue a worker."""
        if not self.has_result_queue:
            self.has_result_queue = True
            return (ResultsForPinThread if self.loader_side.pinned else ResultsForLoader)(self, plain)
        self.index_queues += 1
        return ObservedIndexQueue(self, plain, self.index_queues - 1)

    def process(self, make: Callable[..., Any], arguments: dict[str, Any], names: tuple[str, ...]) -> Any:
        """The worker of the index queue that was made last. names: of its arguments."""
        target, args = arguments["target"], arguments["args"]
        self.with_state = carries_state(names)
        watched = arguments | {"target": _observed_loop, "args": (self, target, names, args)}
        return ObservedProcess(self, make(**watched), self.index_queues - 1)


class _ObservedDraws(Iterator[Any]):
    """An iterator's own `_next_index`, in each of its epochs."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = weakref.ref(iterator)
        self.next_index = type(iterator)._next_index

    def __next__(self) -> Any:
        return self.next_index(self.iterator())


def carries_state(names: tuple[str, ...]) -> bool:
    """Whether tasks and results carry a state beside their indices and data, as torchdata's StatefulDataLoader's do."""
    return "worker_state" in names


def _observed_loop(
    ports: ObservedPorts, target: Callable[..., None], names: tuple[str, ...], args: tuple[Any, ...]
) -> None:
    """What a worker's process runs: torch's loop."""
    given = dict(zip(names, args, strict=False))
    ports.with_state = carries_state(names)
    worker = ports.enter(given["worker_id"], int(given["base_seed"]) + given["worker_id"])
    for name in ("index_queue", "data_queue", "done_event"):
        given[name].shared = ports
    if isinstance(given["data_queue"].inner, ArenaWriter):
        given["data_queue"].enter_worker()
    of_samples = given["dataset_kind"], given["auto_collation"], given["dataset"]
    worker.samples_of = samples_of = Announcer(worker.progress, *of_samples)
    given["collate_fn"] = Announced(given["collate_fn"], samples_of.collates)
    if given.get("init_fn") is not None:
        given["init_fn"] = Announced(given["init_fn"], worker.progress.initialising)
    _DatasetKind.create_fetcher = AnnouncedFetchers(target, worker.progress.opening)  # type: ignore[assignment]
    target(*given.values(), *args[len(given) :])
