"""Datasets behave as torch's do, and either library takes the other's."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import example, given
from hypothesis import strategies as st
from oracle_twice import MINIDL, TORCH, agree

from minidl.data import worker_info
from minidl.data.dataset import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)


class Squares:
    """Map-style by duck typing: neither library's class."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return [i * i for i in index] if isinstance(index, list) else range(self.n)[index] ** 2


class BatchedSquares(Squares):
    """Fetches a whole batch at once, `extra` items too many."""

    def __init__(self, n: int, extra: int = 0) -> None:
        super().__init__(n)
        self.extra = extra
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(indices)
        return [i * i for i in indices] + [0] * self.extra


def stream_of(lib: Any, items: Any, with_length: bool = True) -> Any:
    class Stream(lib.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return iter(items)

    class SizedStream(Stream):
        def __len__(self) -> int:
            return len(items)

    return (SizedStream if with_length else Stream)()


class TestBaseClasses:
    def test_what_a_subclass_left_out_is_missing_as_in_torch(self) -> None:
        agree(lambda lib: lib.Dataset()[0])
        agree(lambda lib: len(lib.Dataset()))
        agree(lambda lib: lib.IterableDataset())
        assert not hasattr(Dataset, "__getitems__")
        assert not hasattr(Dataset, "__len__")

    def test_generic_as_in_torch(self) -> None:
        for cls in (Dataset, IterableDataset, ConcatDataset, Subset, StackDataset):
            assert cls[int].__origin__ is cls

    def test_every_method_is_minidls(self) -> None:
        for cls in (Dataset, IterableDataset, TensorDataset, StackDataset, ConcatDataset, ChainDataset, Subset):
            for name in ("__getitem__", "__getitems__", "__add__", "__len__", "__init__"):
                method = getattr(cls, name, None)
                assert not getattr(method, "__module__", "").startswith("torch"), f"{cls.__name__}.{name}"

    @pytest.mark.parametrize("kind", ["ConcatDataset", "ChainDataset"])
    def test_a_class_beside_ours_is_made_too(self, kind: str) -> None:
        class Marked:
            def __init__(self) -> None:
                self.marked = True

        agree(lambda lib: type("Both", (getattr(lib, kind), Marked), {})([]).marked)
        agree(lambda lib: type("Both", (getattr(lib, kind), Marked), {})([range(2)]).marked)

    def test_adding_maps_concatenates_and_adding_streams_chains(self) -> None:
        agree(lambda lib: list(lib.TensorDataset(torch.arange(3)) + lib.TensorDataset(torch.arange(2))))
        agree(lambda lib: list(stream_of(lib, range(3)) + stream_of(lib, "ab")))
        agree(lambda lib: lib.TensorDataset(torch.arange(3)) + lib.TensorDataset(torch.arange(2)))
        agree(lambda lib: stream_of(lib, range(3)) + stream_of(lib, "ab"))


class TestTensorDataset:
    @pytest.mark.parametrize("index", [0, 2, -1, 3, slice(1, 3), [2, 0], torch.tensor([1, 1])])
    def test_indexing(self, index: Any) -> None:
        agree(lambda lib: lib.TensorDataset(torch.arange(3), torch.eye(3))[index])

    @pytest.mark.parametrize("sizes", [(), (3,), (3, 3), (3, 2), (0,)])
    def test_sizes(self, sizes: tuple[int, ...]) -> None:
        agree(lambda lib: len(lib.TensorDataset(*(torch.zeros(size, 2) for size in sizes))))


class TestStackDataset:
    @pytest.mark.parametrize("index", [0, -1, 5])
    def test_samples_are_tuples_or_dicts(self, index: int) -> None:
        agree(lambda lib: lib.StackDataset(Squares(4), range(4))[index])
        agree(lambda lib: lib.StackDataset(x=Squares(4), y=range(4))[index])

    @pytest.mark.parametrize("indices", [[], [0], [3, 1, 1], [9]])
    @pytest.mark.parametrize("extra", [0, 1])
    def test_batches_use_the_members_own_getitems(self, indices: list[int], extra: int) -> None:
        def program(lib: Any, **as_dict: Any) -> Any:
            batched = BatchedSquares(4, extra)
            members = {"x": Squares(4), "y": batched}
            stacked = lib.StackDataset(**members) if as_dict else lib.StackDataset(*members.values())
            return stacked.__getitems__(indices), batched.asked

        agree(program)
        agree(lambda lib: program(lib, as_dict=True))

    def test_what_is_refused(self) -> None:
        agree(lambda lib: lib.StackDataset())
        agree(lambda lib: lib.StackDataset(range(3), y=range(3)))
        agree(lambda lib: lib.StackDataset(range(3), range(4)))
        agree(lambda lib: lib.StackDataset(x=range(3), y=range(4)))
        agree(lambda lib: lib.StackDataset(iter("ab")))

    def test_length_and_attribute(self) -> None:
        agree(lambda lib: len(lib.StackDataset(range(3), range(3))))
        agree(lambda lib: lib.StackDataset(range(3), range(3)).datasets)
        agree(lambda lib: lib.StackDataset(x=range(3)).datasets)


class TestConcatDataset:
    @given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5), index=st.integers(-25, 25))
    @example(sizes=[2, 3], index=-1)
    @example(sizes=[2, 3], index=-6)
    def test_every_index_falls_where_torch_lets_it_fall(self, sizes: list[int], index: int) -> None:
        agree(lambda lib: lib.ConcatDataset([Squares(size) for size in sizes])[index])
        agree(lambda lib: lib.ConcatDataset([Squares(size) for size in sizes]).cumulative_sizes)
        agree(lambda lib: len(lib.ConcatDataset(Squares(size) for size in sizes)))

    def test_what_is_refused(self) -> None:
        agree(lambda lib: lib.ConcatDataset([]))
        agree(lambda lib: lib.ConcatDataset([Squares(2), stream_of(lib, range(3))]))
        agree(lambda lib: lib.ConcatDataset.cumsum(["ab", "c"]))

    def test_the_misspelt_name_warns_at_the_callers_line(self) -> None:
        sizes, warned = agree(lambda lib: lib.ConcatDataset([Squares(2), Squares(3)]).cummulative_sizes)
        assert sizes == [2, 5]
        assert [(category, file) for category, _, file in warned] == [(FutureWarning, __file__)]


class TestChainDataset:
    def test_streams_one_after_another(self) -> None:
        agree(lambda lib: list(lib.ChainDataset([stream_of(lib, range(2)), stream_of(lib, "ab")])))
        agree(lambda lib: len(lib.ChainDataset([stream_of(lib, range(2)), stream_of(lib, "ab")])))
        agree(lambda lib: list(lib.ChainDataset(stream_of(lib, [n]) for n in range(3))))
        agree(lambda lib: list(lib.ChainDataset([])))

    def test_a_map_is_refused_when_its_turn_comes(self) -> None:
        def program(lib: Any) -> Any:
            seen: list[Any] = []
            try:
                seen.extend(item for item in lib.ChainDataset([stream_of(lib, range(2)), Squares(3)]))
            except AssertionError as refusal:
                return seen, str(refusal)

        agree(program)
        agree(lambda lib: len(lib.ChainDataset([Squares(3)])))
        agree(lambda lib: len(lib.ChainDataset([stream_of(lib, range(2), with_length=False)])))


class TestSubset:
    @pytest.mark.parametrize("index", [0, -1, 3, [0, 2]])
    def test_indexing(self, index: Any) -> None:
        agree(lambda lib: lib.Subset(Squares(10), [7, 1, 4])[index])
        agree(lambda lib: len(lib.Subset(Squares(10), [7, 1, 4])))

    @pytest.mark.parametrize("cls", [Squares, BatchedSquares])
    def test_batches(self, cls: type[Squares]) -> None:
        source = cls(10)
        assert Subset(source, [7, 1, 4]).__getitems__([2, 0]) == [16, 49]
        assert getattr(source, "asked", [[4, 7]]) == [[4, 7]]
        agree(lambda lib: lib.Subset(cls(10), [7, 1, 4]).__getitems__([2, 0]))
        agree(lambda lib: lib.Subset(cls(10), [7, 1, 4]).__getitems__([3]))

    @pytest.mark.parametrize("overridden", [[], ["__getitem__"], ["__getitems__"], ["__getitem__", "__getitems__"]])
    def test_overriding_only_getitem_is_refused(self, overridden: list[str]) -> None:
        def program(lib: Any) -> Any:
            cls = type("Mine", (lib.Subset,), {name: lambda self, index: index for name in overridden})
            return cls(Squares(10), [1]).__getitems__([0])

        refused = isinstance(agree(program), NotImplementedError)
        assert refused == (overridden == ["__getitem__"])


class TestRandomSplit:
    @given(
        n=st.integers(0, 30),
        lengths=st.lists(st.integers(0, 12), max_size=4)
        | st.lists(st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0, 1.5, -0.5]), max_size=4),
        complete=st.booleans(),
        seed=st.none() | st.integers(0, 5),
    )
    def test_same_parts_same_warnings_same_state(self, n: int, lengths: list[Any], complete: bool, seed: int) -> None:
        if complete and lengths:  # otherwise few examples would add up
            lengths = lengths + [(1 if isinstance(lengths[0], float) else n) - sum(lengths)]

        def program(lib: Any) -> Any:
            given_one = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
            parts = lib.random_split(Squares(n), lengths, **given_one)
            state = torch.get_rng_state() if seed is None else given_one["generator"].get_state()
            return parts, [part.indices for part in parts], state

        agree(program)

    def test_parts_are_of_the_dataset_and_fractions_of_more_than_1_are_no_fractions(self) -> None:
        source = Squares(4)
        assert [part.dataset is source for part in random_split(source, [0.5, 0.5])] == [True, True]  # type: ignore[arg-type]
        agree(lambda lib: lib.random_split(Squares(4), [0.5, 0.5 + 2**-52]))
        agree(lambda lib: lib.random_split(Squares(4), [-0.5, 1.5]))

    def test_a_warning_points_at_the_caller(self) -> None:
        with pytest.warns(UserWarning, match="Length of split at index 1 is 0") as caught:
            random_split(Squares(1), [0.5, 0.5])
        assert caught[0].filename == __file__


class Shard(IterableDataset[int]):
    """Shares 0..n-1 out among the workers by minidl's worker information."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = worker_info.get_worker_info()
        assert info is not None
        assert info.dataset is self
        return iter(range(info.id, self.n, info.num_workers))


class TestInterchange:
    def test_torchs_checks_accept_ours(self) -> None:
        stream = stream_of(MINIDL, range(3))
        assert isinstance(stream, torch.utils.data.IterableDataset)
        assert isinstance(stream, Dataset)
        assert isinstance(TensorDataset(torch.arange(2)), torch.utils.data.Dataset)
        assert not isinstance(TensorDataset(torch.arange(2)), torch.utils.data.IterableDataset)

    def test_torchs_loader_loads_ours(self) -> None:
        tensors = TensorDataset(torch.arange(5), torch.arange(5.0))
        expected = list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors.tensors), batch_size=2))
        found = list(torch.utils.data.DataLoader(tensors, batch_size=2))
        assert all(torch.equal(x, y) for a, b in zip(expected, found, strict=True) for x, y in zip(a, b, strict=True))
        stream = torch.utils.data.DataLoader(stream_of(MINIDL, range(5)), batch_size=2)
        assert [batch.tolist() for batch in stream] == [[0, 1], [2, 3], [4]]

    @pytest.mark.live
    def test_our_worker_information_answers_in_torchs_workers(self) -> None:
        loader = torch.utils.data.DataLoader(Shard(6), batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert sorted(loader) == [0, 1, 2, 3, 4, 5]

    def test_each_takes_the_others(self) -> None:
        torchs, ours = torch.utils.data.TensorDataset(torch.arange(3)), TensorDataset(torch.arange(2))
        torchs_stream, our_stream = stream_of(TORCH, "ab"), stream_of(MINIDL, "c")
        both = [ConcatDataset([torchs, ours]), torch.utils.data.ConcatDataset([torchs, ours]), torchs + ours]
        assert list(map(list, both)) == [[(0,), (1,), (2,), (0,), (1,)]] * 3
        assert list(pickle.loads(pickle.dumps(both[0]))) == list(both[0])
        for chain in (ChainDataset, torch.utils.data.ChainDataset):
            assert list(chain([torchs_stream, our_stream])) == ["a", "b", "c"]
        assert len(ChainDataset([torchs_stream])) == 2
        for concat, stream in ((ConcatDataset, torchs_stream), (torch.utils.data.ConcatDataset, our_stream)):
            with pytest.raises(AssertionError, match="ConcatDataset does not support IterableDataset"):
                concat([torchs, stream])


class TestWorkerInfo:
    def test_fields_defaults_and_repr_are_those_of_torch_2_13(self) -> None:
        missing = dataclasses.MISSING
        assert [(field.name, field.default) for field in dataclasses.fields(worker_info.WorkerInfo)] == [
            *(("id", missing), ("num_workers", missing), ("seed", missing), ("dataset", missing)),
            *(("rng", None), ("worker_method", "multiprocessing")),
        ]
        assert repr(worker_info.WorkerInfo(id=1, num_workers=2, seed=3, dataset=[4])) == (
            "WorkerInfo(id=1, num_workers=2, seed=3, dataset=[4], rng=None, worker_method='multiprocessing')"
        )

    def test_cannot_be_changed_or_extended(self) -> None:
        info = worker_info.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
        with pytest.raises(dataclasses.FrozenInstanceError):
            info.id = 1  # type: ignore[misc]
        assert not hasattr(info, "__dict__")

    def test_none_in_the_main_process_and_settable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert worker_info.get_worker_info() is None
        monkeypatch.setattr(worker_info, "_worker_info", "x")
        assert worker_info.get_worker_info() == "x"
