"""A whole DataLoader on one page, to be read from top to bottom beside torch's and article 1 §2.1 to §2.4.

It yields the batches that torch yields, in the same order, from map-style and iterable datasets, in this process or
from workers. It ends as torch's does, with four differences: the join of the pin thread has a limit; SIGKILL follows
SIGTERM; a fork of this process ends nothing; and at Python's exit each iterator is shut down before multiprocessing
terminates its workers. That takes 5 s for each worker that is in a long sample. Names are those of torch and of the
article; their `_tasks_outstanding`, which only checks read, is left out. `articles.ini` tells which part of an article
a section without a number is. Processes and threads (§2.4.1):

    this process      _try_put_index --(idx, index)--> one index queue for each worker
    worker processes  _worker_loop   --(idx, data)---> the worker result queue
    pin thread        _pin_memory_loop --(idx, data)-> the data queue       (only with pin_memory)
    this process      _try_get_data  <--               `_data_queue`: the data queue, or without it the result queue

What it leaves out, and the file that has it (docs/explanation/layers.md shows the same steps in those files):

- `loader/dispatcher.py`, `driver.py`, `protocol.py`: each decision in a class that does no I/O, which an explorer and a
  checker run, too; the death of a worker that had no work left, but held the result queue's lock;
- `loader/iterators.py`: the length of an iterator; warnings; a Ctrl-C that loses nothing; no pinning for MPS, as torch;
- `loader/dataloader.py`: most checks of arguments; that of attributes that are set later; DataPipes are refused;
- `loader/liveness.py`, `worker.py`, `wire/errors.py`: errors that name task and sample, or a lack of open files;
- `loader/crew.py`: an iterator that is collected in a reference cycle; a shutdown that is interrupted;
- `loader/ports.py`: where tracing is put in;
- `loader/pin_memory.py`: tuples, mappings and sequences keep their type (here a pinned tuple becomes a list);
- `wire/queues.py`: a timeout that also holds while a message is read; the error for a batch that can't be pickled;
- `data/sampler.py`, `distributed.py`: other samplers; `collate.py`: registered types, mappings and sequences that keep
  their type; `resume/stateful.py`: `state_dict`; `arena/arena.py`: memory that is used again.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import random
import signal
import threading
import weakref
from collections import namedtuple
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch._C import _error_if_any_worker_fails, _remove_worker_pids, _set_worker_pids, _set_worker_signal_handlers
from torch._utils import ExceptionWrapper

MP_STATUS_CHECK_INTERVAL = 5.0  # seconds after which a wait looks whether the other side is alive


# --- Samplers: which samples, in which order; and which of them make a batch ------------------------------------------
# Public samplers and the loader are subclasses of torch's, because frameworks test for those types. What the loader
# calls is written here, except torch's check of multiprocessing_context.
class _Sampler:
    def __init__(self, data_source, generator=None):
        self.data_source, self.generator = data_source, generator

    def __len__(self):
        return len(self.data_source)


class SequentialSampler(_Sampler, torch.utils.data.SequentialSampler):
    def __iter__(self):
        return iter(range(len(self)))


class RandomSampler(_Sampler, torch.utils.data.RandomSampler):
    """A new permutation each epoch: by `generator`, or by a new one that the global generator seeds."""

    replacement, _num_samples = False, None

    def __iter__(self):
        generator = self.generator or torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        # torch draws a second permutation, too, and uses none of it; so the generator ends in the same state.
        for end in (None, 0):
            yield from torch.randperm(len(self), generator=generator).tolist()[:end]


class _InfiniteConstantSampler:
    """For an iterable dataset, which knows its samples itself: only their number counts."""

    def __iter__(self):
        return itertools.repeat(None)


def _batches(length, batch_size, drop_last):
    return length // batch_size if drop_last else -(-length // batch_size)


class BatchSampler(torch.utils.data.BatchSampler):
    def __init__(self, sampler, batch_size, drop_last):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self):
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self):
        return _batches(len(self.sampler), self.batch_size, self.drop_last)


# --- §2.1 The constructor, §2.2 the index sampler, §2.3.1 which iterator ----------------------------------------------
class _DatasetKind:
    Map, Iterable = 0, 1

    @staticmethod
    def create_fetcher(kind, *options):
        return (_MapDatasetFetcher if kind == _DatasetKind.Map else _IterableDatasetFetcher)(*options)


class DataLoader(torch.utils.data.DataLoader):
    """torch's options, but for pin_memory_device, with torch's defaults. ValueError if some exclude each other."""

    def __init__(
        self, dataset, batch_size=1, shuffle=None, sampler=None, batch_sampler=None, num_workers=0, collate_fn=None,
        pin_memory=False, drop_last=False, timeout=0, worker_init_fn=None, multiprocessing_context=None,
        generator=None, *, prefetch_factor=None, persistent_workers=False, in_order=True,
    ):  # fmt: skip
        iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        for wrong, message in (
            (num_workers < 0 or timeout < 0 or batch_size == 0, "num_workers, timeout < 0, or batch_size 0"),
            (not num_workers and prefetch_factor is not None, "prefetch_factor option needs num_workers > 0"),
            (not num_workers and persistent_workers, "persistent_workers option needs num_workers > 0"),
            (prefetch_factor is not None and prefetch_factor < 1, "prefetch_factor option should be positive"),
            (iterable and (shuffle or sampler is not None or batch_sampler is not None), "the dataset sets the order"),
            (sampler is not None and shuffle, "sampler option is mutually exclusive with shuffle"),
            (batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last),
             "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"),
            (batch_size is None and drop_last, "batch_size=None is mutually exclusive with drop_last"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(message)
        if sampler is None:
            of_map = RandomSampler(dataset, generator) if shuffle else SequentialSampler(dataset)
            sampler = _InfiniteConstantSampler() if iterable else of_map
        if batch_sampler is not None:
            batch_size = None
        elif batch_size is not None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self.dataset, self._dataset_kind = dataset, _DatasetKind.Iterable if iterable else _DatasetKind.Map
        self.batch_size, self.drop_last = batch_size, drop_last
        self.sampler, self.batch_sampler, self.generator = sampler, batch_sampler, generator
        self.collate_fn = collate_fn or (default_collate if self._auto_collation else default_convert)
        self.pin_memory, self.timeout, self.in_order = pin_memory, timeout, in_order
        self.num_workers, self.worker_init_fn = num_workers, worker_init_fn
        self.prefetch_factor, self._iterator = (prefetch_factor or 2) if num_workers else None, None
        self.persistent_workers, self.multiprocessing_context = persistent_workers, multiprocessing_context

    _auto_collation = property(lambda self: self.batch_sampler is not None)
    _index_sampler = property(lambda self: self.batch_sampler if self._auto_collation else self.sampler)

    def _get_iterator(self):
        return _MultiProcessingDataLoaderIter(self) if self.num_workers else _SingleProcessDataLoaderIter(self)

    def __iter__(self):
        if self._iterator is not None:  # of persistent workers
            self._iterator._reset(self)
        iterator = self._iterator or self._get_iterator()
        self._iterator = iterator if self.persistent_workers else None
        return iterator

    def __len__(self):
        if self._dataset_kind == _DatasetKind.Map:
            return len(self._index_sampler)
        return _batches(len(self.dataset), self.batch_size or 1, self.drop_last)


# --- §2.3.2 What both iterators share ---------------------------------------------------------------------------------
class _BaseDataLoaderIter:
    def __init__(self, loader):
        self._dataset_kind, self._index_sampler = loader._dataset_kind, loader._index_sampler
        self._fetching = self._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
        self._timeout, self._pin_memory = loader.timeout, loader.pin_memory and torch.accelerator.is_available()
        self._sampler_iter = iter(self._index_sampler)
        self._base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))

    def __iter__(self):
        return self

    def _next_index(self):
        return next(self._sampler_iter)  # may raise StopIteration

    def __next__(self):
        return self._next_data()


# --- §2.3.3 In this process -------------------------------------------------------------------------------------------
class _SingleProcessDataLoaderIter(_BaseDataLoaderIter):
    def __init__(self, loader):
        super().__init__(loader)
        self._dataset_fetcher = _DatasetKind.create_fetcher(*self._fetching)

    def _next_data(self):
        data = self._dataset_fetcher.fetch(self._next_index())  # either may raise StopIteration
        return pin_memory(data) if self._pin_memory else data


# --- §2.3.4 From indices to a batch -----------------------------------------------------------------------------------
class _MapDatasetFetcher:
    def __init__(self, dataset, auto_collation, collate_fn, drop_last):
        self.dataset, self.auto_collation = dataset, auto_collation
        self.collate_fn, self.drop_last = collate_fn, drop_last

    def fetch(self, possibly_batched_index):
        if not self.auto_collation:
            data = self.dataset[possibly_batched_index]
        elif getattr(self.dataset, "__getitems__", None):  # the dataset fetches a whole batch itself
            data = self.dataset.__getitems__(possibly_batched_index)
        else:
            data = [self.dataset[idx] for idx in possibly_batched_index]
        return self.collate_fn(data)


class _IterableDatasetFetcher(_MapDatasetFetcher):
    def __init__(self, *options):
        super().__init__(*options)
        self.dataset_iter, self.ended = iter(self.dataset), False

    def fetch(self, possibly_batched_index):
        """The next samples, as many as there are indices; raises StopIteration at the end of the dataset."""
        if self.ended:
            raise StopIteration
        if not self.auto_collation:
            return self.collate_fn(next(self.dataset_iter))
        # As in torch, the iterator needs only __next__. Its StopIteration ends the map.
        data = list(map(next, [self.dataset_iter] * len(possibly_batched_index)))
        self.ended = len(data) < len(possibly_batched_index)
        if not data or (self.ended and self.drop_last):
            raise StopIteration
        return self.collate_fn(data)


def default_convert(data):
    """One sample, with its arrays as tensors."""
    if isinstance(data, (np.ndarray, np.generic)) and data.dtype.kind not in "SUO":
        return torch.as_tensor(data)
    return _map_structure(default_convert, data)


def default_collate(batch):
    """Samples of one structure -> that structure, with a batch in each place."""
    elem = batch[0]
    if isinstance(elem, torch.Tensor):
        if torch_worker.get_worker_info() is None:
            return torch.stack(batch)
        # In a worker into shared memory at once, so that nothing is copied when it is sent (article 3 §collate).
        storage = elem._typed_storage()._new_shared(sum(sample.numel() for sample in batch), device=elem.device)
        return torch.stack(batch, out=elem.new(storage).resize_(len(batch), *elem.size()))
    if isinstance(elem, np.ndarray) and elem.dtype.kind not in "SUO":
        return default_collate([torch.as_tensor(sample) for sample in batch])
    if isinstance(elem, (int, float, np.number, np.bool_)):
        return torch.tensor(batch, dtype=torch.float64 if isinstance(elem, float) else None)
    if isinstance(elem, (str, bytes)):
        return batch
    if isinstance(elem, Mapping):
        return {key: default_collate([sample[key] for sample in batch]) for key in elem}
    if not isinstance(elem, Sequence):
        known = "tensors, numpy arrays, numbers, dicts or lists"
        raise TypeError(f"default_collate: batch must contain {known}; found {getattr(elem, 'dtype', type(elem))}")
    if any(len(sample) != len(elem) for sample in batch):
        raise RuntimeError("each element in list of batch should be of equal size")
    return _map_structure(default_collate, elem, list(zip(*batch, strict=True)))


def _map_structure(function, data, members=None):
    """Apply `function` to each member of a dict, named tuple or list; to `members`, if given, instead of its own."""
    if isinstance(data, Mapping):
        return {key: function(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        results = [function(member) for member in members or data]
        return type(data)(*results) if hasattr(data, "_fields") else results
    return data


# --- §2.4 In worker processes (§2.4.1: the picture in this file's docstring) ------------------------------------------
_ResumeIteration = namedtuple("_ResumeIteration", "epoch")  # in place of a task's number; the worker answers with it
_IterableDatasetStopIteration = namedtuple("_IterableDatasetStopIteration", "worker_id")  # in place of a batch


def _attempt(where, function, *args):
    """What the function returns; or in its place the exception that it raises, with the traceback as text."""
    try:
        return function(*args)
    except Exception:
        return ExceptionWrapper(where=where)


class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter):
    # While `_owner`, a pid, is None, nothing is started: the shutdown has nothing to do.
    _epoch, _shutdown, _owner, _worker_pids_set = 0, False, None, False

    # --- §2.4.2 Start the workers and the pin thread
    def __init__(self, loader):
        super().__init__(loader)
        context = loader.multiprocessing_context or torch.multiprocessing
        self._num_workers, self._prefetch_factor = loader.num_workers, loader.prefetch_factor
        self._in_order, self._persistent_workers = loader.in_order, loader.persistent_workers
        self._worker_result_queue = self._data_queue = context.Queue()
        self._index_queues, self._workers, self._workers_status = [], [], [True] * self._num_workers
        self._workers_done_event, self._pin_memory_thread, self._owner = context.Event(), None, os.getpid()
        for worker_id in range(self._num_workers):
            index_queue = context.Queue()
            index_queue.cancel_join_thread()  # this process need not wait for a worker that died and reads nothing
            queues = index_queue, self._worker_result_queue, self._workers_done_event
            seeds = worker_id, self._num_workers, self._base_seed, loader.worker_init_fn
            worker = context.Process(target=self._worker_loop, args=(self._fetching, *queues, *seeds), daemon=True)
            worker.start()
            self._index_queues.append(index_queue)
            self._workers.append(worker)  # only now: a listed worker is joined, which needs a started process
        if self._pin_memory:
            self._data_queue, self._pin_memory_thread_done_event = queue.Queue(), threading.Event()
            queues = self._worker_result_queue, self._data_queue, self._pin_memory_thread_done_event
            args = *queues, torch.accelerator.current_device_index()
            self._pin_memory_thread = threading.Thread(target=self._pin_memory_loop, args=args, daemon=True)
            self._pin_memory_thread.start()
        # A pid is unique; torch's key, id(self), may be taken already in a fork of this process.
        _set_worker_pids(self._workers[0].pid, tuple(worker.pid for worker in self._workers))
        self._worker_pids_set = True
        _set_SIGCHLD_handler()
        _iterators.add(self)
        self._reset(loader, first_iter=True)

    # --- §2.4.3 Begin an epoch
    def _reset(self, loader, first_iter=False):
        self._sampler_iter = iter(self._index_sampler)  # in the first epoch, like torch, for the second time
        self._send_idx = 0  # the number of the next task to send
        self._rcvd_idx = 0  # the number of the next task to yield
        self._task_info = {}  # task -> (worker_id,) while it is outstanding, (worker_id, data) once its batch is here
        self._workers_status = [True] * self._num_workers  # whether it has work to do in this epoch
        self._workers_num_tasks = [0] * self._num_workers  # sent to it and not yielded yet
        self._worker_queue_idx_cycle = itertools.cycle(range(self._num_workers))
        if not first_iter:
            # Begin the epoch in persistent workers. What comes before their answers is left of the last epoch.
            self._epoch += 1
            for index_queue in self._index_queues:
                index_queue.put((_ResumeIteration(self._epoch), None))
            for _ in self._workers:
                while self._get_data()[0] != _ResumeIteration(self._epoch):
                    pass
        for _ in range(self._prefetch_factor * self._num_workers):  # prime the prefetch loop
            self._try_put_index()

    # --- §2.4.4 Send one task
    def _try_put_index(self):
        try:
            index = self._next_index()
        except StopIteration:
            return
        share = self._prefetch_factor * self._num_workers // max(1, sum(self._workers_status))
        for worker_id in itertools.islice(self._worker_queue_idx_cycle, self._num_workers):
            # In order, workers take turns. Out of order a worker has at most its share, so a slow one gets fewer tasks.
            if self._workers_status[worker_id] and (self._in_order or self._workers_num_tasks[worker_id] < share):
                self._index_queues[worker_id].put((self._send_idx, index))
                self._task_info[self._send_idx] = (worker_id,)
                self._workers_num_tasks[worker_id] += 1
                self._send_idx += 1
                return

    # --- §2.4.5 What a worker runs, in its own process
    @staticmethod
    def _worker_loop(fetching, index_queue, data_queue, done_event, worker_id, num_workers, base_seed, init_fn):
        where = f"in DataLoader worker process {worker_id}"
        parent, parent_pid = torch.multiprocessing.parent_process(), os.getppid()
        try:
            _set_worker_signal_handlers()  # in C: they tell what a SIGBUS means before the process dies
            torch.set_num_threads(1)
            seed = base_seed + worker_id
            random.seed(seed)
            torch.manual_seed(seed)
            np.random.seed(np.random.SeedSequence((worker_id, base_seed)).generate_state(4))
            info = torch_worker.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=fetching[1])
            torch_worker._worker_info = info  # torch's get_worker_info() returns it
            iteration_end = False
            error = _attempt(where, init_fn, worker_id) if init_fn is not None else None
            init_failed = isinstance(error, ExceptionWrapper)  # then its error is the answer to each task
            fetcher = error if init_failed else _attempt(where, _DatasetKind.create_fetcher, *fetching)
            # Two tests: a forked sibling keeps is_alive()'s pipe open; a fork server keeps getppid() the same.
            while parent.is_alive() and os.getppid() == parent_pid:
                try:
                    idx, index = index_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)
                except queue.Empty:
                    continue
                if idx is None:  # the sentinel: torch's is None in place of the pair
                    break
                if isinstance(idx, _ResumeIteration):
                    data_queue.put((idx, None))
                    fetcher, iteration_end = _attempt(where, _DatasetKind.create_fetcher, *fetching), False
                    continue
                if done_event.is_set() or iteration_end:  # nobody wants it; next comes the sentinel or an epoch
                    continue
                data = fetcher if isinstance(fetcher, ExceptionWrapper) else _attempt(where, fetcher.fetch, index)
                failed = data is not fetcher and isinstance(data, ExceptionWrapper)
                if failed and issubclass(data.exc_type, StopIteration) and fetching[0] == _DatasetKind.Iterable:
                    data, iteration_end = _IterableDatasetStopIteration(worker_id), True
                data_queue.put((idx, data))  # the queue's thread pickles it: see article 3 §tensor
                del data, idx, index  # they need not stay while the next task is waited for
        except KeyboardInterrupt:
            pass  # the loader gets it, too, and says so
        if done_event.is_set() or not parent.is_alive() or os.getppid() != parent_pid:
            data_queue.cancel_join_thread()  # the loader reads no more, and the pipe may be full

    # --- §2.4.6 What the pin thread runs: DMA to a device needs page-locked memory (`pin_memory` is below)
    @staticmethod
    def _pin_memory_loop(in_queue, out_queue, done_event, device_id):
        torch.set_num_threads(1)
        torch.accelerator.set_device_index(device_id)
        while not done_event.is_set():
            try:
                idx, data = in_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)
            except queue.Empty:
                continue
            if not done_event.is_set():
                out_queue.put((idx, _attempt(f"in pin memory thread for device {device_id}", pin_memory, data)))
            del idx, data

    # --- §2.4.7 Yield one batch
    def _next_data(self):
        while True:
            self._skip_ended_workers()
            if self._rcvd_idx >= self._send_idx:
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise StopIteration
            if len(self._task_info[self._rcvd_idx]) == 2:  # it came before its turn
                return self._process_data(self._rcvd_idx, self._task_info[self._rcvd_idx][1])
            idx, data = self._get_data()
            if isinstance(data, _IterableDatasetStopIteration):
                self._workers_status[data.worker_id] = False
                if not self._persistent_workers:
                    self._mark_worker_as_unavailable(data.worker_id)
                self._try_put_index()
            elif idx == self._rcvd_idx or not self._in_order:
                return self._process_data(idx, data)
            else:
                self._task_info[idx] += (data,)  # before its turn: kept in the reorder buffer

    def _skip_ended_workers(self):
        """Skip tasks that bring no batch: their worker's dataset ended before, or they were yielded before."""
        while self._rcvd_idx < self._send_idx:
            info = self._task_info.get(self._rcvd_idx)  # None: yielded already, out of order
            if info is not None and (len(info) == 2 or self._workers_status[info[0]]):
                return
            self._task_info.pop(self._rcvd_idx, None)
            self._rcvd_idx += 1

    def _get_data(self):
        # With a timeout, wait once. Without one, wait until a message comes or the pin thread dies.
        while self._timeout or not self._pin_memory or self._pin_memory_thread.is_alive():
            success, message = self._try_get_data(self._timeout or MP_STATUS_CHECK_INTERVAL)
            if success:
                return message
            if self._timeout > 0:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        raise RuntimeError("Pin memory thread exited unexpectedly")

    def _try_get_data(self, timeout):
        """Wait for one message. If none comes, or it can't be rebuilt, a worker may have died (article 4 §shutdown)."""
        try:
            return True, self._data_queue.get(timeout=timeout)
        except Exception as error:
            # A worker that died with the queue's lock keeps the others from writing: then no message comes at all.
            failed = [i for i, w in enumerate(self._workers) if self._workers_status[i] and not w.is_alive()]
            for worker_id in failed:
                self._mark_worker_as_unavailable(worker_id)
            if failed:
                pids = ", ".join(str(self._workers[worker_id].pid) for worker_id in failed)
                raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error
            if isinstance(error, queue.Empty):
                return False, None
            raise

    def _process_data(self, idx, data):
        self._workers_num_tasks[self._task_info.pop(idx)[0]] -= 1
        if idx == self._rcvd_idx:  # else it is yielded out of order
            self._rcvd_idx += 1
        self._try_put_index()  # one batch leaves, one task follows
        if isinstance(data, ExceptionWrapper):
            data.reraise()
        return data

    # --- The end: article 4 §shutdown
    def _mark_worker_as_unavailable(self, worker_id):
        """Send a worker its sentinel, after which it leaves its loop. The shutdown joins it."""
        self._index_queues[worker_id].put((None, None))
        self._workers_status[worker_id] = False

    def _shutdown_workers(self):
        """End the pin thread, then the workers. Only once, and only in the process that has started them."""
        if self._shutdown or os.getpid() != self._owner:
            return
        self._shutdown = True
        try:
            # The thread first: a worker that ends may leave half a message in the queue from which the thread reads.
            if self._pin_memory_thread is not None:
                self._pin_memory_thread_done_event.set()
                self._worker_result_queue.put((None, None))  # wakes it
                self._pin_memory_thread.join(2 * MP_STATUS_CHECK_INTERVAL)
                self._worker_result_queue.cancel_join_thread()  # a dead worker may hold the lock that writing needs
                self._worker_result_queue.close()
            self._workers_done_event.set()
            for worker_id in range(len(self._workers)):
                if self._workers_status[worker_id] or self._persistent_workers:
                    self._mark_worker_as_unavailable(worker_id)
            for worker in self._workers:
                worker.join(MP_STATUS_CHECK_INTERVAL)
            for index_queue in self._index_queues:
                index_queue.close()
        finally:  # also after Ctrl-C
            if self._worker_pids_set:
                _remove_worker_pids(self._workers[0].pid)
            for end in ("terminate", "kill"):
                for worker in [worker for worker in self._workers if worker.is_alive()]:
                    getattr(worker, end)()
                    worker.join(MP_STATUS_CHECK_INTERVAL)

    __del__ = _shutdown_workers


def pin_memory(data):
    return data.pin_memory() if hasattr(data, "pin_memory") else _map_structure(pin_memory, data)


# --- Three ends, article 4 §shutdown: of the iterator (above), of Python, and of a process that is killed -------------
_iterators = weakref.WeakSet()


@atexit.register
def _at_exit():
    # Before multiprocessing terminates the workers, since atexit runs first what was registered last. A terminated
    # worker might leave half a message, for which the pin thread would wait.
    for iterator in tuple(_iterators):
        iterator._shutdown_workers()


def _set_SIGCHLD_handler():  # noqa: N802
    """Raise in the main thread as soon as the kernel tells that a worker died. (Else the next look would tell.)"""
    previous = signal.getsignal(signal.SIGCHLD)
    if getattr(previous, "of_mini", False) or threading.current_thread() is not threading.main_thread():
        return

    def handler(signum, frame):
        _error_if_any_worker_fails()  # one of those that were named by `_set_worker_pids`
        if callable(previous):
            previous(signum, frame)

    handler.of_mini = True
    signal.signal(signal.SIGCHLD, handler)
