"""A program whose loaders do what `minidl run` has to honour: a case for each row of guides/record.md's table.

It prints a JSON object: row -> [what its epochs yielded, whose iterator that was]. `ROWS` says whose it is under
`minidl run`; under plain Python and under --observe it is torch's everywhere.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.context
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils.data as data
from torch.utils.data import _utils, dataloader
from torch.utils.data._utils import collate, fetch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.iter import IterableWrapper

Epochs = list[list[Any]]


class Numbers(data.Dataset[Any]):
    """Sample i is `make(i)`."""

    def __init__(self, make: Callable[[int], Any] = float) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def tell(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, (torch.Tensor, np.ndarray)) else repr(batch)


whose: list[str] = []


def epochs(loader: Any, count: int = 2) -> Epochs:
    """What a loader yields, and whose iterator it has: told by the module that its class's methods are in."""
    found: Epochs = []
    for _ in range(count):
        iterator = iter(loader)
        found.append([tell(batch) for batch in iterator])
        whose.append("minidl's" if "minidl" in type(iterator)._next_data.__module__ else "torch's")
        del iterator  # else the next worker inherits it
    return found


def loader(source: Any = None, kind: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    given = {"batch_size": 2, "num_workers": 1} | options
    return (kind or data.DataLoader)(Numbers() if source is None else source, **given)


def subclass() -> Epochs:
    class Own(data.DataLoader):
        def __iter__(self) -> Any:
            self.begun = True
            return super().__iter__()

        def _get_iterator(self) -> Any:
            return super()._get_iterator()

        @property
        def _index_sampler(self) -> Any:
            return list(super()._index_sampler)[::-1]

    return epochs(loader(kind=Own, shuffle=True))


def patched_class() -> Epochs:
    plain = data.DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs | {"batch_size": 3})

    with mock.patch.object(data.DataLoader, "__init__", init):
        return epochs(loader())


def own_iterator() -> Epochs:
    class Shifted(dataloader._MultiProcessingDataLoaderIter):
        def _next_data(self) -> Any:
            return super()._next_data() + 100

    class Own(data.DataLoader):
        def _get_iterator(self) -> Any:
            return Shifted(self)

    return epochs(loader(kind=Own))


def patched_fetcher() -> Epochs:
    plain = fetch._MapDatasetFetcher.fetch
    with mock.patch.object(fetch._MapDatasetFetcher, "fetch", lambda self, index: plain(self, index) + 100):
        return epochs(loader()) + epochs(loader(num_workers=0))


def patched_later() -> Epochs:
    made, plain = loader(), dataloader._BaseDataLoaderIter.__next__
    with mock.patch.object(dataloader._BaseDataLoaderIter, "__next__", lambda self: plain(self) + 100):
        return epochs(made)


def patched_loop() -> Epochs:
    plain = torch_worker._worker_loop

    def loop(*args: Any) -> None:
        plain(*args[:6], lambda samples: samples[::-1], *args[7:])

    with mock.patch.object(_utils.worker, "_worker_loop", loop):
        return epochs(loader())


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


def own_collation() -> Epochs:
    def things(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return torch.tensor([thing.number for thing in batch])

    with mock.patch.dict(collate.default_collate_fn_map, {Thing: things, float: collate.collate_str_fn}):
        del collate.default_collate_fn_map[int]
        refused = loader(Numbers(int))
        try:
            said = epochs(refused)
        except TypeError as error:
            said = [["found <class 'int'>" in str(error)]]
        del refused
        gc.collect()  # the iterator that has failed: else the next worker inherits it, and ends it once more
        return epochs(loader(Numbers(Thing))) + epochs(loader()) + said


def own_collate_fn() -> Epochs:
    class Empty(list[Any]):
        def __call__(self, samples: Any) -> Any:
            return samples[::-1]

    with mock.patch.object(data, "default_collate", sorted):
        return epochs(loader(collate_fn=Empty())) + epochs(loader(Numbers(int), collate_fn=sorted))


def rebuilt(number: int) -> Thing:
    return Thing(number + 100)


def own_reducer() -> Epochs:
    with mock.patch.dict(ForkingPickler._extra_reducers):  # type: ignore[attr-defined]
        ForkingPickler.register(Thing, lambda thing: (rebuilt, (thing.number,)))
        return [[thing.number for thing in batch] for batch in loader(Numbers(Thing), collate_fn=list)]


def own_reducer_of_torchs() -> Epochs:
    with mock.patch.dict(ForkingPickler._extra_reducers):  # type: ignore[attr-defined]
        ForkingPickler.register(np.ndarray, lambda array: (np.full, (array.shape, 100.0)))
        return epochs(loader(Numbers(lambda number: np.full(2, number)), collate_fn=np.stack))


def pipes() -> Epochs:
    made = [IterableWrapper(range(6)).shuffle().sharding_filter() for _ in range(2)]
    return epochs(loader(made[0], shuffle=True)) + epochs(loader(made[1], shuffle=True, num_workers=0))


class Worker(threading.Thread):
    pid = property(id)
    exitcode = 0

    def terminate(self) -> None: ...

    def run(self) -> None:
        super().run()
        torch_worker._worker_info = None


class Plain(queue.Queue):  # type: ignore[type-arg]
    def close(self) -> None: ...

    def cancel_join_thread(self) -> None: ...


class Threads(multiprocessing.context.SpawnContext):
    """As MONAI's ThreadDataLoader has it."""

    Process = Worker  # type: ignore[assignment]
    Queue = Plain  # type: ignore[assignment]


def thread_workers() -> Epochs:
    return epochs(loader(multiprocessing_context=Threads()))


class Counted(multiprocessing.context.ForkContext):
    """Processes as always, and queues that are looked at."""

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802
        made = super().Queue(maxsize)
        plain = made.get
        made.get = lambda *args, **kwargs: plain(*args, **kwargs)  # type: ignore[method-assign]
        return made


def own_context() -> Epochs:
    return epochs(loader(multiprocessing_context=Counted()))


class Moody:
    """Samples in an order, and an error for whoever asks for anything else."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2])

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"nobody asks me for {name}")


def raising_objects() -> Epochs:
    made = loader(sampler=Moody())
    cycle: list[Any] = [1.0]
    cycle.append(cycle)
    return epochs(made) + epochs(loader(Numbers(lambda number: cycle), collate_fn=lambda samples: samples[0]))


ROWS: dict[str, tuple[str, Callable[[], Epochs]]] = {
    "a subclass, with methods of its own": ("minidl's", subclass),
    "a patch of `DataLoader`'s methods": ("minidl's", patched_class),
    "functions for `default_collate`, by `default_collate_fn_map`": ("minidl's", own_collation),
    "a `collate_fn` of its own": ("minidl's", own_collate_fn),
    "pickling of its own types, registered with `ForkingPickler`": ("minidl's", own_reducer),
    "samplers and batches that raise when they are looked at": ("minidl's", raising_objects),
    "an iterator of its own, by a subclass": ("torch's", own_iterator),
    "a patch of torch's internals before the loader is made": ("torch's", patched_fetcher),
    "a patch of torch's internals before `iter()`": ("torch's", patched_later),
    "a worker's loop of its own": ("torch's", patched_loop),
    "another pickling of tensors, storages or arrays": ("torch's", own_reducer_of_torchs),
    "DataPipes": ("torch's", pipes),
    "a multiprocessing context of its own": ("torch's", own_context),
    "workers that are threads": ("torch's, not recorded", thread_workers),
}


def main() -> None:
    warnings.simplefilter("ignore")
    outcome = {}
    for row, (_, case) in ROWS.items():
        whose.clear()
        found = case()
        outcome[row] = found, sorted(set(whose))
    print(json.dumps(outcome))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
