"""Evidence of torch's loader, made by hand: a loop, its workers, and what each of them is blocked in.

`loop(...)`, `worker(...)` make processes with the stacks that py-spy shows; `look(...)` the evidence of them.
"""

from __future__ import annotations

from dataclasses import replace

from minidl.hang.evidence.model import (
    Descriptor,
    FileLock,
    Frame,
    RunEvidence,
    SeenProcess,
    SeenThread,
    Semaphore,
    Syscall,
)

DATALOADER = "/site-packages/torch/utils/data/dataloader.py"
WORKER = "/site-packages/torch/utils/data/_utils/worker.py"
FETCH = "/site-packages/torch/utils/data/_utils/fetch.py"
QUEUES, CONNECTION = "/lib/python3.11/multiprocessing/queues.py", "/lib/python3.11/multiprocessing/connection.py"
THREADING = "/lib/python3.11/threading.py"
NAME = "pt_data_worker"
LOOP, RESULTS = 100, 500

POLL = Frame("Connection._poll", CONNECTION, 440, source="r = wait([self], timeout)")
FORK = Frame(
    "Popen._launch", "/lib/python3.11/multiprocessing/popen_fork.py", 71, source="code = process_obj._bootstrap()"
)
MAIN = Frame("<module>", "/home/a/train.py", 9, source="for batch in loader:")
SLEEPS = Syscall("clock_nanosleep", "990 s more", (1, 1), timeout=990.0)
LOCKED = Syscall("futex", "wait", (4096, 393), address=4096, timeout=-1.0)


def polls(fd: int) -> Syscall:
    return Syscall("poll", "1 descriptor", (fd,), (fd,), timeout=5.0)


def user(
    source: str, function: str = "Data.__getitem__", line: int = 12, within: tuple[str, ...] = (), **variables: str
) -> Frame:
    return Frame(function, "/home/a/data.py", line, variables, source, within)


def library(function: str, file: str = THREADING, source: str = "", **variables: str) -> Frame:
    return Frame(function, file, 1, variables, source)


def thread(
    tid: int,
    stack: tuple[Frame, ...] | None,
    call: Syscall | None,
    *,
    name: str = "MainThread",
    state: str = "S",
    idle: float = 41.0,
    cpu: float = 0.0,
    switches: int = 0,
    gil: bool | None = False,
    owner: int = -1,
    wchan: str = "",
) -> SeenThread:
    return SeenThread(
        tid, "python", (state, state), (1.0, 1.0 + cpu), (5, 5 + switches), syscall=call, syscall_before=call,
        stack=stack, python_name=name, idle=idle, gil=gil, owner=owner, wchan=wchan, read=(5, 5),
    )  # fmt: skip


def process(pid: int, ppid: int, *threads: SeenThread, name: str = "python", **more: object) -> SeenProcess:
    made = SeenProcess(pid, ppid, name, ("python", "train.py"), threads[0].state[1], pid / 10, threads=threads)
    return replace(made, **more)  # type: ignore[arg-type]


def next_stack(worker: int, *inside: Frame) -> tuple[Frame, ...]:
    """The loop's stack while it waits for a worker's batch."""
    get = Frame("Queue.get", QUEUES, 113, {"self": "<Queue at 0x10>"}, "if not self._poll(timeout):")
    data = Frame("It._next_data", DATALOADER, 1505, {"worker_id": str(worker)}, "idx, data = self._get_data()")
    return (*inside, POLL, get, data, MAIN)


def loop(worker: int = 1, *threads: SeenThread, stack: tuple[Frame, ...] | None = None, call: Syscall | None = None,
         waiting: int = 0, **more: object) -> SeenProcess:  # fmt: skip
    """The process that iterates: it polls the result pipe, which is its descriptor 3."""
    main = thread(LOOP, next_stack(worker) if stack is None else stack, call or polls(3), idle=1.0, switches=1)
    pipe = Descriptor(3, "pipe", "pipe:[500]", RESULTS, mode="r", waiting=waiting)
    return process(LOOP, 1, main, *threads, **{"descriptors": (pipe,), **more})


def worker(
    number: int,
    *inside: Frame,
    call: Syscall | None = None,
    step: str = "sample",
    others: tuple[SeenThread, ...] = (),
    descriptors: tuple[Descriptor, ...] = (),
    index: int = 37,
    **main: object,
) -> SeenProcess:
    """A forked worker. step: "idle", "sample", "collate" or "init"; inside: the frames in it, innermost first."""
    pid = LOOP + 1 + number
    loop = {"worker_id": str(number), "idx": "9", "data_queue": "<Queue at 0x10>"}
    fetched = Frame("_worker_loop", WORKER, 374, loop, "data = fetcher.fetch(index)")
    rows = {
        "idle": (
            POLL,
            Frame("_worker_loop", WORKER, 334, loop, "r = index_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)"),
        ),
        "sample": (
            Frame("F.fetch", FETCH, 54, {"idx": str(index)}, "data = [self.dataset[idx] for idx in batch]"),
            fetched,
        ),
        "collate": (Frame("F.fetch", FETCH, 57, {}, "return self.collate_fn(data)"), fetched),
        "init": (Frame("_worker_loop", WORKER, 300, loop, "init_fn(worker_id)"),),
    }
    if step == "idle":
        call, main = call or polls(5), {"idle": 1.0, "switches": 1, **main}
    stack = (*inside, *rows[step], FORK, MAIN)
    pipes = (Descriptor(4, "pipe", "pipe:[500]", RESULTS, mode="w"), Descriptor(5, "pipe", "pipe:[501]", 501, mode="r"))
    first = thread(pid, stack, call, **main)  # type: ignore[arg-type]
    named = (replace(one, name=NAME) for one in (first, *others))  # a new thread takes over its starter's name
    return process(pid, LOOP, *named, name=NAME, descriptors=(*pipes, *descriptors))


def feeder(tid: int, *inside: Frame, source: str = "nwait()", call: Syscall = LOCKED) -> SeenThread:
    return thread(tid, (*inside, Frame("Queue._feed", QUEUES, 231, source=source)), call, name="QueueFeederThread")


def look(*processes: SeenProcess, locks: tuple[FileLock, ...] = (), moment: int = 0, **more: object) -> RunEvidence:
    return replace(RunEvidence(moment, 0.5, LOOP, 9, processes=processes, locks=locks), **more)  # type: ignore[arg-type]


def later(*processes: SeenProcess) -> list[RunEvidence]:
    """Two looks at the same, 4 s apart."""
    return [look(*processes), look(*processes, moment=4_000_000_000)]


__all__ = ["Semaphore", "Syscall"]
