"""Rebuilding containers: the results, and the types, are those of torch's collate and pin_memory."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from minidl.data.collate import mapping_like, sequence_like
from minidl.device.nest import map_nested
from minidl.loader.pin_memory import pin_memory


class Pair(NamedTuple):
    left: Any
    right: Any


class Named(dict[str, Any]):
    name = "unset"


class Picky(dict[str, Any]):
    def update(self, *args: Any) -> None:  # type: ignore[override]
        raise TypeError("no update")


class Fixed(Sequence[Any]):
    """A sequence that no list makes."""

    def __init__(self, left: Any, right: Any) -> None:
        self.items = [left, right]

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return 2


class View(Mapping[str, Any]):
    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Any:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Pinnable:
    """An object that is pinned by its own method, so that no GPU is needed."""

    def pin_memory(self) -> str:
        return "pinned"


def named(**items: Any) -> Named:
    made = Named(items)
    made.name = "kept"
    return made


LEAF = Pinnable()
NESTS = {
    "dict": lambda leaf: {"a": leaf},
    "subclass with an attribute": lambda leaf: named(a=leaf),
    "dict without update": lambda leaf: Picky(a=leaf),
    "defaultdict": lambda leaf: collections.defaultdict(list, a=leaf),
    "immutable mapping": lambda leaf: View({"a": leaf}),
    "list": lambda leaf: [leaf, leaf],
    "tuple": lambda leaf: (leaf, leaf),
    "named tuple": lambda leaf: Pair(leaf, (leaf,)),
    "deque": lambda leaf: collections.deque([leaf, leaf]),
    "sequence of two arguments": lambda leaf: Fixed(leaf, leaf),
    "range": lambda leaf: range(2),
}


def shape(data: Any) -> Any:
    """The nest with the type of each container, for comparison."""
    if isinstance(data, Mapping):
        return type(data), getattr(data, "name", None), {key: shape(data[key]) for key in data}
    if isinstance(data, (Sequence, collections.deque)) and not isinstance(data, str):
        return type(data), [shape(item) for item in data]
    return type(data), str(data)


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
def test_pinning_rebuilds_as_torch_does(make: Any) -> None:
    assert shape(pin_memory(make(LEAF))) == shape(torch_pin_memory(make(LEAF)))


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
def test_a_nest_keeps_its_type_or_becomes_a_plain_one(make: Any) -> None:
    changed = map_nested(before := make(1.0), lambda item: 2.0 if item == 1.0 else NotImplemented)
    assert "1.0" not in str(shape(changed))
    assert type(changed) in (type(before), dict, list)


def test_what_cannot_be_rebuilt_is_a_dict_or_a_list() -> None:
    items, members = {"a": 1}, [1, 2]
    assert mapping_like(Picky(a=0), items) is items
    assert sequence_like(Fixed(0, 0), members) is members
