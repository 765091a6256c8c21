"""Datasets, collate functions and worker_init_fns for the loader's tests; importable, as spawned workers import them.

All of them run in torch's workers and in ours: they ask `torch.utils.data.get_worker_info`, which answers in both.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data

import minidl
import minidl.loader.worker as worker_module
from minidl.device import sim
from minidl.process_stat import is_alive, remove_segments_of

# Some of them are for the tests that import this module.
from minidl.prove.lab.faulty import (  # noqa: F401
    At,
    Numbers,
    chances,
    die_in_the_middle_of_a_message,
    hang,
    hang_without_sigterm,
    kill_myself,
    wait_for_the_end,
    worker,
    worker_spec,
)
from minidl.prove.lab.faulty import (
    SharedStream as Stream,
)
from minidl.prove.sessions import living
from minidl.wire import signal_handling


# --- Datasets that answer ---------------------------------------------------------------------------------------------
class Probe(Numbers):
    """i -> i, who serves it, and a draw from each generator."""

    def __getitem__(self, index: int) -> Any:
        return index, worker(), chances()


class Batched(Probe):
    """Serves a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Tensors(Numbers):
    """i -> a float tensor of `width` elements, all i."""

    def __init__(self, n: int, width: int = 4) -> None:
        super().__init__(n)
        self.width = width

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(index))


class Mixed(Numbers):
    """i -> a nest of everything that default_collate knows."""

    def __getitem__(self, index: int) -> Any:
        return {
            "tensor": torch.arange(3) + index,
            "array": np.arange(2.0) * index,
            "number": index,
            "float": index / 2,
            "text": f"sample {index}",
            "bytes": b"%d" % index,
            "list": [index, -index],
            "point": Point(index, torch.tensor(index)),
        }


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class SizedStream(Stream):
    """Says a length of its own, right or wrong."""

    def __init__(self, n: int, length: int) -> None:
        super().__init__(n)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"SizedStream({self.n}, {self.length})"


class OurStream(minidl.IterableDataset[Any]):
    """minidl's kind of stream, sharded by minidl's worker information."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = minidl.get_worker_info()
        mine, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(self.n)[mine::workers]:
            yield index, worker(), chances()


class OurNumbers(minidl.Dataset[int]):
    """minidl's kind of map-style dataset."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return index


# --- Collate functions and worker_init_fns ----------------------------------------------------------------------------
def as_list(samples: list[Any]) -> list[Any]:
    return samples


def with_chances(samples: Any) -> Any:
    return samples, worker(), chances()


def draw_once(worker_id: int) -> None:
    """Knows its id already, and leaves a trace in all three generators."""
    assert worker_id == worker()[0]
    chances()


# --- Everything that fails --------------------------------------------------------------------------------------------
class SimpleError(Exception):
    """Rebuilt from its text."""


class TwoArgumentsError(Exception):
    """Can't be built from a text; pickles because its arguments are what its constructor wants."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class MessageError(Exception):
    """Wants its text as `message`."""

    message = "the class has one too"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UnpicklableError(Exception):
    """Neither its text nor its pickle rebuilds it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")

    def __reduce__(self) -> Any:
        raise TypeError("this error does not travel")


ERRORS: dict[str, BaseException] = {
    "simple": SimpleError("said once"),
    "value": ValueError("a", "b"),
    "key": KeyError("no such key"),
    "stop": StopIteration("not an end"),
    "os": FileNotFoundError(2, "No such file", "photo.jpg"),
    "message": MessageError("in a message"),
    "empty": RuntimeError(),
    "index": IndexError("out of range"),
    "memory": MemoryError("too big"),
    "assertion": AssertionError("not so"),
    "not implemented": NotImplementedError(),
}
"""Errors that both loaders raise again as the same type."""


class Failing(Numbers):
    """Raises `error` at the indices of `at`."""

    def __init__(self, n: int, error: BaseException, at: tuple[int, ...] = (3,)) -> None:
        super().__init__(n)
        self.error = error
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index in self.at:
            raise self.error
        return index


class FailingBatch(Numbers):
    """Raises where a whole batch is asked for."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        raise SimpleError(f"none of {indices}")


class FailingStream(Stream):
    """Fails at its `place` ("iter", "next"); goes no further afterwards, as generators do."""

    def __init__(self, n: int, place: str) -> None:
        super().__init__(n)
        self.place = place

    def __iter__(self) -> Iterator[Any]:
        if self.place == "iter":
            raise SimpleError("no iterator")
        return self.samples()

    def samples(self) -> Iterator[Any]:
        yield 0
        yield 1
        raise SimpleError("no third sample")


def failing_collate(samples: Any) -> Any:
    if samples == [2, 3]:
        raise SimpleError("these two don't go together")
    return samples


def failing_init(worker_id: int) -> None:
    raise SimpleError(f"worker {worker_id} does not begin")


def hang_in_init(worker_id: int) -> None:
    hang()


class HangsAtOnce(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        hang()
        return iter(())


class FailingSampler:
    """Gives its items, then raises."""

    def __init__(self, items: list[Any], error: type[Exception] = SimpleError) -> None:
        self.items = items
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield from self.items
        raise self.error(f"no item after the first {len(self.items)}")

    def __len__(self) -> int:
        return len(self.items) + 1


class NotIterable:
    """A sampler whose __iter__ fails."""

    def __iter__(self) -> Iterator[int]:
        raise SimpleError("no order")


class Unpicklable:
    """Can't be sent."""

    def __getstate__(self) -> Any:
        raise TypeError("this object does not travel")


class Unbuildable:
    """Can be sent, and not rebuilt on the other side."""

    def __reduce__(self) -> Any:
        return _refuse_to_be_built, ()


def _refuse_to_be_built() -> Any:
    raise ValueError("this object does not arrive")


# --- Workers that die, hang and keep a journal ------------------------------------------------------------------------
def collect() -> int:
    """Make garbage whose collection takes some milliseconds; return the number of collected objects."""
    cycle: list[Any] = [[] for _ in range(200_000)]
    cycle.append(cycle)
    del cycle
    return gc.collect()


def exit_at_once() -> None:
    os._exit(7)


def small_files(worker_id: int) -> None:
    """Shared memory counts as a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def take_all_descriptors() -> torch.Tensor:
    """The process keeps them: as many as are few."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)
    return torch.zeros(1)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def die_with_the_lock() -> None:
    """Be killed with the lock that every writer takes: no other message, be it a sentinel, gets through any more."""
    worker_spec().result_queue._wlock.acquire()
    kill_myself()


def kill_myself_when_all_is_sent() -> None:
    """The worker is killed once its feeder thread waits for more: a batch may arrive before its lock is released."""
    feeders = [thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"]
    deadline = time.monotonic() + 30
    while any(not _waits(thread) for thread in feeders) and time.monotonic() < deadline:
        time.sleep(0.001)
    kill_myself()


def _waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == "wait"


def killed_in_a_sample(directory: Path) -> Any:
    """An iterator after five batches whose worker is killed in its next sample, and not in a write.

    A worker that is killed in a write takes along the lock that the other one needs.
    """
    iterator = iter(
        minidl.DataLoader(Gate(20, directory / "die", at=5, thing=kill_myself_when_all_is_sent), num_workers=2)
    )
    for _ in range(5):
        next(iterator)
    (directory / "die").touch()
    return iterator


class Journal(Numbers):
    """Writes a line for each sample that it has served, whole and at once, before it serves it."""

    def __init__(self, n: int, path: Path, pause: float = 0.0) -> None:
        super().__init__(n)
        self.path = str(path)
        self.pause = pause

    def __getitem__(self, index: int) -> int:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, f"{worker()[0]} {os.getpid()} {index}\n".encode())
        finally:
            os.close(fd)
        time.sleep(self.pause)
        return index


class Gate(At):
    """As At, but sample `at` waits until the file `path` exists: the test decides when it goes on."""

    def __init__(self, n: int, path: Path, at: int = 0, thing: Any = int) -> None:
        super().__init__(n, at, thing)
        self.path = str(path)

    def __getitem__(self, index: int) -> Any:
        while index == self.at and not os.path.exists(self.path):
            time.sleep(0.002)
        return super().__getitem__(index)


def touch(path: str) -> int:
    Path(path).touch()
    return 0


def not_shared(samples: list[Any]) -> Any:
    """A batch in the worker's private memory."""
    return torch.stack(samples).clone()


def impatient(monkeypatch: Any, seconds: float = 0.3) -> None:
    """Liveness checks and joins of our loader after `seconds` in place of 5, for tests in which an actor is stuck."""
    from minidl.loader import driver, pin_memory

    for module in (driver, pin_memory, worker_module):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", seconds)


@contextlib.contextmanager
def no_sigchld() -> Iterator[None]:
    """Let our loader find deaths by looking. SIGCHLD's handler, also an earlier test's, would raise in the test."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    installed, signal_handling._SIGCHLD_handler_set = signal_handling._SIGCHLD_handler_set, True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = installed
        signal.signal(signal.SIGCHLD, before)


# --- Processes --------------------------------------------------------------------------------------------------------
BOUND = 110.0
"""Seconds within which an end counts as bounded: far above any that is meant, even on a machine where each import of
torch takes 20 s; below the limit of a test."""


def command_and_environment(script: str, *arguments: object, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Python code in a process of its own, with the tests importable; the test is skipped if it needs a compiler."""
    if environment.get(sim.VARIABLE) == "1":
        sim.built()
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(minidl.__file__).parent.parent)])
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *map(str, arguments)]
    return command, os.environ | {"PYTHONPATH": paths} | environment


def run(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; what it says comes back as text."""
    command, env = command_and_environment(script, *arguments, **environment)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=BOUND, check=False)


class Program(subprocess.Popen[str]):
    """A program that is killed with its group if the test fails in its `with`, which would wait for it otherwise."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None and self.poll() is None:
            kill_group(self)
        super().__exit__(kind, error, trace)


def started(script: str, *arguments: object, stderr: Any = subprocess.DEVNULL) -> Program:
    """Start it in a process group of its own."""
    command, env = command_and_environment(script, *arguments)
    return Program(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)


def kill_group(program: subprocess.Popen[Any]) -> None:
    """Kill a program with its process group, and remove the shared memory that it could no longer unlink."""
    members = living(program.pid)
    os.killpg(program.pid, signal.SIGKILL)
    program.communicate()
    wait_until_gone(members)
    remove_segments_of(members)


class Unpinnable:
    """A batch that fails when it is pinned."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def pin_memory(self) -> Any:
        raise ValueError("no room")


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    """An accelerator whose pinned memory is a copy, so that a pin thread is started on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="pretended"))
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        yield


def pids_said_by(program: subprocess.Popen[str]) -> list[int]:
    """The numbers in the next line of what the program says."""
    return [int(pid) for pid in program.stdout.readline().split()]


def wait_until_gone(pids: list[int]) -> None:
    """Wait until all of these processes have ended."""
    deadline = time.monotonic() + BOUND
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still there: {list(filter(is_alive, pids))}"
        time.sleep(0.01)


class ReadOnly(Mapping[str, Any]):
    """A mapping that can only be built whole, from a dict."""

    def __init__(self, items: Any) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)
