"""What the doctor says of made evidence: who, where and what; how sure; and when it does not know.

Each row of a table is one case: what was seen, and what the finding has (see `CHECKS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from made_evidence import (
    CONNECTION,
    DATALOADER,
    FORK,
    LOCKED,
    LOOP,
    MAIN,
    QUEUES,
    RESULTS,
    SLEEPS,
    feeder,
    later,
    library,
    look,
    loop,
    next_stack,
    polls,
    process,
    thread,
    user,
    worker,
)

from minidl.hang.case import RunFacts
from minidl.hang.diagnose import diagnose
from minidl.hang.evidence.model import (
    BACKLOG,
    Descriptor,
    FileLock,
    Frame,
    Machine,
    RunEvidence,
    SeenProcess,
    SeenThread,
    Semaphore,
    Syscall,
)
from minidl.hang.finding import Finding, HangCause, RecordedWait, RunOutcome, Sure
from minidl.hang.places import LoaderStep
from minidl.hang.remedies import IMPORTED_AGAIN, SHARED_MEMORY
from minidl.hang.rules.activity import stirs
from minidl.hang.rules.processes import _ring_remedy

HUNG, MAYBE_HUNG, MOVES, UNKNOWN = RunOutcome.HUNG, RunOutcome.MAYBE_HUNG, RunOutcome.MOVES, RunOutcome.UNKNOWN
LATER = 4_000_000_000
"""The moment of a second look, ns: 4 s after the first."""


def texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


CHECKS: dict[str, Callable[[Finding, Any], bool]] = {
    **{name: lambda said, value, name=name: getattr(said, name) is value for name in ("outcome", "cause", "sure")},
    **{name: lambda said, value, name=name: said.who[name] == value for name in ("role", "worker", "pid", "thread")},
    **{name: lambda said, value, name=name: said.where[name] == value for name in ("step", "sample", "function")},
    "sentence": lambda said, value: said.sentence == value,
    "says": lambda said, value: all(text in said.sentence for text in texts(value)),
    "never": lambda said, value: not any(text in said.sentence for text in texts(value)),
    "begins": lambda said, value: said.sentence.startswith(value),
    "ends": lambda said, value: said.sentence.endswith(value),
    "also": lambda said, value: value in said.also[0] if value else not said.also,
    "fact": lambda said, value: any(value in fact.text for fact in said.evidence),
    "chain": lambda said, value: any(value in link for link in said.chain),
    "not_in_chain": lambda said, value: not any(value in link for link in said.chain),
    "fix": lambda said, value: value in said.fix if value else not said.fix,
}
"""What a row may expect of a finding. says, never, begins, ends: of its sentence."""


def case(
    name: str,
    *seen: SeenProcess,
    looks: Iterable[RunEvidence] = (),
    told: RecordedWait | None = None,
    **expected: object,
) -> Any:
    """A row. seen: the processes at the one look; looks: several, or one with more than processes."""
    return pytest.param(list(looks) or [look(*seen)], told, expected, id=name)


def found(*processes: SeenProcess, **more: object) -> Finding:
    return diagnose([look(*processes, **more)])  # type: ignore[arg-type]


def told(seconds: float = 12.0, past: float = 0.5, **more: Any) -> RecordedWait:
    """By the trace the loop has waited for worker 1."""
    known = {"worker": 1, "worker_pid": 102, "numbers": {101: 0, 102: 1}, "pid": LOOP, "hung": True}
    return RecordedWait(seconds=seconds, past=past, **known | more)


def own(seconds: float = 12.0, past: float = 0.5, **more: Any) -> RecordedWait:
    """By the trace the loop has been in its own code."""
    return RecordedWait(hung=True, seconds=seconds, past=past, pid=LOOP, own_code=True, **more)


def then_and_now(before: Iterable[SeenProcess], now: Iterable[SeenProcess], apart: int = LATER) -> list[RunEvidence]:
    """Two looks."""
    return [look(*before), look(*now, moment=apart)]


def again(one: SeenProcess, **changes: Any) -> SeenProcess:
    """The process, with another state of its first thread."""
    return replace(one, threads=(replace(one.threads[0], **changes), *one.threads[1:]))


def pipe(fd: int, inode: int, mode: str) -> Descriptor:
    return Descriptor(fd, "pipe", f"pipe:[{inode}]", inode, mode=mode)


def connection(fd: int, inode: int, peer: int, about: str = "") -> Descriptor:
    return Descriptor(fd, "socket", f"socket:[{inode}]", inode, mode="rw", peer=peer, about=about)


def on_gpu(source: str, device: str = "/dev/nvidia0") -> SeenProcess:
    """The loop, which runs a line of its own code all the time, and has a device open."""
    main = thread(LOOP, (user(source, "train"), MAIN), None, state="R", cpu=0.5, idle=0.0)
    return process(LOOP, 1, main, descriptors=(Descriptor(9, "device", device, 9, 195, "rw"),))


def with_locks(pid: int, *held: str) -> Descriptor:
    return Descriptor(7, "file", "/data/index.lock", 77, 3, "rw", locks=held)


SHARED_MUTEX = Syscall("futex", "waits for a mutex", (4096, 0, 2), address=4096, timeout=-1.0)


def sharing(one: SeenProcess) -> SeenProcess:
    """The process with the semaphore of several processes that LOCKED waits for."""
    return replace(one, semaphores=(Semaphore("sem.mp", 700, 4096, 0, 1),))


def futex(address: int, op: int = 393, timeout: float = -1.0) -> Syscall:
    return Syscall("futex", "wait", (address, op), address=address, timeout=timeout)


def nap(left: str, timeout: float) -> Syscall:
    return Syscall("clock_nanosleep", left, (1, 1), timeout=timeout)


OPENS = Syscall("openat", "opens /data/a.fifo")
FLOCK = Syscall("flock", "LOCK_EX", (7, 2), (7,), timeout=-1.0)
FCNTL = replace(FLOCK, name="fcntl")
READS = Syscall("read", "", (6,), (6,))
READS_FOR_EVER = replace(READS, timeout=-1.0)
RECEIVES = Syscall("recvfrom", "", (9,), (9,), timeout=-1.0)
ACCEPTS = Syscall("accept4", "", (6,), (6,), timeout=-1.0)
IDLE = worker(0, step="idle")
STUCK = worker(1, user("time.sleep(990)"), call=SLEEPS)
SLEEPING = worker(1, user("sleep"), call=SLEEPS)
DEAD = replace(worker(1, user("x"), state="Z"), ended=True, exit_code=0)
QUEUE, PUTS = pipe(6, 60, "r"), pipe(7, 60, "w")
MAIN_OF = Frame("<module>", "/home/a/train.py", 30, source="trainer.join()")
POOL = ("/lib/python3.11/concurrent/futures/_base.py", "/lib/python3.11/concurrent/futures/thread.py")
WAIT = library("Condition.wait", source="waiter.acquire()")
DISTRIBUTED = "/site-packages/torch/distributed/distributed_c10d.py"
REDUCES = library("all_reduce", DISTRIBUTED)
SERVER = ("python", "-c", "from multiprocessing.forkserver import main; main(3, 4, [], {})")
"""The command line of a fork server, and of all that it starts."""

AT = "in sample 37 (Data.__getitem__ at data.py:12)"


# --- File locks -------------------------------------------------------------------------------------------------------
def locked(number: int, wants: int, has: int) -> SeenProcess:
    """A worker that waits for a lock, and holds one."""
    wanted = Descriptor(7, "file", f"/data/{wants}.lock", wants, 3, "rw")
    held = Descriptor(8, "file", f"/data/{has}.lock", has, 3, "rw", locks=("1: FLOCK",))
    return worker(number, user("flock"), call=FLOCK, descriptors=(wanted, held))


HOLDS = with_locks(101, "1: FLOCK ADVISORY WRITE 101")
ASKS = worker(1, user("fcntl.flock(f, fcntl.LOCK_EX)"), call=FLOCK, descriptors=(with_locks(102),))
TWO_LOCKS = worker(0, user("flock(cache)"), call=replace(FLOCK, args=(8, 2), fds=(8,)),
                   descriptors=(HOLDS, Descriptor(8, "file", "/data/cache.lock", 78, 3, "rw")))  # fmt: skip
OF_101 = FileLock(1, "FLOCK", "WRITE", 101, 3, 77)
WAITED_FOR = FileLock(1, "FLOCK", "WRITE", 102, 3, 77, waits=True)
MINE = replace(HOLDS, fd=8, locks=("1: FLOCK ADVISORY WRITE 102",))
TWICE = replace(ASKS, descriptors=(*ASKS.descriptors, MINE))
OF_102 = replace(OF_101, pid=102)
INHERITED = process(300, LOOP, thread(300, None, SLEEPS), name="sleep", descriptors=(with_locks(300, "1: FLOCK"),))
FILE_LOCKS = [
    case("the holder, and what that is in",
         looks=[look(loop(1), worker(0, user("time.sleep(990)"), call=SLEEPS, descriptors=(HOLDS,)), ASKS,
                     locks=(OF_101, WAITED_FOR))],
         cause=HangCause.FILE_LOCK, sure=Sure.CERTAIN, worker=0, sample=37,
         sentence=f"hung: the loop (pid 100) waits for worker 1 (pid 102), {AT} for 41.0 s: it is waiting in flock on "
         f"/data/index.lock; worker 0 (pid 101), {AT} for 41.0 s, holds that lock, and is asleep (990 s more)"),
    case("an inherited lock is held by the process that has the open file, and not by the one that took it",
         looks=[look(loop(1), IDLE, worker(1, user("flock"), call=FLOCK, descriptors=(with_locks(102),)), INHERITED,
                     locks=(FileLock(1, "FLOCK", "WRITE", LOOP, 3, 77),))],
         pid=300, fact="which process 100 took and passed on", says="inherited that lock", fix="close_fds",
         never="py-spy"),
    case("a process that takes a lock twice, by two descriptors, waits for itself",
         looks=[look(loop(1), IDLE, TWICE, locks=(OF_102, WAITED_FOR))], outcome=HUNG, cause=HangCause.SELF_LOCK,
         sure=Sure.CERTAIN, worker=1, ends="in flock on /data/index.lock; it holds that lock itself",
         fix="lock it once", fact="worker 1 (pid 102) has the open file that holds it (FLOCK WRITE)"),
    case("a process that forked while it held the lock that it takes again",
         looks=[look(loop(1), IDLE, TWICE, replace(INHERITED, ppid=102), locks=(OF_102, WAITED_FOR))],
         cause=HangCause.SELF_LOCK, worker=1, fact="process sleep (pid 300), a child of worker 1 has the open file"),
    case("another thread of the process may release the lock",
         looks=[look(loop(1), IDLE, replace(TWICE, threads=(*TWICE.threads, thread(202, (user("fill"),), SLEEPS))),
                     locks=(OF_102, WAITED_FOR))],
         cause=HangCause.FILE_LOCK, sure=Sure.LIKELY, says="its own process holds that lock itself [its thread"),
    case("a lock that it has inherited from a process that has ended",
         looks=[look(loop(1), IDLE, TWICE, locks=(replace(OF_101, pid=900), WAITED_FOR))],
         cause=HangCause.SELF_LOCK, fact="which process 900, which has ended, took and passed on"),
    case("its own lock of the whole file does not keep it from a lock of bytes, which another process holds",
         looks=[look(loop(1), IDLE, again(TWICE, syscall=FCNTL, syscall_before=FCNTL),
                     locks=(OF_102, replace(OF_101, kind="POSIX"), WAITED_FOR))],
         cause=HangCause.FILE_LOCK, says="worker 0 (pid 101)", never="itself"),
    case("the process that took the lock has ended",
         looks=[look(loop(1), IDLE, ASKS, locks=(replace(OF_101, pid=900), WAITED_FOR))], cause=HangCause.FILE_LOCK,
         sure=Sure.LIKELY,
         ends="process 900 (not examined) took it, and may have passed it on to a child: it has ended itself"),
    case("two that wait for each other are a cycle",
         looks=[look(loop(1), locked(0, 71, 70), locked(1, 70, 71),
                     locks=tuple(FileLock(i, "FLOCK", "WRITE", 101 + i, 3, 70 + i) for i in (0, 1)))],
         cause=HangCause.CYCLE, fix="take the locks in one order",
         says="; worker 0 (pid 101) holds it, which closes a cycle (worker 1 (pid 102) -> "
         "worker 0 (pid 101) -> worker 1 (pid 102)"),
    case("a mutex in shared memory names its owner, in another process",
         loop(1), worker(0, user("time.sleep(990)"), call=SLEEPS), worker(1, user("txn"), call=SHARED_MUTEX, owner=101),
         cause=HangCause.LOCK, worker=0, sample=37, ends="holds that lock, and is asleep (990 s more)"),
    case("a mutex in shared memory whose owner has ended",
         loop(1), IDLE, worker(1, user("txn"), call=SHARED_MUTEX, owner=901), cause=HangCause.DEAD_LOCK_HOLDER,
         worker=1, says="its owner, thread 901, is a thread that has ended", fix="ROBUST"),
    case("of two locks in a chain the last is the cause",
         looks=[look(loop(1), TWO_LOCKS, worker(1, user("flock(index)"), call=FLOCK, descriptors=(with_locks(102),)),
                     locks=(OF_101, FileLock(2, "FLOCK", "WRITE", 900, 3, 78)))],
         cause=HangCause.FILE_LOCK, worker=0, says="in flock on /data/cache.lock; process 900"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "lock", "cause", "who"),
    [
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 101, 3, 77), HangCause.FILE_LOCK, 0),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 900, 3, 77), HangCause.FILE_LOCK, 1),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "READ", 101, 3, 77), HangCause.SLEEP, 1),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 102, 3, 77), HangCause.SLEEP, 1),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 101, 3, 78), HangCause.SLEEP, 1),
        ("self.db.execute('insert ...')", FileLock(1, "FLOCK", "WRITE", 101, 3, 77), HangCause.SLEEP, 1),
        ("time.sleep(0.1)", FileLock(1, "POSIX", "WRITE", 101, 3, 77), HangCause.SLEEP, 1),
    ],
)
def test_c_code_that_sleeps_with_a_locked_file_open_polls_for_the_lock(
    source: str, lock: FileLock, cause: HangCause, who: int
) -> None:
    """As SQLite's busy handler; of the same evidence, without an exclusive lock of another's on its file, it sleeps."""
    file = Descriptor(7, "file", "/data/cache.db", 77, 3, "rw")
    holder = worker(0, user("time.sleep(990)"), call=SLEEPS, descriptors=(file,))
    waiter = worker(1, user(source), call=nap("0.03 s more", 0.03), idle=0.02, switches=5, descriptors=(file,))
    said = diagnose([look(loop(1), holder, waiter, locks=(lock,))], told(20.0))
    assert (said.cause, said.who["worker"]) == (cause, who)
    if cause is HangCause.FILE_LOCK:
        assert (said.sure, bool(said.also)) == (Sure.LIKELY, True)
        assert "polling for the lock of /data/cache.db (its C code sleeps); " in said.sentence
    if who == 0:
        assert said.sentence.endswith("holds that lock, and is asleep (990 s more)")


INDEX = Descriptor(7, "file", "/data/index.lock", 77, 3, "rw")
LEFT = Descriptor(-1, "file", "/data/cache.lock", 78, 3, about="it names process 812, which has ended")


def polling(*inside: Frame, file: Descriptor, locks: tuple[FileLock, ...] = (OF_101,)) -> list[RunEvidence]:
    """A worker sleeps shortly, again and again, beside a file; worker 0, which may have locked it, waits for a task."""
    asks = worker(1, *inside, call=nap("0.03 s more", 0.03), idle=0.02, switches=5, descriptors=(file,))
    return [look(loop(1), replace(IDLE, descriptors=(*IDLE.descriptors, HOLDS)), asks, locks=locks)]


NAPS = "while True: except BlockingIOError: time.sleep(0.1)"
POLLED_FILES = [
    case("Python code that asks for a lock again and again", looks=polling(user(NAPS), file=INDEX), told=told(20.0),
         cause=HangCause.FILE_LOCK, sure=Sure.LIKELY, worker=0, also="unrelated to the lock",
         chain="polling for the lock of /data/index.lock"),
    case("a library's function asks for it", told=told(20.0), cause=HangCause.FILE_LOCK, worker=0,
         ends="holds that lock, and waits for its next task",
         looks=polling(library("UnixFileLock._poll", "/site-packages/filelock/a.py", "time.sleep(delay)"), file=INDEX)),
    case("nobody else has locked the file", looks=polling(user(NAPS), file=INDEX, locks=()), told=told(20.0),
         cause=HangCause.SLEEP),
    case("a lock file that a process has left behind", looks=polling(user(NAPS), file=LEFT), told=told(20.0),
         cause=HangCause.FILE_LOCK, worker=1, fix="delete that file",
         ends="polling until /data/cache.lock is deleted: it names process 812, which has ended"),
]  # fmt: skip


# --- A worker in a sample ---------------------------------------------------------------------------------------------
FILES = (
    Descriptor(9, "socket", "socket:[90]", 90, mode="rw"),
    Descriptor(8, "pipe", "pipe:[80]", 80, mode="w"),
    Descriptor(6, "pipe", "pipe:[60]", 60, mode="r"),
    Descriptor(10, "device", "/dev/pts/3", 1, 2, "r"),
    Descriptor(11, "file", "/data/a.bin", 2, 2, "r"),
)
FUTURE = (WAIT, library("Future.result", POOL[0]))


def stuck(cause: HangCause, says: str, *inside: Frame, call: Syscall | None, **main: Any) -> Any:
    """A row: the loop waits for worker 1, in sample 37, which is stuck in a call."""
    return case(f"{cause.value}: {says}", loop(1), IDLE, worker(1, *inside, call=call, descriptors=FILES, **main),
                cause=cause, says=(says, "the loop (pid 100) waits for worker 1 (pid 102), in sample 37"))  # fmt: skip


IN_A_SAMPLE = [
    stuck(HangCause.UNINTERRUPTIBLE, "in an uninterruptible sleep", user("x"), call=SLEEPS, state="D"),
    stuck(HangCause.GIL, "it keeps the GIL, asleep (990 s more)", user("sleep"), call=SLEEPS, gil=True),
    stuck(HangCause.CHILD, "waits for its child", user("os.waitpid(pid, 0)"),
          call=Syscall("wait4", "for any child", target=0, timeout=-1.0)),
    stuck(HangCause.UNKNOWN, "asleep", user("open(fifo)"), call=None),
    stuck(HangCause.SELF_LOCK, "that no thread of its process can release", user("with lock:"), call=LOCKED),
    stuck(HangCause.FORK_LOCK, "was locked at the fork", user("with lock:"), call=LOCKED, owner=100),
    stuck(HangCause.NOBODY, "waits in Event.wait", WAIT, library("Event.wait"), user("ready.wait()"), call=LOCKED),
    stuck(HangCause.MISSING_THREAD, "waits in Future.result (_base.py) for a thread that the fork did not copy",
          *FUTURE, user("f.result()"), call=LOCKED),
    stuck(HangCause.PIPE_FULL, "waiting for room in pipe 80", user("p.stdin.write(data)"),
          call=Syscall("write", "", (8,), (8,))),
    stuck(HangCause.PIPE_EMPTY, "waiting for data in pipe 60", user("os.read(r, 1)"), call=READS),
    stuck(HangCause.FIFO, "opening /data/a.fifo, a FIFO whose other end no process has opened", user("open(path)"),
          call=OPENS, wchan="wait_for_partner"),
    stuck(HangCause.TERMINAL, "waiting for input at /dev/pts/3", user("input()"),
          call=Syscall("read", "", (10,), (10,))),
    stuck(HangCause.SIGNAL, "waiting for a signal", user("signal.pause()"), call=Syscall("pause")),
    stuck(HangCause.FILE, "in read of /data/a.bin", user("f.read()"), call=Syscall("read", "", (11,), (11,))),
    *(
        stuck(HangCause.MISSING_THREAD, f"waits in C code for threads that the fork did not copy ({whose}",
              user("return torch.rand(9).add(1)"), call=replace(LOCKED, args=(4096, flags, 64)))
        for flags, whose in (
            (0x189, "OpenMP's, or of a library's"), (0x80, "such as OpenMP's)"), (0x89, "of a library's pool"),
        )
    ),
    stuck(HangCause.NO_CPU, "ready to run, but gets only 2% of a CPU", user("x"), call=None, state="R", cpu=0.01),
    stuck(HangCause.NONE, "running from time to time", user("x"), call=None, cpu=0.01, switches=9),
    *(
        case(f"in the user's own code: {step}", loop(1), IDLE,
             worker(1, user("time.sleep(990)", "mine"), call=SLEEPS, step=step),
             step=step, says=f"{words} (mine at data.py:12)")
        for step, words in (("collate", "collating a batch"), ("init", "in worker_init_fn"))
    ),
    case("a feeder thread in the user's __reduce__", loop(1), IDLE,
         worker(1, step="idle", others=(feeder(202, user("time.sleep(990)", "Image.__reduce__"),
                                               source="obj = _ForkingPickler.dumps(obj)", call=SLEEPS),)),
         step="pickle", says="worker 1 (pid 102), pickling a batch (Image.__reduce__ at data.py:12)"),
    case("a program that asks a question reads its standard input", loop(1), IDLE,
         worker(1, user("input()"), call=Syscall("read", "", (0,), (0,), timeout=-1.0),
                descriptors=(replace(QUEUE, fd=0),)),
         cause=HangCause.PIPE_EMPTY, says="(its standard input)"),
    case("a debugger that reads its commands from a pipe waits for a person", loop(1), IDLE,
         worker(1, library("Pdb.interaction", "/lib/python3.11/pdb.py"), user("breakpoint()"), call=READS_FOR_EVER,
                descriptors=(QUEUE,)),
         cause=HangCause.TERMINAL, says="in a debugger"),
    case("a child that is waited for is told with what it waits for", loop(1), IDLE,
         replace(worker(1, user("p.wait()"), call=Syscall("wait4", "for process 300", target=300, timeout=-1.0)),
                 children=(300,)),
         process(300, 102, thread(300, None, SLEEPS), name="ffmpeg"),
         cause=HangCause.CHILD, pid=300, fix="end the child",
         says=("process ffmpeg (pid 300), a child of worker 1", "is asleep (990 s more)")),
]  # fmt: skip
"""The first rows: what a worker's main thread is blocked in."""


# --- Locks, conditions and pools of one process -----------------------------------------------------------------------
RESULT = (*FUTURE, user("pool.submit(f).result()", "step", 40))
READY = (WAIT, library("Event.wait"), user("ready.wait()"))
REFRESH = thread(150, (user("with lock:", "hold"),), SLEEPS, name="refresher")
SYNCS = thread(150, (user("time.sleep(990)", "sync", 80),), SLEEPS, name="sync")
IMPORTS = thread(150, (user("from lab.augment import read; read()", "sync", 80),), SLEEPS, name="sync")
MONITOR = thread(151, (WAIT, library("TMonitor.run", "/site-packages/tqdm/_monitor.py")), LOCKED, name="tqdm")
WATCHES = thread(190, (library("_end_orphan", "/home/a/minidl/loader/worker.py"), library("Thread.run")), SLEEPS,
                 name="end_orphan")  # fmt: skip
REFRESHES = thread(191, (user("time.sleep(1)", "refresh"),), SLEEPS, name="refresh")
OUTER = thread(202, (*FUTURE, user("inner.result()", "outer", 50), library("_worker", POOL[1])), LOCKED, name="pool_0")
PUMPS = thread(202, (user("conn.recv()", "pump", 70),), READS, name="io")
DECODER = process(300, 102, thread(300, None, SLEEPS, state="T"), name="sh",
                  descriptors=(Descriptor(1, "pipe", "pipe:[60]", 60, mode="w"),))  # fmt: skip
ASKS_POOL = loop(stack=(*RESULT, MAIN_OF), call=LOCKED)
BOOTSTRAP = "<frozen importlib._bootstrap>"


def at_import(tid: int, name: str) -> SeenThread:
    """A pool's thread that waits for the import lock of a module."""
    lock = library("_ModuleLock.acquire", BOOTSTRAP), library("_lock_unlock_module", BOOTSTRAP)
    stack = (*lock, user(f"from lab.{name} import SIZES", "kernel", 4), library("_worker", POOL[1]))
    return thread(tid, stack, futex(tid), name=f"pool_{tid}")


def imports_augment(*others: SeenThread, file: str = "augment.py") -> SeenProcess:
    """A worker that imports the module augment, whose code waits for a pool."""
    runs = replace(user("list(pool.map(f, SIZES))", "<module>"), file=f"/home/a/lab/{file}")
    loads = (library(name, BOOTSTRAP) for name in ("_call_with_frames_removed", "_load_unlocked", "_find_and_load"))
    return worker(1, *FUTURE, runs, *loads, user("from . import augment"), call=LOCKED, others=others)


def of_pool(pid: int, *inside: Frame) -> SeenProcess:
    """A process of the loop's own ProcessPoolExecutor; inside: "" = it waits for a task."""
    at_work = library("_process_worker", "/lib/python3.11/concurrent/futures/process.py")
    call = OPENS if inside else LOCKED
    return process(pid, LOOP, thread(pid, (*inside, at_work, FORK, MAIN), call, wchan="wait_for_partner"))


def both_locked(address: int) -> SeenProcess:
    """Two threads of the loop's process wait for locks, the second one at an address."""
    other = thread(150, (user("with A:", "val", 22),), futex(address), name="val")
    return loop(0, other, stack=(user("with B:", "train"), MAIN_OF), call=LOCKED)


def mutex(tid: int, function: str, line: int, at: int, owner: int) -> SeenThread:
    call = Syscall("futex", "wait", (at, 0), address=at, timeout=-1.0)
    source = {"one": "a.step()", "two": "b.step()"}[function]
    return thread(tid, (user(source, function, line),), call, name=function, owner=owner)


TOKENIZES = of_pool(300, user("open(fifo)", "tokenize"))


def barred(number: int) -> SeenProcess:
    return worker(number, library("Barrier.wait"), user("barrier.wait()"), call=LOCKED)


ONE_PROCESS = [
    case("a thread of our worker's own hides no fork hazard", loop(0, REFRESHES),
         worker(0, user("with lock:"), call=LOCKED, others=(WATCHES,)), cause=HangCause.FORK_LOCK),
    case("a lock names what the other threads are in, and not a library's",
         loop(0, SYNCS, MONITOR, stack=(user("with self.lock:", "save"), MAIN_OF), call=LOCKED), IDLE,
         cause=HangCause.LOCK, sure=Sure.POSSIBLE,
         says="waits for a lock [its thread sync (sync at data.py:80) is asleep (990 s more)]"),
    case("threads that all wait for locks may wait for each other", both_locked(8192), IDLE,
         says="each may hold the lock that the next one waits for [its thread val (val at data.py:22)"),
    case("threads that wait for one lock do not", both_locked(4096), IDLE, never="each may hold"),
    case("two threads that wait for each other's mutex have no other end", loop(1), IDLE,
         worker(1, *RESULT, call=LOCKED, others=(mutex(190, "one", 22, 8192, 191), mutex(191, "two", 33, 8256, 190))),
         says="one (one at data.py:22) is waiting for a mutex", never="the other end"),
    case("a barrier in frames that name no class, as without py-spy", loop(1), IDLE,
         worker(1, library("wait_for"), library("_wait"), library("wait"), user("barrier.wait()"), call=LOCKED),
         cause=HangCause.BARRIER, says="it waits at a barrier; worker 0 (pid 101) has not reached it"),
    case("a barrier that all workers have reached is for more parties", loop(1), *map(barred, (0, 1)),
         cause=HangCause.BARRIER, says="no worker is missing, so it is for more parties than these"),
    case("a barrier of which a party has ended", loop(1), *map(barred, (0, 1)),
         told=told(44.0, 0.0, task=9, numbers={101: 0, 102: 1, 103: 2}),
         cause=HangCause.BARRIER, says="it waits at a barrier; worker 2 has ended"),
    case("an event names the threads that could set it, and whom they wait for", loop(1), IDLE,
         worker(1, *READY, call=LOCKED, others=(PUMPS,), descriptors=(QUEUE,)), DECODER, worker=1,
         says=("its thread io (pump at data.py:70) is waiting for data in pipe 60",
               "process sh (pid 300), a child of worker 1 is stopped by a signal")),
    case("who waits for a result waits for the task of its pool", ASKS_POOL, IDLE, TOKENIZES, of_pool(301),
         cause=HangCause.FIFO, pid=300, function="tokenize"),
    case("a pool without a task", ASKS_POOL, IDLE, of_pool(300), of_pool(301),
         cause=HangCause.NOBODY, role="loop", says="for the result of an idle pool"),
    case("a task of a pool that waits for a task of the same pool", loop(1), IDLE,
         worker(1, *RESULT, call=LOCKED, others=(OUTER,)), thread=202, sample=37, step="sample",
         cause=HangCause.NOBODY, also="which has no free thread",
         says="its thread pool_0 (outer at data.py:50) for 41.0 s waits in Future.result"),
    case("an import waits for threads that wait for it", loop(1), IDLE,
         imports_augment(at_import(202, "augment"), at_import(203, "augment"), MONITOR), cause=HangCause.CYCLE,
         outcome=HUNG, says="is in a cycle: the import of augment waits for threads that wait for it"),
    case("an import waits for one thread that waits for it", loop(1), IDLE,
         imports_augment(at_import(202, "augment"), SYNCS, file="augment/__init__.py"), outcome=HUNG, thread=202,
         says="is in a cycle: the import of augment waits for threads that wait for it"),
    case("an import waits for threads, one of which waits for no import", loop(1), IDLE,
         imports_augment(at_import(202, "augment"), at_import(203, "augment"), IMPORTS), never="import of"),
]  # fmt: skip


@pytest.mark.parametrize("computes", [True, False])
def test_a_loop_that_waits_for_a_pool_whose_processes_compute_is_no_hang_for_certain(computes: bool) -> None:
    pool = "/lib/python3.11/multiprocessing/pool.py"
    waits = (library("Event.wait"), library("ApplyResult.get", pool), user("pool.map(score, parts)", "evaluate"), MAIN)
    results = thread(150, (library("Pool._handle_results", pool, "task = get()"),), polls(3), name="results")

    def scores(pid: int) -> SeenProcess:
        stack = (user("while left:", "score"), library("worker", pool, "result = (True, func(*args, **kwds))"), MAIN)
        busy = thread(pid, stack, None, state="R", cpu=0.4) if computes else thread(pid, stack, SLEEPS)
        return process(pid, LOOP, busy)

    both = later(loop(0, results, stack=waits, call=LOCKED), IDLE, scores(301), scores(302))
    said = diagnose(both, own(20.0, 0.1, numbers={101: 0}))
    assert said.outcome is MAYBE_HUNG, "the program's own code may wait for its own processes"
    at_work = "of its pool, process python (pid 301) and process python (pid 302) are at work"
    assert (at_work in said.sentence) is computes


@pytest.mark.parametrize(
    ("outcome", "sure", "degree"),
    [
        (HUNG, Sure.CERTAIN, "certain"), (HUNG, Sure.POSSIBLE, "likely"), (MAYBE_HUNG, Sure.CERTAIN, "may be"),
        (UNKNOWN, Sure.UNKNOWN, "may be"), (MOVES, Sure.CERTAIN, "not a hang"),
        (RunOutcome.DIED, Sure.LIKELY, "certain"), (RunOutcome.FINE, Sure.LIKELY, "not a hang"),
    ],
)  # fmt: skip
def test_a_finding_says_how_sure_the_hang_is(outcome: RunOutcome, sure: Sure, degree: str) -> None:
    said = Finding(outcome, "x", HangCause.LOCK, sure=sure)
    assert said.to_dict()["degree"] == said.degree.value == degree
    assert ("a hang: " in said.text()) is (outcome in (HUNG, MAYBE_HUNG))


@pytest.mark.parametrize(
    ("inside", "batch", "task", "cause"),
    [
        ((user("with LOCK:"),), "[37, 38]", "1", HangCause.FORK_LOCK),
        ((user("with LOCK:"),), "[36, 37]", "1", HangCause.SELF_LOCK),  # sample 36 may have kept it
        ((user("with LOCK:"),), "[37, 38]", "3", HangCause.SELF_LOCK),
        ((user("with LOCK:"), user("return self.read(i)")), "[37, 38]", "1", HangCause.SELF_LOCK),
        ((library("cached_property.__get__", "/lib/python3.11/functools.py"), user("self.table")), "[36, 37]", "3",
         HangCause.FORK_LOCK),
    ],
)  # fmt: skip
def test_a_lock_that_the_worker_can_not_have_taken_before_was_held_at_the_fork(
    inside: tuple[Frame, ...], batch: str, task: str, cause: HangCause
) -> None:
    made = worker(1, *inside, call=LOCKED)
    stack = tuple(
        replace(f, variables={**f.variables, "idx": task}) if f.function == "_worker_loop"
        else replace(f, variables={**f.variables, "possibly_batched_index": batch}) if f.function == "F.fetch" else f
        for f in made.threads[0].stack or ()
    )  # fmt: skip
    assert found(loop(1), IDLE, again(made, stack=stack)).cause is cause


def forked(*inside: Frame, copies: dict[str, int] | None = None, **more: Any) -> list[SeenProcess]:
    """A loop, an idle worker, and one that waits for a lock. copies: of that lock, by pid."""
    waits = worker(1, *(inside or (user("with self._lock:", "Cache.get"),)), call=LOCKED, **more)
    return [loop(1), IDLE, again(waits, copies=copies or {})]


TQDM = thread(150, (WAIT, library("TMonitor.run", "/site-packages/tqdm/_monitor.py")), LOCKED, name="tqdm")
CALLS = user("self.load(i)", "D.__getitem__", 20)
LOADS = user("with self.lock:", "D.load", 8)


@pytest.mark.parametrize(
    ("seen", "cause", "sure", "fact"),
    [
        (forked(LOADS, replace(CALLS, within=("with self.lock:",))), HangCause.SELF_LOCK, Sure.LIKELY,
         "its own stack has taken the lock: `with self.lock:` in D.__getitem__ (data.py:20)"),
        (forked(LOADS, replace(CALLS, source="with self.lock: self.load(i)")), HangCause.SELF_LOCK, Sure.LIKELY, "own"),
        (forked(LOADS, replace(CALLS, function="Other.get", within=("with self.lock:",))), HangCause.SELF_LOCK,
         Sure.POSSIBLE, "no owner"),
        (forked(LOADS, replace(CALLS, within=("with self.cache:",))), HangCause.SELF_LOCK, Sure.POSSIBLE, "no owner"),
        (forked(user("L.acquire()", within=("L.acquire()",))), HangCause.SELF_LOCK, Sure.LIKELY, "own stack"),
        (forked(user("L.acquire()", within=("L.release()", "L.acquire()"))), HangCause.SELF_LOCK, Sure.POSSIBLE, ""),
        (forked(copies={"100": -1, "101": -1}), HangCause.SELF_LOCK, Sure.LIKELY, "the worker made the lock itself"),
        (forked(copies={"100": 1, "101": 0}), HangCause.FORK_LOCK, Sure.LIKELY, "is held in worker 0 (pid 101), too"),
        (forked(copies={"100": 0, "101": 1}), HangCause.FORK_LOCK, Sure.LIKELY, "held in the parent process now"),
        (forked(copies={"100": 1, "101": 1}), HangCause.SELF_LOCK, Sure.POSSIBLE, "the lock has no owner"),
        ([loop(1, TQDM), *forked()[1:]], HangCause.SELF_LOCK, Sure.POSSIBLE, "the lock has no owner"),
        ([loop(1, REFRESH), *forked()[1:]], HangCause.FORK_LOCK, Sure.LIKELY, "refresher"),
        ([loop(1), worker(0, user("with L:"), call=LOCKED), worker(1, user("with L:"), call=LOCKED)],
         HangCause.FORK_LOCK, Sure.POSSIBLE, "worker 0 (pid 101) waits at the same line"),
        (forked(library("_ModuleLock.acquire", "<frozen importlib._bootstrap>")), HangCause.FORK_LOCK, Sure.LIKELY, ""),
        (forked(library("Condition.__enter__"), library("Queue.put", "/lib/python3.11/queue.py")), HangCause.SELF_LOCK,
         Sure.POSSIBLE, "no owner"),
        (forked(library("Queue.put", "/lib/python3.11/queue.py", "with self.not_full:")), HangCause.SELF_LOCK,
         Sure.POSSIBLE, "no owner"),
    ],
)  # fmt: skip
def test_a_lock_that_was_held_at_the_fork_is_told_from_one_that_the_worker_holds(
    seen: list[SeenProcess], cause: HangCause, sure: Sure, fact: str
) -> None:
    """One that neither the stack nor the memory of other processes shows is only possible, and both are named."""
    said = found(*seen)
    assert (said.cause, said.sure) == (cause, sure)
    assert any(fact in one.text for one in said.evidence)
    assert bool(said.also) or sure is Sure.LIKELY


def test_a_lock_that_a_signal_handler_takes_twice_hangs_though_signals_wake_it() -> None:
    """A timer's signals come all the time: they interrupt the wait, which goes on."""
    handler = user("with LOCK:", "on_alarm", frame="<frame at 0x7f>")

    def at(line: int) -> SeenProcess:
        return loop(stack=(replace(handler, line=line), user("with LOCK:", "train"), MAIN), call=LOCKED)

    assert diagnose(later(at(7), IDLE)).outcome is HUNG
    assert diagnose(then_and_now([at(7), IDLE], [at(8), IDLE])).outcome is MAYBE_HUNG
    assert diagnose([look(at(7), IDLE)]).outcome is MAYBE_HUNG


# --- Semaphores of several processes ----------------------------------------------------------------------------------
def crossed(number: int, wants: int) -> SeenProcess:
    """A worker with two locks of several processes that waits for one of them."""
    return two_locks(worker(number, user("with second:"), call=futex(wants)))


def two_locks(one: SeenProcess) -> SeenProcess:
    return replace(one, semaphores=(Semaphore("sem.a", 700, 4096, 0, 1), Semaphore("sem.b", 701, 8192, 0, 1)))


def refills(left: float) -> SeenProcess:
    """A thread of the loop's process releases a permit, and sleeps: a token bucket."""
    gives = thread(150, (user("time.sleep(4)", "refill"),), nap(f"{left} s more", left), name="refill")
    return sharing(loop(1, gives))


SYNCHRONIZE = "/lib/python3.11/multiprocessing/synchronize.py"
BUCKET = sharing(worker(1, user("SEM.acquire()"), call=LOCKED))
ACQUIRES = sharing(worker(1, user("lock.acquire()"), call=LOCKED))
SLOTS = sharing(worker(1, user("with SLOTS:"), call=LOCKED))
HOG = sharing(process(300, LOOP, thread(300, (user("time.sleep(990)", "hog"), FORK, MAIN), SLEEPS)))
POLLS_LOCK = (sharing(loop(1)), sharing(worker(0, user("compute()"), call=SLEEPS)),
              sharing(worker(1, user("while not lock.acquire(timeout=0.5):"), call=replace(LOCKED, timeout=0.4),
                             idle=0.1, switches=1)))  # fmt: skip
QUEUE_AT = {"self": "<Queue at 0x20>"}  # the loop's is at 0x10
ASKS_QUEUE = Frame("Queue.get", QUEUES, 102, QUEUE_AT, "with self._rlock:")
ASKS_SAMPLER = Frame("It._next_index", DATALOADER, 700, source="return next(self._sampler_iter)")
GETS_ITEM = Frame("Queue.get", QUEUES, 103, QUEUE_AT, "res = self._recv_bytes()")


def guarded(source: str, other: str = "0x7") -> SeenProcess:
    """A worker waits for a lock of the object 0x7, and another thread is at this line, within that lock of `other`."""
    inside = (WAIT, library("Queue.get", "/lib/python3.11/queue.py")) if "get" in source else (WAIT,)
    holds = user(source, "Data.index", 23, within=("with self.guard:",), self=other)
    indexes = thread(150, (*inside, holds), replace(LOCKED, address=4711), name="indexer")
    return worker(1, user("with self.guard:", self="0x7"), call=LOCKED, others=(indexes,))


def of_semaphore(cause: HangCause, words: str, *inside: Frame) -> Any:
    """A row: what a semaphore stands for is told by the stack."""
    return case(words, sharing(loop(1)), sharing(IDLE), sharing(worker(1, *inside, call=LOCKED)),
                cause=cause, sample=37, says=f"it waits for {words}")  # fmt: skip


SEMAPHORES = [
    of_semaphore(HangCause.QUEUE_FULL, "room in a bounded queue", library("Queue.put", QUEUES), user("out.put(x)")),
    of_semaphore(HangCause.NOBODY, "a shared Event that no process sets", library("Condition.wait", SYNCHRONIZE),
                 library("Event.wait", SYNCHRONIZE), user("ready.wait()")),
    of_semaphore(HangCause.NOBODY, "the notify of a shared Condition", library("Condition.wait", SYNCHRONIZE),
                 user("news.wait()")),
    case("a lock that no process is about to release", sharing(loop(1)), sharing(IDLE), ACQUIRES,
         cause=HangCause.PERMIT_LOST, sure=Sure.LIKELY),
    case("two locks that are crossed are a cycle", two_locks(loop(1)), crossed(0, 4096), crossed(1, 8192),
         outcome=HUNG, cause=HangCause.CYCLE, sure=Sure.LIKELY,
         says="a lock that only worker 0 (pid 101), in Data.__getitem__ at data.py:12, may hold"),
    case("two crossed locks, one of which a third process may hold", two_locks(loop(1)), crossed(0, 4096),
         crossed(1, 8192), two_locks(worker(2, user("compute()"), call=SLEEPS)), cause=HangCause.SEMAPHORE),
    case("one look does not tell a lock that is asked for again and again from a wait that ends", *POLLS_LOCK,
         cause=HangCause.UNKNOWN),
    case("a lock that is asked for again and again is waited for", looks=later(*POLLS_LOCK),
         outcome=MAYBE_HUNG, cause=HangCause.SEMAPHORE, worker=1),
    case("a lock without an owner is held by who is further in the same function", sharing(loop(1)),
         sharing(worker(0, GETS_ITEM, user("q.get()"), call=READS, descriptors=(QUEUE,))),
         sharing(worker(1, ASKS_QUEUE, user("q.get()"), call=LOCKED)),
         cause=HangCause.QUEUE_EMPTY, worker=0, chain="holds the lock, by its stack"),
    case("a lock is held by the thread that is in a `with` of it in another function", loop(1), IDLE,
         guarded("jobs.get()"), cause=HangCause.QUEUE_EMPTY, chain="holds the lock, by its stack",
         says="waits for a lock; its thread indexer (Data.index at data.py:23)"),
    case("a lock of the same name of another object is another lock", loop(1), IDLE, guarded("jobs.get()", "0x8"),
         cause=HangCause.LOCK, outcome=HUNG),
    case("a loop whose next calls the user's code does not wait for a batch", IDLE, worker(1, step="idle"),
         loop(1, stack=(user("with self.guard:", "Own.draw", 27), *next_stack(-1)), call=LOCKED), never="lost",
         says="Own.draw at data.py:27"),
    case("a condition's lock is free while it is waited for", loop(1), IDLE, guarded("self.guard.wait()"),
         cause=HangCause.LOCK, outcome=HUNG),
    case("permits that a thread gives out now and then are not lost", refills(4.0), sharing(IDLE), BUCKET,
         outcome=MAYBE_HUNG),
    case("permits that a thread gives out too late", refills(990.0), sharing(IDLE), BUCKET, outcome=HUNG),
    case("a process of the program's own may hold the permits", sharing(loop(1)), sharing(IDLE), SLOTS, HOG,
         cause=HangCause.SEMAPHORE, sure=Sure.POSSIBLE, says="process python (pid 300) may hold it"),
    case("the loop may hold the permit while it waits", sharing(loop(1)), sharing(IDLE), SLOTS,
         cause=HangCause.PERMIT_LOST,
         ends="it was lost, or the loop (pid 100) holds it while waiting for the batch",
         fix="give each a semaphore of its own"),
    case("a process waits for a lock shared between processes that it has taken", sharing(loop(1)), sharing(IDLE),
         sharing(worker(1, user("with total.get_lock():", "Data.count", 20),
                        user("self.count()", line=30, within=("with total.get_lock():",)), call=LOCKED)),
         cause=HangCause.SELF_LOCK, says="that it holds itself", fix="multiprocessing.RLock"),
    case("others wait for the lock that a process has taken twice, too", sharing(loop(1)),
         sharing(worker(0, user("with total.get_lock():", "Data.count", 20), call=LOCKED)),
         sharing(worker(1, user("with total.get_lock():", "Data.count", 20),
                        user("self.count()", line=30, within=("with total.get_lock():",)), call=LOCKED)),
         cause=HangCause.SELF_LOCK, says="that it has taken itself; others wait for it, too"),
    *(
        case(f"a child that {words} has not held the permit", sharing(loop(1)), sharing(IDLE), SLOTS,
             replace(process(300, LOOP, thread(300, None, None), ended=True, exit_code=code), name=name),
             cause=HangCause.PERMIT_LOST, never="perhaps process")
        for words, code, name in (("has left by itself", 0, "python"), ("was killed and ran another program", 9, "git"))
    ),
    case("a process was killed that may have held the permit", sharing(loop(1)), sharing(IDLE), SLOTS,
         process(300, LOOP, thread(300, None, None), ended=True, exit_code=9), cause=HangCause.PERMIT_LOST,
         ends="is about to release: perhaps process python (pid 300), which has ended (SIGKILL), held it"),
    case("the lock of the result queue that no process gives back was a dead worker's", sharing(loop(1)), sharing(IDLE),
         sharing(worker(1, step="idle", others=(feeder(202, source="wacquire()"),))),
         cause=HangCause.DEAD_LOCK_HOLDER, says="waits for the lock of the loader's own queue"),
]  # fmt: skip


@pytest.mark.parametrize("feeds", [True, False])
def test_the_lock_of_the_results_is_held_by_a_feeder_that_does_not_get_the_gil(feeds: bool) -> None:
    """Worker 0's sample keeps the GIL: its feeder has the lock, and can't go on. feeds: the feeder's stack is there."""
    line = Frame("Queue._feed", QUEUES, 250, source="wacquire()")
    starved = thread(201, (line,) if feeds else None, futex(8192, timeout=0.005), name="QueueFeederThread", idle=0.0,
                     switches=75)  # fmt: skip
    keeps = worker(0, user("re.match(...)"), cpu=0.5, gil=True, others=(starved,), index=22)
    waits = worker(1, step="idle", others=(thread(202, (line,), futex(4096), name="QueueFeederThread"),))
    said = diagnose(later(*map(sharing, (loop(1), keeps, waits))))
    assert (said.cause, said.who["worker"], said.who["role"]) == (HangCause.GIL, 0, "worker")


# --- Pipes, sockets and queues ----------------------------------------------------------------------------------------
def asks_workers(
    *others: SeenThread, call: Syscall = READS_FOR_EVER, first: SeenProcess | None = None
) -> list[RunEvidence]:
    """The loop's own code waits for an item that its workers could put."""
    gets = (library("Queue.get", QUEUES, "res = self._recv_bytes()"), user("q.get()"), MAIN)
    home = process(LOOP, 1, thread(LOOP, gets, call), descriptors=(QUEUE, PUTS, *loop().descriptors))
    first = first or worker(0, step="idle", others=others, descriptors=(PUTS,))
    return later(home, first, worker(1, step="idle", descriptors=(PUTS,)))


def circle(call: Syscall) -> list[RunEvidence]:
    """Each of two workers reads from a pipe that the other one writes to."""
    ends = [(pipe(7, wants, "r"), pipe(8, has, "w")) for wants, has in ((71, 70), (70, 71))]
    return later(loop(1), *(worker(i, user("pipe.poll(600)"), call=call, descriptors=e) for i, e in enumerate(ends)))


def heard_by(call: Syscall) -> list[SeenProcess]:
    """A connection that the loop's process, with a thread in a call, has not accepted."""
    accepts = thread(190, (user("server.accept()", "serve"),), call, name="server")
    asks = worker(1, user("sock.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 70, BACKLOG),))
    return [loop(1, accepts, descriptors=(connection(6, 70, 0),)), IDLE, asks]


def of_manager(*served: tuple[int, str]) -> list[SeenProcess]:
    """A worker asks a manager, whose threads serve clients: each in a method."""
    managers = "/lib/python3.11/multiprocessing/managers.py"
    line = "res = function(*args, **kwds)"
    serving = [
        thread(tid, (library("Server.serve_client", managers, line, methodname=f"'{method}'"),), LOCKED,
               name=f"Thread-{tid}")
        for tid, method in served
    ]  # fmt: skip
    manager = process(
        300, LOOP, thread(300, (), ACCEPTS), *serving, name="manager", descriptors=(connection(8, 91, 90),)
    )
    asks = worker(1, user("with lock:"), call=RECEIVES, descriptors=(connection(9, 90, 91),))
    return [loop(1), IDLE, asks, manager]


def slowly(switches: int) -> list[RunEvidence]:
    """A child writes a little and sleeps, again and again; the signal for a stack wakes its reader once, too."""
    writer = process(300, 102, thread(300, None, nap("0.2 s more", 0.2), switches=2),
                     descriptors=(Descriptor(1, "pipe", "", 60, mode="w"),))  # fmt: skip
    reader = worker(1, user("p.stdout.read()"), call=READS, switches=switches, descriptors=(QUEUE,))
    return later(loop(1), IDLE, reader, writer)


def asked(times: int) -> SeenProcess:
    """A worker that has so often asked a socket with a timeout."""
    asks = Syscall("poll", "1 descriptor", (9,), (9,), timeout=0.7)
    made = worker(1, user("s.recvfrom(512)"), call=asks, idle=0.3, descriptors=(connection(9, 90, 0),))
    return again(made, switches=(times, times))


def receives(switches: int) -> SeenProcess:
    return worker(1, user("sock.recv(1)"), call=RECEIVES, switches=switches, descriptors=(connection(9, 90, 0),))


def gets(switches: int) -> SeenProcess:
    """A loop that takes a batch's memory from a worker, and woke up so often between the looks."""
    return again(loop(stack=(user("for batch in loader:"),)), switches=(0, switches), idle=0.1)


LOOPS = (library("select", "/lib/python3.11/selectors.py"),
         library("BaseEventLoop._run_once", "/lib/python3.11/asyncio/base_events.py"))  # fmt: skip


def runs_loop(timeout: float) -> SeenProcess:
    """A worker in an event loop of asyncio, whose next timer is so far away."""
    call = Syscall("epoll_wait", "", (4,), (4,), timeout=timeout)
    return worker(1, *LOOPS, user("asyncio.run(get())"), call=call)


def asks_store(*inside: Frame, name: str = "pt_tcpstore_uv") -> list[SeenProcess]:
    """A worker reads from a socket, whose other end the loop's process has, with a thread of this name."""
    serves = replace(thread(190, None, Syscall("epoll_wait", "", (8,), (8,), timeout=-1.0)), name=name)
    asks = worker(1, *inside, user("store.get('plan')"), call=RECEIVES, descriptors=(connection(9, 90, 91),))
    return [loop(1, serves, descriptors=(connection(8, 91, 90),)), IDLE, asks]


ASKS_AGAIN = (WAIT, library("Event.wait"), user("while not done.wait(1):"))
IN_VAIN = worker(1, *ASKS_AGAIN, call=replace(LOCKED, timeout=1.0), idle=0.5)
SERVES = thread(150, (WAIT, library("Queue.get", "/lib/python3.11/queue.py"), user("q.get()", "log", 7)), LOCKED,
                name="log")  # fmt: skip
SHUTS = library("_shutdown", source="lock.acquire()")
CLIENT = process(301, LOOP, thread(301, (), SLEEPS), name="reader", descriptors=(connection(5, 95, 93),))
INHERITS = replace(IDLE, descriptors=(*IDLE.descriptors, connection(9, 90, 91)))
ENDS_OF_CHAINS = [
    case("an event loop without a timer", loop(1), IDLE, runs_loop(-1.0), cause=HangCause.NOBODY, sure=Sure.POSSIBLE),
    case("an event loop with a timer sleeps", loop(1), IDLE, runs_loop(900.0), cause=HangCause.SLEEP,
         ends="nothing to run until a timer of 900 s (asyncio.sleep)"),
    case("an event loop goes on with its timer", loop(1), IDLE, runs_loop(42.6), outcome=MAYBE_HUNG),
    case("an event loop with a timer that ends soon moves", loop(1), IDLE, runs_loop(0.5), outcome=MOVES),
    *(
        case(f"a server whose event loop is idle does not answer, seen {seen}", looks=looks(
            loop(1), IDLE, worker(1, user("s.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 91),)),
            process(300, LOOP, thread(300, (*LOOPS, user("asyncio.run(serve())")),
                                      Syscall("epoll_wait", "", (4,), (4,), timeout=-1.0)),
                    name="server", descriptors=(connection(8, 91, 90),))),
             outcome=HUNG, cause=HangCause.NOBODY, sure=Sure.POSSIBLE, pid=300)
        for seen, looks in (("twice", later), ("once", lambda *seen: [look(*seen)]))
    ),
    case("a key that no process sets", *asks_store(), cause=HangCause.NOBODY, sure=Sure.LIKELY, worker=1,
         ends="waits for a key that no process has set, in the TCPStore of the loop (pid 100)"),
    case("a process without a store is the other end of a socket", *asks_store(name="grpc"), cause=HangCause.SOCKET),
    case("a socket of Python's is no store's", *asks_store(library("SocketIO.readinto", "/lib/python3.11/socket.py")),
         cause=HangCause.SOCKET),
    case("a wait with a timeout that is asked for again has no end", looks=later(loop(1, TQDM), IDLE, IN_VAIN),
         cause=HangCause.MISSING_THREAD, worker=1),
    case("one look at it does not tell", loop(1, TQDM), IDLE, IN_VAIN, cause=HangCause.UNKNOWN),
    case("a thread that is no daemon holds up the exit", loop(0, SERVES, stack=(SHUTS,), call=LOCKED),
         cause=HangCause.NOBODY, sure=Sure.LIKELY, role="loop", step="exit", fix="daemon",
         says="waits for the end of its thread log [its thread log (log at data.py:7) is waiting for a lock"),
    case("one that waits for the next item waits for ever",
         looks=later(loop(0, SERVES, stack=(SHUTS,), call=LOCKED)), told=own(20.0), outcome=HUNG),
    case("so does one that the main thread joins", told=own(20.0), cause=HangCause.QUEUE_EMPTY, outcome=HUNG,
         looks=later(loop(0, replace(SERVES, stack=(*SERVES.stack, library("_bootstrap_inner", self="<T at 0x5>"))),
                          stack=(WAIT, library("Thread.join", self="<T at 0x5>"), MAIN_OF), call=LOCKED))),
    case("of two such threads it is not known which is no daemon",
         loop(0, SERVES, SYNCS, stack=(SHUTS,), call=LOCKED), cause=HangCause.NOBODY, sure=Sure.POSSIBLE),
    case("what a process in state D reads, and from where", loop(1), IDLE,
         worker(1, user("f.read()"), call=READS, state="D", wchan="rpc_wait",
                descriptors=(Descriptor(6, "file", "/mnt/a.tar", 2, 2, "r", about="nfs4"),)),
         cause=HangCause.UNINTERRUPTIBLE,
         says="in an uninterruptible sleep, in read of /mnt/a.tar (nfs4), in the kernel's rpc_wait"),
    case("the other clients of a manager could end the wait",
         *(replace(one, descriptors=(*one.descriptors, connection(9, 93, 95))) if one.pid == 300 else one
           for one in of_manager((311, "acquire"))), CLIENT,
         cause=HangCause.LOCK, says="calls release() (process reader (pid 301) could)"),
    case("the asking end of a server's connection was inherited", loop(1), INHERITS,
         worker(1, user("s.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 91),)),
         process(300, LOOP, thread(300, (user("s.recv(1)", "serve"),), replace(RECEIVES, fds=(8,))), name="server",
                 descriptors=(connection(8, 91, 90),)),
         cause=HangCause.SOCKET, pid=300, also="worker 0 (pid 101) inherited the same socket"),
]  # fmt: skip
AIO = thread(190, (user("self.a.recv(1)", "get", 22),), RECEIVES, name="aio")
SEVERAL = thread(190, (user("select()", "get", 22),), Syscall("poll", "2 descriptors", (9, 12), (9, 12), timeout=-1.0),
                 name="aio")  # fmt: skip
BOTH_ENDS = (connection(8, 91, 90), connection(9, 90, 91))
DUPLEX = tuple(
    Descriptor(fd, "socket", f"socket:[{at}]", at, mode="rw", peer=peer) for fd, at, peer in ((6, 60, 61), (7, 61, 60))
)
ANSWERS = loop(1, descriptors=(pipe(3, RESULTS, "r"), DUPLEX[1]))
ASKS_LOOP = worker(1, user("conn.recv()"), call=READS, descriptors=DUPLEX)
SERVES = thread(150, (user("conn.recv()", "serve", 90),), LOCKED, name="server")
KEEPS_MEMORY = worker(0, user("native()"), call=SLEEPS, gil=True, descriptors=(connection(6, 91, 0),))
DETACH = Frame("DupFd.detach", "/lib/python3.11/multiprocessing/resource_sharer.py", 86, {}, "conn = get_connection()")
FETCHES_MEMORY = process(LOOP, 1, thread(LOOP, (library("Connection._recv"), DETACH, *next_stack(1)), RECEIVES),
                         descriptors=(connection(9, 90, 91, BACKLOG),))  # fmt: skip
REBUILDS = process(LOOP, 1, thread(LOOP, (
    user("sock.recv(1)", "Note.__setstate__"),
    Frame("Queue.get", QUEUES, 122, {}, "return _ForkingPickler.loads(res)"), *next_stack(0)[2:]), RECEIVES),
    descriptors=(connection(9, 90, 91),))  # fmt: skip
FEED = ((ASKS_QUEUE, user("q.get()", "Feed.__iter__")), (GETS_ITEM, user("q.get()", "Feed.__iter__")))
FEEDING = [
    replace(loop(1), descriptors=(QUEUE, PUTS, *loop(1).descriptors)),
    worker(0, *FEED[0], call=LOCKED, descriptors=(QUEUE, PUTS), idle=5.0),
    worker(1, *FEED[1], call=READS_FOR_EVER, descriptors=(QUEUE, PUTS), idle=5.0),
]
REPLAYS = worker(1, Frame("Queue.get", QUEUES, 103, source="res = self._recv_bytes()"), user("replay.get()"),
                 call=READS, descriptors=(QUEUE,))  # fmt: skip
ACTOR = replace(process(300, LOOP, thread(300, (), None, state="Z"), name="actor"), exit_code=9, ended=True)
FFMPEG = process(300, 102, thread(300, (), Syscall("write", "", (2,), (2,))), name="ffmpeg",
                 descriptors=(pipe(1, 60, "w"), pipe(2, 61, "w")))  # fmt: skip
IDLE_WORKERS = own(8.0, 0.1, numbers={101: 0, 102: 1})
CONNECTIONS = [
    case("a child whose pipes are not read makes a cycle that names both pipes", loop(1), IDLE,
         worker(1, user("p.stdout.read()"), call=Syscall("read", "", (7,), (7,)),
                descriptors=(pipe(7, 60, "r"), pipe(8, 61, "r"))), FFMPEG,
         cause=HangCause.CYCLE, sure=Sure.CERTAIN, fix="communicate()", says="is waiting for data in pipe 60",
         ends="process ffmpeg (pid 300), a child of worker 1 is waiting for room in pipe 61)"),
    case("a cycle of pipes", looks=circle(Syscall("read", "", (7,), (7,), timeout=-1.0)),
         outcome=HUNG, cause=HangCause.CYCLE),
    case("a cycle with a timeout of the user's may end", looks=circle(Syscall("poll", "", (7,), (7,), timeout=600.0)),
         outcome=MAYBE_HUNG, cause=HangCause.CYCLE, sure=Sure.POSSIBLE),
    case("a process of the program's that was killed is named for who waits for its items", loop(1), IDLE, REPLAYS,
         ACTOR,
         cause=HangCause.QUEUE_EMPTY, also="process actor (pid 300), which has ended (SIGKILL), should have put it",
         fix="start it again"),
    case("the other end of a socket is a thread, and no cycle",
         loop(1, thread(190, (user("time.sleep(990)", "serve"),), SLEEPS, name="server"),
              descriptors=(connection(8, 91, 90),)),
         IDLE, worker(1, user("sock.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 91),)),
         cause=HangCause.SLEEP, thread=190),
    case("a thread that waits for its own process at a socket: who would send is a coroutine of the same loop", loop(1),
         IDLE, worker(1, *RESULT, call=LOCKED, others=(AIO,), descriptors=BOTH_ENDS),
         says="aio (get at data.py:22) is waiting for data at a socket (it has the other end itself)"),
    case("the other end is another process's", loop(1), IDLE,
         worker(1, *RESULT, call=LOCKED, others=(AIO,), descriptors=BOTH_ENDS[1:]),
         process(300, 1, thread(300, (user("serve()"),), LOCKED), descriptors=BOTH_ENDS[:1]),
         never="has the other end itself"),
    case("of two connections one may be answered by another machine", loop(1), IDLE,
         worker(1, *RESULT, call=LOCKED, others=(SEVERAL,), descriptors=(*BOTH_ENDS, connection(12, 99, 0))),
         says="aio (get at data.py:22) is waiting for one of 2 descriptors", never="has the other end itself"),
    case("who has the other end and waits in turn is said to", ANSWERS, IDLE, ASKS_LOOP,
         ends="the other end: the loop (pid 100) [waits for it in turn] and worker 1 (pid 102) itself"),
    case("who has the other end, and a thread that could use it",
         replace(ANSWERS, threads=(*ANSWERS.threads, SERVES)), IDLE, ASKS_LOOP,
         never="waits for it in turn", says="its thread server (serve at data.py:90)"),
    case("who receives bytes between two looks moves", looks=later(loop(1), IDLE, receives(3)), outcome=MOVES),
    case("who receives none hangs", looks=later(loop(1), IDLE, receives(0)), outcome=HUNG),
    case("a loop that gets batches moves, though it was at the same line at both looks", looks=later(gets(90), IDLE),
         outcome=MOVES),
    case("a loop that only polls does not", looks=later(gets(3), IDLE), outcome=MAYBE_HUNG),
    case("who gets bytes from a slow writer moves, though the writer naps", looks=slowly(9), told=told(14.0),
         outcome=MOVES, says="and writes from time to time"),
    case("the signal for a stack wakes a reader once", looks=slowly(1), told=told(44.0), outcome=HUNG),
    case("a socket that is asked again and again with a timeout is polled",
         looks=then_and_now([loop(1), IDLE, asked(10)], [loop(1), IDLE, asked(14)]),
         cause=HangCause.SOCKET, says="with a timeout, 4 times in 4.5 s: it polls"),
    case("one look shows no poll", loop(1), IDLE, asked(14), never="polls"),
    case("a connection that no thread accepts", *heard_by(SLEEPS),
         ends="should accept it, but no thread of it calls accept()"),
    case("a connection that a thread is to accept", *heard_by(ACCEPTS), ends="should accept it"),
    case("a connection that is not accepted names who listens", loop(1), IDLE,
         worker(1, user("sock.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 70, BACKLOG),)),
         process(300, LOOP, thread(300, None, ACCEPTS, state="T"), name="server", descriptors=(connection(6, 70, 0),)),
         cause=HangCause.STOPPED, pid=300),
    case("the memory of a batch is fetched from the worker at the socket's other end",
         looks=later(FETCHES_MEMORY, KEEPS_MEMORY, worker(1, step="idle")), cause=HangCause.GIL, worker=0),
    case("a worker that only inherited a socket has lost no result",
         looks=later(REBUILDS, worker(0, step="idle", descriptors=(connection(8, 91, 90),))),
         cause=HangCause.SOCKET, role="loop", step="unpickle"),
    case("a manager's process says in which call it waits, and what ends that",
         *of_manager((301, "acquire"), (302, "acquire")), cause=HangCause.LOCK, pid=300,
         ends="waits in acquire() until another client calls release()"),
    case("a manager in two calls: it can't be known which is whose", *of_manager((301, "acquire"), (302, "get")),
         cause=HangCause.SOCKET),
    case("a loop that waits for an item of its idle workers hangs", looks=asks_workers(feeder(201)), told=IDLE_WORKERS,
         outcome=HUNG, cause=HangCause.QUEUE_EMPTY,
         says="only worker 0 (pid 101) and worker 1 (pid 102) could, and they wait for this process"),
    *(
        case(f"a loop that waits for an item of a worker that {name}", looks=looks, told=IDLE_WORKERS,
             outcome=MAYBE_HUNG)
        for name, looks in (
            ("is at work", asks_workers(first=worker(0, user("x"), cpu=0.5, descriptors=(PUTS,)))),
            ("sends", asks_workers(feeder(201, source="send_bytes(obj)"))),
            ("has another thread",
             asks_workers(thread(201, (user("q.put(1)", "produce"),), SLEEPS, name="producer"))),
            ("is given up", asks_workers(call=Syscall("poll", "", (6,), (6,), timeout=60.0))),
        )
    ),
    case("an item that only processes could put that wait for the reader never comes",
         looks=later(*map(sharing, FEEDING)), outcome=HUNG, cause=HangCause.QUEUE_EMPTY, worker=1,
         says="only the loop (pid 100) and worker 0 (pid 101) could, and they wait for this process"),
    *(
        case(f"a FIFO that only its reader has open, as {mode}", loop(1), IDLE,
             worker(1, user("os.read()"), call=READS_FOR_EVER, idle=5.0,
                    descriptors=(Descriptor(6, "fifo", "/data/a.fifo", 60, mode=mode),)),
             outcome=outcome)
        for mode, outcome in (("rw", HUNG), ("r", MAYBE_HUNG))
    ),
    case("a sampler that asks a queue", IDLE,
         process(LOOP, 1, thread(LOOP, (Frame("Queue.get", QUEUES, 103, source="res = self._recv_bytes()"),
                                        user("self.source.get()"), ASKS_SAMPLER, MAIN), READS_FOR_EVER),
                 descriptors=(QUEUE,)), cause=HangCause.QUEUE_EMPTY, says="waits in Queue.get"),
    case("a shell has all that its child has: the child is what a pipe's reader waits for", loop(1), IDLE,
         replace(worker(1, user("stream.read()"), call=READS_FOR_EVER, descriptors=(QUEUE,)), children=(300,)),
         process(300, 102, thread(300, None, Syscall("wait4", "for process 301", (301,), target=301)), name="sh",
                 descriptors=(PUTS,), children=(301,)),
         process(301, 300, thread(301, None, OPENS, wchan="wait_for_partner"), name="cat", descriptors=(PUTS,)),
         pid=301, says="opening /data/a.fifo, a FIFO"),
]  # fmt: skip


def test_the_feeder_of_a_users_queue_is_not_that_of_the_results() -> None:
    """A child that is joined before its queue is read: it ends once its feeder has written all."""
    join = (Frame("Popen.poll", "/lib/python3.11/multiprocessing/popen_fork.py", 27, source="os.waitpid(self.pid)"),)
    waits = Syscall("wait4", "for process 300", target=300, timeout=-1.0)
    sends = Frame("Connection._send", CONNECTION, 384, source="n = write(self._handle, buf)")
    feeds = feeder(301, sends, source="send_bytes(obj)", call=Syscall("write", "", (8,), (8,)))
    ends = library("_exit_function", "/lib/python3.11/multiprocessing/util.py", "_run_finalizers()")
    finalizer = library("Thread.join", source="self._wait_for_tstate_lock()", self="<Thread at 0x77>")
    bottom = library("Thread._bootstrap_inner", self="<Thread at 0x77>")
    child = process(
        300, LOOP, thread(300, (finalizer, ends, FORK, MAIN), LOCKED),
        replace(feeds, stack=(*(feeds.stack or ()), bottom)), descriptors=(pipe(8, 60, "w"), QUEUE),
    )  # fmt: skip
    joins = loop(stack=(*join, user("p.join()", "step"), MAIN_OF), call=waits, descriptors=(QUEUE,))
    said = found(replace(joins, children=(300,)), IDLE, child)
    assert "writing a batch" not in said.text()
    assert (said.outcome, said.cause) == (HUNG, HangCause.CYCLE)
    assert "before join()" in said.fix
    assert "waiting for room in pipe 60; the loop (pid 100) [waits for it in turn] has its reading end" in said.sentence
    reads = thread(150, (user("p.stdout.read()", "read"),), SLEEPS)
    said = found(replace(joins, children=(300,), threads=(*joins.threads, reads)), IDLE, child)
    assert said.cause is HangCause.CHILD, "another thread may be about to read"


# --- The loop ---------------------------------------------------------------------------------------------------------
JOINS_WORKERS = Frame("It._shutdown_workers", DATALOADER, 1650, {}, "w.join(timeout=5)")
JOINS_ONE = Frame("It._shutdown_workers", DATALOADER, 1, {}, "w.join(timeout=5)")
JOIN = library("Thread.join", source="self._wait_for_tstate_lock()", self="<Thread at 0x77>")
BOTTOM = library("Thread._bootstrap_inner", self="<Thread at 0x77>")
SELECT = library("Select.select", "/lib/python3.11/selectors.py", "fd_event_list = self._selector.poll(timeout)")
SELECTS = library("EpollSelector.select", "/lib/python3.11/selectors.py", "fd_event_list = self._selector.poll()")
ENDED, SENTINEL = pipe(3, 600, "r"), pipe(8, 600, "w")
STOPPING = loop(stack=(JOINS_WORKERS, MAIN_OF), descriptors=(ENDED,))
SERVES_FORKS = process(
    90, LOOP, thread(90, (SELECTS,), Syscall("epoll_wait", "3 descriptors", (4,), (), timeout=-1.0)), command=SERVER,
    descriptors=(SENTINEL,),
)  # fmt: skip
FINALIZES = process(
    101, 90, thread(101, (library("_run_finalizers", "/lib/python3.11/multiprocessing/util.py", "finalizer()"),
                          user("main()")), SLEEPS), name="pt_data_worker", command=SERVER,
)  # fmt: skip
STOPPED_SERVER = again(SERVES_FORKS, state=("T", "T"))
TRAINER = thread(150, (*next_stack(1), BOTTOM), polls(3), name="trainer", idle=1.0, switches=1)
PREFETCHES = thread(150, (WAIT, library("Queue.put", "/lib/python3.11/queue.py"), user("out.put(x)", "prefetch"),
                          BOTTOM), LOCKED, name="prefetch")  # fmt: skip
SAVER = thread(150, (user("time.sleep(990)", "save"), BOTTOM), SLEEPS, name="saver")
EXITS = library("_exit_function", "/lib/python3.11/multiprocessing/util.py", "p._join()")
WAITS_FOR_102 = Syscall("wait4", "for process 102", target=102, timeout=-1.0)
AT_EXIT = loop(stack=(EXITS, MAIN_OF), call=WAITS_FOR_102)
FORKSERVER = "/lib/python3.11/multiprocessing/forkserver.py"
STARTS = loop(stack=(
    library("read_signed", FORKSERVER, "s = os.read(fd, n)"),
    library("Popen._launch", "/lib/python3.11/multiprocessing/popen_forkserver.py"),
    Frame("It.__init__", DATALOADER, 1170, {}, "w.start()"), MAIN_OF), call=READS, descriptors=(QUEUE,),
)  # fmt: skip
PRELOADS = process(
    90, LOOP,
    thread(90, (user("time.sleep(990)", "<module>"), library("main", FORKSERVER, "__import__(modname)")), SLEEPS),
    command=("python", "-c", "from multiprocessing.forkserver import main; main(3, 4, ['big'], {})"),
)  # fmt: skip
SPAWN_JOIN = Frame(
    "ProcessContext.join", "/site-packages/torch/multiprocessing/spawn.py", 1, {}, "wait(self.sentinels)"
)
PREPARES = library("_main", "/lib/python3.11/multiprocessing/spawn.py", "prepare(preparation_data)")
THE_LOOP = [
    case("a signal handler is not the code that it interrupted",
         loop(stack=(user("time.sleep(990)", "handler"), SELECT, *next_stack(1)), call=SLEEPS), IDLE,
         cause=HangCause.SLEEP, step="signal-handler", says="in a signal handler or finalizer"),
    case("a signal handler that interrupts the user's code has a frame as its argument",
         loop(stack=(user("with lock:", "save"), user("save()", "handler", signum="10", _="<frame at 0x77>"), MAIN_OF),
              call=LOCKED), IDLE, cause=HangCause.SELF_LOCK, step="signal-handler"),
    case("a signal handler that joins a thread waits for what that waits for",
         loop(1, SAVER, stack=(JOIN, user("saver.join()", "handler"), SELECT, *next_stack(1)), call=LOCKED), IDLE,
         cause=HangCause.SLEEP, thread=150, function="save",
         says="in a signal handler or finalizer (handler at data.py:12), waits for"),
    case("a loop that joins a thread waits for what that waits for",
         loop(1, TRAINER, stack=(JOIN, MAIN_OF), call=LOCKED), IDLE, SLEEPING,
         says="waits for worker 1 (pid 102), in sample 37"),
    case("a loop that joins a thread that puts", loop(1, PREFETCHES, stack=(JOIN, MAIN_OF), call=LOCKED), IDLE,
         says="the loop (pid 100), in its own code, waits for its thread prefetch, in its own code"),
    case("a loop that shuts down waits for a worker, and not for a pipe", STOPPING,
         worker(0, user("sleep"), call=SLEEPS, descriptors=(SENTINEL,)),
         cause=HangCause.SLEEP, says="shuts down, and waits for worker 0 (pid 101), in sample 37"),
    case("the pipe of a fork server, which does not end, tells of its child's end",
         looks=later(STOPPING, SERVES_FORKS, FINALIZES), outcome=MAYBE_HUNG, role="worker",
         says="shuts down, and waits for worker 0 (pid 101), at Python's exit"),
    case("the child of a fork server has just ended, and the loop is about to hear of it",
         looks=later(STOPPING, SERVES_FORKS), cause=HangCause.UNKNOWN, role="loop"),
    case("a fork server that is stopped", looks=later(STOPPING, STOPPED_SERVER), cause=HangCause.STOPPED, pid=90),
    case("a fork server that imports is who the loop waits for, and no worker", STARTS, PRELOADS,
         cause=HangCause.SLEEP, pid=90, role="other", says="the fork server (pid 90)"),
    case("a worker that ends", AT_EXIT, STUCK, never="SIGTERM"),
    case("a worker that ignores the signal to end", AT_EXIT, replace(STUCK, ignored=("SIGTERM",)),
         ends="; it ignores SIGTERM, the signal that should end it"),
    case("a worker that is joined and waits for a task was not told to end",
         replace(loop(stack=(JOINS_ONE, MAIN), call=WAITS_FOR_102), children=(101, 102)), IDLE, worker(1, step="idle"),
         cause=HangCause.NOBODY, worker=1, ends="is idle; it was not told to end"),
    case("a process that joins its spawned ranks waits for them",
         looks=later(loop(stack=(SPAWN_JOIN, MAIN), call=Syscall("poll", "", (6,), (6,), timeout=-1.0),
                          descriptors=(QUEUE,)),
                     replace(process(101, LOOP, thread(101, (PREPARES,), None, cpu=0.4)), descriptors=(PUTS,))),
         outcome=MAYBE_HUNG, cause=HangCause.COMPUTING, pid=101),
    case("a loop that asks for a GPU's result with a busy CPU waits for it", looks=later(on_gpu("loss.item()")),
         told=own(), outcome=MAYBE_HUNG, cause=HangCause.DEVICE, pid=LOOP,
         says="probably waits for the GPU, with a busy CPU, in `loss.item()`"),
    case("without a GPU the same line computes", looks=later(on_gpu("loss.item()", "/dev/null")), told=own(),
         outcome=MAYBE_HUNG, cause=HangCause.COMPUTING),
    case("a loop that is seen in next is not in its own code: another thread than the trace knows calls it",
         looks=later(loop(1), IDLE, worker(1, user("os.read(r, 1)"), call=READS, descriptors=(pipe(6, 60, "rw"),))),
         told=own(numbers={101: 0, 102: 1}), outcome=HUNG),
    case("a loop that is stopped waits for no thread", again(loop(1), state=("T", "T")), IDLE, STUCK,
         outcome=HUNG, cause=HangCause.STOPPED, pid=LOOP),
    case("own code may sleep as long as it likes", loop(stack=(user("time.sleep(990)"), MAIN), call=SLEEPS),
         IDLE, outcome=MAYBE_HUNG, cause=HangCause.SLEEP),
    case("a process without a loader is given none", loop(stack=(user("lock.acquire()", "<module>"),), call=LOCKED),
         never="the loop", says="process python (pid 100), in no loader now"),
    case("a process that is gone has ended", looks=[look()], outcome=RunOutcome.ENDED),
    case("a process that was killed has died",
         process(LOOP, 1, thread(LOOP, None, None, state="Z"), ended=True, exit_code=9),
         sentence="died: process 100 has ended: SIGKILL"),
]  # fmt: skip


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("parents", [True, False])
def test_a_rank_that_a_fork_server_has_started_iterates(seen: bool, parents: bool) -> None:
    """Its workers are forks of it. seen: there are stacks; parents: its parents were looked at, too."""
    serves = library("_serve_one", FORKSERVER, "code = spawn._main(child_r, x)")
    stack = (*next_stack(1), serves) if seen else None
    rank = process(LOOP, 90, thread(LOOP, stack, polls(3), idle=1.0, switches=1), command=SERVER)
    rank = replace(rank, descriptors=loop(1).descriptors)
    others = [replace(one, command=SERVER) for one in (IDLE, STUCK)]
    launch = process(80, 1, thread(80, None, Syscall("wait4", "for process 90", target=90, timeout=-1.0)))
    server = process(90, 80, thread(90, None, Syscall("epoll_wait", "", (4,), (), timeout=-1.0)), command=SERVER)
    said = diagnose(later(rank, *others, *((launch, server) if parents else ())))
    assert (said.cause, said.who["worker"]) == (HangCause.SLEEP, 1)
    assert "the loop (pid 100) waits for worker 1 (pid 102)" in said.sentence


@pytest.mark.parametrize(
    ("inside", "call", "main", "outcome"),
    [
        ((user("evaluate()"),), None, {"state": "R", "cpu": 0.5}, MAYBE_HUNG),
        ((user("time.sleep(30)"),), nap("9 s more", 9.0), {}, MAYBE_HUNG),
        ((user("server.accept()"),), ACCEPTS, {}, MAYBE_HUNG),
        ((library("Pdb.interaction", "/lib/python3.11/pdb.py"), user("breakpoint()")),
         Syscall("read", "", (10,), (10,)), {}, MAYBE_HUNG),
        ((library("select", "/lib/python3.11/selectors.py"),
          library("BaseEventLoop._run_once", "/lib/python3.11/asyncio/base_events.py"), user("asyncio.run(main())")),
         Syscall("epoll_wait", "", (4,), (4,), timeout=-1.0), {}, MOVES),
        ((user("native()"),), None, {}, MAYBE_HUNG),
        ((user("open(path)"),), OPENS, {"wchan": "wait_for_partner"}, MAYBE_HUNG),
        ((user("with lock:"),), LOCKED, {}, HUNG),
    ],
)  # fmt: skip
def test_between_two_batches_the_loop_may_work_or_wait_for_a_person(
    inside: tuple[Frame, ...], call: Syscall | None, main: dict[str, Any], outcome: RunOutcome
) -> None:
    """The loop is in its own code, for much longer than any step before."""
    ends = (connection(6, 60, 0), pipe(10, 100, "r"))
    home = replace(loop(1), threads=(thread(LOOP, (*inside, MAIN), call, **main),), descriptors=ends)
    assert diagnose(later(home, IDLE), own(20.0, 0.1, numbers={101: 0})).outcome is outcome


@pytest.mark.parametrize(("ignored", "outcome"), [((), MAYBE_HUNG), (("SIGTERM",), HUNG)])
def test_a_shutdown_is_hung_if_its_signal_does_nothing(ignored: tuple[str, ...], outcome: RunOutcome) -> None:
    home = replace(loop(1), threads=(thread(LOOP, (JOINS_ONE, MAIN), polls(3), idle=1.0, switches=1),))
    asleep = replace(STUCK, ignored=ignored)
    assert diagnose([look(home, IDLE, asleep)], told(6.0, 0.1)).outcome is outcome
    assert diagnose([look(home, IDLE, asleep)], told(60.0, 0.1)).outcome is HUNG


# --- Ranks ------------------------------------------------------------------------------------------------------------
FIRST = loop(stack=(REDUCES, MAIN_OF), call=LOCKED)
REDUCING = loop(stack=(REDUCES, user("dist.all_reduce(x)", "train", 13), MAIN), call=LOCKED)
OTHER = replace(loop(1), pid=200, ppid=1, threads=(replace(loop(1).threads[0], tid=200),))
GUILTY = replace(SLEEPING, ppid=200)
RANKS = own(9.0, 0.0, ranks={LOOP: 0, 200: 1})
VALIDATES = process(200, 1, thread(200, (user("evaluate()", "validate"), MAIN_OF), None, cpu=0.4))


def rank(*stack: Frame) -> SeenProcess:
    """Another rank, whose loop is over and whose workers are gone: the trace knows that it was one."""
    return process(200, 1, thread(200, stack, LOCKED))


def half(function: str, line: int = 20) -> tuple[Frame, ...]:
    return library(function, DISTRIBUTED), user("", "meet", line), MAIN


def naps_at(*lines: int) -> list[RunEvidence]:
    """A rank that naps, at two looks, while another one is in a collective."""
    at = [(user("time.sleep(0.2)", "rank", 24 + line), MAIN_OF) for line in lines]
    naps = [process(200, 1, thread(200, stack, nap("0.2 s more", 0.2), idle=0.1, switches=n))
            for stack, n in zip(at, (5, 30), strict=True)]  # fmt: skip
    return then_and_now([FIRST, IDLE, naps[0]], [FIRST, IDLE, naps[1]])


def of_job(number: int, function: str = "all_reduce", line: int = 13, total: int = 3, **more: Any) -> SeenProcess:
    """A rank in a collective, or in its own code, by the variables of its launcher."""
    own = () if function == "own" else (library(function, DISTRIBUTED),)
    stack = (*own, user("", "train", line), MAIN)
    pid = LOOP * (number + 1)
    return process(pid, 1, thread(pid, stack, LOCKED, **more), rank=number, ranks=total)


def by_stack(number: int) -> SeenProcess:
    """A rank that was forked: only its stack knows its number, and how many there are."""
    inside = library("init_process_group", DISTRIBUTED, world_size="3")
    stack = (inside, user("", "main", 20, rank=str(number)), MAIN)
    return process(LOOP * (number + 1), 1, thread(LOOP * (number + 1), stack, LOCKED))


KILLED = process(300, 1, thread(300, None, None, state="Z"), ended=True, exit_code=9)
OF_OPS = library("TorchBindOpOverload.__call__", "/site-packages/torch/_ops.py", "return self._op(*args, **kwargs)")
BACKWARD = library("_engine_run_backward", "/site-packages/torch/autograd/graph.py", "return engine.run_backward(")
STOPPED_RANK = of_job(1, "own", state="T")
EXITING = process(200, 1, thread(200, (SHUTS,), LOCKED),
                  thread(250, (WAIT, user("q.get()", "write", rank="1")), LOCKED, name="metrics"))  # fmt: skip
IN_RANKS = [
    case("a rank that is stopped, and the ranks that wait for it", of_job(0), STOPPED_RANK, of_job(2), pid=200,
         sentence="hung: rank 1 (pid 200), in its own code (train at data.py:13) for 41.0 s, is stopped by a signal "
         "(state T); ranks 0 and 2 wait in all_reduce", cause=HangCause.STOPPED),
    case("a rank's worker, and the ranks that wait for it",
         of_job(0, total=2), replace(OTHER, rank=1, ranks=2), replace(GUILTY, rank=1, ranks=2), pid=GUILTY.pid,
         says=("rank 1 (pid 200) waits for its worker 1 (pid 102), in sample 37", "; rank 0 waits in all_reduce")),
    case("a rank at Python's exit is known by a thread that has its number", by_stack(0), EXITING, by_stack(2), pid=200,
         says=("rank 1 (pid 200), at Python's exit", "its thread metrics (write at", "; ranks 0 and 2 wait in ")),
    case("a stack without the collective's own frame: the line of the user's names it",
         process(LOOP, 1, thread(LOOP, (OF_OPS, user("dist.all_reduce(x)"), MAIN), LOCKED), rank=0, ranks=2),
         of_job(1, "own", state="T", total=2), cause=HangCause.STOPPED, says="; rank 0 waits in all_reduce"),
    case("a rank makes a group of ranks, and another one does not",
         of_job(0, "new_group", 20, total=2), of_job(1, total=2), outcome=HUNG, cause=HangCause.COLLECTIVE,
         says=("in the collective new_group",)),
    case("a rank that reduces gradients in backward, and one that has no more batches",
         process(LOOP, 1, thread(LOOP, (BACKWARD, user("loss.backward()"), MAIN), LOCKED), rank=0, ranks=2),
         of_job(1, "barrier", 20, total=2), outcome=HUNG, fix="run as many batches as each other", never="lock",
         says="waits in backward for the other ranks; rank 1 (pid 200) is in barrier (train at data.py:20)"),
    case("a hook in backward that waits is no collective",
         process(LOOP, 1, thread(LOOP, (user("with self.lock:", "hook"), BACKWARD, MAIN), LOCKED), rank=0, ranks=2),
         of_job(1, "barrier", 20, total=2), never="waits in backward"),
    case("a comment, or another thing called dist, is no collective", process(LOOP, 1, thread(
         LOOP, (library("Queue.get", "/lib/python3.11/queue.py"), user("return order.get()  # dist.gather(1)"), MAIN),
         LOCKED)), never="collective"),
    case("backward of one process waits for no rank", process(
         LOOP, 1, thread(LOOP, (BACKWARD, user("loss.backward()"), MAIN), LOCKED)), cause=HangCause.UNKNOWN),
    case("a rank that was not started", of_job(0), of_job(1), outcome=MAYBE_HUNG, cause=HangCause.COLLECTIVE,
         ends="in the collective all_reduce for rank 2, which is not among the processes seen; rank 1 waits in "
         "all_reduce"),
    case("a rank that has ended", looks=later(by_stack(0), by_stack(1), KILLED), outcome=HUNG, cause=HangCause.DIED,
         pid=LOOP,
         ends="waits in init_process_group for rank 2, which has ended (SIGKILL); rank 1 waits in init_process_group"),
    case("ranks that rest in different collectives", of_job(0, "broadcast", 20, 2), of_job(1, total=2), outcome=HUNG,
         says="the collective broadcast for the other ranks; rank 1 (pid 200) is in all_reduce", fix="the same order"),
    case("ranks that just came to different collectives", of_job(0, "broadcast", 20, 2, idle=1.0),
         of_job(1, total=2, idle=1.0), outcome=MAYBE_HUNG),
    case("a rank that polls in a collective waits for the others", STOPPED_RANK,
         replace(of_job(0), threads=(replace(of_job(0).threads[0], syscall=nap("0.1 s", 0.1)),)), pid=200,
         says="; rank 0 waits in all_reduce"),
    case("a collective without the other ranks says that they were not seen", FIRST, IDLE,
         cause=HangCause.COLLECTIVE, sure=Sure.LIKELY, also="on other machines"),
    case("a rank in a collective leads to the rank that did not come", FIRST, OTHER, GUILTY, replace(IDLE, ppid=LOOP),
         pid=GUILTY.pid, says="in sample 37"),
    case("a rank in a collective names the other collective that a rank is in", REDUCING,
         rank(library("recv", DISTRIBUTED), user("dist.recv(t)", "train", 15), MAIN), IDLE, told=RANKS,
         cause=HangCause.COLLECTIVE, also="",
         says="the other ranks; rank 1 (pid 200) is in recv (train at data.py:15)"),
    case("a rank in the same collective", REDUCING, rank(*(REDUCING.threads[0].stack or ())), IDLE, told=RANKS,
         also="on other machines"),
    *(
        row
        for name, other in (("recv", "sends"), ("send", "receives"))
        for ours in [loop(stack=half(name, 14), call=LOCKED)]
        for row in (
            case(f"two ranks that both {name} wait for each other", ours, rank(*half(name)), IDLE, told=RANKS,
                 outcome=HUNG, cause=HangCause.CYCLE, sure=Sure.LIKELY,
                 ends=f"waits in {name} for another rank; so does rank 1 (pid 200), and none of them "
                 f"{other}"),
            case(f"a rank in {name}, another one in a collective", ours, rank(*half("all_reduce")), IDLE, told=RANKS,
                 cause=HangCause.COLLECTIVE,
                 says=f"waits in {name} for the other ranks; rank 1 (pid 200) is in all_reduce"),
            case(f"a rank in {name} alone", ours, IDLE, told=RANKS, cause=HangCause.COLLECTIVE),
        )
    ),
    case("a rank without workers is who a rank in a barrier waits for",
         looks=later(loop(stack=(library("barrier", DISTRIBUTED), MAIN_OF), call=LOCKED), IDLE, VALIDATES),
         told=own(numbers={101: 0}, ranks={LOOP: 0, 200: 1}),
         outcome=MAYBE_HUNG, pid=200, cause=HangCause.COMPUTING),
    case("a rank that naps outside of a collective is why the others wait: it is at one line at both looks",
         looks=naps_at(1, 1), told=own(ranks={LOOP: 0, 200: 1}), outcome=MAYBE_HUNG, cause=HangCause.COLLECTIVE,
         pid=200, says="has not reached the collective all_reduce: it "),
    case("a rank that naps at another line", looks=naps_at(1, 2), told=own(ranks={LOOP: 0, 200: 1}),
         cause=HangCause.NONE),
]  # fmt: skip


# --- Results that are lost, workers that have ended -------------------------------------------------------------------
IDLE_FEEDS = worker(1, step="idle", others=(feeder(202),))
TORN = loop(stack=(Frame("Queue.get", QUEUES, 103, source="res = self._recv_bytes()"),
                   Frame("It._try_get_data", DATALOADER, 1291, {}, "data = queue.get()"), *next_stack(1)[2:]),
            call=Syscall("read", "", (3,), (3,)), waiting=0)  # fmt: skip
KILLED = replace(DEAD, exit_code=9)
UNKNOWN_LOOP = replace(loop(), threads=(thread(LOOP, next_stack(-1), polls(3), idle=1.0, switches=1),))
AFTER_WORKER_1 = RecordedWait(hung=True, seconds=11.0, pid=LOOP, task=0, worker=0, numbers={102: 1}, workers=2)


def zombie(name: str) -> SeenProcess:
    return process(300, LOOP, thread(300, None, None, state="Z"), name=name, ended=True, exit_code=9)


def importing(number: int) -> SeenProcess:
    """A spawned worker that imports the program, which imports the loader's modules."""
    stack = (
        library("<module>", "/site-packages/torch/utils/data/sampler.py", "from torch import Generator"),
        library("_call_with_frames_removed", "<frozen importlib._bootstrap>"),
        PREPARES,
    )
    new = worker(number)
    return replace(new, name="python", threads=(thread(new.pid, stack, None, cpu=0.2),))


def counting(name: str) -> SeenProcess:
    """A loop over enumerate(loader), in a function with a variable."""
    frame = Frame("train", "/home/a/train.py", 9, {name: "5"}, "for step, (x, y) in enumerate(tqdm(loader)):")
    return loop(1, stack=(*next_stack(1)[:-1], frame, MAIN))


def shared_memory(free: int, most: int) -> list[RunEvidence]:
    """All are idle for long, beside a /dev/shm of a size."""
    machine = Machine(shm_size=most, shm_free=free)
    return [replace(one, machine=machine) for one in later(loop(1), IDLE, IDLE_FEEDS)]


LOST_AND_ENDED = [
    case("all are idle at one look", loop(1), IDLE, IDLE_FEEDS, outcome=MAYBE_HUNG),
    case("all are idle for long", looks=later(loop(1), IDLE, IDLE_FEEDS), outcome=HUNG, cause=HangCause.LOST_RESULT),
    case("the program's own count tells the batch", looks=later(counting("step"), IDLE, IDLE_FEEDS),
         ends="the batch after step = 5 was lost on its way to the loop"),
    case("the trace tells the task, too", looks=later(counting("step"), IDLE, IDLE_FEEDS),
         told=told(task=9), ends="task 9 was lost on its way to the loop"),
    case("a variable of another name does not", looks=later(counting("epoch"), IDLE, IDLE_FEEDS),
         ends="the batch was lost on its way to the loop"),
    case("a result that did not fit into /dev/shm is lost", looks=shared_memory(3 << 20, 16 << 20), sure=Sure.LIKELY,
         cause=HangCause.LOST_RESULT, ends="lost on its way to the loop: /dev/shm has 3.0 MiB of 16.0 MiB left",
         fix=f"{SHARED_MEMORY}; then look for a traceback"),
    case("a batch may be larger than a small /dev/shm that is empty", looks=shared_memory(16 << 20, 16 << 20),
         ends="lost on its way to the loop", also="it did not fit: /dev/shm has 16.0 MiB of 16.0 MiB left"),
    case("a large /dev/shm has room", looks=shared_memory(1 << 30, 16 << 30), also="the task was never sent",
         ends="lost on its way to the loop"),
    case("bytes that make no message are a torn one", looks=later(loop(1, waiting=4096), IDLE, worker(1, step="idle")),
         cause=HangCause.TORN_MESSAGE, says="4096 bytes"),
    case("a worker that died in a message leaves the loop in a read", TORN, IDLE, KILLED,
         outcome=HUNG, cause=HangCause.TORN_MESSAGE, says="has ended (SIGKILL) in the middle of a message"),
    case("a worker that died", looks=later(loop(1), IDLE, KILLED), cause=HangCause.DIED),
    case("a child's zombie is a worker if it ran the loop's program", looks=later(UNKNOWN_LOOP, zombie("python")),
         cause=HangCause.DIED),
    case("a child's zombie of another program", looks=later(UNKNOWN_LOOP, zombie("ffmpeg")), cause=HangCause.UNKNOWN),
    case("a loop that polls finds its dead worker within its 5 s", looks=later(loop(1), IDLE, DEAD),
         outcome=MAYBE_HUNG),
    case("a loop that polls has not found its dead worker",
         looks=then_and_now([loop(1), IDLE, DEAD], [loop(1), IDLE, DEAD], 6_000_000_000), outcome=HUNG),
    case("a dead worker of another loader is not the one that is waited for: the fork server has not reaped it",
         looks=later(loop(1), replace(DEAD, pid=101), DEAD),
         told=RecordedWait(hung=True, seconds=12.0, pid=LOOP, task=0, worker=1, others=frozenset((101, 102))),
         cause=HangCause.UNKNOWN, role="loop"),
    case("a spawned worker that imports a module of the loader imports", loop(1), IDLE, importing(1), step="import"),
    case("a worker that comes up after its sibling is not gone",
         looks=later(loop(0), importing(0), worker(1, step="idle")), told=AFTER_WORKER_1,
         pid=101, step="import", says="worker 0 (pid 101)"),
    case("a worker that comes up is not gone if no process is seen to be it",
         looks=later(loop(0), worker(1, step="idle")), told=AFTER_WORKER_1, never="has ended"),
    case("a worker that has recorded is gone", looks=later(loop(0), worker(1, step="idle")),
         told=replace(AFTER_WORKER_1, numbers={101: 0, 102: 1}), says="waits for worker 0, which has ended"),
]  # fmt: skip


def test_a_worker_that_comes_up_has_its_number_in_its_own_loader() -> None:
    """The program's first loader has two workers, which came before."""
    first = [replace(worker(number), pid=pid, threads=()) for number, pid in ((0, 98), (1, 99))]
    wait = replace(AFTER_WORKER_1, others=frozenset((98, 99)))

    def numbers(wait: RecordedWait, *processes: SeenProcess) -> dict[int, int]:
        return {number: one.pid for number, one in RunFacts([look(*processes)], wait).workers_of(LOOP).items()}

    assert numbers(wait, loop(0), *first, importing(0), worker(1)) == {0: 101, 1: 102}
    third = importing(2)  # of a loader of which the trace has nothing
    assert numbers(wait, loop(0), importing(0), worker(1), third) == {0: 101, 1: 102}
    wait = replace(wait, numbers={101: 0, 102: 1}, workers=3)  # worker 0 is gone
    assert numbers(wait, loop(2), worker(1), third) == {1: 102, 2: 103}


# --- Slow is not hung -------------------------------------------------------------------------------------------------
def ran(one: SeenProcess, switches: int = 0, cpu: float = 0.0) -> SeenProcess:
    """The process at a second look, its first thread having woken so often, and used so many seconds, since the first.

    It rests at both looks, and for as long as each of them takes.
    """
    before, used = one.threads[0].switches[1] + switches, one.threads[0].cpu[1] + cpu
    return again(one, switches=(before, before), cpu=(used, used))


@pytest.mark.parametrize(("switches", "cpu"), [(300, 0.0), (0, 0.5)], ids=["switches", "CPU time"])
@pytest.mark.parametrize("who", ["the loop", "the worker", "another worker"])
def test_a_loader_whose_workers_are_all_idle_at_two_moments_moves(who: str, switches: int, cpu: float) -> None:
    rests = {"the loop": loop(1), "another worker": IDLE, "the worker": worker(1, step="idle")}
    looks = then_and_now(rests.values(), {**rests, who: ran(rests[who], switches, cpu)}.values())
    said = diagnose(looks)
    assert (said.outcome, said.cause) == (MOVES, HangCause.NONE)
    assert "lost" not in said.sentence
    said = diagnose(looks, RecordedWait(hung=True, pid=LOOP, task=9, worker=1, worker_pid=102, seconds=30.0))
    assert (said.outcome, said.cause) == (MAYBE_HUNG, HangCause.LOST_RESULT), "the others may still be at work"


@pytest.mark.parametrize(
    ("switches", "at_once", "goes_on"), [(4, 0, False), (5, 0, True), (500, 0, True), (500, 75, False)]
)
def test_polls_and_asking_for_the_gil_in_vain_are_no_going_on(switches: int, at_once: int, goes_on: bool) -> None:
    """4 s apart, two wakes, and one each two seconds, are polls. Who asks for the GIL does so each 5 ms."""
    waits = worker(1, user("lock.acquire()"), call=replace(LOCKED, timeout=0.005))
    woke = waits.threads[0].switches[1] + switches
    looks = then_and_now(
        [loop(1), IDLE, waits], [loop(1), IDLE, again(waits, switches=(woke - at_once, woke), idle=0.0)]
    )
    assert stirs(RunFacts(looks).at(102)) is goes_on


def short_nap(times: int, index: int = 37, **more: Any) -> SeenProcess:
    """A worker in a short sleep, to which it came back so often by now."""
    made = worker(1, user("time.sleep(0.05)"), call=nap("0.03 s more", 0.03), idle=0.02, switches=10, index=index)
    return again(made, switches=(times - 10, times), **more)


def naps(before: int, now: SeenProcess) -> list[RunEvidence]:
    return then_and_now([loop(1), IDLE, short_nap(before)], [loop(1), IDLE, now])


DIED = replace(worker(1, user("x"), state="Z", idle=2.0), ended=True, exit_code=0)
READING = process(LOOP, 1, thread(LOOP, None, Syscall("read", "", (3,), (3,)), idle=9.0))
COMPUTING = later(loop(1), IDLE, worker(1, user("while True: pass"), cpu=0.5))
READS_FILE = worker(1, user("f.read()"), call=READS_FOR_EVER)
BEFORE = look(loop(1), IDLE, worker(1, user("x"), cpu=0.5, index=36))
CAME_TO = [BEFORE, look(loop(1), IDLE, worker(1, user("with lock:"), call=LOCKED, idle=2.0), moment=LATER)]
KEEPS_LOCK = replace(loop(1), descriptors=(*loop(1).descriptors, with_locks(100, "1: FLOCK ADVISORY WRITE 100")))
CLOSED = [
    look(KEEPS_LOCK, IDLE, worker(1, user("x"), cpu=0.5, index=36)),
    look(KEEPS_LOCK, IDLE, replace(ASKS, threads=(replace(ASKS.threads[0], idle=2.0),)),
         locks=(replace(OF_101, pid=LOOP), WAITED_FOR), moment=LATER),
]  # fmt: skip
WAIT_PAGE = worker(1, user("time.sleep(0.001)", "wait_page"), call=None, switches=300, cpu=0.01)
HEADS = "while lock.exists(): time.sleep(0.1)"
EXISTS = worker(1, user(HEADS), call=nap("0.1 s", 0.1), idle=0.05, switches=5)
BATCH_9 = told(44.0, 0.0, task=9)
SLOW = [
    case("a worker that ended between two looks",
         looks=then_and_now([loop(1), IDLE, worker(1, user("x"))], [loop(1), IDLE, DIED], 6_000_000_000),
         outcome=MAYBE_HUNG),
    case("a worker that began and ended between two looks: an epoch has ended, and the next one makes new workers",
         looks=then_and_now([loop(1), IDLE], [loop(1), IDLE, DIED], 6_000_000_000), outcome=MAYBE_HUNG),
    case("a socket is no hang yet if the run has waited for it as long before", loop(1), IDLE,
         worker(1, user("x"), call=RECEIVES, descriptors=FILES[:1]), told=told(90.0, 30.0), outcome=MAYBE_HUNG),
    case("a library that waits for its own threads, which compute", loop(1), IDLE,
         worker(1, user("index.train(x)"), call=LOCKED, others=(thread(190, None, None, state="R", cpu=0.5),)),
         outcome=MAYBE_HUNG),
    case("a library that waits for its own threads, which wait for a server", loop(1), IDLE,
         worker(1, user("read_table(path)"), call=LOCKED, idle=20.0, others=(thread(190, None, RECEIVES),)),
         outcome=MAYBE_HUNG),
    case("all workers idle, but the loop has read between the looks", looks=then_and_now(
             [loop(1), IDLE, worker(1, step="idle")],
             [again(loop(1), read=(5, 900)), IDLE, worker(1, step="idle")]), outcome=MOVES),
    case("a worker that has ended at both looks",
         looks=then_and_now([loop(1), IDLE, DIED], [loop(1), IDLE, DIED], 6_000_000_000), outcome=HUNG),
    case("a loop that starts workers is not hung while these import their modules",
         looks=later(READING, process(300, LOOP, thread(300, None, None, state="R", cpu=0.4, idle=0.0))),
         told=RecordedWait(hung=True, pid=LOOP, seconds=9.0), outcome=MAYBE_HUNG),
    case("a loop that starts workers that stand still",
         looks=later(READING, process(300, LOOP, thread(300, None, LOCKED))),
         told=RecordedWait(hung=True, pid=LOOP, seconds=39.0), outcome=HUNG),
    case("a worker that goes on to another sample moves",
         looks=[look(loop(1), IDLE, worker(1, user("x"), cpu=0.5, index=37)),
                look(loop(1), IDLE, worker(1, user("x"), cpu=0.5, index=38), moment=LATER)],
         outcome=MOVES, cause=HangCause.NONE, fix=""),
    case("a worker that computes in one sample", looks=COMPUTING, outcome=MAYBE_HUNG),
    case("a worker that computes for long, by the run's past, may have a large sample", looks=COMPUTING,
         told=told(60.0, 0.5, task=9), outcome=MAYBE_HUNG),
    case("a worker that computes for ten minutes hangs by the run's past", looks=COMPUTING,
         told=told(600.0, 0.5, task=9), outcome=HUNG, cause=HangCause.COMPUTING,
         begins="hung for 10.0 min: the loop (pid 100) waits for batch 9 of worker 1 (pid 102)"),
    case("with a trace a sentence has the wait's duration, and the chain the thread's", loop(1), IDLE, READS_FILE,
         told=BATCH_9, never="for 41.0 s", chain="for 41.0 s",
         begins=f"hung for 44.0 s: the loop (pid 100) waits for batch 9 of worker 1 (pid 102), {AT}: "),
    case("a thread that has slept for all of the wait has no duration of its own",
         looks=[look(loop(1), IDLE, READS_FILE, moment=42_500_000_000)], told=replace(BATCH_9, since=1_000_000_000),
         begins="hung for 44.0 s: the loop (pid 100) waits for batch 9", not_in_chain="for 4"),
    *(
        case(f"{name} for {idle} s", loop(1), IDLE,
             worker(1, user("with lock:"), call=call, idle=idle, descriptors=FILES[:1]), outcome=outcome)
        for name, call, idle, outcome in (
            ("a sleep of 9 s", nap("9 s more", 9.0), 8.0, MAYBE_HUNG),
            ("a sleep that does not end", SLEEPS, 1.0, HUNG),
            ("a socket, which may be slow,", replace(RECEIVES, timeout=-2.0), 8.0, MAYBE_HUNG),
            ("a socket, which may still be slow,", replace(RECEIVES, timeout=-2.0), 12.0, MAYBE_HUNG),
            ("a socket", replace(RECEIVES, timeout=-2.0), 31.0, HUNG),
            ("a lock", LOCKED, 4.0, HUNG),
        )
    ),
    *(
        case(f"what is in state {state}, however short", loop(1), IDLE,
             worker(1, user("x"), call=None, idle=1.0, state=state), outcome=outcome)
        for state, outcome in (("T", HUNG), ("t", HUNG), ("S", UNKNOWN))
    ),
    case("a short sleep is no hang", loop(1), IDLE,
         worker(1, user("time.sleep(1)"), call=nap("0.3 s more", 0.3), idle=0.2), outcome=MOVES),
    case("a queue whose thread computes is not hung for certain",
         loop(1, thread(190, (user("decode()", "produce"),), None, name="producer", state="R", cpu=0.5),
              stack=(WAIT, library("Queue.get", "/lib/python3.11/queue.py"), user("q.get()"), MAIN), call=LOCKED),
         outcome=MAYBE_HUNG),
    case("what came to its end between two looks may hang", looks=CAME_TO, told=told(9.0),
         outcome=MAYBE_HUNG, cause=HangCause.SELF_LOCK),
    case("what came to its end between two looks: nothing says that it takes long", looks=CAME_TO, outcome=MOVES),
    case("a cycle that closed between two looks may hang, though the loop polls", looks=CLOSED, told=told(9.0),
         outcome=MAYBE_HUNG, cause=HangCause.CYCLE),
    case("a process that got the id of another is not compared with it",
         looks=[BEFORE, look(loop(1), IDLE, replace(STUCK, started=999.0), moment=LATER)], outcome=HUNG),
    case("a loop that polls is told with its pause if two looks show one place", looks=naps(20, short_nap(100)),
         told=told(42.0), outcome=HUNG, cause=HangCause.SLEEP,
         sentence=f"hung for 42.0 s: the loop (pid 100) waits for worker 1 (pid 102), {AT}: it polls: it slept for "
         "about 0.05 s repeatedly in the 4.5 s observed"),
    case("one look shows no polling", looks=[look(loop(1), IDLE, short_nap(100), moment=LATER)], never="polls"),
    case("a longer sleep belongs to another rhythm", looks=naps(20, short_nap(100, idle=3.3)), told=told(),
         never="polls"),
    case("short sleeps of a worker that started between the looks: nothing says yet whether it stays",
         looks=then_and_now([loop(1), IDLE], [loop(1), IDLE, short_nap(20)]), told=told(12.0, 0.0), outcome=MAYBE_HUNG),
    case("a short sleep that is never seen at one call is told as polling",
         looks=then_and_now([loop(1), IDLE, WAIT_PAGE], [loop(1), IDLE, again(WAIT_PAGE, switches=(3000, 3300))]),
         told=told(20.0), outcome=MAYBE_HUNG, cause=HangCause.SLEEP, says="polls: it woke 3295 times"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("since", "sample", "outcome"), [(6, 37, MAYBE_HUNG), (9, 37, MOVES), (0, 37, MOVES), (6, -1, MOVES)]
)
def test_a_worker_that_came_to_its_step_between_two_looks_may_hang_if_that_was_long_ago(
    since: int, sample: int, outcome: RunOutcome
) -> None:
    """By the trace: the looks are at 4 s and 10 s. since: s, 0 = unknown; sample: -1 = the step is a whole batch."""
    wait = told(12.0, 0.0, sample=sample, step_since=since * 1_000_000_000)
    last = look(loop(1), IDLE, short_nap(100), moment=10_000_000_000)
    assert diagnose([look(loop(1), IDLE, short_nap(20, index=36), moment=LATER), last], wait).outcome is outcome
    collates = look(loop(1), IDLE, worker(1, user("collate()"), step="collate", cpu=0.5), moment=LATER)
    assert diagnose([collates, last], wait).outcome is (MAYBE_HUNG if since == 6 else MOVES)


# --- What can't be seen -----------------------------------------------------------------------------------------------
def blind(evidence: RunEvidence, wchan: dict[int, str] | None = None, bare: bool = False) -> RunEvidence:
    """The same without a stack. wchan: of each process, the kernel's function instead of a call; bare: with neither."""

    def without(one: SeenProcess) -> SeenProcess:
        threads = tuple(replace(t, stack=None, gil=None, python_name="") for t in one.threads)
        if wchan is not None or bare:
            name = (wchan or {}).get(one.pid, "")
            threads = tuple(replace(t, syscall=None, syscall_before=None, wchan=name) for t in threads)
        files = () if bare else one.descriptors
        return replace(one, threads=threads, descriptors=files, not_seen=("Python stacks: py-spy is not installed",))

    return replace(evidence, processes=tuple(map(without, evidence.processes)))


NO_STACK = look(loop(1), IDLE, worker(1, user("x")))
OF_400 = FileLock(1, "FLOCK", "WRITE", 400, 3, 77)
FUNCTIONS = {LOOP: "poll_schedule_timeout", 101: "poll_schedule_timeout", 102: "hrtimer_nanosleep"}
SLEEPY_FEEDER = feeder(202, user("time.sleep(990)", "Image.__reduce__"), source="dumps(obj)", call=SLEEPS)
ASKS_SOCKET = loop(call=Syscall("recvmsg", "", (9,), (9,)),
                   descriptors=(Descriptor(9, "socket", "socket:[90]", 90, mode="rw"),))  # fmt: skip
UNSEEN = [
    case("without stacks the worker and its call are named",
         looks=[blind(look(loop(1), IDLE, worker(1, user("flock"), call=FLOCK, descriptors=(with_locks(102),)),
                           locks=(OF_400,)))],
         says="waits for worker 1 (pid 102), which is waiting in flock on /data/index.lock; process 400"),
    case("without stacks a feeder that sleeps is found",
         looks=[blind(look(loop(-1), IDLE, worker(1, step="idle", others=(SLEEPY_FEEDER,))))],
         cause=HangCause.SLEEP, worker=1),
    case("without stacks a lost result is only possible", looks=map(blind, later(loop(-1), IDLE, IDLE_FEEDS)),
         cause=HangCause.LOST_RESULT, sure=Sure.POSSIBLE),
    case("without stacks a loop at a socket waits for the worker that is stopped",
         looks=[blind(look(ASKS_SOCKET, IDLE, worker(1, user("x"), state="T")))], cause=HangCause.STOPPED, worker=1),
    case("without a stack a lock of the process is not guessed at",
         looks=[blind(look(loop(1), IDLE, worker(1, user("with lock:"), call=LOCKED)))],
         cause=HangCause.UNKNOWN, sure=Sure.UNKNOWN),
    case("without ptrace the kernel's function tells", looks=[blind(NO_STACK, FUNCTIONS)],
         told=told(60.0, 0.0, task=9), says=("worker 1 (pid 102)", "asleep (the kernel's hrtimer_nanosleep)")),
    case("if only times can be seen the worker that does not poll is named", looks=[blind(NO_STACK, bare=True)],
         outcome=MAYBE_HUNG, cause=HangCause.UNKNOWN, worker=1),
    case("if only times can be seen the kernel's table has the locks",
         looks=[replace(blind(NO_STACK, bare=True), locks=(OF_400, WAITED_FOR))], cause=HangCause.FILE_LOCK,
         says="process 400 (not examined) took it, and may have passed it on"),
    case("the lock is its own by the kernel's table alone",
         looks=[replace(blind(look(loop(1), IDLE, TWICE), bare=True), locks=(OF_102, WAITED_FOR))],
         cause=HangCause.SELF_LOCK, sure=Sure.LIKELY, worker=1),
]  # fmt: skip


# --- Waits that no process is left to end -----------------------------------------------------------------------------
WAITS_FOR_NEWS = (library("Condition.wait", SYNCHRONIZE), user("news.wait()"))
WAITS_FOR_EVENT = (library("Condition.wait", SYNCHRONIZE), library("Event.wait", SYNCHRONIZE), user("ready.wait()"))
ASLEEP = {"idle": 8.0, "switches": (5, 5)}
SLEEPS_A_WHILE = nap("120 s more", 120.0)
SETS_IT_LATE = thread(150, (user("time.sleep(300)", "watch"),), SLEEPS_A_WHILE, name="watch")
INDEXES = sharing(process(300, LOOP, thread(300, (user("time.sleep(17)", "index"), FORK, MAIN), SLEEPS_A_WHILE)))
TIMED = replace(LOCKED, timeout=30.0)
AWAITS = Syscall("epoll_wait", "", (4,), (4,), timeout=40.0)
TIMER = thread(150, (WAIT, library("Timer.run", source="self.finished.wait(self.interval)")), TIMED, name="Thread-1")
MONITORS = thread(150, (WAIT, library("TMonitor.run", "/site-packages/tqdm/_monitor.py")), TIMED, name="tqdm")
SENDS = Syscall("sendto", "", (9,), (9,), timeout=-1.0)
SENDS_BACK = process(300, LOOP, thread(300, (user("c.send(x)", "serve"),), replace(SENDS, fds=(8,)), idle=8.0),
                     descriptors=(connection(8, 91, 90),))  # fmt: skip
IN_ITS_POOL = tuple(
    thread(190 + i, (*FUTURE, user("f.result()", "tile", 19), library("_worker", POOL[1])), LOCKED, name=f"tiles_{i}")
    for i in (0, 1)
)
IN_ITS_LOOP = thread(
    190, (*FUTURE, user("call(size())", "get", 22), library("run_forever", "/lib/python3.11/asyncio/base_events.py")),
    LOCKED, name="aio",
)  # fmt: skip
SAVES = Frame("Saver.save", "/home/a/data.py", 12, {"self": "<Saver at 0x5>"}, "with self.lock:")
HANDLES = Frame("on_signal", "/home/a/data.py", 20, {"frame": "<frame at 0x9>"}, "saver.save()")
INTERRUPTED = Frame("Saver.save", "/home/a/data.py", 14, {"self": "<Saver at 0x5>"}, "time.sleep(1)",
                    ("with self.lock:",))  # fmt: skip


LISTENS = connection(6, 70, 0)


def of_ranks(*calls: Syscall) -> list[SeenProcess]:
    """Rank 0 of two asks rank 1's store for a key; rank 1, in this call, is there if one is given."""
    asking, _, asks = asks_store()
    asks = replace(asks, threads=(replace(asks.threads[0], idle=8.0),))
    asking = replace(asking, rank=0, ranks=2)
    others = (process(300, 1, thread(300, (user("prepare()", "main"), MAIN), call, idle=8.0), rank=1, ranks=2)
              for call in calls)  # fmt: skip
    return [asking, IDLE, asks, *others]


def soon(*inside: Frame, call: Syscall = LOCKED, **more: Any) -> SeenProcess:
    """Worker 1 in a call for eight seconds: too short for a wait that a process may end."""
    return worker(1, *inside, call=call, idle=8.0, **more)


POOL_PY = "/lib/python3.11/multiprocessing/pool.py"
NOTIFY = again(loop(1, thread(150, (WAIT, library("Condition.wait"), user("cond.wait()", "fill", 21)), LOCKED),
                    stack=(WAIT, library("Condition.wait"), user("cond.wait()", "draw", 31), MAIN_OF), call=LOCKED),
               **ASLEEP)  # fmt: skip
SLEEPS_ON = again(loop(stack=(
    WAIT, library("ApplyResult.get", POOL_PY), user("job.get()"), MAIN_OF
), call=LOCKED), **ASLEEP)  # fmt: skip


def pooled(pid: int) -> SeenProcess:
    """A process of the loop's own multiprocessing.Pool, which waits for a task."""
    asks = (Frame("get", QUEUES, 386, {}, "res = self._reader.recv_bytes()"), library("worker", POOL_PY), FORK, MAIN)
    return process(pid, LOOP, thread(pid, asks, READS, idle=8.0), descriptors=(QUEUE,))


def both_ask_manager(method: str = "acquire") -> list[SeenProcess]:
    """Two workers wait for one lock of a manager, and the loop, which has it, for a batch of theirs."""
    waiting, _, asks, manager = of_manager((311, method), (312, method))
    ends = (connection(8, 91, 90), connection(9, 93, 92), connection(10, 95, 94))
    manager = replace(manager, descriptors=ends, threads=tuple(replace(one, idle=8.0) for one in manager.threads))
    other = worker(0, user("with lock:"), call=RECEIVES, descriptors=(connection(9, 92, 93),))
    return [replace(waiting, descriptors=(*waiting.descriptors, connection(9, 94, 95))), other, asks, manager]


CLOSED = [
    case("a notify that only those who wait for it could send", sharing(loop(1)), sharing(IDLE),
         sharing(soon(*WAITS_FOR_NEWS)), outcome=HUNG, cause=HangCause.NOBODY, fix="wait_for()",
         ends="the notify of a shared Condition; the processes that share it wait for this one"),
    case("an event that a thread of the loop's process sets late", sharing(loop(1, SETS_IT_LATE)), sharing(IDLE),
         sharing(worker(1, *WAITS_FOR_EVENT, call=LOCKED)), outcome=MAYBE_HUNG, says="(the loop (pid 100) could)"),
    case("an event of a program that another one has started, which may share it",
         sharing(loop(1, stack=(*loop(1).threads[0].stack, library("BaseProcess._bootstrap", "/m/process.py")))),
         sharing(IDLE), sharing(soon(*WAITS_FOR_EVENT)), outcome=MAYBE_HUNG),
    case("an event that a thread of the waiter's own process may set", sharing(loop(1)), sharing(IDLE),
         sharing(soon(*WAITS_FOR_EVENT, others=(PUMPS,))), outcome=MAYBE_HUNG),
    case("an event that a thread sets when its child has ended", sharing(IDLE),
         sharing(loop(1, thread(150, (user("p.stdout.read()", "watch"),), READS), descriptors=(QUEUE,))),
         process(300, LOOP, thread(300, None, SLEEPS_A_WHILE), name="tool", descriptors=(PUTS,)),
         sharing(worker(1, *WAITS_FOR_EVENT, call=LOCKED)), outcome=MAYBE_HUNG),
    case("a barrier for more parties than wait for it", sharing(loop(1)),
         *(sharing(worker(i, library("Barrier.wait"), user("b.wait()"), call=LOCKED, idle=8.0)) for i in (0, 1)),
         outcome=HUNG, cause=HangCause.BARRIER, fix="for as many parties as call wait()"),
    case("a barrier of threads that one of them reaches late", loop(1), IDLE,
         worker(1, library("Barrier.wait"), user("barrier.wait()"), call=LOCKED, others=(SETS_IT_LATE,)),
         outcome=MAYBE_HUNG, cause=HangCause.BARRIER, says="; watch and worker 0 (pid 101) have not reached it"),
    case("a barrier that another process of the program reaches late", sharing(loop(1)), INDEXES,
         *(sharing(worker(i, library("Barrier.wait"), user("b.wait()"), call=LOCKED)) for i in (0, 1)),
         outcome=MAYBE_HUNG, says="process python (pid 300) has not reached it"),
    case("a connection that the loop should accept, which waits for it", loop(1, descriptors=(connection(6, 70, 0),)),
         IDLE, soon(user("sock.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 70, BACKLOG),)),
         outcome=HUNG, cause=HangCause.SOCKET, fix="accept and answer in a thread"),
    case("connections of all workers that the loop should accept", loop(1, descriptors=(LISTENS,)),
         *(worker(i, user("sock.recv(1)"), call=RECEIVES, idle=8.0,
                  descriptors=(LISTENS, connection(9, 90 + i, 70, BACKLOG))) for i in (0, 1)),
         outcome=HUNG, cause=HangCause.SOCKET, fix="accept and answer in a thread"),
    case("a server whose thread answers late", *heard_by(SLEEPS_A_WHILE), outcome=MAYBE_HUNG, cause=HangCause.SOCKET),
    case("two that send, and of which none receives", SENDS_BACK,
         replace(IDLE, descriptors=(*IDLE.descriptors, connection(8, 91, 90))),
         again(loop(stack=(user("c.send(x)", "score"), MAIN_OF), call=SENDS, descriptors=(connection(9, 90, 91),)),
               **ASLEEP),
         outcome=HUNG, fix="receive what the other end sends"),
    case("two that send, of which one gives up", SENDS_BACK,
         replace(IDLE, descriptors=(*IDLE.descriptors, connection(8, 91, 90))),
         again(loop(stack=(user("c.send(x)", "score"), MAIN_OF), call=replace(SENDS, timeout=60.0),
                    descriptors=(connection(9, 90, 91),)), **ASLEEP),
         outcome=MAYBE_HUNG),
    case("a key that a rank elsewhere may set", *of_ranks(), outcome=MAYBE_HUNG, cause=HangCause.NOBODY),
    case("a key that another rank sets late", *of_ranks(SLEEPS_A_WHILE), outcome=MAYBE_HUNG, cause=HangCause.NOBODY),
    case("a key that another rank waits for, too", *of_ranks(READS_FOR_EVER), outcome=HUNG, cause=HangCause.NOBODY),
    case("tasks of a pool that wait for tasks of the pool", loop(1), IDLE,
         soon(*FUTURE, user("map(tile)"), others=IN_ITS_POOL), outcome=HUNG, cause=HangCause.CYCLE,
         says="all threads of its pool wait for results of that pool (tile at data.py:19)"),
    *(
        case(f"a pool of which one thread {does}", loop(1), IDLE,
             soon(*FUTURE, user("map(tile)"), others=(*IN_ITS_POOL, replace(IN_ITS_POOL[0], tid=195, **doing))),
             outcome=outcome, never="all threads of its pool")
        for does, outcome, doing in (
            ("is at work", MAYBE_HUNG, {"stack": SETS_IT_LATE.stack, "syscall": SLEEPS_A_WHILE}),
            ("waits for an event", HUNG, {"stack": (WAIT, library("Event.wait"), *IN_ITS_POOL[0].stack[2:])}),
            ("waits for a lock", HUNG, {"stack": (user("with lock:", "tile"), *IN_ITS_POOL[0].stack[3:])}),
        )
    ),
    case("a coroutine that waits for another one of its own event loop", loop(1), IDLE,
         soon(*FUTURE, user("store.get()"), others=(IN_ITS_LOOP,)), outcome=HUNG, cause=HangCause.CYCLE,
         says="the thread of its event loop waits for a result itself", fix="await the result"),
    case("a sampler that waits for what the loop reports", fix="the loop's own thread",
         looks=later(again(loop(stack=(WAIT, user("changed.wait()", "Board.wait"), ASKS_SAMPLER), call=LOCKED),
                           **ASLEEP), IDLE), outcome=HUNG, cause=HangCause.NOBODY),
    case("a signal handler that takes the lock of the code below it, beside another thread", IDLE,
         again(loop(0, SETS_IT_LATE, stack=(SAVES, HANDLES, INTERRUPTED, MAIN_OF), call=LOCKED), **ASLEEP),
         outcome=HUNG, cause=HangCause.SELF_LOCK, says="a lock that the code which it interrupted holds",
         fix="set a flag there"),
    case("a manager's lock that only its waiting clients could release", *both_ask_manager(), outcome=HUNG,
         says="could, and wait for it", fix="use `with lock:`"),
    case("a permit that a coroutine gives back", sharing(loop(1, replace(TIMER, stack=(
        library("EventLoop.run_forever", "/lib/python3.11/asyncio/base_events.py"),), syscall=AWAITS))), IDLE,
        sharing(soon(user("sem.acquire()"))), outcome=MAYBE_HUNG, cause=HangCause.PERMIT_LOST),
    case("an event that a thread sets after its timeout at a socket", sharing(loop(1, thread(
        150, (user("selector.select(60)", "watch"),), AWAITS))), sharing(IDLE),
        sharing(worker(1, *WAITS_FOR_EVENT, call=LOCKED)), outcome=MAYBE_HUNG),
    case("a full queue that a thread empties late", sharing(loop(1, thread(
        150, (user("wake.wait(40)", "log"),), TIMED))), sharing(IDLE),
        sharing(worker(1, library("Queue.put", QUEUES), user("out.put(x)"), call=LOCKED)),
        outcome=MAYBE_HUNG, cause=HangCause.QUEUE_FULL),
    case("a manager's queue that a grandchild fills late", again(loop(1), **ASLEEP), *both_ask_manager("get")[1:],
         process(400, 399, thread(400, (user("time.sleep(99)", "fill"),), SLEEPS_A_WHILE)), outcome=MAYBE_HUNG),
    case("an event that a timer's signal handler sets", loop(1), IDLE, replace(
        worker(1, *READY, call=LOCKED), caught=("SIGALRM",)), outcome=MAYBE_HUNG, also="the handler of SIGALRM"),
    *(case(f"a pipe that a child writes to when its timer ticks: {left}", loop(1), IDLE,
           worker(1, user("conn.recv()"), call=READS, descriptors=(QUEUE,)),
           process(300, 102, thread(300, (user("os.read(timer, 8)"),), replace(READS, fds=(4,))), descriptors=(
               PUTS, Descriptor(4, "timerfd", "anon_inode:[timerfd]", 9, about=f"it_value {left}"))), outcome=outcome)
      for left, outcome in (("(31, 5)", MAYBE_HUNG), ("(0, 0)", HUNG))),
    case("an event of a thread's that a timer's signal handler sets", loop(1), IDLE, replace(
        worker(1, *READY, call=LOCKED, others=(PUMPS,)), caught=("SIGALRM",)), outcome=MAYBE_HUNG),
    case("a FIFO, which a process that was not looked at may open", loop(1), worker(1, user("open(p)"), call=OPENS,
                                                                                  wchan="wait_for_partner"),
         outcome=HUNG, cause=HangCause.FIFO, sure=Sure.LIKELY),
    case("an event that no handler sets", loop(1), IDLE, worker(1, *READY, call=LOCKED), outcome=HUNG),
    case("a Pool that has lost the task with its process", looks=later(SLEEPS_ON, *map(pooled, (300, 301))),
         outcome=HUNG, cause=HangCause.NOBODY, says="for the result of an idle pool"),
    case("a Pool whose task is a C function", looks=later(SLEEPS_ON, pooled(300), again(
        pooled(301), syscall=nap("50 s more", 50.0))), outcome=MAYBE_HUNG),
    case("a queue's join, for an item that a process has skipped", sharing(loop(stack=(
        library("Condition.wait", SYNCHRONIZE), library("JoinableQueue.join", QUEUES),
        user("tasks.join()"), MAIN_OF), call=LOCKED)), sharing(worker(0, user("tasks.get()"), call=READS)),
        says="for task_done() for each item of a JoinableQueue", fix="in a `finally`"),
    case("a permit that a timer of the loop's process gives back", sharing(loop(1, TIMER)), IDLE,
         sharing(soon(user("sem.acquire()"))), outcome=MAYBE_HUNG, cause=HangCause.PERMIT_LOST,
         says="about to release; thread Thread-1 of the loop (pid 100) may do so", fix="that thread"),
    case("a permit, beside a library's thread that wakes up every 10 s", sharing(loop(1, MONITORS)), IDLE,
         sharing(soon(user("sem.acquire()"))), outcome=HUNG, cause=HangCause.PERMIT_LOST),
    case("a manager's queue that a thread of the loop fills late, which is no client yet",
         again(loop(1, SETS_IT_LATE), **ASLEEP), *both_ask_manager("get")[1:], outcome=MAYBE_HUNG,
         cause=HangCause.QUEUE_EMPTY, says="until another client calls put() (worker 0 (pid 101) could)"),
    case("a wait of the loop's own with a timeout", loop(stack=(WAIT, user("stop.wait(44)"), MAIN_OF), call=TIMED),
         outcome=MAYBE_HUNG, cause=HangCause.SLEEP, says="(30 s more at most)"),
    case("a wait of the loop's own with a timeout of an hour", loop(
        stack=(WAIT, user("stop.wait(4e3)"), MAIN_OF), call=replace(TIMED, timeout=3600.0)), outcome=MAYBE_HUNG),
    case("the last second of a wait with a timeout", again(loop(
        stack=(WAIT, user("stop.wait(44)"), MAIN_OF), call=replace(TIMED, timeout=1.0)), **ASLEEP), outcome=MAYBE_HUNG,
        cause=HangCause.SLEEP),
    case("a worker's wait with a timeout", loop(1), IDLE, worker(1, WAIT, user("x.wait(99)"), call=TIMED),
         outcome=MAYBE_HUNG, cause=HangCause.SLEEP),
    case("a worker's wait with a timeout of an hour", loop(1), IDLE,
         worker(1, WAIT, user("x.wait(4e3)"), call=replace(TIMED, timeout=3600.0)), outcome=HUNG,
         cause=HangCause.SLEEP),
    case("a worker's wait with a timeout of an hour, which its thread may end", loop(1), IDLE,
         worker(1, WAIT, user("x.wait(4e3)"), call=replace(TIMED, timeout=3600.0), others=(SETS_IT_LATE,)),
         outcome=MAYBE_HUNG),
    case("a loop that its parent stops and continues", replace(again(loop(1), state=("T", "T")), ppid=90),
         process(90, 1, thread(90, (user("time.sleep(55)", "run"),), SLEEPS_A_WHILE)), outcome=MAYBE_HUNG,
         cause=HangCause.STOPPED),
    case("a stopped child that a shell continues", loop(1), again(worker(1, user("x()")), state=("T", "T")),
         process(300, LOOP, thread(300, None, SLEEPS_A_WHILE), name="sh"), outcome=MAYBE_HUNG, cause=HangCause.STOPPED),
    case("a loop that is stopped, by whomever", replace(again(loop(1), state=("T", "T")), ppid=90),
         process(90, 1, thread(90, (user("input()", "run"),), READS)), outcome=HUNG, cause=HangCause.STOPPED),
    case("a launcher that waits for a rank is no rank that is missing", replace(
        loop(stack=(user("p.join()", "launch"), MAIN_OF), call=Syscall("wait4", "", (), (), target=300, timeout=-1.0)),
        ppid=1), process(300, LOOP, thread(300, (library("init_process_group", DISTRIBUTED), user("init()")), READS,
                                           idle=8.0)), outcome=MAYBE_HUNG, cause=HangCause.CHILD),
    *(case(f"threads that wait for one another in the program's own code: {what}", both, *more, outcome=outcome,
           cause=HangCause.NOBODY, says="none can wake another" * (outcome is HUNG), fix=fix)
      for what, both, more, outcome, fix in (
          ("nothing else", NOTIFY, (), HUNG, "wait_for"),
          ("Queue.join", replace(NOTIFY, threads=(again(loop(1, stack=(
              WAIT, library("Queue.join", "/lib/python3.11/queue.py"), user("q.join()"), MAIN_OF
          ), call=LOCKED), **ASLEEP).threads[0], NOTIFY.threads[1])), (), HUNG, "call task_done() in a `finally`"),
          ("a handler of the program", replace(NOTIFY, caught=("SIGINT", "SIGUSR1")), (), MAYBE_HUNG, "find out why"),
          ("torch's handler, and a worker", replace(NOTIFY, caught=("SIGINT", "SIGCHLD", "signal 33")), (IDLE,), HUNG,
           "wait_for"),
          ("a child whose end is told", replace(NOTIFY, caught=("SIGCHLD",)), (
              process(300, LOOP, thread(300, None, READS), name="sh"),), MAYBE_HUNG, "find out why"),
          ("a thread of a library that polls", replace(NOTIFY, threads=(*NOTIFY.threads, thread(
              151, None, replace(LOCKED, timeout=9.0)))), (), MAYBE_HUNG, "find out why"),
          ("a thread of a library at a socket", replace(NOTIFY, threads=(*NOTIFY.threads, thread(
              151, None, RECEIVES))), (), MAYBE_HUNG, "find out why"),
          ("a futex that processes share", replace(NOTIFY, threads=(*NOTIFY.threads, thread(
              151, None, replace(LOCKED, args=(4713, 0))))), (), MAYBE_HUNG, "find out why"),
          ("the loader's own threads", replace(NOTIFY, threads=(*NOTIFY.threads, thread(151, (
              Frame("_ResourceSharer._serve", "/lib/python3.11/multiprocessing/resource_sharer.py", 137),), RECEIVES
          ), thread(152, (Frame("_end_orphan", "/x/minidl/loader/worker.py", 90),), READS))), (), HUNG, "wait_for"),
          ("more threads than are read", replace(NOTIFY, threads=(*NOTIFY.threads, *(
              thread(1000 + i, None, LOCKED) for i in range(254)))), (), MAYBE_HUNG, "find out why"),
          ("a thread that has just run", replace(NOTIFY, threads=(NOTIFY.threads[0], replace(
              NOTIFY.threads[1], idle=0.3))), (), MAYBE_HUNG, "find out why"),
      )),
    case("a lock that all threads of a process wait for", again(loop(
        1, thread(150, (user("lock.acquire()", "watch"),), LOCKED), stack=(user("lock.acquire()"), MAIN_OF),
        call=LOCKED), **ASLEEP), outcome=HUNG, cause=HangCause.SELF_LOCK, says="all of them wait for it",
        fix="in a `finally`"),
    case("a loop's poll of its ready queue that was seen late is no wait with a timeout", again(loop(
        stack=next_stack(-1), call=replace(LOCKED, timeout=4.9)), idle=2.0), cause=HangCause.UNKNOWN),
    case("a lock that workers, which are threads, wait for, but not the loop that waits for them", again(loop(
        1, *(replace(worker(number, user("with lock:"), call=LOCKED).threads[0], tid=150 + number,
                     name="pt_data_worker", python_name=f"worker {number}") for number in range(2)),
        stack=next_stack(-1), call=replace(LOCKED, timeout=4.0)), idle=1.0), cause=HangCause.LOCK,
        never="all of them wait"),
    case("worker threads that wait for the main one, which works below `minidl run`", again(loop(
        1, *(replace(worker(number, WAIT, library("Event.wait"), user("go.wait()"), call=LOCKED).threads[0],
                     tid=150 + number, name="pt_data_worker", python_name=f"worker {number}") for number in range(2)),
        stack=(user("work()", "main"), Frame("run", "/x/minidl/run.py", 9))), state=("R", "R"), cpu=(1.0, 1.5), idle=0),
        cause=HangCause.NOBODY, outcome=MAYBE_HUNG, never="none can wake"),
    *(case(f"a lock that all wait for, beside {beside.name}", again(loop(
        1, thread(151, (user("lock.acquire()", "watch"),), LOCKED), beside, stack=(user("lock.acquire()"), MAIN_OF),
        call=LOCKED), **ASLEEP), outcome=outcome, cause=HangCause.SELF_LOCK)
      for beside, outcome in ((MONITORS, HUNG), (TIMER, MAYBE_HUNG))),
    case("a manager's lock whose holder is at work", again(loop(1, SETS_IT_LATE), **ASLEEP), *both_ask_manager()[1:],
         outcome=MAYBE_HUNG, cause=HangCause.LOCK, fix="find which client should call release()"),
    case("a lock that another thread asks for with a timeout", again(loop(
        1, thread(150, (user("lock.acquire(timeout=9)", "watch"),), TIMED), stack=(user("lock.acquire()"), MAIN_OF),
        call=LOCKED), **ASLEEP), outcome=MAYBE_HUNG, cause=HangCause.LOCK),
    case("a FIFO that a child of the program opens late", loop(1), worker(1, user("open(p)"), call=OPENS,
                                                                          wchan="wait_for_partner"),
         process(300, LOOP, thread(300, None, SLEEPS_A_WHILE), name="sh"), outcome=MAYBE_HUNG, cause=HangCause.FIFO),
    case("a child that sees no end of its input, because the workers have a copy of its writing end",
         loop(stack=(user("os.waitpid(gzip)"), MAIN_OF), call=Syscall("wait4", "for 300", target=300, timeout=-1.0)),
         replace(IDLE, descriptors=(*IDLE.descriptors, pipe(7, 60, "w"))),
         process(300, LOOP, thread(300, None, READS_FOR_EVER, idle=8.0), name="gzip", descriptors=(QUEUE,)),
         outcome=HUNG, fix="before the workers", says="but waits for the reader"),
    case("the holder of a file lock waits for another process",
         looks=[look(loop(1), worker(0, user("sock.recv(1)"), call=RECEIVES,
                                     descriptors=(HOLDS, connection(9, 90, 91))), ASKS,
                     process(300, LOOP, thread(300, (user("accept()", "mirror"), MAIN_OF), ACCEPTS), name="mirror",
                             descriptors=(connection(6, 70, 0), connection(8, 91, 90))), locks=(OF_101, WAITED_FOR))],
         ends="waits for a client to connect; worker 0 (pid 101), which holds that lock, waits for it"),
    case("the loop holds a lock of a file while it waits for a batch",
         looks=[look(loop(1, descriptors=(with_locks(LOOP, "1: FLOCK ADVISORY WRITE 100"),)), IDLE, ASKS,
                     locks=(replace(OF_101, pid=LOOP), WAITED_FOR))],
         outcome=HUNG, cause=HangCause.CYCLE, fix="let the loop hold no lock"),
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("looks", "wait", "expected"),
    [*FILE_LOCKS, *POLLED_FILES, *IN_A_SAMPLE, *ONE_PROCESS, *SEMAPHORES, *CONNECTIONS, *ENDS_OF_CHAINS, *CLOSED,
     *THE_LOOP, *IN_RANKS, *LOST_AND_ENDED, *SLOW, *UNSEEN],
)  # fmt: skip
def test_the_finding(looks: list[RunEvidence], wait: RecordedWait | None, expected: dict[str, object]) -> None:
    said = diagnose(looks, wait)
    for name, value in expected.items():
        assert CHECKS[name](said, value), f"{name}: expected {value}\n{said.text()}\n{said.who}\n{said.where}"


# --- Its forms --------------------------------------------------------------------------------------------------------
def test_a_fix_says_what_is_known_and_a_sample_alone_waits_for_no_other_process() -> None:
    looks = then_and_now([loop(1), IDLE, EXISTS], [loop(1), IDLE, again(EXISTS, switches=(40, 45))])
    polls = diagnose(looks, told(60.0))
    assert polls.sentence.endswith(f"in the 4.5 s observed, in `{HEADS}`")
    assert polls.fix.startswith("see whether the file of that line is there")
    inside = SimpleNamespace(step=LoaderStep.IMPORT, kind=None)
    assert _ring_remedy([inside, inside]) == IMPORTED_AGAIN  # type: ignore[list-item]
    shared = found(sharing(loop(1)), sharing(IDLE), SLOTS)
    assert (shared.cause, shared.outcome, shared.next_step) == (HangCause.PERMIT_LOST, HUNG, "")


def test_what_was_not_seen_has_the_processes() -> None:
    said = diagnose([blind(NO_STACK)])
    assert said.not_seen == ("Python stacks: py-spy is not installed (pid 100, 101 and 102)",)


def test_json_has_what_the_text_has_and_escapes_control_characters() -> None:
    said = found(loop(1), IDLE, worker(1, user("\x1b[31mx", "mine\x1b"), call=SLEEPS))
    data = json.loads(said.to_json())
    assert (data["cause"], data["sure"], data["state"]) == ("sleep", "certain", "hung")
    assert "\x1b" not in said.text()
    assert said.title.startswith("hung: the loop waits for worker 1, in sample 37")


def test_a_title_has_neither_process_ids_nor_for_how_long_each_thread_has_slept() -> None:
    said = found(loop(1), IDLE, worker(1, user("time.sleep(990)"), call=SLEEPS, idle=3.9))
    what = "it is asleep (990 s more)"
    assert said.sentence == f"hung: the loop (pid 100) waits for worker 1 (pid 102), {AT} for 3.90 s: {what}"
    assert said.title == f"hung: the loop waits for worker 1, {AT}: {what}"
    assert (said.waiting, said.loop_step) == (f"the loop waits for worker 1, {AT}", LoaderStep.NEXT)
