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
from torch.multiprocessing import reductions

from minidl.process_stat import remove_segments_of

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

NAMES = {dtype: name for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# dtypes and sizes travel as str and tuple: as themselves, each costs a worker and the loader 2 to 3 µs a tensor

_registered: Any = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # grows as users register
_by_copyreg: Any = copyreg.dispatch_table
_UNTYPED: Any = torch.UntypedStorage  # its way of opening shared memory is not in its type stubs
_cache: Any = reductions.shared_cache
"""Segment -> a weak reference to the storage over it. It is torch's: no process maps a segment twice."""

_WeakRef: Any = reductions.StorageWeakRef


def _itself(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


moved: Callable[[torch.UntypedStorage], torch.UntypedStorage] = _itself
"""The storage that is moved to shared memory when one is sent: itself; or a copy, if a transport says so."""


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
                return self.reduce_tensor(obj)
        if kind is np.ndarray:
            return self.reduce_array(obj)
        return NotImplemented

    def reduce_tensor(self, tensor: torch.Tensor) -> Reduced:
        """Reduce a tensor to its storage and the view of it.

        A lazy conjugate or negative is computed first: its flag would be lost, as it is in torch's own queues.
        """
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return rebuild_tensor, (tensor.untyped_storage(), *view_of(tensor))

    def reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        """Reduce an array, so that the other side may write to it: with this pickle protocol it often may not.

        torch's queues use an older one, which calls the array's `__reduce__`.
        """
        return array.__reduce__()

    def reduce_storage(self, storage: torch.UntypedStorage) -> Reduced:
        """Count the storage and reduce it."""
        self.shared_bytes += storage.nbytes()
        if storage.is_shared():
            return reduce_storage(storage)
        self.copied_bytes += storage.nbytes()
        return self.copy_storage(storage)

    def copy_storage(self, storage: torch.UntypedStorage) -> Reduced:
        """Reduce a storage whose bytes are not in shared memory yet; this is where the copy happens."""
        return reduce_storage(moved(storage))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor._backward_hooks
    )


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The dtype's name, and the view of the storage: offset, size and stride, in elements."""
    return NAMES[tensor.dtype], tensor.storage_offset(), tuple(tensor.size()), tensor.stride()


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
        _cache[handle] = _WeakRef(storage)
        return rebuild_storage_filename, (manager, handle, size)
    if storage.nbytes() == 0:
        return torch.UntypedStorage, ()  # an empty segment can't be mapped
    fd, size = storage._share_fd_cpu_()
    _cache[fd_id(fd)] = _WeakRef(storage)
    return rebuild_storage_fd, (reduction.DupFd(fd), size)


def rebuild_storage_fd(duplicate: Any, size: int) -> Any:
    """Fetch the descriptor from its sender through a Unix socket and map it: an UntypedStorage of `size` bytes.

    A segment that this process has mapped already is not mapped twice. Raises OSError or RuntimeError if the sender is
    gone or this process has no descriptor left, NotHandedOverError if the sender does not answer in time.
    """
    fd = duplicate.detach() if _handover.seconds is None else _fetched(duplicate, _handover.seconds)
    try:
        return _mapped(fd_id(fd), _UNTYPED._new_shared_fd_cpu, fd, size)
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


class _Handover(threading.local):
    seconds: float | None = None  # see `handover_timeout`


_handover = _Handover()


@contextlib.contextmanager
def handover_timeout(seconds: float) -> Iterator[None]:
    """In this thread and block, wait no longer than `seconds` for each answer of a sender of descriptors.

    A sender that is stopped, or whose GIL is kept by a C call, takes the connection and does not answer.
    """
    _handover.seconds = seconds
    try:
        yield
    finally:
        _handover.seconds = None


def _fetched(duplicate: Any, seconds: float) -> int:
    """The descriptor that `duplicate` stands for, from its sender, within so many seconds."""
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
    return _mapped(handle, _UNTYPED._new_shared_filename_cpu, manager, handle, size)._shared_decref()


def fd_id(fd: int) -> tuple[int, int]:
    """What two descriptors of one segment have in common: inode and device."""
    stat = os.fstat(fd)
    return stat.st_ino, stat.st_dev


def _mapped(key: Any, make: Callable[..., Any], *about: Any) -> Any:
    """The storage over this segment: that which this process has already, or a new one."""
    reference = _cache.get(key)
    storage = None if reference is None else _UNTYPED._new_with_weak_ptr(reference.cdata)
    if storage is None:
        storage = make(*about)
        _cache[key] = _WeakRef(storage)
    return storage
