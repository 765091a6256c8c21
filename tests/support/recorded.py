"""Real runs, recorded once a session: what the checker must accept, and what its mutations start from.

`recorded(name)` gives the trace of one of `RUNS`. Small runs in this process, two workers unless their name says more.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import workloads as wl
from kill_resume import Case

import minidl
from minidl.arena import arena
from minidl.device import sim
from minidl.record import recorder, step_parts
from minidl.tracefile.events import Phase
from minidl.tracefile.reader import Trace, read_trace

PLACE = Path(tempfile.mkdtemp(prefix="minidl-recorded-"))
atexit.register(shutil.rmtree, PLACE, ignore_errors=True)


class Uneven(minidl.IterableDataset[torch.Tensor]):
    """Worker 0 ends long before the last one."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = minidl.get_worker_info()
        return iter(torch.arange(3.0 + 4 * (info.id if info is not None else 0)))


class Failing(wl.Tensors):
    """Sample 5 fails."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise wl.SimpleError("sample 5")
        return super().__getitem__(index)


class Stuck(wl.Tensors):
    """Sample 5 does not end."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            wl.hang()
        return super().__getitem__(index)


def failing_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    if samples[0][0] == 4:
        raise wl.SimpleError("a batch that can't be made")
    return torch.stack(samples)


def record(run: Callable[[Path], None], directory: Path, ring_bytes: int | None = None) -> Path:
    """Record `run(directory)` with a simulated device; a killed worker is found by looking, every 0.3 s."""
    with pytest.MonkeyPatch.context() as patch, wl.no_sigchld():
        patch.setenv("MINIDL_SIMULATE_DEVICE", "1")
        if run.__name__ == "killed":
            wl.impatient(patch)
        with minidl.trace(directory / "trace", ring_bytes=ring_bytes):
            run(directory)
    return directory / "trace"


def drain(iterator: Any, most: int = 1000) -> int:
    """Take batches, past errors, to the epoch's end or to the first error that comes again; their number."""
    count, last = 0, ""
    for _ in range(most):
        try:
            next(iterator)
            count += 1
        except StopIteration:
            return count
        except Exception as error:
            if last == str(error):
                return count
            last = str(error)
    return count


def loop(dataset: Any, *, epochs: int = 1, stop_after: int = 1000, **options: Any) -> None:
    """Iterate over a loader, each epoch for so many batches; then close it."""
    with minidl.DataLoader(dataset, **({"batch_size": 2, "num_workers": 2} | options)) as loader:
        for _ in range(epochs):
            drain(iter(loader), stop_after)


def pinning(*args: Any, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDL_SIMULATE_DEVICE", "1")
        loop(*args, pin_memory=True, **options)


def timed_out() -> None:
    with pytest.MonkeyPatch.context() as patch:
        wl.impatient(patch)
        iterator: Any = iter(minidl.DataLoader(wl.At(20, 1, wl.hang), num_workers=1, timeout=0.2))
        until_recorded("sample", Phase.BEGIN, task=1)
        until_recorded("result_write", Phase.END, task=0)
        drain(iterator, 3)
        iterator.close()


def killed_worker() -> None:
    """In sample 5, when its feeder thread is idle: killed in a write, it might take a lock or an event along."""
    with pytest.MonkeyPatch.context() as patch:
        wl.impatient(patch)
        iterator: Any = iter(minidl.DataLoader(Stuck(16), batch_size=2, num_workers=2))
        until_recorded("sample", Phase.BEGIN, task=2, y=5)
        until_recorded("result_write", Phase.END, task=0)
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        drain(iterator)
        iterator.close()


def until_recorded(name: str, phase: Phase, **values: int) -> None:
    """Wait until the trace that this process records has such an event; the test's own timeout ends it."""
    pen = recorder.active()
    while True:
        rows = read_trace(pen.config.directory).select(name, phase)
        if any(all(row[column] == value for column, value in values.items()) for row in rows):
            return
        time.sleep(0.01)


def several() -> None:
    """Two loaders at the same time, one of them persistent, one with a batch of one."""
    first: Any = minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=1, persistent_workers=True)
    second: Any = minidl.DataLoader(wl.Tensors(6), num_workers=1)
    for one, other in zip(first, second, strict=False):
        assert len(one) >= len(other)
    loop(wl.Tensors(8), num_workers=0)
    first._iterator._shutdown_workers()


def reordered(place: Path = PLACE) -> None:
    """Task 0 waits until task 1 lies in the reorder buffer. place: of the file that it waits for."""
    gate = place / "gate"
    gate.unlink(missing_ok=True)  # an earlier run in this process has opened it
    iterator: Any = iter(minidl.DataLoader(wl.Gate(6, gate), num_workers=2))

    def open_gate() -> None:
        while len(iterator._task_info.get(1, ())) < 2:
            time.sleep(0.001)
        gate.touch()

    opener = threading.Thread(target=open_gate)
    opener.start()
    drain(iterator)
    opener.join()


def skipped() -> None:
    """Tasks that a worker finds in its queue when it is told that it is over."""
    iterator: Any = iter(minidl.DataLoader(wl.At(20, 1, wl.wait_for_the_end), num_workers=1, prefetch_factor=4))
    next(iterator)
    iterator.close()


def _be_killed(place: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wl.impatient(patch, 0.1)
        with minidl.trace(place):
            iterator: Any = iter(minidl.DataLoader(wl.Tensors(40), batch_size=2, num_workers=2))
            drain(iterator, 7)
            os.kill(os.getpid(), signal.SIGKILL)


def killed_program(place: Path) -> None:
    """The loader's process is killed; its workers find it gone, and leave."""
    program = multiprocessing.get_context("fork").Process(target=_be_killed, args=(str(place),))
    program.start()
    program.join(wl.BOUND)
    program.close()
    pids = read_trace(place).select("worker_ready")["x"].tolist()
    wl.wait_until_gone(pids)


def resumed(workers: int, in_order: bool = True) -> None:
    """An epoch is left after five batches; another loader goes on there. The program takes a state after each batch."""
    case = Case("iterable with state", workers, in_order, persistent=workers > 0, state_every=2)
    with case.loader() as loader, case.loader() as other:
        for _ in zip(range(5), loader, strict=False):
            state = loader.state_dict()
        other.load_state_dict(state)
        for _ in range(2):
            for _ in other:
                other.state_dict()


class Wide(wl.Tensors):
    """Samples of 12 KB: a batch of them goes into a slab."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3000,), float(index))


def beside_shared(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """A batch that is collated into a slab, a tensor that is copied into it, and one that is shared already."""
    return [minidl.default_collate(samples), samples[0] + 1, torch.ones(2).share_memory_()]


def slabs() -> None:
    """One epoch frees its slabs one by one, the other sees a fork while a batch is visible."""
    options: Any = {"num_workers": 2, "transport": "arena", "persistent_workers": True, "collate_fn": beside_shared}
    with minidl.DataLoader(Wide(24), 2, **options) as loader:
        for epoch in range(2):
            for number, batch in enumerate(loader):
                assert len(batch) == 3
                if (epoch, number) == (1, 1):
                    arena._before_fork()
                    arena._after_fork_in_parent()
            del batch


SCRIPT = """
import sys
import minidl, workloads as wl
if __name__ == "__main__":
    for method, place in zip(("spawn", "forkserver"), sys.argv[1:]):
        with minidl.trace(place):
            loader = minidl.DataLoader(wl.Tensors(8), batch_size=2, num_workers=1, multiprocessing_context=method)
            assert len(list(loader)) == 4
"""


@functools.cache
def start_methods() -> dict[str, Path]:
    """Two traces of one program, one of each start method that must not inherit this process."""
    places = {name: PLACE / name for name in ("spawn", "forkserver")}
    done = wl.run(SCRIPT, *places.values())
    assert done.returncode == 0, done.stderr
    return places


Run = Callable[[], None]


def descent(module: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that changes nothing, of a class that is new: torch wraps the step of one once."""

    class Descent(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            if closure is not None:
                with torch.enable_grad():
                    closure()

    return Descent(module.parameters(), {})


EVERY_STEP: Final = mock.patch.multiple(step_parts, PAUSE_NS=0, TIMING_PAUSE_NS=0)
"""The parts of each step are recorded, also by a device's clock."""


def parts_on_a_device() -> None:
    """Forward parts on the simulated device, without gradients: the process may have had a backward pass before."""
    sim.load()
    net = torch.nn.Linear(4, 1).requires_grad_(False).to("sim")
    with EVERY_STEP, step_parts.step_parts_recorded(), minidl.DataLoader(wl.Tensors(8), 2) as loader:
        for batch in loader:
            net(batch.to("sim"))


def training() -> None:
    """Each part of a training step, in both epochs; there is no process group, so that a collective fails."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    with EVERY_STEP, step_parts.step_parts_recorded(), minidl.DataLoader(wl.Tensors(8), 2) as loader:
        optimizer = descent(net)
        for batch in (*loader, *loader):
            net(batch).sum().backward()
            optimizer.step(lambda: None)
            net.eval()
            with torch.no_grad():
                net(batch).to("meta")
            net.train()
            torch.save(net.state_dict(), os.devnull)
            with pytest.raises(ValueError, match="process group"):
                torch.distributed.barrier()


RUNS: dict[str, Run] = {
    "training": training,
    "no workers": lambda: loop(wl.Tensors(8), num_workers=0, epochs=2),
    "no workers, an error": lambda: loop(Failing(8), num_workers=0),
    "fork": lambda: loop(wl.Tensors(24)),
    "persistent": lambda: loop(
        wl.Tensors(32), epochs=3, persistent_workers=True, batch_size=4, worker_init_fn=wl.draw_once
    ),
    "persistent, left early": lambda: loop(wl.Tensors(32), epochs=3, stop_after=3, persistent_workers=True),
    "left early": lambda: loop(wl.Tensors(32), epochs=2, stop_after=3),
    "in_order off": lambda: loop(wl.Tensors(24), num_workers=3, in_order=False),
    "in_order off, uneven": lambda: loop(Uneven(), num_workers=3, in_order=False, persistent_workers=True, epochs=2),
    "iterable": lambda: loop(wl.Stream(12)),
    "iterable, uneven": lambda: loop(Uneven(), num_workers=3),
    "iterable, persistent": lambda: loop(Uneven(), num_workers=3, epochs=2, persistent_workers=True),
    "pinned": lambda: pinning(wl.Tensors(32), batch_size=4),
    "pinned, persistent": lambda: pinning(wl.Tensors(12), persistent_workers=True, epochs=2),
    "pinned, left early": lambda: pinning(wl.Tensors(32), stop_after=2),
    "dataset error": lambda: loop(Failing(24)),
    "collate error": lambda: loop(wl.Tensors(24), collate_fn=failing_collate),
    "worker_init error": lambda: loop(wl.Tensors(24), worker_init_fn=wl.failing_init),
    "sampler error": lambda: loop(wl.Tensors(24), sampler=wl.FailingSampler(list(range(12)))),
    "unpicklable batch": lambda: loop(wl.At(12, 3, wl.Unpicklable), collate_fn=wl.as_list),
    "timeout": timed_out,
    "killed worker": killed_worker,
    "reordered": reordered,
    "skipped tasks": skipped,
    "several loaders": several,
    "at once": lambda: loop(wl.Batched(24)),
    "slabs": slabs,
    "resumed": lambda: resumed(2),
    "resumed, any order": lambda: resumed(2, in_order=False),
    "resumed, no workers": lambda: resumed(0),
}
"""Each records loaders of this process."""

OTHER: dict[str, Callable[[Path], None]] = {"killed program": killed_program}
"""Each records into the directory that it is given."""

CONFIGS: dict[str, tuple[Run, dict[str, Any]]] = {
    "detail batch": (lambda: loop(wl.Tensors(24), epochs=2), {"detail": "batch"}),
    "ring": (lambda: loop(wl.Tensors(160), epochs=3, persistent_workers=True), {"ring_bytes": 1 << 14}),
    "whole": (lambda: loop(wl.Tensors(16)), {"ring_bytes": None}),
}

NAMES = (*RUNS, *OTHER, *CONFIGS, "spawn", "forkserver")


@functools.cache
def recorded(name: str) -> Trace:
    """The trace of one run."""
    if name in ("spawn", "forkserver"):
        return read_trace(start_methods()[name])
    place = PLACE / name.replace(" ", "_")
    if name in OTHER:
        OTHER[name](place)
        return read_trace(place)
    if name.startswith("pinned"):
        sim.built()  # without a compiler the test is skipped before a trace is begun
    run, config = CONFIGS[name] if name in CONFIGS else (RUNS[name], {})
    with quiet(), minidl.trace(place, **config):
        run()
    return read_trace(place)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warning for more workers than cores; a worker's death is found by looking, not by a signal."""
    with warnings.catch_warnings(), wl.no_sigchld():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield
