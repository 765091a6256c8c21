"""The same program on torch's DataLoader and on ours: batches, order, types, errors, warnings, generators, seeds.

`agree(program)` runs `program(lib)` with `torch.utils.data` and with `minidl` in the place of lib, and fails at the
first difference between what was observed. Where the program reaches into worker processes, the datasets of
`workloads` report from there: who served the sample, with which seed, and what it drew from each generator.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
import torch.utils.data
import torch.utils.data.distributed
import workloads as wl
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_twice import different

import minidl

TORCH: Any = torch.utils.data
Program = Callable[[Any], Any]


# --- Observing --------------------------------------------------------------------------------------------------------
def observe(program: Program, lib: Any) -> dict[str, Any]:
    """What a program returned, what it warned of, and the state in which it left the global generators."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        value = program(lib)
    return {
        "value": value,
        "warnings": [(warning.category, str(warning.message), whose(warning.filename)) for warning in caught],
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def whose(filename: str) -> str:
    """Whether a warning points at the user's line or into the library."""
    return "user" if filename == __file__ else "library"


def agree(program: Program, ours: Program | None = None, what: object = "") -> Any:
    """Fail unless both libraries are observed to do the same; return the value. `ours`: another program for minidl."""
    expected, got = observe(program, TORCH), observe(ours or program, minidl)
    difference = different(expected, got)
    assert difference is None, f"{what}\ntorch:  {expected['value']}\nminidl: {got['value']}\ndiffer in {difference}"
    return got["value"]


def steps(loader: Iterable[Any], limit: int = 40) -> list[Any]:
    """One epoch: each batch, or the type and first line of the error that came in its place."""
    seen: list[Any] = []
    try:
        iterator = iter(loader)
    except Exception as error:
        return [("no iterator", type(error), str(error).split("\n")[0])]
    while len(seen) < limit:
        try:
            seen.append(next(iterator))
        except StopIteration as end:
            return seen + ([("end", str(end).split("\n")[0])] if end.args else [])
        except Exception as error:
            seen.append((type(error), str(error).split("\n")[0]))
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()  # not left to the garbage collector, with which torch takes 5 s a worker
    return seen


# --- The grid ---------------------------------------------------------------------------------------------------------
OPTIONS: dict[str, tuple[Any, ...]] = {
    "dataset": ("map", "batched", "stream"),
    "batch_size": (None, 1, 3, 7),
    "drop_last": (False, True),
    "prefetch_factor": (1, 2, 4),
    "num_workers": (1, 3),
    "in_order": (True, False),
    "persistent_workers": (False, True),
    "shuffle": (False, True),
    "worker_init_fn": (None, wl.draw_once),
    "collate_fn": (None, wl.with_chances),
}
DATASETS = {"map": wl.Probe(7), "batched": wl.Batched(7), "stream": wl.Stream(7)}


def allowed(case: dict[str, Any]) -> bool:
    if case["batch_size"] is None and case["drop_last"]:
        return False
    return not (case["dataset"] == "stream" and case["shuffle"])


def covering(options: dict[str, tuple[Any, ...]], together: int) -> list[dict[str, Any]]:
    """Cases such that every allowed choice of `together` options' values is in one of them; picked greedily."""
    names = list(options)
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product(*options.values())]
    random.Random(0).shuffle(cases)
    cases = [case for case in cases if allowed(case)]
    pairs = {id(case): set(itertools.combinations(case.items(), together)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases[:200], key=lambda case: len(pairs[id(case)] & missing))
        if not pairs[id(best)] & missing:
            cases = cases[200:]
            continue
        missing -= pairs[id(best)]
        chosen.append(best)
    return chosen


def epochs(lib: Any, case: dict[str, Any], count: int = 2) -> Any:
    options = case | {"dataset": DATASETS[case["dataset"]]}
    loader = lib.DataLoader(**options)
    seen = [steps(loader) for _ in range(count)]
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
    if case.get("in_order", True) or case["num_workers"] < 2:
        return seen, loader.batch_size, loader.drop_last
    # Which worker gets a map dataset's task is a matter of time; a stream's batches are its worker's own.
    mine = (lambda batch: batch) if case["dataset"] == "stream" else indices_of
    return [sorted(map(repr, map(mine, seen_once))) for seen_once in seen]


def indices_of(batch: Any) -> list[int]:
    """The indices in a batch of Probe's samples, collated or not."""
    if isinstance(batch, (tuple, list)) and len(batch) == 3 and isinstance(batch[0], (list, tuple)):
        batch = batch[0]  # what with_chances has wrapped
    if isinstance(batch, list) and isinstance(batch[0], tuple):
        return [index for index, _, _ in batch]
    return torch.as_tensor(batch[0]).flatten().tolist()  # type: ignore[no-any-return]


GRID = covering(OPTIONS, 2) + random.Random(1).sample(covering(OPTIONS, 3), 24)


@pytest.mark.parametrize("part", range(4))
def test_worker_processes(part: int) -> None:
    """Every pair of options' values at least once, and a sample of what covers every three."""
    for case in GRID[part::4]:
        agree(lambda lib, case=case: epochs(lib, case), what=case)


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}).filter(allowed))
def test_one_process(case: dict[str, Any]) -> None:
    case |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    agree(lambda lib: epochs(lib, case), what=case)


# --- Samplers ---------------------------------------------------------------------------------------------------------
def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(42)


SAMPLING: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda lib: {"batch_size": 3},
    "shuffle": lambda lib: {"shuffle": True},
    "shuffle with a generator": lambda lib: {"shuffle": True, "generator": seeded(), "batch_size": 2},
    "list": lambda lib: {"sampler": [5, 0, 3, 3], "batch_size": 3},
    "numpy": lambda lib: {"sampler": np.array([5, 0, 3]), "batch_size": 2},
    "subset": lambda lib: {"sampler": lib.SubsetRandomSampler([6, 2, 4], generator=seeded()), "batch_size": 2},
    "weighted": lambda lib: {"sampler": lib.WeightedRandomSampler([1, 0, 5, 0, 2], 6), "batch_size": 2},
    "replacement": lambda lib: {"sampler": lib.RandomSampler(range(7), replacement=True, num_samples=9)},
    "batches": lambda lib: {"batch_sampler": [[0], [1, 2], [], [3, 4, 5]], "collate_fn": wl.as_list},
    "batch sampler": lambda lib: {"batch_sampler": lib.BatchSampler(lib.RandomSampler(range(7)), 3, True)},
    "batches as samples": lambda lib: {"batch_size": None, "sampler": [[0, 1], [2, 6]]},
    "used up after one epoch": lambda lib: {"sampler": iter([4, 5, 6])},
    "two replicas": lambda lib: {"sampler": distributed(lib)(wl.Numbers(7), num_replicas=2, rank=1, seed=5)},
    "empty": lambda lib: {"sampler": []},
}


def distributed(lib: Any) -> Any:
    return getattr(lib, "DistributedSampler", None) or lib.distributed.DistributedSampler


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLING)
def test_samplers(name: str, num_workers: int) -> None:
    def program(lib: Any, samplers: Any = None) -> Any:
        loader = lib.DataLoader(wl.Probe(7), num_workers=num_workers, **SAMPLING[name](samplers or lib))
        return [steps(loader), steps(loader), length(loader)]

    agree(program)
    if num_workers == 0:
        agree(program, lambda lib: program(lib, TORCH), "torch's sampler in our loader")
        agree(program, lambda lib: program(TORCH, minidl), "our sampler in torch's loader")


def length(loader: Any) -> Any:
    try:
        return len(loader)
    except TypeError as error:
        return str(error)


def test_keys_that_are_no_integers() -> None:
    data = {"cat": 1, "dog": 2, "emu": 3}
    for workers in (0, 2):
        agree(lambda lib, w=workers: steps(lib.DataLoader(data, sampler=list(data), num_workers=w, batch_size=2)))


# --- Batches of every kind --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_batches_of_everything(strategy: str) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        for batch_size in (None, 2):
            agree(lambda lib, b=batch_size: steps(lib.DataLoader(wl.Mixed(5), batch_size=b, num_workers=2)))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods(method: str) -> None:
    """torch's forked workers say what ours must say however they were started."""

    def program(lib: Any, method: str) -> Any:
        loader = lib.DataLoader(
            wl.Probe(5), 2, num_workers=2, persistent_workers=True, shuffle=True, worker_init_fn=wl.draw_once,
            multiprocessing_context=method,
        )  # fmt: skip
        seen = [steps(loader), steps(loader), loader.multiprocessing_context.get_start_method() == method]
        loader._iterator._shutdown_workers()
        return seen

    agree(lambda lib: program(lib, "fork"), lambda lib: program(lib, method))


# --- Iterating, and not to the end ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_epochs_that_are_broken_off(num_workers: int, persistent: bool) -> None:
    """What was prefetched is dropped, and the next epoch begins at its beginning, with a permutation of its own."""

    def program(lib: Any) -> Any:
        loader = lib.DataLoader(
            wl.Probe(8), 2, shuffle=True, num_workers=num_workers, persistent_workers=persistent
        )  # fmt: skip
        seen = [list(itertools.islice(loader, taken)) for taken in (2, 0, 1, 9)]
        iterator = iter(loader)
        seen.append([next(iterator), iter(iterator) is iterator, len(iterator)])
        if persistent:
            iterator._shutdown_workers()
        return seen

    agree(program)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_iterators_of_one_loader(num_workers: int) -> None:
    agree(lambda lib: list(zip(*[lib.DataLoader(wl.Probe(4), shuffle=True, num_workers=num_workers)] * 2, strict=True)))


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_streams_longer_than_they_say(num_workers: int, persistent: bool) -> None:
    """The warning comes with each batch past the length, in every epoch, and only where the length was asked for."""

    def program(lib: Any, ask: bool, batch_size: int | None) -> Any:
        loader = lib.DataLoader(
            wl.SizedStream(7, 4), batch_size=batch_size, num_workers=num_workers, persistent_workers=persistent
        )
        seen = [len(loader) if ask else None, steps(loader), steps(loader)]
        if persistent:
            loader._iterator._shutdown_workers()
        return seen

    for batch_size in (None, 1):
        ours = observe(lambda lib, b=batch_size: program(lib, True, b), minidl)
        assert [place for _, _, place in ours["warnings"]] == ["user"] * 6
        agree(lambda lib, b=batch_size: program(lib, True, b))
        assert not observe(lambda lib, b=batch_size: program(lib, False, b), minidl)["warnings"]


def test_lengths() -> None:
    def program(lib: Any) -> Any:
        map_style = [
            len(lib.DataLoader(wl.Numbers(7), batch_size=b, drop_last=d))
            for b, d in [(None, False), (1, False), (3, False), (3, True), (7, True), (8, True), (8, False)]
        ]
        streams = [
            len(lib.DataLoader(wl.SizedStream(7, 7), batch_size=b, drop_last=d))
            for b, d in [(None, False), (1, False), (3, False), (3, True), (8, True), (8, False)]
        ]
        unknown = [length(lib.DataLoader(wl.Stream(7))), length(lib.DataLoader({1: 2}, sampler=iter([1])))]
        return map_style, streams, unknown

    agree(program)


# --- Datasets of the other library ------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_workers", [0, 2])
def test_datasets_and_collate_of_the_other_library(num_workers: int) -> None:
    def program(lib: Any, dataset: Any, collate: Any = None) -> Any:
        return steps(lib.DataLoader(dataset, batch_size=2, num_workers=num_workers, collate_fn=collate))

    theirs = torch.utils.data.default_collate
    for dataset in (wl.OurNumbers(), wl.OurStream(7)):
        agree(lambda lib, d=dataset: program(lib, d), what="our dataset")
    agree(lambda lib: program(lib, wl.Stream(7)), lambda lib: program(lib, wl.OurStream(7)), "our sharding")
    agree(lambda lib: program(lib, wl.Mixed(5)), lambda lib: program(lib, wl.Mixed(5), theirs), "torch's collate")
    agree(
        lambda lib: program(lib, wl.Mixed(5)),
        lambda lib: program(TORCH, wl.Mixed(5), minidl.default_collate),
        "our collate in torch's loader",
    )
    built = torch.utils.data.ConcatDataset([wl.Probe(2), minidl.Subset(wl.Probe(9), [8, 3])])
    agree(lambda lib: program(lib, built), what="a mixture")


# --- Errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", wl.ERRORS)
def test_errors_of_every_type(name: str, num_workers: int) -> None:
    """Type and first line are torch's; the batches after the error still come."""
    dataset = wl.Failing(6, wl.ERRORS[name])
    seen = agree(lambda lib: steps(lib.DataLoader(dataset, batch_size=2, num_workers=num_workers)))
    assert len(seen) == 3 or name == "stop"


PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "sample": lambda: {"dataset": wl.Failing(6, wl.SimpleError("one"), at=(0, 5))},
    "unbatched sample": lambda: {"dataset": wl.Failing(6, wl.SimpleError("one")), "batch_size": None},
    "batch": lambda: {"dataset": wl.FailingBatch(4)},
    "collate": lambda: {"dataset": wl.Numbers(6), "collate_fn": wl.failing_collate},
    "default collate": lambda: {"dataset": [1, "text", 2, 3, object(), 4]},
    "unequal tensors": lambda: {"dataset": [torch.zeros(2), torch.zeros(3), torch.zeros(1), torch.ones(1)]},
    "stream": lambda: {"dataset": wl.FailingStream(4, "next"), "batch_size": 1},
    "sampler": lambda: {"dataset": wl.Numbers(9), "sampler": wl.FailingSampler([0, 1, 2])},
    "sampler at once": lambda: {"dataset": wl.Numbers(9), "sampler": wl.FailingSampler([])},
    "sampler's iterator": lambda: {"dataset": wl.Numbers(9), "sampler": wl.NotIterable()},
    "batch sampler": lambda: {
        "dataset": wl.Numbers(99), "batch_size": 1,
        "batch_sampler": wl.FailingSampler([[n] for n in range(9)], KeyError),
    },
    "index beyond the end": lambda: {"dataset": [1, 2, 3], "sampler": [0, 1, 2, 3]},
    "batch sampler of integers": lambda: {"dataset": wl.Numbers(9), "batch_size": 1, "batch_sampler": [1, 2]},
}  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_errors_in_every_place(place: str, num_workers: int) -> None:
    def program(lib: Any) -> Any:
        return steps(lib.DataLoader(**({"batch_size": 2, "num_workers": num_workers} | PLACES[place]())), limit=12)

    seen = agree(program)
    assert any(isinstance(step, tuple) for step in seen)


def test_errors_before_the_first_task() -> None:
    """Of a worker's first task; what comes after it is said more kindly by us, and checked elsewhere."""
    for case in (
        {"dataset": wl.Numbers(6), "worker_init_fn": wl.failing_init},
        {"dataset": wl.FailingStream(6, "iter")},
    ):
        seen = agree(lambda lib, case=case: steps(lib.DataLoader(num_workers=2, **case), limit=2))
        assert [kind for kind, _ in seen] == [wl.SimpleError, wl.SimpleError]
    agree(lambda lib: steps(lib.DataLoader(wl.FailingStream(6, "iter"))))


def test_an_error_is_raised_at_its_turn_and_iteration_goes_on_after_it() -> None:
    dataset = wl.Failing(8, wl.SimpleError("again"), at=(0, 1, 5))

    def program(lib: Any) -> Any:
        loader = lib.DataLoader(dataset, num_workers=2, persistent_workers=True)
        seen = [steps(loader), steps(loader)]
        loader._iterator._shutdown_workers()
        return seen

    seen = agree(program)
    assert [place for place, step in enumerate(seen[1]) if isinstance(step, tuple)] == [0, 1, 5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_generators_are_drawn_from_once_an_epoch(num_workers: int) -> None:
    """A loader with a generator of its own leaves the global one alone; without one it draws a seed from it."""

    def states(lib: Any, generator: torch.Generator | None) -> Any:
        loader = lib.DataLoader(wl.Numbers(3), num_workers=num_workers, generator=generator)
        seen = [torch.get_rng_state(), *(torch.get_rng_state() for _ in loader)]
        return seen, None if generator is None else generator.get_state()

    drawn, _ = agree(lambda lib: states(lib, None))
    assert [torch.equal(drawn[0], state) for state in drawn] == [True, False, False, False]
    untouched, _ = agree(lambda lib: states(lib, seeded()))
    assert all(torch.equal(untouched[0], state) for state in untouched)


def test_the_comparison_can_fail() -> None:
    def shuffled(lib: Any) -> Iterator[Any]:
        return steps(lib.DataLoader(wl.Probe(7), shuffle=lib is minidl))  # type: ignore[return-value]

    with pytest.raises(AssertionError, match="differ in"):
        agree(shuffled)
