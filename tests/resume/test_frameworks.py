"""A miniature of Lightning's loops: what the loader reads from them. The real ones: tests/clients/test_state.py."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kill_resume import Stream

import minidl
from minidl.resume import frameworks


def lightnings(module: str, method: str) -> Callable[[Any, Callable[[], Any]], Any]:
    """A method, of a module of Lightning's, that calls what it is given."""
    return method_of(f"lightning.pytorch.loops.{module}", method)


def method_of(module: str, method: str) -> Callable[[Any, Callable[[], Any]], Any]:
    space: dict[str, Any] = {"__name__": module}
    exec(f"def {method}(self, call): return call()", space)
    found: Callable[[Any, Callable[[], Any]], Any] = space[method]
    return found


SAVE = lightnings("fit_loop", "on_save_checkpoint")
ADVANCE = lightnings("fit_loop", "advance")
SET_UP = lightnings("fit_loop", "setup_data")
PREFETCH = lightnings("fetchers", "__iter__")


class Counter(types.SimpleNamespace):
    """A progress; the epoch's and the total's counts are the same here."""

    def __init__(self, ready: int, processed: int, completed: int) -> None:
        counts = types.SimpleNamespace(ready=ready, started=ready, processed=processed, completed=completed)
        super().__init__(current=counts, total=counts, is_last_batch=False)


class Loop:
    """A fit loop in its first epoch, whose fetcher takes a batch ahead."""

    max_epochs = 3

    def __init__(self, loader: Any, *, wrapped: bool = False) -> None:
        self.loader = loader
        seen = types.SimpleNamespace(loader=loader, load_state_dict=loader.load_state_dict) if wrapped else loader
        self.epoch_progress = Counter(1, 0, 0)
        self.epoch_loop = types.SimpleNamespace(batch_progress=Counter(0, 0, 0))
        self._data_fetcher = types.SimpleNamespace(prefetch_batches=1, batches=[])
        self._combined_loader = types.SimpleNamespace(flattened=[seen], limits=None)
        self._combined_loader_states_to_load: list[Any] = []

    def begin(self) -> Iterator[Any]:
        iterator: Iterator[Any] = SET_UP(self, lambda: PREFETCH(self._data_fetcher, lambda: iter(self.loader)))
        return iterator

    def trained(self, batches: int, *, last: bool, in_callback: bool = True) -> None:
        self.epoch_loop.batch_progress = Counter(batches, batches, batches - in_callback)
        self.epoch_loop.batch_progress.is_last_batch = last

    def save(self) -> Any:
        return ADVANCE(self, lambda: SAVE(self, self.loader.state_dict))


def loader(**options: Any) -> Any:
    return minidl.DataLoader(range(6), 2, collate_fn=list, **options)


def goes_on(one: Any, loop: Loop, state: Any) -> list[Any]:
    """What Lightning is given after it has loaded the state, with the counters of the loop that was saved."""
    other = Loop(one)
    other.epoch_loop, other.epoch_progress = loop.epoch_loop, loop.epoch_progress
    one.load_state_dict(state)
    return list(other.begin())


@pytest.mark.parametrize("options", [{}, pytest.param({"num_workers": 1}, marks=pytest.mark.live)])
def test_an_epoch_that_lightning_counts_as_done_is_followed_by_a_whole_one(options: dict[str, Any]) -> None:
    """Saved by the callback after the last batch, before the loader's end is seen; and by one after it."""
    loop = Loop(loader(**options))
    iterator = loop.begin()
    for _ in range(3):
        next(iterator)
    loop.trained(3, last=True)
    assert goes_on(loader(**options), loop, loop.save()) == [[0, 1], [2, 3], [4, 5]]
    loop.trained(3, last=True, in_callback=False)
    assert goes_on(loader(**options), loop, loop.save()) == []


def test_the_sampler_is_told_the_epoch_after_one_that_lightning_counts_as_done() -> None:
    """Lightning tells it after iter(), which is too late for workers."""
    made = [loader(sampler=torch.utils.data.DistributedSampler(range(6), 1, 0)) for _ in range(2)]
    loop = Loop(made[0])
    list(zip(range(3), loop.begin(), strict=False))
    loop.trained(3, last=True)
    assert len(goes_on(made[1], loop, loop.save())) == 3
    assert [one.sampler.epoch for one in made] == [0, 1]


def test_a_batch_that_lightning_has_taken_ahead_comes_again() -> None:
    """Of a stream without a length; and one that no step has learnt from yet, as after an error in it."""
    for stateful in (False, True):
        stream = Stream(stateful=stateful)
        loop = Loop(minidl.DataLoader(stream, 3, collate_fn=list))
        iterator = loop.begin()
        got = [next(iterator) for _ in range(4)]
        loop._data_fetcher.batches = got[3:]
        again = minidl.DataLoader(stream, 3, collate_fn=list)
        for learnt in (2, 3):
            loop.trained(3, last=learnt == 2)
            loop.epoch_loop.batch_progress.current.processed = learnt
            for state in (loop.save(), SAVE(loop, loop.loader.state_dict)):  # the second one as on_exception does it
                assert goes_on(again, loop, state)[0] == got[learnt]


def test_a_state_that_lightning_does_not_load_is_taken_if_its_epoch_is_not_over() -> None:
    loop = Loop(loader())
    next(loop.begin())
    loop.trained(1, last=False)
    state = loop.save()
    for epochs, left in ((0, [[2, 3], [4, 5]]), (1, [[0, 1], [2, 3], [4, 5]])):
        other = Loop(loader(), wrapped=epochs == 0)
        other._combined_loader_states_to_load = [state]
        other.epoch_progress = Counter(epochs, epochs, epochs)
        assert list(other.begin()) == left
        del other._combined_loader_states_to_load
        assert len(list(other.begin())) == 3


@pytest.mark.parametrize(
    ("sized", "limit", "fails"), [(True, 2, True), (True, 3, False), (False, 3, True), (False, math.inf, False)]
)
def test_an_epoch_that_lightning_would_lengthen_is_an_error(sized: bool, limit: float, fails: bool) -> None:
    """Where it loads no state it counts from 0, up to its limit_train_batches; the loader's own end is no limit."""
    make = loader if sized else lambda: minidl.DataLoader(Stream(stateful=True), 3, collate_fn=list)
    loop = Loop(make())
    iterator = loop.begin()
    next(iterator)
    loop.trained(1, last=False)
    other = Loop(make(), wrapped=sized)
    other._combined_loader_states_to_load, left = [loop.save()], list(iterator)
    other._combined_loader.limits = [limit]
    other.epoch_progress = Counter(0, 0, 0)
    if fails:
        with pytest.raises(ValueError, match="lengthen the epoch"):
            other.begin()
    else:
        assert list(other.begin()) == left


def test_a_state_at_an_epochs_end_that_lightning_takes_for_one_in_its_middle_is_an_error() -> None:
    loop = Loop(loader())
    list(loop.begin())
    loop.trained(3, last=True, in_callback=False)
    loop.epoch_progress = Counter(1, 1, 0)
    state = SAVE(loop, loop.loader.state_dict)
    assert (state["epoch"], state["finished"]) == (0, True)
    with pytest.raises(ValueError, match="so it would leave out an epoch"):
        goes_on(loader(), loop, state)
    loop.loader.load_state_dict(state)
    loop.max_epochs = -1
    assert list(loop.begin()) == []


def test_other_callers_are_none_of_lightnings() -> None:
    assert frameworks.saving() is None
    assert frameworks.takes_ahead() == 0
    assert PREFETCH(object(), frameworks.takes_ahead) == 0
    assert PREFETCH(types.SimpleNamespace(prefetch_batches=1), frameworks.takes_ahead) == 2
    for module in ("another.loops.fit_loop", "lightning.pytorch.trainer"):
        assert method_of(module, "on_save_checkpoint")(Loop(loader()), frameworks.saving) is None
    state = loader().state_dict()
    assert frameworks.goes_on(None, state) == (state, False)
    assert SET_UP(Loop(loader()), lambda: frameworks.goes_on(None, {"epoch": None})) == ({"epoch": None}, False)


def test_the_state_of_rank_0_holds_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an iterable dataset: Lightning keeps no other's. Any rank's will do of a map dataset without a state."""
    present: list[int] = [1]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: present[0])
    states: list[Any] = []

    def gather(found: list[Any], state: Any) -> None:
        states.append(state)
        found[: len(states)] = states[::-1]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    left = {}
    for rank in (1, 0):
        present[0] = rank
        loop = Loop(minidl.DataLoader(Stream(rank, 2, stateful=True), 3, collate_fn=list))
        iterator = loop.begin()
        for _ in range(rank + 1):
            next(iterator)
        loop.trained(rank + 1, last=False)
        state, left[rank] = loop.save(), list(iterator)
    for rank in (1, 0):
        present[0] = rank
        assert goes_on(minidl.DataLoader(Stream(rank, 2, stateful=True), 3, collate_fn=list), loop, state) == left[rank]
    assert Loop(loader()).save()["others"] == []


class Kept(list[int]):
    """A map dataset with a state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("rank", "dataset", "warns"),
    [(1, Stream(stateful=True), True), (0, Stream(stateful=True), False), (1, [0], False), (1, Kept([0]), True)],
)
def test_a_state_that_accelerate_will_not_keep_is_said_when_it_is_taken(
    rank: int, dataset: Any, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes that of rank 0; what another rank would be missing at its iter() is an error there."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    save = method_of("accelerate.checkpointing", "save_custom_state")
    one = minidl.DataLoader(dataset, 3, collate_fn=list)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert save(None, one.state_dict)["rank"] == rank
    assert ["saves only rank 0's state" in str(warning.message) for warning in told] == [True] * warns
    assert {warning.filename for warning in told} <= {"<string>"}, "whoever has asked for the state"
    one.state_dict()


def test_a_dataset_that_gives_no_state_at_an_epochs_begin_is_an_error_when_lightning_saves() -> None:
    class Refusing(Stream):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state today")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loop = Loop(minidl.DataLoader(Refusing(stateful=False), 3, collate_fn=list))
    iterator = loop.begin()
    loop._data_fetcher.batches = [next(iterator)]
    with pytest.raises(RuntimeError, match="has failed to give its state: ValueError: no state today"):
        loop.save()
