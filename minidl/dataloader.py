"""`minidl.DataLoader`: the loader of the room `loader`, with what torch's has not.

It can be saved and resumed (`resume`), and its batches may travel in memory that is used again (`arena`), which a
`DeviceLoader` may have page-locked (`device`). Without these, `loader.dataloader.DataLoader` is a whole loader.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from minidl.auto import is_auto
from minidl.loader import dataloader
from minidl.loader.iterators import _BaseDataLoaderIter
from minidl.loader.ports import EpochRecord, Ports, Transport
from minidl.resume import frameworks, stateful
from minidl.resume.position import EpochPosition

if TYPE_CHECKING:
    from minidl.arena.arena import Host
    from minidl.auto.loading import Auto

T_co = TypeVar("T_co", covariant=True)

TRANSPORTS = ("upstream", "arena")


class LoaderWithoutState(dataloader.DataLoader[T_co]):
    """A loader with a choice of transports: what `minidl run` puts in torch's place.

    It has no state, because frameworks save the state of any loader that has one, and torch's has none.

    transport: as `DataLoader`'s.
    """

    _host: Host | None = None
    """What page-locks the slabs of the iterator that is being made."""

    _auto: Auto | None = None
    """What chooses the number of workers, if the loader does."""

    def __init__(self, *args: Any, transport: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transport = checked_transport(transport, self.worker_method)

    def choose_workers(self) -> None:
        """Let this loader choose its number of workers. Raises ValueError if MINIDL_AUTO_BYTES is no size."""
        from minidl.auto.loading import Auto, budget

        budget()
        self._auto = Auto()
        self._auto.begin(self)

    def iterate_for(self, host: Host) -> Iterator[T_co]:
        """As iter(), for who copies each batch to a device and keeps it until the copy has ended, as DeviceLoader does.

        With transport="arena", pin_memory=True and workers, `host` page-locks the slabs, and there is no pin thread.
        """
        plain = dataloader.DataLoader
        own = type(self).__iter__ is plain.__iter__ and type(self)._get_iterator is plain._get_iterator
        if own and self.transport == "arena" and self.pin_memory and self.num_workers > 0:
            self._host = host
        try:
            return iter(self)
        finally:
            self._host = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._auto is not None:
            self._auto.set(self._auto.now, self)

    def _make_iterator(self) -> _BaseDataLoaderIter:
        if self.pin_memory:
            from minidl.device import sim

            sim.load_if_wanted()
        return super()._make_iterator()

    def _new_transport(self) -> Transport:
        if self.transport != "arena":
            return super()._new_transport()
        from minidl.arena.transport import SlabTransport

        return SlabTransport(self._host)

    def _goes_on(self, iterator: _BaseDataLoaderIter) -> bool:
        # Nobody else may have batches in slabs that are page-locked.
        fits = iterator._transport.page_locked == (self._host is not None)
        same = self._auto is None or iterator._num_workers == self.num_workers
        return super()._goes_on(iterator) and fits and same

    def _iterate(self) -> _BaseDataLoaderIter:
        make = super()._iterate
        return make() if self._auto is None else self._auto.iterate(self, make)

    def _new_epoch(self, ports: Ports) -> EpochRecord:
        return self._begin(ports) if self._auto is None else self._auto.record(self, self._begin, ports)

    def _begin(self, ports: Ports) -> EpochRecord:
        """The record of an epoch that begins."""
        return super()._new_epoch(ports)

    def _phrases(self) -> Iterator[str]:
        yield from super()._phrases()
        if self._auto is not None:
            yield f'num_workers="auto": {self._auto.why}'

    def check_worker_number_rationality(self) -> None:
        if self._auto is None:  # it knows the CPUs
            super().check_worker_number_rationality()


class DataLoader(LoaderWithoutState[T_co]):
    """Iterates over a dataset in batches, optionally through worker processes. Same constructor as torch 2.13's.

    For torch's arguments, see `loader.dataloader.DataLoader`. A `DeviceLoader` over transport="arena" with pin_memory
    has the transport's own memory page-locked, in place of a copy.

    num_workers="auto" (not torch's): the loader measures its first batches, chooses, and goes on; see `auto.loading`.
    MINIDL_AUTO_BYTES bounds what batches and workers may take of the memory, by default half of what is left.

    state_every (not torch's): a worker sends the state of its iterable dataset, if that has one, with every so many
    batches. After `load_state_dict` it fetches and drops fewer than these. None: it sends the state only at the ends of
    epochs, and drops all batches before. The state of a map dataset that has one goes along with each batch.

    transport (not torch's): "upstream", each batch in new shared memory, as torch does it; or "arena", in memory that
    is used again (see `arena.arena`), many times as fast. None: what MINIDL_TRANSPORT says, else "upstream".
    MINIDL_ARENA_BYTES, 2G by default, is what each worker keeps of that memory for use again.

    worker_method (not torch's): "multiprocessing", or "thread": workers are threads of this process, which share its
    memory: nothing is pickled, and `transport` is then "thread". See `loader.threads`.

    Raises ValueError or TypeError for options that exclude each other, and NotImplementedError for DataPipes. Beyond
    torch: `close()` and `with` end the workers of every iterator at once; `state_dict()` and `load_state_dict()`
    resume an epoch where another process has left it. Article 1 §2.1 to §2.3.
    """

    # All written out, for type checkers and editors; a test compares the arguments with torch's.
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
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
        state_every: int | None = None,
        transport: str | None = None,
        worker_method: str = "multiprocessing",
    ) -> None:
        chooses = is_auto(num_workers)
        num_workers = 1 if chooses else num_workers
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
            transport=transport, worker_method=worker_method,
        )  # fmt: skip
        if chooses:
            self.choose_workers()
        self.state_every = _checked_state_every(state_every)
        self._given: stateful.State | None = None  # to resume from at the next iter()
        self._told_at_load: int | None = None  # the sampler's epoch when that was loaded
        self._record: stateful.Record | None = None  # of the epoch that iter() has begun last

    def _iterate(self) -> _BaseDataLoaderIter:
        given, counted = frameworks.goes_on(self, self._given)
        if given is not self._given:
            self.load_state_dict(given or {})
        loaded = self._given
        try:
            iterator = super()._iterate()
            if counted:
                next(iterator, None)  # its end, unless the framework ends epochs before
                if not self.persistent_workers:
                    iterator.close()
                stateful.tell_next(self, given or {})  # Lightning does it after iter(), too late for workers
                iterator = super()._iterate()
            return iterator
        except BaseException:
            self._given = loaded  # the program has no iterator: the next one goes on from there
            raise

    def _goes_on(self, iterator: _BaseDataLoaderIter) -> bool:
        # Its workers are where they are: others begin where a state says.
        return super()._goes_on(iterator) and self._given is None

    def _begin(self, ports: Ports) -> stateful.Record:
        return stateful.begin(self, functools.partial(ports.decider, EpochPosition))

    def state_dict(self) -> dict[str, Any]:
        """What the consumer has been given by the iterator made last, as plain data; see the module `stateful`.

        In an epoch: the place after the last batch; no batches follow it if that was the epoch's last. Before the first
        epoch, and after StopIteration: the beginning of the next. Lightning's own counters go before: see `frameworks`.
        A batch counts when next() returns it: after a Ctrl-C inside next() it comes again.
        """
        return copy.deepcopy(self._given) if self._given is not None else stateful.saved(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict` at the next iter(); {} = begin a new epoch there. An iterator that lives goes on.

        That iter() sets torch's global random state, and the generators of loader and sampler, to what they were when
        the state was taken. It raises ValueError if the loader has another number of workers or ranks, another batch
        size or kind of dataset, which is an AssertionError, too, as torchdata's; a map dataset without a state of its
        own may have another number of workers. Raises TypeError or ValueError for what is no state of a loader.
        """
        self._given = stateful.checked(state_dict) if state_dict else None
        if self._auto is not None and self._given is not None:
            self._auto.resume(self._given["num_workers"], self)
        self._record, self._told_at_load = None, stateful.told_epoch(self)


def checked_transport(transport: str | None, worker_method: str = "multiprocessing") -> str:
    """The transport that is asked for here, or by MINIDL_TRANSPORT, or the first one; "thread" between threads.

    Raises ValueError if it is unknown or for processes, or if MINIDL_ARENA_BYTES is no number of bytes.
    """
    if worker_method == "thread":
        if transport is not None:
            raise ValueError(
                f"transport={transport!r} is a way between processes, and with worker_method='thread' batches stay "
                "where they are: leave out one of them"
            )
        return "thread"
    name = transport or os.environ.get("MINIDL_TRANSPORT") or TRANSPORTS[0]
    if name not in TRANSPORTS:
        source = "" if transport else " (from MINIDL_TRANSPORT)"
        raise ValueError(f"transport={name!r}{source}: give one of {', '.join(map(repr, TRANSPORTS))}")
    if name == "arena":
        from minidl.arena.arena import budget

        budget()
    return name


def _checked_state_every(state_every: int | None) -> int | None:
    if state_every is not None and (not isinstance(state_every, int) or state_every < 1):
        raise ValueError(f"state_every should be a positive number of batches, or None, but got {state_every!r}")
    return state_every
