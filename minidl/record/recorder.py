"""Recorder: each event is in a file before the next statement runs, so that a trace survives its process.

Interface: `create(directory)` begins a trace, `start(config)` makes this process's `Recorder`, `active()` and `stop()`
find and end it. A process writes two files into the trace's directory: `<pid>-<ns>.events`, a header page and then one
64-byte slot an event, memory-mapped; and `<pid>-<ns>.meta.jsonl`, a line of JSON for each description. Those of
workers that have ended are folded when they are many (`tracefile.folded`).

Rules of use: `emit` may be called from any thread, from a signal handler, after a fork and while the interpreter exits.
It raises no error of its own, and takes no lock: a slot is taken from an iterator whose step is
atomic, and growing the file twice has the effect of growing it once. A file is allocated before it is mapped, since
writing to a mapped page that the disk has no room for is a bus error. If a file cannot be made or grown, this process
stops recording, reports that once on stderr, and counts the lost events in the file's header.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import json
import mmap
import os
import platform
import secrets
import socket
import struct
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from minidl.process_stat import LAUNCHERS, boot_id, launched
from minidl.record.bracketing import bracketed
from minidl.record.pauses import Pauses
from minidl.tracefile.events import EVENTS, GC
from minidl.tracefile.format import (
    EVENTS_SUFFIX,
    FORMAT_VERSION,
    HEADER,
    HEADER_BYTES,
    LOADERS,
    MAGIC,
    MANIFEST,
    PACK,
    SIDE_SUFFIX,
    SLOT_BYTES,
    STATE,
    STATE_AT,
    TraceError,
    stem_of,
)
from minidl.usable import usable_cpus
from minidl.wire.atomic import Step, at_once

FIRST_SLOTS = 1024  # a process with few events takes 64 KiB of disk
RING_BYTES = 64 << 20
"""Default limit of a process's file: a million events, some 20,000 to 60,000 batches."""

GROW_SLOTS = 16384  # 1 MiB: the cost of growth is paid once in 16384 events
_RESERVE = 2  # descriptors that are kept: a map has one of its own beside that of the file it is made from
_UNFIT = (struct.error, AttributeError, TypeError, ValueError)  # no slot there, no thread id yet, or values too wide


_T = TypeVar("_T")


@dataclass(frozen=True)
class TraceConfig:
    """Where and how to record; pickled to spawned workers.

    directory is made absolute, so that a later change of directory changes nothing. detail "batch" leaves out the
    events that the table marks as detail. ring_bytes limits each process's file: the newest events are kept (rounded
    down to a power of two of slots, at least `FIRST_SLOTS`); None keeps everything. functions_min_us: in workers, also
    record the functions that take so many microseconds or more (see `functions`); None records none. cpu_time: how
    spans carry their thread's CPU time (see `cpu_time.choose`). hang_after, on_hang, hang_stacks: of the trace's
    watchdog; after how many seconds it calls a wait a hang, 0 = there is none (see `watchdog`).
    """

    directory: str
    detail: str = "sample"
    ring_bytes: int | None = RING_BYTES
    functions_min_us: float | None = None
    cpu_time: int = 0
    hang_after: float = 0.0
    on_hang: str = "report"
    hang_stacks: bool = True

    def __post_init__(self) -> None:
        if self.detail not in ("sample", "batch"):
            raise ValueError(f"TraceConfig: detail is 'sample' or 'batch', not {self.detail!r}")
        object.__setattr__(self, "directory", os.path.abspath(self.directory))

    @property
    def ring_slots(self) -> int:
        """Slots that a process's file may have; 0 = no limit."""
        if self.ring_bytes is None:
            return 0
        return int(max(FIRST_SLOTS, 1 << max(0, (self.ring_bytes // SLOT_BYTES).bit_length() - 1)))


Map = Any
"""A mapped file of slots, or an empty bytearray while there is none."""


def _places(ring: int) -> Any:
    """Return a function that returns (sequence number from 1, its slot's place in the file). It is atomic: C code."""
    if not ring:
        return zip(itertools.count(1), itertools.count(HEADER_BYTES, SLOT_BYTES)).__next__
    rounds = itertools.repeat(range(HEADER_BYTES, HEADER_BYTES + ring * SLOT_BYTES, SLOT_BYTES))
    return zip(itertools.count(1), itertools.chain.from_iterable(rounds)).__next__


Emit = Callable[..., None]
"""`emit(code, task=-1, worker=-1, x=0, y=0, z=0)` records one event of one loader."""


def _emitters(
    emit_slowly: Callable[..., None], lose: Callable[[int], None], left_out: frozenset[int]
) -> tuple[Callable[[int], Emit], Callable[..., None]]:
    """Return a function that makes the `emit` of a loader, and one that sets the place that they all write to.

    Everything that `emit` needs is in its closure: that is a quarter faster than attributes, and it still works at the
    interpreter's exit, when this module's names are gone.
    """
    slots: Map = bytearray()
    place: Any = None
    local: Any = None
    pack, now, unfit = PACK.pack_into, time.monotonic_ns, _UNFIT

    def emitter(loader: int) -> Emit:
        def emit(code: int, task: int = -1, worker: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
            """Record one event, stamped now. Arguments are those of the table's row; unused ones keep their defaults.

            Only the exceptions that the slot itself can raise are caught. One of a signal handler passes through; the
            trace then says that it may lack this event.
            """
            try:
                n, at = place()
                try:
                    pack(slots, at, now(), code, loader, local.tid, task, worker, x, y, z, n)
                except unfit:
                    emit_slowly(n, at, code, loader, task, worker, x, y, z)
            except BaseException:
                lose(1)
                raise

        def emit_some(code: int, task: int = -1, worker: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
            if code not in left_out:
                emit(code, task, worker, x, y, z)

        return emit_some if left_out else emit

    def write_into(new_slots: Map, new_place: Any = None, new_local: Any = None) -> None:
        nonlocal slots, place, local
        slots, place, local = new_slots, new_place or place, new_local or local

    return emitter, write_into


class Recorder:
    """Writes this process's events to its own files.

    Files are opened at the first event; a forked child begins its own.

    thread: the kernel's number of the thread that it records alone, as if that were a process; 0 = this process. The
    kernel numbers threads and processes alike, and /proc has both.

    `emitter(loader)` gives the function that records one event of that loader (0: of none): see `_emitters`.
    """

    def __init__(self, config: TraceConfig, thread: int = 0) -> None:
        self.config = config
        self.thread = thread
        self.pauses = Pauses()  # watched by `start` and `stop`
        self._pausing = 0
        self._reserve: list[weakref.finalize[..., Recorder]] = []  # a forked child inherits them
        self._ring = config.ring_slots
        left_out = frozenset(c for c, e in EVENTS.items() if e.detail and config.detail == "batch")
        self.emitter, self._write_into = _emitters(self._emit_slowly, self._lose, left_out)
        self._reset()
        _RECORDERS.add(self)

    def _reset(self) -> None:
        """Forget whatever belongs to one process; in a forked child, the parent's files and thread ids."""
        self._local = threading.local()
        self._map: mmap.mmap | bytearray = bytearray()
        self._header: mmap.mmap | bytearray = self._map
        self._place = _places(self._ring)
        self._write_into(self._map, self._place, self._local)
        self._start = time.monotonic_ns(), time.time_ns()
        self._stem = os.path.join(self.config.directory, stem_of(self.numbers[0], self._start[0]))
        self._introduced = False
        self._strings: dict[str, int] = {}
        self._string_ids = itertools.count(1)
        self._off = ""  # why nothing more is recorded
        self._errno = 0
        self._lost_events = self._lost_lines = 0
        self._refused: set[str] = set()

    @property
    def numbers(self) -> tuple[int, int]:
        """The pid, and the parent's: of a thread its own number, and the process that it is of."""
        return (self.thread, os.getpid()) if self.thread else (os.getpid(), os.getppid())

    def emit(
        self, code: int, loader: int = 0, task: int = -1, worker: int = -1, x: int = 0, y: int = 0, z: int = 0
    ) -> None:
        """Record one event of any loader. For many events of one loader, get its `emitter`."""
        self.emitter(loader)(code, task, worker, x, y, z)

    def emit_pauses(self, loader: int = 0, worker: int = -1) -> None:
        """Record the collector's pauses since the last call. loader: whose they are called, 0 = as in that call."""
        loader = self._pausing = loader or self._pausing
        for took, begin, tid, about in self.pauses.taken():
            own = loader, tid, -1, worker, about["generation"]
            self.emit_at_once((begin, GC[0], *own, 0, 0), (begin + took, GC[1], *own, about["collected"], 0))

    def emit_at_once(self, *events: tuple[int, ...], also: Iterable[Step] = ()) -> None:
        """Record events of other moments by one call in C, which no exception of a signal's handler can split.

        events: stamp (CLOCK_MONOTONIC, ns), code, loader, tid (of the thread or stream), task, worker, x, y and z of
        each; also: steps of that call.
        """
        try:
            placed = [(*self._place(), event) for event in events]
            try:
                at_once(*(partial(PACK.pack_into, self._map, at, *event, n) for n, at, event in placed), *also)
            except _UNFIT:
                for n, at, (stamp, code, loader, tid, *values) in placed:
                    self._emit_slowly(n, at, code, loader, *values, stamp=stamp, tid=tid)
                at_once(*also)
        except BaseException:
            self._lose(len(events))
            raise

    def _emit_slowly(self, n: int, at: int, *values: int, stamp: int = 0, tid: int = 0) -> None:
        """Record a process's or thread's first event, or one that needs a longer file or fits no slot."""
        if PACK is None:
            return  # the interpreter has cleared this module: there is nothing left to grow a file with
        if self._is_off():  # a thread that begins now gets no number: its next event is not recorded either
            return
        stamp = stamp or time.monotonic_ns()
        named = bool(tid) or hasattr(self._local, "tid")
        try:
            tid = tid or self._tid()
            if not named and not self._introduced:  # a process's words come first
                named = True
                self._name_thread(tid)
            slots = self._grow((at - HEADER_BYTES) // SLOT_BYTES + 1)
        except OSError as error:
            self._give_up(error)
        if self._is_off():
            vars(self._local).pop("tid", None)
            return
        try:
            PACK.pack_into(slots, at, stamp, *values[:2], tid, *values[2:], n)
        except _UNFIT:
            self._refuse(values)
        if not named:  # only now: a kill during this write must not lose the event
            self._name_thread(tid)

    def _is_off(self) -> bool:
        """Whether nothing more is recorded. An event of this moment is counted as lost, unless the trace was ended."""
        if self._off and self._off != _CLOSED:
            self._lose(events=1)
        return bool(self._off)

    def _tid(self) -> int:
        tid: int | None = getattr(self._local, "tid", None)
        if tid is None:
            tid = self._local.tid = threading.get_native_id()
        return tid

    def _name_thread(self, tid: int) -> None:
        self.describe("thread", tid=tid, name=threading.current_thread().name, ident=threading.get_ident())

    def _grow(self, slots: int) -> mmap.mmap | bytearray:
        """Return a map of at least `slots` slots.

        Raises OSError if the disk is full, the directory is gone or a limit is reached.

        Of two threads that grow at once, the later one's map is used by all threads. If it is the shorter one, the
        next event behind its end comes here again. Both maps show the same file. It ends with a page: while one thread
        writes behind an end within a page, Linux may clear the rest of that page for another that lengthens the file.
        """
        current = self._map
        have = max(0, len(current) - HEADER_BYTES) // SLOT_BYTES
        if slots <= have or self._off:
            return current
        want = max(slots, FIRST_SLOTS, min(2 * have, have + GROW_SLOTS))
        want = min(want, self._ring or want)
        size = -(-(HEADER_BYTES + want * SLOT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        grown = self._with_descriptors(lambda: _mapped(self._stem + EVENTS_SUFFIX, size, new=not have))
        if not have:  # once: pack_into clears it first, and a kill then would lose all events
            HEADER.pack_into(grown, 0, MAGIC, FORMAT_VERSION, self.numbers[0], *self._start, self._ring)
        if not self._off:
            self._header = grown
            self._lose()
            self._map = grown
            self._write_into(grown)
        return grown

    def _lose(self, events: int = 0, lines: int = 0) -> None:
        """Update the header, and add to the counts of lost events and lines."""
        self._lost_events += events
        self._lost_lines += lines
        if len(self._header):
            slots = (len(self._header) - HEADER_BYTES) // SLOT_BYTES
            STATE.pack_into(self._header, STATE_AT, slots, self._lost_events, self._lost_lines, self._errno)

    def interrupted(self) -> None:
        """Note that a signal's handler has raised in the recorder, so that an event may be missing."""
        self._lose(events=1)

    def _give_up(self, error: OSError) -> None:
        """Turn recording off for good in this process."""
        self._warn(error, "stops recording")
        self._off = self._off or error.strerror or str(error)
        self._map = bytearray()  # a ring that could not grow must not start again at its first slot
        self._write_into(self._map)

    def _warn(self, error: OSError, what: str) -> None:
        """Report on stderr, once in a process, that the trace will be incomplete."""
        if error.errno is None:
            raise error  # not of a system call but of a signal handler, such as a TimeoutError
        first, self._errno = self._errno == 0, error.errno
        if first and sys.stderr is not None:
            text = f"minidl trace: process {os.getpid()} {what}: {error}. The run goes on.\n"
            try:
                os.write(
                    2, text.encode("utf-8", "backslashreplace")
                )  # sys.stderr may be in use if a signal interrupted it
            except OSError:
                pass

    def _refuse(self, values: tuple[object, ...]) -> None:
        """Describe, once for each combination of values, an event that fits no slot."""
        code = values[0] if isinstance(values[0], int) else -1
        what = ", ".join(str(v) if type(v) is int else type(v).__name__ for v in values[1:])
        if len(self._refused) < 100 and what not in self._refused:
            self._refused.add(what)
            self.describe("refused", code=code, values=what)

    def string(self, text: str) -> int:
        """Return the number of `text` in this process's events, the same for the same text; 0 = none."""
        known = self._strings.get(text)
        if known is not None:
            return known
        number = next(self._string_ids)
        if not self.describe("string", id=number, text=text):
            return 0
        self._strings[text] = number
        return number

    def describe(self, kind: str, **facts: Any) -> bool:
        """Append one line to the side file; return whether that succeeded. Values that JSON cannot hold become reprs.

        Only the line is lost on failure: a process that has run out of descriptors still records events.
        """
        if self._off:
            return False
        try:
            if not self._introduced:
                self._introduced = True
                self._introduce()
            self._append(kind=kind, **facts)
        except OSError as error:
            self._warn(error, "cannot describe what it records")
            self._lose(lines=1)
            return False
        return True

    def _introduce(self) -> None:
        pid, ppid = self.numbers
        self._append(kind="process", pid=pid, ppid=ppid, argv=list(getattr(sys, "argv", None) or []),
                     start_monotonic_ns=self._start[0], start_realtime_ns=self._start[1])  # fmt: skip
        try:
            self._grow(1)
        except OSError as error:
            self._give_up(error)

    def _with_descriptors(self, work: Callable[[], _T]) -> _T:
        """Call `work`, which opens a file for a moment; again with those kept in reserve, if no descriptor is left.

        A process that has run out of descriptors is one whose trace is wanted.
        """
        try:
            return work()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._release():
                raise
            return work()
        finally:
            if self._off != _CLOSED:
                self._keep_reserve()

    def _keep_reserve(self) -> None:
        while len(self._reserve) < _RESERVE:
            try:
                fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return
            self._reserve.append(weakref.finalize(self, _give_up_descriptor, fd))
            self._reserve[-1].atexit = False  # a program's exit is recorded too

    def _release(self) -> bool:
        """Give up the descriptors in reserve; return whether there were any."""
        given_up = [reserve() for reserve in self._reserve]
        self._reserve.clear()
        return any(given_up)

    def _append(self, **facts: Any) -> None:
        try:
            line = json.dumps(facts, default=repr)
        except (TypeError, ValueError, RecursionError) as error:
            line = json.dumps({"kind": "refused", "code": -1, "values": f"{facts['kind']}: {error}"})
        data = line.encode("ascii") + b"\n"
        self._with_descriptors(lambda: _append_to(self._stem + SIDE_SUFFIX, data))

    def role(self, role: str, worker: int = -1, loader: int = 0) -> None:
        """Describe this process's role: "loader", "worker" (with its id and its loader's number), ..."""
        self.describe("process", role=role, worker=worker, loader=loader)

    @property
    def lost(self) -> str:
        """The losses and their reasons in words; "" if nothing is lost."""
        counts = [f"{n} {what}" for n, what in ((self._lost_events, "events"), (self._lost_lines, "descriptions")) if n]
        why = os.strerror(self._errno) if self._errno > 0 else "an exception of a signal's handler came between"
        parts = [f"{' and '.join(counts)}: {why}"] if counts else []
        parts += [f"an event that does not fit a record: {what}" for what in sorted(self._refused)]
        return "; ".join(parts)

    def close(self) -> None:
        """Stop recording. The file keeps its unused slots: truncating it while a thread writes would be a bus error."""
        if not self._off:
            self._off = _CLOSED
            self._release()
            self._map = self._header = bytearray()
            self._write_into(bytearray(SLOT_BYTES), itertools.repeat((0, 0)).__next__, types.SimpleNamespace(tid=0))

    def __repr__(self) -> str:
        return f"<Recorder {self._stem}: {self._off or 'recording'}{', lost ' * bool(self.lost)}{self.lost}>"


def _mapped(path: str, size: int, *, new: bool) -> mmap.mmap:
    """Map a file, which is made `size` bytes long if it is shorter, and made if it is `new`.

    It is made once: if it has been deleted since, the trace is gone, and a new file would belong to none.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if new else 0), 0o600)
    try:
        old = os.fstat(fd).st_size
        if old < size:
            os.posix_fallocate(fd, old, size - old)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _append_to(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _give_up_descriptor(fd: int) -> bool:
    """Close it, unless the program has closed it and now uses its number; return whether that succeeded."""
    try:
        if os.fstat(fd).st_rdev != os.stat(os.devnull).st_rdev:
            return False
        os.close(fd)
    except OSError:
        return False
    return True


_CLOSED = "closed"
_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()
_active: Recorder | None = None


def _after_fork() -> None:
    for recorder in list(_RECORDERS):
        if recorder._off != _CLOSED:
            recorder._reset()


os.register_at_fork(after_in_child=_after_fork)


def start(config: TraceConfig) -> Recorder:
    """Begin recording in this process, or return the recorder that it has for the same place.

    Raises RuntimeError if it records to another place.
    """
    global _active
    if _active is None:
        _active = Recorder(config)
        _active.pauses.watch()
    elif _active.config != config:
        raise RuntimeError(f"this process already records to {_active.config.directory}: call stop() before start()")
    return _active


def stop() -> None:
    """End this process's recording, if there is one."""
    global _active
    if _active is not None:
        _active.pauses.unwatch()
        _active.close()
        _active = None
        _emit_of.clear()


def emitter_for(config: TraceConfig, loader: int) -> Emit:
    """Return the `emit` of one of this process's loaders, and let `emit_of` find it."""
    emit = _emit_of[loader] = start(config).emitter(loader)
    return emit


_emit_of: dict[int, Emit] = {}
"""`emit` by loader, of the trace that this process records now."""


def no_emit(*args: int) -> None: ...


def emit_of(loader: int) -> Emit:
    """Return the `emit` of a loader that is recorded now; for another loader, one that does nothing."""
    return _emit_of.get(loader, no_emit)


@contextlib.contextmanager
def spanned(emit: Emit, span: tuple[int, int], task: int, worker: int, *begin: int) -> Iterator[list[int]]:
    """Emit a span around a block, which puts the end's values into the given list; also if the block raises.

    It costs a microsecond: code that every batch waits for emits both events by hand.
    """
    end: list[int] = []
    emit(span[0], task, worker, *begin)
    try:
        yield end
    finally:
        emit(span[1], task, worker, *end)


def active() -> Recorder | None:
    """Return this process's recorder, or None."""
    return _active


_own_numbers = itertools.count(1)


def number_loader(directory: str) -> int:
    """Return the next number for a loader of the trace in `directory`: 1 to 65535, then 1 again.

    It is the length of a file that each call extends by a byte, so that independent processes of one trace, such as
    forked ranks, never get the same number. If that fails, this process counts by itself.
    """
    try:
        fd = os.open(os.path.join(directory, LOADERS), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"\n")
            number = os.lseek(fd, 0, os.SEEK_CUR)  # the end of this write, even if other processes write
        finally:
            os.close(fd)
    except OSError:
        number = next(_own_numbers)
    return (number - 1) % 0xFFFF + 1


def create(directory: str | os.PathLike[str], **facts: Any) -> Path:
    """Begin a trace: make the directory (and its parents) and write its manifest, which also holds `facts`.

    Called once, in the process that starts the trace. Returns the directory's absolute path. Raises TraceError if the
    directory already holds a trace, since two runs in one directory could not be distinguished, or cannot be written.
    """
    path = Path(directory).absolute()
    taken = TraceError(f"{path} already holds a trace: give another directory, or delete this one first")
    draft = path / f".{MANIFEST}.{secrets.token_hex(4)}"
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
        if (path / MANIFEST).exists() or any(path.glob("*" + EVENTS_SUFFIX)):
            raise taken
        draft.touch(0o600)
        draft.write_text(json.dumps(_manifest() | facts, indent=1, default=repr) + "\n")
        try:
            os.link(draft, path / MANIFEST)  # unlike a rename, fails if another process was faster
        except FileExistsError:
            raise taken from None
        finally:
            draft.unlink()
    except OSError as error:
        raise TraceError(f"no trace can be begun in {path}: {error.strerror}: give another directory") from error
    return path


def _manifest() -> dict[str, Any]:
    system = os.uname()  # platform.platform() starts a process, `uname -p`
    return {
        "format": FORMAT_VERSION,
        "versions": {name: _version(name) for name in ("minidl", "torch", "numpy")}
        | {"python": platform.python_version() + "t" * (not getattr(sys, "_is_gil_enabled", lambda: True)())},
        "host": socket.gethostname(),
        "platform": "-".join((system.sysname, system.release, system.machine)),
        "cpus": os.cpu_count(),
        **usable_cpus(),
        "boot_id": boot_id(),
        **_rank(),
        "command": list(getattr(sys, "orig_argv", sys.argv)),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "realtime_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "clock": _clock(),
    }


def _clock() -> dict[str, Any]:
    """Describe this machine's clock of events beside the time of day.

    offset_ns: added to reach the clock of the reference rank; filled in when traces are joined.
    """
    realtime, ours = bracketed(time.time_ns)
    return {
        "name": "CLOCK_MONOTONIC",
        "realtime_minus_monotonic_ns": realtime - ours.middle,
        "error_ns": ours.error,
        "offset_ns": None,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "unknown"))


def _rank() -> dict[str, int | None]:
    """The place in a job that a launcher gave this process; torchrun's also if it is alone."""
    place = launched(os.environ)
    alone = (os.environ.get(name, "") for name in LAUNCHERS[0][:3])
    found = place[:3] if place.rank >= 0 else [int(text) if text.isdecimal() else -1 for text in alone]
    return {name: n if n >= 0 else None for name, n in zip(("rank", "world_size", "local_rank"), found, strict=True)}
