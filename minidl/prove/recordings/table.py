"""The table of recordings in `traces/README.md`, made from the recordings.

Interface: `table(directory)` returns it as Markdown; `write_table(directory)` writes it into the directory's README.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.device import sim
from minidl.prove.recordings.scenes import SCENES
from minidl.terminal import say
from minidl.tracefile import events as ev
from minidl.tracefile.format import PACKED_SUFFIX
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.summary import summary

TOGETHER: Final = 25_000_000
"""The largest size of all recordings together, in bytes."""

README: Final = "README.md"
BEGIN, END = "<!-- recordings: made by python -m minidl.prove.recordings -->", "<!-- /recordings -->"
HEADS: Final = ("name", "what it shows", "verdict", "device", "machine", "versions", "date", "kB", "sha256 begins")


def facts(trace: Trace) -> dict[str, Any]:
    """Return a recording's description of itself: name, device, accelerator, cores; {} if it has none."""
    entries = trace.described("recording")
    return entries[0] if entries else {}


def _rows(directory: Path) -> Iterator[tuple[str, ...]]:
    for recording in SCENES.values():
        path = directory / (recording.name + PACKED_SUFFIX)
        if path.exists():
            trace = read_trace(path)
            about, manifest = facts(trace), trace.manifest
            versions = manifest.get("versions") or {}
            real = _real(trace)
            accelerator = "no accelerator" if _by_sim(trace) else str(about.get("accelerator"))
            date = dt.datetime.fromtimestamp(int(manifest.get("realtime_ns", 0)) / 1e9, dt.timezone.utc)
            yield (
                recording.name,
                recording.shows,
                _verdict(trace),
                real,
                f"{accelerator}, {about.get('cores')} cores",
                f"minidl {versions.get('minidl')}, torch {versions.get('torch')}, Python {versions.get('python')}",
                f"{date:%Y-%m-%d}",
                f"{path.stat().st_size / 1000:.0f}",
                hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            )


def _by_sim(trace: Trace) -> bool:
    return facts(trace).get("device") in ("simulated", sim.NAME)


def _real(trace: Trace) -> str:
    """Return whether what the recording shows is real: without pinning and device, there is nothing to simulate."""
    if not np.isin(trace.events["code"], [ev.PIN[0], ev.H2D[0]]).any():
        return "real; nothing is pinned"
    return "simulated" if _by_sim(trace) else "real"


def _verdict(trace: Trace) -> str:
    """Return the summary's sentence about the first iterator that yielded a batch."""
    iterators = summary(trace).loaders
    yielded = [iterator for iterator in iterators if iterator.batches] or iterators
    return yielded[0].verdict.sentence if yielded else ""


def table(directory: Path) -> str:
    """List the recordings in `directory` as Markdown; name those that are missing or simulated."""
    rows = list(_rows(directory))
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(0x2223)) for cell in row)} |" for row in rows]
    real = {row[0] for row in rows if row[3].startswith("real")}
    missing = [name for name in SCENES if name not in real]
    device = "cuda" if any(row[3] == "real" for row in rows) else sim.NAME
    if rows:
        lines += ["", f"Each was made by `python -m minidl.prove.recordings --device {device} --only NAME`."]
    lines += ["", f"Not yet recorded on a GPU: {', '.join(missing)}."] if missing else []
    return "\n".join(lines)


def write_table(directory: Path) -> None:
    """Write the table between its markers in the directory's README.md; create the file if necessary."""
    path = directory / README
    text = path.read_text() if path.exists() else f"# Recordings\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n{table(directory)}\n{END}{after}")
    size = sum(each.stat().st_size for each in directory.glob("*" + PACKED_SUFFIX))
    if size > TOGETHER:
        say(f"the recordings in {directory} have {size} bytes in all; the limit is {TOGETHER}: record fewer batches")
