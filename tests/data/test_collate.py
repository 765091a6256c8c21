"""Collating: the same batches as torch's, type for type; the worker's shortcut; functions registered on either side."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import MutableMapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
import workloads as wl
from hypothesis import given
from hypothesis import strategies as st
from oracle_twice import MINIDL, TORCH, agree, different, outcome
from torch.utils.data._utils import collate as torch_collate

from minidl.data import collate, worker_info


class Point(NamedTuple):
    x: Any
    y: Any


class TaggedDict(dict[str, Any]):
    tag = ""


class TaggedList(list[Any]):
    tag = ""


class TwoArguments(wl.ReadOnly):
    """Cannot be rebuilt from its items: collating falls back to a dict."""

    def __init__(self, items: Any, more: Any) -> None:
        super().__init__(items)


class NoUpdate(wl.ReadOnly, MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read-only after all")

    def __delitem__(self, key: str) -> None:
        raise TypeError("read-only after all")


class FrozenSequence(Sequence[Any]):
    def __init__(self, items: Any) -> None:
        self.items_ = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self.items_[index]

    def __len__(self) -> int:
        return len(self.items_)


class NoSetItem(FrozenSequence, MutableSequence[Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("read-only after all")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("read-only after all")

    def insert(self, index: int, value: Any) -> None:
        raise TypeError("read-only after all")


class Annotated(torch.Tensor):
    pass


def tagged(cls: Any, items: Any, tag: str) -> Any:
    made = cls(items)
    made.tag = tag
    return made


def sparse_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return torch.eye(2).to_sparse_csr()


SAMPLES: dict[str, Any] = {
    "int": [1, 2],
    "bool": [True, False],
    "float": [1.5, float("nan")],
    "mixed numbers": [1, 2.5],
    "huge int": [2**70, 1],
    "str": ["a", "bc"],
    "bytes": [b"a", b"bc"],
    "tensor": [torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.int64)],
    "empty tensor": [torch.empty(0, 4)] * 2,
    "strided view": [torch.arange(10)[::2], torch.arange(5)],
    "channels last": [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)] * 2,
    "requires grad": [torch.ones(2, requires_grad=True)] * 2,
    "tensor subclass": [torch.ones(2).as_subclass(Annotated)] * 2,
    "two dtypes": [torch.ones(2), torch.ones(2, dtype=torch.int64)],
    "ragged, first longer": [torch.ones(3), torch.ones(1)],
    "ragged, first shorter": [torch.ones(1), torch.ones(3)],
    "ragged, same number": [torch.ones(2, 3), torch.ones(3, 2)],
    "sparse": [torch.eye(2).to_sparse()] * 2,
    "sparse csr": [sparse_csr()] * 2,
    "array": [np.arange(3), np.arange(3)],
    "array of str": [np.array(["a", "b"])] * 2,
    "one array of str": [np.array(["a", "b"])],
    "array of objects": [np.array([None, {}], dtype=object)] * 2,
    "array of records": [np.zeros(2, dtype=[("a", "i4")])] * 2,
    "array of dates": [np.zeros(2, dtype="M8[s]")] * 2,
    "0-d array": [np.array(1.5)] * 2,
    "reversed array": [np.arange(3)[::-1]] * 2,
    "numpy float": [np.float32(1.5), np.float32(2)],
    "numpy bool": [np.bool_(True), np.bool_(False)],
    "numpy str": [np.str_("a"), np.str_("b")],
    "numpy date": [np.datetime64("2020-01-01")] * 2,
    "dict": [{"a": 1, "b": [2, "x"]}, {"b": [3, "y"], "a": 4}],
    "dict, a key missing": [{"a": 1, "b": 2}, {"a": 1}],
    "dict, a key too many": [{"a": 1}, {"a": 1, "b": 2}],
    "dict of what nothing fits": [{"a": None}, {"a": None}],
    "ordered dict": [collections.OrderedDict(a=1), collections.OrderedDict(a=2)],
    "default dict": [collections.defaultdict(list, a=1), collections.defaultdict(list, a=2)],
    "tagged dict": [tagged(TaggedDict, {"a": 1}, "first"), tagged(TaggedDict, {"a": 2}, "second")],
    "frozen mapping": [wl.ReadOnly({"a": 1}), wl.ReadOnly({"a": 2})],
    "mapping proxy": [types.MappingProxyType({"a": 1})] * 2,
    "mapping of two arguments": [TwoArguments({"a": 1}, 0)] * 2,
    "mapping without update": [NoUpdate({"a": 1})] * 2,
    "named tuple": [Point(1, "a"), Point(2, "b")],
    "named tuple and a longer tuple": [Point(1, 2), (3, 4, 5)],
    "tuple": [(1, "a"), (2, "b")],
    "list": [[1, [2.0]], [3, [4.0]]],
    "lists of two lengths": [[1, 2], [3]],
    "list and int": [[1], 2],
    "tagged list": [tagged(TaggedList, [1, 2], "first"), tagged(TaggedList, [3, 4], "second")],
    "deque": [collections.deque([1, 2]), collections.deque([3, 4])],
    "range": [range(2), range(2)],
    "frozen sequence": [FrozenSequence([1, 2])] * 2,
    "sequence without setitem": [NoSetItem([1, 2])] * 2,
    "bytearray": [bytearray(b"ab")] * 2,
    "set": [{1}, {2}],
    "None": [None, None],
    "complex number": [1j, 2j],
    "object": [object, object],
    "one": [[torch.ones(1)]],
    "none at all": [],
    "tuple as batch": (torch.ones(1), torch.ones(1)),
}


def shown(value: Any) -> Any:
    """What `different` cannot see: attributes, and what is inside the classes of this file."""
    inside = getattr(value, "items_", None)
    return [value, getattr(value, "tag", None), inside]


class TestAgainstTorch:
    @pytest.mark.parametrize("name", SAMPLES)
    def test_collate_and_convert(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        agree(lambda lib: [shown(lib.default_convert(sample)) for sample in SAMPLES[name]])
        agree(lambda lib: shown(lib.default_collate(SAMPLES[name])))
        monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", "x")
        agree(lambda lib: shown(lib.default_collate(SAMPLES[name])))  # both into shared memory

    @pytest.mark.heavy
    def test_nested_tensors_are_refused(self) -> None:
        batch = [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)] * 2
        refusal = agree(lambda lib: lib.default_collate(batch))
        assert isinstance(refusal, RuntimeError)

    def test_memory_maps(self, tmp_path: Path) -> None:
        array = np.memmap(tmp_path / "array", np.int32, "w+", shape=(3,))
        agree(lambda lib: lib.default_collate([array, array]))
        agree(lambda lib: lib.default_convert(array))

    @given(
        st.recursive(
            st.sampled_from([0, 1.5, "s", b"b", True, np.float32(2), np.arange(2), torch.ones(2), None]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
                | st.tuples(inner, inner)
                | st.builds(Point, inner, inner)
            ),
            max_leaves=8,
        ),
        st.integers(1, 3),
    )
    def test_any_nesting(self, sample: Any, batch_size: int) -> None:
        agree(lambda lib: lib.default_collate([sample] * batch_size))
        agree(lambda lib: lib.default_convert(sample))

    def test_collate_with_a_map_of_ones_own(self) -> None:
        def program(lib: Any) -> Any:
            seen: list[Any] = []

            def collate_any(batch: Any, *, collate_fn_map: Any) -> Any:
                seen.append((batch, list(collate_fn_map)))
                return "collated"

            fn_map = {(int, float): collate_any, object: collate_any}
            return lib.collate([{"a": 1}, {"a": 2}], collate_fn_map=fn_map), lib.collate([[1], [2]]), seen

        agree(program)
        agree(lambda lib: lib.collate([{"a": 1}], collate_fn_map={int: lambda batch, *, collate_fn_map: batch}))
        agree(lambda lib: lib.collate([1]))

    def test_names(self) -> None:
        public = {name for name in vars(torch_collate) if "collate" in name or name.startswith(("default_", "np_str"))}
        assert public - set(vars(collate)) == set()
        kinds = [list(fn_map) for fn_map in (collate.default_collate_fn_map, torch_collate.default_collate_fn_map)]
        assert kinds[0] == kinds[1]
        assert collate.np_str_obj_array_pattern.pattern == torch_collate.np_str_obj_array_pattern.pattern


class TestSharedMemory:
    def test_a_worker_stacks_each_tensor_into_one_new_segment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[torch.Tensor] = []
        new_shared = collate.new_shared

        def watched(elem: torch.Tensor, shape: Any) -> torch.Tensor:
            made.append(new_shared(elem, shape))
            return made[-1]

        monkeypatch.setattr(collate, "new_shared", watched)
        monkeypatch.setattr(worker_info, "_worker_info", "x")
        batch = collate.default_collate([{"x": torch.ones(3), "y": (np.zeros(2), 1)}] * 4)
        found = [batch["x"], batch["y"][0]]
        assert all(tensor.is_shared() for tensor in found)
        assert [tensor.untyped_storage().nbytes() for tensor in found] == [4 * 3 * 4, 4 * 2 * 8]
        assert [tensor.data_ptr() for tensor in made] == [tensor.data_ptr() for tensor in found]
        assert not batch["y"][1].is_shared()  # numbers are not tensors: they are copied when sent

    @pytest.mark.parametrize("shared_from", [1 << 6, (1 << 6) + 1])
    def test_from_a_size_of_the_whole_batch_on(self, shared_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_info, "_worker_info", "x")
        monkeypatch.setattr(collate, "shared_from", shared_from)
        assert collate.default_collate([torch.ones(4)] * 4).is_shared() == (shared_from == 1 << 6)

    def test_on_the_device_of_the_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def new_shared(size: int, *, device: Any) -> torch.UntypedStorage:
            asked.append((size, device))
            return torch.UntypedStorage(size, device=device)

        monkeypatch.setattr(torch.UntypedStorage, "_new_shared", new_shared)
        assert collate.new_shared(torch.empty(5, device="meta"), (2, 3)).is_meta
        assert asked == [(24, torch.device("meta"))]

    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.bfloat16])
    def test_new_shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensor = collate.new_shared(torch.empty(5, dtype=dtype), shape)
        assert (tensor.shape, tensor.dtype, tensor.is_shared()) == (shape, dtype, True)
        assert tensor.is_contiguous()

    @pytest.mark.live
    def test_in_torchs_workers(self) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(4))
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=1, collate_fn=_was_shared, multiprocessing_context="fork"
        )
        assert list(loader) == [True, True]


def _was_shared(batch: Any) -> bool:
    return bool(collate.default_collate(batch)[0].is_shared())


class Word(str):
    pass


class Thing:
    pass


def by_user(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return ["by user", len(batch)]


def by_library(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return ["by library", torch_collate.collate([1, 2], collate_fn_map=collate_fn_map)]


class TestRegistrations:
    @pytest.mark.parametrize("kind", [Thing, Word, int, torch.Tensor])
    @pytest.mark.parametrize("fn_map", [collate.default_collate_fn_map, torch_collate.default_collate_fn_map])
    def test_in_either_map_for_new_types_and_over_defaults(
        self, kind: Any, fn_map: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sample = torch.ones(1) if kind is torch.Tensor else kind()
        monkeypatch.setitem(fn_map, kind, by_user)
        assert collate.default_collate([{"a": sample}] * 2) == {"a": ["by user", 2]}

    def test_same_answer_as_torch_gives_to_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(torch_collate.default_collate_fn_map, Thing, by_library)
        agree(lambda lib: lib.default_collate([(Thing(), 1)] * 2))

    def test_minidls_map_has_the_last_word(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(torch_collate.default_collate_fn_map, Thing, by_library)
        monkeypatch.setitem(collate.default_collate_fn_map, Thing, by_user)
        assert collate.default_collate([Thing()]) == ["by user", 1]

    def test_our_own_functions_stay_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(torch_collate.default_collate_fn_map, Thing, by_user)
        monkeypatch.setattr(worker_info, "_worker_info", "x")
        batch = collate.default_collate([(torch.ones(1), Thing())])
        assert (batch[0].is_shared(), batch[1]) == (True, ["by user", 1])

    def test_torchs_map_is_left_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = dict(torch_collate.default_collate_fn_map)
        monkeypatch.setitem(collate.default_collate_fn_map, Thing, by_user)
        collate.default_collate([Thing()])
        assert torch_collate.default_collate_fn_map == before

    def test_a_callable_without_a_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Nameless:
            __module__ = None  # type: ignore[assignment]

            def __call__(self, batch: Any, *, collate_fn_map: Any) -> str:
                return "nameless"

        monkeypatch.setitem(torch_collate.default_collate_fn_map, Thing, Nameless())
        assert collate.default_collate([Thing()]) == "nameless"


def test_torchs_two_defaults_are_ours() -> None:
    theirs = [torch_collate.default_collate, torch_collate.default_convert, by_user]
    assert [collate.ours(fn) for fn in theirs] == [collate.default_collate, collate.default_convert, by_user]


class TestTheOracle:
    """The comparison itself must notice what matters, or everything above proves nothing."""

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            ([1], (1,)),
            (1, True),
            (torch.ones(2), torch.ones(2, dtype=torch.float64)),
            (torch.ones(2), torch.ones(2).share_memory_()),
            (torch.ones(2), torch.ones(2).as_subclass(Annotated)),
            ({"a": 1}, {"a": 2}),
            ({"a": [torch.zeros(1)]}, {"a": [torch.ones(1)]}),
            (TypeError("x"), TypeError("y")),
            (TypeError("x"), ValueError("x")),
            (np.ones(2), np.zeros(2)),
        ],
    )
    def test_sees_differences(self, a: Any, b: Any) -> None:
        assert different(a, b) is not None

    def test_runs_both(self) -> None:
        assert outcome(lambda lib: lib.default_collate, TORCH) is torch.utils.data.default_collate
        assert outcome(lambda lib: lib.default_collate, MINIDL) is collate.default_collate
