"""Synthetic traces for tests: written through the real Recorder, or slot by slot by packing RECORDs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from minidl.record.recorder import Recorder, TraceConfig, create
from minidl.tracefile.format import (
    EVENTS_SUFFIX,
    FORMAT_VERSION,
    HEADER_BYTES,
    MANIFEST,
    PACK,
    RECORD,
    SIDE_SUFFIX,
    SLOT_BYTES,
    Header,
    stem_of,
)
from minidl.tracefile.reader import Trace, read_trace


def recorded(directory: Path, events: Iterable[tuple[int, ...]], **config: object) -> Trace:
    """Write `events`, each the arguments of `Recorder.emit`, through a real Recorder of this process, and read them."""
    recorder = Recorder(TraceConfig(str(create(directory)), **config))  # type: ignore[arg-type]
    for event in events:
        recorder.emit(*event)
    recorder.close()
    return read_trace(directory)


def write_process(
    directory: Path,
    events: Iterable[dict[str, int]],
    *,
    pid: int = 100,
    start_ns: int = 1,
    ring: int = 0,
    slots: int | None = None,
    lines: Iterable[dict[str, object]] = (),
    **process: object,
) -> Path:
    """Write one process's two files with chosen pids, times and records; returns the events file.

    Each event has any of time, code, loader, tid, task, worker, x, y, z, seq; time and seq default to the event's
    number from 1, tid to the pid. `process` holds role, worker, loader, ppid; `lines` are further side-file lines.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / MANIFEST).exists():
        (directory / MANIFEST).write_text(json.dumps({"format": FORMAT_VERSION, "versions": {"minidl": "test"}}))
    stem = stem_of(pid, start_ns)
    side = [{"kind": "process", "pid": pid, **process}, *lines]
    (directory / (stem + SIDE_SUFFIX)).write_text("".join(json.dumps(line) + "\n" for line in side))
    records = []
    for number, event in enumerate(events, 1):
        usual = {"time": number, "seq": number, "loader": 1, "tid": pid, "task": -1, "worker": -1}
        records.append({**usual, "x": 0, "y": 0, "z": 0, **event})
    need = max((ring or r["seq"] for r in records), default=0)
    count = need if slots is None else slots
    data = bytearray(Header(pid, start_ns, ring=ring, slots=count).page() + bytes(count * SLOT_BYTES))
    for r in records:
        at = HEADER_BYTES + (r["seq"] - 1) % (ring or count) * SLOT_BYTES
        values = (r[k] for k in ("time", "code", "loader", "tid", "task", "worker", "x", "y", "z", "seq"))
        PACK.pack_into(data, at, *values)
    path = directory / (stem + EVENTS_SUFFIX)
    path.write_bytes(data)
    return path


def trace_of(directory: Path, events: Iterable[dict[str, int]], **process: object) -> Trace:
    """Read a trace of one process, written by `write_process`: a loader, unless `role` says something else."""
    write_process(directory, events, **{"role": "loader"} | process)  # type: ignore[arg-type]
    return read_trace(directory)


def rows_of(columns: str, *rows: tuple[int, ...], **same: int) -> list[dict[str, int]]:
    """Give events for `write_process`: each row has the values of these columns, and all have the same others."""
    return [dict(zip(columns.split(), row, strict=True)) | same for row in rows]


def stop_recording(directory: Path, pid: int, lost: int, errno: int, since: int) -> None:
    """Let the trace be as if the process had failed to record what it did after `since` (ns)."""
    (file,) = directory.glob(f"{pid}-*{EVENTS_SUFFIX}")
    data = bytearray(file.read_bytes())
    rows = np.frombuffer(data, RECORD, offset=HEADER_BYTES)
    rows[rows["time"] > since] = 0
    data[:HEADER_BYTES] = Header.read(data)._replace(lost_events=lost, lost_lines=0, errno=errno).page()
    file.write_bytes(data)
