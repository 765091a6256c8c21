"""Rebuild a container: the same type, other items.

Used by `collate` and `pin_memory`, with torch's rules, and by `device.nest`, which passes its own `copied`.

A container of a `copied` type is copied and its items are replaced, so that a subclass keeps its other attributes. Any
other container is built by calling its type with the new items. If either raises TypeError, the plain dict or list of
items is the result.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any

Types = tuple[type, ...]


def mapping_like(model: Mapping[Any, Any], items: dict[Any, Any], copied: Types = (MutableMapping,)) -> Any:
    """Return a mapping of `model`'s type with `items`, or `items` itself."""
    try:
        if not isinstance(model, copied):
            return type(model)(items)  # type: ignore[call-arg]
        clone: Any = copy.copy(model)
        clone.update(items)
        return clone
    except TypeError:
        return items


def sequence_like(model: Any, items: list[Any], copied: Types = (MutableSequence,)) -> Any:
    """Return a sequence of `model`'s type with `items`, or `items` itself."""
    try:
        if not isinstance(model, copied):
            return type(model)(items)
        clone: Any = copy.copy(model)
        for position, item in enumerate(items):
            clone[position] = item
        return clone
    except TypeError:
        return items


def is_named(data: Any) -> bool:
    """Whether `data` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def tuple_like(model: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """Return a tuple or named tuple of `model`'s type with `items`. TypeError if its type takes other arguments."""
    kind: Any = type(model)
    return kind(*items) if is_named(model) else kind(items)
