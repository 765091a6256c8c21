"""The step of a loader that a thread is in: by its Python stack, of torch's loader or of ours.

Interface: `place_of(thread)` -> `ThreadPlace`. Pure.

The table `_STEPS` maps a frame of the loader (file, function, source line) to a step. The innermost frame that the
table contains decides; the frames inside of it belong to the user's code, or to libraries that this calls.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from minidl.hang.evidence.model import Frame, SeenProcess, SeenThread
from minidl.tracefile.stack_samples import library as library


class LoaderStep(enum.Enum):
    """A step of a loader's thread. The value is for a sentence, after "is" or "has been"."""

    NEXT = "waiting for a batch"
    READ = "reading a batch from the result pipe"
    HAND_OVER = "fetching a batch's memory from the worker that made it"
    UNPICKLE = "unpickling a batch"
    SAMPLER = "asking the sampler for indices"
    START = "starting a worker"
    PICKLE_DATASET = "pickling the dataset for a worker"
    SHUTDOWN = "shutting its workers down"
    CONSUMER = "in the training loop's own code"
    EXIT = "at Python's exit"
    PIN = "pinning batches"
    IMPORT = "importing the main module in a spawned worker"
    UNPICKLE_DATASET = "unpickling the dataset in a new worker"
    INIT = "in worker_init_fn"
    OPEN = "opening the dataset (its __iter__)"
    IDLE = "waiting for a task"
    SAMPLE = "in the dataset"
    ITERATE = "in the dataset's iterator"
    COLLATE = "collating a batch"
    PUT = "putting a batch into the result queue"
    PICKLE = "pickling a batch"
    WRITE = "writing a batch into the result pipe"
    FEEDER_IDLE = "waiting for a batch to pickle"
    SERVE = "handing out memory"
    WORKER = "in the worker's loop"
    WATCH = "watching whether the loop's process lives"
    OTHER = "outside of the loader"


IN_WORKER: Final = frozenset({
    LoaderStep.IMPORT, LoaderStep.UNPICKLE_DATASET, LoaderStep.INIT, LoaderStep.OPEN, LoaderStep.IDLE,
    LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE, LoaderStep.PUT, LoaderStep.WORKER,
})  # fmt: skip
"""Steps of a worker's main thread; without workers, SAMPLE, ITERATE and COLLATE are the loop's own."""

AT_HOME: Final = frozenset({
    LoaderStep.NEXT, LoaderStep.READ, LoaderStep.HAND_OVER, LoaderStep.UNPICKLE, LoaderStep.SAMPLER, LoaderStep.START,
    LoaderStep.PICKLE_DATASET, LoaderStep.SHUTDOWN,
})  # fmt: skip
"""Steps of the thread that iterates."""

USERS: Final = frozenset({
    LoaderStep.UNPICKLE, LoaderStep.SAMPLER, LoaderStep.PICKLE_DATASET, LoaderStep.CONSUMER, LoaderStep.EXIT,
    LoaderStep.IMPORT, LoaderStep.UNPICKLE_DATASET, LoaderStep.INIT, LoaderStep.OPEN, LoaderStep.SAMPLE,
    LoaderStep.ITERATE, LoaderStep.COLLATE, LoaderStep.PICKLE, LoaderStep.OTHER,
})  # fmt: skip
"""Steps in which the user's code runs."""


@dataclass(frozen=True, slots=True)
class ThreadPlace:
    """The place of a thread. inside: the frames inside of the loader's step, innermost first; all, if it is in none.

    outer: the steps around it, if a worker's dataset has a loader of its own. interrupted: the frame below did not
    call the user's code: it is a signal handler or a finalizer, whose frames are `inside`. task, worker, sample: -1 =
    unknown. seen: there is a stack. caller: the user's innermost frame that the loader's step was called from.
    """

    step: LoaderStep
    inside: tuple[Frame, ...] = ()
    outer: tuple[LoaderStep, ...] = ()
    interrupted: bool = False
    task: int = -1
    worker: int = -1
    sample: int = -1
    seen: bool = True
    caller: Frame | None = None

    @property
    def users(self) -> Frame | None:
        """The innermost frame of the user's own code."""
        return next((frame for frame in self.inside if not library(frame.file)), None)


_DATA: Final = r"torch/utils/data/"
_SPAWN: Final = r"multiprocessing/popen_(spawn_posix|forkserver)\.py$"
_MINE: Final = r"(^|/)minidl/(data/|loader/|transport/|wire/)?"
"""Where a module of ours is; also in traces that were recorded before the loader had folders of its own."""
_WORKER_FILE: Final = re.compile(_DATA + r"_utils/worker\.py$|" + _MINE + r"worker\.py$")
_HOME: Final = _DATA + r"dataloader\.py$|" + _MINE + r"iterators\.py$"

_STEPS: Final = tuple(
    (re.compile(file), function and re.compile(function), source and re.compile(source), step)
    for file, function, source, step in (
        # --- a worker: the fetcher
        (_DATA + r"_utils/fetch\.py$|" + _MINE + r"fetch\.py$", "__init__$", r"iter\(", LoaderStep.OPEN),
        (_DATA + r"_utils/fetch\.py$|" + _MINE + r"fetch\.py$", "", r"dataset_iter", LoaderStep.ITERATE),
        (_DATA + r"_utils/fetch\.py$|" + _MINE + r"fetch\.py$", "", r"collate_fn", LoaderStep.COLLATE),
        (_DATA + r"_utils/fetch\.py$|" + _MINE + r"fetch\.py$", "fetch|_samples", "", LoaderStep.SAMPLE),
        # --- a worker: its loop
        (_MINE + r"worker\.py$", "_end_orphan$", "", LoaderStep.WATCH),
        (_DATA + r"_utils/worker\.py$|" + _MINE + r"worker\.py$", "", r"init_fn\(", LoaderStep.INIT),
        (_DATA + r"_utils/worker\.py$|" + _MINE + r"worker\.py$", "", r"_fetcher\(|opened\(", LoaderStep.OPEN),
        (_DATA + r"_utils/worker\.py$|" + _MINE + r"worker\.py$", "", r"index_queue\.get", LoaderStep.IDLE),
        (_DATA + r"_utils/worker\.py$|" + _MINE + r"worker\.py$", "", r"_queue\.put", LoaderStep.PUT),
        (_DATA + r"_utils/worker\.py$|" + _MINE + r"worker\.py$", "_worker_loop$|run$|work$", "", LoaderStep.WORKER),
        # --- the queues, in either process
        (r"multiprocessing/queues\.py$|" + _MINE + r"queues\.py$", "", r"\bloads\(", LoaderStep.UNPICKLE),
        (r"multiprocessing/queues\.py$", "_feed$", r"dumps\(", LoaderStep.PICKLE),
        (r"multiprocessing/queues\.py$", "_feed$", r"nwait\(|bpopleft|notempty|nacquire", LoaderStep.FEEDER_IDLE),
        (r"multiprocessing/queues\.py$", "_feed$", r"send_bytes|wacquire", LoaderStep.WRITE),
        (r"multiprocessing/queues\.py$|" + _MINE + r"queues\.py$", "get$", r"recv_bytes\(", LoaderStep.READ),
        (r"multiprocessing/resource_sharer\.py$", "_serve$", "", LoaderStep.SERVE),
        (r"multiprocessing/resource_sharer\.py$", "detach$|get_connection$", "", LoaderStep.HAND_OVER),
        # --- a new worker
        (r"multiprocessing/spawn\.py$", "", r"\bprepare\(|run_path|run_module|import_main_path", LoaderStep.IMPORT),
        (r"multiprocessing/spawn\.py$", "_main$", r"pickle\.load", LoaderStep.UNPICKLE_DATASET),
        (r"multiprocessing/forkserver\.py$", "", r"import_main_path|__import__", LoaderStep.IMPORT),
        (_SPAWN, "_launch$", r"reduction\.dump|write|getvalue", LoaderStep.PICKLE_DATASET),
        (r"multiprocessing/popen_fork\.py$", "_launch$", r"os\.fork\(", LoaderStep.START),
        # --- the loader's own process
        (r"(_utils|minidl(/loader)?)/pin_memory\.py$", "", "", LoaderStep.PIN),
        (_MINE + r"(shutdown|crew)\.py$", r"shut_down$|close_all$", "", LoaderStep.SHUTDOWN),
        (_HOME, "_shutdown_workers$|__del__$", "", LoaderStep.SHUTDOWN),
        (_HOME, "", r"\.start\(\)|_start\(", LoaderStep.START),
        (_HOME, "", r"(next|islice)\(self\._sampler_iter|iter\(", LoaderStep.SAMPLER),
        (_DATA + r"sampler\.py$|" + _MINE + r"sampler\.py$", "", "", LoaderStep.SAMPLER),
        (_HOME, "_get_data$|_try_get_data$|_next_data$|_reset$", "",
         LoaderStep.NEXT),
        # --- the end of a process
        (r"multiprocessing/util\.py$", "_exit_function$|_run_finalizers$", "", LoaderStep.EXIT),
        (r"/threading\.py$", "_shutdown$", "", LoaderStep.EXIT),
        (_MINE + r"run\.py$", "_wait_for_threads$", "", LoaderStep.EXIT),
    )
)  # fmt: skip
"""(file, function, source line) -> step; the first row that fits a frame decides. "" = any."""

_NUMBER: Final = re.compile(r"-?\d+")
_CALLS_NOTHING: Final = re.compile(
    r"selector\.poll\(|_recv\(|waiter\.acquire|\.select\(|_wait_for_tstate_lock|os\.read|os\.write|read\(handle|"
    r"write\(self\._handle|_handle\.join|lock\.acquire|_poll\(|_accept\(|waitpid"
)
"""Lines of the standard library that call no Python: a frame inside of one belongs to a signal handler or finalizer."""


def is_ours(file: str) -> bool:
    """Whether a file belongs to this package."""
    return bool(re.search(_MINE, file.replace("\\", "/")))


def step_of(frame: Frame) -> LoaderStep | None:
    """The loader's step that a frame stands for, None if it is none."""
    file, name = frame.file.replace("\\", "/"), frame.name
    if name == "<module>":  # a loader's module that is imported runs no step of a loader
        return None
    for files, functions, sources, step in _STEPS:
        if (
            files.search(file)
            and (not functions or functions.match(name) or name.startswith("<"))
            and (not sources or sources.search(frame.source))
        ):
            return step
    return None


def place_of(thread: SeenThread) -> ThreadPlace:
    """The place of a thread; without a stack, OTHER with `seen` false."""
    stack = thread.stack
    if not stack:
        return ThreadPlace(LoaderStep.OTHER, seen=False)
    found, interrupted = _steps_of(stack), _interruption(stack)
    if not found and not interrupted:
        at_exit = thread.python_name == "MainThread" and stack[-1].function not in ("<module>", "_run_module_as_main")
        return ThreadPlace(LoaderStep.EXIT if at_exit else LoaderStep.OTHER, stack)
    at, step = found[0] if found else (len(stack), LoaderStep.OTHER)
    if interrupted and interrupted <= at:
        outer = tuple(one for _, one in found[1:])
        return ThreadPlace(step, stack[:interrupted], outer, True, worker=_worker(stack))
    outer = tuple(dict.fromkeys(one for _, one in found[1:] if one is not step))
    sample = _sample(stack[: at + 2]) if step is LoaderStep.SAMPLE else -1
    fetched = step in (LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE)
    return ThreadPlace(
        step, stack[:at], outer, task=_task(stack) if fetched else -1, worker=_worker(stack), sample=sample,
        caller=next((frame for frame in stack[at:] if not library(frame.file)), None),
    )  # fmt: skip


def _steps_of(stack: tuple[Frame, ...]) -> list[tuple[int, LoaderStep]]:
    """The steps of a loader in a stack, innermost first, each with the position of its frame."""
    steps = [None if _users_queue(stack, i) else step_of(frame) for i, frame in enumerate(stack)]
    return [(i, step) for i, step in enumerate(steps) if step is not None]


def _users_queue(stack: tuple[Frame, ...], i: int) -> bool:
    """Whether a frame is a queue's `get` that the user's code calls, and not the loader."""
    frame, below = stack[i], stack[i + 1 : i + 2]
    asks = frame.file.endswith("queues.py") and frame.name == "get"
    return asks and not any(re.search(_DATA + "|" + _MINE, one.file.replace("\\", "/")) for one in below)


def _interruption(stack: tuple[Frame, ...]) -> int:
    """The number of innermost frames that belong to a signal handler or a finalizer; 0 = none."""
    for i, frame in enumerate(stack[:-1]):
        if library(frame.file):
            continue
        handles = any(text.startswith("<frame at ") for text in frame.variables.values())
        below = stack[i + 1]
        if (
            handles
            or frame.function.endswith("__del__")
            or (library(below.file) and _CALLS_NOTHING.search(below.source))
        ):
            return i + 1
    return 0


def _variable(stack: tuple[Frame, ...], function: str, name: str) -> int:
    for frame in stack:
        text = frame.variables.get(name, "")
        if frame.name == function and _NUMBER.fullmatch(text):
            return int(text)
    return -1


def _worker(stack: tuple[Frame, ...]) -> int:
    """The number of the worker that the thread is or waits for."""
    own = _variable(stack, "_worker_loop", "worker_id")
    return own if own >= 0 else _variable(stack, "_next_data", "worker_id")


def _task(stack: tuple[Frame, ...]) -> int:
    return _variable(stack, "_worker_loop", "idx")


def _sample(stack: tuple[Frame, ...]) -> int:
    """The index that the fetcher requests from the dataset."""
    for frame in stack:
        if step_of(frame) is LoaderStep.SAMPLE:
            for name in ("idx", "index"):
                if _NUMBER.fullmatch(frame.variables.get(name, "")):
                    return int(frame.variables[name])
    for frame in reversed(stack):
        if frame.name == "__getitem__":
            numbers = [int(text) for text in frame.variables.values() if _NUMBER.fullmatch(text)]
            return numbers[0] if numbers else -1
    return -1


def is_worker(process: SeenProcess) -> bool:
    """Whether a process is a loader's worker: by the name that torch and we give it, or by its stack."""
    if process.name.startswith("pt_data_worker"):
        return True
    main = process.main
    if main is None or not main.stack:
        return False
    serves = "multiprocessing.forkserver" in " ".join(process.command)
    if serves and not any(frame.function == "_serve_one" for frame in main.stack):
        return False  # the server itself, which imports modules before it makes the first process
    own = IN_WORKER - {LoaderStep.SAMPLE, LoaderStep.ITERATE, LoaderStep.COLLATE, LoaderStep.OPEN}
    return any(step_of(frame) in own or _WORKER_FILE.search(frame.file) for frame in main.stack)
