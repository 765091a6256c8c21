"""The program of a cell whose workers are threads: its faults, its uses of the loader, and what it leaves behind.

A sample that hangs waits for an event, which is set at the end: then a worker that was left behind has to leave by
itself. Nothing else may be left: no thread, no open file, no crew; see `Judge`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils.data

import minidl
from minidl.device import sim
from minidl.loader import crew
from minidl.loader.pin_memory import PinMemoryThread
from minidl.loader.threads import WorkerThread
from minidl.prove.faults.cells import WORDS, Cell, Follows
from minidl.prove.faults.program import (
    AT,
    FAR,
    SAMPLES,
    SEEN,
    USES,
    VICTIM,
    WORKERS,
    FaultyNumbers,
    FaultyStream,
    FaultyTraining,
    begun,
    inject,
    strike,
)

SOON = 10.0
"""Seconds in which a thread leaves that has nothing to wait for any more."""


# --- The dataset ------------------------------------------------------------------------------------------------------
class ThreadedNumbers(FaultyNumbers):
    """0 to 7, with the fault of a cell in a thread. go: ends what hangs; there: it hangs."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        super().__init__(cell, folder)
        self.go, self.there = threading.Event(), threading.Event()

    def hang(self) -> None:
        self.there.set()
        self.go.wait(FAR)

    def fault(self) -> None:
        """Have the fault here and now."""
        name = self.cell.name
        if "SIGINT" in name:
            strike("SIGINT", os.getpid())
        if "hang" in name:
            self.hang()
        elif name == "KeyboardInterrupt":
            raise KeyboardInterrupt(WORDS)
        elif name != "SIGINT":
            inject(name)

    def __getitem__(self, index: int) -> Any:
        cell = self.cell
        if cell.step == "sample" and (index == AT or (cell.who == "both" and index == AT - 1)):
            if cell.who == "both":
                self.meet(index)
            self.fault()
        elif index >= SEEN and cell.hangs:
            self.hang()
        elif cell.fault in IN_A_SAMPLE and index == AT:
            IN_A_SAMPLE[cell.fault](self)
        return torch.tensor(index)

    def collate(self, samples: list[Any]) -> Any:
        if int(samples[0]) == AT and self.cell.step == "collate":
            self.fault()
        if int(samples[0]) == AT and self.cell.step == "pin":
            return PinnedHere([self])
        return torch.stack(samples)

    def begin(self, worker_id: int) -> None:
        if worker_id == VICTIM and self.cell.step == "init":
            self.fault()


class CopiedNumbers(ThreadedNumbers):
    """Has the fault where the second worker copies it."""

    def __copy__(self) -> CopiedNumbers:
        if threading.current_thread().name == f"worker {VICTIM}":
            self.fault()
        return self


class ThreadedStream(FaultyStream):
    """The same samples, each worker's own."""

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        if info.id == VICTIM and self.numbers.cell.step == "open":
            self.numbers.fault()  # type: ignore[attr-defined]
        return super().__iter__()

    def __copy__(self) -> ThreadedStream:
        numbers = self.numbers
        return ThreadedStream(numbers.__copy__() if isinstance(numbers, CopiedNumbers) else numbers)


class FaultySampler(torch.utils.data.Sampler[int]):
    """Has the fault where an index is drawn."""

    def __init__(self, numbers: ThreadedNumbers) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for index in range(SAMPLES):
            if index == AT and self.numbers.cell.step == "sampler":
                self.numbers.fault()
            yield index


class PinnedHere(list[Any]):
    """Has the fault where it is pinned: in the pin-memory thread."""

    def pin_memory(self) -> Any:
        self[0].fault()
        return self


# --- The training loop ------------------------------------------------------------------------------------------------
class ThreadedTraining(FaultyTraining):
    """One run. warned: what it was warned of."""

    numbers: ThreadedNumbers
    dataset = ThreadedNumbers

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.dataset = CopiedNumbers if cell.step == "copy" else ThreadedNumbers
        super().__init__(cell, folder)
        self.uses = {**USES, **USES_OF_THREADS}
        if cell.step in ("start", "started"):
            fault_at_start(self.numbers)

    @property
    def epochs(self) -> int:
        """After a Ctrl-C no epoch begins: a worker that hangs would never answer."""
        return 1 if self.cell.fault == "SIGINT while it hangs" else super().epochs

    def new_loader(self) -> Any:
        cell = self.cell
        iterable = cell.kind == "iterable"
        return minidl.DataLoader(
            ThreadedStream(self.numbers) if iterable else self.numbers,
            sampler=None if iterable else FaultySampler(self.numbers),
            num_workers=WORKERS,
            collate_fn=self.numbers.collate,
            worker_init_fn=self.numbers.begin,
            persistent_workers=cell.persistent,
            pin_memory=cell.pin,
            in_order=cell.in_order,
            worker_method="thread",
            timeout=FAR if cell.outcome.kind is Follows.TIMEOUT else 0,
        )

    def fault_in_shutdown(self, iterator: Any) -> None:
        if self.cell.hangs:
            assert self.numbers.there.wait(SOON)  # else a worker may see the done event before it hangs
        super().fault_in_shutdown(iterator)

    def strike(self, iterator: Any) -> None:
        """Have the fault in the loader's main thread."""
        self.struck = True
        self.numbers.fault()


def fault_at_start(numbers: ThreadedNumbers) -> None:
    """Have the fault before or after the second worker starts."""
    threads: Any = WorkerThread
    plain = threads.start

    def start(worker: WorkerThread) -> None:
        victim = worker.name == f"worker {VICTIM}"
        if victim and numbers.cell.step == "start":
            numbers.fault()
        plain(worker)
        if victim and numbers.cell.step == "started":
            numbers.fault()

    threads.start = start


# --- Uses of a loader -------------------------------------------------------------------------------------------------
def in_a_cycle(run: FaultyTraining, collect: Callable[[], Any] = gc.collect) -> None:
    """The collector ends the iterator."""
    iterator: Any = begun(run)
    workers = list(iterator._workers)
    iterator.itself = iterator
    gc.disable()
    del iterator
    run.loader = None
    assert all(worker.is_alive() for worker in workers)
    collect()
    deadline = time.monotonic() + SOON
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.enable()
    assert not any(worker.is_alive() for worker in workers)


def by_a_worker(run: FaultyTraining) -> None:
    """The collector ends the iterator in one of its own workers."""
    in_a_cycle(run, cast(ThreadedNumbers, run.numbers).go.set)


def while_it_iterates(run: FaultyTraining) -> None:
    """The program exits while a daemon thread waits for the next batch, and goes on with it."""
    begun = threading.Event()

    def iterate() -> None:
        for _ in run.new_loader():
            begun.set()
            time.sleep(0.02)

    threading.Thread(target=iterate, daemon=True).start()
    assert begun.wait(SOON)


def in_a_sample(run: FaultyTraining) -> Any:
    """The iterator, while a worker is in a sample."""
    iterator, numbers = begun(run), cast(ThreadedNumbers, run.numbers)
    assert numbers.there.wait(SOON)
    return iterator


def left_in_a_sample(run: FaultyTraining) -> None:
    """The program exits while a worker is in a sample."""
    vars(sys.modules["__main__"])["left_open"] = run, in_a_sample(run)
    run.loader = None


def with_its_own(run: FaultyTraining) -> None:
    """A forked child makes a loader of its own, and exits while its parent's threads run."""
    iterator = begun(run)
    child = os.fork()
    if not child:
        end_child(len(list(run.new_loader())) != SAMPLES)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run.batches += list(iterator)


def fork(numbers: ThreadedNumbers) -> None:
    """Fork a process in a worker, in which there is no loader."""
    child = os.fork()
    if not child:
        end_child(torch.utils.data.get_worker_info() is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def end_child(code: int) -> None:
    """End a forked child as Python ends."""
    gc.collect()
    atexit._run_exitfuncs()
    os._exit(code)


def collect(numbers: ThreadedNumbers) -> None:
    numbers.go.wait(FAR)
    gc.collect()


def compute(numbers: ThreadedNumbers) -> None:
    """Be in and out of calls to C++ until Python ends."""
    numbers.there.set()
    while True:
        torch.ones(4096).sum()


IN_A_SAMPLE: dict[str, Callable[[ThreadedNumbers], None]] = {
    "collected by a worker": collect,
    "exit while a sample computes": compute,
    "forked by a worker": fork,
}
"""Use -> what a sample does meanwhile."""

USES_OF_THREADS: dict[str, tuple[Callable[[FaultyTraining], Any], int]] = {
    "collected in a cycle": (in_a_cycle, SEEN),
    "collected by a worker": (by_a_worker, SEEN),
    "exit while a thread iterates": (while_it_iterates, 0),
    "exit while a sample computes": (left_in_a_sample, SEEN),
    "exit while a sample hangs": (left_in_a_sample, SEEN),
    "forked child with a loader": (with_its_own, SAMPLES),
    "forked by a worker": (lambda run: run.batches.extend(run.loader), SAMPLES),
    "sample hangs": (in_a_sample, SEEN),
}
"""As `program.USES`."""


# --- What is left -----------------------------------------------------------------------------------------------------
class Judge:
    """Finds what a run has left behind, beside workers that a warning names, and that hang."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        self.warned: list[str] = []
        self.threads = set(threading.enumerate())
        self.files = set(self.open_files())
        warnings.showwarning = lambda message, category, *place, **more: self.hear(str(message), category)
        warnings.simplefilter("always", RuntimeWarning)

    def hear(self, message: str, category: type[Warning]) -> None:
        if category is not DeprecationWarning:  # Python warns of a fork beside threads
            self.warned.append(message)

    def open_files(self) -> Iterator[str]:
        """What this process has open, without what the recorder keeps for the main thread."""
        pid = os.getpid()
        for number in os.listdir("/proc/self/fd"):
            try:
                name = os.readlink(f"/proc/self/fd/{number}")
            except OSError:  # the listing's own
                continue
            if name != f"/proc/{pid}/task/{pid}/schedstat":
                yield name

    def started(self) -> list[threading.Thread]:
        """The threads that the run has started, and that are still there."""
        return [thread for thread in threading.enumerate() if thread not in self.threads]

    def found(self, go: threading.Event) -> Iterator[str]:
        """What is wrong, in words. go: ends what hangs. A pin thread may still have to see its done event."""
        for thread in self.started():
            if isinstance(thread, PinMemoryThread) and self.cell.name != "hangs":
                thread.join(SOON)
        stays = {thread.name for thread in self.started() if isinstance(thread, (WorkerThread, PinMemoryThread))}
        stuck = {name for name in stays if any(f"{name.replace('_', ' ')} " in text for text in self.warned)}
        hangs = self.cell.hangs or "hang" in self.cell.fault or self.cell.fault == "exit while a sample computes"
        if stays - stuck:
            yield f"threads are left behind without a warning: {sorted(stays - stuck)}"
        if hangs != bool(self.warned):
            yield f"warned of: {self.warned}"
        if crew._running:
            yield f"crews are not ended: {crew._running}"
        if self.cell.fault.startswith("exit"):
            return
        go.set()
        for thread in self.started():
            thread.join(SOON)
        if stayed := self.started():
            yield f"threads do not leave though they can: {stayed}"
        gc.collect()
        opened = [name for name in self.open_files() if name not in self.files and str(self.folder) not in name]
        if opened and self.cell.name != "descriptors":
            yield f"files are left open: {opened}"


def run_cell(cell: Cell, folder: Path) -> None:
    """Record the cell's run; when Python exits, after the loader's own function for that, tell what happened."""
    if cell.pin:
        sim.use()
    told, pid = (folder / "told").open("w"), os.getpid()  # now: at the end, no descriptor may be left
    judge, runs = Judge(cell, folder), list[ThreadedTraining]()

    def tell() -> None:
        if os.getpid() == pid:
            json.dump([text for run in runs for text in (*run.errors, *judge.found(run.numbers.go))], told)
            told.close()

    atexit.register(tell)
    with minidl.trace(folder / "trace"):
        runs.append(ThreadedTraining(cell, folder))
        runs[0]()
    if not cell.fault.startswith("exit"):
        runs[0].errors += judge.found(runs[0].numbers.go)
