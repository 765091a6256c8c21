"""Each rank's share: the Python front end's number for number with torch, the C++ front end's with libtorch."""

from __future__ import annotations

import io
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import oracle_cpp_samplers as cpp
import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from oracle_twice import agree
from sizes import slow

from minidl._libstdcxx import Mt19937, shuffle, uniform_below
from minidl.data import distributed
from minidl.data.distributed import DistributedRandomSampler, DistributedSampler, DistributedSequentialSampler
from minidl.data.sampler import Sampler


class TestDistributedSampler:
    @given(
        n=st.integers(0, 60) | st.integers(4000, 5000),
        num_replicas=st.integers(1, 9) | st.integers(50, 200),
        rank=st.integers(0, 199),
        shuffle=st.booleans(),
        drop_last=st.booleans(),
        seed=st.integers(0, 2**33),
        epochs=st.lists(st.integers(0, 100), max_size=2),
    )
    def test_shares(self, n: int, num_replicas: int, rank: int, epochs: list[int], **options: Any) -> None:
        def program(lib: Any) -> Any:
            sampler = lib.DistributedSampler(range(n), num_replicas, rank % num_replicas, **options)
            trail = [list(sampler), len(sampler), sampler.num_samples, sampler.total_size]
            for epoch in epochs:
                sampler.set_epoch(epoch)
                trail += [list(sampler), sampler.epoch]
            return trail, torch.get_rng_state()

        agree(program)

    @given(sizes=st.tuples(st.integers(0, 20), st.integers(0, 20)), shuffle=st.booleans(), drop_last=st.booleans())
    def test_a_dataset_whose_length_changes(self, sizes: tuple[int, int], **options: Any) -> None:
        def program(lib: Any) -> Any:
            source = [0] * sizes[0]
            sampler = lib.DistributedSampler(source, 3, 1, **options)
            source[:] = [0] * sizes[1]
            try:
                return list(sampler), len(sampler)
            except AssertionError as refusal:
                # Upstream's count of indices is that of a list it has already lengthened: here it is the dataset's.
                return str(refusal).split("(")[0], str(refusal).rsplit("(")[-1]
            except ZeroDivisionError:
                return "nothing to repeat"

        agree(program)

    @pytest.mark.parametrize(("num_replicas", "rank"), [(2, 2), (2, -1), (0, 0), (-1, 0), (1, 5), (None, 0), (2, None)])
    def test_refused_ranks_and_missing_groups(self, num_replicas: Any, rank: Any) -> None:
        agree(lambda lib: lib.DistributedSampler(range(3), num_replicas, rank))

    def test_changed_attributes(self) -> None:
        def program(lib: Any) -> Any:
            sampler = lib.DistributedSampler(range(10), 3, 1)
            sampler.num_replicas = 2
            return list(sampler)

        agree(program)

    def test_defaults_come_from_the_process_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
        agree(lambda lib: list(lib.DistributedSampler(range(10))))
        assert list(DistributedSampler(range(10), shuffle=False)) == [2, 5, 8, 1]
        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
        agree(lambda lib: lib.DistributedSampler(range(10)))
        agree(lambda lib: lib.DistributedSampler(range(10), num_replicas=2))
        agree(lambda lib: list(lib.DistributedSampler(range(10), num_replicas=2, rank=0)))

    def test_the_epoch_counts_when_iter_is_called(self) -> None:
        def program(lib: Any) -> Any:
            sampler = lib.DistributedSampler(range(20), 2, 0)
            begun = iter(sampler)
            sampler.set_epoch(5)
            return list(begun), list(sampler)

        agree(program)

    def test_is_a_generic_sampler(self) -> None:
        assert issubclass(DistributedSampler, Sampler)
        assert DistributedSampler[int].__origin__ is DistributedSampler


class TestLibstdcxx:
    def test_the_generator_meets_the_standards_own_example(self) -> None:
        draw = Mt19937(5489)  # [rand.predef]: the 10000th number of a default-constructed std::mt19937
        assert [draw() for _ in range(10_000)][-1] == 4_123_659_995

    def test_a_seed_counts_modulo_32_bits(self) -> None:
        assert Mt19937(7)() == Mt19937(7 + 2**32)() != Mt19937(8)()

    @pytest.mark.parametrize(
        ("bound", "draws", "expected"),
        [
            (1, [2**32 - 1], 0),
            (2**31, [0], 0),  # a power of two leaves no surplus: nothing is redrawn
            (2**31, [2**32 - 1], 2**31 - 1),
            (3, [0, 2**31], 1),  # 2**32 % 3 is 1: of slot 0 exactly the draw 0 goes
            (3, [1], 0),
            (2**31 + 1, [0, 2, 1], 0),  # surplus 2**31 - 1: the worst bound, nearly half of all draws go
        ],
    )
    def test_uniform_below_redraws_exactly_the_surplus(self, bound: int, draws: list[int], expected: int) -> None:
        numbers = iter(draws)
        assert uniform_below(bound, lambda: next(numbers)) == expected
        assert list(numbers) == []

    def test_too_many_items_are_refused(self) -> None:
        class Endless(list[int]):
            def __len__(self) -> int:
                return 2**32

        with pytest.raises(ValueError, match="4294967296 items"):
            shuffle(Endless(), Mt19937(0))


class TestCppSamplers:
    @pytest.mark.heavy
    @pytest.mark.parametrize("largest", [70_000, *slow(1_000_003)])
    def test_recorded_answers_of_libtorch(self, largest: int) -> None:
        """Blocks of all ranks, with and without duplicates; shuffles; saved and loaded positions; two ways to draw."""
        assert list(cpp.RECORDED) == list(cpp.scripts())
        for script, answers in cpp.RECORDED.items():
            if int(script.split()[1]) <= largest:
                assert cpp.ours(script) == answers, script

    @pytest.mark.skipif(cpp.why_not_compiled() is not None, reason=str(cpp.why_not_compiled()))
    @pytest.mark.timeout(300)
    @pytest.mark.live
    @pytest.mark.slow
    def test_libtorch_itself(self, tmp_path: Path) -> None:
        program, file = cpp.compiled(tmp_path), tmp_path / "saved.pt"
        assert cpp.libtorch(program, cpp.RECORDED) == list(cpp.RECORDED.values())
        asked = [_script_at_random(random.Random(seed)) for seed in range(300)]
        assert cpp.libtorch(program, asked) == [cpp.ours(script) for script in asked]
        answers = cpp.libtorch(program, [f"random 20 2 1 1 e3 r n4 w{file} n100"])
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # torch.jit is deprecated, but it is what C++ writes
                warnings.simplefilter("ignore", kind)
            archive = dict(torch.jit.load(file).named_buffers())
        sampler = DistributedRandomSampler(20, 2, 1)
        sampler.load(archive)
        assert (sampler.index(), sampler.epoch()) == (14, 3)
        assert answers[0].split()[-1] == f"[{','.join(map(str, sampler.next(100) or []))}]"

    @pytest.mark.parametrize("kind", [DistributedRandomSampler, DistributedSequentialSampler])
    def test_one_rank_by_default_and_no_index_at_a_time(self, kind: Any) -> None:
        sampler = kind(5)
        assert sampler.next(0) == []
        assert sorted(sampler.next(1) + sampler.next(9)) == [0, 1, 2, 3, 4]
        archive: dict[str, torch.Tensor] = {}
        sampler.save(archive)
        sampler.load(archive)  # also at the end
        assert sampler.next(1) is None

    def test_an_archive_runs_no_code(self) -> None:
        file = io.BytesIO()
        torch.save({"sample_index_": torch.tensor(0), "more": Path()}, file)
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            DistributedSequentialSampler(5).load(file)

    @pytest.mark.parametrize("kind", [DistributedRandomSampler, DistributedSequentialSampler])
    @pytest.mark.parametrize("place", ["dict", "path", "file"])
    def test_saved_and_continued(self, kind: Any, place: str, tmp_path: Path) -> None:
        archive: Any = {"dict": {}, "path": tmp_path / "sampler.pt", "file": io.BytesIO()}[place]
        sampler, other = kind(20, 2, 1), kind(20, 2, 1)
        sampler.set_epoch(4)
        sampler.reset()
        sampler.next(3)
        sampler.save(archive)
        if place == "file":
            archive.seek(0)
        other.load(archive)
        assert other.index() == sampler.index() == 13
        assert other.epoch() == (4 if kind is DistributedRandomSampler else 0)
        rest = other.next(100)
        assert rest == sampler.next(100)
        assert {type(index) for index in rest} == {int}

    def test_the_archive_holds_what_the_cpp_archive_holds(self) -> None:
        archive: dict[str, torch.Tensor] = {}
        DistributedRandomSampler(5).save(archive)
        assert {name: (value.dtype, value.shape) for name, value in archive.items()} == {
            "sample_index_": (torch.int64, ()),
            "epoch_": (torch.int64, ()),
        }

    def test_a_position_of_another_run_is_refused_and_changes_nothing(self) -> None:
        archive = {"sample_index_": torch.tensor(11), "epoch_": torch.tensor(9)}
        sampler = DistributedRandomSampler(20, 2, 0)
        untouched = DistributedRandomSampler(20, 2, 0)
        with pytest.raises(ValueError, match=r"RandomSampler\.load: position 11 is past this rank's block.*at 10"):
            sampler.load(archive)
        with pytest.raises(KeyError, match="epoch_"):
            sampler.load({"sample_index_": torch.tensor(2)})
        assert (sampler.epoch(), sampler.next(99)) == (0, untouched.next(99))

    def test_what_is_refused(self) -> None:
        for kind in (DistributedRandomSampler, DistributedSequentialSampler):
            for replicas, rank in ((0, 0), (2, 2), (2, -1)):
                interval = rf"\[0, {replicas - 1}\]"
                with pytest.raises(ValueError, match=f"Invalid rank {rank}, rank should be in the interval {interval}"):
                    kind(5, replicas, rank)
            with pytest.raises(ValueError, match=f"{kind.__name__}: size must be 0 or more, got -1"):
                kind(-1)
            with pytest.raises(ValueError, match=f"{kind.__name__}.next: batch_size must be 0 or more, got -2"):
                kind(5).next(-2)


def _script_at_random(rng: random.Random) -> str:
    replicas = rng.randint(1, 6)
    steps = [
        rng.choice(["i", "r", f"r{rng.randint(0, 400)}", f"e{rng.randint(0, 9)}", *[f"n{rng.randint(0, 90)}"] * 4])
        for _ in range(12)
    ]
    size = rng.choice([*[rng.randint(0, 400)] * 9, rng.randint(60_000, 70_000)])  # the large ones take 20 ms each
    kind = rng.choice(["random", "sequential"])
    return f"{kind} {size} {replicas} {rng.randrange(replicas)} {rng.randint(0, 1)} {' '.join(steps)} s n5 l n5"


def test_a_share_is_permuted_once_an_epoch_and_anew_when_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    permute = distributed.permutation

    def counted(n: int, generator: torch.Generator) -> torch.Tensor:
        seeds.append(generator.initial_seed())
        return permute(n, generator)

    monkeypatch.setattr(distributed, "permutation", counted)
    ours = DistributedSampler(range(103), num_replicas=4, rank=1)
    theirs = torch.utils.data.DistributedSampler(range(103), num_replicas=4, rank=1)
    for change in ({}, {"epoch": 1}, {"seed": 7}, {"rank": 2}, {"epoch": 0}, {"seed": 8, "epoch": 1}):
        for name, value in change.items():
            setattr(ours, name, value)
            setattr(theirs, name, value)
        assert list(ours) == list(ours) == list(theirs)
    assert seeds == [0, 1, 8, 8, 7, 9]


def test_a_state_is_an_epoch_and_a_position() -> None:
    def sampler() -> DistributedSampler[int]:
        return DistributedSampler(range(20), num_replicas=2, rank=1)

    saved = sampler()
    assert saved.state_dict() == {"epoch": 0, "yielded": 0}
    saved.set_epoch(3)
    whole = list(saved)
    indices = iter(saved)
    assert [next(indices) for _ in range(4)] == whole[:4]
    state = saved.state_dict()
    assert state == {"epoch": 3, "yielded": 4}
    for loaded in (state, {"yielded": 4}):  # torchdata's StatefulDistributedSampler saves no epoch
        other = sampler()
        other.set_epoch(3)
        other.load_state_dict(loaded)
        assert other.state_dict() == state, "it was loaded and not iterated over"
        assert list(other) == whole[4:]
        assert list(other) == whole
    fresh = sampler()
    fresh.load_state_dict({"epoch": 5, "yielded": 0})
    assert fresh.state_dict() == {"epoch": 5, "yielded": 0}
    for wrong in ({}, {"yielded": -1}, {"yielded": "4"}):
        with pytest.raises(ValueError, match="expected a number of indices as 'yielded', got"):
            sampler().load_state_dict(wrong)
