"""The program of a cell: a loader with a fault at one step, used as a training loop uses it.

The loader's polls are shortened, so that a cell ends soon. A dataset of eight batches: the fault comes with sample
`AT`, or at the step that the cell names.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, reduction, resource_sharer
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.utils.data

import minidl
import minidl.mini
from minidl.arena.arena_queue import ArenaWriter
from minidl.loader.driver import Get, JoinPin, JoinWorkers, PutSentinel, Simple, Terminate
from minidl.prove.faults.cells import WORDS, Cell, Follows

SAMPLES, WORKERS, AT, VICTIM = 8, 2, 5, 1
"""Sample 5 is worker 1's: batches of one sample."""

SEEN = 3
"""Batches after which a fault of the training loop comes."""

POLL = 0.3
TIMEOUT = 1.0
"""Seconds: of the loader's polls, and of the loader's timeout where a worker stops."""

FAR = 60.0
"""Seconds that something takes which is ended before."""

PADDING = bytes(1 << 20)
"""More than a pipe holds."""


class InjectedError(Exception):
    """What a cell raises."""


class Unpicklable:
    """Can't be sent."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(WORDS)


# --- The faults -------------------------------------------------------------------------------------------------------
def inject(name: str) -> Any:
    """Make the fault happen here and now; returns what takes the sample's place, for a fault that is a value."""
    if name == "exception":
        raise InjectedError(WORDS)
    if name == "sys.exit":
        sys.exit(3)
    if name == "os._exit":
        os._exit(3)
    if name == "unpicklable":
        return Unpicklable()
    if name in USED_UP:
        USED_UP[name]()
        return None
    strike(name, os.getpid())
    time.sleep(FAR)  # the signal may be handled a moment later
    return None


def strike(name: str, *pids: int) -> None:
    """Send the signal to other processes at once."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has left by itself
            os.kill(pid, signal.Signals[name])


def strike_the_group(name: str) -> None:
    """Send the signal to every process of the cell, and wait for it."""
    os.killpg(0, signal.Signals[name])
    time.sleep(FAR)


_held: list[Any] = []
"""What uses something up."""


def use_up_descriptors() -> None:
    """Let no more files be opened."""
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))


def use_up_maps() -> None:
    """Let this process map no more memory."""
    with contextlib.suppress(OSError):
        while True:
            _held.append(mmap.mmap(-1, mmap.PAGESIZE))


def limit_files() -> None:
    """Let no file grow beyond a page."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, mmap.PAGESIZE))


USED_UP: dict[str, Callable[[], None]] = {
    "shm full": limit_files,
    "file size": limit_files,
    "descriptors": use_up_descriptors,
    "maps": use_up_maps,
}


def small_shm() -> bool:
    """Give this process and its children a /dev/shm of a MiB; return whether that is allowed."""
    new_namespace, private = 0x20000, 0x4000 | 0x40000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
    libc = ctypes.CDLL(None)
    return bool(
        libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, private, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
    )


# --- Where they come --------------------------------------------------------------------------------------------------
_armed = threading.local()
"""Whether what this thread pickles, or has just pickled, is the batch of the fault."""


class Arming:
    """A part of a batch: where it is pickled, what comes next has the fault."""

    def __reduce__(self) -> Any:
        _armed.yes = True
        return str, ()


def _disarmed() -> bool:
    was, _armed.yes = getattr(_armed, "yes", False), False
    return was


class Reduced:
    """Has the fault where it is pickled: in the feeder thread."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return str, (inject(self.name),)


class Pinned(list[Any]):
    """Has the fault where it is pinned: in the pin-memory thread."""

    name = ""

    def pin_memory(self) -> Any:
        inject(self.name)
        return self


class Index(int):
    """A sample's index that has the fault where a worker unpickles it."""

    name = ""

    def __reduce__(self) -> Any:
        return (str, (inject(self.name),)) if self.name == "unpicklable" else (inject, (self.name,))


class Imported:
    """A part of the dataset: has the fault where the second worker that is started unpickles it."""

    def __init__(self, cell: Cell) -> None:
        self.name, self.strike = cell.name, strike_the_group if cell.who == "the group" else inject
        self.workers = 0

    def __reduce__(self) -> Any:
        self.workers += 1
        if self.workers - 1 != VICTIM:
            return str, ()
        return (str, (inject(self.name),)) if self.name == "unpicklable" else (self.strike, (self.name,))


def fault_at_fork(name: str) -> None:
    """Have the fault in the second child that is forked from now on, before it does anything."""
    started: list[int] = []
    os.register_at_fork(
        before=lambda: started.append(len(started)),
        after_in_child=lambda: inject(name) if started[-1] == VICTIM else None,
    )


def fault_in_write(cell: Cell) -> None:
    """Have the fault before, in or after the write of the message that was pickled last in the writing thread."""
    writer: Any = ArenaWriter if cell.transport == "arena" else connection.Connection
    plain = writer._send

    def send(self: Any, data: Any, *arguments: Any) -> Any:
        if not _disarmed():
            return plain(self, data, *arguments)
        if cell.step == "after write" or (
            cell.step == "in write" and cell.transport != "arena"
        ):  # a packet has no half
            plain(self, data if cell.step == "after write" else data[: len(data) // 2], *arguments)
        return inject(cell.name)

    writer._send = send


def fault_in_hand_over(name: str) -> None:
    """Have the fault where this process is asked for the descriptor of the batch."""
    plain: Any = reduction.DupFd
    cache: Any = resource_sharer._resource_sharer._cache  # type: ignore[attr-defined]

    def duplicate(fd: int) -> Any:
        handle = plain(fd)
        if _disarmed():
            key = handle._id[1]
            cache[key] = (lambda *_: inject(name)), cache[key][1]
        return handle

    reduction.DupFd = duplicate


def step_of(effect: Any) -> str:
    """The step of the shutdown that an effect is."""
    match effect:
        case JoinPin():
            return "join pin thread"
        case PutSentinel():
            return "send sentinel"
        case JoinWorkers():
            return "join workers"
        case Terminate(kill=kill):
            return "kill" if kill else "terminate"
    return {
        Simple.SET_PIN_DONE: "stop pin thread", Simple.WAKE_PIN: "wake pin thread",
        Simple.CLOSE_RESULT_QUEUE: "close results", Simple.SET_WORKERS_DONE: "set done flag",
        Simple.CLOSE_INDEX_QUEUES: "close tasks", Simple.FORGET_WORKERS: "forget pids",
    }.get(effect, "")  # fmt: skip


# --- The dataset ------------------------------------------------------------------------------------------------------
def use_transport(name: str) -> None:
    """Let this process, the loader's or a worker's, use a transport: `cells.TRANSPORTS` has the names."""
    os.environ["MINIDL_TRANSPORT"] = "arena" if name == "arena" else "upstream"
    strategy = "file_system" if name == "file_system" else "file_descriptor"
    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


class FaultyNumbers(torch.utils.data.Dataset[Any]):
    """0 to 7, with the fault of a cell."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        self.imported = Imported(cell) if cell.step == "import" else None
        self.padding = PADDING  # after it: what is unpickled with the fault is not all read yet

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        cell = self.cell
        if index >= SEEN and cell.hangs:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(FAR)
        if cell.step == "sample" and (index == AT or (cell.who == "both" and index == AT - 1)):
            return self.sample(index)
        if index == AT and cell.step == "pickling":
            return Reduced(cell.name)
        return torch.tensor(index)

    def sample(self, index: int) -> Any:
        """The sample of the fault."""
        cell = self.cell
        if cell.who == "the group":
            strike_the_group(cell.name)
        if cell.who == "both":
            self.meet(index)
        if cell.name in USED_UP:
            if cell.name != "shm full" or not (self.folder / "small").exists():
                inject(cell.name)
            return [torch.ones(1 << 15) for _ in range(16)]  # 2 MiB
        return inject(cell.name)

    def meet(self, index: int) -> None:
        """Wait until the other worker is at its fault, too."""
        (self.folder / f"at-{index}").touch()
        while not all((self.folder / f"at-{each}").exists() for each in (AT - 1, AT)):
            time.sleep(0.001)

    def collate(self, samples: list[Any]) -> Any:
        """The batch: a tensor, so that memory is shared, unless the sample is the fault's."""
        step, name = self.cell.step, self.cell.name
        if not isinstance(samples[0], torch.Tensor):
            return samples[0]
        if int(samples[0]) == AT:
            if step == "collate":
                return inject(name)
            if step in ("before write", "in write", "after write", "hand-over"):
                return [Arming(), torch.stack(samples)]
            if step == "pin":
                batch = Pinned(samples)
                batch.name = name
                return batch
        return torch.stack(samples)

    def begin(self, worker_id: int) -> None:
        """worker_init_fn."""
        use_transport(self.cell.transport)
        step, name = self.cell.step, self.cell.name
        if worker_id != VICTIM:
            return
        if step == "init":
            inject(name)
        elif step == "hand-over":
            fault_in_hand_over(name)
        elif step.endswith("write"):
            fault_in_write(self.cell)
        elif step == "worker's exit":
            Finalize(None, inject, (name,), exitpriority=100)


class FaultyStream(torch.utils.data.IterableDataset[Any]):
    """The same samples, each worker's own."""

    def __init__(self, numbers: FaultyNumbers) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        return (self.numbers[index] for index in range(info.id, SAMPLES, info.num_workers))


# --- The training loop ------------------------------------------------------------------------------------------------
class FaultyTraining:
    """One run: every error is caught and told."""

    dataset = FaultyNumbers

    @property
    def epochs(self) -> int:
        """How many there are."""
        return 1 + self.cell.persistent

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell = cell
        self.errors: list[str] = []
        self.batches: list[Any] = []  # kept, so that their memory is
        self.struck = False
        self.uses = USES
        self.numbers = self.dataset(cell, folder)
        self.loader: Any = self.new_loader()

    def new_loader(self) -> Any:
        """The loader of the cell."""
        cell = self.cell
        indices: list[Any] = list(range(SAMPLES))
        if cell.step == "index get":
            indices[AT] = Index(AT)
            indices[AT].name = cell.name
        iterable = cell.kind == "iterable"
        library: Any = minidl.mini if cell.transport == "mini" else minidl
        return library.DataLoader(
            FaultyStream(self.numbers) if iterable else self.numbers,
            sampler=None if iterable else indices,
            num_workers=WORKERS,
            collate_fn=self.numbers.collate,
            worker_init_fn=self.numbers.begin,
            persistent_workers=cell.persistent,
            multiprocessing_context=cell.method,
            pin_memory=cell.pin,
            timeout=FAR if cell.outcome.kind is Follows.TIMEOUT else 0,
        )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Catch and tell an error; the handler of SIGCHLD may raise anywhere in a program."""
        try:
            yield
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def strike(self, iterator: Any) -> None:
        """Have a fault of the loader's process, of its workers or of the group, once."""
        cell, self.struck = self.cell, True
        workers = [worker.pid for worker in iterator._workers]
        if cell.who == "the group":
            strike_the_group(cell.name)
        elif cell.who:
            victims = workers if cell.who == "both" else workers[VICTIM:]
            strike(cell.name, *victims)
            if cell.name != "SIGSTOP":
                for pid in victims:  # the exit status stays: it belongs to the loader
                    with contextlib.suppress(ChildProcessError):
                        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        else:
            if cell.pin and cell.name in USED_UP:  # the batch that is being pinned would give back what it has
                while iterator._data_queue._messages.qsize() < iterator._tasks_outstanding:
                    time.sleep(0.001)
            inject(cell.name)

    def epoch(self, number: int) -> None:
        """Iterate, past a task's error; one that is the loader's ends the epoch."""
        cell, seen = self.cell, 0
        iterator = iter(self.loader)
        for _ in range(3 * SAMPLES):
            errors = len(self.errors)
            with self.telling():
                batch = next(iterator, None)
                if batch is None:
                    break
                self.batches.append(batch)
                seen += 1
                if seen == 1 and cell.outcome.kind is Follows.TIMEOUT:  # an interpreter may take long to start
                    iterator._timeout = TIMEOUT
                    if cell.transport != "mini":
                        iterator._driver.get = Get(TIMEOUT)
                if cell.step == "loop" and seen == SEEN and not self.struck:
                    self.strike(iterator)
            if len(self.errors) > errors and cell.outcome.kind is not Follows.ERROR:
                break
            if cell.step.startswith("shutdown") and seen == SEEN:
                self.fault_in_shutdown(iterator)
                with self.telling():
                    iterator.close()
                break
        if cell.step == "between epochs" and not number:
            self.strike(iterator)

    def fault_in_shutdown(self, iterator: Any) -> None:
        """Have the fault before a step of the shutdown."""
        crew, at = iterator._crew, self.cell.step.partition(": ")[2]
        plain = crew.perform

        def perform(effect: Any) -> None:
            if not self.struck and step_of(effect) == at:
                self.strike(iterator)
            plain(effect)

        crew.perform = perform

    def __call__(self) -> None:
        """The run."""
        if self.cell.step == "use":
            use(self)
            return
        for number in range(self.epochs):
            with self.telling():
                self.epoch(number)
        with self.telling():
            end(self.loader)


def end(loader: Any) -> None:
    """End the loader's workers now. `mini` has no method for it: its iterators end with their epochs, but one."""
    if hasattr(loader, "close"):
        loader.close()
    elif loader._iterator is not None:
        loader._iterator._shutdown_workers()


# --- Uses of a loader -------------------------------------------------------------------------------------------------
def begun(run: FaultyTraining) -> Any:
    """The loader's iterator, after SEEN batches."""
    iterator = iter(run.loader)
    run.batches += itertools.islice(iterator, SEEN)
    return iterator


def dropped(run: FaultyTraining) -> None:
    """The program drops iterator and loader."""
    iterator = begun(run)
    workers = list(iterator._workers)
    del iterator
    run.loader = None
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)


def left_open(run: FaultyTraining) -> None:
    """The program exits while its main module holds the iterator."""
    vars(sys.modules["__main__"])["left_open"] = run, begun(run)
    run.loader = None


def nested(run: FaultyTraining) -> None:
    """Two iterators at the same time, of one loader unless it keeps its only one."""
    inner = run.new_loader() if run.cell.persistent else run.loader
    run.batches += [first for first, _ in zip(run.loader, inner, strict=True)]


def in_a_thread(run: FaultyTraining) -> None:
    thread = threading.Thread(target=lambda: run.batches.extend(run.loader))
    thread.start()
    thread.join()


def inherited(run: FaultyTraining) -> None:
    """A forked child shuts its copy of the iterator down; this process goes on with its own."""
    iterator = begun(run)
    child = os.fork()
    if not child:
        iterator._shutdown_workers()
        del iterator
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    run.batches += list(iterator)


def killed(run: FaultyTraining) -> None:
    iterator = begun(run)
    strike("SIGKILL", os.getpid())
    time.sleep(FAR)
    del iterator


USES: dict[str, tuple[Callable[[FaultyTraining], Any], int]] = {
    "del": (dropped, SEEN),
    "break": (begun, SEEN),
    "exit with a live iterator": (left_open, SEEN),
    "nested loaders": (nested, SAMPLES),
    "loader in a thread": (in_a_thread, SAMPLES),
    "forked child with the iterator": (inherited, SAMPLES),
    "sample hangs and ignores SIGTERM": (begun, SEEN),
    "loader killed while a sample hangs": (killed, SEEN),
}
"""Fault -> how the loader is used, and how many batches that gives."""


def use(run: FaultyTraining) -> None:
    """Use the loader in the way that the cell names, and end it, unless the program has let go of it."""
    how, batches = run.uses[run.cell.fault]
    with run.telling():
        held = how(run)
        if run.loader is not None:
            end(run.loader)
        assert len(run.batches) == batches, f"{len(run.batches)} batches, not {batches}"
        del held
