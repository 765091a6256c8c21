"""A loader of one's own, in five labs: the trials that judge what the student has written.

`check(1, "loader.py")` runs the trials of lab 1 on the `DataLoader` of a file; `python -m course.labs 1 loader.py` does so, too. A
trial makes a random case, runs the student's loader, and compares what came with what torch's loader gives, or with what a
fault that it injects must lead to. Each run is a process of its own with a bound in time. `train` trains the demo's network.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import importlib.util
import itertools
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from course import place, schedules
from course.checking import Outcome, Wrong, apart, judged
from course.data import until
from course.texts import FOLDER
from minidl import demo
from minidl.process_stat import is_alive

BOUND = 30.0
"""Seconds of one run of a trial, or of the training."""
INTERVAL = 0.3
"""What MP_STATUS_CHECK_INTERVAL is set to, so that deaths are found sooner."""
MEMORY = 2 << 30
"""Bytes of address space that a run may take."""
SOON = 10.0
"""Seconds within which what must end has ended."""

SKELETON = FOLDER / "labs" / "loader.py"
SOLUTION = FOLDER / "solutions" / "labs" / "loader.py"

Trial = Callable[[Any, random.Random], None]
TRIALS: dict[int, list[Trial]] = {number: [] for number in range(1, 6)}


def trial(lab: int) -> Callable[[Trial], Trial]:
    """Add a trial to a lab. Its docstring is the hint."""

    def add(function: Trial) -> Trial:
        TRIALS[lab].append(function)
        return function

    return add


# --- Judging ----------------------------------------------------------------------------------------------------------
def check(lab: int, loader: str | Path | Any = "loader.py", rounds: int = 3, seed: int = 0) -> Outcome:
    """What the trials of a lab say of a file's DataLoader, or of a module's; the first that fails, or that all are right."""
    notes = []
    for number, one in itertools.product(range(rounds), TRIALS[lab]):
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            job = functools.partial(judged, _tried, one, loader, f"{one.__name__} {seed + number}", errors.fileno())
            outcome = apart(job, BOUND)
            errors.seek(0)
            printed = errors.read()[-3000:]
        if outcome.passed is None:
            return outcome
        if not outcome.passed:
            where = f"Lab {lab}, trial `{one.__name__}`, round {number + 1}: {outcome.words}"
            evidence = "\n".join(part for part in (outcome.evidence, printed) if part)
            return Outcome(False, where, f"{one.__doc__} {outcome.step}".strip(), evidence)
        notes.append(outcome.words.removeprefix(judged(str).words))  # without "Right. ", which may be translated
    said = [f"Right. Lab {lab}: {len(TRIALS[lab])} trials, each {rounds} times.", *filter(None, dict.fromkeys(notes))]
    return Outcome(True, " ".join(said))


def _tried(one: Trial, loader: str | Path | Any, seed: str, errors: int) -> str:
    os.dup2(errors, 2)  # tracebacks of workers and threads, too
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # code that takes all memory ends by itself
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY, resource.RLIM_INFINITY))
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    try:
        one(loaded(loader), random.Random(seed))
    except schedules.Unknown as name:
        return f"(`{one.__name__}` has tried nothing: `{name}` of your file is not simulated.)"
    return ""


def loaded(loader: str | Path | Any) -> Any:
    """The module of a student's file."""
    module = loader
    if isinstance(loader, str | Path):
        path = Path(loader).resolve()
        if not path.is_file():
            raise Wrong(f"There is no file {loader}.", "Copy labs/loader.py, and fill it in.")
        module = sys.modules["students_loader"] = ModuleType("students_loader")
        source = solved() if path == SOLUTION else importlib.util.decode_source(path.read_bytes())
        module.__dict__["its_source"] = source, str(path)
        exec(compile(source, path, "exec"), module.__dict__)
    if isinstance(module, ModuleType) and hasattr(module, "MP_STATUS_CHECK_INTERVAL"):
        module.MP_STATUS_CHECK_INTERVAL = INTERVAL  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore")
    return module


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file by their names; a method is "class.name"."""
    tree = ast.parse(source)
    owners = [("", tree), *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef))]
    return {of + node.name: node for of, part in owners for node in part.body if isinstance(node, ast.FunctionDef)}


def solved() -> str:
    """labs/loader.py, with the functions of the solution in the places of the student's."""
    given, solution = SKELETON.read_text(encoding="utf-8"), SOLUTION.read_text(encoding="utf-8")
    lines, own, places = given.splitlines(), solution.splitlines(), functions(given)
    ordered = sorted(functions(solution).items(), key=lambda one: places[one[0]].lineno)
    for name, node in reversed(ordered):  # so that no place moves that is still to be filled
        lines[places[name].lineno - 1 : places[name].end_lineno] = own[node.lineno - 1 : node.end_lineno]
    return "\n".join([*lines, ""])


def differs(given: str, expected: object, got: object) -> Wrong:
    """What is said if a case went wrong."""
    told = [str(one) if len(str(one)) < 300 else f"{str(one)[:300]} ..." for one in (expected, got)]
    return Wrong(f"Given: {given}. Expected: {told[0]}. Got: {told[1]}.", "")


def same(given: str, expected: object, got: object) -> None:
    """Raise Wrong unless the two are equal."""
    if expected != got:
        raise differs(given, expected, got)


def plain(data: Any) -> Any:
    """A batch as what can be compared and shown."""
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype)[6:]} {data.tolist()}"
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    return [plain(value) for value in data] if isinstance(data, list | tuple) else data


def taken(loader: Any, count: int | None = None) -> list[Any]:
    """The loader's batches, at most so many; if it raises, the error's type is the last."""
    got: list[Any] = []
    try:
        for batch in itertools.islice(iter(loader), count):
            got.append(plain(batch))
    except (Wrong, NotImplementedError):
        raise
    except Exception as error:
        got.append(type(error).__name__)
        # torch's `reraise` makes a circle of the frames, which keeps the iterator.
        traceback.clear_frames(error.__traceback__)
    return got


def compared(module: Any, dataset: Any, count: int | None = None, **options: Any) -> list[Any]:
    """Compare the student's batches with torch's; return them."""
    given = f"{dataset!r}, " + ", ".join(f"{name}={value!r}" for name, value in options.items())
    seed = random.randrange(2**31)
    found = []
    for make in (torch.utils.data.DataLoader, module.DataLoader):
        torch.manual_seed(seed)
        found.append(taken(make(dataset, **options), count))
    same(given, *found)
    return found[1]


def left(given: str) -> None:
    """Raise Wrong if processes or threads of a loader stay."""
    gc.collect()
    if not until(lambda: not multiprocessing.active_children(), SOON):
        raise differs(given, "no worker is left", f"{len(multiprocessing.active_children())} workers live")
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if not until(lambda: not any(t.is_alive() and "Feeder" not in t.name for t in threads), SOON):
        raise differs(given, "no thread is left", f"{len(threads)} threads run")


# --- Datasets ---------------------------------------------------------------------------------------------------------
class Samples:
    """`size` samples: sample i is `make(i)`. Each index that was asked for is counted in all processes."""

    def __init__(self, size: int, make: Callable[[int], Any], name: str = "samples") -> None:
        self.size, self.make, self.name = size, make, name
        self.asked = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        with self.asked.get_lock():
            self.asked.value += 1
        return self.make(index)

    def __repr__(self) -> str:
        return f"{self.size} {self.name}"


class Whole(Samples):
    """The same, of a dataset that fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self[index], len(indices)) for index in indices]


class Stream(torch.utils.data.IterableDataset):
    """Worker w gives `sizes[w]` samples, each (w, number)."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number = 0 if info is None else info.id
        return ((number, one) for one in range(self.sizes[number]))

    def __repr__(self) -> str:
        return f"streams of {', '.join(map(str, self.sizes))} samples" if self.sizes else "a stream whose iter() raises"


class Again(torch.utils.data.IterableDataset):
    """The numbers from 1 on; in the place of each sixth, the stream is at its end. Asked again, it goes on."""

    def __iter__(self) -> Iterator[int]:
        # A generator would be over.
        return map(lambda number: number if number % 6 else next(iter(())), itertools.count(1))  # noqa: C417

    def __repr__(self) -> str:
        return "a stream of 5 samples that goes on if it is asked again"


class Opened(torch.utils.data.IterableDataset):
    """The process in which its iterator was made, over and over."""

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(os.getpid())


def structured(dice: random.Random) -> Callable[[int], Any]:
    """What makes a sample of a random structure."""
    leaves: list[Callable[[int], Any]] = [
        int, float, str, lambda i: torch.full((2,), float(i)), lambda i: np.arange(3) * i, lambda i: i % 2 == 0,
    ]  # fmt: skip
    one, other = dice.choices(leaves, k=2)
    shapes: list[Callable[[int], Any]] = [
        one, lambda i: (one(i), other(i)), lambda i: {"a": one(i), "b": [other(i), one(i)]},
    ]  # fmt: skip
    return dice.choice(shapes)


def worker_of(_: int) -> int:
    info = torch.utils.data.get_worker_info()
    return -1 if info is None else info.id


def doing(at: int, act: Callable[[], object]) -> Callable[[int], int]:
    """Sample i is i; before sample `at`, something is done."""

    def make(index: int) -> int:
        if index == at:
            act()
        return index

    return make


def broken() -> None:
    raise KeyError("broken sample")


def broken_collate(samples: Any) -> Any:
    raise ValueError(f"cannot collate {samples}")


# --- Lab 1 ------------------------------------------------------------------------------------------------------------
def _map(module: Any, dice: random.Random, workers: int = 0) -> None:
    size = dice.randrange(12)
    sampler = dice.choice([None, dice.choices(range(size), k=dice.randrange(9)) if size else []])
    options = {"batch_size": dice.randrange(1, 5), "drop_last": dice.random() < 0.4, "sampler": sampler}
    compared(module, Samples(size, structured(dice)), num_workers=workers, **options)


def _stream(module: Any, dice: random.Random, workers: int = 0) -> None:
    sizes = [dice.randrange(8) for _ in range(max(1, workers))]
    options = {"batch_size": dice.randrange(1, 4), "drop_last": dice.random() < 0.4}
    compared(module, Stream(*sizes), num_workers=workers, **options)


@trial(1)
def batches(module: Any, dice: random.Random) -> None:
    """Batches hold the samples of `batch_size` indices; the last is shorter, or dropped; a structure becomes that structure, with a batch in each place."""
    for _ in range(8):
        _map(module, dice)
    for options in ({}, {"drop_last": True}, {"sampler": []}):
        compared(module, Samples(7, float), batch_size=3, **options)


@trial(1)
def collates(module: Any, dice: random.Random) -> None:
    """Tensors are stacked; numbers become a tensor, floats of 64 bits; a tuple of samples becomes a list of batches, a dict a dict; strings stay."""
    nested = [lambda i: (i, float(i)), lambda i: {"a": i, "b": (float(i), str(i))}, lambda i: np.ones(2) * i]
    for make in (float, int, str, *nested):
        compared(module, Samples(5, make), batch_size=2)
    compared(module, Samples(5, int), batch_size=2, collate_fn=tuple)
    pair = next(iter(module.DataLoader(Samples(2, lambda i: (i, i)), batch_size=2)))
    same("samples that are tuples, the type of a batch", list, type(pair))
    compared(module, Samples(4, lambda i: [0] * (i + 1)), batch_size=2)


@trial(1)
def lazily(module: Any, dice: random.Random) -> None:
    """Indices are drawn from the sampler when a batch needs them: a sampler may have no end."""
    drawn = [0]

    def endless() -> Iterator[int]:
        for index in range(10_000):
            drawn[0] = index + 1
            yield index
        raise Wrong("Given: an endless sampler. Expected: 12 indices for 3 batches of 4. Got: more than 10,000.", "")

    got = taken(module.DataLoader(Samples(10**9, int), batch_size=4, sampler=endless()), 3)
    same("an endless sampler, 3 batches of 4", [plain(torch.arange(4) + 4 * n) for n in range(3)], got)
    same("indices drawn for 3 batches of 4", 12, drawn[0])


@trial(1)
def streams(module: Any, dice: random.Random) -> None:
    """Of a stream, only the number of indices counts. It ends with a shorter batch, or drops it, and StopIteration; then it is not asked again."""
    for _ in range(8):
        _stream(module, dice)
    compared(module, Again(), 8, batch_size=2)
    iterator = iter(module.DataLoader(Again(), batch_size=5))
    got = [plain(next(iterator, "StopIteration")) for _ in range(3)]
    same(f"next() three times, {Again()}", [plain(torch.arange(1, 6)), *["StopIteration"] * 2], got)


@trial(1)
def asks_once(module: Any, dice: random.Random) -> None:
    """A dataset with `__getitems__` fetches the samples of a batch in one call."""
    compared(module, Whole(dice.randrange(5, 9), int, "samples with __getitems__"), batch_size=3)


@trial(1)
def errors(module: Any, dice: random.Random) -> None:
    """An error of the dataset or of collate_fn comes out of next() as it is."""
    compared(module, Samples(8, doing(dice.randrange(8), broken)), batch_size=2)
    compared(module, Samples(8, int), batch_size=2, collate_fn=broken_collate)


# --- Lab 2 ------------------------------------------------------------------------------------------------------------
@trial(2)
def batches_of_a_worker(module: Any, dice: random.Random) -> None:
    """The same batches as without a worker: (idx, index) goes to the worker, (idx, data) comes back, one index follows each batch."""
    _map(module, dice, workers=1)
    _stream(module, dice, workers=1)


@trial(2)
def elsewhere(module: Any, dice: random.Random) -> None:
    """The dataset is asked in the worker, which is another process; get_worker_info() says there which worker it is."""
    pids = taken(module.DataLoader(Samples(4, lambda i: os.getpid()), batch_size=4, num_workers=1, collate_fn=set))
    if len(pids) != 1 or len(pids[0]) != 1 or os.getpid() in pids[0]:
        raise differs("num_workers=1; a sample is os.getpid()", "one process, not the loop's", pids)
    compared(module, Samples(4, worker_of), batch_size=2, num_workers=1)
    pids = taken(module.DataLoader(Opened(), batch_size=4, num_workers=1, collate_fn=set), 1)
    if len(pids) != 1 or os.getpid() in pids[0]:
        raise differs("num_workers=1; a stream of the process in which iter() was called", "not the loop's", pids)


@trial(2)
def ahead(module: Any, dice: random.Random) -> None:
    """While the loop trains, the worker fetches: `prefetch_factor` tasks for each worker are out, and one more is sent when a batch leaves."""
    _ahead(module, dice, workers=1)


def _ahead(module: Any, dice: random.Random, workers: int) -> None:
    size, factor = dice.randrange(1, 4), dice.randrange(1, 4)
    dataset = Samples(100, int)
    iterator = iter(module.DataLoader(dataset, batch_size=size, num_workers=workers, prefetch_factor=factor))
    for taken_now in range(1, 4):
        next(iterator)
        wanted = size * (factor * workers + taken_now)
        until(lambda: dataset.asked.value >= wanted, 5)  # noqa: B023
        time.sleep(0.05)
        given = f"num_workers={workers}, prefetch_factor={factor}, batch_size={size}; samples fetched after {taken_now} batches"
        same(given, wanted, dataset.asked.value)


@trial(2)
def seeds(module: Any, dice: random.Random) -> None:
    """`begin_worker` is called first in a worker, with the base seed that the iterator has drawn."""
    compared(module, Samples(6, lambda i: torch.rand(()).item() + random.random()), batch_size=2, num_workers=1)


@trial(2)
def errors_of_a_worker(module: Any, dice: random.Random) -> None:
    """An error is a message: the worker puts it in the place of the batch, and the loop raises it, as the same type."""
    compared(module, Samples(8, doing(dice.randrange(8), broken)), batch_size=2, num_workers=1)
    compared(module, Stream(), num_workers=1)
    iterator = iter(module.DataLoader(Samples(8, int), batch_size=2, num_workers=1, collate_fn=broken_collate))
    got = [taken(iterator) for _ in range(5)]
    same("collate_fn raises, 4 batches: next() five times", [["ValueError"]] * 4 + [[]], got)


@trial(2)
def ends(module: Any, dice: random.Random) -> None:
    """At the end of the epoch, the worker gets its sentinel, and leaves. The next epoch has a new one."""
    loader = module.DataLoader(Samples(9, int), batch_size=2, num_workers=1)
    first = taken(loader)
    left("the epoch is over, num_workers=1")
    same("two epochs", first, taken(loader))


# --- Lab 3 ------------------------------------------------------------------------------------------------------------
def _some(dice: random.Random) -> dict[str, int]:
    return {
        "num_workers": dice.randrange(2, 5),
        "batch_size": dice.randrange(1, 4),
        "prefetch_factor": dice.randrange(1, 4),
    }


@trial(3)
def in_order(module: Any, dice: random.Random) -> None:
    """Workers are of different speed; batches are yielded in the order of their tasks. What comes early waits in the reorder buffer."""
    slow = {index: dice.uniform(0.01, 0.08) for index in dice.sample(range(24), 5)}
    dataset = Samples(24, lambda i: time.sleep(slow.get(i, 0)) or i, "samples, some slow")
    compared(module, dataset, **_some(dice))


@trial(3)
def turns(module: Any, dice: random.Random) -> None:
    """Tasks are dealt in turn: task 0 to worker 0, task 1 to worker 1, and round again; one task follows each batch that leaves."""
    compared(module, Samples(20, worker_of, "samples, each the worker's number"), **_some(dice))


@trial(3)
def held(module: Any, dice: random.Random) -> None:
    """One slow sample does not stop the other workers: they fetch all tasks that are out, and no more."""
    options, gate = _some(dice), multiprocessing.Event()
    dataset = Samples(60, doing(0, gate.wait))
    wanted = options["batch_size"] * (options["num_workers"] - 1) * options["prefetch_factor"] + 1
    got: list[Any] = []
    loop = threading.Thread(target=lambda: got.extend(taken(module.DataLoader(dataset, **options), 3)), daemon=True)
    loop.start()
    until(lambda: dataset.asked.value >= wanted, SOON)
    time.sleep(0.1)
    asked = dataset.asked.value
    gate.set()
    loop.join()
    same(f"{options}; sample 0 is not ready; samples that were asked for", wanted, asked)
    size = options["batch_size"]
    same(f"{options}; then it is ready", [plain(torch.arange(size) + size * n) for n in range(3)], got)


@trial(3)
def bounded(module: Any, dice: random.Random) -> None:
    """At most prefetch_factor x num_workers tasks are out."""
    _ahead(module, dice, workers=dice.randrange(2, 4))


@trial(3)
def streams_of_workers(module: Any, dice: random.Random) -> None:
    """A worker whose stream has ended says so in the place of a batch: its turns go to the others, and tasks that it will not answer are skipped."""
    for _ in range(2):
        _stream(module, dice, workers=dice.randrange(2, 4))
    compared(module, Stream(1, 6), batch_size=1, num_workers=2)


@trial(3)
def few(module: Any, dice: random.Random) -> None:
    """There may be fewer tasks than workers, or none."""
    for size in (0, 1, 3):
        compared(module, Samples(size, int), batch_size=2, num_workers=3)
    left("the epochs are over, num_workers=3")


def _explored(module: Any, dice: random.Random, *, taking: bool = False, kills: int = 0, pin: bool = False) -> None:
    """The loader in many orders of its steps: a whole epoch; or dropped after some batches; or a worker is killed."""
    if not hasattr(module, "its_source"):
        return
    simulated = schedules.executed(*module.its_source)
    size, each = dice.randrange(4, 8), dice.choice((1, 1, 2))
    options = {"num_workers": 2, "batch_size": each, "prefetch_factor": dice.choice((1, 2, 2))}
    wanted = [list(range(size))[at : at + each] for at in range(0, size, each)]
    count = dice.randrange(len(wanted)) if taking else None
    given = f"{size} samples, {options}" + f", pin_memory={pin}" * pin
    given += f"; the loop breaks after {count} batches" if taking else "; a worker is killed" * kills

    def program() -> None:
        iterator = iter(simulated.DataLoader(range(size), collate_fn=list, pin_memory=pin, **options))
        got, alive = taken(iterator, count), weakref.ref(iterator)
        lost = bool(kills and got) and str(got[-1]) in LOST
        same(given, wanted[: len(got) - lost if lost else count], got[: len(got) - lost])
        del iterator
        if alive() is not None:
            gc.collect()

    with pinning(simulated, lambda data: data):
        schedules.explored(program, given, dice, kills)


@trial(3)
def any_order(module: Any, dice: random.Random) -> None:
    """Who goes next is chosen, and many orders are tried: in each, every batch comes, in its turn, and the workers leave. The steps of the order that goes wrong are below."""
    _explored(module, dice)


# --- Lab 4 ------------------------------------------------------------------------------------------------------------
def _broken_off(
    module: Any, given: str, dataset: Any, batches: int, ready: Callable[[], object] = lambda: None, *,
    by_itself: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Drop an iterator after some batches. by_itself: each worker has to leave before it would be terminated."""
    if by_itself:
        module.MP_STATUS_CHECK_INTERVAL = SOON
    iterator = iter(module.DataLoader(dataset, **options))
    for _ in range(batches):
        next(iterator)
    ready()
    began, workers, seen = time.monotonic(), multiprocessing.active_children(), weakref.ref(iterator)
    del iterator
    given += " (`del` does not free the iterator: a circle of references holds it)" if seen() is not None else ""
    left(given)
    if time.monotonic() - began > SOON:
        raise differs(given, f"at its end within {SOON:g} s", f"{time.monotonic() - began:.1f} s")
    if by_itself:
        same(f"{given}: exit codes of the workers", [0] * len(workers), [worker.exitcode for worker in workers])


@trial(4)
def broken_off(module: Any, dice: random.Random) -> None:
    """The loop breaks: the iterator is dropped, and its workers leave, whatever they do. The done event says that no task counts any more."""
    options = _some(dice)
    _broken_off(module, f"a break after 2 batches, {options}", Samples(100, int), 2, **options)
    _broken_off(module, f"a break before the first batch, {options}", Samples(100, int), 0, **options)


@trial(4)
def full_pipe(module: Any, dice: random.Random) -> None:
    """The loop reads no more, and the pipe is full: a worker that leaves may not wait for its feeder thread (`cancel_join_thread`)."""
    large = Samples(40, lambda i: b"x" * 300_000, "samples of 300,000 bytes")
    given = "a break after 1 batch; batches do not fit into the pipe"
    _broken_off(module, given, large, 1, by_itself=True, num_workers=2, collate_fn=list)


@trial(4)
def tasks_left(module: Any, dice: random.Random) -> None:
    """Once the done event is set, a worker skips the tasks that it still has."""
    slow = Samples(100, lambda i: time.sleep(0.1) or i, "samples of 0.1 s")
    asked: list[int] = []
    given = "a break after 1 batch, 2 workers, prefetch_factor=8"
    options = {"num_workers": 2, "prefetch_factor": 8}
    _broken_off(module, given, slow, 1, lambda: asked.append(slow.asked.value), by_itself=True, **options)
    if slow.asked.value - asked[0] > 4:
        raise differs(given, "at most 4 samples that are fetched after the break", slow.asked.value - asked[0])


@trial(4)
def long_sample(module: Any, dice: random.Random) -> None:
    """A worker that does not leave in time is terminated, and killed if that does not help: joins have a bound."""
    begun = multiprocessing.Event()
    slow = Samples(40, doing(3, lambda: begun.set() or time.sleep(60)), "samples, of which sample 3 takes a minute")
    given = "a break while a worker is in a long sample"
    _broken_off(module, given, slow, 1, lambda: begun.wait(SOON), num_workers=2, prefetch_factor=4)


@contextlib.contextmanager
def pinning(module: Any, pin: Callable[[Any], Any]) -> Iterator[None]:
    """An accelerator is there, and the module's `pin_memory` is this function, for batches."""
    torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.accelerator.set_device_index = lambda index: None  # type: ignore[assignment]
    module.pin_memory = lambda data: pin(data) if isinstance(data, torch.Tensor) else data
    yield  # the process ends after the trial


@trial(4)
def pinned(module: Any, dice: random.Random) -> None:
    """A thread of the loop's process stands between the workers and the loop: it takes (idx, data) and hands on (idx, pin_memory(data))."""
    threads = []

    def pin(data: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return [int(one) for one in data], "pinned", os.getpid()

    options = _some(dice)
    with pinning(module, pin):
        got = taken(module.DataLoader(Samples(20, int), pin_memory=True, **options))
    size = options["batch_size"]
    wanted = [[list(range(20))[at : at + size], "pinned", os.getpid()] for at in range(0, 20, size)]
    same(f"pin_memory=True, {options}", wanted, got)
    same("calls of pin_memory in the main thread", [False] * len(wanted), threads)
    left("the epoch is over, pin_memory=True")


@trial(4)
def pin_raises(module: Any, dice: random.Random) -> None:
    """An error of pin_memory is a message, too; and what is no batch is not pinned."""

    def pin(data: Any) -> Any:
        raise MemoryError("no page-locked memory")

    with pinning(module, pin):
        got = taken(module.DataLoader(Samples(8, doing(0, broken)), num_workers=2, pin_memory=True), 1)
        same("sample 0 raises KeyError, pin_memory=True", ["KeyError"], got)
        got = taken(module.DataLoader(Samples(8, int), num_workers=2, pin_memory=True), 1)
        same("pin_memory raises MemoryError", ["MemoryError"], got)


@trial(4)
def pin_broken_off(module: Any, dice: random.Random) -> None:
    """The pin thread first, by its event and a message that wakes it; then the workers, and the queue from which it reads. A worker that leaves may leave half a message: who reads it waits for ever."""
    with pinning(module, lambda data: data):
        options = _some(dice) | {"pin_memory": True}
        _broken_off(module, f"a break after 2 batches, {options}", Samples(100, int), 2, **options)
    _explored(module, dice, taking=True, pin=True)


@trial(4)
def broken_off_in_any_order(module: Any, dice: random.Random) -> None:
    """The loop breaks, and many orders of what follows are tried, where a pipe holds one message: in each, all workers end."""
    _explored(module, dice, taking=True)


@trial(4)
def two_at_once(module: Any, dice: random.Random) -> None:
    """Each iterator has its own queues and workers. A worker of the second has a copy of the first, which is not its own to shut down."""
    loader = module.DataLoader(Samples(12, int), batch_size=2, num_workers=2)
    alone = taken(loader)
    pairs = [(plain(one), plain(other)) for one, other in zip(loader, loader, strict=True)]
    same("zip(loader, loader)", [(batch, batch) for batch in alone], pairs)
    left("both iterators are at their end")
    held = [iter(loader)]
    taken(module.DataLoader(Samples(2, doing(0, held.clear)), num_workers=1))
    same("a worker of a second loader lets go of its copy of the first iterator", alone, taken(held[0]))


# --- Lab 5 ------------------------------------------------------------------------------------------------------------
LOST = {"RuntimeError", "ConnectionResetError", "ConnectionRefusedError", "EOFError", "FileNotFoundError"}
"""Errors that say of a death: the loop's own; or of a message that cannot be read any more, if it comes before the loop knows."""


def _dies(module: Any, given: str, dataset: Any, **options: Any) -> None:
    began = time.monotonic()
    got = taken(module.DataLoader(dataset, **options))
    if not got or got[-1] not in LOST:
        raise differs(given, "RuntimeError", got[-1:] or "no batch and no error")
    if time.monotonic() - began > SOON:
        raise differs(given, f"an error within {SOON:g} s", f"{time.monotonic() - began:.1f} s")
    left(given)


@trial(5)
def killed(module: Any, dice: random.Random) -> None:
    """A killed worker sends nothing. The loop waits with a timeout, looks whether the workers live, and raises RuntimeError."""
    at, options = dice.randrange(20), _some(dice)
    kill = Samples(24, doing(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    _dies(module, f"a worker is killed in sample {at}, {options}", kill, collate_fn=list, **options)


@trial(5)
def exits(module: Any, dice: random.Random) -> None:
    """`sys.exit()` in a sample raises SystemExit, which is no Exception: the worker ends, with exit code 0 or another one."""
    for code in (0, 1):
        at = dice.randrange(12)
        leave = Samples(12, doing(at, functools.partial(sys.exit, code)))
        _dies(module, f"sys.exit({code}) in sample {at}", leave, num_workers=2, collate_fn=list)


@trial(5)
def killed_behind_the_pin_thread(module: Any, dice: random.Random) -> None:
    """With a pin thread, the loop waits for the thread's queue; who dies is still a worker."""
    at = dice.randrange(20)
    with pinning(module, lambda data: data):
        kill = Samples(24, doing(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        _dies(module, f"a worker is killed in sample {at}, pin_memory=True", kill, num_workers=2, pin_memory=True)


@trial(5)
def killed_before_any_step(module: Any, dice: random.Random) -> None:
    """A worker is killed before any of its steps: each batch comes in its turn, or RuntimeError in the place of one; the loop never waits for ever."""
    _explored(module, dice, kills=1, pin=dice.choice((False, True)))


@trial(5)
def from_outside(module: Any, dice: random.Random) -> None:
    """A worker may die at any time, also while the loop trains: the batches that have come may be yielded, then the error comes."""
    iterator = iter(module.DataLoader(Samples(400, lambda i: time.sleep(0.002) or i), num_workers=3))
    same("the first batch of 400 samples", ["int64 [0]"], taken(iterator, 1))
    os.kill(dice.choice(multiprocessing.active_children()).pid or 0, signal.SIGKILL)
    got = taken(iterator)
    if not got or got[-1] not in LOST:
        raise differs("a worker is killed while the loop trains", "RuntimeError", got[-1:])
    del iterator
    left("a worker was killed while the loop trained")


@trial(5)
def too_slow(module: Any, dice: random.Random) -> None:
    """With `timeout`, the loop gives up; without, a slow sample is no death."""
    slow = Samples(6, doing(2, lambda: time.sleep(4 * INTERVAL)), f"samples, of which sample 2 takes {4 * INTERVAL} s")
    same("a slow sample, no timeout", 6, len(taken(module.DataLoader(slow, num_workers=2))))
    _dies(module, f"a slow sample, timeout={INTERVAL / 2}", slow, num_workers=2, timeout=INTERVAL / 2)


@trial(5)
def orphans(module: Any, dice: random.Random) -> None:
    """The loop's process is killed: no sentinel comes. A worker waits for a task with a timeout, and leaves when its parent is gone: `os.getppid()` is not `multiprocessing.parent_process().pid` then, even if it died before the worker's first look."""
    waits = dice.random() < 0.5
    reader, writer = multiprocessing.Pipe(duplex=False)

    def loop() -> None:
        iterator = iter(module.DataLoader(Samples(100, int), num_workers=2))
        if waits:
            next(iterator)
        writer.send([worker.pid for worker in multiprocessing.active_children()])
        time.sleep(60)

    parent = multiprocessing.Process(target=loop)
    parent.start()
    workers = reader.recv() if reader.poll(SOON) else []
    parent.kill()
    parent.join()
    if not until(lambda: not any(map(is_alive, workers)), SOON):
        raise differs(
            "the loop's process is killed", "its workers leave", f"{sum(map(is_alive, workers))} workers live"
        )


# --- At the end -------------------------------------------------------------------------------------------------------
def train(loader: str | Path | Any = "loader.py", epochs: int = 2) -> Outcome:
    """Train the network of `minidl demo` with the student's loader: two workers, eight photographs."""
    return apart(functools.partial(judged, _trained, loader, epochs), 5 * BOUND)


def _trained(loader: str | Path | Any, epochs: int) -> str:
    module = loaded(loader)
    dataset = demo.Photos(demo.cut_photographs(place("photographs")))
    torch.manual_seed(0)
    network = demo.Network(len(dataset.classes))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(epochs):
        batches = module.DataLoader(
            dataset, batch_size=16, sampler=torch.randperm(len(dataset)).tolist(), num_workers=2
        )
        steps = list(demo._epoch(batches, network, optimiser, torch.device("cpu")))
        losses.append(sum(steps) / len(steps))
    if len(steps) != len(batches) or losses[-1] >= losses[0]:
        raise differs(f"{epochs} epochs of {len(batches)} batches", "a loss that falls", losses)
    return f"Your loader has trained the demo's network: the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}."


def main() -> int:
    """Check a lab from a terminal."""
    parser = argparse.ArgumentParser(prog="python -m course.labs", description=check.__doc__)
    parser.add_argument("lab", type=int, choices=sorted(TRIALS))
    parser.add_argument("file", nargs="?", default="loader.py")
    parser.add_argument("--rounds", type=int, default=3, help="how often each trial runs (default: %(default)s)")
    arguments = parser.parse_args()
    outcome = check(arguments.lab, arguments.file, arguments.rounds)
    print(outcome)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
