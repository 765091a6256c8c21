"""A running job: the new events of its trace, whether its processes exist, and which trace a process records.

Interface: `LiveTrace(directory).read()` gives the events since the last call; `find_trace` finds the trace of a
process; `is_small` tells whether a trace can be read quickly; `search` finds events of some kinds in a whole file.

Rules of use: the first call reads the last `TAIL` events of each process, and each further call at most `MOST_NEW` new
ones, so the cost of a call does not depend on the length of the trace. It sends nothing to the processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from minidl.hang.life import is_here, life
from minidl.process_stat import descendants_of
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.facts import facts_in
from minidl.tracefile.files import Files, members_in, no_trace_in
from minidl.tracefile.format import (
    EVENTS_SUFFIX,
    HEADER_BYTES,
    MANIFEST,
    PACKED_SUFFIX,
    RECORD,
    SIDE_SUFFIX,
    SLOT_BYTES,
    Header,
    TraceError,
    events_file,
    header_problem,
    parts_of,
    records,
)
from minidl.tracefile.packs import unpacked_bytes
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace
from minidl.tracefile.tail import tail

TAIL = 8192
"""Events of each process that the first call reads: 512 KiB. A batch has about 16 events in the loader's process, and
two for each sample in a worker's, so this covers the tasks in flight of a usual loader."""

MOST_NEW = 65_536
"""The most new events of each process that a further call reads; it skips the oldest ones."""

MOST_WRITERS = 64
"""The most incomplete events of a process with later complete ones: one for each thread."""

SMALL = 64 << 20
"""Bytes of events that can be read in about three seconds."""

PIECE = 65_536
"""The events that are in memory together where a whole file is searched: 4 MiB."""

EXITED_TAIL = 64
"""The events that are read of an exited worker: a job with new workers in each epoch leaves many of them behind."""


# --- The new events of a trace ----------------------------------------------------------------------------------------
class LiveTrace:
    """Reads the trace in `directory` piece by piece while it is written. Raises TraceError if there is none.

    most: the number of events of each process that the first call reads.
    """

    def __init__(self, directory: Path, most: int = TAIL) -> None:
        self.directory = directory
        self.most = most
        self._read: dict[str, int] = {}  # of each process's file, the sequence number up to which it was read
        self._waited: dict[str, int] = {}  # the same, if the next event was not complete at an earlier call
        self._gone: dict[str, bytes] = {}  # the header pages of files without further events
        self._sizes: dict[str, int] = {}  # the largest size of each file so far
        self._start = 0  # of the run's first event, ns; 0 = not seen yet

    def read(self) -> tuple[Trace, dict[int, ProcessLife]]:
        """Return the trace with the events since the last call, and pid -> whether the process is there.

        Events later than the call's begin are left for the next call: else a receiver that is read last could have a
        message whose sender was read before it was sent.
        """
        begun, files = time.monotonic_ns(), self._files()
        until = begun if is_here(facts_in(files.manifest)) else None
        lives = {stem: life(*parts_of(stem)) for stem in files.side}
        for stem in tuple(files.side):
            files.events[stem] = self._new_events(stem, lives[stem], until)
            if not files.events[stem] and not (self.directory / (stem + SIDE_SUFFIX)).exists():
                del files.side[stem], files.events[stem], lives[stem]  # it has ended, and its file was just folded
            elif self._was_truncated(stem):
                files.problems.append(f"{stem}{EVENTS_SUFFIX} was truncated while it was read: new events are lost")
        trace = Trace(self.directory, files)
        by_pid = self._by_pid(trace, lives)
        trace.start = self._start = self._start or self._first(trace)
        if until is not None and not trace.described("trace_end") and any(life.there for life in by_pid.values()):
            trace.seen = until
        for process in trace.processes:
            process.life = by_pid.get(process.pid, ProcessLife.UNKNOWN)
        return trace, by_pid

    def _files(self) -> Files:
        """The trace's files, without events."""
        files = Files(part=True)
        try:
            names = [name for name, _ in members_in(self.directory, files.problems)]
            if MANIFEST not in names:
                raise TraceError(no_trace_in(self.directory, sorted(os.listdir(self.directory))))
            files.manifest = (self.directory / MANIFEST).read_bytes()
        except OSError as error:
            raise TraceError(f"{self.directory}: {error.strerror}: give the directory of a trace") from error
        for stem in (name.removesuffix(SIDE_SUFFIX) for name in names if name.endswith(SIDE_SUFFIX)):
            with contextlib.suppress(OSError):  # the directory is being deleted: the next call raises
                files.side[stem] = (self.directory / (stem + SIDE_SUFFIX)).read_bytes()
        return files

    def _first(self, trace: Trace) -> int:
        """Time 0, ns: the first event in a file that still has its beginning, or else the first event that was read."""
        times = [trace.start] if trace.start else []
        for process in trace.processes:
            with contextlib.suppress(OSError), open(self.directory / (process.file + EVENTS_SUFFIX), "rb") as file:
                rows = records(file.read(HEADER_BYTES + SLOT_BYTES))
                times += rows["time"][rows["seq"] == 1].tolist()
        return min(times, default=0)

    def _was_truncated(self, stem: str) -> bool:
        with contextlib.suppress(OSError):
            size = (self.directory / (stem + EVENTS_SUFFIX)).stat().st_size
            self._sizes[stem] = max(size, self._sizes.get(stem, 0))
            return size < self._sizes[stem]
        return False

    def _by_pid(self, trace: Trace, lives: Mapping[str, ProcessLife]) -> dict[int, ProcessLife]:
        if not is_here(trace.manifest):
            return {}
        first, begun = trace.manifest.get("pid"), trace.manifest.get("monotonic_ns")
        found = {first: life(first, begun)} if isinstance(first, int) and isinstance(begun, int) else {}
        for stem, state in lives.items():
            pid = parts_of(stem)[0]
            if pid not in found or not found[pid].there:  # two processes of a trace may have had the same id
                found[pid] = state
        return found

    def _new_events(self, stem: str, state: ProcessLife, until: int | None) -> bytes:
        """Return a process's events file, with only its new events up to a time."""
        if stem in self._gone:
            return self._gone[stem]
        path, after = self.directory / (stem + EVENTS_SUFFIX), self._read.get(stem, 0)
        data = tail(path, MOST_NEW if after else self.most, after)
        if header_problem(data):
            return data
        rows = records(data)
        rows = np.sort(rows[rows["seq"] > 0], order="seq")
        if not after and state is ProcessLife.GONE and ev.WORKER_EXIT in rows["code"]:
            rows = rows[-EXITED_TAIL:]
        new = rows[: self._complete(stem, rows, until)]
        if len(new):
            self._read[stem] = int(new["seq"][-1])
        header = Header.read(data)
        if state is ProcessLife.GONE and len(new) == len(rows):
            self._gone[stem] = header._replace(slots=0).page()
        return events_file(header, new)

    def _complete(self, stem: str, rows: Rows, until: int | None) -> int:
        """Return the number of new events to take: up to the time, and up to the first incomplete event.

        An event that is still incomplete at the next call is skipped: its thread may have been killed.
        """
        late = rows["time"] > until if until is not None else np.zeros(len(rows), bool)
        count, after = int(np.argmax(np.append(late, True))), self._read.get(stem, 0)
        if not after or not count:
            return count
        numbers = rows["seq"][:count].astype(np.int64)
        missing = numbers != np.arange(after + 1, after + 1 + count)
        if not missing[0]:
            return int(np.argmax(np.append(missing, True)))
        if numbers[0] - after <= MOST_WRITERS and self._waited.get(stem) != after:
            self._waited[stem] = after
            return 0
        return count


def is_small(directory: Path, most: int | None = None) -> bool:
    """Whether a trace can be read in a few seconds: it has at most so many bytes of events."""
    plain = sum(_blocks(path) * 512 for path in directory.glob(f"*{EVENTS_SUFFIX}"))
    packed = sum(unpacked_bytes(path) for path in directory.glob(f"*{PACKED_SUFFIX}"))
    return plain + packed <= (SMALL if most is None else most)


def search(path: Path, codes: Sequence[int]) -> Rows:
    """The events of some kinds in an events file (array of RECORD): all of the file is read, in pieces."""
    found: list[Rows] = [np.empty(0, RECORD)]
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        while len(rows := np.fromfile(file, RECORD, PIECE)):
            found.append(rows[np.isin(rows["code"], codes)])
    return np.concatenate(found)


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks
    except FileNotFoundError:  # it has just been folded
        return 0


# --- Finding the trace ------------------------------------------------------------------------------------------------
def find_trace(target: str | os.PathLike[str]) -> Path:
    """The trace that `target` names: a path, or the id of a process that records one, itself or through its children.

    Raises TraceError if there is none, or more than one.
    """
    name = os.fspath(target)
    if os.path.exists(name):
        return Path(name)
    if name.isdecimal():
        return _trace_of(int(name))
    raise TraceError(f"{name}: no such file or directory: give a trace's directory, or the id of a process")


def records_trace(pid: int) -> bool:
    """Whether a process or a child of it records a readable trace. Raises TraceError if there is no such process."""
    try:
        _trace_of(pid)
    except TraceError:
        if not os.path.exists(f"/proc/{pid}"):
            raise
        return False
    return True


def _trace_of(pid: int) -> Path:
    if not os.path.exists(f"/proc/{pid}"):
        raise TraceError(f"there is no process {pid}: give the id of a running process, or a trace's directory")
    try:
        mapped = list(_mapped(pid))
    except PermissionError as error:
        raise TraceError(f"process {pid} belongs to another user: give its trace's directory instead") from error
    except OSError as error:
        raise TraceError(f"process {pid} has just ended: give its trace's directory instead") from error
    for child in descendants_of(pid):
        try:
            mapped += _mapped(child)
        except OSError:  # it has ended meanwhile
            continue
    places = sorted({path.parent for path in mapped})
    if len(places) > 1:
        raise TraceError(f"process {pid} records {len(places)} traces: give one of them: {', '.join(map(str, places))}")
    if not places:
        raise TraceError(_records_nothing(pid))
    if not (places[0] / MANIFEST).exists():
        gone = "which does not exist here: it was deleted, or is in another container"
        raise TraceError(f"process {pid} records to {places[0]}, {gone}")
    return places[0]


def _mapped(pid: int) -> Iterator[Path]:
    """The events files that the process has mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
        name = line.split(maxsplit=5)[5:]
        if name and name[0].removesuffix(" (deleted)").endswith(EVENTS_SUFFIX):
            yield Path(name[0].removesuffix(" (deleted)"))


def _records_nothing(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        variables = []
    wanted = [v.partition(b"=")[2].decode(errors="replace") for v in variables if v.startswith(b"MINIDL_TRACE=")]
    if wanted:
        return f"process {pid} has MINIDL_TRACE={wanted[0]} but records nothing: no minidl loader has begun in it"
    return (
        f"neither process {pid} nor a child of it records a trace: start it with MINIDL_TRACE=DIRECTORY, "
        f"or with minidl run"
    )
