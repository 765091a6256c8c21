"""A DataLoader of your own, in five labs. Each function that raises NotImplementedError is yours; the rest is given.

Each lab's notebook, beside this file, says what its functions do and why. Names are those of torch and of article 1
§2.4. Import what you need; add functions and attributes as you like. `python -m course.labs 1 labs/loader.py`, in the
folder of the course, runs the trials of lab 1.
"""

# ruff: noqa: F401, the imports are for what you write
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
        dataset, sampler = loader.dataset, loader.sampler
        own = itertools.repeat(None) if isinstance(dataset, IterableDataset) else range(len(dataset))
        self._fetching = dataset, loader.collate_fn, loader.drop_last
        self._sampler_iter = iter(batches_of(own if sampler is None else sampler, loader.batch_size, loader.drop_last))
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
    raise NotImplementedError("lab 1: batches_of")


class _MapDatasetFetcher:
    """For a dataset that is asked for each index."""

    def __init__(self, dataset, collate_fn, drop_last):
        self.dataset, self.collate_fn, self.drop_last = dataset, collate_fn, drop_last

    def fetch(self, indices):
        """The batch of these indices. A dataset with `__getitems__` is asked once, for all of them."""
        raise NotImplementedError("lab 1: fetch, of a dataset with indices")


class _IterableDatasetFetcher(_MapDatasetFetcher):
    """For a stream, of which only the number of indices counts."""

    def __init__(self, dataset, collate_fn, drop_last):
        super().__init__(dataset, collate_fn, drop_last)
        self.stream, self.ended = iter(dataset), False

    def fetch(self, indices):
        """The next samples of the stream. Raises StopIteration at its end, also if it is called again."""
        raise NotImplementedError("lab 1: fetch, of a stream")


def default_collate(samples):
    """One batch of samples of one structure: tensors, arrays, numbers, strings, and dicts, tuples, lists of these."""
    raise NotImplementedError("lab 1: default_collate")


# --- Lab 2: what a worker runs, §2.4.5; lab 5: it asks whether its parent lives ---------------------------------------
def worker_loop(fetching, index_queue, data_queue, done_event, worker_id, num_workers, base_seed):
    """What a worker runs: takes (idx, index) and puts (idx, data), until the sentinel (None, None)."""
    raise NotImplementedError("lab 2: worker_loop")


# --- Labs 2 to 5: the loop's side, §2.4 -------------------------------------------------------------------------------
class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter):
    """Fetches in workers. Lab 2 needs one of them; write it for `num_workers` at once, or change it in lab 3."""

    _shutdown, _owner = True, None  # until there is something to shut down

    def __init__(self, loader):
        """§2.4.2: the queues, the workers, in lab 4 the pin thread; then the first tasks."""
        super().__init__(loader)
        raise NotImplementedError("lab 2: __init__")

    def _try_put_index(self):
        """§2.4.4: send one task to the worker whose turn it is, if there is an index and a worker."""
        raise NotImplementedError("lab 2: _try_put_index")

    def __next__(self):
        """§2.4.7: the next batch in order. What comes before its turn waits in the reorder buffer."""
        raise NotImplementedError("lab 2: __next__")

    # --- Lab 5: deaths
    def _get_data(self):
        """The next message. Raises RuntimeError if a worker has died, or nothing has come for `timeout` seconds."""
        return self._data_queue.get()  # lab 5: what if it never comes?

    # --- Lab 4: the end, article 4 §shutdown
    def _shutdown_workers(self):
        """End the pin thread, then the workers; once, and only in the process that has started them."""
        for index_queue in self._index_queues:  # lab 4: what if the loop breaks, or a worker does not leave?
            index_queue.put((None, None))
        for worker in self._workers:
            worker.join()

    def __del__(self):
        pass  # lab 4: when is an iterator dropped?


# --- Lab 4: what the pin thread runs, §2.4.6 --------------------------------------------------------------------------
def pin_memory_loop(in_queue, out_queue, done_event):
    """What the pin thread runs: takes (idx, data) and puts (idx, the pinned data), until the done event is set."""
    raise NotImplementedError("lab 4: pin_memory_loop")
