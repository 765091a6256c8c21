"""The table of faults: each cell is one fault at one step, run in a process group of its own, and what must follow.

Interface: `cells()` lists them, `run_cell(cell, folder)` runs one and returns what was found wrong, `table` prints the
results. A cell passes if it ends within `BOUND`, its error names what happened, no process is left, nothing is left
under /dev/shm, and its trace breaks no rule and holds the fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from minidl.check import check
from minidl.faults.program import WORDS
from minidl.tracefile import events as ev
from minidl.tracefile.reader import read_trace

BOUND: Final = 60.0
"""Seconds within which a cell has to end: far more than it takes, so that a busy machine makes none fail."""

GRACE: Final = 10.0
"""Seconds after its end in which what a cell leaves behind may still go."""

SHM: Final = Path("/dev/shm")

ENDS: Final = {"sys.exit": 3, "os._exit": 3, "SIGKILL": -9, "SIGTERM": -15, "SIGSEGV": -11}
"""Fault -> exit code of the process that has it."""

DEATHS: Final = ("os._exit", "SIGKILL", "SIGSEGV")
IN_WORKER: Final = ("exception", "sys.exit", *DEATHS, "SIGTERM", "SIGSTOP")

STEPS: Final[dict[str, Sequence[str]]] = {
    "start": DEATHS,
    "init": IN_WORKER,
    "sample": (*IN_WORKER, "unpicklable"),
    "collate": (*IN_WORKER, "unpicklable"),
    "feeder": IN_WORKER,
    "pin": ("exception",),
    "between epochs": ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP"),
    "loop": ("exception", "sys.exit", "os._exit", "SIGKILL", "SIGTERM", "SIGSEGV"),
    "worker's exit": (*DEATHS, "SIGSTOP"),
}
"""Step -> its faults."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault at one step of one kind of loader."""

    step: str
    fault: str
    method: str = "fork"
    persistent: bool = False
    kind: str = "map"

    def __str__(self) -> str:
        return f"{self.step}, {self.fault}, {self.method}, {self.kind}{', persistent' if self.persistent else ''}"

    @property
    def whole(self) -> bool:
        """Whether the program itself lives on, and tells what happened."""
        return self.step != "loop" or self.fault in ("exception", "sys.exit")

    @property
    def error(self) -> str | None:
        """A pattern for the error that must come; None if there must be none."""
        if self.step == "worker's exit" or not self.whole:
            return None
        if self.step == "loop":
            return WORDS if self.fault == "exception" else "SystemExit: 3"
        if self.fault in ("exception", "unpicklable"):
            return WORDS
        if (self.step, self.fault) == ("feeder", "sys.exit"):
            return "Caught SystemExit"
        if self.fault == "SIGSTOP":
            return "timed out"
        return r"exited unexpectedly|killed by signal"


def cells() -> Iterator[Cell]:
    """Every cell, the quick ones first within a step."""
    for step, faults in STEPS.items():
        for fault in faults:
            for kind in ("map", "iterable"):
                for persistent in (False, True):
                    if persistent or step != "between epochs":
                        yield Cell(step, fault, "fork", persistent, kind)


def run_cell(cell: Cell, folder: Path) -> list[str]:
    """Run a cell, whose trace goes into `folder`; return what was found wrong, each in words."""
    trace = folder / "trace"
    before = set(os.listdir(SHM))
    arguments = json.dumps({**dataclasses.asdict(cell), "trace": str(trace)})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if cell.step == "pin":
        environment["MINIDL_SIMULATE_DEVICE"] = "1"
    with (folder / "stderr").open("w+") as errors:
        program = subprocess.Popen(
            [sys.executable, "-m", "minidl.faults.program", arguments],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=environment,
        )  # fmt: skip
        try:
            out, _ = program.communicate(timeout=BOUND)
            wrong = []
        except subprocess.TimeoutExpired:
            wrong = [f"it did not end within {BOUND:g} s"]
            out = ""
        wrong += _left_behind(program.pid, _pids(folder), before)
        _kill_group(program)
        errors.seek(0)
        wrong += _told(cell, program.returncode, out, errors.read()) if not wrong or out else []
    return wrong + _recorded(cell, trace)


def _told(cell: Cell, code: int, out: str, errors: str) -> list[str]:
    """What is wrong with what the program says, and with its end."""
    if not cell.whole:
        expected = ENDS[cell.fault]
        return [] if code == expected else [f"the program ended with {code}, not {expected}: {errors[-300:]}"]
    if code or not out:
        return [f"the program ended with exit code {code}: {errors[-300:]}"]
    found = json.loads(out)["errors"]
    if cell.error is None:
        return [f"there was an error: {found[0]}"] if found else []
    if not any(re.search(cell.error, text) for text in found):
        return [f"no error says {cell.error!r}: {found}"]
    return []


def _left_behind(group: int, pids: set[int], before: set[str]) -> list[str]:
    deadline = time.monotonic() + GRACE
    while True:
        alive = _group(group)
        files = [
            name for name in set(os.listdir(SHM)) - before
            if name.startswith("sem.mp-") or any(name.startswith(f"torch_{pid}_") for pid in pids)
        ]  # fmt: skip
        if not (alive or files) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    wrong = [f"processes are left: {alive}"] if alive else []
    return wrong + ([f"left under {SHM}: {sorted(files)}"] if files else [])


def _pids(folder: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(pid) for pid in (folder / "trace.pids").read_text().split()}
    return set()


def _group(group: int) -> list[int]:
    """The processes of a group that live."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                state, _, pgrp = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    found.append(int(entry))
    return found


def _kill_group(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.communicate()


def _recorded(cell: Cell, path: Path) -> list[str]:
    """What is wrong with the trace."""
    trace = read_trace(path)
    wrong = [f"the trace breaks the rule {violation.rule}: {violation}" for violation in check(trace)[:1]]
    if not cell.whole or cell.step in ("loop", "start", "worker's exit"):
        return wrong
    codes = {code: trace.events["code"] == code for code in (ev.TASK_ERROR, ev.TIMED_OUT, ev.WORKER_GONE)}
    if cell.fault in ("exception", "unpicklable") or (cell.step, cell.fault) == ("feeder", "sys.exit"):
        said = WORDS if cell.fault != "sys.exit" else "SystemExit"
        texts = [trace.text(row) for row in trace.events[codes[ev.TASK_ERROR]]]
        return wrong + ([] if any(said in text for text in texts) else [f"the trace holds no error: {texts}"])
    if cell.fault == "SIGSTOP":
        return wrong + ([] if codes[ev.TIMED_OUT].any() else ["the trace holds no timeout"])
    ends = trace.events[codes[ev.WORKER_GONE]]["y"].tolist()
    from_parent = (cell.step, cell.fault) == ("between epochs", "SIGTERM")  # torch's handler then exits with 0
    expected = 0 if from_parent else ENDS[cell.fault]
    return wrong + ([] if expected in ends else [f"the trace holds no end with {expected}: {ends}"])


def table(results: dict[Cell, tuple[list[str], float]]) -> Iterator[str]:
    """One line a step and fault: for each kind of loader, whether the cell passed."""
    kinds = [("map", False), ("map", True), ("iterable", False), ("iterable", True)]
    yield f"{'step':15}{'fault':14}" + "".join(f"{kind + (' kept' if kept else ''):>15}" for kind, kept in kinds)
    for step, fault in dict.fromkeys((cell.step, cell.fault) for cell in results):
        words = []
        for kind, kept in kinds:
            wrong, seconds = results.get(Cell(step, fault, "fork", kept, kind), ([], 0.0))
            words.append(f"{'WRONG' if wrong else 'ok'} {seconds:.1f} s" if seconds else "")
        yield (f"{step:15}{fault:14}" + "".join(f"{word:>15}" for word in words)).rstrip()
