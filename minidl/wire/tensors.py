"""What pickling does to a CPU tensor: its bytes stay in shared memory, its descriptor travels.

A tensor pickles as (storage, offset, size, stride); a storage pickles as a handle to shared memory. If its bytes are
not in shared memory yet, the thread that pickles (a queue's feeder thread) copies them there; if collate has put them
there, nothing is copied. There are two sharing strategies. `file_descriptor` sends the segment's descriptor through a
Unix socket (a crash leaves nothing behind); `file_system` sends a name (no descriptor is kept open).

`TensorPickler` does this for plain CPU tensors and their storages. Everything else (CUDA, sparse, nested, meta,
subclasses) uses the reducers that torch registers; their storages come through here again. Article 3 §tensor, §storage.
"""

from __future__ import annotations

import contextlib
import copyreg
import math
import os
import pickle
import re
import socket
import struct
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection, process, reduction
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

from minidl.process_stat import remove_segments_of

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

NAMES = {dtype: name for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# dtypes and sizes travel as str and tuple: as themselves, each costs a worker and the loader 2 to 3 µs a tensor

_registered: Any = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # grows as users register
_by_copyreg: Any = copyreg.dispatch_table
_SMALL_PART, _PAGES = 4, 1 << 16
"""A tensor with less than 1/4 of its storage is a small part of it, if the storage is not small itself."""

_UNTYPED: Any = torch.UntypedStorage  # its way of opening shared memory is not in its type stubs
_new_shared: Any = torch.UntypedStorage._new_shared  # a worker whose batches lie in slabs replaces the attribute


class TensorPickler(pickle.Pickler):
    """Pickles for a queue; counts what it sends. `tensors`: how many, of every kind that lies in main memory;
    `shared_bytes`: of storages sent by handle; `copied_bytes`: of these, what was copied into shared memory here."""

    # What ForkingPickler knows (pipes, locks, torch's kinds of tensors), without its new table for each message.
    dispatch_table = ChainMap(_registered, _by_copyreg)  # noqa: RUF012  # what pickle looks for on the class
    tensors = 0
    shared_bytes = 0
    copied_bytes = 0

    def reducer_override(self, obj: Any) -> Any:
        """Reduce plain CPU tensors and storages; NotImplemented leaves the rest to pickle."""
        kind = type(obj)
        if kind is torch.UntypedStorage:
            return self.reduce_storage(obj) if obj.device.type == "cpu" else NotImplemented
        if isinstance(obj, torch.Tensor):
            self.tensors += obj.is_cpu
            if kind is torch.Tensor and _is_plain(obj):
                arena = getattr(_filling, "arena", None)
                return reduce_tensor(obj) if arena is None else self._reduce_in_arena(obj, arena)
        if kind is np.ndarray:
            return self.reduce_array(obj)
        return NotImplemented

    def _reduce_in_arena(self, tensor: torch.Tensor, arena: Any) -> Reduced:
        reduced: Reduced | None = arena.reduce_tensor(tensor)
        if reduced is None:
            _share_if_small_part(tensor)
            return reduce_tensor(tensor)
        if reduced[0] is not view_of:
            self.shared_bytes += tensor.nbytes
        return reduced

    def reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        """Reduce an array, so that the other side may write to it: with this pickle protocol it often may not.

        torch's queues use an older one, which calls the array's `__reduce__`.
        """
        arena = getattr(_filling, "arena", None)
        reduced = None if arena is None else arena.reduce_array(array)
        if reduced is None:
            return array.__reduce__()
        self.shared_bytes += array.nbytes
        return reduced

    def reduce_storage(self, storage: torch.UntypedStorage) -> Reduced:
        """Count the storage and reduce it."""
        self.shared_bytes += storage.nbytes()
        if storage.is_shared():
            return reduce_storage(storage)
        arena = getattr(_filling, "arena", None)
        if arena is not None:
            return arena.reduce(storage)  # type: ignore[no-any-return]
        self.copied_bytes += storage.nbytes()
        return self.copy_storage(storage)

    def copy_storage(self, storage: torch.UntypedStorage) -> Reduced:
        """Reduce a storage whose bytes are not in shared memory yet; this is where the copy happens."""
        return reduce_storage(out_of_slab(storage))


_filling = threading.local()


class filling:  # noqa: N801  # entered for each batch: contextlib's way costs a µs
    """In this thread and block, storages that are not in shared memory are put into slabs (see `arena.Arena`)."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        _filling.arena = self._arena

    def __exit__(self, *error: object) -> None:
        _filling.arena = None


def is_filling() -> bool:
    """Whether this thread pickles a batch whose storages go into slabs."""
    return getattr(_filling, "arena", None) is not None


def _share_if_small_part(tensor: torch.Tensor) -> None:
    """Share a storage that is much larger than the tensor, so that slabs are not filled with all of it each time.

    As in torch, whose first batch of such a storage moves the storage to shared memory, where it stays.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() > _SMALL_PART * max(tensor.nbytes, _PAGES) and not _is_in_slab(storage):
        storage.share_memory_()


_IN_SLAB = "_minidl_in_slab"
"""An attribute of storages; torch keeps a storage's Python object as long as the storage."""


def mark_in_slab(storage: torch.UntypedStorage, root: Any) -> torch.UntypedStorage:
    """Mark a storage that lies in a slab, and let it keep the batch's root.

    Its bytes alone would not: `share_memory_()` replaces them, and arrays of them keep no more than the storage.
    """
    setattr(storage, _IN_SLAB, root)
    return storage


def _is_in_slab(storage: torch.UntypedStorage) -> bool:
    return hasattr(storage, _IN_SLAB) and not storage.is_shared()


def out_of_slab(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy in shared memory of a storage that lies in a slab; any other storage itself. For who shares it next.

    torch would move the storage to a new segment, perhaps in a queue's feeder thread: away from the arrays and the
    running computations that use it. Without slabs it stays where it is, because a worker's batch is shared already.
    """
    if _is_in_slab(storage):
        return _new_shared(storage.nbytes()).copy_(storage)  # type: ignore[no-any-return]
    return storage


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor._backward_hooks
    )


def reduce_tensor(tensor: torch.Tensor) -> Reduced:
    """A tensor as its storage and the view of it: offset, size and stride, in elements.

    A lazy conjugate or negative is computed first: its flag would be lost, as it is in torch's own queues.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return rebuild_tensor, (tensor.untyped_storage(), *_view(tensor))


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return NAMES[tensor.dtype], tensor.storage_offset(), tuple(tensor.size()), tensor.stride()


def reduce_view(tensor: torch.Tensor, first: torch.Tensor) -> Reduced:
    """A tensor as a view of the storage of another one in the same message."""
    return view_of, (first, *_view(tensor))


def view_of(first: torch.Tensor, *view: Any) -> torch.Tensor:
    """The view over the storage of `first` again."""
    return rebuild_tensor(first.untyped_storage(), *view)


def storage_of(first: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor that came in the same message."""
    return first.untyped_storage()


def rebuild_tensor(
    storage: torch.UntypedStorage, dtype: str, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """The tensor over `storage` again; no bytes are copied."""
    return torch.empty(0, dtype=DTYPES[dtype]).set_(storage, offset, size, stride)


def reduce_storage(storage: Any) -> Reduced:
    """Share the storage's bytes by the current strategy; copy them into shared memory if they are not there."""
    if mp.get_sharing_strategy() == "file_system":  # type: ignore[no-untyped-call]
        manager, handle, size = storage._share_filename_cpu_()
        storage._shared_incref()  # the message in flight holds the segment until the reader has it
        _remember(handle, storage)
        return rebuild_storage_filename, (manager, handle, size)
    if storage.nbytes() == 0:
        return torch.UntypedStorage, ()  # an empty segment can't be mapped
    fd, size = storage._share_fd_cpu_()
    _remember(fd_id(fd), storage)
    return rebuild_storage_fd, (reduction.DupFd(fd), size)


def rebuild_storage_fd(duplicate: Any, size: int) -> Any:
    """Fetch the descriptor from its sender through a Unix socket and map it: an UntypedStorage of `size` bytes.

    A segment that this process has mapped already is not mapped twice. Raises OSError or RuntimeError if the sender is
    gone or this process has no descriptor left, NotHandedOverError if the sender does not answer in time.
    """
    fd = _fetched(duplicate)
    try:
        key = fd_id(fd)
        storage = _mapped(key)
        return _remember(key, _UNTYPED._new_shared_fd_cpu(fd, size)) if storage is None else storage
    finally:
        os.close(fd)


_UNSIZED = re.compile(r" file </(torch_(\d+)_\w+)>")


def remove_unsized(error: BaseException) -> None:
    """Remove the segment that `error` is about, if torch has made it in this process and could not size it.

    It would keep its name, also after the process: with /dev/shm full, or a limit of the size of files.
    """
    found = _UNSIZED.search(str(error)) if type(error) is RuntimeError else None  # a subclass may have no text
    if found is not None and int(found[2]) == os.getpid():
        with contextlib.suppress(OSError):
            os.unlink(f"/dev/shm/{found[1]}")


def remove_left(pids: Collection[int]) -> None:
    """Remove the segments that workers have left which have ended. With `file_system`, others may still open them."""
    if mp.get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        remove_segments_of(pids)


class NotHandedOverError(Exception):
    """A batch has come, and its sender does not answer when it is asked for the batch's memory."""


_handover = threading.local()


@contextlib.contextmanager
def handover_timeout(seconds: float) -> Iterator[None]:
    """In this thread and block, wait no longer than `seconds` for each answer of a sender of descriptors.

    A sender that is stopped, or whose GIL is kept by a C call, takes the connection and does not answer.
    """
    _handover.seconds = seconds
    try:
        yield
    finally:
        del _handover.seconds


def _fetched(duplicate: Any) -> int:
    """The descriptor that `duplicate` stands for, from its sender."""
    seconds = getattr(_handover, "seconds", None)
    if seconds is None:
        return int(duplicate.detach())
    address, key = duplicate._id
    fraction, whole = math.modf(seconds)
    limit = struct.pack("ll", int(whole), max(1, int(fraction * 1e6)))  # 0 would mean no limit
    with socket.socket(socket.AF_UNIX) as plain:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            plain.setsockopt(socket.SOL_SOCKET, option, limit)
        try:
            plain.connect(address)
            with connection.Connection(os.dup(plain.fileno())) as sender:
                own = process.current_process().authkey
                connection.answer_challenge(sender, own)
                connection.deliver_challenge(sender, own)
                sender.send((key, os.getpid()))
                return reduction.recv_handle(sender)
        except BlockingIOError:  # what a limit of a socket that blocks ends with
            raise NotHandedOverError(f"no answer within {seconds:g} s") from None


def rebuild_storage_filename(manager: bytes, handle: bytes, size: int) -> Any:
    """Open the segment by its name and map it; raises RuntimeError if the name is gone."""
    storage = _mapped(handle)
    if storage is None:
        storage = _remember(handle, _UNTYPED._new_shared_filename_cpu(manager, handle, size))
    return storage._shared_decref()


def fd_id(fd: int) -> tuple[int, int]:
    """What two descriptors of one segment have in common: inode and device."""
    stat = os.fstat(fd)
    return stat.st_ino, stat.st_dev


def _mapped(key: Any) -> Any:
    """The storage over this segment that this process has already, or None. The cache is torch's, shared with it."""
    reference = shared_cache.get(key)  # type: ignore[no-untyped-call]
    return None if reference is None else _UNTYPED._new_with_weak_ptr(reference.cdata)


def _remember(key: Any, storage: Any) -> Any:
    shared_cache[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return storage
