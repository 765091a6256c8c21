"""How a worker pickles a batch whose tensors lie in slabs, and storages of slabs that are sent on.

`SlabPickler` is the `TensorPickler` of this transport. In a `filling` block it asks the arena where things are.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import torch

from minidl.wire.message import Envelope, dumps, load_result, load_task
from minidl.wire.messages import Result, Task
from minidl.wire.tensors import Reduced, TensorPickler, rebuild_tensor, view_of

_SMALL_PART, _PAGES = 4, 1 << 16
"""A tensor with less than 1/4 of its storage is a small part of it, if the storage is not small itself."""

_new_shared: Any = torch.UntypedStorage._new_shared  # a worker whose batches lie in slabs replaces the attribute


# --- Storages in slabs ------------------------------------------------------------------------------------------------
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
    """A copy in shared memory of a storage that lies in a slab; any other storage itself. It is shared next.

    torch would move the storage to a new segment, perhaps in a queue's feeder thread: away from the arrays and the
    running computations that use it. Without slabs it stays where it is, because a worker's batch is shared already.
    """
    if _is_in_slab(storage):
        return _new_shared(storage.nbytes()).copy_(storage)  # type: ignore[no-any-return]
    return storage


# --- Batches ----------------------------------------------------------------------------------------------------------
class _OfThread(threading.local):
    arena: Any = None


_filling = _OfThread()


class filling:  # noqa: N801  # entered for each batch: contextlib's way costs a µs
    """In this thread and block, a `SlabPickler` puts storages that are not in shared memory into slabs of the arena."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        _filling.arena = self._arena

    def __exit__(self, *error: object) -> None:
        _filling.arena = None


def is_filling() -> bool:
    """Whether this thread pickles a batch whose storages go into slabs."""
    return _filling.arena is not None


class SlabPickler(TensorPickler):
    """Pickles a batch in a `filling` block."""

    def reduce_tensor(self, tensor: torch.Tensor) -> Reduced:
        reduced: Reduced | None = _filling.arena.reduce_tensor(tensor)
        if reduced is None:
            _share_if_small_part(tensor)
            return super().reduce_tensor(tensor)
        if reduced[0] is not rebuild_view:
            self.shared_bytes += tensor.nbytes
        return reduced

    def reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        reduced = _filling.arena.reduce_array(array)
        if reduced is None:
            return super().reduce_array(array)
        self.shared_bytes += array.nbytes
        return reduced

    def reduce_storage(self, storage: torch.UntypedStorage) -> Reduced:
        if storage.is_shared():
            return super().reduce_storage(storage)
        self.shared_bytes += storage.nbytes()
        return _filling.arena.reduce(storage)  # type: ignore[no-any-return]


def _share_if_small_part(tensor: torch.Tensor) -> None:
    """Share a storage that is much larger than the tensor, so that slabs are not filled with all of it each time.

    As in torch, whose first batch of such a storage moves the storage to shared memory, where it stays.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() > _SMALL_PART * max(tensor.nbytes, _PAGES) and not _is_in_slab(storage):
        storage.share_memory_()


def reduce_view(tensor: torch.Tensor, first: torch.Tensor) -> Reduced:
    """A tensor as a view of the storage of another one in the same message."""
    return rebuild_view, (first, *view_of(tensor))


def rebuild_view(first: torch.Tensor, *view: Any) -> torch.Tensor:
    """The view over the storage of `first` again."""
    return rebuild_tensor(first.untyped_storage(), *view)


def storage_of(first: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor that came in the same message."""
    return first.untyped_storage()


# --- Messages for queues without a feeder thread ----------------------------------------------------------------------
def packed(message: Any, pickler: type[TensorPickler] = TensorPickler) -> bytes:
    """A message for such a queue; `unpacked` undoes it. pickler: of what is not in an Envelope.

    An Envelope is pickled as what it becomes: by a number for the function, whose name would cost both sides a µs.
    """
    if not isinstance(message, Envelope):
        return _OTHER + dumps(message, pickler)[0]
    function, arguments = message.__reduce__()
    number = _NUMBERS.get(function)
    if number is None:
        return _CALL + pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
    return number + pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)


def unpacked(data: memoryview) -> Any:
    """The message again."""
    first, rest = data[0], pickle.loads(data[1:])
    if first >= len(_BY_NUMBER):
        return rest
    function, arguments = rest if first == 0 else (_BY_NUMBER[first], rest)
    return function(*arguments)


_BY_NUMBER: tuple[Any, ...] = (None, Task, Result, load_task, load_result)
_NUMBERS = {function: bytes([number]) for number, function in enumerate(_BY_NUMBER)}
_CALL, _OTHER = bytes([0]), bytes([len(_BY_NUMBER)])
"""What a packed message begins with: the function that makes it, any function, or nothing is called."""
