"""A DataLoader of your own, in five labs. Each function that raises NotImplementedError is yours; the rest is given.

Each lab's notebook, beside this file, says what its functions do and why. Names are those of torch and of article 1
§2.4. Import what you need; add functions and attributes as you like. `python -m course.labs 1 labs/loader.py`, in the
folder of the course, runs the trials of lab 1.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import random
import threading
from collections.abc import Mapping

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset

MP_STATUS_CHECK_INTERVAL = 5.0
"""Seconds after which a wait looks whether the other side is alive."""


# --- Given: the loader and its options --------------------------------------------------------------------------------
class DataLoader:
    """An iterable of batches. The options are torch's; sampler: an iterable of indices, None = in their order."""

    def __init__(
        self, dataset, batch_size=1, sampler=None, num_workers=0, collate_fn=None, drop_last=False, pin_memory=False,
        timeout=0, prefetch_factor=2,
    ):  # fmt: skip
        self.dataset, self.batch_size, self.sampler, self.drop_last = dataset, batch_size, sampler, drop_last
        self.num_workers, self.prefetch_factor, self.timeout = num_workers, prefetch_factor, timeout
        self.collate_fn = collate_fn or default_collate
        self.pin_memory = pin_memory and torch.accelerator.is_available()

    def __iter__(self):
        return _MultiProcessingDataLoaderIter(self) if self.num_workers else _SingleProcessDataLoaderIter(self)

    def __len__(self):
        size = len(self.dataset if self.sampler is None else self.sampler)
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)


class _BaseDataLoaderIter:
    """What both iterators share."""

    def __init__(self, loader):
        stream = isinstance(loader.dataset, IterableDataset)
        indices = itertools.repeat(None) if stream else loader.sampler or range(len(loader.dataset))
        self._fetching = loader.dataset, loader.collate_fn, loader.drop_last
        self._sampler_iter = iter(batches_of(indices, loader.batch_size, loader.drop_last))
        self._pin_memory, self._timeout = loader.pin_memory, loader.timeout
        self._base_seed = int(torch.empty((), dtype=torch.int64).random_())

    def __iter__(self):
        return self

    def _next_index(self):
        return next(self._sampler_iter)  # may raise StopIteration


class _SingleProcessDataLoaderIter(_BaseDataLoaderIter):
    """Fetches in the loop's own process."""

    def __init__(self, loader):
        super().__init__(loader)
        self._fetcher = create_fetcher(*self._fetching)

    def __next__(self):
        data = self._fetcher.fetch(self._next_index())
        return pin_memory(data) if self._pin_memory else data


def create_fetcher(dataset, collate_fn, drop_last):
    """A fetcher for this kind of dataset. A stream begins here."""
    kind = _IterableDatasetFetcher if isinstance(dataset, IterableDataset) else _MapDatasetFetcher
    return kind(dataset, collate_fn, drop_last)


def begin_worker(worker_id, num_workers, base_seed, dataset):
    """What a worker does first: one thread, seeds of its own, and what get_worker_info() returns."""
    torch.set_num_threads(1)
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset
    )


def attempt(worker_id, function, *args):
    """What the function returns; or in its place the exception that it raises: `.reraise()` raises it in the loop."""
    try:
        return function(*args)
    except Exception:
        return ExceptionWrapper(where=f"in DataLoader worker process {worker_id}")


class EndOfStream:
    """In the place of a batch: this worker's stream has ended."""

    def __init__(self, worker_id):
        self.worker_id = worker_id


def pin_memory(data):
    """The batch in page-locked memory."""
    if isinstance(data, Mapping):
        return {key: pin_memory(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [pin_memory(value) for value in data]
    return data.pin_memory() if isinstance(data, torch.Tensor) else data


# --- Lab 1: from indices to a batch, §2.3 -----------------------------------------------------------------------------
def batches_of(indices, batch_size, drop_last):
    """Lists of `batch_size` indices, as they are asked for. The last one is shorter, or dropped."""
    indices = iter(indices)
    while batch := list(itertools.islice(indices, batch_size)):
        if len(batch) == batch_size or not drop_last:
            yield batch


class _MapDatasetFetcher:
    """For a dataset that is asked for each index."""

    def __init__(self, dataset, collate_fn, drop_last):
        self.dataset, self.collate_fn, self.drop_last = dataset, collate_fn, drop_last

    def fetch(self, indices):
        """The batch of these indices. A dataset with `__getitems__` is asked once, for all of them."""
        if hasattr(self.dataset, "__getitems__"):
            return self.collate_fn(self.dataset.__getitems__(indices))
        return self.collate_fn([self.dataset[index] for index in indices])


class _IterableDatasetFetcher(_MapDatasetFetcher):
    """For a stream, of which only the number of indices counts."""

    def __init__(self, dataset, collate_fn, drop_last):
        super().__init__(dataset, collate_fn, drop_last)
        self.stream, self.ended = iter(dataset), False

    def fetch(self, indices):
        """The next samples of the stream. Raises StopIteration at its end, also if it is called again."""
        samples = [] if self.ended else list(itertools.islice(self.stream, len(indices)))
        self.ended = len(samples) < len(indices)
        if not samples or (self.ended and self.drop_last):
            raise StopIteration
        return self.collate_fn(samples)


def default_collate(samples):
    """One batch of samples of one structure: tensors, arrays, numbers, strings, and dicts, tuples, lists of these."""
    first = samples[0]
    if isinstance(first, np.ndarray):
        samples, first = [torch.as_tensor(sample) for sample in samples], torch.as_tensor(first)
    if isinstance(first, torch.Tensor):
        return torch.stack(samples)
    if isinstance(first, float):
        return torch.tensor(samples, dtype=torch.float64)
    if isinstance(first, int):
        return torch.tensor(samples)
    if isinstance(first, str):
        return samples
    if isinstance(first, Mapping):
        return {key: default_collate([sample[key] for sample in samples]) for key in first}
    if any(len(sample) != len(first) for sample in samples):
        raise RuntimeError("the samples are of different lengths")
    return [default_collate(list(column)) for column in zip(*samples, strict=True)]


# --- Lab 2: what a worker runs, §2.4.5; lab 5: it asks whether its parent lives ---------------------------------------
def worker_loop(fetching, index_queue, data_queue, done_event, worker_id, num_workers, base_seed):
    """What a worker runs: takes (idx, index) and puts (idx, data), until the sentinel (None, None)."""
    begin_worker(worker_id, num_workers, base_seed, fetching[0])
    fetcher, ended, parent = attempt(worker_id, create_fetcher, *fetching), False, multiprocessing.parent_process().pid
    while os.getppid() == parent:
        try:
            idx, index = index_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)
        except queue.Empty:
            continue
        if idx is None:
            break
        if done_event.is_set() or ended:
            continue
        data = fetcher if isinstance(fetcher, ExceptionWrapper) else attempt(worker_id, fetcher.fetch, index)
        if getattr(data, "exc_type", None) is StopIteration:
            data, ended = EndOfStream(worker_id), True
        data_queue.put((idx, data))
    if done_event.is_set() or os.getppid() != parent:
        data_queue.cancel_join_thread()


# --- Labs 2 to 5: the loop's side, §2.4 -------------------------------------------------------------------------------
class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter):
    """Fetches in workers. Lab 2 needs one of them; write it for `num_workers` at once, or change it in lab 3."""

    _shutdown, _owner = True, None  # until there is something to shut down

    def __init__(self, loader):
        """§2.4.2: the queues, the workers, in lab 4 the pin thread; then the first tasks."""
        super().__init__(loader)
        self._num_workers, self._prefetch_factor = loader.num_workers, loader.prefetch_factor
        self._worker_result_queue = self._data_queue = multiprocessing.Queue()
        self._index_queues, self._workers = [], []
        self._workers_done_event, self._pin_thread = multiprocessing.Event(), None
        self._shutdown, self._owner = False, os.getpid()
        for worker_id in range(self._num_workers):
            index_queue = multiprocessing.Queue()
            index_queue.cancel_join_thread()
            queues = index_queue, self._worker_result_queue, self._workers_done_event
            args = self._fetching, *queues, worker_id, self._num_workers, self._base_seed
            worker = multiprocessing.Process(target=worker_loop, args=args, daemon=True)
            worker.start()
            self._index_queues.append(index_queue)
            self._workers.append(worker)
        if self._pin_memory:
            self._data_queue, self._pin_done_event = queue.Queue(), threading.Event()
            args = self._worker_result_queue, self._data_queue, self._pin_done_event
            self._pin_thread = threading.Thread(target=pin_memory_loop, args=args, daemon=True)
            self._pin_thread.start()
        self._send_idx = self._rcvd_idx = 0
        self._task_info = {}  # task -> (worker_id,) while it is outstanding, (worker_id, data) once its batch is here
        self._active = [True] * self._num_workers
        self._turns = itertools.cycle(range(self._num_workers))
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()

    def _try_put_index(self):
        """§2.4.4: send one task to the worker whose turn it is, if there is an index and a worker."""
        worker_id = next((w for w in itertools.islice(self._turns, self._num_workers) if self._active[w]), None)
        if worker_id is None:
            return
        try:
            index = self._next_index()
        except StopIteration:
            return
        self._index_queues[worker_id].put((self._send_idx, index))
        self._task_info[self._send_idx] = (worker_id,)
        self._send_idx += 1

    def __next__(self):
        """§2.4.7: the next batch in order. What comes before its turn waits in the reorder buffer."""
        while True:
            while self._rcvd_idx < self._send_idx:  # a task that a worker whose stream has ended will not answer
                info = self._task_info[self._rcvd_idx]
                if len(info) == 2 or self._active[info[0]]:
                    break
                del self._task_info[self._rcvd_idx]
                self._rcvd_idx += 1
            else:
                self._shutdown_workers()
                raise StopIteration
            if len(self._task_info[self._rcvd_idx]) == 2:
                _, data = self._task_info.pop(self._rcvd_idx)
                self._rcvd_idx += 1
                self._try_put_index()
                if isinstance(data, ExceptionWrapper):
                    data.reraise()
                return data
            idx, data = self._get_data()
            if isinstance(data, EndOfStream):
                self._active[data.worker_id] = False
                self._try_put_index()
            else:
                self._task_info[idx] += (data,)

    # --- Lab 5: deaths
    def _get_data(self):
        """The next message. Raises RuntimeError if a worker has died, or nothing has come for `timeout` seconds."""
        while True:
            try:
                return self._data_queue.get(timeout=self._timeout or MP_STATUS_CHECK_INTERVAL)
            except Exception as error:  # nothing came, or a message whose sender died before it was rebuilt
                dead = [worker.pid for worker in self._workers if not worker.is_alive()]
                if dead:
                    raise RuntimeError(f"DataLoader worker (pid(s) {dead}) exited unexpectedly") from error
                if not isinstance(error, queue.Empty):
                    raise
                if self._timeout:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None

    # --- Lab 4: the end, article 4 §shutdown
    def _shutdown_workers(self):
        """End the pin thread, then the workers; once, and only in the process that has started them."""
        if self._shutdown or os.getpid() != self._owner:
            return
        self._shutdown = True
        if self._pin_thread is not None:
            self._pin_done_event.set()
            self._worker_result_queue.put((None, None))
            self._pin_thread.join(2 * MP_STATUS_CHECK_INTERVAL)
            self._worker_result_queue.cancel_join_thread()
            self._worker_result_queue.close()
        self._workers_done_event.set()
        for index_queue in self._index_queues:
            index_queue.put((None, None))
        for worker in self._workers:
            worker.join(MP_STATUS_CHECK_INTERVAL)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for index_queue in self._index_queues:
            index_queue.close()

    def __del__(self):
        self._shutdown_workers()


# --- Lab 4: what the pin thread runs, §2.4.6 --------------------------------------------------------------------------
def pin_memory_loop(in_queue, out_queue, done_event):
    """What the pin thread runs: takes (idx, data) and puts (idx, the pinned data), until the done event is set."""
    while not done_event.is_set():
        try:
            idx, data = in_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)
        except (queue.Empty, OSError, EOFError):  # the last two: its sender has died, which the loop finds out
            continue
        if not done_event.is_set():
            special = isinstance(data, ExceptionWrapper | EndOfStream)
            out_queue.put((idx, data if special else attempt("pin", pin_memory, data)))
