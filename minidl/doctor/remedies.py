"""What helps: against each cause, in each step of a loader, after a signal or an error. One wording for all outputs.

A rule of the doctor that knows more than its cause tells names its own remedy.
"""

from __future__ import annotations

import re
import signal
from typing import Final

from minidl.doctor.finding import HangCause
from minidl.doctor.places import LoaderStep

AFTER_FORK: Final = (
    "start workers before any thread holds it: multiprocessing_context='forkserver' or 'spawn', or make the object in "
    "the worker (worker_init_fn)"
)
HELD_AT_FORK: Final = "a lock that was held at the fork stays locked: try multiprocessing_context='forkserver'"
KILLED: Final = "find what killed it: dmesg for the out-of-memory killer, the scheduler's log, python -X faulthandler"
READ_ALL: Final = (
    "one of them has to go on without the other: read all pipes of a child while it runs (communicate(), a thread), "
    "and before it is waited for; answer requests in a thread of its own"
)
SHARED_MEMORY: Final = "look for room in shared memory: df -h /dev/shm (of a container: --shm-size); smaller batches"

BY_CAUSE: Final = {
    HangCause.SLEEP: "remove the sleep, or bound the retries that it belongs to",
    HangCause.COMPUTING: "run that sample alone under a profiler; bound its loop",
    HangCause.UNINTERRUPTIBLE: "look at the disk or the network file system that it reads from (dmesg, nfsstat); "
    "signals don't help",
    HangCause.GIL: "the C code that it calls must release the GIL (ctypes.CDLL instead of PyDLL, nogil in Cython), or "
    "return",
    HangCause.FILE_LOCK: "end or fix the holder; lock with LOCK_NB and a timeout, and keep the lock for as short as "
    "possible",
    HangCause.LOCK: "see which of them is inside of the lock; hold it for as short as possible",
    HangCause.FORK_LOCK: AFTER_FORK,
    HangCause.SELF_LOCK: "it holds the lock itself: use threading.RLock, or release it before it is taken again",
    HangCause.MISSING_THREAD: AFTER_FORK,
    HangCause.CYCLE: "take the locks in one order everywhere, or hold none while waiting for another process",
    HangCause.BARRIER: "a barrier needs all of its parties: workers get different samples, so don't wait for one "
    "another in a dataset; give it a timeout",
    HangCause.COLLECTIVE: "find the rank that has not come to it: it is the one whose loader or code hangs; ranks must "
    "run the same number of steps",
    HangCause.SEMAPHORE: "see whether that process is inside of the lock",
    HangCause.PERMIT_LOST: "release it in `finally` or by `with`; a process that dies while it holds it never gives it "
    "back",
    HangCause.QUEUE_FULL: "read that queue while the workers run, or don't bound it",
    HangCause.QUEUE_EMPTY: "give get() a timeout; see who is to put",
    HangCause.CHILD: "give the wait a timeout; see what the child does",
    HangCause.PIPE_FULL: "read the other end while it is written (communicate(), a thread), or write less than 64 KiB",
    HangCause.PIPE_EMPTY: "find who is to write, or to close its end: a copy that a fork left open keeps a pipe from "
    "ending",
    HangCause.FIFO: "start what opens the other end, or open it with os.O_NONBLOCK; is a FIFO expected at this path?",
    HangCause.SOCKET: "give the connection a timeout (socket.setdefaulttimeout, the client's timeout=), and retry",
    HangCause.FILE: "look at the file system that the file is on",
    HangCause.TERMINAL: "answer it, or remove the breakpoint",
    HangCause.SIGNAL: "send it, or don't wait for it in a dataset",
    HangCause.LOST_RESULT: "look for a traceback of QueueFeederThread on stderr: a result that can't be pickled is "
    "dropped there; return plain tensors",
    HangCause.TORN_MESSAGE: "a writer was killed in the middle of a message: find what killed it (dmesg, exit codes)",
    HangCause.DEAD_LOCK_HOLDER: "a process that was killed in the middle of a message left it locked: find what killed "
    "it",
    HangCause.NO_CPU: "give it CPUs: fewer workers, a wider affinity (os.sched_setaffinity), a larger quota",
    HangCause.DIED: KILLED,
}

BY_STEP: Final = {
    LoaderStep.SAMPLE: "fetch the samples of that task alone, with num_workers=0",
    LoaderStep.COLLATE: "call collate_fn on a few samples alone",
    LoaderStep.INIT: "call worker_init_fn alone",
    LoaderStep.OPEN: "iterate over the dataset without workers",
    LoaderStep.ITERATE: "iterate over the dataset without workers",
    LoaderStep.SAMPLER: "iterate over the sampler alone",
    LoaderStep.PICKLE: "pickle that batch alone",
    LoaderStep.UNPICKLE: "pickle and unpickle a batch alone",
    LoaderStep.UNPICKLE_DATASET: "pickle and unpickle the dataset alone",
    LoaderStep.PICKLE_DATASET: "pickle the dataset alone",
    LoaderStep.IMPORT: "import the main module alone: its code runs in each spawned worker, so put it under "
    "if __name__ == '__main__'",
    LoaderStep.WRITE: "find who holds the result pipe: its reader reads no more, or a writer was stopped in a write",
    LoaderStep.PIN: "try pin_memory=False",
}
"""What tells more about a step that does not end."""


def in_step(step: LoaderStep | None, sample: int = -1) -> str:
    """What tells more about a step, "" = nothing is known to. sample: that it is in, -1 = none."""
    if sample >= 0:
        return f"run dataset[{sample}] alone, in a new process"
    return BY_STEP.get(step, "") if step is not None else ""


def after_signal(code: int, sample: int) -> str:
    """What to do after a process ended. code: multiprocessing's exit code; sample: that it was in, -1 = none."""
    alone = f"run dataset[{sample}] alone" if sample >= 0 else "run the same samples with num_workers=0"
    return {
        -signal.SIGKILL: "look for the kernel's out-of-memory killer: dmesg -T | grep -i 'killed process'; if it was "
        "that, fewer workers or a smaller prefetch_factor",
        -signal.SIGBUS: SHARED_MEMORY,
        -signal.SIGSEGV: f"{alone} under python -X faulthandler",
        -signal.SIGABRT: f"{alone} under python -X faulthandler",
        -signal.SIGTERM: "find who sent the signal: a scheduler, or another process of the job",
        -signal.SIGINT: "somebody interrupted the job (Ctrl-C)",
    }.get(code, alone)


def after_error(error: str) -> str:
    """What to do after an exception ended the program. error: its text, by Python, torch or the system."""
    if re.search(r"Too many open files|ancdata|Errno 24", error):
        return (
            "no file descriptors are left: ulimit -n 65536; keep copies of tensors and not the batches; "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
    if re.search(r"No space left|unable to (allocate|resize|write|mmap)|Errno 28", error):
        return SHARED_MEMORY
    return "read the program's traceback"
