"""The event vocabulary: every event declared once, as a row of one typed table.

Interface: `EVENTS` (code -> Event), `BY_NAME` ((name, phase) -> Event); `codes_where` and `columns_where` choose events
and their fields by what the table says of them, as the sets of codes at its end do. The recorder, the exports, the
timelines, the checker, the documentation and the tests read this table; nothing parses an event's name.

Rules of use: a code, once released, keeps its meaning: add rows, never renumber. An event carries a task and a worker
(-1 if it has none) and up to three integers of its own, named and given units here. A span is two events, a begin and
an end, because a begin without its end is what a hang looks like. Stamp before a put and after a get. `cpu` is the CPU
time of the span's thread during the span, `cpu_wait` how long that thread was ready to run and had no CPU. `pickle_cpu`
and `rebuild_wait` are the CPU time of the result_pickle before, and the `cpu_wait` of the result_rebuild before, whose
ends have no field left.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


class Phase(enum.Enum):
    """Whether an event opens a span, closes one, or stands alone. Values are Chrome-trace letters."""

    BEGIN = "B"
    END = "E"
    INSTANT = "i"


class Track(enum.Enum):
    """The lane that an event is drawn on."""

    LOADER = "loader"  # the thread that iterates over the loader
    FEEDER = "feeder"  # a queue's background thread, in either process
    WORKER = "worker"
    PIN = "pin thread"
    CONSUMER = "consumer"  # the user's code between two `next`
    DEVICE = "device"  # a stream of a device, by its clock, which `clock_calibration` maps to the host's


DEVICE_TID = 1 << 24
"""Above every real thread number of Linux: from here on, what stands in `tid` is a stream of a device."""


class Actor(enum.IntEnum):
    """Who is joined, watched, signalled or found dead."""

    LOADER = 0
    WORKER = 1
    PIN_THREAD = 2


class QueueId(enum.IntEnum):
    """Which queue. There is one INDEX queue a worker; READY exists only if memory is pinned."""

    INDEX = 1
    RESULT = 2
    READY = 3


class DoneEvent(enum.IntEnum):
    """Which of the two done events."""

    WORKERS = 1
    PIN_THREAD = 2


class Message(enum.IntEnum):
    """What came out of a queue."""

    EMPTY = 0  # nothing came within the poll interval
    TASK = 1
    RESULT = 2
    RESUME = 3
    SENTINEL = 4


class Outcome(enum.IntEnum):
    """How a task ended where it was worked on."""

    DATA = 0
    ERROR = 1
    EXHAUSTED = 2  # the worker's iterable dataset has ended


class Place(enum.IntEnum):
    """Where a shared-memory segment was made."""

    COLLATE = 1
    FEEDER = 2


class Reason(enum.IntEnum):
    """Why a tensor's bytes went into shared memory there."""

    COLLATE_SHORTCUT = 1  # default_collate stacked straight into shared memory: no extra copy
    NOT_SHARED_YET = 2  # the batch reached the feeder in private memory: one extra copy


class SlabSource(enum.IntEnum):
    """Where a slab comes from that a worker takes (transport "arena")."""

    RECYCLED = 0  # it held an earlier batch, which no process can see any more
    NEW = 1
    ALONE = 2  # new, and for this batch only: it exceeds the budget of slabs that are used again


class SlabEnd(enum.IntEnum):
    """What becomes of a slab whose batch the reader's process can no longer see, or never could."""

    FREED = 0  # the worker may take it
    LOST = 1  # its descriptor did not arrive: it is not used again
    KEPT = 2  # a forked child may see the batch: it is not used again


class Ending(enum.IntEnum):
    """Why an epoch, a worker or a wait ended."""

    EXHAUSTED = 0
    CLOSED = 1
    ERROR = 2
    SENTINEL = 3
    ORPHANED = 4
    INTERRUPTED = 5


class Call(enum.Enum):
    """The call of an iterator that a program is in. The value is its name in a watchdog's lines."""

    START = "start"  # iter(loader): workers start or resume, and get their first tasks
    NEXT = "next"
    SHUTDOWN = "shutdown"
    OWN = "own code"  # none: the program's own code runs


@dataclass(frozen=True, slots=True)
class Field:
    """One of an event's own integers: its name, its unit ("" = a plain number), its enumeration if it has one.

    may_lack: 0 stands for "not measured".
    """

    name: str
    unit: str = ""
    enum: type[enum.IntEnum] | None = None
    may_lack: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether it says what its span, or an earlier one, had of a CPU: a measurement, no part of the protocol."""
        return self.name in ("cpu", "cpu_wait", "pickle_cpu", "rebuild_wait")


@dataclass(frozen=True, slots=True, repr=False)
class Event:
    """One row of the vocabulary.

    ours: "module:function" of this package (or `multiprocessing`) in which the event is emitted; several are separated
    by commas. upstream: the same in `torch.utils.data` (or `multiprocessing`), "" if it has no such step. article: the
    sections that describe it, in the form that `minidl.articles` reads; "" if none does. detail: emitted only at
    detail level "sample". stage: what a span's time is spent on, for summaries ("" = nothing). call: the call of its
    iterator that the program is in from this event on, None = the event says nothing about that.

    For views: words is the event as a sentence, which `playback.words` fills in; with_slabs the sentence with transport
    "arena", if that is another; doing what a thread does between a begin and its end, or a worker after an instant or
    an end of its own. legend: the span's name in legends, if it is not the stage; letter: its character in a timeline
    of text, the same for all with one `label`; marker: of what is drawn as a mark. way: whether a span is a step of a
    batch between its index_put and its yield, or on its way to a device.

    For torch's own loader (`record.observe`), one of three: seen, the call that shows the event, which is stamped when
    it happens; derived, what the event is concluded from: its place among its thread's events is right, and its time
    may be late; unseen, why no queue, event or process shows it: a trace lacks it then.
    """

    code: int
    name: str
    phase: Phase
    track: Track
    colour: str
    fields: tuple[Field, ...]
    has_task: bool
    has_worker: bool
    meaning: str
    ours: str
    upstream: str
    article: str
    stage: str = ""
    call: Call | None = None
    detail: bool = False
    words: str = ""
    with_slabs: str = ""
    doing: str = ""
    legend: str = ""
    letter: str = ""
    marker: str = ""
    way: bool = False
    seen: str = ""
    derived: str = ""
    unseen: str = ""

    @property
    def label(self) -> str:
        """What legends call it: several events may share a label."""
        return self.legend or self.stage or self.name

    @property
    def waits(self) -> bool:
        """Whether it is of a span in which its thread waits."""
        return self.colour == _WAIT

    @property
    def frames(self) -> bool:
        """Whether it is of a span around steps: its own time is no work."""
        return self.colour == _FRAME

    @property
    def columns(self) -> dict[str, Field]:
        """Its own fields, by the column of a row in which each stands: x, y, z."""
        return dict(zip("xyz", self.fields, strict=False))

    def __repr__(self) -> str:
        own = " ".join(f"{f.name}:{f.enum.__name__ if f.enum else f.unit}".rstrip(":") for f in self.fields)
        return f"<Event {self.code} {self.name} {self.phase.name.lower()}{f': {own}' if own else ''}>"


EVENTS: dict[int, Event] = {}
BY_NAME: dict[tuple[str, Phase], Event] = {}


def codes_where(holds: Callable[[Event], object]) -> tuple[int, ...]:
    """Return the codes of the events that `holds` is true of, in the table's order."""
    return tuple(code for code, event in EVENTS.items() if holds(event))


def columns_where(holds: Callable[[Field], object]) -> list[tuple[int, str]]:
    """Return (code, column) of each event's own field that `holds` is true of."""
    return [(event.code, at) for event in EVENTS.values() for at, field in event.columns.items() if holds(field)]


def _add(event: Event) -> int:
    if event.code in EVENTS or (event.name, event.phase) in BY_NAME or len(event.fields) > 3:
        raise AssertionError(f"event {event.code} {event.name} {event.phase}: code or name taken, or over three fields")
    EVENTS[event.code] = event
    BY_NAME[event.name, event.phase] = event
    return event.code


def _fields(spec: str) -> tuple[Field, ...]:
    """Read "bytes:B place:Place cpu:ns?" into Fields; what follows the colon is a unit or an enumeration above."""
    out = []
    for word in spec.split():
        name, _, unit = word.removesuffix("?").partition(":")
        kind = globals().get(unit)
        is_enum = isinstance(kind, type) and issubclass(kind, enum.IntEnum)
        out.append(Field(name, "" if is_enum else unit, kind if is_enum else None, word.endswith("?")))
    return tuple(out)


def _instant(
    code: int, name: str, track: Track, colour: str, keys: str, fields: str,
    meaning: str, ours: str, upstream: str, article: str, **more: Any,
) -> int:  # fmt: skip
    has_task, has_worker = "task" in keys, "worker" in keys
    about = (meaning, ours, upstream, article)
    return _add(Event(code, name, Phase.INSTANT, track, colour, _fields(fields), has_task, has_worker, *about, **more))


def _span(
    code: int, name: str, track: Track, colour: str, keys: str, fields: tuple[str, str],
    meaning: str, ours: str | tuple[str, str], upstream: str, article: str, **more: Any,
) -> tuple[int, int]:  # fmt: skip
    """Declare a span: its begin gets `code`, its end `code + 1`. Of what is given as a pair, each gets its own."""
    has_task, has_worker = "task" in keys, "worker" in keys
    for at, phase in enumerate((Phase.BEGIN, Phase.END)):
        about = (meaning, ours if isinstance(ours, str) else ours[at], upstream, article)
        own = {name: value[at] if isinstance(value, tuple) else value for name, value in more.items()}
        _add(Event(code + at, name, phase, track, colour, _fields(fields[at]), has_task, has_worker, *about, **own))
    return code, code + 1


_GREEN, _OLIVE, _PINK, _BLUE = "#43a97d", "#b5a642", "#c940a8", "#3f7fbf"
_GREY, _SLATE, _VIOLET = "#8a8f98", "#4c5054", "#7a5cc0"
_RED = "#b3261e"
"""Only of what is wrong: a death, a timeout, an error, a signal."""

_WAIT, _FRAME = "#6f7b88", "#8fa0b3"
"""Of waits, which views hatch, and of steps around others. Each kind of work has a colour of its own: a test measures
that it can be told from its neighbours, also by the colour-blind and in grey."""

# --- The loader's thread: epochs, sampling, sending -------------------------------------------------------------------
EPOCH = _span(
    10, "epoch", Track.LOADER, _FRAME, "", ("epoch workers prefetch_factor", "epoch yielded:batches ending:Ending"),
    "one pass over the loader, from the iterator's (re)start to its end",
    (
        "loader.iterators:_reset, loader.iterators:__init__",
        "loader.iterators:_next_data, loader.iterators:_reset, loader.crew:shut_down",
    ),
    "dataloader:_reset", "1 §2.4.3",
    call=(Call.START, Call.OWN),
    words=("epoch {epoch} begins", "epoch {epoch} ends after {batches}: {ending}"),
    letter="=",
    derived="begins with the first draw of an epoch; ends as _next_data raises StopIteration, or with the shutdown. It "
    "counts as exhausted if that comes within _next_data, and no task is left")  # fmt: skip
SAMPLER_NEXT = _span(
    12, "sampler_next", Track.LOADER, "#3c86dd", "task", ("", "count:indices first_index digest"),
    "the sampler is asked for the next task's indices; the end's count is 0 if it had none; digest stands for the "
    "indices and their order, 0 = none",
    "loader.iterators:_next_index, loader.iterators:_try_put_index", "dataloader:_next_index", "1 §2.4.4",
    stage="sampling",
    words=("the sampler is asked for task {task}'s indices", "the sampler gives {indices} for task {task}"),
    doing="asking the sampler", letter="I",
    seen="a call of the iterator's _next_index")  # fmt: skip
TASK_ASSIGNED = _instant(
    14, "task_assigned", Track.LOADER, _BLUE, "task worker", "send_idx outstanding:tasks",
    "the dispatcher has given the task to a worker; send_idx and outstanding are the values after it",
    "loader.dispatcher:assign", "dataloader:_try_put_index", "1 §2.4.4",
    words="task {task} is given to worker {worker}",
    derived="the put that follows; outstanding is the loader's own count")  # fmt: skip
INDEX_PUT = _instant(
    15, "index_put", Track.LOADER, _BLUE, "task worker", "count:indices",
    "the task's indices are about to enter the worker's index queue (enqueued: not yet written to its pipe)",
    "loader.iterators:_put_task", "dataloader:_try_put_index", "1 §2.4.4",
    words="task {task} is put into worker {worker}'s index queue", seen="a put")  # fmt: skip
INDEX_WRITE = _span(
    16, "index_write", Track.FEEDER, "#15535b", "task worker", ("bytes:B", "bytes:B cpu:ns?"),
    "the index queue's feeder thread writes the pickled task to the pipe (with slabs, the loader's main thread to a "
    "socket)",
    "multiprocessing.queues:_feed, arena.packets:put", "multiprocessing.queues:_feed", "3 §queue",
    words=("the index queue's feeder begins to write {what} for worker {worker}",
           "the index queue's feeder has written {what} for worker {worker}"),
    with_slabs=("the loader begins to write {what} to worker {worker}'s socket",
                "the loader has written {what} to worker {worker}'s socket"),
    legend="write", letter="W", way=True, seen="the index queue's pipe")  # fmt: skip

# --- A worker: receiving, fetching, collating, answering --------------------------------------------------------------
INDEX_GET = _span(
    20, "index_get", Track.WORKER, _WAIT, "task worker", ("", "message:Message count:indices"),
    "the worker waits at its index queue; the end has the message and its task",
    "loader.worker:run", "_utils.worker:_worker_loop", "1 §2.4.5", stage="idle",
    words=("worker {worker} waits at its index queue", "worker {worker} takes {got} from its index queue"),
    doing=("waiting for a task", "has taken task {task}"), letter=".", seen="a get")  # fmt: skip
FETCH = _span(
    22, "fetch", Track.WORKER, "#11c7b8", "task worker", ("count:samples", "outcome:Outcome cpu:ns? cpu_wait:ns?"),
    "the fetcher makes the task's batch: samples, then collation",
    ("loader.worker:work, loader.iterators:_next_data", "loader.worker:work, loader.iterators:__next__"),
    "_utils.fetch:fetch", "1 §2.3.4", stage="fetch",
    words=("{who} begins to fetch task {task}: {samples}", "{who} has fetched task {task}: {outcome}"),
    doing="fetching task {task}", letter="F", way=True,
    seen="from the worker's look at the done event, which follows the get, to its put")  # fmt: skip
SAMPLE = _span(
    24, "sample", Track.WORKER, "#207528", "task worker", ("position index", "position index cpu:ns?"),
    "the fetcher requests one sample of the dataset; index is -1 if the key is not an integer",
    ("data.fetch:_samples", "data.fetch:fetch, loader.worker:work, loader.iterators:__next__"),
    "_utils.fetch:fetch", "1 §2.3.4", stage="sample", detail=True,
    words=("{who} asks the dataset for {sample} of task {task}", "{who} has {sample} of task {task}"),
    letter="S", seen="the indices of the task, as torch's fetcher goes through them one by one")  # fmt: skip
SAMPLE_INDEX = _instant(
    29, "sample_index", Track.WORKER, _GREEN, "task worker", "position index",
    "an index of a task whose samples have no event each: the dataset is asked for all at once, by __getitems__ or by "
    "an index that is a list; index is -1 if the key is not an integer",
    "data.fetch:fetch", "_utils.fetch:fetch", "1 §2.3.4", detail=True,
    words="task {task} has sample {index} at position {position}", seen="the task that a worker has got")  # fmt: skip
COLLATE = _span(
    26, "collate", Track.WORKER, "#f6d967", "task worker", ("count:samples", "cpu:ns?"),
    "collate_fn joins the samples into a batch",
    ("data.fetch:fetch", "loader.worker:work, loader.iterators:__next__"), "_utils.collate:collate", "4 §collate",
    stage="collate",
    words=("{who} begins to collate task {task}", "{who} has collated task {task}"),
    doing="collating task {task}", letter="C",
    seen="collate_fn is looked up, to the worker's put; its samples are counted by the task's indices")  # fmt: skip
SHM_ALLOC = _instant(
    28, "shm_alloc", Track.WORKER, _PINK, "task worker", "bytes:B place:Place reason:Reason",
    "a shared-memory segment was made for the batch to be written into",
    "data.collate:new_shared", "_utils.collate:collate_tensor_fn", "3 §collate; 4 §collate",
    words="worker {worker} makes {bytes} of shared memory for task {task}",
    seen="torch makes a shared storage in the worker")  # fmt: skip
SHM_COPY = _span(
    30, "shm_copy", Track.FEEDER, "#f18f31", "task worker", ("bytes:B place:Place reason:Reason", "bytes:B cpu:ns?"),
    "a tensor's storage is copied into a new shared-memory segment while it is pickled",
    "wire.tensors:copy_storage", "multiprocessing.reductions:reduce_storage", "3 §storage", stage="copy",
    words=("worker {worker}'s feeder begins to copy {bytes} of task {task} into shared memory",
           "worker {worker}'s feeder has copied {bytes} of task {task} into shared memory"),
    with_slabs=("worker {worker} begins to copy {bytes} of task {task} into a segment of their own",
                "worker {worker} has copied {bytes} of task {task} into a segment of their own"),
    doing="copying task {task} to shared memory", letter="M",
    seen="torch shares a storage in the worker's feeder thread")  # fmt: skip
RESULT_PUT = _instant(
    32, "result_put", Track.WORKER, _GREEN, "task worker", "outcome:Outcome",
    "the task's result is about to enter the result queue (enqueued: the feeder thread has not pickled it yet)",
    "loader.worker:work", "_utils.worker:_worker_loop", "1 §2.4.5",
    words="worker {worker} puts the result of task {task} into the result queue: {outcome}",
    doing="has answered task {task}", seen="a put")  # fmt: skip
RESULT_PICKLE = _span(
    34, "result_pickle", Track.FEEDER, "#8e6ca8", "task worker", ("", "bytes:B tensors copied:B"),
    "the feeder thread pickles the result; tensors go by descriptor, copied is what had to be moved to shared memory "
    "(with slabs, the worker's main thread pickles, and tensors go in slabs: see slab_send)",
    "wire.message:__reduce__", "multiprocessing.queues:_feed", "3 §tensor, §summary", stage="pickle",
    words=("worker {worker}'s feeder begins to pickle task {task}'s result",
           "worker {worker}'s feeder has pickled task {task}'s result: {bytes}"),
    with_slabs=("worker {worker} begins to pickle task {task}'s result",
                "worker {worker} has pickled task {task}'s result: {bytes}"),
    doing="pickling task {task}", letter="P", way=True, seen="the message is pickled")  # fmt: skip
RESULT_WRITE = _span(
    36, "result_write", Track.FEEDER, "#15535b", "task worker", ("bytes:B pickle_cpu:ns?", "bytes:B cpu:ns?"),
    "the feeder thread writes the pickled result to the pipe that all workers share (with slabs, the worker's main "
    "thread to the socket that they share)",
    "multiprocessing.queues:_feed, arena.arena_queue:put", "multiprocessing.queues:_feed", "3 §queue",
    stage="write",
    words=("a feeder begins to write {what} ({bytes}) to the result pipe",
           "a feeder has written {what} ({bytes}) to the result pipe"),
    with_slabs=("worker {worker} begins to write {what} ({bytes}) to its socket",
                "worker {worker} has written {what} ({bytes}) to its socket"),
    doing="writing task {task} to the pipe", letter="W", way=True, seen="the result queue's pipe")  # fmt: skip

# --- The reading side: the pin thread or the loader's thread ----------------------------------------------------------
RESULT_GET = _span(
    40, "result_get", Track.LOADER, _WAIT, "task worker",
    ("timeout:ns", "message:Message outcome:Outcome rebuild_wait:ns?"),
    "a thread waits for a result; the begin has the worker and task that the loader needs next, -1 for the pin thread",
    "loader.iterators:_try_get_data, loader.pin_memory:_pin_memory_loop", "dataloader:_try_get_data", "1 §2.4.7",
    stage="wait",
    words=("{reader} waits at the result queue", "{reader} takes {got} from the result queue"),
    letter="-", seen="a get")  # fmt: skip
RESULT_READ = _instant(
    42, "result_read", Track.LOADER, _OLIVE, "", "bytes:B",
    "a whole message has been read from the result pipe, and is not rebuilt yet",
    "wire.queues:get, arena.arena_queue:get", "multiprocessing.queues:get", "3 §queue",
    words="a message of {bytes} has been read from the result pipe",
    with_slabs="{reader} has read a message ({bytes}) from a worker's socket",
    seen="the result queue's pipe")  # fmt: skip
RESULT_REBUILD = _span(
    44, "result_rebuild", Track.LOADER, "#a9468d", "task worker", ("bytes:B", "tensors shared:B cpu:ns?"),
    "the message is unpickled: descriptors are received, segments mapped, tensors rebuilt",
    "wire.message:load_result", "multiprocessing.reductions:rebuild_storage_fd", "3 §tensor, §storage",
    stage="rebuild",
    words=("task {task}'s result is being rebuilt",
           "task {task}'s result is rebuilt: {in_tensors}, {shared} of shared memory"),
    doing="rebuilding task {task}", letter="R", way=True, seen="the message is unpickled")  # fmt: skip
PIN = _span(
    46, "pin", Track.PIN, "#b790dc", "task worker", ("bytes:B simulated", "bytes:B simulated cpu:ns?"),
    "the batch is copied into page-locked memory",
    "loader.pin_memory:_pinned", "_utils.pin_memory:_pin_memory_loop", "1 §2.4.6", stage="pin",
    words=("the pin thread begins to pin task {task}", "the pin thread has pinned task {task}"),
    doing="pinning task {task}", letter="L", way=True, seen="from the get of torch's thread to its put")  # fmt: skip
READY_PUT = _instant(
    48, "ready_put", Track.PIN, _VIOLET, "task worker", "outcome:Outcome",
    "the pinned batch is about to enter the queue that the loader reads",
    "loader.pin_memory:_pin_memory_loop", "_utils.pin_memory:_pin_memory_loop", "1 §2.4.6",
    words="the pin thread puts task {task} into the ready queue", seen="a put")  # fmt: skip
READY_GET = _span(
    50, "ready_get", Track.LOADER, _WAIT, "task worker", ("timeout:ns", "message:Message outcome:Outcome"),
    "the loader waits for a pinned batch; worker and task of the begin are those that it needs next",
    "loader.iterators:_try_get_data", "dataloader:_try_get_data", "1 §2.4.7", stage="wait",
    words=("the loader waits for a pinned batch", "the loader takes {got} from the ready queue"),
    letter="-", way=True, seen="a get")  # fmt: skip
REORDER_STORE = _instant(
    52, "reorder_store", Track.LOADER, _BLUE, "task worker", "rcvd_idx depth:batches",
    "the batch came before its turn and is kept in the reorder buffer",
    "loader.dispatcher:receive", "dataloader:_next_data", "1 §2.4.7; 4 §iterator",
    words="task {task} came before its turn: it goes into the reorder buffer",
    derived="the result that came is not the one whose turn it is")  # fmt: skip
REORDER_POP = _instant(
    53, "reorder_pop", Track.LOADER, _BLUE, "task worker", "rcvd_idx depth:batches",
    "the batch's turn has come and it leaves the reorder buffer",
    "loader.dispatcher:next_step", "dataloader:_next_data", "1 §2.4.7; 4 §iterator",
    words="task {task}'s turn has come: it leaves the reorder buffer",
    derived="a batch that was kept is no longer kept when the sampler is asked next")  # fmt: skip
RCVD_ADVANCE = _instant(
    54, "rcvd_advance", Track.LOADER, _BLUE, "", "rcvd_idx outstanding:tasks",
    "rcvd_idx has moved on to the next task to be yielded",
    "loader.dispatcher:receive, loader.dispatcher:next_step", "dataloader:_next_data", "1 §2.4.7",
    words="rcvd_idx moves on to {rcvd_idx}", derived="the loader's own count, at its next call")  # fmt: skip
NEXT = _span(
    56, "next", Track.LOADER, _FRAME, "task", ("rcvd_idx", "yielded:batches outcome:Outcome"),
    "the time inside the iterator's __next__, in which the training loop waits",
    "loader.iterators:__next__", "dataloader:__next__", "1 §2.3.2",
    call=(Call.NEXT, Call.OWN),
    words=("the training loop asks for a batch", "next() returns: {outcome}"),
    letter="N", seen="a call of the iterator's _next_data")  # fmt: skip
YIELD = _instant(
    58, "yield", Track.LOADER, _GREEN, "task worker", "outcome:Outcome yielded:batches",
    "the task's batch (or its error) is handed to the consumer",
    "loader.iterators:__next__", "dataloader:_process_data", "1 §2.4.7",
    call=Call.OWN,
    words="task {task} is handed to the training loop: {outcome}",
    derived="_next_data returns, or raises the task's error")  # fmt: skip
CONSUMER = _span(
    60, "consumer", Track.CONSUMER, "#39c0f8", "task", ("yielded:batches sampled", "cpu:ns? cpu_wait:ns?"),
    "the user's own code between two calls of next: the training step. sampled: 1 = its parts are recorded",
    (
        "loader.iterators:__next__, loader.dataloader:_iterate",
        "loader.iterators:__next__, loader.dataloader:_iterate, loader.crew:shut_down",
    ),
    "", "1 §2.3", stage="consumer",
    call=(Call.OWN, None),
    words=("the training loop's own code runs", "the training loop's own code is done"),
    letter="T", derived="from the return of _next_data to its next call")  # fmt: skip

# --- Processes, threads, liveness -------------------------------------------------------------------------------------
WORKER_START = _span(
    70, "worker_start", Track.LOADER, "#b4b168", "worker", ("", "pid"),
    "the loader starts the worker's process",
    "loader.iterators:_start_workers", "dataloader:__init__", "1 §2.4.2", stage="start",
    call=Call.START,
    words=("the loader starts worker {worker}", "worker {worker} is started: pid {pid}"),
    doing="starting worker {worker}", letter="+", seen="the process is started")  # fmt: skip
WORKER_READY = _instant(
    72, "worker_ready", Track.WORKER, _GREY, "worker", "pid parent_pid seed",
    "the worker is seeded and initialised and enters its loop",
    "loader.worker:run", "_utils.worker:_worker_loop", "1 §2.4.5",
    words="worker {worker} is ready", doing="between two steps",
    seen="the worker's first get: torch has seeded and initialised it by then")  # fmt: skip
WORKER_EXIT = _instant(
    73, "worker_exit", Track.WORKER, _GREY, "worker", "ending:Ending",
    "the worker leaves its loop",
    "loader.worker:run", "_utils.worker:_worker_loop", "4 §shutdown",
    words="worker {worker} leaves its loop: {ending}", doing="has left its loop",
    derived="a worker that holds no task looks at the done event")  # fmt: skip
WORKER_GONE = _instant(
    74, "worker_gone", Track.LOADER, _SLATE, "worker", "pid exit_code",
    "the loader has seen that the worker's process has ended (a negative code is a signal)",
    "loader.crew:shut_down, loader.iterators:__next__", "dataloader:_shutdown_workers", "4 §shutdown",
    words="worker {worker}'s process is gone: exit code {exit_code}", doing="gone",
    seen="the exit code, where the loader looks at the process")  # fmt: skip
PIN_START = _instant(
    75, "pin_start", Track.PIN, _GREY, "", "simulated",
    "the pin-memory thread runs",
    "loader.pin_memory:_pin_memory_loop", "_utils.pin_memory:_pin_memory_loop", "1 §2.4.6",
    words="the pin thread runs", unseen="torch's thread")  # fmt: skip
PIN_EXIT = _instant(
    76, "pin_exit", Track.PIN, _GREY, "", "ending:Ending",
    "the pin-memory thread ends",
    "loader.pin_memory:_pin_memory_loop", "_utils.pin_memory:_pin_memory_loop", "4 §shutdown",
    words="the pin thread ends: {ending}", unseen="torch's thread")  # fmt: skip
RESUME_PUT = _instant(
    78, "resume_put", Track.LOADER, _BLUE, "worker", "epoch",
    "a persistent worker is told that a new epoch begins",
    "loader.iterators:_reset", "dataloader:_reset", "1 §2.4.3",
    call=Call.START,
    words="a message that epoch {epoch} begins is put into worker {worker}'s index queue", seen="a put")  # fmt: skip
RESUME_ACK = _instant(
    79, "resume_ack", Track.WORKER, _BLUE, "worker", "epoch",
    "the worker has dropped its old fetcher and acknowledges the new epoch",
    "loader.worker:resume", "_utils.worker:_worker_loop", "1 §2.4.5",
    words="worker {worker} acknowledges epoch {epoch}", seen="a put")  # fmt: skip
WORKER_EXHAUSTED = _instant(
    80, "worker_exhausted", Track.LOADER, _BLUE, "task worker", "still_active:workers",
    "the loader learns that the worker's iterable dataset has ended",
    "loader.dispatcher:exhausted", "dataloader:_next_data", "1 §2.4.7; 4 §shutdown",
    words="the loader learns that worker {worker}'s dataset has ended",
    derived="what came out of the result queue")  # fmt: skip
LIVENESS_CHECK = _instant(
    81, "liveness_check", Track.LOADER, _SLATE, "", "alive:workers",
    "no message has come, or it can't be rebuilt: the loader has checked that the pin thread and all workers with work "
    "are alive, and goes on waiting",
    "loader.liveness:evidence_of", "dataloader:_try_get_data", "4 §shutdown",
    words="the loader checks the other actors: {alive} workers with work are alive",
    derived="is_alive() says yes of all that have work after a get that brought nothing")  # fmt: skip
FOUND_DEAD = _instant(
    82, "found_dead", Track.LOADER, _RED, "worker", "actor:Actor pid exit_code",
    "a liveness check found a dead actor: a worker, the pin thread, or (in a worker) the loader's process",
    "loader.liveness:note_death, loader.worker:run", "dataloader:_try_get_data", "4 §shutdown",
    words="{actor} {worker} is found dead: exit code {exit_code}",
    derived="is_alive() says no after a get that brought nothing")  # fmt: skip
TIMED_OUT = _instant(
    83, "timed_out", Track.LOADER, _RED, "task worker", "waited:ns",
    "the loader's timeout has passed while it waited for this worker's task",
    "loader.liveness:_timed_out", "dataloader:_get_data", "1 §2.4.7",
    words="the loader's timeout has passed while it waited for task {task} of worker {worker}",
    derived="is_alive() says yes of all after a get that took the loader's whole timeout")  # fmt: skip
TASK_ERROR = _instant(
    84, "task_error", Track.WORKER, _RED, "task worker", "position index text:string",
    "the task has failed, or its batch could not be sent or rebuilt; text is the error's last line",
    "loader.worker:work, wire.message:instead_of, wire.message:load_result",
    "_utils.worker:_worker_loop", "1 §2.4.5; 3 §queue",
    words="task {task} has failed in worker {worker}: {text}",
    seen="what is put, or a message that can't be pickled")  # fmt: skip
WORKER_INIT = _span(
    86, "worker_init", Track.WORKER, "#7878e1", "worker", ("", "cpu:ns?"),
    "the worker, which is seeded, calls the user's worker_init_fn",
    ("loader.worker:initialise", "loader.worker:make_fetcher, loader.worker:run"),
    "_utils.worker:_worker_loop", "1 §2.4.5",
    stage="init",
    words=("worker {worker} calls worker_init_fn", "worker {worker} is done with worker_init_fn"),
    doing="in worker_init_fn", letter="B",
    seen="worker_init_fn is looked up, to the making of the fetcher or the worker's next get")  # fmt: skip
MAKE_FETCHER = _span(
    88, "make_fetcher", Track.WORKER, "#6b385f", "worker", ("", "cpu:ns?"),
    "the worker makes its fetcher for an epoch, which calls __iter__ of an iterable dataset",
    ("loader.worker:make_fetcher", "loader.worker:run, loader.worker:resume"), "dataloader:create_fetcher", "1 §2.4.5",
    stage="fetcher",
    words=("worker {worker} begins to make its fetcher (an iterable dataset's __iter__)",
           "worker {worker} is done with making its fetcher"),
    doing="making its fetcher (an iterable dataset's __iter__)", letter="O",
    seen="create_fetcher is looked up, to the worker's next get")  # fmt: skip

# --- Shutdown ---------------------------------------------------------------------------------------------------------
SHUTDOWN = _span(
    90, "shutdown", Track.LOADER, "#4c5054", "", ("", "still_alive:workers"),
    "the whole shutdown, as the loader runs it",
    "loader.crew:shut_down", "dataloader:_shutdown_workers", "4 §shutdown", stage="shutdown",
    call=(Call.SHUTDOWN, Call.OWN),
    words=("the shutdown begins", "the shutdown is over: {survivors} still alive"),
    letter="X", derived="from the first done event to the last worker's end")  # fmt: skip
DONE_EVENT_SET = _instant(
    92, "done_event_set", Track.LOADER, _SLATE, "", "which:DoneEvent",
    "a done event is about to be set: from here on, actors skip messages in flight",
    "loader.crew:perform", "dataloader:_shutdown_workers", "4 §shutdown",
    words="the done event of the {which} is set", seen="a call of set()")  # fmt: skip
DONE_EVENT_SEEN = _instant(
    93, "done_event_seen", Track.WORKER, _SLATE, "task worker", "which:DoneEvent",
    "a task was skipped because the done event is set",
    "loader.worker:run", "_utils.worker:_worker_loop", "4 §shutdown",
    words="worker {worker} skips task {task}: the done event is set",
    derived="a worker that holds a task looks at the done event, which is set")  # fmt: skip
SENTINEL_PUT = _instant(
    94, "sentinel_put", Track.LOADER, _SLATE, "worker", "queue:QueueId",
    "the final signal is about to enter a queue",
    "loader.crew:_mark_worker_as_unavailable, loader.crew:_wake_pin",
    "dataloader:_mark_worker_as_unavailable", "4 §shutdown",
    words="a sentinel is put into {whose} queue", seen="a put")  # fmt: skip
SENTINEL_GET = _instant(
    95, "sentinel_get", Track.WORKER, _SLATE, "worker", "queue:QueueId",
    "the final signal has been received",
    "loader.worker:run, loader.pin_memory:_pin_memory_loop", "_utils.worker:_worker_loop", "4 §shutdown",
    words="a sentinel has come out of {whose} queue", seen="a get")  # fmt: skip
JOIN = _span(
    96, "join", Track.LOADER, _WAIT, "worker", ("actor:Actor timeout:ns", "actor:Actor ended"),
    "the loader waits, for a bounded time, for a worker or the pin thread to end",
    "loader.crew:perform, loader.liveness:wait_for_a_dying_worker",
    "dataloader:_shutdown_workers", "4 §shutdown",
    words=("the loader begins to wait for {actor} {worker} to end",
           "the loader has waited for {actor} {worker} to end"),
    letter="J", seen="a call of join()")  # fmt: skip
CANCEL_JOIN_THREAD = _instant(
    98, "cancel_join_thread", Track.LOADER, _SLATE, "worker", "queue:QueueId",
    "this process will not wait for the queue's feeder thread when it exits",
    "loader.crew:_close, loader.iterators:_start_workers, loader.worker:_worker_loop",
    "dataloader:_shutdown_workers", "4 §shutdown",
    words="the process will not wait for the feeder of {whose} queue", seen="a call")  # fmt: skip
QUEUE_CLOSE = _instant(
    99, "queue_close", Track.LOADER, _SLATE, "worker", "queue:QueueId",
    "this process closes its ends of the queue",
    "loader.crew:_close, loader.worker:_worker_loop", "dataloader:_shutdown_workers", "4 §shutdown",
    words="{whose} queue is closed on one side", seen="a call")  # fmt: skip
TERMINATE = _instant(
    100, "terminate", Track.LOADER, _RED, "worker", "pid signal",
    "a worker that did not end by itself is sent a signal",
    "loader.crew:_terminate", "dataloader:_shutdown_workers", "4 §shutdown",
    words="worker {worker} is sent signal {signal}", seen="a call of terminate()")  # fmt: skip

WORKERS_CHOSEN = _instant(
    144, "workers_chosen", Track.LOADER, _VIOLET, "", "workers before text:string",
    'with num_workers="auto": the loader has chosen its number of workers, for the next epoch or the rest of this one; '
    "text is the reason",
    "auto.loading:tell", "", "",
    words="the loader chooses {workers} in place of {before}: {text}",
    marker="P", unseen="torch's loader does not choose")  # fmt: skip

# --- The device stage -------------------------------------------------------------------------------------------------
H2D = _span(
    110, "h2d", Track.CONSUMER, "#b17e41", "task", ("pinned:B pageable:B tensors", "depth:batches turn simulated"),
    "the host enqueues a batch's copies to the device, from so much pinned and so much pageable memory; the end says "
    "how many batches are enqueued and not handed out, and the number by which the device's own events know this one",
    "device.loader:_enqueue", "", "2 §1.4", stage="h2d",
    letter="E", way=True)  # fmt: skip
COPY = _span(
    112, "copy", Track.DEVICE, "#f6bf81", "task", ("bytes:B stream simulated", "bytes:B turn simulated"),
    "the batch's copies on the side stream, by the device's clock",
    "device.streams:copy", "", "2 §1.4", stage="device copy",
    letter="H", way=True)  # fmt: skip
TRANSFORM = _span(
    114, "transform", Track.DEVICE, "#3f65a9", "task", ("turn simulated", "turn simulated"),
    "the batch's transform on the side stream, by the device's clock",
    "device.streams:transform", "", "2 §1.4", stage="transform",
    letter="A", way=True)  # fmt: skip
DEVICE_WAIT = _span(
    116, "device_wait", Track.DEVICE, _WAIT, "task", ("turn simulated", "turn simulated"),
    "the consumer's stream stands still until the batch is ready: copy time that nothing hides, by the device's clock",
    "device.streams:hand_over", "", "2 §1.4", stage="device wait",
    letter="-", way=True)  # fmt: skip
COMPUTE = _span(
    118, "compute", Track.CONSUMER, "#045c44", "task", ("text:string", "text:string"),
    "what the user has marked with minidl.span; task is that of the batch handed out last",
    ("record.spans:__enter__", "record.spans:__exit__"), "", "2 §1.2", stage="compute",
    letter="U")  # fmt: skip
DEVICE_COMPUTE = _span(
    120, "device_compute", Track.DEVICE, "#069d7b", "task", ("text:string simulated", "text:string simulated"),
    "the same in the consumer's stream, by the device's clock",
    ("record.spans:__enter__", "record.spans:__exit__"), "", "2 §1.2", stage="device compute",
    letter="U")  # fmt: skip
HOST_WAIT = _span(
    122, "host_wait", Track.CONSUMER, _WAIT, "", ("simulated", "simulated"),
    "the host waits because the device is too many batches behind: this bounds the device's memory",
    "device.loader:_retire", "", "2 §1.4", stage="host wait",
    letter="-")  # fmt: skip
HAND_OVER = _instant(
    124, "hand_over", Track.CONSUMER, _GREEN, "task", "outcome:Outcome depth:batches simulated",
    "the batch (or its error) leaves the device stage: the consumer's stream has been told to wait for it",
    "device.loader:_hand_over", "", "2 §1.4")  # fmt: skip
DEVICE_START = _instant(
    125, "device_start", Track.CONSUMER, _GREY, "", "prefetch:batches stream simulated",
    "an iteration of the device stage begins",
    "device.loader:__init__", "", "2 §1.4")  # fmt: skip
DEVICE_END = _instant(
    126, "device_end", Track.CONSUMER, _GREY, "", "handed_out:batches dropped:batches simulated",
    "the iteration has ended; dropped: batches that were enqueued and not handed out",
    "device.loader:_end", "", "2 §1.4")  # fmt: skip
CLOCK_CALIBRATION = _instant(
    127, "clock_calibration", Track.DEVICE, _GREY, "", "reference:ns error:ns drift:ns",
    "a mark of the device was bracketed by the host's clock: it lay at `reference`, give or take `error`; drift: how "
    "far the two clocks have gone apart since the last one",
    "record.device_clock:calibrate", "", "")  # fmt: skip

# --- A loader's state -------------------------------------------------------------------------------------------------
RESUMED = _instant(
    140, "resumed", Track.LOADER, _VIOLET, "", "yielded:batches turn behind:batches",
    "the epoch goes on where another loader's was left: batches yielded there, the worker whose turn is first, batches "
    "that the workers fetch again and drop",
    "loader.iterators:_reset, loader.iterators:__init__", "", "4 §iterator",
    words="the epoch is resumed after {batches}; worker {turn} comes first; {behind} are fetched again",
    marker=">",
    derived="the loader, torchdata's, counts batches at the first draw, and knows whose the last was")  # fmt: skip
STATE_PUT = _instant(
    141, "state_put", Track.WORKER, _VIOLET, "task worker", "bytes:B number",
    "the state of the worker's dataset goes with the task's result; number: the worker's results in this epoch so far",
    "loader.worker:work", "", "4 §iterator",
    words="worker {worker} sends its state ({bytes}) along with task {task}",
    marker="D", unseen="torch's loader has no state")  # fmt: skip
STATE_KEPT = _instant(
    142, "state_kept", Track.LOADER, _VIOLET, "task worker", "number",
    "the batch that this state came with is yielded: from here on it is the worker's state",
    "resume.position:_catch_up", "", "4 §iterator",
    words="task {task} is yielded: the state that came with it counts from here on",
    marker="o", unseen="torch's loader has no state")  # fmt: skip
STATE_TAKEN = _instant(
    143, "state_taken", Track.LOADER, _VIOLET, "", "yielded:batches deferred:batches ended",
    "the program asks for the loader's state; deferred: batches that a device stage has and its consumer has not",
    "resume.stateful:saved", "", "4 §iterator",
    words="the program takes the loader's state: {batches}",
    marker="s", unseen="torch's loader has no state")  # fmt: skip

# --- Slabs: the transport "arena" -------------------------------------------------------------------------------------
SLAB_TAKE = _instant(
    150, "slab_take", Track.WORKER, _PINK, "task worker", "slab bytes:B source:SlabSource",
    "the worker takes a slab for the batch that it makes; slab: its number, which is the worker's own",
    "arena.arena:_take", "", "3 §storage",
    words="worker {worker} takes slab {slab} ({bytes}, {source}) for task {task}",
    seen="with transport='arena': the arena takes a slab")  # fmt: skip
SLAB_SEND = _instant(
    151, "slab_send", Track.WORKER, _GREEN, "task worker", "slab bytes:B copied:B",
    "the slab is filled, and the message that names it is about to be written; bytes: filled; copied: of these, what "
    "was not collated straight into it",
    "arena.arena:seal", "", "3 §storage",
    words="worker {worker} has filled {bytes} of slab {slab} for task {task}, and sends it",
    seen="with transport='arena': the worker's write")  # fmt: skip
SLAB_FALLBACK = _instant(
    152, "slab_fallback", Track.WORKER, _OLIVE, "task worker", "leaves bytes:B",
    "parts of the batch that travel in a segment each and by descriptor, as in torch, instead of in a slab",
    "arena.arena:seal", "", "3 §storage",
    words="{leaves} parts of task {task} ({bytes}) travel in a segment each instead of a slab",
    seen="with transport='arena': the worker's write, if leaves of the batch are in no slab")  # fmt: skip
SLAB_MAP = _instant(
    153, "slab_map", Track.LOADER, _OLIVE, "task worker", "slab bytes:B new",
    "the reader has the memory of a message's slab; new: mapped for this message, else since an earlier one",
    "arena.arena_queue:_rebuilt", "", "3 §storage",
    words="{reader} has slab {slab} of worker {worker} in its memory, with task {task}'s batch",
    seen="with transport='arena': the reader's get")  # fmt: skip
SLAB_RELEASE = _instant(
    154, "slab_release", Track.LOADER, _PINK, "task worker", "slab bytes:B ending:SlabEnd",
    "nothing in the reader's process refers to the slab's batch any more: the worker may write into it",
    "arena.arena:_set, record.slabs:_gone", "", "3 §storage",
    words="nothing in the reader's process refers to slab {slab} of worker {worker} any more: {ending}",
    seen="with transport='arena': the last view of a batch is gone")  # fmt: skip
SLAB_LOCK = _instant(
    155, "slab_lock", Track.LOADER, _OLIVE, "worker", "bytes:B took:ns simulated",
    "a new slab was page-locked, so that a device copies from it by itself; bytes: 0 if that failed",
    "arena.arena:map", "", "3 §storage",
    words="{reader} {locked} a new slab of worker {worker} for a device",
    unseen="slabs are locked for minidl's loader alone")  # fmt: skip

# --- The interpreter --------------------------------------------------------------------------------------------------
GC = _span(
    160, "gc", Track.LOADER, "#322e01", "worker", ("generation", "generation collected:objects"),
    "the garbage collector stops its thread for a millisecond or more, and with it all that need the GIL; recorded "
    "afterwards, with the times that it had",
    "record.recorder:emit_pauses", "", "",
    words=("the garbage collector begins a collection of generation {generation}",
           "the garbage collector has collected {collected} objects of generation {generation}"),
    doing="in the garbage collector", letter="G")  # fmt: skip

# --- The consumer's step, by torch's own functions (see `record.step_parts`) ------------------------------------------
FORWARD = _span(
    170, "forward", Track.CONSUMER, "#b5f78c", "task", ("text:string", ""),
    "the consumer calls a module (text: its class), with gradients on; what it calls in turn is part of that. Like all "
    "of a step, it is the host's time: a device may work on it later",
    "record.step_parts:_part", "", "", stage="forward",
    words=("the training loop calls {text}", "the module returns"),
    letter="f")  # fmt: skip
EVALUATE = _span(
    172, "evaluate", Track.CONSUMER, "#b5f78c", "task", ("text:string", ""),
    "the consumer calls a module with gradients off (no_grad, inference_mode): validation or prediction",
    "record.step_parts:_part", "", "", stage="evaluation",
    words=("the training loop calls {text} without gradients", "the module without gradients returns"),
    legend="forward", letter="f")  # fmt: skip
BACKWARD = _span(
    174, "backward", Track.CONSUMER, "#775cc2", "task", ("", ""),
    "autograd computes gradients; with DistributedDataParallel, the ranks' gradients are reduced in it",
    "record.step_parts:_part", "", "", stage="backward",
    words=("backward begins", "backward ends"),
    letter="b")  # fmt: skip
OPTIMIZER = _span(
    176, "optimizer", Track.CONSUMER, "#472803", "task", ("text:string", ""),
    "the optimizer's step (text: its class), without the closure that it may call",
    "record.step_parts:_part, record.step_parts:alone", "", "", stage="optimizer",
    words=("the step of {text} begins", "the optimizer's step ends"),
    letter="o")  # fmt: skip
TO_DEVICE = _span(
    178, "to_device", Track.CONSUMER, "#b17e41", "task", ("bytes:B pinned", ""),
    "the consumer copies a tensor of the host to a device, by to() or cuda(); the host waits if it is pageable",
    "record.step_parts:_part", "", "", stage="h2d",
    words=("the training loop begins to copy {bytes} to a device", "the copy is done, or enqueued"),
    letter="E")  # fmt: skip
COLLECTIVE = _span(
    180, "collective", Track.CONSUMER, _WAIT, "task", ("text:string seq bytes:B", ""),
    "the consumer calls a function of torch.distributed (text: its name), which waits for other ranks; seq numbers "
    "this process's calls. Those of other parts, as backward's, have no span of their own",
    "record.step_parts:_part", "", "", stage="collective",
    words=("the training loop calls {text} (call {seq})", "the collective returns"),
    letter="-")  # fmt: skip
SAVE = _span(
    182, "save", Track.CONSUMER, "#0f0536", "task", ("text:string", ""),
    "the consumer writes a checkpoint (text: the function that does)",
    "record.step_parts:_part", "", "", stage="checkpoint",
    words=("{text} begins", "the checkpoint is written"),
    letter="k")  # fmt: skip
DEVICE_PART = _span(
    186, "device_part", Track.DEVICE, "#069d7b", "task",
    ("text:string behind:ns simulated", "text:string behind:ns simulated"),
    "a part of a training step (text: which) in the consumer's stream, by the device's clock; behind: how long after "
    "the host the device is there",
    "record.step_parts:_part", "", "", stage="device part",
    words=("the device begins with {text}, {behind} after the host", "the device ends {text}, {behind} after the host"),
    legend="device compute", letter="d")  # fmt: skip
VALIDATION = _span(
    184, "validation", Track.CONSUMER, _FRAME, "task", ("", ""),
    "all modules that the loop trains are in evaluation mode: from eval() to train(), if no checkpoint after an "
    "evaluation, backward pass, next batch or next epoch of that loop comes before",
    ("record.step_parts:_begin_validation", "record.step_parts:end_validation"), "", "", stage="validation",
    words=("the model is put into evaluation mode", "the validation ends"),
    letter="v")  # fmt: skip

# --- Several ranks ----------------------------------------------------------------------------------------------------
SHARE = _instant(
    130, "share", Track.LOADER, _BLUE, "", "epoch replica replicas",
    "a sampler that deals out shares is about to be iterated: its epoch, its share, the number of shares",
    "loader.iterators:__init__, loader.iterators:_reset", "dataloader:_reset", "2 §3.2, §3.3",
    words="the sampler has epoch {epoch}, and gives rank {replica} of {replicas} its share",
    derived="the sampler's own numbers at the first draw of an epoch")  # fmt: skip

# --- Sets of codes ----------------------------------------------------------------------------------------------------
BEGINS: Final = codes_where(lambda event: event.phase is Phase.BEGIN)
ENDS: Final = codes_where(lambda event: event.phase is Phase.END)

AWAITS: Final = codes_where(lambda event: event.phase is Phase.BEGIN and event.stage == "wait")
"""The loader, or its pin thread, waits for a result or for a pinned batch."""

CAME: Final = codes_where(lambda event: event.phase is Phase.END and event.stage == "wait")
"""Such a wait ends, with a message or without."""

POLLS: Final = codes_where(lambda event: event.phase is Phase.BEGIN and event.stage in ("wait", "idle"))
"""A wait that ends with nothing now and then, and begins again."""

PARTS: Final = (FORWARD, EVALUATE, BACKWARD, OPTIMIZER, TO_DEVICE, COLLECTIVE, SAVE)
"""The parts of a training step, which never lie in each other."""

ALWAYS_PARTS: Final = (EVALUATE, COLLECTIVE, SAVE)
"""The parts that are recorded in each step, and not only in sampled ones: few steps have them, and may be long."""

LATE: Final = (SLAB_RELEASE, *GC)
"""Emitted in the middle of other steps, or after them: their place among their thread's events says nothing."""

POLLED: Final = codes_where(lambda event: event.phase is Phase.END and event.stage in ("wait", "idle"))

DEATHS: Final = (WORKER_GONE, FOUND_DEAD)
"""An actor's process, or the pin thread, has ended: see `death_of`."""

CALLS: Final = {code: event.call for code, event in EVENTS.items() if event.call is not None}
"""The call of its iterator that a program is in, by the latest of these events."""


def death_of(row: Any) -> tuple[int, int]:
    """Return the pid and the exit code that one of DEATHS tells: each has them in fields of its own."""
    return (int(row["y"]), int(row["z"])) if row["code"] == FOUND_DEAD else (int(row["x"]), int(row["y"]))
