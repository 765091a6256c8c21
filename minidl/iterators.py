"""The two iterators of a loader: over the dataset in this process, or in worker processes with prefetching.

Read `_MultiProcessingDataLoaderIter` from top to bottom beside article 1 §2.4: `__init__` starts the workers and the
pin-memory thread, `_reset` begins an epoch and primes the prefetch loop, `_try_put_index` sends one task, `_next_data`
yields one batch. Which task, which worker, whose turn: `dispatcher.Dispatcher` decides. Who may do what: `protocol`.
How it ends: `shutdown`. Everything that touches another process or thread comes from `ports`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import queue
import tempfile
import time
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.multiprocessing
from typing_extensions import Self

from minidl import ports, shutdown
from minidl.dispatcher import EPOCH_END, Deliver
from minidl.errors import ExceptionWrapper
from minidl.fetch import _DatasetKind
from minidl.messages import RebuildFailure, Result, ResumeIteration, Sentinel, WorkerExhausted
from minidl.pin_memory import SIMULATED, PinMemoryThread, _pin_memory_loop, accelerator_type, pin_memory
from minidl.ports import MP_STATUS_CHECK_INTERVAL
from minidl.protocol import LoaderEvent
from minidl.signals import _set_SIGCHLD_handler, _set_worker_pids
from minidl.worker import WorkerSpec, _worker_loop

if TYPE_CHECKING:
    from minidl.dataloader import DataLoader


class _BaseDataLoaderIter:
    """What both iterators share: options, sampler, seed, `__next__` with its bookkeeping. Article 1 §2.3.2."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._ports = ports.new_ports()
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
        self._collate_fn = loader.collate_fn
        self._persistent_workers = loader.persistent_workers
        self._pin_memory, self._pin_memory_device = _pinning(loader)
        self._ports.opened(self)
        self._lifecycle = self._ports.loader_lifecycle()
        self._sampler_iter = self._ports.sampler_iter(self._index_sampler)
        self._base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        self._num_yielded = 0
        self._epoch = 0
        self._profile_name = f"enumerate(DataLoader)#{self.__class__.__name__}.__next__"

    def __iter__(self) -> Self:
        return self

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self._sampler_iter = self._ports.sampler_iter(self._index_sampler)
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called

    def _next_index(self) -> Any:
        """The next task's indices; raises StopIteration where the sampler has no more. Article 1 §2.4.4."""
        return next(self._sampler_iter)

    def _next_data(self) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        with torch.autograd.profiler.record_function(self._profile_name):
            self._lifecycle.handle(LoaderEvent.NEXT)
            try:
                data = self._next_data()
                self._stop_if_closed()
            except BaseException:
                if self._lifecycle.allows(LoaderEvent.RAISE):
                    self._lifecycle.handle(LoaderEvent.RAISE)
                raise
            self._num_yielded += 1
            self._lifecycle.handle(LoaderEvent.YIELD)
            self._warn_beyond_length()
            return data

    def _stop_if_closed(self) -> None:
        """Raise StopIteration after `close()`, which user code may call, or a signal's handler, while next() runs."""
        if self._lifecycle.shut_down:
            raise StopIteration

    def _warn_beyond_length(self) -> None:
        length = self._IterableDataset_len_called
        if self._dataset_kind != _DatasetKind.Iterable or length is None or self._num_yielded <= length:
            return
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
        """Stop here: end the workers, where there are any. Calling next() after it raises StopIteration."""
        if not self._lifecycle.shut_down:
            self._lifecycle.handle(LoaderEvent.SHUT_DOWN)
            self._lifecycle.handle(LoaderEvent.TERMINATED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise NotImplementedError("{} cannot be pickled", self.__class__.__name__)


_USERS_LOOP = 6
"""How far `for batch in loader` is from a warning in `_pinning`: two __init__, `_get_iterator`, `__iter__`."""


def _pinning(loader: DataLoader[Any]) -> tuple[bool, str | None]:
    """Whether to pin, and for which type of device; warns where that differs from what was asked for."""
    if not loader.pin_memory:
        return False, None
    if loader.pin_memory_device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{loader.pin_memory_device}'.",
            stacklevel=_USERS_LOOP,
        )
    device = accelerator_type()
    if device is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=_USERS_LOOP,
        )
    elif device == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=_USERS_LOOP,
        )
    return device not in (None, "mps"), device


class _SingleProcessDataLoaderIter(_BaseDataLoaderIter):
    """Fetches in this process, one batch at a time. Article 1 §2.3.3."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        if self._timeout != 0 or self._num_workers != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0 and num_workers == 0")
        self._progress = self._ports.progress()
        self._dataset_fetcher = _DatasetKind.create_fetcher(
            self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last, self._progress
        )
        for event in (LoaderEvent.START, LoaderEvent.EPOCH_BEGIN, LoaderEvent.PRIMED):
            self._lifecycle.handle(event)

    def _next_data(self) -> Any:
        self._stop_if_closed()
        try:
            index = self._next_index()
            data = self._dataset_fetcher.fetch(index)
        except StopIteration:
            self._lifecycle.handle(LoaderEvent.EPOCH_END)
            raise
        return pin_memory(data, self._pin_memory_device) if self._pin_memory else data


class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter):
    """Hands tasks to worker processes and yields what they send back. Article 1 §2.4.

    Data flow: index queue (one per worker) -> worker -> worker result queue (one) -> consumer; where memory is pinned,
    worker result queue -> pin-memory thread -> data queue -> consumer.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._pid = os.getpid()  # a child that is forked with this object must not shut it down
        self._shutdown = False
        self._worker_pids_set = False
        self._workers: list[Any] = []
        self._index_queues: list[Any] = []
        super().__init__(loader)
        self._worker_init_fn = loader.worker_init_fn
        if self._num_workers <= 0 or not self._prefetch_factor:
            raise AssertionError(
                "num_workers and prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._lifecycle.handle(LoaderEvent.START)
        self._dispatcher = self._ports.dispatcher(self._num_workers, self._prefetch_factor, self._in_order)
        self._start_workers(loader.multiprocessing_context or torch.multiprocessing)
        if self._pin_memory:
            self._start_pin_memory_thread()
            if self._persistent_workers:
                shutdown.close_at_exit(self)
        else:
            self._data_queue = self._worker_result_queue
        _set_worker_pids(id(self), tuple(worker.pid for worker in self._workers))
        _set_SIGCHLD_handler()
        self._worker_pids_set = True
        self._reset(loader, first_iter=True)

    def _start_workers(self, context: Any) -> None:
        """Start the workers; article 1 §2.4.2."""
        self._worker_result_queue = self._ports.result_queue(context)
        shutdown.hold(self, self._worker_result_queue)
        self._workers_done_event = self._ports.workers_done_event()
        self._board = self._ports.progress_board(self._num_workers)
        for worker_id in range(self._num_workers):
            index_queue = self._ports.index_queue(context, worker_id)
            shutdown.hold(self, index_queue)
            # If this process exits while a worker is gone, nobody would empty the queue that its feeder writes to.
            index_queue.cancel_join_thread()
            spec = self._worker_spec(worker_id, index_queue, context)
            worker = self._ports.worker(context, worker_id, _worker_loop, (spec,))
            _start(worker)
            # Listed only once started: a shutdown joins whoever is listed, and only a started process can be joined.
            self._index_queues.append(index_queue)
            self._workers.append(worker)

    def _worker_spec(self, worker_id: int, index_queue: Any, context: Any) -> WorkerSpec:
        return WorkerSpec(
            worker_id=worker_id,
            num_workers=self._num_workers,
            dataset_kind=self._dataset_kind,
            dataset=self._dataset,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            base_seed=self._base_seed,
            worker_init_fn=self._worker_init_fn,
            index_queue=index_queue,
            result_queue=self._worker_result_queue,
            done_event=self._workers_done_event,
            board=self._board,
            ports=self._ports,
            manager_pid=None if context.get_start_method() == "forkserver" else self._pid,
        )

    def _start_pin_memory_thread(self) -> None:
        """Start the thread between the result queue and the data queue; article 1 §2.4.6."""
        device = self._pin_memory_device
        self._pin_memory_thread_done_event = self._ports.pin_memory_thread_done_event()
        self._data_queue = self._ports.ready_queue()
        device_id = 0 if device == SIMULATED else torch.accelerator.current_device_index()
        done, result_queue = self._pin_memory_thread_done_event, self._worker_result_queue
        thread = self._ports.pin_memory_thread(
            PinMemoryThread(
                _pin_memory_loop, (result_queue, self._data_queue, device_id, done, str(device), self._ports)
            )
        )
        thread.start()
        self._pin_memory_thread = thread

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin an epoch: every count anew, persistent workers resumed, first tasks sent. Article 1 §2.4.3."""
        if not first_iter:
            self._epoch += 1
            self._lifecycle.handle(LoaderEvent.RESUME)
        super()._reset(loader, first_iter)
        self._dispatcher.reset()
        if not first_iter:
            self._resume_workers()
        self._lifecycle.handle(LoaderEvent.EPOCH_BEGIN)
        for _ in range(self._dispatcher.capacity):
            self._try_put_index()
        self._lifecycle.handle(LoaderEvent.PRIMED)

    def _resume_workers(self) -> None:
        """Tell every worker of the new epoch and wait for all to answer; what comes before is the old epoch's."""
        for worker_id in range(self._num_workers):
            self._index_queues[worker_id].put(ResumeIteration(self._epoch, worker_id))
        missing = self._num_workers
        while missing > 0:
            message = self._get_data()
            missing -= isinstance(message, ResumeIteration) and message.epoch == self._epoch

    def _try_put_index(self) -> None:
        """Send one task, if the sampler has one and a worker may take it. Article 1 §2.4.4."""
        self._dispatcher.check_capacity()
        try:
            index = self._next_index()
        except StopIteration:
            return
        assignment = self._dispatcher.assign(index)
        if assignment is not None:
            task = self._ports.task(assignment.idx, assignment.worker_id, index)
            self._index_queues[assignment.worker_id].put(task)

    def _next_data(self) -> Any:
        """The next batch: from the reorder buffer, or from the workers. Article 1 §2.4.7."""
        while not self._lifecycle.shut_down:
            step = self._dispatcher.next_step()
            if step is EPOCH_END:
                self._lifecycle.handle(LoaderEvent.EPOCH_END)
                if not self._persistent_workers:
                    self._shutdown_workers()
                break
            if not isinstance(step, Deliver):
                result = self._get_data()
                if isinstance(result.data, WorkerExhausted):
                    self._worker_exhausted(result)
                    continue
                step = self._dispatcher.receive(result.idx, result.data)
            if isinstance(step, Deliver):
                return self._process_data(step)
        raise StopIteration

    def _worker_exhausted(self, result: Result) -> None:
        """A worker's iterable dataset has ended: no more tasks for it; unless it is persistent, it may leave."""
        self._dispatcher.exhausted(result.idx, result.worker_id)
        if not self._persistent_workers:
            self._mark_worker_as_unavailable(result.worker_id)
        self._try_put_index()

    def _process_data(self, step: Deliver) -> Any:
        """Send one task for the one that is yielded, then yield it. Article 1 §2.4.7."""
        self._try_put_index()
        if isinstance(step.data, ExceptionWrapper):
            step.data.reraise()
        return step.data

    def _get_data(self) -> Any:
        """One message from the workers, waiting as long as somebody lives who may send it. Article 4, shutdown.

        Raises RuntimeError where the timeout has passed, a worker died, or the pin-memory thread died; StopIteration
        where the iterator was closed meanwhile.
        """
        if self._timeout > 0:
            started = time.monotonic()
            success, message = self._try_get_data(self._timeout)
            if success:
                return message
            self._raise_timeout(time.monotonic() - started)
        while not self._pin_memory or self._pin_memory_thread.is_alive():
            success, message = self._try_get_data()
            if success:
                return message
        self._stop_if_closed()
        return self._raise_pin_memory_thread_died()

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        """Try once to get a message. (True, message), or (False, None) where none came in time.

        Raises RuntimeError where a worker has died, or where no descriptors are left; StopIteration after `close()`.
        """
        try:
            message = self._data_queue.get(timeout=timeout)
        except Exception as error:
            self._stop_if_closed()
            self._raise_if_worker_died(error)
            if isinstance(error, queue.Empty):
                return False, None
            _raise_if_out_of_descriptors()
            raise
        self._stop_if_closed()
        if isinstance(message, Result) and isinstance(message.data, RebuildFailure):
            message = self._explain(message, message.data.error)
        return True, message

    def _explain(self, result: Result, error: Exception) -> Result:
        """A batch could not be rebuilt; say why, as the error of its task, so that the next task can be waited for.

        Raises RuntimeError where the worker that holds the batch's memory has died, and with it the task.
        """
        if isinstance(error, (ConnectionError, FileNotFoundError, EOFError)):
            # A dying process loses its socket first: a moment later it can be seen dead.
            self._workers[result.worker_id].join(timeout=1.0)
        self._raise_if_worker_died(error)
        try:
            _raise_if_out_of_descriptors()
        except RuntimeError as cause:
            error = cause
        where = "in the loader while it rebuilt a batch"
        wrapper = ExceptionWrapper(error, where, f"Task {result.idx} of worker {result.worker_id}.")
        return Result(result.idx, result.worker_id, wrapper)

    def _raise_if_worker_died(self, cause: Exception) -> None:
        """Raise RuntimeError where a worker died before it was told to leave, or while the others depended on it."""
        dead = [worker_id for worker_id, worker in enumerate(self._workers) if not worker.is_alive()]
        failed = [worker_id for worker_id in dead if self._workers_status[worker_id]]
        if not failed:
            failed = [worker_id for worker_id in dead if self._workers[worker_id].exitcode != 0]
            if not failed or not self._worker_result_queue.jammed():
                return
        for worker_id in failed:
            worker = self._workers[worker_id]
            self._ports.found_dead("worker", worker_id, worker.pid, worker.exitcode)
            if self._workers_status[worker_id]:
                self._mark_worker_as_unavailable(worker_id)
        pids = ", ".join(str(self._workers[worker_id].pid) for worker_id in failed)
        last = "; ".join(f"worker {i}: exit code {self._workers[i].exitcode}, last {self._doing(i)}" for i in failed)
        raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly ({last})") from cause

    def _raise_timeout(self, waited: float) -> NoReturn:
        info = self._dispatcher.task_info.get(self._rcvd_idx)
        message = f"DataLoader timed out after {self._timeout} seconds"
        if info is None:
            raise RuntimeError(message)
        worker = self._workers[info.worker_id]
        self._ports.timed_out(self._rcvd_idx, info.worker_id, waited)
        alive = "alive" if worker.is_alive() else f"dead, exit code {worker.exitcode}"
        raise RuntimeError(
            f"{message}: waited {waited:.1f} s for task {self._rcvd_idx} of worker {info.worker_id} "
            f"(pid {worker.pid}, {alive}), which is {self._doing(info.worker_id)}, "
            f"for {self._board.read(info.worker_id).seconds:.1f} s"
        )

    def _doing(self, worker_id: int) -> str:
        """What the worker wrote last of itself, in words."""
        place = self._board.read(worker_id)
        info = self._dispatcher.task_info.get(place.task)
        return place.describe(info.index if info is not None and info.worker_id == worker_id else None)

    def _raise_pin_memory_thread_died(self) -> NoReturn:
        failure = self._pin_memory_thread.failure
        self._ports.found_dead("pin thread", -1, self._pid, None)
        reason = "" if failure is None else f": {type(failure).__name__}: {failure}"
        raise RuntimeError(f"Pin memory thread exited unexpectedly{reason}") from failure

    def _mark_worker_as_unavailable(self, worker_id: int) -> None:
        """Send the worker its sentinel and nothing more; it is joined by the shutdown."""
        self._index_queues[worker_id].put(Sentinel())
        self._dispatcher.worker_unavailable(worker_id)

    def _shutdown_workers(self) -> None:
        """End the pin-memory thread and the workers; see `shutdown`."""
        shut_down = getattr(shutdown, "shut_down", None)  # None where Python's exit has cleared the module already
        if shut_down is not None:
            shut_down(self)

    def close(self) -> None:
        """End the pin-memory thread and the workers now. Calling next() after it raises StopIteration."""
        self._shutdown_workers()

    def __del__(self) -> None:
        self._shutdown_workers()

    # What is decided lives in the dispatcher; tools and tests of torch's loader look for it here, under these names.
    @property
    def _send_idx(self) -> int:
        return self._dispatcher.send_idx

    @property
    def _rcvd_idx(self) -> int:
        return self._dispatcher.rcvd_idx

    @property
    def _tasks_outstanding(self) -> int:
        return self._dispatcher.tasks_outstanding

    @property
    def _workers_status(self) -> list[bool]:
        return self._dispatcher.workers_status

    @property
    def _workers_num_tasks(self) -> list[int]:
        return self._dispatcher.workers_num_tasks

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


def _raise_if_out_of_descriptors() -> None:
    """RuntimeError with the remedy where ten more files can't be opened.

    At the limit the kernel drops a passed descriptor in silence, so the error that is seen names something else.
    """
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(tempfile.NamedTemporaryFile())
    except OSError as error:
        if error.errno != errno.EMFILE:
            return
        raise RuntimeError(
            "Too many open files. Communication with the workers is no longer possible. Please increase the limit "
            "using `ulimit -n` in the shell or change the sharing strategy by calling "
            "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code"
        ) from None
