"""Miniatures of loaders that have an iterator of their own, as torchdata and fastai have."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data._utils.worker import ManagerWatchdog, WorkerInfo, _IterableDatasetStopIteration
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)


# --- As torchdata's StatefulDataLoader: a copy of torch's iterator, whose messages carry states -----------------------
class StartUp:
    """A worker's first message, asked for by the loader."""


def worker_loop(
    dataset_kind: int,
    dataset: Any,
    index_queue: Any,
    data_queue: Any,
    done_event: Any,
    auto_collation: bool,
    collate_fn: Any,
    drop_last: bool,
    base_seed: int,
    init_fn: Any,
    worker_id: int,
    num_workers: int,
    worker_state: Any,
) -> None:
    seed = base_seed + worker_id
    torch.manual_seed(seed)
    info = WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)
    torch.utils.data._utils.worker._worker_info = info
    fetcher = (_MapDatasetFetcher, _IterableDatasetFetcher)[dataset_kind](
        dataset, auto_collation, collate_fn, drop_last
    )
    watchdog, exhausted = ManagerWatchdog(), False
    while watchdog.is_alive():
        try:
            message = index_queue.get(timeout=5)
        except queue.Empty:
            continue
        if isinstance(message, StartUp):
            data_queue.put((message, {"initial": worker_id}))
            continue
        if message is None:
            assert done_event.is_set() or exhausted
            break
        if done_event.is_set() or exhausted:
            continue
        task, (index, _) = message
        try:
            data = fetcher.fetch(index)
        except StopIteration:
            data, exhausted = _IterableDatasetStopIteration(worker_id), True
        data_queue.put((task, (data, worker_id, {"state": task})))
    if done_event.is_set():
        data_queue.cancel_join_thread()
        data_queue.close()


class StatefulIterator(_BaseDataLoaderIter):
    """In order, for map datasets and iterable ones; ends its workers with the epoch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._prefetch_factor, self._in_order = loader.prefetch_factor or 2, True
        context: Any = loader.multiprocessing_context or torch.multiprocessing
        self._worker_result_queue, self._workers_done_event = context.Queue(), context.Event()
        self._index_queues: list[Any] = []
        self._workers: list[Any] = []
        self._send_idx = self._rcvd_idx = self._tasks_outstanding = 0
        self._task_info: dict[int, Any] = {}
        self._workers_status = [True] * self._num_workers
        for worker_id in range(self._num_workers):
            index_queue = context.Queue()
            index_queue.cancel_join_thread()
            given = (self._dataset_kind, self._dataset, index_queue, self._worker_result_queue)
            given += (self._workers_done_event, self._auto_collation, self._collate_fn, self._drop_last)
            given += (self._base_seed, loader.worker_init_fn, worker_id, self._num_workers, None)
            worker = context.Process(target=worker_loop, args=given)
            worker.daemon = True
            worker.start()
            self._index_queues.append(index_queue)
            self._workers.append(worker)
            index_queue.put(StartUp())
        assert [self._worker_result_queue.get(timeout=60)[1] for _ in self._workers]
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()

    def _try_put_index(self) -> None:
        try:
            index = self._next_index()
        except StopIteration:
            return
        active = [n for n in range(self._num_workers) if self._workers_status[n]]
        if not active:
            return
        worker = self._send_idx % self._num_workers
        worker = worker if worker in active else active[0]
        self._index_queues[worker].put((self._send_idx, (index, False)))
        self._task_info[self._send_idx] = (worker,)
        self._tasks_outstanding += 1
        self._send_idx += 1

    def _next_data(self) -> Any:
        while self._rcvd_idx < self._send_idx:
            info = self._task_info.get(self._rcvd_idx)
            if info is None or (len(info) == 1 and not self._workers_status[info[0]]):
                self._task_info.pop(self._rcvd_idx, None)
                self._rcvd_idx += 1
                continue
            if len(info) == 2:
                self._rcvd_idx += 1
                return self._process(self._task_info.pop(self._rcvd_idx - 1)[1])
            task, (data, worker, _) = self._worker_result_queue.get(timeout=60)
            self._tasks_outstanding -= 1
            if isinstance(data, _IterableDatasetStopIteration):
                self._index_queues[worker].put(None)
                self._workers_status[worker] = False
                del self._task_info[task]
                self._try_put_index()
            else:
                self._task_info[task] += (data,)
        self.shut_down()
        raise StopIteration

    def _process(self, data: Any) -> Any:
        self._try_put_index()
        return data

    def shut_down(self) -> None:
        self._workers_done_event.set()
        for worker, active in enumerate(self._workers_status):
            if active:
                self._index_queues[worker].put(None)
        for process in self._workers:
            process.join(timeout=60)
        for index_queue in self._index_queues:
            index_queue.close()


class StatefulLoader(DataLoader[Any]):
    """A subclass of torch's loader with its own `__iter__`."""

    def __iter__(self) -> Any:
        return StatefulIterator(self) if self.num_workers else OwnSingle(self)


class OwnSingle(_BaseDataLoaderIter):
    """Without workers."""

    def _next_data(self) -> Any:
        return self._collate_fn([self._dataset[index] for index in next(self._sampler_iter)])


# --- As fastai's loader: no subclass, and torch's iterators over a stand-in -------------------------------------------
class StandIn:
    """What torch's iterators take for a loader; its context can't be set."""

    _IterableDataset_len_called, _auto_collation, drop_last, _dataset_kind = None, False, False, _DatasetKind.Iterable
    generator, prefetch_factor, worker_init_fn, pin_memory_device, timeout = None, 2, None, "", 0
    pin_memory, persistent_workers, in_order = False, False, True

    def __init__(self, batches: list[Any], num_workers: int) -> None:
        self.batches, self.num_workers, self.dataset = batches, num_workers, self
        self.context: Any = multiprocessing

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        return iter(self.batches if info is None else self.batches[info.id :: info.num_workers])

    @property
    def _index_sampler(self) -> Any:
        return iter(int, 1)

    @property
    def multiprocessing_context(self) -> Any:
        return (None, self.context)[self.num_workers > 0]

    @staticmethod
    def collate_fn(data: Any) -> Any:
        return data


class FastLoader:
    """It is iterated, and that is all that it has in common with torch's loader."""

    def __init__(self, batches: list[Any], num_workers: int) -> None:
        self.stand_in = StandIn(batches, num_workers)

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self.stand_in
        kinds = (_MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter)
        yield from kinds[loader.num_workers == 0](loader)
