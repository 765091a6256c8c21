"""Slabs: shared memory that is used again, so that a batch costs no new segment, mapping or descriptor.

Upstream makes a segment for each tensor of each batch: create, size, fault in page by page, hand the descriptor over,
map, unmap. Here a worker writes all tensors of a batch into one *slab*, a memory file that both processes have mapped
since its first use. `Arena` is the worker's side, `Mappings` the loader's.

Why no slab is written while somebody can see a batch in it
-----------------------------------------------------------
A slab is in use for two processes, and each tells only about itself.

1. In each process, all storages of one batch are views of one buffer object, the batch's *root*. Tensors, slices,
   views, NumPy arrays made of them and graphs of autograd keep their storage, and a storage keeps the root. So the root
   is gone only when nothing in this process refers to the batch. A weak reference with a callback tells when.
2. The worker has set the slab's byte to TAKEN before it writes, and the loader's callback sets it to FREE. The worker
   takes a slab only if the byte is FREE and its own root of the slab is gone: a collate function may keep a batch too.
3. A message that nobody has read keeps the byte at TAKEN. The loader makes the root before it rebuilds the message, so
   a message that is dropped, or that can't be rebuilt, sets the byte when its root goes.
4. A forked child sees the same memory, and no callback of this process tells when the child has dropped it. So a fork
   sets the bytes of the slabs in use to KEPT for ever, and callbacks do nothing in another process than their own.
   The worker never takes a KEPT slab again.
5. Whoever pickles a batch, or puts it into a queue, copies it while holding the storage.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from minidl.transport.tensors import DTYPES, NAMES, Reduced, reduce_storage, reduce_view, storage_of

SLABS = 40
"""Slabs of a worker that are used again; a batch for which none of them is free gets one for itself."""

ALONE = 0xFFFF
"""The number of a slab that is used once: the loader has all others."""

INLINE = 8192
"""Bytes up to which a storage travels in the message."""

SMALL = 1 << 15
"""Bytes of such storages in one message; what is beyond goes into a slab."""

_ALIGNED = 64
_ROUNDED = 1 << 16

FREE, TAKEN, KEPT = range(3)
"""What a slab's byte says: the worker may take it; the loader has its batch, or will; a forked child may see it."""


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@functools.cache
def _bytes_of(size: int) -> Any:
    return ctypes.c_ubyte * size


def _root(memory: mmap.mmap, size: int) -> Any:
    """A new buffer object over a slab, for the storages of one batch."""
    return _bytes_of(size).from_buffer(memory)


def _storage(root: Any, offset: int, size: int) -> torch.UntypedStorage:
    """A storage of `size` bytes in a slab; it keeps the root alive."""
    return torch.frombuffer(root, dtype=torch.uint8, count=size, offset=offset).untyped_storage()


# --- The worker's side ------------------------------------------------------------------------------------------------
class Slab:
    """A memory file of the worker. announced: whether the loader has its descriptor; root: of the batch in it."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create("minidl-slab", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.announced = False
        self.root: weakref.ref[Any] | None = None

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            os.close(self.fd)

    @property
    def visible(self) -> bool:
        """Whether this process still has something of the last batch in it."""
        return self.root is not None and self.root() is not None


@dataclass
class _Filling:
    """A slab that the present batch is written into."""

    slab: Slab
    root: Any
    address: int = field(init=False)
    used: int = 0

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.root)

    def room(self, size: int) -> int:
        """Where `size` bytes may begin, -1 if there is no room."""
        begin = _round_up(self.used, _ALIGNED)
        if begin + size > self.slab.size:
            return -1
        self.used = begin + size
        return begin


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the elements are not those of the storage, but their conjugates or negatives."""
    return tensor.is_conj() or tensor.is_neg()


class Arena:
    """A worker's slabs. `allocate` and `reduce` fill slabs for the present batch; `seal` returns these.

    states: the bytes of this worker's slabs, shared with the loader.
    """

    def __init__(self, states: memoryview) -> None:
        self._states = states
        self._slabs: dict[int, Slab] = {}
        self._open: list[_Filling] = []
        self._small = bytearray()  # storages that travel in the message
        self._leaves: dict[int, torch.Tensor | None] = {}  # address -> the tensor that its storage was sent with
        self._expected = 0  # bytes of the largest batch so far
        self.copied_bytes = 0  # by the present batch, of storages that were not made in a slab
        self.fallbacks = 0  # storages that went by descriptor, because no slab could be made

    def allocate(self, size: int) -> torch.UntypedStorage:
        """A storage of `size` bytes, not initialised; in a slab if it is large. For collate."""
        if size <= INLINE:
            return torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        number, begin = self._room(size)
        return _storage(self._open[number].root, begin, size)

    def reduce_tensor(self, tensor: torch.Tensor) -> Reduced | None:
        """A tensor that fills its storage, in one step; None if the storage is to be reduced by itself."""
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        first = self._leaves.setdefault(address, tensor)
        if first is not tensor:
            return None if first is None or _is_lazy(tensor) else reduce_view(tensor, first)
        whole = tensor.nbytes == size > 0 and tensor.is_contiguous() and not storage.is_shared()
        if whole and not _is_lazy(tensor) and (place := self._placed(address, size)) is not None:
            return slab_tensor, (*place, NAMES[tensor.dtype], tensor.numel(), tuple(tensor.shape))
        self._leaves[address] = None
        return None

    def reduce(self, storage: torch.UntypedStorage) -> Reduced:
        """Put a storage into the message, or into a slab if it is not there."""
        size, address = storage.nbytes(), storage.data_ptr()
        if size == 0:
            return torch.UntypedStorage, ()
        first = self._leaves.setdefault(address, None)
        if first is not None:
            return storage_of, (first,)
        place = self._placed(address, size)
        if place is None:
            self.fallbacks += 1
            return reduce_storage(storage)
        return slab_storage, (*place, size)

    def _placed(self, address: int, size: int) -> tuple[int, int] | None:
        """Where bytes are, which are copied if they are not in a slab; None if no slab can be made.

        In a slab of the message, or (-1) among its small storages; and the offset there.
        """
        for number, opened in enumerate(self._open):
            if opened.address <= address < opened.address + opened.slab.size:
                return number, address - opened.address
        begin = _round_up(len(self._small), _ALIGNED)
        if size <= INLINE and begin + size <= SMALL:
            self._small += bytes(begin - len(self._small))
            self._small += ctypes.string_at(address, size)
            return -1, begin
        try:
            number, begin = self._room(size)
        except OSError:  # no descriptor or memory for a slab: as without slabs
            return None
        ctypes.memmove(self._open[number].address + begin, address, size)
        self.copied_bytes += size
        return number, begin

    def place(self, data: bytes) -> tuple[int, int]:
        """Copy bytes into a slab: the slab's place in the message, and the offset."""
        number, begin = self._room(len(data))
        memoryview(self._open[number].root).cast("B")[begin : begin + len(data)] = data
        return number, begin

    def seal(self) -> tuple[list[Slab], bytes | bytearray]:
        """The slabs of the present batch, and its small storages. The batch ends.

        The slabs are not written again before they are free.
        """
        small, self._small, self._leaves, self.copied_bytes = self._small, bytearray(), {}, 0
        if not self._open:
            return [], small
        opened, self._open = self._open, []
        self._expected = max(self._expected, sum(_round_up(one.used, _ALIGNED) for one in opened))
        return [one.slab for one in opened], small

    def _room(self, size: int) -> tuple[int, int]:
        if self._open and (begin := self._open[-1].room(size)) >= 0:
            return len(self._open) - 1, begin
        # A batch that is larger than those before gets slabs that double: few of them, and the next batch gets one.
        slab = self._take(max(size, 2 * self._open[-1].slab.size if self._open else self._expected))
        root = _root(slab.memory, slab.size)
        slab.root = weakref.ref(root)
        self._open.append(_Filling(slab, root))
        return len(self._open) - 1, self._open[-1].room(size)

    def _take(self, size: int) -> Slab:
        """A slab of at least `size` bytes: a free one, a new one, or, if there are too many, one for this batch."""
        for number, slab in tuple(self._slabs.items()):
            state = self._states[number]
            if slab.visible or state == TAKEN:
                continue
            if state == FREE and slab.size >= size:
                self._states[number] = TAKEN
                return slab
            del self._slabs[number]  # too small by now, or a forked child may see it
        number = next((n for n in range(len(self._states)) if n not in self._slabs), ALONE)
        slab = Slab(number, _round_up(size, _ROUNDED))
        if number != ALONE:
            self._slabs[number] = slab
            self._states[number] = TAKEN
        return slab


# --- The loader's side ------------------------------------------------------------------------------------------------
_all_mappings: weakref.WeakSet[Mappings] = weakref.WeakSet()


def _after_fork() -> None:
    for mappings in tuple(_all_mappings):
        mappings.keep()


os.register_at_fork(after_in_parent=_after_fork)


class Mappings:
    """The slabs of one worker, as the loader has mapped them. states: their bytes, shared with the worker."""

    def __init__(self, states: memoryview) -> None:
        self._states = states
        self._memory: dict[int, mmap.mmap] = {}
        self._roots: dict[int, weakref.ref[Any]] = {}  # of batches that this process can see
        self._pid = os.getpid()
        _all_mappings.add(self)

    def map(self, number: int, size: int, fd: int) -> None:
        """Map a slab that the worker has made. In place of an older one with this number, if there was one."""
        self._memory[number] = mmap.mmap(fd, size)

    def root(self, number: int) -> Any:
        """A new root for the batch in this slab; when it goes, the slab is free."""
        memory = self._memory.pop(number) if number == ALONE else self._memory[number]
        root = _root(memory, len(memory))
        if number != ALONE:
            self._roots[number] = weakref.ref(root, functools.partial(self._gone, number))
        return root

    def lost(self, number: int) -> None:
        """A slab could not be mapped; the worker makes another one."""
        if number != ALONE:
            self._states[number] = KEPT

    def _gone(self, number: int, root: Any) -> None:
        if self._roots.get(number) is root and os.getpid() == self._pid:
            del self._roots[number]
            self._states[number] = FREE

    def keep(self) -> None:
        """A child was forked, and may see the batches that this process sees."""
        for number in tuple(self._roots):
            del self._roots[number]
            self._states[number] = KEPT

    @property
    def visible(self) -> int:
        """Slabs with batches that this process can see."""
        return len(self._roots)


_reading = threading.local()


@contextlib.contextmanager
def reading(roots: list[Any]) -> Iterator[None]:
    """In this thread and block, the functions below find these slabs, and the small storages at the end."""
    _reading.roots = roots
    try:
        yield
    finally:
        _reading.roots = None


def _root_of(number: int) -> Any:
    root = _reading.roots[number]
    if root is None:
        raise OSError(errno.EMFILE, "the descriptor of the batch's memory did not arrive: too many open files")
    return root


def slab_storage(number: int, offset: int, size: int) -> torch.UntypedStorage:
    """Called by the loader's unpickler: a storage in one of the message's slabs; no bytes are copied."""
    return _storage(_root_of(number), offset, size)


def slab_tensor(number: int, offset: int, dtype: str, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Called by the loader's unpickler: a tensor of `count` elements and its storage."""
    tensor = torch.frombuffer(_root_of(number), dtype=DTYPES[dtype], count=count, offset=offset)
    return tensor if len(shape) == 1 else tensor.resize_(shape)  # not view(): nobody else has its elements
