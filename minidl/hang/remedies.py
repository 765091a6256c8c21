"""Remedies: for each cause, for each step of a loader, after a signal or an error. All outputs use these words.

A rule of the doctor that knows more than the cause names its own remedy.
"""

from __future__ import annotations

import re
import signal
from typing import Final

from minidl.hang.finding import HangCause
from minidl.hang.places import LoaderStep

AFTER_FORK: Final = (
    "start the workers before any thread holds the lock: use multiprocessing_context='forkserver' or 'spawn', or "
    "create the object in the worker (worker_init_fn)"
)
HELD_AT_FORK: Final = "a lock that was held at the fork stays locked: try multiprocessing_context='forkserver'"
KILLED: Final = "find what killed it: dmesg for the out-of-memory killer, the scheduler's log, python -X faulthandler"
START: Final = "read its error on stderr; with spawn or forkserver a script needs `if __name__ == '__main__':`"
IMPORTED_AGAIN: Final = (
    "a spawned worker imports the main module again: put the line that it waits in, and what else the program does, "
    "under `if __name__ == '__main__':`"
)
READ_ALL: Final = (
    "make one of them independent of the other: read all pipes of a child while it runs (communicate(), a thread), "
    "and before you wait for it; answer requests in a separate thread"
)
SHARED_MEMORY: Final = (
    "check the free space in shared memory: df -h /dev/shm (in a container: --shm-size); or use smaller batches"
)
TRUNCATED: Final = (
    "compare the sizes of the files that the dataset maps (np.memmap, mmap) with their indices: one is shorter"
)

BY_CAUSE: Final = {
    HangCause.SLEEP: "remove the sleep, or limit the number of its retries",
    HangCause.COMPUTING: "run that sample alone under a profiler; limit its loop",
    HangCause.DEVICE: "find which call does not end: run with CUDA_LAUNCH_BLOCKING=1; with several ranks it may be a "
    "collective that another rank has not reached: ask the doctor about each rank",
    HangCause.UNINTERRUPTIBLE: "check the disk or the network file system that it reads from (dmesg, nfsstat); "
    "signals don't help",
    HangCause.GIL: "let the C code that it calls release the GIL (ctypes.CDLL instead of PyDLL, nogil in Cython), or "
    "return sooner",
    HangCause.FILE_LOCK: "end or fix the holder; lock with LOCK_NB and a timeout, and keep the lock for as short a "
    "time as possible",
    HangCause.LOCK: "find which of them holds the lock; hold it for as short a time as possible",
    HangCause.FORK_LOCK: AFTER_FORK,
    HangCause.SELF_LOCK: "use threading.RLock, or release the lock before you take it again: the thread holds it "
    "itself",
    HangCause.MISSING_THREAD: "create the pool, thread or client in the worker (worker_init_fn, or at its first use "
    "there), or use multiprocessing_context='forkserver' or 'spawn'",
    HangCause.CYCLE: "take the locks in one order everywhere, or hold none while waiting for another process",
    HangCause.BARRIER: "give the barrier a timeout, and let no dataset wait for another worker: a barrier needs all of "
    "its parties, but workers get different samples",
    HangCause.COLLECTIVE: "find the rank that has not reached the collective: its loader or code hangs; all ranks must "
    "run the same number of steps",
    HangCause.SEMAPHORE: "check whether that process holds the lock",
    HangCause.PERMIT_LOST: "release it in `finally` or by `with`; a process that dies while it holds the permit "
    "never gives it back",
    HangCause.QUEUE_FULL: "read that queue while the workers run, or set no maximum size",
    HangCause.QUEUE_EMPTY: "give get() a timeout; find which process should put an item",
    HangCause.CHILD: "give the wait a timeout; find out what the child does",
    HangCause.PIPE_FULL: "read the other end while it is written (communicate(), a thread), or write less than 64 KiB",
    HangCause.PIPE_EMPTY: "find which process should write, or close its end: while a fork holds a copy of that end "
    "open, the reader gets no end of file",
    HangCause.FIFO: "start the program that opens the other end, or open the FIFO with os.O_NONBLOCK; check whether "
    "this path should be a FIFO",
    HangCause.SOCKET: "give the connection a timeout (socket.setdefaulttimeout, the client's timeout=), and retry",
    HangCause.FILE: "check the file system that the file is on",
    HangCause.TERMINAL: "answer the prompt, or remove the breakpoint",
    HangCause.SIGNAL: "send the signal, or don't wait for it in a dataset",
    HangCause.LOST_RESULT: "look for a traceback of QueueFeederThread on stderr: that thread drops a result that can't "
    "be pickled; return plain tensors",
    HangCause.TORN_MESSAGE: "find what killed the writer in the middle of a message (dmesg, exit codes)",
    HangCause.DEAD_LOCK_HOLDER: "find what killed a process in the middle of a message: it left the queue locked",
    HangCause.NO_CPU: "give it more CPU time: fewer workers, a wider affinity (os.sched_setaffinity), or a larger "
    "quota",
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
    LoaderStep.WRITE: "find which process holds the result pipe: the reader has stopped reading, or a writer was "
    "stopped in a write",
    LoaderStep.PIN: "try pin_memory=False",
}
"""How to learn more about a step that does not end."""


def print_stack(pid: int) -> str:
    """The command that shows the stack of a process."""
    return f"print its stack: py-spy dump --pid {pid}"


def check_stopped(pid: int, otherwise: str) -> str:
    """The remedy for a process that gives no sign of life. otherwise: another reason than a signal."""
    return f"check whether it is stopped (T), or {otherwise}: ps -o stat,wchan -p {pid}"


def in_step(step: LoaderStep | None, sample: int = -1) -> str:
    """The way to learn more about a step; "" = unknown. sample: the sample that it is in, -1 = none."""
    if sample >= 0:
        return f"run dataset[{sample}] alone, in a new process"
    return BY_STEP.get(step, "") if step is not None else ""


def after_signal(code: int, sample: int, in_user_code: bool = False, line: str = "") -> str:
    """The remedy after the end of a process. code: multiprocessing's exit code; sample: of it, -1 = none.

    in_user_code: it was in the user's code, and not copying a batch into shared memory. line: where a fault came, "" =
    unknown.
    """
    alone = f"run dataset[{sample}] alone" if sample >= 0 else "run the same samples with num_workers=0"
    crash = f"{alone} under python -X faulthandler"
    if line:
        crash = f"call {line} alone with the same input: the fault is in the C code that it runs; update that library"
    return {
        -signal.SIGKILL: "look for the kernel's out-of-memory killer: dmesg -T | grep -i 'killed process'; if it "
        "killed the process, use fewer workers or a smaller prefetch_factor",
        -signal.SIGBUS: f"{TRUNCATED}; or {SHARED_MEMORY}" if in_user_code else SHARED_MEMORY,
        -signal.SIGSEGV: crash,
        -signal.SIGABRT: crash,
        -signal.SIGTERM: "find the sender of the signal: a scheduler, or another process of the job",
        -signal.SIGINT: "the job was interrupted (Ctrl-C)",
    }.get(code, alone)


_TENSORS: Final = (
    "raise the limit of file descriptors (ulimit -n 65536), keep copies of tensors instead of batches, or call "
    "torch.multiprocessing.set_sharing_strategy('file_system')"
)

BY_ERROR: Final = tuple(
    (re.compile(pattern), advice)
    for pattern, advice in (
        (r"ancdata|(shared memory|torch_\S*|/dev/shm\S*).*Too many open files", _TENSORS),
        (r"Too many open files|Errno 24\b",
         "find what opens files and does not close them (ls -l /proc/PID/fd of the process that raised it), or raise "
         "its limit (ulimit -n 65536)"),
        (r"(?=.*(/dev/shm|shared memory|torch_\w+))(?=.*(No space left|Errno 28\b|unable to (allocate|resize|write)))",
         SHARED_MEMORY),
        (r"No space left|Errno 28\b",
         "free the file system that the file is on: df -h and df -i of its folder (the dataset's cache, TMPDIR)"),
        (r"unable to mmap.*(Errno 12\b|Cannot allocate memory|\(12\))",
         "compare the process's mappings (wc -l /proc/PID/maps) with sysctl vm.max_map_count, and its memory with the "
         "limits of its cgroup; keep copies of tensors instead of batches"),
        (r"Cannot allocate memory|Errno 12\b|can't allocate memory",
         "compare the memory of the processes with the limits (ulimit -v, memory.max of the cgroup): fewer workers, a "
         "smaller prefetch_factor"),
        (r"File too large|Errno 27\b",
         "raise the limit of a file's size (ulimit -f), or write smaller files: the disk has room"),
        (r"quota exceeded|Errno 122\b", "free space in the user's quota on that file system (quota -s)"),
        (r"unable to lock file",
         "another process has the HDF5 file open for writing: close it there, or open it with locking=False "
         "(HDF5_USE_FILE_LOCKING=FALSE) if no process writes"),
        (r"can't start new thread|Resource temporarily unavailable|Errno 11\b",
         "compare the number of processes and threads with the limits (ulimit -u, pids.max of the cgroup)"),
        (r"re-initialize .* in (a )?forked subprocess|CUDA with multiprocessing",
         "use multiprocessing_context='spawn' or 'forkserver', or keep the dataset and collate_fn on the CPU and move "
         "batches to the GPU in the loop (pin_memory=True)"),
        (r"fork-safe|[Ff]ork support|after fork|re-used across fork|forked process",
         "open the client or file in the worker (worker_init_fn, or at the first __getitem__ of its pid), or use "
         "multiprocessing_context='forkserver'"),
        (r"database is locked", "end the transaction of the process that writes, or give connect() a longer timeout"),
        (r"Stale file handle|Errno 116\b", "open the file again: it was replaced or deleted on the NFS server"),
        (r"Input/output error|Errno 5\b", "check the disk or the network file system (dmesg, nfsstat)"),
        (r"Connection re(fused|set)|Broken pipe|Errno (32|104|111)\b",
         "look for the end of the server at the other end of the connection, and for its log"),
        (r"[Cc]an't (pickle|get attribute)|cannot pickle|not picklable",
         "define it at the top level of a module, and open files, locks and connections in the worker"),
    )
)  # fmt: skip
"""Patterns of the text of an error, and the advice: the first one decides."""


def after_error(error: str, otherwise: str = "read the program's traceback") -> str:
    """The remedy after an exception. error: its text; otherwise: the remedy if it is unknown."""
    return next((advice for pattern, advice in BY_ERROR if pattern.search(error)), otherwise)
