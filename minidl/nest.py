"""Nested batches: what is inside, and the same nest with other leaves.

Interface: `map_nested(data, change)` rebuilds a nest of mappings, sequences, tuples and dataclass instances;
`tensors_in(data)` lists its tensors. Rule of use: what nothing changes in is the same object afterwards, and no
container that came in is written to.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

ATOMS = (str, bytes, bytearray, memoryview, range)
"""Sequences that are no containers of batches."""


def map_nested(data: Any, change: Callable[[Any], Any]) -> Any:
    """`data` with each item replaced by `change(item)`, asked from the outside in; NotImplemented = look inside.

    A mapping, sequence or tuple keeps its type where that can be built again, and becomes a dict or a list where not.
    A dataclass instance is copied and its fields are set: `__post_init__` does not run again. Whatever else `change`
    answers NotImplemented for stays as it is.
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
    if isinstance(data, (dict, collections.UserDict)):
        clone = copy.copy(data)  # a subclass may carry more than its items
        clone.update(new)
        return clone
    try:
        return type(data)(new)  # type: ignore[call-arg]
    except TypeError:
        return new


def _sequence(data: Any, new: list[Any]) -> Any:
    if isinstance(data, (list, collections.UserList, collections.deque)):
        clone = copy.copy(data)
        for position, item in enumerate(new):
            clone[position] = item
        return clone
    try:
        return type(data)(*new) if hasattr(data, "_fields") else type(data)(new)
    except TypeError:
        return tuple(new) if isinstance(data, tuple) else new


def _instance(data: Any, change: Callable[[Any], Any]) -> Any:
    names = [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]
    old = [getattr(data, name) for name in names]
    new = [map_nested(value, change) for value in old]
    if _same(old, new):
        return data
    clone = copy.copy(data)
    for name, value in zip(names, new, strict=True):
        object.__setattr__(clone, name, value)  # a frozen one, too
    return clone


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The dense tensors of a nest, those that an object with a `to` method keeps in its attributes among them."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            found.extend(_parts(item))
            return item
        if callable(getattr(item, "to", None)) and id(item) not in seen:
            seen.add(id(item))
            map_nested(list(getattr(item, "__dict__", {}).values()), visit)
        return NotImplemented

    map_nested(data, visit)
    return found


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a sparse tensor's memory is in; a dense one is itself."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.values(),) if tensor.layout is torch.jagged else (tensor,)
