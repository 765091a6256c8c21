"""The loader on one page: the same programs on torch's loader and on it; and its ends, under faults."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structure
import torch
import torch.utils.data
import workloads as wl
from differential import OPTIONS, TORCH, allowed, epochs, grid, observe, steps
from hypothesis import given
from hypothesis import strategies as st
from oracle_twice import different
from sizes import slow

from minidl import mini
from minidl.process_stat import is_alive

SOURCE = Path(mini.__file__).read_text()


def agree(program: Callable[[Any], Any], what: object = "") -> Any:
    """Fail unless both are observed to do the same, but for warnings; return the value."""
    expected, got = observe(program, TORCH), observe(program, mini)
    del expected["warnings"], got["warnings"]
    difference = different(expected, got)
    assert difference is None, f"{what}\ntorch: {expected['value']}\nmini:  {got['value']}\ndiffer in {difference}"
    return got["value"]


# --- The page ---------------------------------------------------------------------------------------------------------
def test_it_is_one_page_and_needs_nothing_else_of_the_package() -> None:
    assert structure.lines_of_code(SOURCE) <= 400
    assert not re.search(r"^(from|import) minidl", SOURCE, re.MULTILINE)


def test_its_parts_are_in_the_order_of_the_article() -> None:
    sections = re.findall(r"§(2\.\d(?:\.\d)?)", "\n".join(re.findall(r"# --- (.*)", SOURCE)))
    assert sections == sorted(sections)
    assert {"2.1", "2.3.1", "2.3.4", "2.4.2", "2.4.3", "2.4.4", "2.4.5", "2.4.6", "2.4.7"} <= set(sections)


# --- Batches ----------------------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("part", range(2))
def test_worker_processes(part: int) -> None:
    """Every pair of options' values at least once."""
    for case in grid(2)[part::2]:
        agree(lambda lib, case=case: epochs(lib, case), what=case)


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}).filter(allowed))
def test_one_process(case: dict[str, Any]) -> None:
    case |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    agree(lambda lib: epochs(lib, case), what=case)


@pytest.mark.live
@pytest.mark.parametrize("batch_size", [None, 1, 2])
@pytest.mark.parametrize(("begins", "num_workers"), [(True, 0), (True, 2), (False, 1)])
def test_an_iterable_dataset_that_ends_in_an_unusual_way(begins: bool, num_workers: int, batch_size: int) -> None:
    agree(lambda lib: steps(lib.DataLoader(Ending(begins), batch_size, num_workers=num_workers), limit=9))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(42)


SAMPLES: dict[str, Any] = {
    "tensors": torch.arange(6.0).reshape(3, 2),
    "arrays": np.arange(6, dtype=np.int16).reshape(3, 2),
    "numbers of NumPy": list(np.float32([1, 2, 3])),
    "truths": [True, False, True],
    "structures": [
        {"a": i, "b": [float(i), (str(i), np.arange(i, i + 2))], "p": wl.Point(torch.ones(i % 2 + 1 - i % 2), i)}
        for i in range(3)
    ],
}
LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle with a generator": lambda: {"shuffle": True, "generator": seeded(), "batch_size": 2},
    "list": lambda: {"sampler": [5, 0, 3, 3], "batch_size": 3},
    "torch's": lambda: {"sampler": torch.utils.data.WeightedRandomSampler([1, 0, 5, 0, 2], 6), "batch_size": 2},
    "batches": lambda: {"batch_sampler": [[0], [1, 2], [], [3, 4, 5]], "collate_fn": wl.as_list},
    "batches as samples": lambda: {"batch_size": None, "sampler": [[0, 1], [2, 6]]},
    "used up after one epoch": lambda: {"sampler": iter([4, 5, 6])},
    "empty": lambda: {"sampler": []},
    **{
        f"{name}, batch_size {size}": lambda name=name, size=size: {"dataset": SAMPLES[name], "batch_size": size}
        for name in SAMPLES
        for size in (None, 2)
    },
}
by_workers = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.live)])


@by_workers
@pytest.mark.parametrize("name", LOADERS)
def test_samplers_and_batches_of_every_kind(name: str, num_workers: int) -> None:
    def program(lib: Any) -> Any:
        loader = lib.DataLoader(**{"dataset": wl.Probe(7), "num_workers": num_workers} | LOADERS[name]())
        return [steps(loader), steps(loader)]

    agree(program)


@pytest.mark.parametrize("batch", [[1, 2.5], [1.5, 2], [1, 2], [True, False], [np.float32(1)] * 2, [np.int8(1)]])
def test_numbers_get_torchs_type(batch: list[Any]) -> None:
    """Of mixed numbers the first one's type decides."""
    ours, theirs = mini.default_collate(batch), torch.utils.data.default_collate(batch)
    assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


@pytest.mark.live
def test_a_worker_collates_into_shared_memory() -> None:
    assert all(batch.is_shared() for batch in mini.DataLoader(torch.arange(6.0).reshape(3, 2), num_workers=1))


@pytest.mark.live
@pytest.mark.parametrize("method", [*slow("spawn"), "forkserver"])
def test_start_methods(method: str) -> None:
    def program(lib: Any) -> Any:
        used = method if lib is mini else "fork"
        loader = lib.DataLoader(wl.Probe(5), 2, True, num_workers=2, multiprocessing_context=used)
        return [steps(loader), steps(loader)]

    agree(program)


@pytest.mark.live
def test_an_epoch_that_is_left_does_not_reach_into_the_next() -> None:
    """What persistent workers had fetched for it is dropped."""

    def program(lib: Any) -> Any:
        loader = lib.DataLoader(wl.Numbers(12), 2, num_workers=2, persistent_workers=True)
        seen = []
        for left_after in (1, 0, 4, 99):
            batches = []
            for batch in loader:
                batches.append(batch)
                if len(batches) > left_after:
                    break
            seen.append(batches)
        loader._iterator._shutdown_workers()
        return seen

    agree(program)


# --- Errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [
    {"num_workers": -1}, {"timeout": -1}, {"batch_size": 0}, {"prefetch_factor": 2}, {"persistent_workers": True},
    {"sampler": [0], "shuffle": True}, {"batch_sampler": [[0]], "batch_size": 2},
    {"batch_sampler": [[0]], "drop_last": True}, {"batch_size": None, "drop_last": True},
    {"dataset": wl.Stream(3), "shuffle": True}, {"dataset": wl.Stream(3), "sampler": []},
    {"dataset": wl.Stream(3), "batch_sampler": []}, {"num_workers": 1, "prefetch_factor": -1},
], ids=", ".join)  # fmt: skip
def test_options_that_exclude_each_other_are_refused_as_by_torch(options: dict[str, Any]) -> None:
    for lib in (TORCH, mini):
        with pytest.raises(ValueError):
            lib.DataLoader(**{"dataset": range(3), **options})


class Ending(torch.utils.data.IterableDataset[int]):
    """Three samples by an object that only has `__next__`, then an end that is a type of its own; or no beginning."""

    def __init__(self, begins: bool = True) -> None:
        self.begins = begins

    def __iter__(self) -> Any:
        if not self.begins:
            raise StopIteration
        return OnlyNext()


class OnlyNext:
    given = 0

    def __next__(self) -> int:
        if self.given == 3:
            raise OwnEnd
        self.given += 1
        return self.given


class OwnEnd(StopIteration):
    pass


PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "sample": lambda: {"dataset": wl.Failing(6, wl.SimpleError("one"), at=(0, 5))},
    "collate": lambda: {"dataset": wl.Numbers(6), "collate_fn": wl.failing_collate},
    "unequal lengths": lambda: {"dataset": [[1], [1, 2], [3], [4]]},
    "stream": lambda: {"dataset": wl.FailingStream(4, "next"), "batch_size": 1},
    "sampler": lambda: {"dataset": wl.Numbers(9), "sampler": wl.FailingSampler([0, 1, 2])},
    "index beyond the end": lambda: {"dataset": [1, 2, 3], "sampler": [0, 1, 2, 3]},
    "sets": lambda: {"dataset": [{1}, {2}, {3}]},
    "texts of NumPy": lambda: {"dataset": [np.array(["a"])] * 3},
    **{f"sample, {name}": lambda name=name: {"dataset": wl.Failing(6, wl.ERRORS[name])} for name in wl.ERRORS},
}


@by_workers
@pytest.mark.parametrize("place", PLACES)
def test_errors_of_every_type_in_every_place(place: str, num_workers: int) -> None:
    """Type and first line are torch's; the batches after the error still come."""

    def program(lib: Any) -> Any:
        return steps(lib.DataLoader(**({"batch_size": 2, "num_workers": num_workers} | PLACES[place]())), limit=12)

    assert any(isinstance(step, tuple) for step in agree(program))


@pytest.mark.live
def test_an_error_before_the_first_task_is_that_of_each_task() -> None:
    seen = steps(mini.DataLoader(wl.Numbers(2), num_workers=1, worker_init_fn=wl.failing_init))
    assert [kind for kind, _ in seen] == [wl.SimpleError] * 2


# --- The ends ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini, "MP_STATUS_CHECK_INTERVAL", 0.3)


@pytest.fixture(params=["SIGCHLD", "polling"])
def told_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How a death is noticed."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request.param == "polling":
        monkeypatch.setattr(mini, "_set_SIGCHLD_handler", lambda: None)
        monkeypatch.setattr(mini, "MP_STATUS_CHECK_INTERVAL", 0.3)
    yield request.param
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.live
@pytest.mark.usefixtures("told_by")
@pytest.mark.parametrize("death", [wl.kill_myself, wl.exit_at_once, wl.segfault])
def test_a_worker_that_dies_is_noticed(tmp_path: Path, death: Any, capfd: pytest.CaptureFixture[str]) -> None:
    iterator = iter(mini.DataLoader(wl.Gate(20, tmp_path / "die", at=5, thing=death), num_workers=2))
    seen = [int(next(iterator)) for _ in range(5)]
    (tmp_path / "die").touch()
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)"):
        seen += (int(batch) for batch in iterator)
    assert seen == list(range(5))
    pids = [worker.pid for worker in iterator._workers]
    del iterator
    wl.wait_until_gone(pids)


@pytest.mark.live
@pytest.mark.usefixtures("impatient")
def test_a_timeout_is_an_error_and_the_workers_end(tmp_path: Path) -> None:
    with wl.no_sigchld():
        iterator = iter(mini.DataLoader(wl.Gate(4, tmp_path / "go"), num_workers=1, timeout=0.5))
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds"):
            next(iterator)
        (tmp_path / "go").touch()
        assert [int(batch) for batch in iterator] == [0, 1, 2, 3]


@pytest.mark.live
def test_an_iterator_that_is_dropped_ends_its_workers() -> None:
    iterator = iter(mini.DataLoader(wl.Numbers(100), num_workers=2))
    next(iterator)
    pids = [worker.pid for worker in iterator._workers]
    del iterator
    assert not any(map(is_alive, pids))


@pytest.mark.live
@pytest.mark.usefixtures("impatient")
def test_a_worker_that_hangs_is_terminated(tmp_path: Path) -> None:
    iterator = iter(mini.DataLoader(Stuck(tmp_path / "begun"), num_workers=1))
    deadline = time.monotonic() + wl.BOUND
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    worker = iterator._workers[0]
    iterator._shutdown_workers()
    assert worker.exitcode == 0, "torch's handler of SIGTERM in a worker exits so"


class Stuck(wl.Numbers):
    """A sample that does not end; it says that it has begun."""

    def __init__(self, begun: Path) -> None:
        super().__init__(4)
        self.begun = begun

    def __getitem__(self, index: int) -> Any:
        wl.touch(str(self.begun))
        return wl.hang()


@pytest.mark.live
def test_a_loader_whose_worker_can_not_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: lost.append(about.exc_value))
    loader = mini.DataLoader(
        wl.Numbers(3), num_workers=1, collate_fn=lambda batch: batch, multiprocessing_context="spawn"
    )
    with pytest.raises((AttributeError, TypeError), match="local object"):
        iter(loader)
    gc.collect()
    assert lost == []


@pytest.mark.live
def test_a_forked_child_ends_nobody() -> None:
    """It may also have an iterator of its own, with the id of the one that it has dropped."""
    iterator = iter(mini.DataLoader(wl.Numbers(9), num_workers=1))
    next(iterator)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            kind, was, others = type(iterator), id(iterator), []
            del iterator
            while id(again := object.__new__(kind)) != was and len(others) < 10**5:
                others.append(again)
            again.__init__(mini.DataLoader(wl.Numbers(9), num_workers=1))
            os._exit(0 if id(again) == was else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [int(batch) for batch in iterator] == list(range(1, 9))


LEFT = """
import sys, time, workloads as wl
from minidl import mini
options = {"collate_fn": lambda batch: bytes(10**6)} if sys.argv[2] == "full" else {}
loader = mini.DataLoader(wl.Numbers(10**6), num_workers=2, persistent_workers=sys.argv[1] == "persistent", **options)
iterator = iter(loader)
next(iterator)
print(*(worker.pid for worker in iterator._workers), flush=True)
if sys.argv[2] == "wait":
    while True:
        next(iterator)
if sys.argv[2] == "full":
    time.sleep(1000)
if sys.argv[2] == "raise":
    raise KeyError("the program's own")
"""


@pytest.mark.live
@pytest.mark.parametrize(
    ("end", "persistent"),
    [("end", "not"), ("raise", "persistent"), *slow(("end", "persistent"))],
)
def test_python_ends(end: str, persistent: str) -> None:
    done = wl.run(LEFT, persistent, end)
    assert (done.returncode, "the program's own" in done.stderr) == ((0, False) if end == "end" else (1, True))
    assert "Exception ignored" not in done.stderr
    wl.wait_until_gone([int(pid) for pid in done.stdout.split()])


@pytest.mark.live
@pytest.mark.parametrize(
    ("number", "does"), [(signal.SIGKILL, "full"), *slow((signal.SIGINT, "wait"), (signal.SIGTERM, "wait"))]
)
def test_the_loaders_process_is_ended(number: int, does: str) -> None:
    """Also while the pipe of the result queue is full, which nobody reads any more."""
    with wl.started(LEFT, "not", does) as program:
        pids = wl.pids_said_by(program)
        os.kill(program.pid, number)
        program.wait(wl.BOUND)
        wl.wait_until_gone(pids)
        assert program.returncode in (-number, 1)


# --- Page-locked memory -----------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned(persistent: bool) -> None:
    def program(lib: Any) -> Any:
        loader = lib.DataLoader(
            wl.Tensors(6), 2, num_workers=2, pin_memory=True, persistent_workers=persistent, shuffle=True
        )
        seen = [(batch.is_pinned(), batch) for _ in range(2) for batch in loader]
        if persistent:
            loader._iterator._shutdown_workers()
        return seen

    assert all(pinned for pinned, _ in agree(program))


@pytest.mark.live
@pytest.mark.usefixtures("simulate", "impatient")
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pin_thread_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(data: Any) -> Any:
        raise SystemExit

    monkeypatch.setattr(mini, "pin_memory", die)
    with wl.no_sigchld(), pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
        next(iterator := iter(mini.DataLoader(wl.Tensors(6), num_workers=1, pin_memory=True)))
    monkeypatch.setattr(iterator, "_try_get_data", lambda timeout: pytest.fail("it waits for a thread that is dead"))
    with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
        next(iterator)
