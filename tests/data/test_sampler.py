"""Samplers: torch's numbers, torch's use of the random state, at the price of one tensor."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from oracle_twice import agree
from sizes import slow

from minidl.data.sampler import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    permutation,
)

SEEDS = st.tuples(st.booleans(), st.integers(0, 2**40))


def drawn(lib: Any, make: Any, seed: tuple[bool, int], taken: int | None = None) -> Any:
    """Two epochs (of `taken` indices each) and the random states before the first, between them and after.

    seed: whether the sampler gets a generator of its own or draws from the global state, and the seed of either.
    """
    own, number = seed
    generator = torch.Generator().manual_seed(number) if own else None
    if not own:
        torch.manual_seed(number)
    sampler = make(lib, generator)
    trail: list[Any] = [len(sampler)]
    for _ in range(2):
        epoch = iter(sampler)
        trail += [torch.get_rng_state(), generator and generator.get_state()]
        trail += [list(itertools.islice(epoch, taken)), torch.get_rng_state(), generator and generator.get_state()]
    return trail


class TestRandomSampler:
    @given(
        n=st.integers(1, 200),
        num_samples=st.none() | st.integers(1, 300),
        replacement=st.booleans(),
        seed=SEEDS,
        taken=st.none() | st.integers(0, 300),
    )
    def test_numbers_and_states(self, n: int, num_samples: Any, replacement: bool, seed: Any, taken: Any) -> None:
        agree(
            lambda lib: drawn(lib, lambda lib, g: lib.RandomSampler(range(n), replacement, num_samples, g), seed, taken)
        )

    @pytest.mark.parametrize("replacement", [False, True])
    @pytest.mark.parametrize("n", [4095, 4096, 4097, *slow(70_000)])
    def test_sizes_around_a_block(self, n: int, replacement: bool) -> None:
        seed = (True, 7)
        agree(lambda lib: drawn(lib, lambda lib, g: lib.RandomSampler(range(n), replacement, 2 * n + 1, g), seed))

    def test_the_source_is_measured_at_every_epoch(self) -> None:
        def program(lib: Any) -> Any:
            source = [0] * 3
            sampler = lib.RandomSampler(source)
            epoch = iter(sampler)
            source += [0] * 4
            return list(epoch), len(sampler), sampler.num_samples

        epoch, length, num_samples = agree(program)
        assert (sorted(epoch), length, num_samples) == (list(range(7)), 7, 7)

    @pytest.mark.parametrize("replacement", [False, True, 1, None])
    @pytest.mark.parametrize("num_samples", [None, 0, -1, 2.5, True, 5])
    @pytest.mark.parametrize("n", [0, 3])
    def test_what_is_refused_and_when(self, replacement: Any, num_samples: Any, n: int) -> None:
        agree(lambda lib: lib.RandomSampler(range(n), replacement, num_samples))
        agree(lambda lib: list(lib.RandomSampler(range(n), replacement, num_samples)))


class TestOtherSamplers:
    def test_base_class_and_generics(self) -> None:
        agree(lambda lib: list(lib.Sampler()))
        agree(lambda lib: len(lib.Sampler()))
        agree(lambda lib: lib.Sampler([1]))
        assert Sampler[int].__origin__ is Sampler
        assert issubclass(Sampler, torch.utils.data.Sampler)

    @given(n=st.integers(0, 50))
    def test_sequential(self, n: int) -> None:
        agree(lambda lib: [list(lib.SequentialSampler(range(n))), len(lib.SequentialSampler(range(n)))])

    @pytest.mark.heavy
    @given(indices=st.lists(st.integers()) | st.text(), seed=SEEDS, taken=st.none() | st.integers(0, 5))
    def test_subset_random(self, indices: Any, seed: Any, taken: Any) -> None:
        agree(lambda lib: drawn(lib, lambda lib, g: lib.SubsetRandomSampler(indices, g), seed, taken))

    def test_subset_random_gives_the_elements_themselves(self) -> None:
        agree(lambda lib: list(lib.SubsetRandomSampler(torch.arange(5), torch.Generator().manual_seed(0))))

    @given(
        weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), max_size=8),
        num_samples=st.integers(1, 12),
        replacement=st.booleans(),
        seed=SEEDS,
    )
    def test_weighted(self, weights: list[float], num_samples: int, replacement: bool, seed: Any) -> None:
        agree(
            lambda lib: drawn(lib, lambda lib, g: lib.WeightedRandomSampler(weights, num_samples, replacement, g), seed)
        )

    def test_weighted_attributes_and_refusals(self) -> None:
        agree(lambda lib: lib.WeightedRandomSampler([1, 2], 3).weights)
        for weights, num_samples, replacement in (
            *(([1.0], bad, True) for bad in (0, -1, 1.5, True, None)),
            *(([1.0], 1, bad) for bad in (0, None)),
            *((bad, 1, True) for bad in (torch.eye(2), 1.0, [[1.0]])),
        ):
            agree(lambda lib, args=(weights, num_samples, replacement): lib.WeightedRandomSampler(*args))


class TestBatchSampler:
    @given(n=st.integers(0, 30), batch_size=st.integers(1, 12), drop_last=st.booleans())
    def test_batches(self, n: int, batch_size: int, drop_last: bool) -> None:
        agree(lambda lib: list(lib.BatchSampler(range(n), batch_size, drop_last)))
        agree(lambda lib: list(lib.BatchSampler(lib.RandomSampler(range(n + 1)), batch_size, drop_last)))
        agree(lambda lib: len(lib.BatchSampler(range(n), batch_size, drop_last)))

    @pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, None, torch.tensor(2)])
    def test_refused_batch_sizes(self, batch_size: Any) -> None:
        agree(lambda lib: lib.BatchSampler(range(3), batch_size, False))

    @pytest.mark.parametrize("drop_last", [0, None, "yes"])
    def test_refused_drop_last(self, drop_last: Any) -> None:
        agree(lambda lib: lib.BatchSampler(range(3), 1, drop_last))

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_takes_no_more_from_the_sampler_than_torch_does(self, drop_last: bool) -> None:
        def program(lib: Any) -> Any:
            taken: list[int] = []

            def indices() -> Iterator[int]:
                for index in range(7):
                    taken.append(index)
                    yield index

            return [(batch, list(taken)) for batch in lib.BatchSampler(indices(), 3, drop_last)], taken

        agree(program)

    def test_a_sampler_without_length(self) -> None:
        agree(lambda lib: len(lib.BatchSampler(iter("abc"), 2, False)))


class TestInterchange:
    def test_in_torchs_loader(self) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(10))
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        expected = torch.randperm(10, generator=torch.Generator().manual_seed(5)).split(4)
        loader = torch.utils.data.DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=True))
        assert [batch.tolist() for (batch,) in loader] == [batch.tolist() for batch in expected[:2]]
        torchs = torch.utils.data.SequentialSampler(data)
        assert list(BatchSampler(torchs, 4, drop_last=False)) == list(BatchSampler(SequentialSampler(data), 4, False))


class TestCost:
    @pytest.mark.parametrize("n", [0, 1, 2, 1000, 65_537])
    def test_narrow_permutations_draw_the_same_numbers(self, n: int) -> None:
        narrow, wide = torch.Generator().manual_seed(n), torch.Generator().manual_seed(n)
        order = permutation(n, narrow)
        assert order.dtype == torch.int32
        assert order.tolist() == torch.randperm(n, generator=wide).tolist()
        assert torch.equal(narrow.get_state(), wide.get_state())

    def test_a_permutation_of_more_than_int32_can_say_is_wide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "randperm", lambda n, *, generator, dtype: (n, dtype))
        most = 2**31 - 1
        assert [permutation(n, None) for n in (most, most + 1)] == [(most, torch.int32), (most + 1, torch.int64)]

    @pytest.mark.heavy
    @pytest.mark.parametrize("cls", [RandomSampler, SubsetRandomSampler])
    def test_never_a_list_of_n_ints(self, cls: Any) -> None:
        n = 300_000
        sampler = cls(range(n))
        tracemalloc.start()
        try:
            total = sum(sampler)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert total == n * (n - 1) // 2
        assert peak < 2 * n  # bytes of Python objects; a list of n pointers alone takes 8 * n
