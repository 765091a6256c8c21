"""Slabs, traced: the worker's and the reader's side of the transport "arena", which emit what becomes of each slab.

A message's task is known only while it is rebuilt, and its slabs are mapped before that. So `TracedMappings` notes what
it maps, and `emit_mapped` emits it once the task is known.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from minidl.arena.arena import ALONE, BUDGET, Arena, Mappings, PageLocks, Slab, state_of_gone
from minidl.arena.pickling import is_filling
from minidl.record.shared import Shared
from minidl.tracefile import events as ev

_RECYCLED, _NEW, _ALONE = ev.SlabSource
_LOST = ev.SlabEnd.LOST


class TracedArena(Arena):
    """A worker's slabs."""

    def __init__(
        self, shared: Shared, worker_id: int, states: memoryview, budget: int = BUDGET, locked: bool = False
    ) -> None:
        super().__init__(states, budget, locked)
        self._shared = shared
        self._worker_id = worker_id
        self._leaves: dict[int, int] = {}  # of the present batch, that go in no slab: address -> bytes
        for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
            setattr(torch.UntypedStorage, name, self._counted(getattr(torch.UntypedStorage, name)))

    def _emit(self, code: int, *values: int) -> None:
        fetching = self._shared.fetching
        self._shared.emit(code, -1 if fetching is None else fetching.task, self._worker_id, *values)

    def _take(self, size: int) -> Slab:
        slab = super()._take(size)
        source = _ALONE if slab.number in ALONE else _NEW if slab.root is None else _RECYCLED
        self._emit(ev.SLAB_TAKE, slab.number, slab.size, source)
        return slab

    def seal(self) -> tuple[list[Slab], bytearray]:
        for one in self._open:
            self._emit(ev.SLAB_SEND, one.slab.number, one.filled, one.copied)
        if self._leaves:
            self._emit(ev.SLAB_FALLBACK, len(self._leaves), sum(self._leaves.values()))
            self._leaves = {}
        return super().seal()

    def _counted(self, share: Callable[..., Any]) -> Callable[..., Any]:
        """`share` of torch's storages, counted if a batch is pickled: this part of it goes in no slab."""

        @functools.wraps(share)
        def counting(storage: Any, *args: Any, **kwargs: Any) -> Any:
            shared = share(storage, *args, **kwargs)
            if is_filling():
                self._leaves[storage.data_ptr()] = storage.nbytes()  # a storage may be moved first, and then sent
            return shared

        return counting


class TracedMappings(Mappings):
    """The reader's side of one worker's slabs."""

    def __init__(self, shared: Shared, states: memoryview, worker_id: int, locks: PageLocks | None = None) -> None:
        super().__init__(states, worker_id, locks)
        self._shared = shared
        self._new: set[int] = set()
        self._batches: dict[int, tuple[int, int]] = {}  # slab -> task and bytes; task -1: not known yet

    def map(self, number: int, size: int, fd: int) -> None:
        super().map(number, size, fd)
        self._new.add(number)

    def _lock(self, locks: PageLocks, memory: Any) -> bool:
        began = time.monotonic_ns()
        locked = super()._lock(locks, memory)
        took, size = time.monotonic_ns() - began, len(memory) if locked else 0
        self._shared.emit(ev.SLAB_LOCK, -1, self.worker_id, size, took, int(locks.host.simulated))
        return locked

    def root(self, number: int) -> Any:
        root = super().root(number)
        new = number in self._new
        self._new.discard(number)
        self._batches[number] = -1, len(root)
        _mapped.slabs.append((self, number, new))
        return root

    def _telling(self, key: int, number: int, root: Any) -> Any:
        return weakref.ref(root, functools.partial(self._gone, key, number))  # called before the slab is set free

    def _gone(self, key: int, number: int, root: Any) -> None:
        if key in self._roots:  # else the message was not delivered
            self._emit_release(number, state_of_gone())

    def _set(self, number: int, state: int) -> None:
        self._emit_release(number, state)
        super()._set(number, state)

    def _emit_release(self, number: int, state: int) -> None:
        known = self._batches.pop(number, None)
        task, size = known or (-1, 0)
        self._shared.emit(ev.SLAB_RELEASE, task, self.worker_id, number, size, _LOST if known is None else state)

    def emit_mapped(self, number: int, task: int, new: bool) -> None:
        """Emit that the slab's memory is there for this task; unless another thread has forked meanwhile."""
        known = self._batches.get(number)
        if known is None:
            return
        size = known[1]
        self._batches[number] = task, size
        self._shared.emit(ev.SLAB_MAP, task, self.worker_id, number, size, int(new))


class _Mapped(threading.local):
    """What this thread has mapped for the message that it reads."""

    def __init__(self) -> None:
        self.slabs: list[tuple[TracedMappings, int, bool]] = []


_mapped = _Mapped()


def emit_mapped(task: int) -> None:
    """Emit what the message's slabs have been mapped, now that its task is known."""
    slabs = _mapped.slabs
    if slabs:
        _mapped.slabs = []
        for mappings, number, new in slabs:
            mappings.emit_mapped(number, task, new)


def forget_mapped() -> None:
    """A message is read next: the one before it may have had no task."""
    if _mapped.slabs:
        _mapped.slabs = []
