"""Slabs: shared memory that is used again, so that a batch costs no new segment, mapping or descriptor.

Upstream makes a segment for each tensor of each batch: create, size, fault in page by page, hand the descriptor over,
map, unmap. Here a worker writes all tensors of a batch into one *slab*, a memory file that both processes have mapped
since its first use. `Arena` is the worker's side, `Mappings` the loader's.

Why no slab is written while somebody can see a batch in it
-----------------------------------------------------------
A slab is in use for two processes, and each tells only about itself.

1. In each process, all storages and arrays of one batch are views of one buffer object, the batch's *root*. Tensors,
   slices, views, NumPy arrays made of them and graphs of autograd keep their storage, and a storage keeps the root,
   also once it has moved to other memory. So the root is gone only when nothing in this process refers to the batch. A
   weak reference with a callback tells when.
   In the loader's process, a signal's handler may raise at any moment, so the callback is written in C (`farewell`).
2. The worker sets the slab's byte to TAKEN before it writes, and the loader's callback sets it to FREE. The worker
   takes a slab only if the byte is FREE and its own root of the slab is gone: a collate function may keep a batch too.
   Only the worker's own thread fills slabs. A number is given to a new slab only once the old one's byte is not TAKEN.
3. A message that nobody has read keeps the byte at TAKEN, and so does one whose rebuilding an exception has ended: the
   callback begins to count in the step that ends the packet (`Mappings.deliver`). A message that is dropped later, or
   that is an error since it can't be rebuilt, sets the byte when its root goes. The descriptors of new slabs come with
   the packet that names them, or are opened for it (`Arena.lend`), and belong to it, so one that is lost can't let the
   loader map another slab.
4. A forked child sees the same memory, and no callback of this process tells when the child has dropped it. So a fork
   of the loader's process sets the bytes of the slabs in use to KEPT for ever. Another thread may drop a batch, or get
   one, while a fork begins or ends; what goes meanwhile is KEPT, too. Callbacks do nothing in another process than
   their own. A worker that forks marks the slabs that it sees itself, and each that it fills while another thread of it
   forks. It never takes a KEPT or marked slab again, and never gives the memory of one back.
5. `pickle` copies a batch while it holds the storage. A queue or pipe gets a copy in a segment of its own, on both
   sides: one of the program, and that of the tasks, whose indices may be a part of a batch. torch would move the
   storage to shared memory, perhaps in a queue's feeder thread, away from arrays and running computations.
   `share_memory_()` does move it. What used the storage before goes on with the slab, which the storage keeps. No other
   call of torch moves such a storage or changes its size. The slab is sealed: no process can truncate it, which would
   be a bus error in another one.
6. A copy to a device from memory that is not page-locked has read it when it returns, also with `non_blocking=True`.
   From a page-locked slab the device reads later, so slabs are locked only for a `DeviceLoader`, which makes the copy
   and keeps the batch until the event behind it is reached. Any other loop with `pin_memory=True` gets copies by the
   pin thread. The device reads the pages that were locked: memory of a locked slab is never given back to the system,
   since the worker would write into new pages. The mapping that was locked lives as long as its last root.
7. A slab's byte is all by which the loader tells the worker that it may write. aarch64 may let others see a write
   before earlier reads are done, so the loader has a fence between its last read and the byte (`farewell.FENCE`). The
   worker needs none: whether it writes depends on the byte, and no CPU makes a write visible before it knows that it is
   to be done. Threads of one process are ordered by the GIL, without which no root goes. In the other direction the
   packet orders: the socket's queue has a lock in the kernel, so what the worker wrote before it sent is there for who
   has received. KEPT needs no order: a worker that reads TAKEN instead does the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import mmap
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import reduction
from typing import Any, Protocol

import numpy as np
import torch

from minidl.arena.farewell import FENCE, Farewell
from minidl.arena.pickling import mark_in_slab, out_of_slab, reduce_view, storage_of
from minidl.usable import size_of
from minidl.wire import tensors
from minidl.wire.atomic import Step, at_once, each_once
from minidl.wire.tensors import DTYPES, NAMES, Reduced, reduce_storage

BUDGET = 2 << 30
"""Bytes of slabs that a worker keeps for use again, unless MINIDL_ARENA_BYTES says otherwise.

By default, two batches of a worker are ready, one is in work, and one or two are in the loop: there is room for batches
of 400 MiB. A batch that does not fit gets a slab for itself, which is used once. So the budget bounds no batch. It
bounds what a worker keeps after the program has dropped many batches: slabs that stay free give their memory back
(`SPARE`), but only while batches are made. Slabs that are locked, or whose lock has failed, give nothing back: each
keeps its whole size, in memory that is not swapped if it is locked, until the worker drops it or the queue closes. So
each worker may hold its budget.
"""

BUDGET_VARIABLE = "MINIDL_ARENA_BYTES"

SLABS = 256
"""Slabs that a worker keeps at most, however small: each costs it a descriptor, and many programs may have 1024."""

ALONE = range(SLABS, 1 << 16)
"""Numbers of slabs that are used once. Smaller numbers are those of slabs that are kept for use again."""

INLINE = 8192
"""Bytes up to which a storage travels in the message."""

SMALL = 1 << 15
"""Bytes of such storages in one message; what is beyond goes into a slab."""

SPARE = 2
"""Free slabs of a worker that keep their memory. Others give it back: the loader holds fewer batches than before.

Slabs that the loader page-locks, or tries to, all keep theirs (`may_give_back`).
"""

_LEFT_OVER = 1 << 20
"""Bytes that a slab may keep beyond twice what batches need now."""

_ALIGNED = 64
_ROUNDED = 1 << 16
_MOST = 1 << 50
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

FETCHED = fcntl.F_SEAL_SEAL
"""The loader seals a slab that was lent to it: it has a descriptor of its own."""

FREE, TAKEN, KEPT = range(3)
"""What a slab's byte says: the worker may take it; the loader has its batch, or will; a forked child may see it."""

_parties: weakref.WeakValueDictionary[int, Arena | Mappings] = weakref.WeakValueDictionary()
"""Of this process, and of those that it was forked from."""

_forks_begun = 0

_state_of_gone = [FREE]  # its only item: what a slab's byte is set to when its root goes


def _before_fork() -> None:
    global _forks_begun
    _forks_begun += 1
    _state_of_gone[0] = KEPT
    for party in _all_parties():
        if isinstance(party, Arena):
            party.forks()


def _after_fork_in_parent() -> None:
    global _forks_begun
    for party in _all_parties():
        if isinstance(party, Mappings):
            party.forked()
    _forks_begun -= 1
    if not _forks_begun:
        _state_of_gone[0] = FREE


def _after_fork_in_child() -> None:
    global _forks_begun
    for party in _all_parties():
        if isinstance(party, Mappings):
            party.leave()  # before a slab could be set to FREE here
    _forks_begun = 0
    _state_of_gone[0] = FREE


def _all_parties() -> list[Arena | Mappings]:
    """Also while another thread makes one."""
    return [party for reference in _parties.valuerefs() if (party := reference()) is not None]


def state_of_gone() -> int:
    """What a slab's byte is set to when its root goes now."""
    return _state_of_gone[0]


def budget() -> int:
    """Bytes of slabs that a worker may keep; raises ValueError if MINIDL_ARENA_BYTES says something else."""
    text = os.environ.get(BUDGET_VARIABLE, "")
    if not text:
        return BUDGET
    number = size_of(text) or 0
    if not _ROUNDED <= number <= _MOST:
        raise ValueError(
            f"{BUDGET_VARIABLE}={text!r}: give the bytes of slabs that each worker keeps for use again, from 64K to "
            "1024T, as a number with K, M, G or T for KiB, MiB, GiB or TiB: 2G"
        )
    return number


_states_of_gone = map(operator.itemgetter(0), itertools.repeat(_state_of_gone))  # asked anew for each slab

os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@functools.cache
def _bytes_of(size: int) -> Any:
    return ctypes.c_ubyte * size


def _root(memory: mmap.mmap, size: int) -> Any:
    """A new buffer object over a slab, for the storages of one batch."""
    return _bytes_of(size).from_buffer(memory)


def _storage(root: Any, offset: int, size: int) -> torch.UntypedStorage:
    """A storage of `size` bytes in a slab; it keeps the root alive, wherever `share_memory_()` moves its bytes."""
    return mark_in_slab(torch.frombuffer(root, dtype=torch.uint8, count=size, offset=offset).untyped_storage(), root)


def _array(root: Any, offset: int, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    """An array in a slab; it keeps the root alive."""
    return np.ndarray(shape, dtype, root, offset, order=order)


def may_write(state: int, visible: bool, inherited: bool) -> bool:
    """Whether a worker may write into a slab with this byte: no process can see what is in it.

    visible: the worker still has the batch; inherited: a process that it has forked may have it. Also used by
    `explore.slab_life`.
    """
    return state == FREE and not visible and not inherited


def may_free(state: int, forked: bool) -> bool:
    """Whether the slab of a message that is delivered, with this byte, is free once its batch goes.

    forked: a process was forked while the message was rebuilt, and may see it. Also used by `explore.slab_life`.
    """
    return state == TAKEN and not forked


def may_give_back(locked: bool) -> bool:
    """Whether a worker may give memory of a slab in which no process sees a batch back to the system.

    A device goes on reading the pages that were locked, and the worker would write into others. Also used by
    `explore.slab_life`.
    """
    return not locked


# --- The worker's side ------------------------------------------------------------------------------------------------
class Slab:
    """A memory file of the worker. announced: whether the loader has its descriptor; root: of the batch in it.

    locked: the loader page-locks it, or tries to. The worker is not told of a lock that fails: also then it gives none
    of the slab's memory back.
    """

    def __init__(self, number: int, size: int, locked: bool = False) -> None:
        self.number = number
        self.size = size
        self.locked = locked
        self.fd = os.memfd_create("minidl-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.announced = False  # to the loader, which has the descriptor then
        self.touched = 0  # bytes from the beginning on that have memory
        self.inherited = False  # by a process that the worker has forked, which may see what is in it
        self.root: weakref.ref[Any] | None = None

    def close(self) -> None:
        """Close the descriptor; the memory stays, by a descriptor of its own."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            self.close()

    def give_back(self, size: int) -> None:
        """Give the memory beyond `size` bytes back to the system; no process sees a batch there."""
        begin = _round_up(size, mmap.PAGESIZE)
        if begin < self.touched and may_give_back(self.locked):
            self.memory.madvise(mmap.MADV_REMOVE, begin, _round_up(self.touched, mmap.PAGESIZE) - begin)
            self.touched = begin

    @property
    def fetched(self) -> bool:
        """Whether the loader has opened the worker's descriptor."""
        return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & FETCHED)

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
    used: int = 0  # up to here
    filled: int = 0  # bytes of storages and messages in it
    copied: int = 0  # of these, what was not made in it

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.root)

    def room(self, size: int) -> int:
        """Where `size` bytes may begin, -1 if there is no room."""
        begin = _round_up(self.used, _ALIGNED)
        if begin + size > self.slab.size:
            return -1
        self.used = begin + size
        self.filled += size
        return begin


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the elements are not those of the storage, but their conjugates or negatives."""
    return tensor.is_conj() or tensor.is_neg()


class Arena:
    """A worker's slabs. `allocate` and `reduce` fill slabs for the present batch; `seal` returns these.

    states: the bytes of this worker's slabs, shared with the loader. budget: bytes of slabs to keep for use again.
    locked: whether the loader page-locks these.
    """

    def __init__(self, states: memoryview, budget: int, locked: bool) -> None:
        _parties[id(self)] = self
        _let_queues_copy()
        self._states = states
        self._budget = budget
        self._locked = locked
        self._slabs: dict[int, Slab] = {}  # in the order in which they were taken last
        self.dropped: set[int] = set()  # numbers of slabs that this side has let go of, and the loader not yet
        self._lent: list[Slab] = []  # for one batch each, and the loader has not opened them yet
        self._open: list[_Filling] = []
        self._small = bytearray()  # storages that travel in the message
        self._sent: dict[int, torch.Tensor | None] = {}  # a storage's _cdata -> the tensor that it was sent with
        self.inline = 0 if locked else INLINE  # a small storage in the message would be copied from pageable memory
        self._expected = 0  # bytes of the largest batches
        self._recent = 0  # of recent ones
        self._alone = itertools.cycle(ALONE)
        self._thread = threading.get_ident()

    def allocate(self, size: int) -> torch.UntypedStorage | None:
        """A storage of `size` bytes, not initialised; in a slab if it is large. For collate.

        None if no slab can be made, and in another thread than the worker's own, whose batches are not the present one.
        """
        if threading.get_ident() != self._thread:
            return None
        if size <= self.inline:
            return torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        try:
            number, begin = self._room(size)
        except OSError:
            return None
        return _storage(self._open[number].root, begin, size)

    def reduce_tensor(self, tensor: torch.Tensor) -> Reduced | None:
        """A tensor that fills its storage, in one step; None if the storage is to be reduced by itself."""
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        first = self._sent.setdefault(storage._cdata, tensor)  # storages of arrays may begin at one address
        if first is not tensor:
            return None if first is None or _is_lazy(tensor) else reduce_view(tensor, first)
        whole = tensor.nbytes == size > 0 and tensor.is_contiguous() and not storage.is_shared()
        if whole and not _is_lazy(tensor) and (place := self._placed(address, size)) is not None:
            return slab_tensor, (*place, NAMES[tensor.dtype], tensor.numel(), tuple(tensor.shape))
        self._sent[storage._cdata] = None
        return None

    def reduce(self, storage: torch.UntypedStorage) -> Reduced:
        """Put a storage into the message, or into a slab if it is not there."""
        size, address = storage.nbytes(), storage.data_ptr()
        if size == 0:
            return torch.UntypedStorage, ()
        first = self._sent.setdefault(storage._cdata, None)
        if first is not None:
            return storage_of, (first,)
        place = self._placed(address, size)
        if place is None:
            return reduce_storage(out_of_slab(storage))  # the worker may have kept it from an earlier batch
        return slab_storage, (*place, size)

    def _placed(self, address: int, size: int) -> tuple[int, int] | None:
        """Where bytes are, which are copied if they are not in a slab; None if no slab can be made.

        In a slab of the message, or (-1) among its small storages; and the offset there.
        """
        number = self._home(address)
        if number >= 0:
            return number, address - self._open[number].address
        begin = _round_up(len(self._small), _ALIGNED)
        if size <= self.inline and begin + size <= SMALL:
            self._small += bytes(begin - len(self._small))
            self._small += ctypes.string_at(address, size)
            return -1, begin
        try:
            number, begin = self._room(size)
        except OSError:  # no descriptor or memory for a slab: as without slabs
            return None
        ctypes.memmove(self._open[number].address + begin, address, size)
        self._open[number].copied += size
        return number, begin

    def reduce_array(self, array: np.ndarray[Any, Any]) -> Reduced | None:
        """Put an array of plain data into a slab; None if it is small, or no slab can be made.

        None also for another byte order, which pickle turns into this machine's.
        """
        if array.nbytes <= self.inline or array.dtype.hasobject or not array.dtype.isnative:
            return None
        try:
            number, begin = self._room(array.nbytes)
        except OSError:
            return None
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        dtype = array.dtype.str if array.dtype.isbuiltin == 1 else array.dtype  # 2: a type of another package
        about = (begin, dtype, array.shape, "F" if fortran else "C")
        _array(self._open[number].root, *about)[...] = array
        self._open[number].copied += array.nbytes
        return slab_array, (number, *about)

    def place(self, data: bytes) -> tuple[int, int]:
        """Copy bytes into a slab: the slab's place in the message, and the offset."""
        number, begin = self._room(len(data))
        memoryview(self._open[number].root).cast("B")[begin : begin + len(data)] = data
        self._open[number].copied += len(data)
        return number, begin

    def _home(self, address: int) -> int:
        """Which of the present batch's slabs has this address, -1 for none."""
        for number, opened in enumerate(self._open):
            if opened.address <= address < opened.address + opened.slab.size:
                return number
        return -1

    def seal(self) -> tuple[list[Slab], bytearray]:
        """The slabs of the present batch, and its small storages. The batch ends.

        The slabs are not written again before they are free.
        """
        small, self._small, self._sent = self._small, bytearray(), {}
        if self._lent:
            self._lent = [slab for slab in self._lent if not slab.fetched]
        if not self._open:
            return [], small
        opened, self._open = self._open, []
        self._give_back(opened)
        return [one.slab for one in opened], small

    def lend(self, slabs: list[Slab]) -> None:
        """Keep the descriptors of slabs, which the loader will open by their numbers in this process.

        It has done so once the slab's byte is not TAKEN, and before that a slab is not let go of. A slab for one batch
        has no byte.
        """
        for slab in slabs:
            slab.announced = True
        self._lent += [slab for slab in slabs if slab.number in ALONE]

    def _give_back(self, opened: list[_Filling]) -> None:
        """Give memory back that batches need no more: of an unusually large one, and of slabs that stay free."""
        used = sum(_round_up(one.used, _ALIGNED) for one in opened)
        self._expected = max(self._expected - self._expected // 16, used)
        self._recent = max(self._recent // 2, used)
        for one in opened:
            one.slab.touched = max(one.slab.touched, one.used)
            if one.slab.touched > 2 * self._recent + _LEFT_OVER:
                one.slab.give_back(self._recent)
        if len(self._slabs) > SPARE:
            free = [slab for n, slab in self._slabs.items() if slab.touched and self._states[n] == FREE]
            spare = [slab for slab in free if not slab.inherited]
            if len(spare) > SPARE and not spare[0].visible:
                spare[0].give_back(0)

    def _room(self, size: int) -> tuple[int, int]:
        if self._open and (begin := self._open[-1].room(size)) >= 0:
            return len(self._open) - 1, begin
        slab = self._take(size)
        root = _root(slab.memory, slab.size)
        slab.root = weakref.ref(root)
        slab.inherited |= _forks_begun > 0  # by another thread, which has marked the slabs already
        self._open.append(_Filling(slab, root))
        return len(self._open) - 1, self._open[-1].room(size)

    def _take(self, size: int) -> Slab:
        """A slab of at least `size` bytes: a free one, a new one, or, beyond the budget, one for this batch.

        It has room for all of an expected batch, unless the budget has not; nor is it so large that it was made for an
        unusual batch, and would leave no room for others.
        """
        # A batch that is larger than those before gets slabs that double: few of them, and the next batch gets one.
        wished = max(size, 2 * self._open[-1].slab.size if self._open else self._expected)
        most = 2 * max(wished, self._expected) + _LEFT_OVER
        for number, slab in reversed(tuple(self._slabs.items())):  # what was sent last is still in the CPU's caches
            state = self._states[number]
            if state == TAKEN or (visible := slab.visible):
                continue
            mine = may_write(state, visible, slab.inherited)
            if mine and size <= slab.size <= most and (slab.size >= wished or self._number(wished) < 0):
                self._slabs[number] = self._slabs.pop(number)
                self._states[number] = TAKEN
                return slab
            del self._slabs[number]
            self.dropped.add(number)
            if mine:
                slab.give_back(0)  # the loader has it mapped until it gets the next message
        for new in (wished, size):
            number = self._number(new)
            if number >= 0:
                slab = self._slabs[number] = Slab(number, _round_up(new, _ROUNDED), self._locked)
                self.dropped.discard(number)  # the loader maps the new one in its place
                self._states[number] = TAKEN
                return slab
        return Slab(next(self._alone), _round_up(wished, _ROUNDED))

    def _number(self, size: int) -> int:
        """The number of a new slab that is kept for use again; -1 if there is no room for it."""
        if sum(slab.size for slab in self._slabs.values()) + _round_up(size, _ROUNDED) > self._budget:
            return -1
        return next((n for n in range(len(self._states)) if n not in self._slabs), -1)

    def forks(self) -> None:
        """A process is about to be forked, and may see the batches that this process sees."""
        for slab in tuple(self._slabs.values()):  # another thread may fill slabs
            slab.inherited |= slab.visible


# --- The loader's side ------------------------------------------------------------------------------------------------
class Host(Protocol):
    """What page-locks host memory for a device's copies, such as `device.streams.AcceleratorDevice`."""

    name: str
    simulated: bool

    def lock(self, address: int, size: int) -> None:
        """Page-lock memory. OSError says why that can't be done."""

    def unlock(self, address: int) -> None:
        """Undo it, before the memory is unmapped; do nothing to memory that is not locked."""


class PageLocks:
    """Page-locks the slabs of a loader for a device. Once that has failed, later slabs are not locked.

    tell: gets the text of a warning, which it must not raise: a message is being read.
    """

    def __init__(self, host: Host, tell: Callable[[str], None]) -> None:
        self.host = host
        self.failed = False
        self._tell = tell

    def lock(self, memory: Any) -> bool:
        """Lock a mapping until it goes; return whether it is locked. The first failure is told."""
        if self.failed:
            return False
        address = memory.ctypes.data
        farewell = weakref.finalize(memory, _unlock, self.host, address, os.getpid())
        farewell.atexit = False
        try:
            self.host.lock(address, len(memory))  # if a signal's handler raises here, it may be locked
        except OSError as error:
            farewell.detach()
            self.failed = True
            self._tell(
                f"{self.host.name} cannot page-lock the memory of batches: {error}. From here on their copies block "
                "the loop; `ulimit -l unlimited`, or transport='upstream', may help."
            )
            return False
        return True


def _unlock(host: Host, address: int, pid: int) -> None:
    if os.getpid() == pid and not sys.is_finalizing():  # a forked child has not locked it; at the end, the system does
        try:
            host.unlock(address)
        except BaseException:  # of a signal's handler
            host.unlock(address)
            raise


class Mappings:
    """The slabs of one worker, as the loader has mapped them. states: their bytes, shared with the worker.

    locks: what page-locks those that are used again.
    """

    def __init__(self, states: memoryview, worker_id: int, locks: PageLocks | None = None) -> None:
        self._states = states
        self.worker_id = worker_id
        self._locks = locks
        self._memory: dict[int, Any] = {}
        self._roots: dict[int, tuple[int, Farewell, Any]] = {}  # of batches that this process can see
        self._count = itertools.count()
        self.forks = 0  # of this process
        _parties[id(self)] = self
        _let_queues_copy()

    def map(self, number: int, size: int, fd: int) -> None:
        """Map a slab that the worker has made. In place of an older one with this number, if there was one.

        It is page-locked, if it is to be: once, and not for one batch alone, since that takes longer than a copy.

        Raises RuntimeError if it can't be mapped. The mapping needs no descriptor: a program may keep any number of
        batches.
        """
        storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size)
        self._memory[number] = memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        if self._locks is not None and number not in ALONE:
            self._lock(self._locks, memory)

    def _lock(self, locks: PageLocks, memory: Any) -> bool:
        return locks.lock(memory)

    def root(self, number: int) -> Any:
        """A new root for the batch in this slab; once it is delivered, the slab is free when it goes.

        KeyError if the slab is not mapped.
        """
        memory = self._memory.pop(number) if number in ALONE else self._memory[number]
        return _root(memory, len(memory))

    def deliver(self, slabs: Sequence[tuple[int, Any]], forks: int, *steps: Step) -> None:
        """From here the program has a message: its slabs are free when their roots go. All at once, with `steps`.

        slabs: numbers and roots; or an error in place of a root, and the worker makes another slab. forks: what
        `self.forks` was when the first root was made.
        """
        arming: list[Step] = []
        for number, root in slabs:
            inherited = number not in ALONE and not may_free(self._states[number], forks != self.forks)
            if inherited or isinstance(root, OSError):
                self.lost(number)
            else:
                arming += self._arming(number, root)
        at_once(*arming, *steps)

    def _arming(self, number: int, root: Any) -> Iterator[Step]:
        key, farewell = next(self._count), Farewell.of(root)
        release: list[Step] = [partial(self._roots.pop, key, None)]
        if number not in ALONE:
            release += FENCE  # first the last read of the batch, then the byte
            release.append(each_once(map(self._states.__setitem__, (number,), _states_of_gone)))
        yield partial(self._roots.__setitem__, key, (number, farewell, self._telling(key, number, root)))
        yield farewell.arming(release)

    def _telling(self, key: int, number: int, root: Any) -> Any:
        """What a trace adds."""

    def forget(self, number: int) -> None:
        """Let go of a slab that the worker has dropped. If a batch in it is in view, it stays mapped for as long."""
        self._memory.pop(number, None)

    def in_use(self) -> tuple[int, int]:
        """How many slabs the worker can't take now, and their bytes: of batches in use, or on their way."""
        taken = [number for number, memory in tuple(self._memory.items()) if self._states[number] == TAKEN]
        return len(taken), sum(len(self._memory[number]) for number in taken)

    def lost(self, number: int) -> None:
        """A slab could not be mapped; the worker makes another one."""
        self._set(number, KEPT)

    def forked(self) -> None:
        """A process was forked, and may see the batches that this process sees."""
        self.forks += 1
        for key in tuple(self._roots):
            if (visible := self._roots.pop(key, None)) is not None:  # another thread may drop the batch
                self._set(visible[0], KEPT)

    def leave(self) -> None:
        """This process was forked; what it drops frees no slab."""
        self._roots.clear()

    def _set(self, number: int, state: int) -> None:
        if number not in ALONE:
            self._states[number] = state

    def close(self) -> None:
        """Let go of all slabs; those with batches that this process can see stay mapped for as long."""
        self._memory.clear()

    @property
    def visible(self) -> int:
        """Slabs with batches that this process can see."""
        return len(self._roots)


@functools.cache
def _let_queues_copy() -> None:
    """Let queues of the program, and of loaders, send a copy of a storage in a slab (see `out_of_slab`)."""
    tensors.moved = out_of_slab
    before = reduction.ForkingPickler._extra_reducers[torch.UntypedStorage]  # type: ignore[attr-defined]

    def _reduce(storage: torch.UntypedStorage) -> Reduced:
        return before(out_of_slab(storage))  # type: ignore[no-any-return]

    reduction.ForkingPickler.register(torch.UntypedStorage, _reduce)


_reading = threading.local()


class reading:  # noqa: N801  # entered for each batch: contextlib's way costs a µs
    """In this thread and block, the functions below find these slabs, and the small storages at the end."""

    def __init__(self, roots: list[Any]) -> None:
        self._roots = roots

    def __enter__(self) -> None:
        self._before = getattr(_reading, "roots", None)  # an object may read other batches while it is rebuilt
        _reading.roots = self._roots

    def __exit__(self, *error: object) -> None:
        _reading.roots = self._before
        self._roots = []


def _root_of(number: int) -> Any:
    root = _reading.roots[number]
    if isinstance(root, OSError):
        raise root
    return root


def slab_array(number: int, offset: int, dtype: Any, shape: tuple[int, ...], order: str) -> np.ndarray[Any, Any]:
    """Called by the loader's unpickler: an array in one of the message's slabs; no bytes are copied."""
    return _array(_root_of(number), offset, dtype, shape, order)


def slab_storage(number: int, offset: int, size: int) -> torch.UntypedStorage:
    """Called by the loader's unpickler: a storage in one of the message's slabs; no bytes are copied."""
    return _storage(_root_of(number), offset, size)


def slab_tensor(number: int, offset: int, dtype: str, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Called by the loader's unpickler: a tensor of `count` elements and its storage."""
    root = _root_of(number)
    tensor = torch.frombuffer(root, dtype=DTYPES[dtype], count=count, offset=offset)
    mark_in_slab(tensor.untyped_storage(), root)
    return tensor if len(shape) == 1 else tensor.resize_(shape)  # not view(): nobody else has its elements
