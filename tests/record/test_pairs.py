"""Two loaders in one traced program, each recorded in any way: both get torch's batches, and both traces are right."""

from __future__ import annotations

import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import DataLoader

import minidl
from minidl.arena import arena
from minidl.check import check
from minidl.record.observe import observed_iterators
from minidl.run import replaced
from minidl.tracefile.events import Phase, QueueId
from minidl.tracefile.reader import Trace, read_trace

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'pin_memory' argument is set as true"),
]

Batches = list[list[float]]


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """i -> a tensor of base + i."""

    def __init__(self, length: int, base: int) -> None:
        self.length, self.base = length, base

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50,), float(self.base + index))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same, dealt out to the workers."""

    def __init__(self, length: int, base: int) -> None:
        self.samples = Samples(length, base)

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.samples.__getitem__, range(first, len(self.samples), step))


def observed(transport: str | None) -> Callable[..., Any]:
    def make(dataset: Any, *, multiprocessing_context: str | None = None, **options: Any) -> Any:
        context = minidl.observe(multiprocessing_context, transport=transport) if options["num_workers"] else None
        return DataLoader(dataset, multiprocessing_context=context, **options)

    return make


WAYS: dict[str, Callable[..., Any]] = {
    "upstream": minidl.DataLoader,
    "arena": lambda *args, **options: minidl.DataLoader(*args, transport="arena", **options),
    "observed": observed(None),
    "observed arena": observed("arena"),
    "replaced": lambda *args, **options: torch.utils.data.DataLoader(*args, **options),  # as `minidl run` leaves it
}


# --- What is done with the two ----------------------------------------------------------------------------------------
def values(batch: torch.Tensor) -> list[float]:
    return batch[:, 0].tolist()


def in_turn(one: Any, other: Any) -> list[Batches]:
    return [[values(batch) for batch in one], [values(batch) for batch in other]]


def at_once(one: Any, other: Any) -> list[Batches]:
    """One ends before the other, and is shut down while the other goes on."""
    seen: list[Batches] = [[], []]
    for pair in itertools.zip_longest(one, other):
        for batches, batch in zip(seen, pair, strict=True):
            if batch is not None:
                batches.append(values(batch))
    return seen


def nested(one: Any, other: Any) -> list[Batches]:
    """Each second batch of one is followed by an epoch of the other."""
    seen: list[Batches] = [[], []]
    for number, batch in enumerate(one):
        seen[0].append(values(batch))
        if number % 2 == 0:
            seen[1] += [values(inner) for inner in other]
    return seen


def ended_first(one: Any, other: Any) -> list[Batches]:
    """Both are made, the second is read first, and the first is shut down first."""
    iterators = iter(one), iter(other)
    seen = [[values(batch) for batch in each] for each in reversed(iterators)]
    for each in iterators:
        getattr(each, "_shutdown_workers", lambda: None)()
    return seen


def left_early(one: Any, other: Any) -> list[Batches]:
    first = [values(batch) for batch, _ in zip(one, range(2), strict=False)]
    return [first, [values(batch) for batch in other], [values(batch) for batch in one]]


USES = {use.__name__: use for use in (in_turn, at_once, nested, ended_first, left_early)}


def used(use: str, makes: Any, workers: tuple[int, int], kind: Any = Samples, **options: Any) -> list[Batches]:
    loaders = [
        make(kind(length, base), batch_size=3, num_workers=number, **(options if number else {}))
        for make, length, base, number in zip(makes, (11, 19), (0, 100), workers, strict=True)
    ]
    seen = USES[use](*loaders)
    for loader in loaders:  # persistent workers
        getattr(loader._iterator, "_shutdown_workers", lambda: None)()
    return seen


@functools.cache
def expected_of(use: str, workers: tuple[int, int], variation: str) -> list[Batches]:
    return used(use, (DataLoader, DataLoader), workers, **VARIATIONS[variation])


def is_right(use: str, ways: tuple[str, str], workers: tuple[int, int], place: Path, variation: str = "plain") -> None:
    """The batches are torch's, the trace keeps each rule, and each message is written as what was put."""
    expected, options = expected_of(use, workers, variation), VARIATIONS[variation]
    with minidl.trace(place), replaced(), observed_iterators():
        seen = used(use, [WAYS[way] for way in ways], workers, **options)
        gc.collect()
    if options.get("in_order", True):
        assert seen == expected
    else:
        assert in_any_order(use, seen) == in_any_order(use, expected)
    trace = read_trace(place)
    assert check(trace) == []
    assert trace.problems == []
    assert not written(trace) - put(trace)


def in_any_order(use: str, seen: list[Batches]) -> list[Batches | int]:
    """What holds in whatever order batches come: which they are, and of a loop that is left early, how many."""
    return [len(seen[0]) if use == "left_early" else sorted(seen[0]), *map(sorted, seen[1:])]


def put(trace: Trace) -> Counter[tuple[int, int, int]]:
    """Loader, task and worker of what was put into index queues."""
    sentinels = trace.select("sentinel_put")
    rows = [trace.select("index_put"), trace.select("resume_put"), sentinels[sentinels["x"] == QueueId.INDEX]]
    return Counter(about for each in rows for about in each[["loader", "task", "worker"]].tolist())


def written(trace: Trace) -> Counter[tuple[int, int, int]]:
    return Counter(trace.select("index_write", Phase.BEGIN)[["loader", "task", "worker"]].tolist())


@pytest.fixture(autouse=True)
def _all_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "INLINE", 0)  # these batches are small, and would all travel in the message


@pytest.mark.parametrize(
    ("use", "ways", "workers"),
    [
        ("ended_first", ("arena", "arena"), (3, 1)),
        ("nested", ("arena", "observed arena"), (1, 3)),
        ("at_once", ("observed arena", "arena"), (3, 1)),
        ("at_once", ("upstream", "observed"), (1, 3)),
        ("left_early", ("observed", "replaced"), (3, 1)),
    ],
)
def test_two_loaders(use: str, ways: tuple[str, str], workers: tuple[int, int], tmp_path: Path) -> None:
    is_right(use, ways, workers, tmp_path / "t")


VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"kind": Stream},
    "persistent": {"persistent_workers": True},
    "pinned": {"pin_memory": True},
    "any order": {"in_order": False},
    "spawn": {"multiprocessing_context": "spawn"},
    "forkserver": {"multiprocessing_context": "forkserver"},
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [(1, 3), (3, 1), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("ways", list(itertools.product(WAYS, WAYS)), ids=" and ".join)
def test_every_pair(ways: tuple[str, str], variation: str, workers: tuple[int, int], tmp_path: Path) -> None:
    spawned = variation in ("spawn", "forkserver")  # a worker of theirs takes seconds to start
    for use in ("ended_first", "at_once") if spawned else USES:
        is_right(use, ways, workers, tmp_path / use, variation)
