"""A loader that chooses its number of workers: what it decides, and that its batches are those of any fixed number."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import math
import multiprocessing.process
import os
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import minidl
from minidl.auto import loading
from minidl.auto.choice import BatchCosts, Choice, Limits, choose
from minidl.check import check
from minidl.tracefile.reader import read_trace

SEEN = BatchCosts(fetch=0.02, send=0, longest=0.02, worker_cpu=0.001, step=0.004, take=0.0, own_cpu=0.001, period=0.02,
                waits=0.016, size=1 << 20, workers=1)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "limits", "workers", "why"),
    [
        ({}, {}, 6, "the training loop limits"),
        ({"longest": 0.1}, {}, 13, "the training loop limits"),  # one slow batch, bridged by two of each other worker
        ({"worker_cpu": 0.02}, {}, 2, "the CPUs limit"),
        ({"worker_cpu": 0.014}, {}, 4, "the CPUs limit"),  # three, and of two workers on the CPUs 0.6 wait
        ({"send": 0.02}, {}, 11, "the training loop limits"),
        ({"fetch": 0.0001, "longest": 0.0001, "take": 0.001}, {}, 0, "to send batches costs more than workers save"),
        ({"fetch": 0.0001, "longest": 0.0001, "take": 0.001}, {"alone": False}, 1, "the training loop limits"),
        ({"fetch": 1.0}, {}, 16, "275 would keep up; 2 CPUs, 8 workers each"),
        ({"fetch": 1.0}, {"cpus": 0.75}, 6, "275 would keep up; 0.75 CPUs, 8 workers each"),
        ({"fetch": 1.0}, {"started": 3}, 3, "275 would keep up; this process may start no more"),
        ({}, {"memory": 30 << 20, "worker_bytes": 8 << 20}, 3, "6 would keep up; memory: 10 MiB a worker, 30 MiB to"),
        ({"size": 1 << 30}, {"memory": 1 << 30}, 0, "6 would keep up; memory: 2,048 MiB a worker, 1,024 MiB to take"),
        ({"size": 1 << 30}, {"memory": 1 << 30, "alone": False}, 1, "6 would keep up; memory: 2,048 MiB a worker"),
    ],
)
def test_the_choice_by_what_is_measured(
    changes: dict[str, float], limits: dict[str, Any], workers: int, why: str
) -> None:
    choice = choose(replace(SEEN, **changes), Limits(**{"cpus": 2.0} | limits), 2, {})  # type: ignore[arg-type]
    assert (choice.workers, why in choice.reason) == (workers, True), choice.reason


def test_no_workers_if_those_that_were_tried_took_longer() -> None:
    seen = replace(SEEN, fetch=0.002, longest=0.002, take=0.002, period=0.006)
    assert choose(replace(seen, period=0.008), Limits(2.0), 2, {}).workers == 0  # the loop took longer than its parts
    assert [choose(seen, Limits(2.0), 2, tried).workers for tried in ({}, {1: 0.007}, {1: 0.005})] == [1, 0, 1]


# --- Batches ----------------------------------------------------------------------------------------------------------
class Numbers(minidl.Dataset[Any]):
    """Samples that are their numbers; the number in `wrong` raises."""

    def __init__(self, wrong: int = -1) -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.wrong:
            raise LookupError(index)
        return torch.tensor(index)


class Shuffled(torch.utils.data.Sampler[int]):
    """An order that no generator of torch's gives again. Counts its epochs."""

    begun = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(random.sample(range(40), 40))


class Shards(minidl.IterableDataset[Any]):
    """Numbers that the workers share."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = minidl.get_worker_info()
        first, each = (0, 1) if info is None else (info.id, info.num_workers)
        return ((number, each) for number in range(first, 40, each))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let loaders choose after three batches what a test says: at each choice the next of some numbers."""

    def tell(*numbers: int) -> None:
        left = list(numbers)
        monkeypatch.setattr(loading, "choose", lambda *_: Choice(left.pop(0) if len(left) > 1 else left[0], "told"))

    for name, value in {"ENOUGH": 3, "ENOUGH_SECONDS": 0, "KEEPS_UP": -1, "say_once": lambda text: None}.items():
        monkeypatch.setattr(loading, name, value)
    return tell


def seeded(num_workers: Any, dataset: Any = None, **options: Any) -> minidl.DataLoader[Any]:
    torch.manual_seed(0)
    random.seed(0)
    options = {"shuffle": True} | options if dataset is None and "sampler" not in options else options
    return minidl.DataLoader(Numbers() if dataset is None else dataset, 2, num_workers=num_workers, **options)


def epochs_of(loader: Any, count: int = 3) -> list[Any]:
    with loader:
        return [batch.tolist() for _ in range(count) for batch in loader]


PERSISTENT = {"persistent_workers": True}
OPTIONS: list[dict[str, Any]] = [{}, PERSISTENT, {"transport": "arena"}, {"timeout": 60}]
SAMPLED = [{"sampler": Shuffled()}, PERSISTENT | {"sampler": Shuffled()}]


@pytest.mark.live
@pytest.mark.parametrize(
    ("chosen", "options"),
    [*itertools.product([(3, 2), (1,)], OPTIONS + SAMPLED), ((0,), {}), ((3,), SAMPLED[0])],
    ids=lambda one: str(one) if isinstance(one, tuple) else "-".join(one) or "plain",
)
def test_batches_come_as_with_any_fixed_number(
    chosen: tuple[int, ...], options: dict[str, Any], told: Callable[..., None]
) -> None:
    """The sampler is also asked as often."""
    told(*chosen)
    begun = getattr(options.get("sampler"), "begun", 0)
    loader = seeded("auto", **options)
    found, after = epochs_of(loader), torch.rand(1)
    asked = getattr(options.get("sampler"), "begun", 0)
    assert found == epochs_of(seeded(2, **options))
    assert after == torch.rand(1)
    assert asked - begun == getattr(options.get("sampler"), "begun", 0) - asked
    assert loader.num_workers in chosen
    assert loader.prefetch_factor == 2


@pytest.mark.live
def test_indices_may_be_arrays_which_no_comparison_tells_apart(told: Callable[..., None]) -> None:
    told(3)
    drawn: Any = [torch.arange(at, at + 2).numpy() for at in range(0, 40, 2)]
    with minidl.DataLoader(Numbers(), num_workers="auto", batch_sampler=drawn) as loader:
        assert [batch.tolist() for batch in loader] == [indices.tolist() for indices in drawn]


@pytest.mark.live
@pytest.mark.parametrize(
    ("taken", "others"),
    [(0, "auto"), (3, 1), (4, "auto"), (5, 0), (11, 1), (19, "auto"), (20, 0), (23, "auto")],
)
def test_a_state_goes_on(taken: int, others: Any, told: Callable[..., None]) -> None:
    told(3)
    whole = epochs_of(seeded(0), 2)
    state: dict[str, Any] = {}
    with seeded("auto") as loader:
        for number, _ in enumerate((batch for _ in range(2) for batch in loader), 1):
            if number == taken + 1:
                state = json.loads(json.dumps(loader.state_dict()))
    resumed = seeded(others)
    resumed.load_state_dict(state)
    assert resumed.num_workers == (1 if others == "auto" else others)
    assert epochs_of(resumed, 2 - taken // 20) == whole[taken + 1 :]


def batches_and_errors(iterator: Any, then: Callable[[], Any] = lambda: None) -> tuple[list[list[int]], list[Any]]:
    """All batches, and for each LookupError what `then` gives."""
    found, errors = [], []
    while True:
        try:
            if (batch := next(iterator, None)) is None:
                return found, errors
            found.append(batch.tolist())
        except LookupError:
            errors.append(then())


@pytest.mark.live
def test_an_error_is_its_batch(told: Callable[..., None]) -> None:
    told(3)
    with seeded("auto", Numbers(wrong=13)) as loader:
        found, (state,) = batches_and_errors(iter(loader), loader.state_dict)
    assert found == [[n, n + 1] for n in range(0, 40, 2) if n != 12]
    assert (state["yielded"], state["batches"], state["num_workers"]) == (7, 6, 3)


@pytest.mark.live
def test_shards_belong_to_a_number_that_changes_between_epochs(told: Callable[..., None]) -> None:
    """Also if the loader goes on from a state that it had in its first epoch."""
    told(3)
    with seeded("auto", Shards()) as loader:
        iterator, begun = iter(loader), loader.num_workers
        first = [next(iterator)]
        state = loader.state_dict()
        first += iterator
        second = list(loader)
        for epoch, workers in ((first, begun), (second, 3)):
            assert sorted(n for numbers, _ in epoch for n in numbers.tolist()) == list(range(40))
            assert {n for _, each in epoch for n in each.tolist()} == {workers}
        assert (begun != 3, loader.num_workers) == (True, 3)
        loader.load_state_dict(state)
        assert [numbers.tolist() for numbers, _ in loader] == [numbers.tolist() for numbers, _ in first[1:]]
        assert loader.num_workers == begun


@pytest.mark.live
def test_an_interrupt_after_the_batch_has_come_loses_none(
    told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(3)
    gets, left = loading.LoopMeter.gets, [KeyboardInterrupt()]

    def interrupted(meter: Any, batch: Any) -> None:
        if left:
            raise left.pop()
        gets(meter, batch)

    monkeypatch.setattr(loading.LoopMeter, "gets", interrupted)
    with seeded("auto", shuffle=False) as loader:
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert loader.state_dict()["yielded"] == 0
        assert next(iterator).tolist() == [0, 1]
        assert loader.state_dict()["yielded"] == 1
        assert [n for batch in iterator for n in batch.tolist()] == list(range(2, 40))


@pytest.mark.live
def test_a_batch_that_an_interrupted_next_has_does_not_silently_go_with_its_workers(
    told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(3)
    with seeded("auto", shuffle=False) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        while not (iterator.follows and iterator._rcvd_idx == iterator._send_idx - 1):
            next(iterator)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(loading.FollowedRecord, "hand_out", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                next(iterator)  # the last batch of these workers
        with pytest.raises(RuntimeError, match="that batch may be lost"):
            next(iterator)


@pytest.mark.live
def test_an_interrupted_choice_is_made_again(told: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    told(3)
    with seeded("auto", shuffle=False) as loader:
        iterator: Any = iter(loader)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(loader._auto, "set", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                list(iterator)
        list(iterator)
        assert (loader.num_workers, iterator._num_workers) == (3, 3)


def test_a_batch_that_holds_itself_has_no_size() -> None:
    batch: list[Any] = []
    batch.append(batch)
    meter = loading.LoopMeter(loading.new_rows(1))
    meter.asks()
    meter.gets(batch)
    assert meter.size == 0


@pytest.mark.live
def test_a_closed_iterator_starts_no_workers(told: Callable[..., None]) -> None:
    told(3)
    loader = seeded("auto")
    iterator: Any = iter(loader)
    while not (iterator.follows and iterator._has_yielded_all()):
        next(iterator)
    loader.close()
    with pytest.raises(StopIteration):
        next(iterator)
    assert iterator.follows


@pytest.mark.live
def test_worker_threads_take_no_memory_of_their_own(told: Callable[..., None]) -> None:
    told(3)
    loader = seeded("auto", worker_method="thread")
    epochs_of(loader, 1)
    assert (loader.num_workers, loader._auto.worker_bytes) == (3, 0)  # type: ignore[union-attr]


class Rolls(Numbers):
    """Random numbers of the workers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


@pytest.mark.live
@pytest.mark.parametrize("options", [{}, PERSISTENT], ids=str)
def test_no_worker_draws_anothers_random_numbers(options: dict[str, Any], told: Callable[..., None]) -> None:
    told(3, 2, 4)
    drawn = epochs_of(seeded("auto", Rolls(), **options))
    assert len({number for batch in drawn for number in batch}) == 120


@pytest.mark.live
@pytest.mark.parametrize("chosen", [1, 3])
def test_workers_that_were_closed_take_no_seed_along(chosen: int, told: Callable[..., None]) -> None:
    told(chosen)
    loaders = [seeded(number, persistent_workers=True) for number in ("auto", 2)]
    torch.manual_seed(0)
    found = [epochs_of(loaders[0], 1) for _ in range(3)]
    torch.manual_seed(0)
    assert found == [epochs_of(loaders[1], 1) for _ in range(3)]


@pytest.mark.live
@pytest.mark.parametrize(
    ("options", "saved_with"), [({}, 0), ({}, 24), ({"timeout": 60}, 0), (PERSISTENT, 24)], ids=str
)
def test_a_map_datasets_state_leaves_the_number_to_the_loader(
    options: dict[str, Any], saved_with: int, told: Callable[..., None]
) -> None:
    told(2)
    whole = epochs_of(seeded(0), 1)
    loader = seeded(0)
    next(iter(loader))
    resumed = seeded("auto", **options)
    resumed.load_state_dict(loader.state_dict() | {"num_workers": saved_with})
    assert resumed.num_workers == 1
    assert epochs_of(resumed, 1) == whole[1:]
    assert resumed.num_workers == 2


@pytest.mark.parametrize(
    "options",
    [{"timeout": 1}, {"persistent_workers": True}, {"worker_init_fn": print}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_need_workers(options: dict[str, Any]) -> None:
    assert not loading.may_be_alone(seeded("auto", **options))
    assert loading.may_be_alone(seeded("auto"))


# --- The choice -------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_the_choice_is_in_the_trace_and_in_the_repr(tmp_path: Path, told: Callable[..., None]) -> None:
    told(3)
    with minidl.trace(tmp_path / "trace"), seeded("auto") as loader:
        for number, _ in enumerate(loader):
            if number in (1, 4, 9, 19):
                loader.state_dict()
    assert "3 workers; prefetch_factor 2; 0 live iterators; made at test_auto.py" in repr(loader)
    assert 'num_workers="auto": told' in repr(loader)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    (chosen,) = trace.select("workers_chosen")
    assert (chosen["x"], chosen["y"], trace.text(chosen)) == (3, 1, "told")
    assert [int(row["x"]) for row in trace.select("state_taken")] == [2, 5, 10, 20]


def test_the_first_choice_is_said_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = seeded("auto")
    for workers in (5, 6):
        loader._auto._take(Choice(workers, f"told {id(loader)}"), loader)  # type: ignore[union-attr]
    assert capfd.readouterr().err.count("5 workers: told") == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = seeded("auto")
    loader._auto._take(Choice(5, "another"), loader)  # type: ignore[union-attr]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("make", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_chooses_again(make: Callable[[Any], Any]) -> None:
    loader = seeded("auto")
    for workers, kept in ((3, 3), (0, 1)):
        loader._auto.set(workers, loader)  # type: ignore[union-attr]
        another = make(loader)
        assert another._auto is not loader._auto
        assert (another.num_workers, another._auto.now) == (kept, kept)
    assert type(loader.state_dict()["num_workers"]) is int


def test_a_loader_that_is_made_with_anothers_number_chooses_again() -> None:
    """As frameworks make one anew, with the attributes of the program's."""
    loader = seeded("auto")
    loader._auto.set(3, loader)  # type: ignore[union-attr]
    another = seeded(loader.num_workers)
    assert another._auto not in (None, loader._auto)
    assert another.num_workers == 1


@pytest.mark.live
@pytest.mark.parametrize(("first", "more"), [(1, 0), (0, 0), (2, 1)])
def test_a_process_that_may_start_no_more_workers(
    first: int, more: int, monkeypatch: pytest.MonkeyPatch, told: Callable[..., None]
) -> None:
    """first: workers that can be started in all, before `fork` fails."""
    told(4)
    whole, left = epochs_of(seeded(0), 1), [first + more]
    start = multiprocessing.process.BaseProcess.start

    def start_some(self: Any) -> None:
        if not left[0]:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left[0] -= 1
        start(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_some)
    loader = seeded("auto")
    assert epochs_of(loader, 1) == whole
    assert loader.num_workers <= max(0, first + more - 1)
    assert "no more could be started: Resource temporarily unavailable" in repr(loader)


@pytest.mark.live
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(("left", "persistent", "number"), [(5, False, 0), (5, True, 1), (6, False, 1), (20, False, 3)])
def test_limits_of_processes_and_threads(
    left: int, persistent: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker needs some of both: the limit is known before one fails in a worker, in a thread that sends a batch."""
    monkeypatch.setattr(loading, "tasks_left", lambda: left)
    loader = seeded("auto", persistent_workers=persistent)
    monkeypatch.setattr(loading.LoopMeter, "measured", lambda meter: replace(SEEN, fetch=1.0))
    assert epochs_of(loader, 1) == epochs_of(seeded(0), 1)
    assert loader.num_workers == number
    assert "this process may start no more" in repr(loader)


class Fails(torch.utils.data.Sampler[list[int]]):
    """Batches of two, in order. Before its ninth, it raises an error `times` times: then, workers are being started."""

    def __init__(self, times: int = 1) -> None:
        self.left, self.drawn = times, 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self.drawn == 8 and self.left:
            self.left -= 1
            raise LookupError("no index")
        if self.drawn == len(self):
            raise StopIteration
        self.drawn += 1
        return [2 * self.drawn - 2, 2 * self.drawn - 1]


class Interrupted(Fails):
    """A generator, which a Ctrl-C ends while it draws the ninth batch."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * number, 2 * number + 1] for number in range(8))
        raise KeyboardInterrupt


def drawing(sampler: Fails, **options: Any) -> minidl.DataLoader[Any]:
    return minidl.DataLoader(Numbers(), batch_sampler=sampler, num_workers="auto", **options)


@pytest.mark.live
@pytest.mark.parametrize("options", [{}, PERSISTENT], ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_a_start_that_fails_loses_no_index(options: dict[str, Any], times: int, told: Callable[..., None]) -> None:
    told(3)
    with drawing(Fails(times), **options) as loader:
        found, errors = batches_and_errors(iter(loader))
    assert found == [[n, n + 1] for n in range(0, 40, 2)]
    assert (len(errors), loader.num_workers) == (times, 3)


@pytest.mark.live
def test_a_sampler_that_an_interrupt_has_ended_is_told_while_workers_start(told: Callable[..., None]) -> None:
    told(3)
    with drawing(Interrupted()) as loader:
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            list(iterator)
        with pytest.raises(RuntimeError, match="the sampler has ended right after an exception"):
            list(iterator)


@pytest.mark.live
def test_a_loader_that_is_closed_after_a_start_that_failed_starts_no_workers(told: Callable[..., None]) -> None:
    told(3)
    loader = drawing(Fails())
    iterator = iter(loader)
    with pytest.raises(LookupError):
        list(iterator)
    loader.close()
    assert next(iterator, None) is None


@pytest.mark.parametrize(
    ("periods", "wanted", "taken"),
    [({}, 5, 5), ({4: 0.02}, 4, 4), ({4: 0.01}, 4, 4), ({4: 0.01}, 5, 5), ({4: 0.03}, 4, 2)],
)
def test_a_number_that_was_tried_is_judged_by_what_it_gave(
    periods: dict[int, float], wanted: int, taken: int, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(wanted)
    loader = seeded("auto")
    auto = loader._auto
    assert auto is not None
    auto.set(2, loader)
    auto.periods = periods
    monkeypatch.setattr(loading.LoopMeter, "measured", lambda self: replace(SEEN, period=0.02))
    auto._correct(loader)
    assert loader.num_workers == taken
    monkeypatch.setattr(loading, "KEEPS_UP", 0.9)  # of 0.02 s, the loop waits 0.016
    told(7)
    auto._correct(loader)
    assert loader.num_workers == taken


@pytest.mark.parametrize(("text", "memory"), [("", None), ("3G", 3 << 30)])
def test_the_budget(text: str, memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_AUTO_BYTES", text)
    loader = seeded("auto")
    limits = loader._auto._limits(loader)  # type: ignore[union-attr]
    assert 0 < limits.memory < math.inf if memory is None else limits.memory == memory
    monkeypatch.setenv("MINIDL_AUTO_BYTES", "much")
    with pytest.raises(ValueError, match="MINIDL_AUTO_BYTES='much': give the bytes that batches and workers may take"):
        seeded("auto")
