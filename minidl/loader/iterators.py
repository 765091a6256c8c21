"""The two iterators of a loader: over the dataset in this process, or in worker processes with prefetching.

Read `_MultiProcessingDataLoaderIter` beside article 1 §2.4: `__init__` starts the workers and the pin-memory thread
(§2.4.2), `_reset` begins an epoch and primes the prefetch loop (§2.4.3), `_try_put_index` draws the indices of a task,
which `_put_task` sends (§2.4.4), `_next_data` yields one batch (§2.4.7). What comes next: `driver.Driver` decides, and
the iterator performs its effects. Which task, which worker, whose turn: `dispatcher.Dispatcher`. Who may do what:
`protocol`. How it ends: `crew`. Who died: `liveness`. The worker (§2.4.5) is in `worker`, the pin thread (§2.4.6) in
`pin_memory`. Queues, flags, processes and threads pass through `ports`, where tracing wraps them.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import torch
import torch.multiprocessing
import torch.utils.data.dataloader
from torch._C._profiler import _RecordFunctionFast
from typing_extensions import Self

from minidl.data import collate
from minidl.data.fetch import _BaseDatasetFetcher, _DatasetKind
from minidl.live_repr import LiveRepr
from minidl.loader import driver as do
from minidl.loader import liveness, ports
from minidl.loader.crew import Crew
from minidl.loader.dispatcher import Assignment, Deliver, Dispatcher
from minidl.loader.driver import DRAW, END, READY, Driver, Effect, Evidence, Get
from minidl.loader.pin_memory import PinMemoryThread, _pin_memory_loop, accelerator_type, pin_memory
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle, PinLifecycle, ProtocolError
from minidl.loader.worker import Users, WorkerSpec, _worker_loop
from minidl.wire import signal_handling
from minidl.wire.errors import ExceptionWrapper, with_remedy
from minidl.wire.message import WorkerPayload
from minidl.wire.messages import RebuildFailure, Result, ResumeIteration, Task
from minidl.wire.queues import ReadyQueue, start_tracker_apart
from minidl.wire.tensors import NotHandedOverError, handover_timeout

signal_handling.STEPS.add(__name__)

# Frameworks test for torch's iterator types, so ours are subclasses of them; every method that the loader calls
# is our own. The type checker knows nothing of them, because our methods have other signatures.
_TorchSingle: Any = torch.utils.data.dataloader._SingleProcessDataLoaderIter
_TorchMulti: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter

Loader: TypeAlias = Any
"""A `dataloader.DataLoader`, whose module imports this one."""

Answer: TypeAlias = Callable[[], Effect]
"""The driver's input that answers an effect which was performed; returns the next effect."""

_DECIDING: Any = object()
"""In place of the effect to perform: the driver decides, or the batch is handed over."""

_INTERRUPTED = (
    "next() on an iterator whose last next() was interrupted by an exception, for example Ctrl-C, while it stored a "
    "batch: that batch may be lost, so the epoch can't go on. Call iter(loader) for a new epoch, or give a new loader "
    "the state that was saved last"
)

SAMPLER_ENDED = (
    "the sampler has ended right after an exception that left it, as a generator does: for example, Ctrl-C came while "
    "it drew an index. The indices that it had left are not in this epoch. Call iter(loader) for a new epoch"
)

_STREAM_INTERRUPTED = (
    "next() on an iterator whose last next() was interrupted by an exception, for example Ctrl-C, while it asked an "
    "iterable dataset for samples: they are lost, and the dataset may have ended. Call iter(loader) for a new epoch"
)

_NOTHING: tuple[int, int] = (-1, -1)
"""No task, and no worker."""

_NO_CAUSE: tuple[Exception | None, float] = (None, 0.0)
"""In place of the error with which a read has ended, and the seconds that it took."""


@dataclass(slots=True)
class _Pending:
    """What next() is in the middle of: if an exception of a signal's handler ends it, the next call goes on here."""

    effect: Any = None  # the effect that is not answered yet, or _DECIDING; None between two calls of next()
    taken: list[Any] = field(default_factory=list)  # the index that was drawn, or the message that was read, for it
    drawing: bool = False  # whether the last draw has not ended: an exception has left the sampler
    batch: tuple[int, int] = _NOTHING  # the task, and its worker, whose batch or error next() is about to give


class _BaseDataLoaderIter(LiveRepr, torch.utils.data.dataloader._BaseDataLoaderIter):
    """What both iterators share: options, sampler, seed, `__next__` with its bookkeeping. Article 1 §2.3.2."""

    def __init__(self, loader: Loader) -> None:
        self._ports = ports.new_ports()
        self._transport = loader._new_transport()
        self._dataset = loader.dataset
        self._dataset_kind = loader._dataset_kind
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        self._auto_collation = loader._auto_collation
        self._drop_last = loader.drop_last
        self._index_sampler = loader._index_sampler
        self._num_workers = loader.num_workers
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        self._timeout = loader.timeout
        self._collate_fn = collate.ours(loader.collate_fn)
        self._persistent_workers = loader.persistent_workers
        self._pin_memory, self._pin_memory_device = (False, None) if self._transport.page_locked else _pinning(loader)
        self._ports.note(ports.Opened(self, loader))
        self._lifecycle = self._ports.decider(LoaderLifecycle)
        self._record = loader._new_epoch(self._ports)
        self._pending = _Pending()
        self._record.before_seed(loader)
        if self._num_workers == 0:
            self._record.before_draws(loader)
            self._sampler_iter = self._open_sampler()
        else:
            self._sampler_iter = self._ports.sampler_iter(self._index_sampler, self._record.opening)
        self._base_seed = self._record.base_seed
        if self._base_seed is None:
            self._base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        self._num_yielded = self._record.batches
        self._profile_name = f"enumerate(DataLoader)#{self.__class__.__name__}.__next__"

    def __iter__(self) -> Self:
        return self

    def _phrases(self) -> Iterator[str]:
        yield self._lifecycle.state.name
        yield f"{self._num_yielded} yielded"

    def _open_sampler(self) -> Iterator[Any]:
        return self._ports.sampler_iter(self._index_sampler, self._record.draws)

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        self._record.before_draws(loader)
        self._sampler_iter = self._open_sampler()
        self._num_yielded = self._record.batches
        self._IterableDataset_len_called = loader._IterableDataset_len_called

    def _next_index(self) -> Any:
        """Draw the next task's indices, unless the last call has; raises StopIteration if there are no more."""
        pending = self._pending
        if not pending.taken:
            interrupted, pending.drawing = pending.drawing, True
            try:
                pending.taken.extend(itertools.islice(self._sampler_iter, 1))  # drawn and stored in one step
            except KeyboardInterrupt:  # no answer of the sampler: the next call draws again
                raise
            except BaseException:  # the sampler's own error is the answer to this next(), as upstream
                pending.drawing, pending.effect = False, None
                raise
            if interrupted and not pending.taken:
                raise RuntimeError(SAMPLER_ENDED)
        pending.drawing = False
        if not pending.taken:
            raise StopIteration
        return pending.taken[0]

    def _next_data(self) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        # A label costs 5 µs even if no profiler runs. The fast one also reaches observers that are registered in C++.
        profiled = torch.autograd.profiler._is_profiler_enabled
        label = torch.autograd.profiler.record_function if profiled else _RecordFunctionFast
        with label(self._profile_name):
            try:
                data = self._next_data()
            except BaseException as error:
                self._failed()
                self._hand_out_error(error)
                raise
            self._num_yielded += 1
        self._record.hand_out(self._pending.batch)  # only now: a Ctrl-C before this loses no batch
        self._pending.effect = None
        length = self._IterableDataset_len_called  # None for a map-style dataset
        if length is not None and self._num_yielded > length and self._dataset_kind == _DatasetKind.Iterable:
            self._warn_beyond_length(length)
        return data  # from here, it is the consumer's

    def _hand_out_error(self, error: BaseException) -> None:
        """A task's error counts as its batch. A Ctrl-C, a timeout or a dead worker belongs to no task."""
        pending = self._pending
        if pending.batch is not _NOTHING and pending.effect is None and not isinstance(error, KeyboardInterrupt):
            self._record.fail(pending.batch)

    def _failed(self) -> None:
        """Note that the consumer gets an error, or nothing, for its next()."""
        if self._lifecycle.allows(LoaderEvent.RAISE):
            self._lifecycle.handle(LoaderEvent.RAISE)

    def _warn_beyond_length(self, length: int) -> None:
        message = (
            f"Length of IterableDataset {self._dataset} was reported to be {length}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self._num_workers > 0:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(message, stacklevel=3)

    def __len__(self) -> int:
        return len(self._index_sampler)

    def close(self) -> None:
        """End the workers, if there are any. Calling next() after it raises StopIteration."""
        if not self._lifecycle.shut_down:
            self._lifecycle.handle(LoaderEvent.SHUT_DOWN)
            self._lifecycle.handle(LoaderEvent.TERMINATED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled: it holds worker processes and queues")


def _warn(message: str) -> None:
    """Warn about the program's own line."""
    frame: types.FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def _pinning(loader: Loader) -> tuple[bool, str | None]:
    """Whether to pin, and for which type of device; warns if that differs from what was asked for."""
    if not loader.pin_memory:
        return False, None
    if loader.pin_memory_device:
        _warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{loader.pin_memory_device}'."
        )
    device = accelerator_type()
    if device in _CANNOT_PIN:
        _warn(f"'pin_memory' argument is set as true but {_CANNOT_PIN[device]} device pinned memory won't be used.")
    return device not in _CANNOT_PIN, device


_CANNOT_PIN = {None: "no accelerator is found, then", "mps": "not supported on MPS now,"}
"""Types of accelerators for which nothing is pinned -> the reason, in torch's words."""


class _SingleProcessDataLoaderIter(_BaseDataLoaderIter, _TorchSingle):  # type: ignore[misc]
    """Fetches in this process, one batch at a time. Article 1 §2.3.3."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        if self._timeout != 0 or self._num_workers != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0 and num_workers == 0")
        self._progress = self._ports.progress()
        self._record.skip()
        self._dataset_fetcher = self._record.opened(loader, self._create_fetcher)
        for event in (LoaderEvent.START, LoaderEvent.EPOCH_BEGIN, LoaderEvent.PRIMED):
            self._lifecycle.handle(event)
        self._record.begun(loader)

    def _create_fetcher(self) -> _BaseDatasetFetcher:
        options = self._dataset, self._auto_collation, self._collate_fn, self._drop_last, self._progress
        return _DatasetKind.create_fetcher(self._dataset_kind, *options)

    def _next_data(self) -> Any:
        """Fetch the next batch. If Ctrl-C has ended the last call, its batch comes now.

        That is a RuntimeError if an iterable dataset had been asked for its samples.
        """
        self._lifecycle.next()
        self._stop_if_closed()
        pending = self._begun()
        try:
            if not (self._record.counted or pending.taken or pending.drawing):
                self._record.first_draw(int(self._base_seed))
            index = self._next_index()
            pending.batch = self._record.counted, 0
            data = self._record.fetch(self._dataset_fetcher, index)
            data = pin_memory(data) if self._pin_memory else data
        except StopIteration:
            pending.batch = _NOTHING
            self._record.end()
            self._lifecycle.handle(LoaderEvent.EPOCH_END)
            pending.effect = None
            raise
        except KeyboardInterrupt:  # no answer of the dataset: the next call fetches this batch
            raise
        except BaseException:  # it is the answer to this next()
            pending.effect = None
            raise
        self._stop_if_closed()
        self._lifecycle.handle(LoaderEvent.YIELD)
        return data

    def _begun(self) -> _Pending:
        """What this next() goes on with: a new batch, or that of the last call, which was interrupted."""
        pending = self._pending
        if pending.effect is None:
            pending.batch = _NOTHING
            pending.taken.clear()
        elif pending.batch is not _NOTHING and self._dataset_kind == _DatasetKind.Iterable:
            raise RuntimeError(_STREAM_INTERRUPTED)
        pending.effect = _DECIDING
        return pending

    def _stop_if_closed(self) -> None:
        """Raise StopIteration after `close()`, which the dataset, or a signal's handler, may call while next() runs."""
        if self._lifecycle.shut_down:
            raise StopIteration


class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter, _TorchMulti):  # type: ignore[misc]
    """Hands tasks to worker processes and yields what they send back. Article 1 §2.4.

    Data flow: index queue (one per worker) -> worker -> result queue (one) -> consumer; if memory is pinned,
    result queue -> pin-memory thread -> ready queue -> consumer. `_data_queue` is the one that the consumer reads.
    `threads` replaces what makes the workers processes.
    """

    _crew_type: type[Crew] = Crew
    _loop = staticmethod(_worker_loop)

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._record.seeded(int(self._base_seed))
        self._worker_init_fn = loader.worker_init_fn
        if self._num_workers <= 0 or not self._prefetch_factor:
            raise AssertionError(
                "num_workers and prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._lifecycle.handle(LoaderEvent.START)
        self._dispatcher = self._ports.decider(Dispatcher, self._num_workers, self._prefetch_factor, self._in_order)
        self._driver = Driver(
            self._dispatcher, self._lifecycle, persistent=self._persistent_workers, timeout=self._timeout
        )
        self._cause = _NO_CAUSE  # from a read that brought no message until the driver has said what follows
        self._start_workers(loader)
        if self._pin_memory:
            self._start_pin_memory_thread()
            if self._persistent_workers:
                self._crew.close_at_exit()
        else:
            self._data_queue = self._worker_result_queue
        self._crew.watch_pids()
        self._reset(loader, first_iter=True)

    def _start_workers(self, loader: Loader) -> None:
        """Start the workers; article 1 §2.4.2."""
        context = self._context(loader)
        named = context.get_start_method() in ("spawn", "forkserver")
        if named:
            start_tracker_apart()
        self._workers_done_event = self._ports.done_event("workers", self._transport.done_event())
        result_queue = self._transport.result_queue(context, self._num_workers, self._workers_done_event, self._ports)
        self._worker_result_queue = self._ports.queue("result", result_queue)
        self._board = self._transport.board(self._num_workers)
        self._crew = self._crew_type(self._driver, self._worker_result_queue, self._workers_done_event, self._board)
        self._workers, self._index_queues = self._crew.workers, self._crew.index_queues
        self._crew.named = named
        users = WorkerPayload(Users(self._dataset, self._collate_fn, self._worker_init_fn))
        for worker_id in range(self._num_workers):
            index_queue = self._ports.queue("index", self._transport.index_queue(context), worker_id)
            # No process reads the queue of a worker that died. Its feeder must not block the exit of this process.
            index_queue.cancel_join_thread()
            spec = WorkerSpec(
                worker_id=worker_id,
                num_workers=self._num_workers,
                dataset_kind=self._dataset_kind,
                users=users,
                auto_collation=self._auto_collation,
                drop_last=self._drop_last,
                base_seed=int(self._base_seed),
                index_queue=index_queue,
                result_queue=self._worker_result_queue.writer(worker_id),
                done_event=self._workers_done_event,
                board=self._board,
                ports=self._ports,
                manager_pid=None if context.get_start_method() == "forkserver" else self._crew.pid,
                fetching=self._record.fetching(worker_id, loader),
            )
            worker = self._ports.worker(context, worker_id, self._loop, (spec,))
            with signal_handling.put_off_all():
                try:
                    _start(worker)
                finally:
                    users.close()
                self._crew.add_worker(worker, index_queue)

    def _context(self, loader: Loader) -> Any:
        return loader.multiprocessing_context or torch.multiprocessing

    def _start_pin_memory_thread(self) -> None:
        """Start the thread between the result queue and the ready queue; article 1 §2.4.6."""
        self._pin_memory_thread_done_event = done_event = self._ports.done_event("pin thread", threading.Event())
        self._data_queue = self._ports.queue("ready", ReadyQueue())
        queues = self._worker_result_queue, self._data_queue
        device = torch.accelerator.current_device_index(), done_event, str(self._pin_memory_device)
        thread = self._ports.pin_memory_thread(
            PinMemoryThread(_pin_memory_loop, (*queues, *device, self._ports), self._ports.decider(PinLifecycle))
        )
        with signal_handling.put_off_all():
            thread.start()
            self._pin_memory_thread = thread
            self._crew.add_pin_thread(thread, done_event)

    def _phrases(self) -> Iterator[str]:
        yield from self._driver._phrases()
        yield from self._crew._phrases()
        if self._pin_memory:
            yield f"ready queue {self._data_queue!r}"

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Begin an epoch: counts reset, persistent workers resumed, first tasks sent. Article 1 §2.4.3."""
        self._pending = _Pending()
        effect = self._driver.begin() if first_iter else self._driver.resume()
        if not first_iter:
            self._record = loader._new_epoch(self._ports)
            self._record.seeded(int(self._base_seed))
        super()._reset(loader)
        self._record.skip()
        self._dispatcher.start_at(self._record.turn)
        try:
            self._perform(effect)
        except BaseException:
            self._pending.effect = None
            self._failed()
            raise
        self._record.begun(loader)
        self._pending.effect = None

    # --- One batch ----------------------------------------------------------------------------------------------------
    def _next_data(self) -> Any:
        """The next batch: from the reorder buffer, or from the workers. Article 1 §2.4.7.

        If a signal's handler has ended the last call by an exception, this one goes on with what it did: the batch is
        not lost. It raises RuntimeError if that is not possible.
        """
        self._pending.batch = _NOTHING
        effect = self._perform(self._next_effect())
        self._pending.effect = _DECIDING
        if type(effect) is Deliver:
            return self._process_data(effect)
        if self._rcvd_idx == self._send_idx:  # not closed before
            self._record.end()
        self._pending.effect = None
        raise StopIteration

    def _next_effect(self) -> Effect:
        pending = self._pending
        if pending.effect is None or self._driver.closed:
            pending.effect = _DECIDING
            try:
                return self._driver.next()
            except ProtocolError:
                pending.effect = None
                raise
        if pending.effect is _DECIDING:
            raise RuntimeError(_INTERRUPTED)
        self._driver.again()
        return pending.effect  # type: ignore[no-any-return]

    def _perform(self, effect: Effect) -> Effect:
        """Perform each effect and answer it, up to the next one that is for the caller: a batch, END, or READY."""
        pending = self._pending
        pending.effect = effect
        while True:
            kind = type(effect)
            if kind is Get:
                answer = self._get_data(effect.timeout)  # type: ignore[union-attr]
            elif effect is DRAW:
                answer = self._try_put_index()
            elif kind is Assignment:
                answer = self._put_task(effect)  # type: ignore[arg-type]
            elif kind is Deliver or effect is END or effect is READY:
                return effect
            else:
                answer = self._perform_rare(effect)
            pending.effect = _DECIDING  # an exception in `answer` leaves the driver half way: _INTERRUPTED
            pending.taken.clear()
            effect = pending.effect = answer()
            del answer  # a batch that was dropped should not stay while the next one is waited for

    def _perform_rare(self, effect: Effect) -> Answer:
        match effect:
            case do.Raise():
                raise self._error_of(effect)
            case do.PutResume(worker_id, epoch):
                self._crew.put(worker_id, ResumeIteration(epoch, worker_id))
            case do.NoteDeath():
                liveness.note_death(self._crew, effect, self._ports)
            case do.Simple.SHUT_DOWN:
                self._shutdown_workers()
            case _:
                self._crew.perform(effect)
        return self._driver.done

    def _try_put_index(self) -> Answer:
        """Draw an index; the driver chooses the worker that gets the task, if one may take it. Article 1 §2.4.4."""
        try:
            index = self._next_index()
        except StopIteration:
            return self._driver.sampler_ended
        return partial(self._driver.drawn, index)

    def _put_task(self, given: Assignment) -> Answer:
        """Send a task. If that is interrupted it is sent again; the worker drops the second one."""
        task = Task(given.idx, given.worker_id, self._dispatcher.task_info[given.idx].index)
        self._crew.put(given.worker_id, self._ports.envelope(task))
        return self._driver.done

    def _process_data(self, step: Deliver) -> Any:
        """Yield a batch; the task that replaces it was sent before. Article 1 §2.4.7."""
        data = step.data
        self._pending.batch = step.idx, step.worker_id
        if isinstance(data, ExceptionWrapper):
            self._pending.effect = None
            data.reraise()
        self._driver.yielded()
        return data

    def _failed(self) -> None:
        self._driver.failed(again=self._pending.effect is not None)

    def _get_data(self, timeout: float) -> Answer:
        """Read one message, or find out why none comes. Article 4 §shutdown."""
        if self._timeout > 0:
            with handover_timeout(self._timeout):
                return self._try_get_data(timeout)
        if self._pin_memory and not self._pin_memory_thread.is_alive():
            return self._nothing_came(None)
        return self._try_get_data(timeout)

    def _try_get_data(self, timeout: float) -> Answer:
        """Try once to read a message, for at most `timeout` seconds."""
        taken, started = self._pending.taken, time.monotonic()
        try:
            if not taken:
                self._data_queue.get(timeout=timeout, inbox=taken)
        except Exception as error:
            return self._nothing_came(error, time.monotonic() - started)
        if self._crew.named:
            self._crew.forget_names()
        (message,) = taken
        if type(message) is Result and type(message.data) is RebuildFailure:
            return self._explain(message, message.data.error)
        return partial(self._received, message)

    def _received(self, message: Any) -> Effect:
        effect = self._driver.received(message)
        if message.state is not None:
            self._record.state_came(message, stale=bool(self._driver.resume_iteration_cnt))
        return effect

    # --- No batch -----------------------------------------------------------------------------------------------------
    def _nothing_came(self, error: Exception | None, waited: float = 0.0) -> Answer:
        """Look who is alive. error: with which the read has ended; waited: seconds."""
        timed_out = self._timeout > 0 and isinstance(error, queue.Empty)
        evidence = liveness.evidence_of(self._crew, self._ports, timed_out=timed_out)
        self._cause = error, waited
        return partial(self._go_on, evidence)

    def _go_on(self, evidence: Evidence) -> Effect:
        effect = self._driver.nothing_came(evidence)
        if type(effect) is Get:
            (error, _), self._cause = self._cause, _NO_CAUSE
            if error is not None and not isinstance(error, queue.Empty):
                self._pending.effect = effect
                try:
                    raise with_remedy(error)
                finally:
                    del error  # its traceback holds this frame: the iterator, and its workers, would live on in a cycle
        return effect

    def _explain(self, result: Result, error: Exception) -> Answer:
        """A batch could not be rebuilt: because its worker, which holds its memory, died, or as its task's error."""
        liveness.wait_for_a_dying_worker(self._crew, result.worker_id, error)
        evidence = liveness.evidence_of(self._crew, self._ports)
        return partial(self._explained, result, evidence, error)

    def _explained(self, result: Result, evidence: Evidence, error: Exception) -> Effect:
        effect = self._driver.deaths(evidence)
        if effect is not None:
            self._cause = error, 0.0
            return effect
        if isinstance(error, NotHandedOverError):
            error = liveness.not_handed_over(self._crew, result, self._timeout, self._ports)
        return self._received(liveness.explained(result, error))

    def _error_of(self, effect: do.Raise) -> RuntimeError:
        """The error that the driver asks for. It is no local variable of a frame that it leaves: see `_go_on`."""
        cause, waited = self._cause
        error = liveness.error_of(self._crew, effect, self._timeout, waited, self._ports)
        error.__cause__ = self._pin_memory_thread.failure if effect.why is do.Failure.PIN_THREAD_DIED else cause
        self._cause, self._pending.effect = _NO_CAUSE, None
        return error

    # --- The end ------------------------------------------------------------------------------------------------------
    def _shutdown_workers(self) -> None:
        """End the pin-memory thread and the workers; see `crew`."""
        crew = getattr(self, "_crew", None)  # absent if __init__ failed before
        if crew is not None:
            crew.shut_down()

    def close(self) -> None:
        """End the pin-memory thread and the workers now. Calling next() after it raises StopIteration."""
        self._shutdown_workers()

    def __del__(self) -> None:
        self._shutdown_workers()

    # What is decided lives in the driver; tools and tests of torch's loader look for it here, under these names.
    _shutdown = property(attrgetter("_driver.closed"))
    _send_idx = property(attrgetter("_dispatcher.send_idx"))
    _rcvd_idx = property(attrgetter("_dispatcher.rcvd_idx"))
    _tasks_outstanding = property(attrgetter("_dispatcher.tasks_outstanding"))
    _workers_status = property(attrgetter("_dispatcher.workers_status"))
    _workers_num_tasks = property(attrgetter("_dispatcher.workers_num_tasks"))
    _worker_pids_set = property(attrgetter("_crew.pids_set"))

    @property
    def _worker_queue_idx_cycle(self) -> Iterator[int]:
        """The workers in their turns, from the next one on: upstream's form, made on demand."""
        turn = self._dispatcher._turn
        return itertools.cycle([*range(turn, self._num_workers), *range(turn)])

    @property
    def _task_info(self) -> dict[int, tuple[Any, ...]]:
        """Task -> (worker,) while outstanding, (worker, data) once it is here: upstream's form, made on demand."""
        return {
            idx: (info.worker_id, info.data) if info.fetched else (info.worker_id,)
            for idx, info in self._dispatcher.task_info.items()
        }


def _start(worker: Any) -> None:
    try:
        worker.start()
    except (TypeError, AttributeError, pickle.PicklingError):
        warnings.warn(
            "Got pickle error when attempting to start a worker Process. "
            "This might be because the worker Process arguments are not picklable. "
            "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
            "to 'forkserver', which requires the worker Process arguments to be picklable. "
            "You can also try multiprocessing.set_start_method('fork').",
            stacklevel=4,
        )
        raise
