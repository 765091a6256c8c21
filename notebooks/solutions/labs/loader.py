"""The labs, solved: the functions of labs/loader.py that are yours. `course.labs.solved` puts them in their places."""

# ruff: noqa: F821, the other names are given there
from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch._utils import ExceptionWrapper


# --- Lab 1: from indices to a batch, §2.3 -----------------------------------------------------------------------------
def batches_of(indices, batch_size, drop_last):
    """Lists of `batch_size` indices, as they are asked for. The last one is shorter, or dropped."""
    indices = iter(indices)
    while batch := list(itertools.islice(indices, batch_size)):
        if len(batch) == batch_size or not drop_last:
            yield batch


class _MapDatasetFetcher:
    def fetch(self, indices):
        """The batch of these indices. A dataset with `__getitems__` is asked once, for all of them."""
        if hasattr(self.dataset, "__getitems__"):
            return self.collate_fn(self.dataset.__getitems__(indices))
        return self.collate_fn([self.dataset[index] for index in indices])


class _IterableDatasetFetcher:
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
class _MultiProcessingDataLoaderIter:
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
