"""Nested batches: the tensors inside, and the same nest with other leaves.

Interface: `map_nested(data, change)` rebuilds a nest of mappings, sequences, tuples and dataclass instances;
`tensors_in(data)` lists its tensors. A container in which nothing changes is returned as the same object, and no
container is written to: only types whose copy shares no storage with the original are copied.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from minidl.data.collate import mapping_like, sequence_like, tuple_like

ATOMS = (str, bytes, bytearray, memoryview, range)
"""Sequences whose items are not looked at."""


def map_nested(data: Any, change: Callable[[Any], Any]) -> Any:
    """Replace each item by `change(item)`, from the outside in; NotImplemented means: look inside.

    A mapping, sequence or tuple keeps its type if it can be rebuilt (see `containers`); else it becomes a dict, list or
    tuple. A dataclass instance is copied and its fields are set: `__post_init__` does not run again. Any other object
    for which `change` returns NotImplemented stays as it is.
    """
    changed = change(data)
    if changed is not NotImplemented:
        return changed
    if isinstance(data, ATOMS):
        return data
    if isinstance(data, Mapping):
        return _mapping(data, change)
    if isinstance(data, (Sequence, collections.deque)):
        items = list(data)
        new = [map_nested(item, change) for item in items]
        return data if _same(items, new) else _sequence(data, new)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _instance(data, change)
    return data


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def _mapping(data: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    old = dict(data.items())
    new = {key: map_nested(value, change) for key, value in old.items()}
    if _same(old.values(), new.values()):
        return data
    return mapping_like(data, new, (dict, collections.UserDict))


def _sequence(data: Any, new: list[Any]) -> Any:
    if not isinstance(data, tuple):
        return sequence_like(data, new, (list, collections.UserList, collections.deque))
    try:
        return tuple_like(data, new)
    except TypeError:
        return tuple(new)


def _instance(data: Any, change: Callable[[Any], Any]) -> Any:
    names = [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]
    old = [getattr(data, name) for name in names]
    new = [map_nested(value, change) for value in old]
    if _same(old, new):
        return data
    clone = copy.copy(data)
    for name, value in zip(names, new, strict=True):
        object.__setattr__(clone, name, value)  # works for frozen dataclasses too
    return clone


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Return the dense tensors of a nest, also those in the attributes of objects with a `to` method."""
    found: list[torch.Tensor] = []
    map_nested(data, functools.partial(_find, found, set()))
    return found


# Not a closure: one that calls itself is a reference cycle and keeps the tensors alive until the collector runs.
def _find(found: list[torch.Tensor], seen: set[int], item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        found.extend(_parts(item))
        return item
    if callable(getattr(item, "to", None)) and id(item) not in seen:
        seen.add(id(item))
        map_nested(list(getattr(item, "__dict__", {}).values()), functools.partial(_find, found, seen))
    return NotImplemented


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a sparse tensor's memory; of a dense tensor: itself."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.values(),) if tensor.layout is torch.jagged else (tensor,)
