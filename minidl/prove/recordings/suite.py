"""Make recordings: run each in a process of its own, check its trace, pack it.

A recording is packed as soon as its trace has passed the check, so a suite that was interrupted continues.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minidl.check import examine
from minidl.device import sim
from minidl.prove.recordings.table import facts
from minidl.prove.sessions import running
from minidl.terminal import say
from minidl.tracefile.format import PACKED_SUFFIX, TraceError
from minidl.tracefile.reader import read_trace

LIMIT: Final = 2_000_000
"""The largest packed recording, in bytes."""

SCENE_TIMEOUT: Final = 120.0
"""The longest time that one recording may take, in seconds."""


class RecordingError(Exception):
    """A recording could not be made; the message says why."""


@dataclass
class Suite:
    """Makes recordings on one device into one directory. minutes: begin none later than this; None = no limit."""

    device: str
    output: Path
    minutes: float | None = None

    def record(self, names: Sequence[str], again: bool = False) -> list[str]:
        """Make the named recordings; return those that were not made. again: also make those that exist."""
        started, failed = time.monotonic(), []
        work = Path(tempfile.mkdtemp(prefix="minidl-recordings-"))
        try:
            for number, name in enumerate(names, start=1):
                head = f"{number} of {len(names)}  {name}"
                if not again and self._there(name):
                    say(f"{head}: exists already")
                    continue
                if self.minutes is not None and time.monotonic() - started > self.minutes * 60:
                    say(f"{head}: not begun: the time is over")
                    failed.append(name)
                    continue
                failed += [] if self._one(head, name, work) else [name]
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return failed

    def _there(self, name: str) -> bool:
        """Tell whether a recording of that name exists. A real one also counts as the simulated one."""
        path = self.output / (name + PACKED_SUFFIX)
        if not path.exists():
            return False
        return self.device in (sim.NAME, facts(read_trace(path)).get("device"))

    def _one(self, head: str, name: str, work: Path) -> bool:
        """Make one recording; print the result and return whether it was made."""
        started = time.monotonic()
        try:
            path = self._recorded(name, work)
            size = self._packed(name, path)
        except (TraceError, RecordingError) as error:
            say(f"{head}: FAILED after {time.monotonic() - started:.1f} s: {error}")
            return False
        say(f"{head}: {time.monotonic() - started:.1f} s, {size / 1000:.0f} kB")
        return True

    def _recorded(self, name: str, work: Path) -> Path:
        """Record in another process; return the trace's path. Raises RecordingError."""
        shutil.rmtree(work / name, ignore_errors=True)
        command = [sys.executable, "-m", "minidl.prove.recordings.one", name, self.device, str(work)]
        with running(command, work, **({sim.VARIABLE: "1"} if self.device == sim.NAME else {})) as scene:
            if not scene.wait_for_end(SCENE_TIMEOUT):
                raise RecordingError(f"it ran for more than {SCENE_TIMEOUT:g} s")
            if code := scene.process.returncode:
                raise RecordingError(f"exit code {code}: {' / '.join(scene.errors().strip().splitlines()[-3:])}")
            return Path(scene.said().splitlines()[-1])

    def _packed(self, name: str, path: Path) -> int:
        """Check the trace at `path` and pack it; return the size in bytes. Raises RecordingError."""
        trace = read_trace(path)
        report = examine(trace)
        if report.violations:
            raise RecordingError(f"its trace breaks a rule: {report.violations[0]}")
        draft = trace.pack(self.output / f".{name}{PACKED_SUFFIX}")
        size = draft.stat().st_size
        if size > LIMIT:
            draft.unlink()
            raise RecordingError(f"its packed trace has {size} bytes; the limit is {LIMIT}: record fewer batches")
        draft.replace(self.output / (name + PACKED_SUFFIX))
        return size
