"""`num_workers="auto"`: the loader measures its first batches, chooses its number of workers, and goes on.

An epoch begins with the number of workers that was chosen last; the first one with one worker, or with up to FIRST if
the number can't change within an epoch. When its batches are measured, the choice is made. If it is another number, a
second iterator with as many workers draws on from the same sampler, and its batches follow the first one's: the loader
yields the same batches in the same order as with any fixed number. Before each later epoch the choice is corrected by
what the last one has shown.

Interface: an `Auto` belongs to a loader, which asks it for the iterator (`iterate`) and for the record (`record`) of
each epoch. It holds no reference to the loader: a cycle would keep the workers of a loader that is gone.
Rules of use: a number that was tried is judged by what it gave. No workers is a choice for good: what the dataset opens
in this process (a file, a connection), workers that are forked later would share. Shards of an iterable dataset, and
states of a dataset that has one, belong to one number of workers: there, it changes between epochs only.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final

from torch import Tensor

from minidl.auto import ChosenWorkers
from minidl.auto.choice import Choice, Limits, choose
from minidl.auto.measuring import COUNT, WALL, LoopMeter, MeasuredFetching, new_rows
from minidl.data.fetch import _DatasetKind
from minidl.live_repr import counted
from minidl.loader.iterators import SAMPLER_ENDED, _BaseDataLoaderIter
from minidl.loader.ports import Chosen, EpochRecord, Fetching, Ports
from minidl.process_stat import launched
from minidl.record.harmless import say_once
from minidl.resume.stateful import has_state
from minidl.usable import cpu_share, memory_left, private_memory, ranks_here, shared_memory_left, size_of, tasks_left

BUDGET_VARIABLE: Final = "MINIDL_AUTO_BYTES"

SHARE: Final = 0.5
"""Of the memory that is left, the share that batches and workers may take if MINIDL_AUTO_BYTES does not say."""

ENOUGH: Final = 8
"""Fetches that are enough to choose, if they have taken ENOUGH_SECONDS together; MANY are, however short they are."""

ENOUGH_SECONDS: Final = 0.25
MANY: Final = 100

FIRST: Final = 4
"""The most workers of the first epoch where the number cannot change within it."""

KEEPS_UP: Final = 0.05
"""The share of waiting below which the number of workers stays."""

TASKS: Final = 6
"""Processes and threads for a worker: itself, its three threads, the one that feeds its tasks, and one to spare."""

_LACKS: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
"""Errors of a machine or a limit that allows no further process."""


class FollowedRecord:
    """The record of an epoch, whose workers measure their fetches, and whose draws can go on in another iterator.

    A batch counts as handed out when AutoIterator gives it to the loop (`give`), which may hold it before.
    """

    came: tuple[int, int] | None = None

    def __init__(self, record: EpochRecord, auto: Auto) -> None:
        self.record, self.auto = record, auto
        self.cut = False
        self.replaces = auto.base_seed is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.record, name)

    def seeded(self, base_seed: int) -> None:
        self.auto.base_seed = base_seed
        self.record.seeded(base_seed)

    def fetching(self, worker: int, loader: Any) -> Fetching:
        if worker == 0:
            self.auto.rows = new_rows(loader.num_workers)
        return MeasuredFetching(self.record.fetching(worker, loader), self.auto.rows[worker])

    def opening(self, index_sampler: Any) -> Iterator[Any]:
        """Persistent workers that others replace would not have asked for it."""
        return iter(()) if self.replaces else self.record.opening(index_sampler)

    def draws(self, index_sampler: Any) -> Iterator[Any]:
        self.indices = self.record.draws(index_sampler)
        return self._until_cut()

    def _until_cut(self) -> Iterator[Any]:
        """The indices. No Python follows the sampler's own: a signal's handler might raise there, and lose one."""
        drawn = map(itemgetter(1), zip(iter(lambda: self.cut, True), self.indices, strict=False))
        return chain(drawn)  # which knows that it has ended, and asks the sampler no more

    def hand_out(self, task_and_worker: tuple[int, int]) -> None:
        self.came = task_and_worker

    def give(self) -> None:
        if self.came is not None:
            self.record.hand_out(self.came)
        self.came = None


class _Draws(Iterator[Any]):
    """What `draw` gives, until it raises StopIteration. An index may be of any type: none is compared."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __next__(self) -> Any:
        return self._draw()


class RestOfEpoch(FollowedRecord):
    """The record of an epoch's second iterator: the first one's goes on. drawn: tasks of the first one.

    taken: indices that were drawn while workers were started; if that fails, the next try begins with them.
    """

    turn = 0

    def __init__(self, first: FollowedRecord, drawn: int, base_seed: int) -> None:
        super().__init__(first.record, first.auto)
        self.indices, self.drawn, self.base_seed = first.indices, drawn, base_seed
        self.taken: list[Any] = []
        self.starting, self.drawing = True, False

    def opening(self, index_sampler: Any) -> Iterator[Any]:
        return iter(())

    def draws(self, index_sampler: Any) -> Iterator[Any]:
        return chain(tuple(self.taken), _Draws(self._draw), self._until_cut())

    def _draw(self) -> Any:
        """An index while workers are started."""
        if not self.starting:
            raise StopIteration
        count, interrupted, self.drawing = len(self.taken), self.drawing, True
        try:
            self.taken.extend(islice(self.indices, 1))  # drawn and kept in one step
        except Exception:  # the sampler's own
            self.drawing = False
            raise
        self.drawing = False
        if len(self.taken) == count:
            self.cut = True  # the sampler is not asked again
            raise RuntimeError(SAMPLER_ENDED) if interrupted else StopIteration
        return self.taken[-1]

    def started(self) -> None:
        self.starting, self.taken = False, []

    def hand_out(self, task_and_worker: tuple[int, int]) -> None:
        super().hand_out(self._numbered(task_and_worker))

    def fail(self, task_and_worker: tuple[int, int]) -> None:
        self.record.fail(self._numbered(task_and_worker))

    def _numbered(self, task_and_worker: tuple[int, int]) -> tuple[int, int]:
        """The task by its number in the epoch; without workers it has that already."""
        task, worker = task_and_worker
        return task + self.drawn * (self.auto.now > 0), worker

    def _nothing(self, *of_the_begin: Any) -> None:
        """The epoch has begun before."""

    before_seed = before_draws = skip = begun = first_draw = _nothing


class AutoIterator(_BaseDataLoaderIter):
    """Yields what its present iterator yields, `inner`, which another one may follow within the epoch.

    follows: whether it does. rest: its record, while workers are started for it: if that fails, the next `next` tries
    again.
    """

    def __init__(self, auto: Auto, loader: Any, inner: Any) -> None:
        self.auto, self.loader, self.inner = auto, loader, inner
        self.host = loader._host
        self.follows = False
        self.rest: RestOfEpoch | None = None
        self.held: list[Any] = []  # a batch that next() has, until it returns it
        auto.measure()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def _record(self) -> EpochRecord:
        return self.inner._record.record  # type: ignore[no-any-return]

    def _phrases(self) -> Iterator[str]:
        yield from self.inner._phrases()

    def __next__(self) -> Any:
        if not self.held:
            self.auto.meter.asks()
            if self.auto.is_to_choose(self.loader):
                self._choose()
            if self.follows and (self.rest is not None or self._has_yielded_all()):
                self._go_on()
            self.held.extend(islice(self.inner, 1))  # received and kept in one step
            if not self.held:
                raise StopIteration
        self.auto.meter.gets(self.held[0])
        self.inner._record.give()
        return self.held.pop()

    def _has_yielded_all(self) -> bool:
        inner = self.inner  # whose next(), if it was interrupted, may have a batch that it has not returned
        return bool(inner._rcvd_idx == inner._send_idx and inner._pending.effect is None) and not inner._shutdown

    def _choose(self) -> None:
        """Choose; if it is another number, the present iterator draws no more."""
        processes = self.loader.worker_method != "thread"
        self.auto.worker_bytes = private_memory(self.inner._workers[0].pid) if processes else 0
        self.auto.choose(self.loader)
        # In this order: what is cut has to go on.
        self.follows = self.inner._record.cut = self.auto.now != self.inner._num_workers
        if not self.follows:
            self.auto.tell(self.inner._ports)

    def _go_on(self) -> None:
        """Let an iterator with as many workers as are chosen follow the present one, whose batches are all yielded."""
        auto, loader, first = self.auto, self.loader, self.inner
        if self.rest is None:
            self.rest = RestOfEpoch(first._record, first._send_idx, int(first._base_seed) + first._num_workers)
        loader._live_iterators.add(self)  # whose `close` the loader calls, as long as no other iterator is there
        first.close()
        host = loader._host
        try:
            loader._host, auto.rest = self.host, self.rest
            self.inner = auto.start(loader, loader._make_iterator)
        finally:
            loader._host, auto.rest = host, None
        rest, self.rest, self.follows = self.rest, None, False
        rest.started()
        loader._live_iterators.discard(self)
        if loader.persistent_workers:
            loader._iterator = self.inner
        auto.measure()

    def close(self) -> None:
        self.follows = False
        self.inner.close()


class Auto:
    """Chooses the workers of one loader.

    now: how many it has; why; periods: s from batch to batch with each number that was tried. rows, meter: what is
    measured in the present iterator. rest: the record that the next iterator goes on with.
    """

    def __init__(self, workers: int = 1) -> None:
        self.now, self.why = workers, "to be chosen when batches are measured"
        self.chosen = False
        self.news: Chosen | None = None
        self.started = math.inf
        self.worker_bytes = 0
        self.periods: dict[int, float] = {}
        self.base_seed: int | None = None
        self.rows: Tensor = new_rows(1)
        self.meter = LoopMeter(self.rows)
        self.rest: RestOfEpoch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Auto, (max(1, self.now),)  # a copy of a loader measures by itself

    def begin(self, loader: Any) -> None:
        """Let the loader, which is made, have the number of workers with which it begins to measure."""
        self.given = loader.num_workers, loader.prefetch_factor
        loader.prefetch_factor = loader.prefetch_factor or 2
        most = _startable()
        self.set(1 if may_change_within(loader) else int(max(1, min(cpu_share(), most, FIRST))), loader)
        if most < 1 and may_be_alone(loader):
            self._take(Choice(0, "this process may start no more processes and threads"), loader)

    def leave(self, loader: Any) -> None:
        """Give the loader what it had before."""
        loader.num_workers, loader.prefetch_factor = self.given
        loader._auto = None

    def set(self, workers: int, loader: Any) -> None:
        self.now, loader.num_workers = workers, ChosenWorkers(workers)

    def resume(self, workers: int, loader: Any) -> None:
        """A state was loaded, which was saved with so many workers: it begins with them if it belongs to them."""
        self.base_seed = None
        if not may_change_within(loader):
            self.set(workers or int(not may_be_alone(loader)), loader)
        self.rows = new_rows(1)  # what was measured belongs to other workers
        self.measure()

    # --- Epochs
    def iterate(self, loader: Any, iterate: Callable[[], Any]) -> Any:
        """The iterator of the next epoch, which `iterate` makes with the number of workers that is chosen before."""
        if loader._iterator is None or loader._iterator._lifecycle.shut_down:
            self.base_seed = None
        self._correct(loader)
        inner = self.start(loader, iterate)
        return AutoIterator(self, loader, inner) if self.now else inner

    def start(self, loader: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, with fewer workers if no more can be started."""
        while True:
            try:
                return make()
            except OSError as error:
                less = self.now // 2
                if error.errno not in _LACKS or not (less or (self.now and may_be_alone(loader))):
                    raise
                self.started = less
                self._take(Choice(less, f"no more could be started: {error.strerror}"), loader)

    def record(self, loader: Any, begin: Callable[[Ports], EpochRecord], ports: Ports) -> Any:
        """The record of an epoch that begins, or of the rest of the present one."""
        self.tell(ports)
        if self.rest is not None:
            self.rest.record.goes_on(ports, self.now)
            return self.rest
        record = begin(ports)
        if getattr(loader, "_given", None) is None:  # no seed is drawn for those that replace persistent workers
            record.base_seed = None if self.base_seed is None else self.base_seed + len(self.rows)
        return FollowedRecord(record, self) if self.now else record

    def measure(self) -> None:
        """Begin to measure."""
        self.meter = LoopMeter(self.rows)

    # --- The choice
    def is_to_choose(self, loader: Any) -> bool:
        """Whether the choice within the first epoch is due."""
        if self.chosen or self.meter.steps < ENOUGH / 2 or not may_change_within(loader):
            return False
        seen = self.meter.fetched
        return bool(seen[COUNT] >= MANY or (seen[COUNT] >= ENOUGH and seen[WALL] >= ENOUGH_SECONDS))

    def choose(self, loader: Any) -> None:
        """Choose by what is measured."""
        seen = self.meter.measured()
        if seen is not None:
            self._take(choose(seen, self._limits(loader), loader.prefetch_factor, self.periods), loader)

    def _correct(self, loader: Any) -> None:
        """Choose anew by what the last epoch has shown, unless its loop has hardly waited."""
        seen = self.meter.measured() if self.now else None
        if seen is None:
            return
        self.periods[self.now] = seen.period
        if self.chosen and seen.waits < KEEPS_UP * seen.period:
            return
        choice = choose(seen, self._limits(loader), loader.prefetch_factor, self.periods)
        best = min(self.periods, key=lambda workers: self.periods[workers])
        if choice.workers in self.periods and choice.workers != best:
            choice = Choice(
                best, f"of those that were tried, it is the fastest: {1 / self.periods[best]:.3g} batches/s"
            )
        self._take(choice, loader)

    def _limits(self, loader: Any) -> Limits:
        left = [memory_left(), shared_memory_left() if loader.transport == "upstream" else None]
        share = min((one for one in left if one is not None), default=math.inf) * SHARE / ranks_here(os.environ)
        most = min(self.started, max(self.now, _startable()))  # as many as were there can be there again
        return Limits(cpu_share(), budget() or share, self.worker_bytes, may_be_alone(loader), most)

    def _take(self, choice: Choice, loader: Any) -> None:
        """Let the loader have the number that is chosen. Its first choice is said, by one rank."""
        words = counted(choice.workers, "worker") if choice.workers else "no workers"
        first = not self.chosen
        if first or choice.workers != self.now:
            self.news = Chosen(choice.workers, self.now, choice.reason)
        self.set(choice.workers, loader)
        self.chosen, self.why = True, choice.reason  # at last: a choice that a signal's handler ends is made again
        if first and launched(os.environ).rank <= 0:
            say_once(f'num_workers="auto" (made at {os.path.basename(loader._made_at)}): {words}: {choice.reason}')

    def tell(self, ports: Ports) -> None:
        """Note the last choice, once."""
        if self.news is not None:
            ports.note(self.news)
            self.news = None


def may_change_within(loader: Any) -> bool:
    """Whether another number of workers may go on with an epoch of the loader."""
    return loader._dataset_kind == _DatasetKind.Map and not has_state(loader.dataset)


def may_be_alone(loader: Any) -> bool:
    """Whether the loader may have no workers, given its other options."""
    return not (loader.persistent_workers or loader.timeout or loader.worker_init_fn)


def _startable() -> float:
    """The workers that the limits of processes and threads allow each rank."""
    left = tasks_left()
    return math.inf if left is None else left // (TASKS * ranks_here(os.environ))


def budget() -> float | None:
    """The bytes that batches and workers may take by MINIDL_AUTO_BYTES; None = it does not say."""
    text = os.environ.get(BUDGET_VARIABLE, "")
    size = size_of(text)
    if text and size is None:
        raise ValueError(f"{BUDGET_VARIABLE}={text!r}: give the bytes that batches and workers may take, as 8G or 500M")
    return size
