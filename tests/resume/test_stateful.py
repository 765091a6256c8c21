"""A resumed loader goes on as if nothing had happened: state_dict, load_state_dict, and the states in them."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from kill_resume import Case, Dicey, Epochs, Numbers, Stream, lost_and_repeated, run, whole

import minidl
from minidl.data.fetch import _DatasetKind
from minidl.resume import stateful
from minidl.resume.position import EpochPosition, Position
from minidl.wire.messages import Result, ResumeIteration, WorkerExhausted

CASES = [
    Case("map"),
    pytest.param(Case("map", 2), marks=pytest.mark.live),
    pytest.param(Case("map", 2, persistent=True), marks=pytest.mark.live),
    Case("iterable"),
    Case("iterable with state"),
    Case("iterable with state", state_every=2),
    pytest.param(Case("iterable", 2), marks=pytest.mark.live),
    pytest.param(Case("iterable with state", 2, state_every=4), marks=pytest.mark.live),
    pytest.param(Case("iterable with state", 2, state_every=1, persistent=True), marks=pytest.mark.live),
]


def by_name(case: Any) -> str | None:
    return case.name() if isinstance(case, Case) else None


def resumed(case: Case, state: dict[str, Any]) -> list[Any]:
    """Two epochs of another loader that goes on from `state`, in a program with other random numbers."""
    torch.manual_seed(99)
    with case.loader() as loader:
        loader.load_state_dict(loaded := json.loads(json.dumps(state)))
        loaded["workers"].clear()
        assert loader.state_dict() == state, "it was loaded and not iterated over"
        return [list(loader), list(loader)]


def left_after(loader: Any, count: int) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """The next epoch: its first batches, the state after them, and the batches after that."""
    iterator = iter(loader)
    got = list(itertools.islice(iterator, count))
    return got, loader.state_dict(), list(iterator)


def given(state: dict[str, Any], loader: Any) -> Any:
    """The loader, which goes on from `state`."""
    loader.load_state_dict(state)
    return loader


def in_the_middle(loader: Any) -> dict[str, Any]:
    """The state after the first batch of an epoch that is not gone on with."""
    iterator = iter(loader)
    next(iterator)
    state: dict[str, Any] = loader.state_dict()
    iterator.close()
    return state


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_an_epoch_goes_on_where_it_was_left(case: Case) -> None:
    """Before the first epoch, in it, at its last batch, after it; the next epoch follows as it would have."""
    torch.manual_seed(3)
    with case.loader() as loader:
        states, batches, batch = [loader.state_dict()], [], None
        iterator = iter(loader)
        states.append(loader.state_dict())
        for batch in iterator:
            batches.append(batch)
            states.append(loader.state_dict())
        states.append(loader.state_dict())
        second = list(loader)
    frozen = copy.deepcopy(states)
    third = resumed(case, states[-1])
    assert third[0] == second
    for at in {0, 1, len(batches) // 2 + 1, len(batches) + 1}:
        assert resumed(case, states[at]) == [batches[max(0, at - 1) :], second], f"state number {at}"
    assert states == frozen


@pytest.mark.parametrize(
    "case",
    [
        Case("map", 2, in_order=False),
        Case("iterable with state", 2, state_every=3),
        Case("map", 0),
    ],
    ids=by_name,
)
@pytest.mark.live
def test_a_training_that_is_killed_at_any_moment_gets_each_sample_once(case: Case, tmp_path: Path) -> None:
    got, _ = run(case, tmp_path / "lines", 2, random.Random())
    assert lost_and_repeated(case, [got]) == (0, 0)
    if case.in_order:
        assert got == whole(case)[0]


@pytest.mark.live
def test_two_ranks_are_killed_at_different_moments(tmp_path: Path) -> None:
    case = Case("map", 1, ranks=2)
    ranks = [run(case, tmp_path / str(rank), 1, random.Random(), rank)[0] for rank in range(2)]
    assert lost_and_repeated(case, ranks) == (0, 0)


@pytest.mark.parametrize("at", [2, 99])
def test_generators_draw_what_they_would_have_drawn(at: int) -> None:
    """The loader's, and the sampler's own; from the middle of an epoch, or from its end."""

    def loader(own: bool) -> Any:
        generator = torch.Generator().manual_seed(5)
        if not own:
            return minidl.DataLoader(range(9), 2, shuffle=True, generator=generator, collate_fn=list)
        sampler = minidl.RandomSampler(range(9), num_samples=20, generator=generator)
        return minidl.DataLoader(range(9), 2, sampler=sampler, collate_fn=list, generator=torch.Generator())

    for own in (False, True):
        other = loader(own)
        got, state, left = left_after(loader(own), at)
        list(other)
        assert len(state["random"]["begin"]) == 2 + own, "torch's, and each generator once"
        assert len(list(given(state, minidl.DataLoader(range(9), 2, collate_fn=list)))) == (5 if at == 99 else 3)
        fresh = loader(own)
        epochs = [list(fresh), list(fresh)]
        assert got + left == epochs[0]
        assert list(given(state, other)) == (left or epochs[1])


# --- Where it is used in other ways -----------------------------------------------------------------------------------
def test_what_the_program_draws_before_the_first_next_changes_the_order_and_the_state_knows_it() -> None:
    """As frameworks do, which make the iterators of training and validation first, and then begin."""
    loader: Any = minidl.DataLoader(range(12), 2, shuffle=True, collate_fn=list)
    iterator = iter(loader)
    torch.rand(3)
    next(iterator)
    state = loader.state_dict()
    left, second = list(iterator), list(loader)
    other = given(state, minidl.DataLoader(range(12), 2, shuffle=True, collate_fn=list))
    assert [list(other), list(other)] == [left, second]


def test_a_break_keeps_the_place_and_a_living_iterator_goes_on() -> None:
    """Also a loader that is closed: its iterator ends, and its epoch has not."""
    loader = minidl.DataLoader(range(8), batch_size=2, collate_fn=list)
    for _ in loader:
        break
    state = loader.state_dict()
    iterator: Any = iter(loader)
    next(iterator)
    next(iterator)
    loader.load_state_dict(state)
    assert next(iterator) == [4, 5]
    assert (len(loader), state["batches"]) == (4, 1)
    assert list(loader) == [[2, 3], [4, 5], [6, 7]]
    assert len(list(loader)) == 4
    assert len(list(given({}, loader))) == 4
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert list(iterator) == []
    assert not loader.state_dict()["ended"]
    assert len(list(given(loader.state_dict(), loader))) == 3


@pytest.mark.live
def test_a_persistent_loader_gets_new_workers_for_a_state() -> None:
    with minidl.DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True, collate_fn=list) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        state = loader.state_dict()
        worker = iterator._workers[0]
        assert list(given(state, loader)) == [[2, 3], [4, 5], [6, 7]]
        assert not worker.is_alive()


@pytest.mark.live
def test_a_broken_epoch_of_persistent_workers_leaves_no_state_behind() -> None:
    case = Case("iterable with state", 2, state_every=1, persistent=True)
    with case.loader() as loader:
        for _ in zip(range(3), loader, strict=False):
            pass
        (first,), state, rest = left_after(loader, 1)
    assert [worker["yielded"] for worker in state["workers"]] == [1, 0]
    assert resumed(case, state)[0] == rest
    assert first not in rest


def test_a_loader_that_has_begun_can_be_pickled_and_copied() -> None:
    loader = minidl.DataLoader(Stream(stateful=True))
    next(iter(loader))
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert other._record is None


def test_a_ctrl_c_inside_next_loses_nothing() -> None:
    """What next() did not return comes again; an iterable's samples that are in no batch, too."""

    class Interrupted(minidl.Dataset[int]):
        at = 3

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == self.at:
                self.at = -1
                raise KeyboardInterrupt
            return index

    class InterruptedStream(Stream):
        def __iter__(self) -> Iterator[int]:
            for index in range(6):
                yield Interrupted()[index]

        def state_dict(self) -> dict[str, int]:
            raise AssertionError("it says nothing of samples that are in no batch")

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    for dataset in (Interrupted(), InterruptedStream(stateful=False)):
        loader = minidl.DataLoader(dataset, batch_size=2, collate_fn=list)
        iterator = iter(loader)
        assert next(iterator) == [0, 1]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        state = loader.state_dict()
        Interrupted.at = -1
        assert list(given(state, loader)) == [[2, 3], [4, 5]]
        Interrupted.at = 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.live)])
def test_an_error_counts_as_its_batch(workers: int) -> None:
    loader = minidl.DataLoader([0, 1, "no number", 3], num_workers=workers, collate_fn=_number)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(ValueError, match="invalid literal"):
        next(iterator)
    state = loader.state_dict()
    assert (state["yielded"], state["batches"]) == (3, 2)
    assert next(iterator) == 3
    assert list(given(state, loader)) == [3]


def _number(samples: list[Any]) -> int:
    return int(samples[0])


# --- Random augmentations ---------------------------------------------------------------------------------------------
class Noisy(minidl.Dataset[Any]):
    """Draws from the three global generators of its process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), random.random(), float(np.random.random())


def by_the_readme() -> Any:
    """The dataset that the guide shows, with draws from NumPy's and torch's generators."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "resume.md"
    _, _, rest = guide.read_text().partition("<!-- augmentations -->\n```python\n")
    names: dict[str, Any] = {"minidl": minidl, "np": np, "torch": torch}
    exec(rest.partition("```")[0], names)
    return names["Augmented"](range(12), lambda image, rng: (image, rng.random(), torch.rand(()).item()))


def augmented(dataset: Any, stop: int, then: int | None = None, **options: Any) -> list[list[Any]]:
    """Two epochs, the second of which stops after `stop` batches, and goes on in another loader with `then` workers."""
    torch.manual_seed(3)
    epochs: list[list[Any]] = []
    options = {"batch_size": 2, "shuffle": True, "collate_fn": list} | options
    loader = minidl.DataLoader(dataset, **options)
    for epoch in range(2):
        if hasattr(dataset, "epoch"):
            dataset.epoch.fill_(epoch)
        epochs.append(list(itertools.islice(loader, stop if epoch else None)))
    state = loader.state_dict()
    loader.close()
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(99)
    if then is not None:
        other = minidl.DataLoader(dataset, **options | {"num_workers": then, "persistent_workers": False})
        epochs[1] += list(given(state, other))
    return epochs


@pytest.mark.parametrize(
    ("then", "options"),
    [(0, {"num_workers": 0})]
    + [
        pytest.param(then, options, marks=pytest.mark.live)
        for then, options in (
            (2, {"num_workers": 2, "persistent_workers": True}),
            (0, {"num_workers": 2}),
            (2, {"num_workers": 1}),
        )
    ],
)
def test_augmentations_that_are_seeded_are_those_of_the_whole_run(then: int, options: dict[str, Any]) -> None:
    whole_run = augmented(by_the_readme(), 6, **options)
    assert augmented(by_the_readme(), 2, then, **options) == whole_run
    drawn = {number for epoch in whole_run for batch in epoch for sample in batch for number in sample[1:]}
    assert len(drawn) == 2 * 12 * 2, "each sample has its own, in each epoch"


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.live)])
def test_other_augmentations_are_new_and_the_samples_are_the_same(workers: int) -> None:
    """Without workers, torch's global generator goes on: it is in the state."""
    resumed, whole_run = (
        [sample for batch in augmented(Noisy(), stop, then, num_workers=workers)[1] for sample in batch]
        for stop, then in ((2, workers), (6, None))
    )
    of_index, of_torch, of_random, of_numpy = (
        [mine[part] == theirs[part] for mine, theirs in zip(resumed, whole_run, strict=True)] for part in range(4)
    )
    assert all(of_index)
    assert all(of_torch) == (workers == 0)
    assert not any(of_random[4:] + of_numpy[4:])


# --- States of the user's objects -------------------------------------------------------------------------------------
class Counting(minidl.Dataset[Any]):
    """A map dataset that counts its samples, and says so in each; gives its living state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.state["count"] += 1
        return index, self.state["count"]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Steps(torch.utils.data.Sampler[int]):
    """0, 1, ...; a sampler that knows its place, and how many of its epochs are over."""

    def __init__(self) -> None:
        self.at, self.go_on, self.epoch = 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.go_on = self.go_on, 0
        while self.at < 8:
            self.at += 1
            yield (self.at - 1 + self.epoch) % 8
        self.epoch += 1

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.go_on, self.epoch = state["at"], state["epoch"]


class Rolls(torch.utils.data.Sampler[int]):
    """A sampler whose iterator has a state, without which its numbers cannot be had again."""

    class Dice(Iterator[int]):
        def __init__(self) -> None:
            self.rolls = random.SystemRandom().sample(range(8), 8)

        def __next__(self) -> int:
            if not self.rolls:
                raise StopIteration
            return self.rolls.pop()

        def state_dict(self) -> dict[str, Any]:
            return {"rolls": self.rolls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rolls = list(state["rolls"])

    def __iter__(self) -> Iterator[int]:
        return Rolls.Dice()

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.live)])
def test_the_state_of_a_map_dataset_is_loaded_in_each_worker(workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "batch_size": None, "state_every": 5}
    got, state, left = left_after(minidl.DataLoader(Counting(), **options), 5)
    assert len(left) == 3
    assert list(given(state, minidl.DataLoader(Counting(), **options))) == left
    assert got + left == list(minidl.DataLoader(Counting(), **options))


def test_the_state_of_a_map_dataset_is_loaded_at_an_epochs_end_without_disturbing_the_order() -> None:
    class Drawing(Counting):
        def load_state_dict(self, state: dict[str, int]) -> None:
            super().load_state_dict(state)
            torch.manual_seed(1)

    def loader() -> Any:
        return minidl.DataLoader(Drawing(), batch_size=None, shuffle=True)

    torch.manual_seed(3)
    first = loader()
    list(first)
    state, second = first.state_dict(), list(first)
    assert list(given(state, loader())) == second


class Places(Iterator[int]):
    """Of which `Both` is the dataset; what is loaded is noted."""

    def __init__(self, noted: list[Any]) -> None:
        self.at, self.noted = 0, noted

    def __next__(self) -> int:
        self.at += 1
        if self.at > 5:
            raise StopIteration
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.noted.append(state)


class Both(minidl.IterableDataset[int]):
    """It and its iterator have states."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        self.noted.append("iter")
        return Places(self.noted)

    def state_dict(self) -> str:
        return "a state"

    def load_state_dict(self, state: Any) -> None:
        self.noted.append(state)


def fetcher_of(data: Any) -> Any:
    kind = _DatasetKind.Iterable if isinstance(data, minidl.IterableDataset) else _DatasetKind.Map
    return _DatasetKind.create_fetcher(kind, data, False, _itself, False)


@pytest.mark.parametrize(
    ("over", "dataset", "loads"),
    [
        (False, "dataset's", ["dataset's", "iter", "iterator's"]),
        (True, "dataset's", ["dataset's", "iter"]),
        (False, None, ["iter", "iterator's"]),
        (True, None, ["iter", "iterator's", "iter"]),
    ],
)
def test_the_states_of_a_dataset_and_its_iterator_are_loaded_in_order(over: bool, dataset: Any, loads: Any) -> None:
    data = Both()
    packed = stateful.pack({"dataset": dataset, "iterator": "iterator's", "ended": False})
    stateful.opened(stateful.FetchStart(packed, over), data, lambda: fetcher_of(data))
    assert data.noted == loads


@pytest.mark.parametrize(
    ("data", "every", "kept"),
    [
        (Both(), 0, [6]),
        (Both(), 1, [4, 5, 6, 6]),
        (Both(), 3, [4, 6]),
        (Counting(), 0, [4, 5, 6]),
        (Stream(stateful=True), 2, [5, 6]),
        (Stream(stateful=False), 1, []),
    ],
)
def test_a_worker_sends_states_after_each_every_th_batch_and_at_the_end(data: Any, every: int, kept: list[int]) -> None:
    """Batches before those: 3."""
    fetching = stateful.StatefulFetching(stateful.FetchStart(number=3), every)
    assert fetching.after("no fetcher", 0, "here") == ("no fetcher", None)
    fetcher = fetching.open(data, lambda: fetcher_of(data))
    results = [fetcher.fetch(0) for _ in range(3)] + [WorkerExhausted(0)] * hasattr(fetcher, "dataset_iter")
    states = [state for result in results if (state := fetching.after(result, 0, "here")[1]) is not None]
    assert [number for number, _ in states] == kept
    assert [stateful.unpack(packed)["ended"] for _, packed in states[:-1]] == [False] * len(states[:-1])
    assert not kept or stateful.unpack(states[-1][1])["ended"] == hasattr(fetcher, "dataset_iter")
    with pytest.raises(ZeroDivisionError):
        fetching.open(data, lambda: 1 // 0)
    assert fetching.after("no fetcher", 0, "here") == ("no fetcher", None)


def test_states_are_kept_in_this_process_for_what_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After batches 1, 1 + state_every, ...; also of a resumed epoch."""

    class Interrupted(Both):
        def __iter__(self) -> Iterator[int]:
            iterator = super().__iter__()
            iterator.__class__ = InterruptedPlaces
            return iterator

    class InterruptedPlaces(Places):
        def __next__(self) -> int:
            if self.at == stop:
                raise KeyboardInterrupt
            return super().__next__()

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    told: list[Any] = []
    monkeypatch.setattr(EpochPosition, "keep", lambda position, task, worker: told.append((task, worker)))
    loader = minidl.DataLoader(Interrupted(), None, state_every=2)
    for stop, at, tasks in ((3, 3, [(0, 0), (2, 0)]), (4, 3, [])):
        told.clear()
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        state = loader.state_dict()
        assert (state["workers"][0]["yielded"], state["workers"][0]["at"], told) == (stop, at, tasks)
        loader.load_state_dict(state)
    stop = None
    assert list(loader) == [5]


def test_an_epoch_that_goes_on_with_more_workers_has_a_place_for_each() -> None:
    record = stateful.Record(EpochPosition([Position(yielded=4)], indexed=True))
    followed: list[EpochPosition] = []
    record.goes_on(SimpleNamespace(follow_epoch=followed.append), 3)  # type: ignore[arg-type]
    assert [place.yielded for place in record.position.places] == [4, 0, 0]
    assert followed == [record.position]


def test_a_workers_state_is_kept_unless_it_is_of_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(EpochPosition, "keep", lambda position, task, worker: told.append((task, worker)))
    record = stateful.Record(EpochPosition([Position(yielded=4) for _ in range(2)], indexed=False))
    record.state_came(Result(9, 0, "data", (3, b"stale")), stale=True)
    record.state_came(Result(7, 1, "data", (3, b"state")), stale=False)
    assert told == [(7, 1)]
    assert [place.state for place in record.position.places] == [None, b"state"]
    record.state_came(ResumeIteration(2, 1, b"left"), stale=True)
    assert record.position.places == [Position(yielded=4), Position(state=b"left", over=True)]


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.live)])
def test_only_batches_of_a_stream_are_fetched_again(workers: int, batch_size: int | None) -> None:
    class Asked(list[int]):
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    asked: list[Any] = []
    for data in (Stream(stateful=False), Asked(range(60))):
        loader = minidl.DataLoader(data, batch_size, num_workers=workers, collate_fn=_itself)
        iterator = iter(loader)
        got = [next(iterator) for _ in range(3)]
        got += list(given(loader.state_dict(), loader))
        assert got == [number if batch_size is None else [number] for number in range(60)]
    assert asked == list(range(60)) or workers


@pytest.mark.live
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("dataset", [Dicey, Epochs])
def test_a_datasets_state_is_kept_at_the_ends_of_epochs_and_between(dataset: type[Any], every: int | None) -> None:
    """Of each worker, with and without state_every. torchdata's does the same: tests/clients/test_state.py."""

    def loader() -> Any:
        return minidl.DataLoader(
            dataset(), 2, num_workers=2, persistent_workers=True, state_every=every, collate_fn=list
        )

    with loader() as first:
        list(first)
        at_the_end, second = first.state_dict(), list(first)
        _, between, rest = left_after(first, 3)
        fourth = list(first)
    for state, expected in ((at_the_end, [second]), (between, [rest, fourth])):
        with given(state, loader()) as other:
            assert [list(other) for _ in expected] == expected


@pytest.mark.live
def test_a_dataset_that_fails_to_give_its_state_breaks_nothing_before_the_state_is_asked_for() -> None:
    class Refusing(Dicey):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state today")

    with minidl.DataLoader(Refusing(), 6, num_workers=1, persistent_workers=True, collate_fn=len) as loader:
        assert list(loader) == list(loader) == [6, 6]
        with pytest.raises(RuntimeError, match="has failed to give its state: ValueError: no state today"):
            loader.state_dict()


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("sampler", [Steps, Rolls])
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (0, 3), pytest.param(2, 2, marks=pytest.mark.live)])
def test_the_state_of_a_sampler_or_of_its_iterator_is_honoured(
    sampler: type[Any], batch_size: int | None, workers: int, every: int
) -> None:
    def made() -> Any:
        options: dict[str, Any] = {"num_workers": workers, "batch_size": batch_size, "state_every": every}
        return minidl.DataLoader(range(8), sampler=sampler(), collate_fn=_itself, **options)

    loader = made()
    got, state, rest = left_after(loader, 3)
    second = list(loader)
    assert state["sampler"]["at"] == (1 if every == 3 else 3), "of the draws 1, 1 + every, ..."
    again = given(state, made())
    assert list(again) == rest
    assert sorted(torch.tensor([*got, *rest]).flatten().tolist()) == list(range(8))
    if sampler is Steps:
        assert list(again) == second
        assert next(iter(given(loader.state_dict(), made()))) in ([2, 3], 2)


class Own(Rolls.Dice):
    """A sampler that is its own iterator."""

    def __iter__(self) -> Iterator[int]:
        return self


@pytest.mark.parametrize(("every", "told"), [(None, [1]), (1, [1, 2, 3, 4, 5, 6, 7, 8]), (3, [1, 4, 7])])
def test_a_samplers_states_are_told_after_each_every_th_draw(every: int | None, told: list[int]) -> None:
    """Once, if it is its own iterator."""
    position = EpochPosition([Position()], indexed=True)
    list(stateful.Drawing(Own(), position, every))
    assert [number for number, _ in position.drawn] == told
    state = stateful.unpack(position.drawn[0][1])
    assert (len(state["sampler"]["rolls"]), state["iterator"]) == (7, None)


def _itself(samples: Any) -> Any:
    return samples


@pytest.mark.live
def test_a_state_that_cannot_be_taken_is_the_error_of_its_task() -> None:
    class Refusing(Stream):
        def __init__(self, refusals: int) -> None:
            super().__init__(stateful=False)
            self.refusals = refusals

        def state_dict(self) -> dict[str, int]:
            self.refusals -= 1
            if self.refusals < 0:
                raise ValueError("no state today")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with minidl.DataLoader(Refusing(0), batch_size=30, num_workers=1, state_every=1, collate_fn=len) as loader:
        iterator = iter(loader)
        with pytest.raises(ValueError, match=r"no state today[\s\S]*Task 0: taking the state"):
            next(iterator)
        assert list(iterator) == [30]
    options: Any = {"num_workers": 1, "persistent_workers": True, "state_every": 1, "collate_fn": len}
    with minidl.DataLoader(Refusing(3), batch_size=30, **options) as loader:
        assert list(loader) == [30, 30]
        with pytest.raises(ValueError, match=r"no state today[\s\S]*Epoch 1: taking the state before it"):
            next(iter(loader))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.live)])
def test_a_stream_that_has_ended_is_not_begun_again(workers: int) -> None:
    """With a part of a batch; if it were asked again, it would begin anew."""
    loader = minidl.DataLoader(Epochs(), 4, num_workers=workers, state_every=1, collate_fn=list)
    states = [loader.state_dict() for _ in loader]
    assert list(given(states[-1], loader)) == []


def test_what_fails_while_it_is_fetched_again_has_failed_before() -> None:
    class Holey(minidl.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([0, 1, 2, 3, 4])

    loader = minidl.DataLoader(Holey(), collate_fn=_no_two)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises(ValueError, match="two"):
        next(iterator)
    assert next(iterator) == 3
    assert list(given(loader.state_dict(), minidl.DataLoader(Holey(), collate_fn=_no_two))) == [4]


def _no_two(samples: list[int]) -> int:
    if samples == [2]:
        raise ValueError("two")
    return samples[0]


def test_a_stream_that_has_become_shorter_ends_while_it_is_fetched_again() -> None:
    class Short(minidl.IterableDataset[int]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.count))

    _, state, _ = left_after(minidl.DataLoader(Short(4)), 3)
    assert list(given(state, minidl.DataLoader(Short(1)))) == []


# --- What cannot be resumed -------------------------------------------------------------------------------------------
@pytest.mark.live
def test_a_map_dataset_without_a_state_may_have_another_number_of_workers() -> None:
    torch.manual_seed(3)
    loader = minidl.DataLoader(range(8), num_workers=0, shuffle=True, collate_fn=list)
    iterator = iter(loader)
    got, state = [next(iterator)], loader.state_dict()
    for workers in (2, 1, 0):
        loader = given(state, minidl.DataLoader(range(8), num_workers=workers, shuffle=True, collate_fn=list))
        iterator = iter(loader)
        got.append(next(iterator))
        state = loader.state_dict()
    torch.manual_seed(3)
    assert got + list(iterator) == list(minidl.DataLoader(range(8), shuffle=True, collate_fn=list))


def test_a_state_of_another_loader_is_an_error_at_each_iter() -> None:
    """It is torchdata's kind of error, too."""
    state = in_the_middle(minidl.DataLoader(Stream(stateful=True)))
    other = given(state, minidl.DataLoader(Stream(stateful=True), 4))
    for _ in range(2):
        with pytest.raises(ValueError, match="saved with batch_size 1, and this loader has batch_size 4") as caught:
            iter(other)
        assert isinstance(caught.value, AssertionError)
    with pytest.raises(ValueError, match="saved with num_workers 0, and this loader has num_workers 1"):
        iter(given(state, minidl.DataLoader(Stream(stateful=True), num_workers=1)))
    other = given(state, minidl.DataLoader(range(8)))
    with pytest.raises(ValueError, match="kind 'iterable', and this loader has kind 'map'"):
        iter(other)
    assert len(list(given({}, other))) == 8


@pytest.mark.parametrize(
    ("data", "ended", "sent", "more", "fails"),
    [
        (range(8), False, None, {}, None),
        (range(8), False, {}, {}, "num_workers 2, and this loader has num_workers 0"),
        (Counting(), False, None, {}, "num_workers 2, "),  # the workers' states may still be on their way
        (Counting(), True, None, {}, None),
        (Stream(stateful=True), False, None, {}, "num_workers 2, "),
        (Stream(stateful=True), True, None, {}, None),
        (Stream(stateful=True), True, {}, {"batch_size": 3}, "num_workers 2, batch_size 3, and this loader"),
        (range(8), True, {}, {}, "num_workers 2, "),
    ],
)
def test_a_state_of_two_workers_without_what_belongs_to_one_may_go_on_here(
    data: Any, ended: bool, sent: Any, more: dict[str, Any], fails: str | None
) -> None:
    loader = minidl.DataLoader(data)
    next(iter(loader))
    state = loader.state_dict()
    assert state.pop("batch_size") == 1  # what a state does not say is no difference
    worker = state["workers"][0] | {"state": sent}
    state |= more | {"num_workers": 2, "workers": [worker] * 2, "ended": ended, "turn": 1, "base_seed": 5}
    loader.load_state_dict(state)
    if fails is not None:
        with pytest.raises(ValueError, match=f"saved with {fails}"):
            iter(loader)
    else:
        iter(loader)
        state = loader.state_dict()
        assert (state["batches"], state["turn"], state["base_seed"], len(state["workers"])) == (not ended, 0, 5, 1)


def test_ranks_are_not_mixed_up() -> None:
    """The number of ranks must be the same. Of a map dataset, a rank may go on where another one was."""
    data = range(12)

    def loader(rank: int, ranks: int) -> Any:
        return minidl.DataLoader(data, 2, sampler=minidl.DistributedSampler(data, ranks, rank), collate_fn=list)

    state = in_the_middle(loader(0, 2))
    with pytest.raises(ValueError, match="saved with ranks 2, and this loader has ranks 3"):
        iter(given(state, loader(0, 3)))
    random_states = []
    for one, begins in ((given(state, loader(1, 2)), 1), (loader(1, 2), 0)):
        torch.manual_seed(5)
        assert list(one) == list(loader(1, 2))[begins:]
        random_states.append(torch.get_rng_state())
    assert torch.equal(*random_states), "its own base seed is drawn"
    streamed = minidl.DataLoader(Stream(stateful=False))
    with pytest.raises(ValueError, match="saved with rank 1, and this loader has rank 0"):
        iter(given(in_the_middle(streamed) | {"rank": 1}, streamed))


def test_a_sampler_with_another_seed_would_lose_samples_and_is_an_error_at_iter() -> None:
    """As Lightning's, which takes the seed of the program; in a new epoch, nothing is lost."""

    def loader(seed: int) -> Any:
        sampler = minidl.DistributedSampler(range(12), 2, 1, seed=seed)
        return minidl.DataLoader(range(12), 2, sampler=sampler, collate_fn=list)

    first, other = loader(1), loader(5)
    with pytest.raises(ValueError, match="saved with sampler_seed 1, and this loader has sampler_seed 5: use the same"):
        iter(given(in_the_middle(first), other))
    list(first)
    assert len(list(given(first.state_dict(), other))) == 3
    assert minidl.DataLoader(range(12), None, sampler=first.sampler).state_dict()["sampler_seed"] == 1


def test_the_epoch_that_a_sampler_is_told_after_an_epochs_end_holds() -> None:
    def loader() -> Any:
        return minidl.DataLoader(range(12), 2, sampler=minidl.DistributedSampler(range(12), 2, 1), collate_fn=list)

    first, other, fresh = loader(), loader(), loader()
    list(first)
    other.load_state_dict(first.state_dict())
    for one in (other, fresh):
        one.sampler.set_epoch(1)
    assert list(other) == list(fresh) != list(loader())
    got, state, left = left_after(other, 1)
    assert got + left == list(fresh)
    assert list(given(state, loader())) == left, "in an epoch, the state has its number"


def told(sampler_class: Any, epoch: int) -> Any:
    loader = minidl.DataLoader(range(12), 2, sampler=sampler_class(range(12), 1, 0), collate_fn=list)
    loader.sampler.set_epoch(epoch)
    return loader


@pytest.mark.parametrize("sampler_class", [minidl.DistributedSampler, torch.utils.data.DistributedSampler])
def test_a_sampler_goes_back_to_the_epoch_of_the_state(sampler_class: Any) -> None:
    """Lightning tells it its epoch after iter(), when the workers have drawn; torch's has no state of its own."""
    _, state, left = left_after(told(sampler_class, 1), 1)
    for before_load, after_load in ((0, None), (2, 1), (1, 1)):
        other = given(state, told(sampler_class, before_load))
        if after_load is not None:
            other.sampler.set_epoch(after_load)
        assert list(other) == left
        assert other.sampler.epoch == 1


@pytest.mark.parametrize("sampler_class", [minidl.DistributedSampler, torch.utils.data.DistributedSampler])
def test_a_state_is_not_taken_for_an_epoch_that_the_sampler_was_told_since(sampler_class: Any) -> None:
    """It would leave its beginning out: as where skip_first_batches, on a copy of the loader, has ended its own."""
    one, other = told(sampler_class, 0), told(sampler_class, 0)
    iterator = iter(one)
    next(iterator)
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(1)
    with pytest.raises(ValueError, match=r"in the middle of epoch 0 .* set_epoch\(1\) was called after"):
        iter(other)
    for _ in range(5):
        next(iterator)
    other = given(one.state_dict(), told(sampler_class, 0))
    other.sampler.set_epoch(1)
    assert list(other) == [], "nothing of it is left"
    list(iterator)
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(1)
    assert list(other) == list(told(sampler_class, 1))


class Endless(torch.utils.data.Sampler[int]):
    """Knows no length; is told its epoch."""

    epoch, rank = 0, 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, 12))


def test_a_sampler_without_a_length_is_in_the_middle_of_the_states_epoch() -> None:
    one = minidl.DataLoader(range(12), 2, sampler=Endless(), collate_fn=list)
    other = minidl.DataLoader(range(12), 2, sampler=Endless(), collate_fn=list)
    list(itertools.islice(one, 1))
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(1)
    with pytest.raises(ValueError, match=r"in the middle of epoch 0 "):
        iter(other)
    list(one)
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(2)
    assert list(other) == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]], "the state's epoch is over"


def test_a_state_without_the_samplers_epoch_tells_it_none() -> None:
    state = in_the_middle(minidl.DataLoader(range(12), 2))
    other = minidl.DataLoader(range(12), 2, sampler=Endless(), collate_fn=list)
    other.sampler.set_epoch(4)
    other.load_state_dict(state)
    assert next(iter(other)) == [6, 7]
    stateful.tell_next(other, state)
    assert other.sampler.epoch == 4
    stateful.tell_next(minidl.DataLoader(range(12)), {"sampler_epoch": 0})


def test_the_process_groups_rank_is_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    state = minidl.DataLoader(range(4)).state_dict()
    assert (state["rank"], state["ranks"]) == (3, 4)
    monkeypatch.undo()
    for sampler in (None, Endless()):
        state = minidl.DataLoader(range(4), sampler=sampler).state_dict()
        assert (state["rank"], state["ranks"]) == (0, 1)


def test_what_is_no_state_is_refused() -> None:
    loader = minidl.DataLoader(range(4))
    with pytest.raises(
        TypeError, match=r"expected what minidl.DataLoader.state_dict returned, got a dict with \['1', '2', '3', '4'\]$"
    ):
        loader.load_state_dict(dict.fromkeys("54321"))
    with pytest.raises(TypeError, match=r"got a list$"):
        loader.load_state_dict([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the state has version 99, this minidl reads 1"):
        loader.load_state_dict(loader.state_dict() | {"minidl": 99})
    for wrong in (0, "1"):
        with pytest.raises(ValueError, match="state_every should be a positive number of batches, or None, but got"):
            minidl.DataLoader(range(4), state_every=wrong)  # type: ignore[arg-type]


def test_a_sampler_that_has_become_shorter_is_an_error_at_iter() -> None:
    loader = given(in_the_middle(minidl.DataLoader(range(4))), minidl.DataLoader(range(0)))
    with pytest.raises(ValueError, match="after 1 draws from the sampler, which now gives 0"):
        iter(loader)


@pytest.mark.parametrize(
    ("had", "has", "what", "name"),
    [
        ((Counting(), {}), (Numbers(), {}), "dataset", "Numbers"),
        ((Stream(stateful=True), {}), (Stream(stateful=False), {}), "dataset's iterator", "list_iterator"),
        ((range(8), {"sampler": Steps()}), (range(8), {"sampler": range(8)}), "sampler", "range"),
        ((range(8), {"sampler": Rolls()}), (range(8), {"sampler": range(8)}), "sampler's iterator", "range_iterator"),
    ],
)
def test_a_state_of_an_object_that_has_none_is_an_error(had: Any, has: Any, what: str, name: str) -> None:
    states = [in_the_middle(minidl.DataLoader(had[0], **had[1]))]
    if what == "dataset":
        list(ended := minidl.DataLoader(had[0]))
        states.append(ended.state_dict())
    for state in states:
        loader = given(state, minidl.DataLoader(has[0], **has[1]))
        with pytest.raises(TypeError, match=f"a state of the {what}, and {name} has no .* resume with the {what} that"):
            next(iter(loader))


def test_a_state_before_the_first_epoch_has_the_datasets() -> None:
    data = Counting()
    data.state |= {"count": 100, "more": [1]}
    state = minidl.DataLoader(data).state_dict()
    data.state["more"].append(2)
    at_the_begin = {"dataset": {"count": 100, "more": [1]}, "iterator": None, "ended": False}
    assert state["workers"] == [{"yielded": 0, "at": 0, "over": True, "state": at_the_begin}]
    assert stateful.unpack(stateful.pack(state)) == state
    list(loader := minidl.DataLoader(data, 8))
    state = loader.state_dict()
    data.state["more"].append(3)
    at_the_end = at_the_begin | {"dataset": {"count": 108, "more": [1, 2]}}
    assert state["workers"] == [{"yielded": 0, "at": 0, "over": True, "state": at_the_end}]
    traits = {"kind": "map", "num_workers": 0, "batch_size": 8, "sampler_seed": None}
    assert {name: state[name] for name in traits} == traits
    state = minidl.DataLoader(data, num_workers=2).state_dict()
    assert state["workers"] == [{"yielded": 0, "at": 0, "over": False, "state": None}] * 2
