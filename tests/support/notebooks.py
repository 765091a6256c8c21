"""Executing notebooks: in one fresh kernel each, in a copy of their folder, and as often as asked.

`Kernel` runs cells and returns what they show. `python tests/support/notebooks.py [NAME...]` executes the notebooks in
place and writes their outputs, without the times at which cells ran.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 120
"""A cell's patience."""


def copied(to: Path) -> Path:
    """A copy of the notebooks' folder, with the recorded runs and the package beside it."""
    here = to / "notebooks"
    shutil.copytree(FOLDER, here, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb", ".ipynb_checkpoints"))
    for beside in ("traces", "minidl"):
        (to / beside).symlink_to(ROOT / beside)
    return here


class Kernel:
    """A kernel in which the cells of one notebook run."""

    def __init__(self, folder: Path) -> None:
        self._client = NotebookClient(
            nbformat.v4.new_notebook(), timeout=SECONDS, kernel_name="python3", record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )  # fmt: skip

    @contextlib.contextmanager
    def started(self) -> Iterator[Kernel]:
        """The kernel runs."""
        with self._client.setup_kernel():
            yield self

    def run(self, notebook: Any) -> Any:
        """Execute all cells, from the first to the last, and return the notebook. Raises CellExecutionError."""
        self._client.nb = notebook
        for number, cell in enumerate(notebook.cells):
            self._client.execute_cell(cell, number)
        return notebook


def main(names: list[str]) -> None:
    for path in [path for path in NOTEBOOKS if not names or any(path.name.startswith(name) for name in names)]:
        with Kernel(path.parent).started() as kernel:
            notebook = kernel.run(nbformat.read(path, as_version=4))
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
