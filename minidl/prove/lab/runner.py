"""Runs a case's program as its user would: `train.py` in a folder of its own, a session of its own, for a bounded time.

Interface: `running(name, options, mode)` starts it, and kills all that is left of it when its block ends.
`LabRun.wait()` returns when the program has ended or stands still. The folder, the program's name and its arguments say
nothing about the case.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minidl.prove import sessions
from minidl.prove.lab.case import LabOptions
from minidl.prove.sessions import BOUND, Program

QUIET: Final = 6.0
"""Seconds without a word from which on a program stands still, if it does not compute."""

BUSY_QUIET: Final = 12.0
"""The same for a program that computes: the start of workers does, and prints nothing."""

HANG_AFTER: Final = "3"
"""Seconds after which the recorder samples a run that stands still."""

CASES: Final = Path(__file__).parent / "cases"


class Mode(enum.Enum):
    """Which loader runs, and who records it."""

    PLAIN = "torch, not recorded"
    OBSERVED = "torch, observed"
    OURS = "minidl's, recorded"

    @property
    def loader(self) -> str:
        """The loader as a case's row names it."""
        return "ours" if self is Mode.OURS else "torch"


# --- A case's program -------------------------------------------------------------------------------------------------
FRAME: Final = """\
from torch.utils.data import DataLoader
from minidl.prove.lab.case import LabOptions, Pictures, launch, step"""
"""The imports of the program's ending; they stand in the row's place."""

USUAL_LOOP: Final = """

def main(options: LabOptions) -> None:
    for number, _ in enumerate(DataLoader({dataset}(options), **options.loading)):
        step(number)
"""
"""The training loop of a case that has no `main`, over the dataset that is its last class."""

LAUNCH: Final = """

if __name__ == "__main__":
    launch(main)
"""


def program_of(name: str) -> str:
    """The program of a case: without docstring and row, whose lines are left empty, and with a training loop."""
    source = (CASES / f"{name}.py").read_text()
    lines, body = source.split("\n"), ast.parse(source).body
    for node in body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        row = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASE"
        if docstring or row:
            own = FRAME.split("\n") if row else []
            assert node.end_lineno is not None
            empty = node.end_lineno - node.lineno + 1 - len(own)
            lines[node.lineno - 1 : node.end_lineno] = own + [""] * empty
    has_loop = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body)
    classes = ["Pictures", *(node.name for node in body if isinstance(node, ast.ClassDef))]
    return "\n".join(lines) + ("" if has_loop else USUAL_LOOP.format(dataset=classes[-1])) + LAUNCH


# --- Its run ----------------------------------------------------------------------------------------------------------
@dataclass
class LabRun(Program):
    """A case's program, while it runs and afterwards."""

    mode: Mode = Mode.PLAIN

    @property
    def trace(self) -> Path:
        """Where the run is recorded, if it is."""
        return self.folder / "trace"

    def wait(self, quiet: float = QUIET, bound: float = BOUND) -> bool:
        """Wait until it has ended or stands still; whether it is one of them after at most `bound` seconds."""
        deadline = time.monotonic() + bound
        size, since, cpu = -1, 0.0, 0.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self.seen.update(sessions.living(self.process.pid))
            if self.ended:
                return True
            now, said = time.monotonic(), len(self.said())
            if said != size:
                size, since, cpu = said, now, sessions.cpu_seconds(self.process.pid)
            elif now - since > quiet and said:
                computes = sessions.cpu_seconds(self.process.pid) - cpu > 0.3 * (now - since)
                if not computes or now - since > BUSY_QUIET:
                    return True
        return False


@contextlib.contextmanager
def running(name: str, options: LabOptions, mode: Mode) -> Iterator[LabRun]:
    """Start a case's program; nothing of it is left when the block ends."""
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "train.py").write_text(program_of(name))
        recorder = ["-m", "minidl", "run", "--trace", "trace", *(["--observe"] if mode is Mode.OBSERVED else [])]
        command = [sys.executable, *(recorder if mode is not Mode.PLAIN else []), "train.py", *options.arguments()]
        variables = {
            "MINIDL_HANG_AFTER": HANG_AFTER,
            "OMP_NUM_THREADS": "2",
            "TMPDIR": place,  # multiprocessing's own folders are not removed by processes that are killed
        }
        with sessions.running(command, folder, **variables) as program:
            yield LabRun(program.process, folder, program.seen, mode)
