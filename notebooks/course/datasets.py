"""Questions, datasets and checks of 01_datasets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

import minidl
from course.asking import Asked, Choice, Count, question, rows
from course.checking import Wrong, exercise
from course.data import Sized, numbers
from minidl.data.fetch import _DatasetKind


class Remote(minidl.Dataset[torch.Tensor]):
    """`size` samples of a store that answers after `seconds`, each time it is asked; sample i is `tensor(i)`."""

    def __init__(self, size: int, seconds: float = 0.005) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor(index)


class RemoteBatches(Remote):
    """The same store, which is asked for all samples of a batch at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        time.sleep(self.seconds)
        return [torch.tensor(index) for index in indices]


class Counting(Sized):
    """`size` samples, and how often this copy of the dataset was asked for one."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0

    def __getitem__(self, index: int) -> int:
        self.calls += 1
        time.sleep(0.005)
        return index


class Whole(minidl.IterableDataset[int]):
    """The numbers below `size`. Nobody told it that there are workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


# --- Questions --------------------------------------------------------------------------------------------------------
def _size(trace: minidl.Trace) -> int:
    (facts,) = trace.loaders.values()
    return int(facts["batch_size"])


@question
def calls(trace: minidl.Trace, task: int = 0) -> Asked:
    """One call a sample, or `__getitems__`: one for all."""
    asked = rows(trace, "sample", "B", task=task)
    size, at_once = _size(trace), len(asked) == 1
    return Asked(
        f"A dataset {'with' if at_once else 'without'} `__getitems__`. How often does the loader's fetcher call it for a batch of {size} samples?",
        Count(len(asked)),
        "What does the `s` at the end of its name mean?" if at_once else "`__getitem__` takes one index.",
        "Once, with all indices of the batch. A store that answers slowly, but answers several questions at once, is waited for once."
        if at_once else "`_MapDatasetFetcher` goes through the indices, and asks for each by itself: one step `sample` each.",
        asked[-1],
        {size: "That is `__getitem__`. `__getitems__` takes a list of indices."} if at_once else {},
    )  # fmt: skip


@question
def becomes(samples: Sequence[float]) -> Asked:
    """Python's float has 64 bits."""
    kind = str(minidl.default_collate(list(samples)).dtype).removeprefix("torch.")
    return Asked(
        "Each sample is a Python `float`. Of which type is the tensor that `default_collate` makes of them?",
        Choice(kind, {
            "float16": ("Mixed precision is the model's choice, inside its step. A loader does not round.", "half", "16"),
            "float32": ("That is the type of `torch.tensor(0.5)`, torch's default. A number in a batch keeps what Python has.", "single", "32"),
            "float64": ("", "double", "64"),
        }),
        "How many bits has a Python `float`?",
        "Nothing is rounded that you did not ask to round. Weights are float32, so such a batch costs twice the bytes, and often an error in the "
        "first layer. Let the dataset give `torch.float32`.",
    )  # fmt: skip


@question
def counted(trace: minidl.Trace, dataset: Counting) -> Asked:
    """Each worker has its own copy."""
    asked = rows(trace, "sample", "B")
    (facts,) = trace.loaders.values()
    return Asked(
        f"The dataset counts its calls in `self.calls`. {facts['num_workers']} workers have fetched {len(asked)} samples. What does `dataset.calls` say here, in the "
        "notebook's process?",
        Count(dataset.calls),
        "In which process has `self.calls += 1` run?",
        "Each worker got a copy of the dataset when it started, and has counted in that. The copies end with the workers. What a dataset changes in "
        "itself stays in its process: caches and open files, too.",
        asked[-1],
        {len(asked): "So it would be, if there was one dataset. Each worker has its own copy."},
    )  # fmt: skip


@question
def arrives(batches: Iterable[Iterable[int]], trace: minidl.Trace) -> Asked:
    """No worker knows of the others."""
    times = Counter(number for batch in batches for number in batch)
    (facts,) = trace.loaders.values()
    (often,) = set(times.values())
    return Asked(
        f"An iterable dataset that does not ask which worker it is in, and {facts['num_workers']} workers. How often does each number arrive in one epoch?",
        Count(often),
        "Each worker has a copy of the dataset, and calls `iter` on it. Who tells the copies about each other?",
        "Once from each copy. The loader sends places, not indices: it cannot divide a stream. The dataset has to, by `minidl.get_worker_info()`.",
    )  # fmt: skip


@question
def short_batches(batches: Sequence[Sequence[int]], trace: minidl.Trace) -> Asked:
    """Each worker has a last batch."""
    short = sum(len(batch) < _size(trace) for batch in batches)
    (facts,) = trace.loaders.values()
    given = sum(map(len, batches))
    worker = "worker" if facts["num_workers"] == 1 else "workers"
    return Asked(
        f"A stream of {given} numbers, divided in turn among {facts['num_workers']} {worker}, in batches of {_size(trace)}. How many batches are shorter than that?",
        Count(short),
        "A batch is made by one worker, of its own share. How large are the shares?",
        f"{short} of {len(batches)}: each worker whose share is no multiple of {_size(trace)} ends with a short one. With `drop_last=True` all of these are dropped, and not only "
        "one.",
        rows(trace, "collate", "B")[-1],
        {1: "Without workers there would be one. Here, each worker has an end of its own."} if short != 1 else {},
    )  # fmt: skip


@question
def ends(trace: minidl.Trace) -> Asked:
    """StopIteration crosses the process."""
    gone = rows(trace, "worker_exhausted")
    batches = len(rows(trace, "collate", "B"))
    sent = len(rows(trace, "task_assigned"))
    return Asked(
        f"The same run. The loader cannot know where a stream ends. It got {batches} batches. How many tasks has it sent out?",
        Choice("more" if sent > batches else str(batches), {
            "fewer": ("A batch is the answer to a task: there is none without.", "less"),
            str(batches): ("Then the loader would have known, before it sent the last task, that nothing follows.", "as many", "the same"),
            "more": ("Each task was answered by a batch.", "more tasks", sent),
        }),
        "How does a loader learn that a worker's share is at its end?",
        f"{sent}. A worker whose iterator has ended answers its next task with `_IterableDatasetStopIteration`. Then the loader sends it nothing more "
        f"(`worker_exhausted`), until all {len(gone)} have ended.",
        gone[0] if gone else None,
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def windows(kind: Callable[[Sequence[int], int], Any]) -> str:
    """Windows over a series, as a map-style dataset."""
    for size, width in ((10, 3), (5, 5), (4, 1)):
        series = list(range(100, 100 + size))
        wanted = [series[begin : begin + width] for begin in range(size - width + 1)]
        dataset = kind(series, width)
        if len(dataset) != len(wanted):
            raise Wrong(
                f"A series of {size} has {len(wanted)} windows of {width}; your `len` says {len(dataset)}.",
                "The step `sampler_next`: the sampler asks `len(dataset)` once, and gives the indices below it. What it leaves out is never seen; what it adds is asked for in vain.",
            )  # fmt: skip
        given = [list(dataset[index]) for index in range(len(wanted))]
        if given != wanted:
            place = next(place for place, one in enumerate(given) if one != wanted[place])
            raise Wrong(
                f"A series of {size}, windows of {width}: sample {place} is {wanted[place]}; yours is {given[place]}.",
                "The step `sample`: `dataset[i]` is the window that begins at `i`, whoever asks, and whatever was asked before.",
                evidence="\n".join(map(str, given)),
            )  # fmt: skip
        try:
            beyond = dataset[len(wanted)]
        except IndexError:
            continue
        raise Wrong(
            f"A series of {size} has no window {len(wanted)}; your dataset gives {list(beyond)}.",
            "The step `sample`: an index that does not exist is an `IndexError`. Without it, `for sample in dataset` never ends, and a sampler's mistake stays unseen.",
        )  # fmt: skip
    series = list(range(10))
    batches = list(minidl.DataLoader(kind(series, 4), batch_size=7, collate_fn=list))
    assert [list(one) for one in batches[0]] == [series[begin : begin + 4] for begin in range(7)]
    return "Length, windows and the end are right, and `minidl.DataLoader` takes it."


@exercise
def fetch(function: Callable[[Any, Sequence[int], Callable[[list[Any]], Any]], Any]) -> str:
    """A fetcher, held against the package's own."""
    indices = [5, 0, 3, 3]

    def collate(samples: list[Any]) -> tuple[int, ...]:
        return tuple(map(int, samples))

    for kind in (Remote, RemoteBatches):
        told: list[object] = []

        class Noted(kind):  # type: ignore[misc, valid-type]
            def __getitem__(self, index: int, told: list[object] = told) -> torch.Tensor:
                told.append(index)
                return super().__getitem__(index)  # type: ignore[no-any-return]

        if kind is RemoteBatches:

            def getitems(self: Any, asked: Sequence[int], told: list[object] = told) -> list[torch.Tensor]:
                told.append(list(asked))
                return [torch.tensor(index) for index in asked]

            Noted.__getitems__ = getitems
        dataset = Noted(8, 0)
        theirs = _DatasetKind.create_fetcher(_DatasetKind.Map, dataset, True, collate, False).fetch(indices)
        wanted = list(told)
        told.clear()
        given = function(dataset, list(indices), collate)
        if told != wanted:
            has = "with" if kind is RemoteBatches else "without"
            raise Wrong(
                f"Indices {indices}, a dataset {has} `__getitems__`: it is asked for {wanted}; you ask for {told}.",
                "The step `sample`: one call of `__getitems__` with all indices if there is one, else one `dataset[i]` for each index, in the order in which they came.",
            )  # fmt: skip
        if given != theirs:
            raise Wrong(
                f"The batch is {theirs}; yours is {given!r}.",
                "The step `collate`: the samples, in the order of their indices, go to `collate_fn`, and what that returns is the batch.",
            )
    return "The same calls and the same batch as the package's `_MapDatasetFetcher`, with `__getitems__` and without."


@exercise
def stream(kind: Callable[[int], Any]) -> str:
    """An iterable dataset that its workers divide."""
    for workers in (0, 3):
        context = "fork" if workers else None
        loader: Any = minidl.DataLoader(
            kind(10), batch_size=4, num_workers=workers, multiprocessing_context=context, collate_fn=numbers
        )
        try:
            given = [number for batch in loader for number in batch]
        except Exception as error:
            raise Wrong(
                f"With {workers} workers, your dataset has raised {type(error).__name__}: {str(error).splitlines()[-1]}",
                "The step `make_fetcher`: `iter(dataset)` runs in the loop's process if there are no workers, and there `get_worker_info()` is None.",
            ) from error
        times = Counter(given)
        lost, foreign = sorted(set(range(10)) - set(times)), sorted(set(times) - set(range(10)))
        often = max(times.values(), default=0)
        if lost or foreign or often > 1:
            raise Wrong(
                f"The numbers below 10, {workers} workers: "
                + (f"{lost} are lost." if lost else f"numbers come {often} times." if often > 1 else f"{foreign} do not belong to them."),
                "The step `sample`: each worker takes from its own copy of the stream. Worker `id` of `num_workers` gives its share, and the shares together are the whole, also "
                "where it does not divide.",
                evidence=f"what came: {given}",
            )  # fmt: skip
    return "Each number once, with three workers and with none."
