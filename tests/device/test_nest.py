"""Nested batches: they are rebuilt in their own types, what is found inside, and that nothing is kept."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import workloads as wl
from torch.nn.utils.rnn import pack_sequence

from minidl.device.nest import map_nested, tensors_in


class Holder:
    """Knows by itself how to go to a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: str) -> Holder:
        return Holder(self.tensor.to(device))


class Pair(NamedTuple):
    a: torch.Tensor
    b: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    name: str
    size: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass
class Checked:
    image: torch.Tensor

    def __post_init__(self) -> None:
        raise AssertionError("made a second time")


class Unbuildable(wl.ReadOnly):
    def __init__(self) -> None:
        super().__init__({"a": torch.ones(2)})


class Tagged(dict[str, Any]):
    tag = ""


def negated(item: Any) -> Any:
    return -item if isinstance(item, torch.Tensor) else NotImplemented


def test_every_kind_of_nest_is_rebuilt_in_its_own_type() -> None:
    one, checked, tagged = torch.ones(2), Checked.__new__(Checked), Tagged(a=torch.ones(2))
    checked.image, tagged.tag = one, "kept"
    nest = {
        "list": [one, "text", b"bytes", None, 3],
        "tuple": (one, one),
        "pair": Pair(one, "b"),
        "deque": collections.deque([one], maxlen=3),
        "ordered": collections.OrderedDict(a=one),
        "default": collections.defaultdict(list, a=one),
        "user": collections.UserDict(a=one),
        "read only": wl.ReadOnly({"a": one}),
        "unbuildable": Unbuildable(),
        "frozen": Frozen(one, "name"),
        "checked": checked,
        "tagged": tagged,
    }
    out = map_nested(nest, negated)
    kinds = {name: type(value) for name, value in nest.items()} | {"unbuildable": dict}
    assert {name: type(value) for name, value in out.items()} == kinds
    assert all(bool((tensor == -1).all()) for tensor in tensors_in(out))
    assert len(tensors_in(out)) == len(tensors_in(nest)) == 13
    assert out["list"][1:] == nest["list"][1:]
    assert (out["pair"].b, out["deque"].maxlen, out["frozen"].name, out["tagged"].tag) == ("b", 3, "name", "kept")
    assert out["default"].default_factory is list


def test_no_container_that_came_in_is_written_to() -> None:
    one = torch.ones(2)
    nest = [collections.UserDict(a=one), wl.ReadOnly({"a": one}), Frozen(one, "n"), [one], {"a": one}]
    map_nested(nest, negated)
    assert all(tensor is one for tensor in tensors_in(nest))
    assert len(tensors_in(nest)) == 5


@pytest.mark.parametrize("nest", [[1, "a"], {"a": (2, None)}, range(3), torch.Size([2, 3]), np.ones(2), Pair(1, "b")])  # type: ignore[arg-type]
def test_a_nest_without_tensors_stays_the_same_object(nest: Any) -> None:
    assert map_nested(nest, negated) is nest


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_in_objects_with_a_to_method_and_in_sparse_ones_are_found() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert [tuple(t.shape) for t in tensors_in(packed)] == [(5,), (3,)]
    assert len(tensors_in({"a": torch.eye(3).to_sparse()})) == 2
    assert len(tensors_in(torch.eye(3).to_sparse_csr())) == 3
    thing = Holder(torch.ones(2))
    thing.me = thing  # type: ignore[attr-defined]
    assert len(tensors_in([thing])) == 1


def test_no_batch_outlives_its_last_reference() -> None:
    """Memory of a device must be free before the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        alive = []
        for _ in range(3):
            batch = {"image": torch.ones(2), "rest": [Holder(torch.ones(3))]}
            alive += [weakref.ref(tensor) for tensor in tensors_in(batch)]
            map_nested(batch, lambda item: item + 1 if isinstance(item, torch.Tensor) else NotImplemented)
        del batch
        assert len(alive) == 6
        assert not [tensor for tensor in (reference() for reference in alive) if tensor is not None]
    finally:
        gc.enable()
