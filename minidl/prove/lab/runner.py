"""Runs a case's program as its user would: `train.py` in a folder of its own, a session of its own, for a bounded time.

Interface: `running(name, options, mode)` starts it, and kills all that is left of it when its block ends.
`LabRun.wait()` returns when the program has ended or stands still. The folder, the program's name and its arguments say
nothing about the case: docstring and row are blanked in the copy.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import minidl
from minidl.process_stat import ENDED, every_process, kill_if
from minidl.prove.lab.case import LabOptions

BOUND: Final = 120.0
"""Seconds after which a program that does anything at all is ended."""

QUIET: Final = 6.0
"""Seconds without a word from which on a program stands still, if it does not compute."""

BUSY_QUIET: Final = 12.0
"""The same for a program that computes: the start of workers does, and prints nothing."""

HANG_AFTER: Final = "3"
"""Seconds after which the recorder samples a run that stands still."""

SHM: Final = Path("/dev/shm")


class Mode(enum.Enum):
    """Which loader runs, and who records it."""

    PLAIN = "torch, not recorded"
    OBSERVED = "torch, observed"
    OURS = "minidl's, recorded"

    @property
    def loader(self) -> str:
        """The loader as a case's row names it."""
        return "ours" if self is Mode.OURS else "torch"


def program_of(name: str) -> str:
    """The program of a case, without the docstring and the row, whose lines are left empty."""
    spec = importlib.util.find_spec(f"minidl.prove.lab.cases.{name}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    lines = source.split("\n")
    for node in ast.parse(source).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        row = isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "CASE" for t in node.targets)
        if docstring or row:
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)


@dataclass
class LabRun:
    """A case's program, while it runs and afterwards."""

    process: subprocess.Popen[bytes]
    folder: Path
    mode: Mode
    seen: set[int] = field(default_factory=set)  # its processes, also those that have ended: they leave files, too

    @property
    def trace(self) -> Path:
        """Where the run is recorded, if it is."""
        return self.folder / "trace"

    @property
    def ended(self) -> bool:
        """Whether the program has ended."""
        return self.process.poll() is not None

    def said(self) -> str:
        """What it has printed."""
        return (self.folder / "stdout").read_text(errors="replace")

    def errors(self) -> str:
        """What it has printed on stderr."""
        return (self.folder / "stderr").read_text(errors="replace")

    def wait(self, quiet: float = QUIET, bound: float = BOUND) -> bool:
        """Wait until it has ended or stands still; whether it is one of them after at most `bound` seconds."""
        deadline = time.monotonic() + bound
        size, since, cpu = -1, time.monotonic(), cpu_seconds(self.process.pid)
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self.seen.update(session(self.process.pid))
            if self.ended:
                return True
            now, said = time.monotonic(), (self.folder / "stdout").stat().st_size
            if said != size:
                size, since, cpu = said, now, cpu_seconds(self.process.pid)
            elif now - since > quiet and said:
                busy = (cpu_seconds(self.process.pid) - cpu) / (now - since)
                if busy < 0.3 or now - since > BUSY_QUIET:
                    return True
                if busy >= 0.3 and now - since < quiet + 0.5:
                    cpu = cpu_seconds(self.process.pid) - 0.3 * (now - since)  # judge the seconds from here on
        return False

    def wait_for_end(self, bound: float = BOUND) -> bool:
        """Wait until it has ended; whether it has after at most `bound` seconds."""
        try:
            self.process.wait(bound)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_words(self, words: str, bound: float = BOUND) -> bool:
        """Wait until it has printed `words` or has ended; whether it has printed them."""
        deadline = time.monotonic() + bound
        while words not in self.said():
            if self.ended or time.monotonic() > deadline:
                return words in self.said()
            time.sleep(0.05)
        return True

    def kill(self) -> None:
        """Kill all its processes at once, as kill -9 of the group does, and put away the shared memory they leave."""
        semaphores: set[Path] = set()
        deadline = time.monotonic() + 20
        while (members := session(self.process.pid)) and time.monotonic() < deadline:  # one may just have been forked
            self.seen.update(members)
            semaphores |= {path for pid in members for path in _semaphores(pid)}
            for pid in members:
                kill_if(pid, lambda fields: int(fields[3]) == self.process.pid)
            time.sleep(0.02)
        self.process.wait()
        for left in (*semaphores, *(left for pid in self.seen for left in SHM.glob(f"torch_{pid}_*"))):
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def running(name: str, options: LabOptions, mode: Mode) -> Iterator[LabRun]:
    """Start a case's program; nothing of it is left when the block ends."""
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "train.py").write_text(program_of(name))
        recorder = ["-m", "minidl", "run", "--trace", "trace", *(["--observe"] if mode is Mode.OBSERVED else [])]
        command = [sys.executable, *(recorder if mode is not Mode.PLAIN else []), "train.py", *options.arguments()]
        package = str(Path(minidl.__file__).parent.parent)
        paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths))),
            "MINIDL_HANG_AFTER": HANG_AFTER,
            "OMP_NUM_THREADS": "2",
            "TMPDIR": place,  # multiprocessing's own folders are not removed by processes that are killed
        }
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        run = LabRun(process, folder, mode)
        try:
            yield run
        finally:
            run.kill()


def session(leader: int) -> list[int]:
    """The processes of a session that live."""
    return [pid for pid, fields in every_process() if int(fields[3]) == leader and fields[0] not in ENDED]


def _semaphores(pid: int) -> set[Path]:
    """The named semaphores that a process has mapped and that still have their names: those of spawned workers.

    The kernel shows a mapping under the name that the C library gave the file first, so they are found by their inodes.
    """
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        mapped = {int(line[4]) for line in lines if len(line) > 5 and line[5].startswith(f"{SHM}/sem.")}
        return {Path(entry.path) for entry in os.scandir(SHM) if mapped and entry.inode() in mapped}
    return set()


def cpu_seconds(leader: int) -> float:
    """The CPU time of a session's living processes."""
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in every_process() if int(fields[3]) == leader)
    return ticks / os.sysconf("SC_CLK_TCK")
