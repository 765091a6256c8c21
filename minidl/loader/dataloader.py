"""`DataLoader`: the options, what follows from them, and an iterator for each epoch.

The iterators are in `iterators.py`; which options exclude each other is checked here, in torch's words. Article 1 §2.1.
"""

from __future__ import annotations

import math
import multiprocessing.context
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import torch
import torch.multiprocessing
import torch.utils.data
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataset import IterableDataset
from typing_extensions import Self

from minidl.data.fetch import _DatasetKind
from minidl.data.sampler import BatchSampler, RandomSampler, Sampler, SequentialSampler
from minidl.live_repr import LiveRepr, counted
from minidl.loader.iterators import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from minidl.loader.ports import EpochRecord, Ports, Transport

T_co = TypeVar("T_co", covariant=True)

_FIXED_AFTER_INIT = (
    "batch_size",
    "batch_sampler",
    "sampler",
    "drop_last",
    "dataset",
    "persistent_workers",
    "worker_method",
)


class _InfiniteConstantSampler(Sampler[None], torch.utils.data.dataloader._InfiniteConstantSampler):
    """Index None forever: an iterable dataset decides by itself when it ends."""

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None


class _LiveIterators(weakref.WeakSet[_BaseDataLoaderIter]):
    """A loader's iterators, for `close()` to end. They belong to one process: a pickle or a deep copy begins empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _LiveIterators, ()


class DataLoader(LiveRepr, torch.utils.data.DataLoader[T_co]):
    """Iterates over a dataset in batches, optionally through worker processes. Same constructor as torch 2.13's.

    dataset: map-style (`__getitem__`, `__len__`) or iterable-style (an `IterableDataset`, minidl's or torch's).
    batch_size: samples per batch; None turns collation off and yields samples.
    shuffle: a RandomSampler in place of a SequentialSampler. sampler: an iterable of indices.
    batch_sampler: an iterable of lists of indices, in place of batch_size, shuffle, sampler and drop_last.
    drop_last: leave out an incomplete batch.
    num_workers: processes; 0 loads in this one. prefetch_factor: tasks in flight per worker (default 2).
    persistent_workers: keep the processes from one epoch to the next. in_order: yield batches in the sampler's order.
    collate_fn: samples -> batch. worker_init_fn: called in each worker with its id, after seeding.
    pin_memory: copy batches to page-locked memory for the current accelerator. pin_memory_device: deprecated, ignored.
    timeout: seconds to wait for a batch, 0 = no limit. generator: for the default sampler and the workers' base seed.
    multiprocessing_context: "fork", "spawn", "forkserver", or a context.
    worker_method (not torch's): "multiprocessing", or "thread": the workers are threads of this process; see `threads`.

    Raises ValueError or TypeError for options that exclude each other, and NotImplementedError for DataPipes. Beyond
    torch: `close()` and `with` end the workers of every iterator at once. Article 1 §2.1 to §2.3.

    `minidl.DataLoader` is `minidl.dataloader.DataLoader`, which can be saved and resumed, too, and has another
    transport. It overrides `_new_transport`, `_new_epoch`, `_goes_on`, and around them `_iterate` and `_make_iterator`.
    """

    dataset: Any
    batch_size: int | None
    num_workers: int
    pin_memory: bool
    drop_last: bool
    timeout: float
    sampler: Any
    pin_memory_device: str
    prefetch_factor: int | None
    _iterator: _BaseDataLoaderIter | None
    __initialized = False
    worker_method = "multiprocessing"  # of a loader, too, that torch's own constructor has made
    transport = "upstream"

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        worker_method: str = "multiprocessing",
    ) -> None:
        _refuse_datapipes(dataset)
        self.num_workers = num_workers
        _check_workers(num_workers, timeout, prefetch_factor, persistent_workers)
        self.worker_method = _checked_method(worker_method, multiprocessing_context)
        self.prefetch_factor = 2 if num_workers > 0 and prefetch_factor is None else prefetch_factor
        self.dataset = dataset
        self.pin_memory = pin_memory
        self.pin_memory_device = pin_memory_device
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.in_order = in_order
        # The kind comes first: whoever passes a sampler for an iterable dataset should hear that, not of its details.
        self._dataset_kind = _kind_of(dataset, shuffle=shuffle or None, sampler=sampler, batch_sampler=batch_sampler)
        _check_batching(batch_size, shuffle, sampler, batch_sampler, drop_last)
        if batch_sampler is not None:
            batch_size, drop_last = None, False
        if sampler is None:
            sampler = self._default_sampler(bool(shuffle), generator)
        if batch_size is not None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.generator = generator
        # Frameworks ask whether the function is torch's default. `collate.ours` puts ours in its place if it is called.
        if collate_fn is None:
            collate_fn = torch_collate.default_collate if self._auto_collation else torch_collate.default_convert
        self.collate_fn = collate_fn
        self.persistent_workers = persistent_workers
        self.__initialized = True
        self._IterableDataset_len_called: int | None = None  # type: ignore[assignment]  # torch's stub says None
        self._iterator = None
        self._live_iterators = _LiveIterators()
        self._made_at = users_line(self)
        self.check_worker_number_rationality()

    def _default_sampler(self, shuffle: bool, generator: torch.Generator | None) -> Iterable[Any]:
        if self._dataset_kind == _DatasetKind.Iterable:
            return _InfiniteConstantSampler()
        return RandomSampler(self.dataset, generator=generator) if shuffle else SequentialSampler(self.dataset)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return self._make_iterator()

    def _make_iterator(self) -> _BaseDataLoaderIter:
        iterator: _BaseDataLoaderIter
        if self.num_workers == 0:
            iterator = _SingleProcessDataLoaderIter(self)
        elif self.worker_method == "thread":
            from minidl.loader.threads import _ThreadDataLoaderIter

            iterator = _ThreadDataLoaderIter(self)
        else:
            self.check_worker_number_rationality()
            iterator = _MultiProcessingDataLoaderIter(self)
        self._live_iterators.add(iterator)
        return iterator

    def __iter__(self) -> _BaseDataLoaderIter:
        return self._iterate()

    def _iterate(self) -> _BaseDataLoaderIter:
        if not (self.persistent_workers and self.num_workers > 0):
            return self._get_iterator()
        if self._iterator is not None and not self._goes_on(self._iterator):
            self._iterator.close()
            self._iterator = None
        if self._iterator is None:
            self._iterator = self._get_iterator()
        else:
            self._iterator._reset(self)
        return self._iterator

    def _goes_on(self, iterator: _BaseDataLoaderIter) -> bool:
        """Whether this loader's persistent workers serve its next epoch."""
        return not iterator._lifecycle.shut_down

    def _new_transport(self) -> Transport:
        """How the tensors of a new iterator travel."""
        if self.worker_method == "thread":
            from minidl.loader.threads import ThreadTransport

            return ThreadTransport()
        return Transport()

    def _new_epoch(self, ports: Ports) -> EpochRecord:
        """What follows an epoch that begins."""
        return EpochRecord()

    def _phrases(self) -> Iterator[str]:
        sampler = getattr(self._index_sampler, "sampler", self._index_sampler)
        yield f"{type(self.dataset).__name__} by {type(sampler).__name__}, batch_size {self.batch_size}"
        options = ("persistent_workers", "pin_memory", "drop_last")
        worker = "worker thread" if self.worker_method == "thread" else "worker"
        yield ", ".join((counted(self.num_workers, worker), *(name for name in options if getattr(self, name))))
        if self.prefetch_factor is not None:
            yield f"prefetch_factor {self.prefetch_factor}"
        if self.timeout:
            yield f"timeout {self.timeout:g} s"
        yield counted(len(self._live_iterators), "live iterator")
        yield f"made at {os.path.basename(self._made_at)}"

    def __len__(self) -> int:
        """Batches per epoch (samples, where nothing is batched).

        For an iterable dataset an estimate from `len(dataset)`, which is remembered: a loader that then yields more
        than `len(dataset)` warns. Raises TypeError where the dataset has no length.
        """
        if self._dataset_kind != _DatasetKind.Iterable:
            return len(self._index_sampler)
        length = self._IterableDataset_len_called = len(self.dataset)
        if self.batch_size is None:
            return length
        return length // self.batch_size if self.drop_last else math.ceil(length / self.batch_size)

    def close(self) -> None:
        """End every iterator that is still going, with its workers; the loader can be iterated over again after it."""
        for iterator in tuple(self._live_iterators):
            iterator.close()
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _auto_collation(self) -> bool:
        return self.batch_sampler is not None

    @property
    def _index_sampler(self) -> Any:
        """What gives a task its indices: the batch sampler, or the sampler where nothing is batched."""
        return self.batch_sampler if self._auto_collation else self.sampler

    @property
    def multiprocessing_context(self) -> Any:
        """The context that processes, queues and events come from; None = torch's default."""
        return self.__multiprocessing_context

    @multiprocessing_context.setter
    def multiprocessing_context(self, multiprocessing_context: Any) -> None:
        self.__multiprocessing_context = _checked_context(multiprocessing_context, self.num_workers)

    def __setattr__(self, attr: str, val: Any) -> None:
        if self.__initialized and attr in _FIXED_AFTER_INIT:
            raise ValueError(f"{attr} attribute should not be set after {self.__class__.__name__} is initialized")
        super().__setattr__(attr, val)

    def check_worker_number_rationality(self) -> None:
        """Warn where more workers are asked for than this process may use CPUs; threads are often meant to wait."""
        if not self.num_workers or self.worker_method == "thread":
            return
        affinity = hasattr(os, "sched_getaffinity")
        cpus = len(os.sched_getaffinity(0)) if affinity else os.cpu_count()
        if cpus is not None and self.num_workers <= cpus:
            return
        if cpus is None:
            suggestion = "DataLoader is not able to compute a suggested max number of worker in current system."
        else:
            suggestion = (
                f"Our suggested max number of worker in current system is {cpus}"
                f"{'' if affinity else ' (`cpuset` is not taken into account)'}, which is smaller "
                "than what this DataLoader is going to create."
            )
        warnings.warn(
            f"This DataLoader will create {self.num_workers} worker processes in total. {suggestion} "
            "Please be aware that excessive worker creation might get DataLoader running slow or even freeze, "
            "lower the worker number to avoid potential slowness/freeze if necessary.",
            stacklevel=1,  # one place for the making and for each iter(): Python shows a warning once for each place
        )


def users_line(loader: Any) -> str:
    """The program's line that is making `loader`, as "/path/train.py:12"; "" if there is none.

    A subclass makes its loaders in its own `__init__`, a framework in its own code: the innermost line counts that is
    in neither.
    """
    frame: types.FrameType | None = sys._getframe(1)
    passed = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_locals.get("self") is not loader:
            passed = passed or f"{name}:{frame.f_lineno}"
            if not any(folder in name for folder in _LIBRARIES):
                return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return passed


_LIBRARIES = (os.path.dirname(os.__file__), f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


DATAPIPES: Final = tuple(
    getattr(torch.utils.data, name) for name in ("IterDataPipe", "MapDataPipe") if hasattr(torch.utils.data, name)
)


def _refuse_datapipes(dataset: Any) -> None:
    if isinstance(dataset, DATAPIPES):
        raise NotImplementedError(
            f"minidl.DataLoader does not load DataPipes (got {type(dataset).__name__}): "
            "use torch.utils.data.DataLoader for them"
        )


def _refuse(*cases: tuple[bool, str]) -> None:
    """Raise ValueError with the text of the first case that is true."""
    for wrong, message in cases:
        if wrong:
            raise ValueError(message)


def _check_workers(num_workers: int, timeout: float, prefetch_factor: int | None, persistent_workers: bool) -> None:
    _refuse(
        (num_workers < 0, "num_workers option should be non-negative; use num_workers=0 to disable multiprocessing."),
        (timeout < 0, "timeout option should be non-negative"),
        (
            num_workers == 0 and prefetch_factor is not None,
            "prefetch_factor option could only be specified in multiprocessing."
            "let num_workers > 0 to enable multiprocessing, otherwise set prefetch_factor to None.",
        ),
        (prefetch_factor is not None and prefetch_factor < 0, "prefetch_factor option should be non-negative"),
        (persistent_workers and num_workers == 0, "persistent_workers option needs num_workers > 0"),
    )


def _kind_of(dataset: Any, **given: Any) -> int:
    """The dataset's kind. given: options that mean nothing for an iterable one: ValueError for what is not None."""
    if not isinstance(dataset, IterableDataset):
        return _DatasetKind.Map
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"DataLoader with IterableDataset: expected unspecified {name} option, but got {name}={value}"
            )
    return _DatasetKind.Iterable


def _check_batching(
    batch_size: int | None, shuffle: bool | None, sampler: Any, batch_sampler: Any, drop_last: bool
) -> None:
    _refuse(
        (sampler is not None and bool(shuffle), "sampler option is mutually exclusive with shuffle"),
        (
            batch_sampler is not None and (batch_size != 1 or bool(shuffle) or sampler is not None or drop_last),
            "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last",
        ),
        (
            batch_sampler is None and batch_size is None and drop_last,
            "batch_size=None option disables auto-batching and is mutually exclusive with drop_last",
        ),
    )


WORKER_METHODS = ("multiprocessing", "thread")


def _checked_method(worker_method: str, context: Any) -> str:
    _refuse(
        (
            worker_method not in WORKER_METHODS,
            f"worker_method option should be one of {WORKER_METHODS}, but got worker_method={worker_method!r}",
        ),
        (
            worker_method == "thread" and context is not None,
            "multiprocessing_context option says how processes are started, and worker_method='thread' starts none: "
            f"leave out one of them, but got multiprocessing_context={context!r}",
        ),
    )
    return worker_method


def _checked_context(context: Any, num_workers: int) -> Any:
    if context is None:
        return None
    if num_workers <= 0:
        raise ValueError(
            "multiprocessing_context can only be used with multi-process loading (num_workers > 0), "
            f"but got num_workers={num_workers}"
        )
    if isinstance(context, str):
        valid = torch.multiprocessing.get_all_start_methods()
        if context not in valid:
            raise ValueError(
                f"multiprocessing_context option should specify a valid start method in {valid!r}, but got "
                f"multiprocessing_context={context!r}"
            )
        context = torch.multiprocessing.get_context(context)
    if not isinstance(context, multiprocessing.context.BaseContext):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the start method, "
            f"but got multiprocessing_context={context}"
        )
    return context
