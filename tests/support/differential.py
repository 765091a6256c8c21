"""The same program on torch's DataLoader and on ours, and the grid of options that programs run over.

`agree(program)` runs `program(lib)` with `torch.utils.data` and with `minidl` in the place of lib, and fails at the
first difference between what was observed: batches, order, types, errors, warnings, generators, seeds. The datasets of
`workloads` report from the worker processes: which worker served the sample, with which seed, and what it drew from
each generator.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
import workloads as wl
from oracle_twice import different

import minidl
from minidl.loader.threads import WorkerThread

TORCH: Any = torch.utils.data
Program = Callable[[Any], Any]
TESTS = Path(__file__).parent.parent


# --- Observing --------------------------------------------------------------------------------------------------------
def observe(program: Program, lib: Any) -> dict[str, Any]:
    """What a program returned, what it warned of, and the state in which it left the global generators."""
    random.seed(1)
    np.random.seed(2)
    torch.default_generator.manual_seed(3)
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
    return "user" if Path(filename).is_relative_to(TESTS) else "library"


def agree(program: Program, ours: Program | None = None, what: object = "", *, threads: bool = False) -> Any:
    """Fail unless both libraries are observed to do the same; return the value. `ours`: another program for minidl.

    threads: minidl's worker threads are to do it, too; see `of_threads` for what differs.
    """
    expected, got = observe(program, TORCH), observe(ours or program, minidl)
    difference = different(expected, got)
    assert difference is None, f"{what}\ntorch:  {expected['value']}\nminidl: {got['value']}\ndiffer in {difference}"
    if threads:
        found = observe(program, THREADS)
        difference = different(of_threads(expected | {"warnings": []}), found | {"warnings": []})
        assert difference is None, f"{what}\ntorch: {expected['value']}\nthreads: {found['value']}\n{difference}"
        left = [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]
        assert not left, f"{what}: {left} left behind"
    return got["value"]


class Threads:
    """minidl, whose workers are threads."""

    DataLoader = functools.partial(minidl.DataLoader, worker_method="thread")

    def __getattr__(self, name: str) -> Any:
        return getattr(minidl, name)


THREADS = Threads()


def of_threads(value: Any) -> Any:
    """A value as from worker threads: in their words, and in memory of this process."""
    if isinstance(value, torch.Tensor) and value.is_shared():
        return value.clone()
    if isinstance(value, str):
        return value.replace("DataLoader worker process", "DataLoader worker thread")
    if type(value) in (list, tuple):
        return type(value)(map(of_threads, value))
    return {key: of_threads(one) for key, one in value.items()} if type(value) is dict else value


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
            if not end.args:
                return seen
            seen.append(("end", str(end).split("\n")[0]))  # it is an error: the iterator has not ended
            break
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


@functools.cache
def grid(together: int) -> list[dict[str, Any]]:
    """Every pair of options' values at least once; of what covers every three, a sample."""
    cases = covering(OPTIONS, together)
    return cases if together == 2 else random.Random(1).sample(cases, 24)
