"""The same programs on worker processes and on worker threads: what each program sees, in the same words but for a few.

`test_iterators` and `test_shutdown` run their programs on both, too: options, samplers, batches, first lines of errors,
epochs that are broken off, shutdowns. Here is what is about time, deaths, and what a worker knows.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.utils.data
import workloads as wl

import minidl
from minidl.loader.driver import Get

pytestmark = pytest.mark.live


def said(act: Callable[[], Any]) -> str:
    """The type and the words of what it raises, in the words of threads, without numbers that differ in each run."""
    try:
        return f"returned {act()!r}"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    for pattern, word in REPLACED:
        words = re.sub(pattern, word, words)
    return words


REPLACED = [
    (r"DataLoader worker process", "DataLoader worker thread"),
    (r"\((pid|pids|pid\(s\)|thread|thread\(s\)) [0-9, ]+", r"(NUMBER"),
    (r"[0-9]+\.[0-9] s", "T s"),
    (r"line [0-9]+", "line N"),
    (r"0x[0-9a-f]+", "0xN"),
]


class Fails(wl.Numbers):
    def __getitem__(self, index: int) -> int:
        return self.deeper(index)

    def deeper(self, index: int) -> int:
        if index == 3:
            raise wl.SimpleError("in the third")
        return index


class Leaves(wl.Numbers):
    def __getitem__(self, index: int) -> int:
        return sys.exit(3) if index == 3 else index  # type: ignore[return-value]


class Waits(wl.Numbers):
    """Sample 3 comes late."""

    def __getitem__(self, index: int) -> int:
        time.sleep(1.5 * (index == 3))
        return index


def impatient(iterator: Any) -> Any:
    """The same with a timeout of half a second from here on: a process needs longer to start."""
    iterator._timeout, iterator._driver.get = 0.5, Get(0.5)
    return iterator


class Knows(wl.Numbers):
    def __getitem__(self, index: int) -> Any:
        ours: Any = minidl.get_worker_info()
        theirs: Any = torch.utils.data.get_worker_info()
        return ours.id, ours.num_workers, ours.seed, type(ours.dataset).__name__, theirs.id, theirs.seed


def errors(make: Any) -> Any:
    """The whole text of a sample's error, with the worker's traceback, and what comes after it."""
    iterator = iter(make(Fails(6)))
    return [said(lambda: next(iterator)) for _ in range(7)]


def errors_out_of_order(make: Any) -> Any:
    iterator = iter(make(Fails(6), in_order=False))
    return sorted(said(lambda: next(iterator)) for _ in range(7))


def errors_again(make: Any) -> Any:
    """Persistent workers serve on after an error."""
    with make(Fails(6), persistent_workers=True) as loader:
        return [[said(lambda it=iterator: next(it)) for _ in range(7)] for iterator in map(iter, [loader] * 2)]


def initialisation(make: Any) -> Any:
    iterator = iter(make(wl.Numbers(6), worker_init_fn=wl.failing_init))
    return [said(lambda: next(iterator)) for _ in range(7)]


def deaths(make: Any) -> Any:
    """Of sys.exit: what it is told of, at its turn or before, and that the loader can be used no more."""
    iterator = iter(make(Leaves(8)))
    seen: list[str] = []
    while len(seen) < 8 and not (seen and seen[-1].startswith("RuntimeError")):
        seen.append(said(lambda: next(iterator)))
    iterator.close()
    return seen[-1]


def deaths_of_persistent_workers(make: Any) -> Any:
    """The next epoch says so, too."""
    loader = make(Leaves(8), persistent_workers=True)
    seen = said(lambda: list(loader)), said(lambda: iter(loader))
    loader.close()
    return seen


def timeouts(make: Any) -> Any:
    """A late batch is an error, and comes after it."""
    iterator = iter(make(Waits(6)))
    seen = [next(iterator) for _ in range(3)]
    impatient(iterator)
    late = [said(lambda: next(iterator))]
    while len(late) < 9 and late[-1].startswith("RuntimeError"):
        late.append(said(lambda: next(iterator)))
    return seen, late[0], late[-1], list(iterator)


def persistence(make: Any) -> Any:
    """The same workers serve every epoch, also after one that was broken off; close() ends them, and new ones serve."""
    with make(Knows(6), persistent_workers=True) as loader:
        first = iter(loader)
        workers = list(first._workers)
        next(first)
        whole = [row[:2] for row in loader]
        same = loader._iterator._workers == workers
    again = [row[:2] for row in loader]
    loader.close()
    return whole, same, [worker.is_alive() for worker in workers], again


def worker_information_of_epochs(make: Any) -> Any:
    """New workers have new seeds; persistent ones keep theirs."""
    torch.manual_seed(7)
    loader = make(Knows(4))
    seen = [list(loader), list(loader)]
    with make(Knows(4), persistent_workers=True) as kept:
        return seen, list(kept) == list(kept)


def from_another_thread(make: Any) -> Any:
    """A loader may be iterated in any thread."""
    seen: list[Any] = []

    def iterate() -> None:
        seen.extend(make(wl.Numbers(6)))
        seen.append(said(lambda: list(make(Fails(6)))))

    thread = threading.Thread(target=iterate)
    thread.start()
    thread.join()
    return seen


def closed_by_its_own_sampler(make: Any) -> Any:
    """The sampler may close the iterator that draws from it."""

    def indices() -> Iterator[int]:
        yield from range(5)
        iterators[0].close()
        yield 5

    loader = make(wl.Numbers(9), sampler=indices(), prefetch_factor=1)
    iterators = [iter(loader)]
    return list(iterators[0])


PROGRAMS = [
    errors, errors_out_of_order, errors_again, initialisation, deaths, deaths_of_persistent_workers, timeouts,
    persistence, worker_information_of_epochs, from_another_thread, closed_by_its_own_sampler,
]  # fmt: skip


@pytest.mark.parametrize("pinned", [False, True], ids=["plain", "pinned"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_threads_do_as_processes_do(program: Any, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")

    def make(method: str) -> Any:
        options = {"batch_size": None, "num_workers": 2, "worker_method": method, "pin_memory": pinned}
        return lambda dataset, **more: minidl.DataLoader(dataset, **{**options, **more})

    assert program(make("thread")) == program(make("multiprocessing"))
