"""The digest of a rank of a job (see `job.digests`), written beside the run: each minute, and at its end.

Interface: `Digest(directory)`; `attend(fork)` begins the next one if it is due, `write_last(fork)` the one of the end.

Rules of use: a child of the watchdog writes it, so a full or slow file system delays neither the run nor the watchdog.
What cannot be written, or takes longer than the pause, is dropped and counted; the next digest has the count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from minidl.tracefile.members import rank_in_name

EVERY: Final = 60.0
"""Seconds from the end of one digest to the next one at least."""

SHARE: Final = 100
"""Digests take at most this part of the time of a CPU."""

Fork = Callable[[Callable[[], object]], int]
"""Runs a function in a child, and returns its id; 0 = no child could be made."""


class Digest:
    """What is written of the rank whose trace is in `directory`; of another trace, nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wanted = rank_in_name(directory) >= 0
        self.child = self.dropped = 0
        self.begun = time.monotonic()
        self.due = self.begun + EVERY

    def attend(self, fork: Fork) -> None:
        """Begin the next digest if it is due; notice the end of the one before."""
        now = time.monotonic()
        if self.child and self._has_ended():
            self.due = now + max(EVERY, SHARE * (now - self.begun))
        if not self.wanted or now < self.due:
            return
        if self.child:  # it still writes
            self.dropped += 1
        else:
            self.child = fork(self._write)
            self.dropped += not self.child
        self.begun, self.due = now, now + EVERY

    def write_last(self, fork: Fork) -> None:
        """Have the digest of the whole run written by a child that outlives this process, if none hangs."""
        if self.wanted and not (self.child and not self._has_ended()):
            fork(self._write)

    def _has_ended(self) -> bool:
        pid, status = os.waitpid(self.child, os.WNOHANG)
        if pid:
            self.child = 0
            self.dropped += status != 0
        return bool(pid)

    def _write(self) -> None:
        from minidl.job.digests import keep

        failed = True
        try:
            os.nice(19)
            os.closerange(3, 1024)  # this child may outlive the run, whose pipes must end with it
            keep(self.directory, self.dropped)
            failed = False
        finally:
            os._exit(failed)
