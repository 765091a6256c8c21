"""`minidl record-suite`: every recording of `traces/`, made, checked, packed and listed by one command.

Interface: `run` (the command), `table(directory)` (what is there, as Markdown), `write_table(directory)`. What is
recorded is said in `scenes`. It needs torch and NumPy alone.

Each scene runs in a process of its own and is packed as soon as its trace has passed the check, so a suite that was
stopped goes on where it was. A table row is made from the recording itself: from what its manifest and its events say.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minidl.pin_memory import SIMULATED
from minidl.tracing.check import examine
from minidl.tracing.reader import PACKED_SUFFIX, Trace, TraceError, read_trace
from minidl.tracing.summary import summary

LIMIT: Final = 2_000_000
"""Bytes that a packed recording may have."""

TOGETHER: Final = 25_000_000
"""Bytes that all recordings may have."""

PATIENCE: Final = 120.0
"""Seconds that one scene may take."""

README: Final = "README.md"
BEGIN, END = "<!-- recordings: made by minidl record-suite -->", "<!-- /recordings -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("cuda", SIMULATED), help="default: cuda where there is one; simulated must be asked for")
    add("-o", "--output", type=Path, default=Path("traces"), metavar="DIR", help="default: %(default)s")
    add("--only", nargs="+", metavar="NAME", help="these recordings alone; made anew, be they there or not")
    add("--minutes", type=float, metavar="N", help="begin no further recording after so many minutes")
    add("--list", action="store_true", help="list the recordings instead")


def run(arguments: argparse.Namespace) -> int:
    """The command: 0, or 1 where a recording failed or is still missing."""
    from minidl.cli import CommandError
    from minidl.recordings.scenes import SCENES

    if arguments.list:
        width = max(map(len, SCENES))
        print("\n".join(f"{scene.name:<{width}}  {scene.shows}" for scene in SCENES.values()))
        return 0
    unknown = sorted(set(arguments.only or ()) - set(SCENES))
    if unknown:
        raise CommandError(f"record-suite: no recording is called {', '.join(unknown)}: --list shows them")
    arguments.output.mkdir(parents=True, exist_ok=True)
    suite = Suite(_device(arguments.device), arguments.output, arguments.minutes)
    failed = suite.record(arguments.only or list(SCENES), again=bool(arguments.only))
    write_table(arguments.output)
    missing = f"; not made: {', '.join(failed)}" if failed else ""
    print(f"the table is in {arguments.output / README}{missing}")
    return 1 if failed else 0


def _device(asked: str | None) -> str:
    import torch

    from minidl.cli import CommandError

    if asked == SIMULATED or torch.cuda.is_available():
        return asked or "cuda"
    raise CommandError("record-suite: no GPU that torch can use: --device simulated records a pretence, marked as such")


@dataclass
class Suite:
    """Recordings on one device into one directory. minutes: how long new ones are begun, None = to the end."""

    device: str
    output: Path
    minutes: float | None = None

    def record(self, names: Sequence[str], again: bool = False) -> list[str]:
        """Make these recordings, those that are there already only if `again`; the names of those that are not made."""
        started, failed = time.monotonic(), []
        work = Path(tempfile.mkdtemp(prefix="minidl-recordings-"))
        try:
            for number, name in enumerate(names, start=1):
                head = f"{number} of {len(names)}  {name}"
                if not again and self._there(name):
                    _say(f"{head}: there already")
                    continue
                if self.minutes is not None and time.monotonic() - started > self.minutes * 60:
                    _say(f"{head}: left for another call")
                    failed.append(name)
                    continue
                failed += [] if self._one(head, name, work) else [name]
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return failed

    def _there(self, name: str) -> bool:
        """Whether a recording of that name exists that is worth as much: a real one also stands for a simulated one."""
        path = self.output / (name + PACKED_SUFFIX)
        if not path.exists():
            return False
        told = _told(read_trace(path)).get("device")
        return told == self.device or self.device == SIMULATED

    def _one(self, head: str, name: str, work: Path) -> bool:
        """Make one recording; says how that went, and whether it is there."""
        started = time.monotonic()
        try:
            path = self._recorded(name, work)
            size = self._packed(name, path)
        except (TraceError, RecordingError) as error:
            _say(f"{head}: FAILED after {time.monotonic() - started:.1f} s: {error}")
            return False
        _say(f"{head}: {time.monotonic() - started:.1f} s, {size / 1000:.0f} kB")
        return True

    def _recorded(self, name: str, work: Path) -> Path:
        """Run the scene; where its trace is. Raises RecordingError."""
        environment = os.environ | ({"MINIDL_SIMULATE_DEVICE": "1"} if self.device == SIMULATED else {})
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # for a package that is not installed
        shutil.rmtree(work / name, ignore_errors=True)
        command = [sys.executable, "-m", "minidl.recordings", name, self.device, str(work)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise RecordingError(f"it did not end within {PATIENCE:g} s") from error
        if done.returncode:
            raise RecordingError(f"exit code {done.returncode}: {' / '.join(done.stderr.strip().splitlines()[-3:])}")
        return Path(done.stdout.splitlines()[-1])

    def _packed(self, name: str, path: Path) -> int:
        """Check the trace at `path`, and put it into its place; its size in bytes. Raises RecordingError."""
        trace = read_trace(path)
        report = examine(trace)
        if report.violations:
            raise RecordingError(f"it breaks a rule: {report.violations[0]}")
        draft = trace.pack(self.output / f".{name}{PACKED_SUFFIX}")
        size = draft.stat().st_size
        if size > LIMIT:
            draft.unlink()
            raise RecordingError(f"{size} bytes packed, and {LIMIT} are allowed: let it run for fewer batches")
        draft.replace(self.output / (name + PACKED_SUFFIX))
        return size


class RecordingError(Exception):
    """A recording that could not be made; the message says why."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- The table --------------------------------------------------------------------------------------------------------
def _told(trace: Trace) -> dict[str, Any]:
    told = trace.described("recording")
    return told[0] if told else {}


def _rows(directory: Path) -> Iterator[tuple[str, ...]]:
    from minidl.recordings.scenes import SCENES

    for scene in SCENES.values():
        path = directory / (scene.name + PACKED_SUFFIX)
        if path.exists():
            trace = read_trace(path)
            told, manifest = _told(trace), trace.manifest
            versions = manifest.get("versions") or {}
            real = "simulated" if told.get("device") == SIMULATED else "real"
            accelerator = "no accelerator" if real == "simulated" else str(told.get("accelerator"))
            date = dt.datetime.fromtimestamp(int(manifest.get("realtime_ns", 0)) / 1e9, dt.timezone.utc)
            yield (
                scene.name,
                scene.shows,
                _verdict(trace),
                real,
                f"{accelerator}, {told.get('cores')} cores",
                f"minidl {versions.get('minidl')}, torch {versions.get('torch')}, Python {versions.get('python')}",
                f"{date:%Y-%m-%d}",
                f"{path.stat().st_size / 1000:.0f}",
                hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            )


def _verdict(trace: Trace) -> str:
    """The summary's sentence about the first loader that yielded anything."""
    told = summary(trace).loaders
    yielded = [loader for loader in told if loader.batches] or told
    return yielded[0].verdict.sentence if yielded else ""


HEADS: Final = ("name", "what it shows", "verdict", "device", "machine", "versions", "date", "kB", "sha256 begins")


def table(directory: Path) -> str:
    """The recordings in `directory` as a Markdown table, and below it those that are missing or only simulated."""
    from minidl.recordings.scenes import SCENES

    rows = list(_rows(directory))
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(0x2223)) for cell in row)} |" for row in rows]
    real = {row[0] for row in rows if row[3] == "real"}
    owed = [name for name in SCENES if name not in real]
    device = "simulated" if all(row[3] == "simulated" for row in rows) else "cuda"
    lines += ["", f"Each was made by `minidl record-suite --device {device} --only NAME`."] if rows else []
    lines += ["", f"Owed, from a machine with a GPU: {', '.join(owed)}."] if owed else []
    return "\n".join(lines)


def write_table(directory: Path) -> None:
    """Put the table between its markers in the directory's README.md, which is begun where there is none."""
    path = directory / README
    text = path.read_text() if path.exists() else f"# Recordings\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n{table(directory)}\n{END}{after}")
    size = sum(each.stat().st_size for each in directory.glob("*" + PACKED_SUFFIX))
    if size > TOGETHER:
        _say(f"the recordings in {directory} have {size} bytes together, and {TOGETHER} are allowed")
