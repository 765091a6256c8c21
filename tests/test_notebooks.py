"""The notebooks run from a clean kernel, and what is committed is what they show.

Each notebook is executed in a process of its own, in a fresh kernel; its asserts are its claims. The committed files
must hold their outputs, without an error among them, and the pictures that make them worth reading on a code host.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks need Jupyter: pip install -e '.[notebooks]'")
pytest.importorskip("nbconvert", reason="the notebooks need Jupyter: pip install -e '.[notebooks]'")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

ANSWERS = {
    "00_first_look": {"prediction_piped": "hardly any", "my_answer": 589_824},
    "05_many_workers": {
        "prediction_sent": 4, "prediction_most": 4, "prediction_each": 1, "prediction_worker": 1,
        "prediction_buffered": 4, "prediction_slowest_worker": 0, "my_answer": 8,
    },
    "12_checkpointing": {"prediction_lost": 16, "prediction_lost_late": 8, "prediction_again": 2, "my_answer": 28},
}  # fmt: skip
SOLVED = {"12_checkpointing": 1}
"""Functions that the reader writes; a folded cell of the notebook has their solutions."""

TO_WRITE = re.compile(r"^(def \w+\(.*\):) \.\.\.$", re.MULTILINE)
SOLUTION = re.compile(r"^<details>.*?^`(return .*)`$", re.MULTILINE | re.DOTALL)
ASKED = re.compile(r"^(prediction_\w+|my_answer) = (\S+)", re.MULTILINE)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_there_are_notebooks() -> None:
    names = ["00_first_look.ipynb", "05_many_workers.ipynb", "12_checkpointing.ipynb"]
    assert [path.name for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_holds_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert pictures(notebook) >= 1
    bad = [output for output in outputs(notebook) if output.output_type == "error" or output.get("name") == "stderr"]
    assert not bad
    head = notebook.cells[0].source
    for promise in ("What you'll do", "What you'll learn", "What you need"):
        assert promise in head


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_leaves_the_predictions_to_the_reader(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    asked = [match for source in cells for match in ASKED.findall(source)]
    assert dict(asked) == dict.fromkeys(ANSWERS[path.stem], "None")


def test_an_answer_is_folded_until_the_reader_has_found_it() -> None:
    spec = importlib.util.spec_from_file_location("course", NOTEBOOKS[0].parent / "course.py")
    assert spec is not None
    assert spec.loader is not None
    course = importlib.util.module_from_spec(spec)
    sys.modules["course"] = course  # its dataclass asks for it
    try:
        spec.loader.exec_module(course)
    finally:
        del sys.modules["course"]
    for prediction, said in ((None, "no prediction yet"), (3, "not 3. Think of <tasks>.")):
        grade = course.grade(prediction, 16, "Four are out.", "Think of <tasks>.")
        assert repr(grade).startswith(said)
        shown, folded = grade._repr_html_().split("<details>")
        assert "16" not in repr(grade) + shown
        assert "16. Four are out." in folded
        assert "<tasks>" not in shown
    assert repr(course.grade(" 16", 16, "Four are out.", "Think.")) == "right: 16. Four are out."
    assert repr(course.grade("Hardly any", "hardly any", "Why.")) == "right: hardly any. Why."
    assert "the trace says 16" in repr(course.grade(3, 16, "Four are out."))


def answered(path: Path, answers: dict[str, object]) -> None:
    """Write the right answers, and the solutions that it shows, into a notebook, as a reader would."""
    notebook = nbformat.read(path, as_version=4)
    solutions = [found for cell in notebook.cells for found in SOLUTION.findall(cell.source)]
    assert len(solutions) == SOLVED.get(path.stem, 0)
    for cell in notebook.cells:
        cell.source = ASKED.sub(lambda match: f"{match[1]} = {answers[match[1]]!r}", cell.source)
        cell.source = TO_WRITE.sub(lambda match: f"{match[1]} {solutions.pop(0)}", cell.source)
    assert not solutions
    nbformat.write(notebook, path)


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_a_clean_kernel_and_grades_right_answers_so(path: Path, tmp_path: Path) -> None:
    here = tmp_path / "notebooks"
    shutil.copytree(path.parent, here, ignore=shutil.ignore_patterns("__pycache__"))
    answered(here / path.name, ANSWERS[path.stem])
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", path.name]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    executed, committed = (nbformat.read(place, as_version=4) for place in (here / path.name, path))
    assert pictures(executed) == pictures(committed)
    said = "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(executed))
    assert len(re.findall(r"^['\"]?right: ?", said, re.MULTILINE)) == len(ANSWERS[path.stem]) + SOLVED.get(path.stem, 0)
