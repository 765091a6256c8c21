"""Programs in sessions of their own: each is started as a user starts it, for a bounded time, and leaves nothing.

Interface: `running(command, folder)` starts a program, and kills its whole session when the block ends;
`living(leader)` are the processes of a session. The kill also removes what killed processes leave under /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import minidl
from minidl.process_stat import ENDED, every_process, kill_if, remove_segments_of

BOUND: Final = 120.0
"""Seconds within which a program ends, or does what is waited for."""

SHM: Final = Path("/dev/shm")


@dataclass
class Program:
    """A program, while it runs and afterwards. folder: where it runs; its files `stdout` and `stderr` are there."""

    process: subprocess.Popen[bytes]
    folder: Path
    seen: set[int] = field(default_factory=set)  # its processes, also those that have ended: they leave files, too

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
        while words not in self.said() and not self.ended and time.monotonic() < deadline:
            time.sleep(0.02)
        return words in self.said()

    def kill(self) -> None:
        """Kill all its processes at once, as kill -9 of the group does, and remove the shared memory they leave."""
        semaphores: set[Path] = set()
        deadline = time.monotonic() + 20
        while (members := living(self.process.pid)) and time.monotonic() < deadline:  # one may just have been forked
            self.seen.update(members)
            semaphores |= {path for pid in members for path in _semaphores(pid)}
            kill_members(self.process.pid, members)
            time.sleep(0.02)
        self.process.wait()
        remove_segments_of(self.seen)
        for left in semaphores:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, **variables: str) -> Iterator[Program]:
    """Start a program in `folder`, with these environment variables too; nothing of it is left when the block ends."""
    paths = [str(Path(minidl.__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths)))} | variables
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
    program = Program(process, folder)
    try:
        yield program
    finally:
        program.kill()


def living(leader: int) -> list[int]:
    """The processes of a session that have not ended, in the order of their start, whatever their ids.

    A parent that is killed before its children records no death of theirs.
    """
    members = ((pid, fields) for pid, fields in every_process() if int(fields[3]) == leader)
    return [pid for _, pid in sorted((int(fields[19]), pid) for pid, fields in members if fields[0] not in ENDED)]


def kill_members(leader: int, members: Sequence[int]) -> None:
    """Kill these processes of a session; one that is no longer of it is spared."""
    for pid in members:
        kill_if(pid, lambda fields: int(fields[3]) == leader)


def cpu_seconds(leader: int) -> float:
    """The CPU time of a session's processes."""
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in every_process() if int(fields[3]) == leader)
    return ticks / os.sysconf("SC_CLK_TCK")


def _semaphores(pid: int) -> set[Path]:
    """The named semaphores that a process has mapped and that still have their names: those of spawned workers.

    The kernel shows a mapping under the name that the C library gave the file first, so they are found by their inodes.
    """
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        mapped = {int(line[4]) for line in lines if len(line) > 5 and line[5].startswith(f"{SHM}/sem.")}
        return {Path(entry.path) for entry in os.scandir(SHM) if mapped and entry.inode() in mapped}
    return set()
