"""Cost of reading and analysing a trace, by the number of its events.

Interface: `bench_files(sizes)`. It records the traces itself: a loader with two workers and many small samples.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import minidl
from minidl.check import examine
from minidl.prove.bench.child import in_child, metered
from minidl.prove.bench.pairs import Row, take_turns
from minidl.terminal import progress
from minidl.tracefile.reader import Trace
from minidl.views.chrome import write_chrome
from minidl.views.summary import summary
from minidl.views.text import render

_READ = "read_trace"
_OPERATIONS: dict[str, Callable[[Trace, Path], object]] = {
    _READ: lambda trace, place: None,
    "spans": lambda trace, place: trace.spans(),
    "summary, as text": lambda trace, place: summary(trace).text(),
    "timeline, as text": lambda trace, place: render(trace, colour=False),
    "check": lambda trace, place: examine(trace),
    "export": lambda trace, place: write_chrome(trace, place / "trace.json"),
    "pack": lambda trace, place: trace.pack(place / "trace"),
}

_TRIAL_BATCHES = 50
_EPOCH_BATCHES = 1000


def bench_files(sizes: Sequence[int], rounds: int = 3) -> list[Row]:
    """Read a trace of each size, then perform one operation on it; each time in a process of its own.

    Values are seconds. The ratio is to the reading in the same process; extra: events per second, MiB by which the
    process grew at its peak (beyond the trace that it held already), and MiB of the file that was written.
    """
    return [row for size in sizes for row in _rows(size, rounds)]


def _rows(size: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="minidl-bench-") as directory:
        progress(f"files: recording {size:,} events")
        trace, events = in_child(_record, Path(directory), size)
        turns = {name: partial(in_child, _measure, name, trace) for name in _OPERATIONS}
        found = take_turns(turns, rounds, f"files: {events:,} events", warm=False)
    return [_row(f"{events:,} events", name, events, figures) for name, figures in found.items()]


def _row(group: str, name: str, events: int, figures: list[Any]) -> Row:
    read, read_mib, done, done_mib, file_mib = zip(*figures, strict=True)
    values, mib = (read, read_mib) if name == _READ else (done, done_mib)
    extra = {"events/s": events / median(values), "peak MiB": median(mib)}
    extra |= {"file MiB": median(file_mib)} if any(file_mib) else {}
    return Row(group, name, "s", values, "" if name == _READ else _READ, read, extra)


def _measure(name: str, path: Path) -> tuple[float, float, float, float, float]:
    """Return seconds and peak MiB of the reading and of the operation, and MiB of the files that it writes."""
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        with metered() as reading:
            trace = minidl.read_trace(path)
        with metered() as doing:
            _OPERATIONS[name](trace, Path(place))
        written = sum(file.stat().st_size for file in Path(place).iterdir()) / 2**20
    return reading.seconds, reading.mib, doing.seconds, doing.mib, written


def _record(directory: Path, size: int) -> tuple[Path, int]:
    """Record a run of about `size` events; return its path and the number of its events."""
    each = _run(directory / "trial", _TRIAL_BATCHES, 1) / _TRIAL_BATCHES
    batches = max(1, round(size / each))
    epochs = max(1, round(batches / _EPOCH_BATCHES))
    return directory / "trace", _run(directory / "trace", batches // epochs, epochs)


def _run(directory: Path, batches: int, epochs: int) -> int:
    """Record `epochs` epochs of `batches` batches of 16 numbers; return the number of events."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # on a machine with one core
        numbers = range(16 * batches)
        loader: minidl.DataLoader[Any] = minidl.DataLoader(numbers, 16, num_workers=2, persistent_workers=True)
        with minidl.trace(directory), loader:
            for _ in range(epochs):
                for _ in loader:
                    pass
    return len(minidl.read_trace(directory))
