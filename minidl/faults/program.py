"""The program of one cell: a loader with a fault at one step, used as a training loop uses it.

`python -m minidl.faults.program CELL`, a cell as JSON, records the run into the cell's trace, prints what happened as a
line of JSON, and writes its processes' numbers to TRACE.pids. The loader's polls are shortened, so that a cell ends
soon. A dataset of eight batches: the fault comes with the batch `AT`, or at the step that the cell names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch
import torch.utils.data

import minidl
import minidl.driver
import minidl.pin_memory
import minidl.worker

SAMPLES, AT, VICTIM = 8, 5, 1  # sample 5 is worker 1's: two workers, batches of one sample
POLL = 0.5
TIMEOUT = 2.0  # the loader's, where a worker stops
WORDS = "the injected fault"


class InjectedError(Exception):
    """What a cell raises."""


class Unpicklable:
    """Can't be sent."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(WORDS)


def inject(fault: str) -> Any:
    """Make the fault happen here and now; returns what takes the sample's place, for a fault that is a value."""
    if fault == "exception":
        raise InjectedError(WORDS)
    if fault == "sys.exit":
        sys.exit(3)
    if fault == "os._exit":
        os._exit(3)
    if fault == "unpicklable":
        return Unpicklable()
    os.kill(os.getpid(), signal.Signals[fault])
    time.sleep(60)  # a signal may be handled a moment later
    return None


class Reduced:
    """Has the fault where it is pickled: in the feeder thread."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __reduce__(self) -> Any:
        return str, (inject(self.fault),)


class Pinned(list[Any]):
    """Has the fault where it is pinned: in the pin-memory thread."""

    fault = ""

    def pin_memory(self) -> Any:
        inject(self.fault)
        return self


class FaultyNumbers(torch.utils.data.Dataset[Any]):
    """0 to 7, with the fault of a cell."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self.step, self.fault = cell["step"], cell["fault"]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == AT and self.step == "sample":
            return inject(self.fault)
        return Reduced(self.fault) if index == AT and self.step == "feeder" else torch.tensor(index)

    def collate(self, samples: list[Any]) -> Any:
        """The batch: a tensor, so that memory is shared, unless the sample is the fault's."""
        due = isinstance(samples[0], torch.Tensor) and int(samples[0]) == AT
        if due and self.step == "collate":
            return inject(self.fault)
        if due and self.step == "pin":
            samples = Pinned(samples)
            samples.fault = self.fault
            return samples
        return torch.stack(samples) if isinstance(samples[0], torch.Tensor) else samples

    def begin(self, worker_id: int) -> None:
        """worker_init_fn."""
        if worker_id == VICTIM and self.step == "init":
            inject(self.fault)
        if worker_id == VICTIM and self.step == "worker's exit":
            Finalize(None, inject, (self.fault,), exitpriority=100)


class FaultyStream(torch.utils.data.IterableDataset[Any]):
    """The same samples, each worker's own."""

    def __init__(self, numbers: FaultyNumbers) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        return (self.numbers[index] for index in range(info.id, SAMPLES, info.num_workers))


def fault_at_fork(fault: str) -> None:
    """Have the fault in the second child that is forked from now on, before it does anything."""
    children = iter(range(100))
    os.register_at_fork(
        before=lambda: started.append(next(children)),
        after_in_child=lambda: inject(fault) if started[-1] == VICTIM else None,
    )
    started: list[int] = []


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """Two epochs; every error is caught and told."""
    for module in (minidl.driver, minidl.pin_memory, minidl.worker):
        module.MP_STATUS_CHECK_INTERVAL = POLL  # type: ignore[attr-defined]
    numbers = FaultyNumbers(cell)
    step, fault, pids = cell["step"], cell["fault"], open(f"{cell['trace']}.pids", "a")  # noqa: SIM115
    print(os.getpid(), file=pids, flush=True)
    loader: Any = minidl.DataLoader(
        FaultyStream(numbers) if cell["kind"] == "iterable" else numbers,
        num_workers=2,
        collate_fn=numbers.collate,
        worker_init_fn=numbers.begin,
        persistent_workers=cell["persistent"],
        multiprocessing_context=cell["method"],
        pin_memory=step == "pin",
        timeout=TIMEOUT if fault == "SIGSTOP" else 0,
    )
    if step == "start":
        fault_at_fork(fault)
    errors: list[str] = []
    workers: list[Any] = []
    batches = 0

    def told(error: BaseException) -> None:
        errors.append(f"{type(error).__name__}: {error}")

    def visit(epoch: int) -> None:
        nonlocal batches
        iterator = iter(loader)
        workers.extend(iterator._workers)
        print(*(worker.pid for worker in iterator._workers), file=pids, flush=True)
        for _ in range(3 * SAMPLES):
            try:
                next(iterator)
                batches += 1
                if step == "loop" and batches == 3:
                    inject(fault)
            except StopIteration:
                break
            except (Exception, SystemExit) as error:
                told(error)
                if fault == "SIGSTOP":  # it would time out for each batch
                    break
        if step == "between epochs" and not epoch:
            os.kill(iterator._workers[VICTIM].pid, signal.Signals[fault])
            time.sleep(0.1)

    for epoch in range(2):
        try:
            visit(epoch)
        except (Exception, SystemExit) as error:  # the handler of SIGCHLD may raise anywhere in a program
            told(error)
    try:
        loader.close()
    except Exception as error:
        told(error)
    return {"errors": errors, "batches": batches, "codes": [worker.exitcode for worker in workers]}


def main(cell: dict[str, Any]) -> None:
    """Record the cell's run, and print what happened."""
    with minidl.trace(cell["trace"]):
        found = run(cell)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
