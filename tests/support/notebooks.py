"""Executing notebooks: several in one fresh kernel, in a process of its own, in a copy of their folder.

`together` does this for tests. `python tests/support/notebooks.py [NAME...]` executes the project's notebooks in place,
each in a kernel of its own, and writes their outputs, without the times at which cells ran.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
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


def together(notebooks: list[Any], folder: Path) -> list[Any]:
    """The notebooks with the outputs of one kernel, which has run them one after the other."""
    files = [folder / f"together-{number}.ipynb" for number in range(len(notebooks))]
    for notebook, file in zip(notebooks, files, strict=True):
        nbformat.write(notebook, file)
    command = [sys.executable, __file__, "--together", *map(str, files)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=140 * len(notebooks))
    assert done.returncode == 0, done.stderr[-4000:]
    return [nbformat.read(file, as_version=4) for file in files]


def execute(files: list[Path]) -> None:
    """Run the notebooks in one kernel, from first to last, and write their outputs. Raises CellExecutionError."""
    client = NotebookClient(
        nbformat.v4.new_notebook(), timeout=SECONDS, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(files[0].parent)}},
    )  # fmt: skip
    with client.setup_kernel():
        for file in files:
            client.nb = nbformat.read(file, as_version=4)
            for number, cell in enumerate(client.nb.cells):
                client.execute_cell(cell, number)
                cell.metadata.pop("execution", None)
            nbformat.write(client.nb, file)


def main(names: list[str]) -> None:
    if names[:1] == ["--together"]:
        execute([Path(name) for name in names[1:]])
        return
    for path in [path for path in NOTEBOOKS if not names or any(path.name.startswith(name) for name in names)]:
        execute([path])
        print(f"{path.name}: {path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
