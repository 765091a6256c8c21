"""Running cells and judging what they did.

Interface: `with Runner() as runner: runner.run(cell, folder)` runs one and returns what was found wrong, each in words.
A cell passes if it ends within `BOUND`, its error names what happened, no process is left, nothing is left under
/dev/shm, and its trace opens, holds the fault and breaks no rule.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from typing_extensions import Self

from minidl.check import check
from minidl.prove.faults.cells import Cell, Follows
from minidl.prove.sessions import SHM, kill_members, living
from minidl.tracefile.reader import Trace, read_trace

BOUND: Final = 60.0
"""Seconds within which a cell has to end: far more than it takes, so that a busy machine makes none fail."""

GRACE: Final = 15.0
"""Seconds after its end in which what a cell leaves behind may still go."""

SEEN: Final = 3
"""Batches that the training loop has before the loader's process dies of a fault in it."""


class Runner:
    """The process that forks cells; one at a time."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "minidl.prove.faults.serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment,
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate()

    def run(self, cell: Cell, folder: Path) -> list[str]:
        """Run a cell, whose files go into `folder`; return what was found wrong."""
        assert self._server.stdin is not None
        before = set(os.listdir(SHM))  # a process that has ended may have had the number of one of the cell's
        request = {"cell": asdict(cell), "folder": str(folder), "bound": BOUND}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        leader = int(self._answer())
        try:
            code = json.loads(self._answer())
            left = _left_behind(leader, folder, before)
        finally:
            while members := living(leader):
                kill_members(leader, members)
                time.sleep(0.002)
        ended = [f"it did not end within {BOUND:g} s"] if code is None else _told(cell, code, folder)
        return ended + left + _recorded(cell, folder)

    def _answer(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks cells has ended with {self._server.wait()}")
        return line


# --- What the program says --------------------------------------------------------------------------------------------
def _told(cell: Cell, code: int, folder: Path) -> list[str]:
    """What is wrong with the program's end, and with what it says."""
    outcome = cell.outcome
    expected = outcome.code if outcome.kind is Follows.ENDED else 0
    if code != expected:
        errors = (folder / "stderr").read_text(errors="replace").strip()
        return [f"the program ended with {code}, not {expected}: {errors[-400:]}"]
    if outcome.kind is Follows.ENDED:
        return []
    found: list[str] = json.loads((folder / "told").read_text())
    named = [text for text in found if outcome.says and re.search(outcome.says, text)]
    wrong = [f"there was another error: {text}" for text in found if text not in named][:1]
    silent = bool(outcome.says) and outcome.must and not named
    return wrong + ([f"no error says {outcome.says!r}"] if silent else [])


# --- What is left -----------------------------------------------------------------------------------------------------
def _left_behind(leader: int, folder: Path, before: set[str]) -> list[str]:
    deadline = time.monotonic() + GRACE
    while True:
        alive, files = living(leader), _shared(leader, folder, before)
        if not (alive or files) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    wrong = [f"processes are left: {alive}"] if alive else []
    return wrong + ([f"left under {SHM}: {files}"] if files else [])


def _shared(leader: int, folder: Path, before: set[str]) -> list[str]:
    """The cell's segments and semaphores that still have a name."""
    pids = {str(leader), *(path.name.partition("-")[0] for path in folder.glob("trace/*.events"))}
    prefixes = (f"sem.mp-{leader}-", *(f"torch_{pid}_" for pid in pids))
    return sorted(name for name in os.listdir(SHM) if name.startswith(prefixes) and name not in before)


# --- What the trace holds ---------------------------------------------------------------------------------------------
def _recorded(cell: Cell, folder: Path) -> list[str]:
    """What is wrong with the trace; `mini` leaves none."""
    if cell.transport == "mini":
        return []
    if not (folder / "trace").exists():
        return ["there is no trace"]
    trace = read_trace(folder / "trace")
    wrong = [f"the trace breaks the rule {violation.rule}: {violation}" for violation in check(trace)[:1]]
    return wrong + list(_missing(cell, trace))


def _missing(cell: Cell, trace: Trace) -> Iterator[str]:
    """What of the fault the trace does not hold."""
    outcome = cell.outcome
    if outcome.kind is Follows.ERROR:
        texts = [trace.text(row) for row in trace.select("task_error")]
        deaths = _codes(trace)  # of a full /dev/shm a worker may die
        named = any(re.search(outcome.says, text) for text in texts) or -signal.SIGBUS in deaths
        if outcome.must and not named:
            yield f"the trace holds no error {outcome.says!r}: {texts}"
    elif outcome.kind is Follows.TIMEOUT:
        if not len(trace.select("timed_out")):
            yield "the trace holds no timeout"
    elif outcome.kind is Follows.DEATH:
        if outcome.code not in _codes(trace):
            yield f"the trace holds no end with {outcome.code}: {_codes(trace)}"
    elif cell.step == "loop" and len(trace.select("yield")) < SEEN:
        yield f"the trace holds {len(trace.select('yield'))} of {SEEN} batches"


def _codes(trace: Trace) -> list[int]:
    return [int(row["y"]) for row in trace.select("worker_gone")]
