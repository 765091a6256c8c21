"""The notebooks run as they are committed, again with right answers, and their questions with wrong ones.

A kernel serves several notebooks. What is committed is what a run shows, with no answer given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks need Jupyter: pip install -e '.[notebooks]'")
pytest.importorskip("nbclient", reason="the notebooks need Jupyter: pip install -e '.[notebooks]'")

from sizes import slow  # noqa: E402

import course  # noqa: E402
from notebooks import FOLDER, NOTEBOOKS, copied, together  # noqa: E402

ANSWERS: dict[str, dict[str, Any]] = {
    "00_first_look": {
        "processes": (4, "three"), "decoder": ("worker", "loader"), "owner": ("worker 1", 4),
        "pickler": ("b", "the loader's main thread"), "piped": ("0.1 %", "all of them"), "copied": ("labels", "images"),
    },
    "01_datasets": {
        "calls": {"one_by_one": ("four", 1), "together": (1, 4)}, "becomes": ("double", "float32"),
        "counted": ("none", 12), "arrives": ("3 times", "once"), "short_batches": ("two", 1), "ends": ("more", 5)},
    "02_samplers": {
        "never_drawn": ("a third", "hardly any"), "same_epochs": (False, "yes"), "same_with_workers": ("yes", False),
        "drawn_by_then": (28, 4), "batch_count": ("three", 2), "zero_weight": ("never", 125)},
    "03_ranks": {
        "share_of": ("1, 5, 9", [1, 2, 3]), "repeated": ("two", 4), "dropped": (2, 0), "forgotten": ("yes", False),
        "other_seeds": ("both", "nothing"), "told_epoch": (2, 1)},
    "04_one_page": {
        "alternates": ("never", 5), "flood": ("eleven", 12), "swapped": ("batch 1", 0), "waiting_for": ("worker 1", 0),
        "early": ("four", 8), "between": ("the next task", "nothing"), "outstanding": (6, 24)},
    "05_many_workers": {
        "first_tasks": ("6 tasks", 2), "most_outstanding": (6, 5), "sent_for_each": ("one", 2),
        "owner": (2, "worker 0"), "buffered": ("eight", 7), "next_after_slow": (3, 1), "fewest": ("worker 0", "w1"),
        "last_batch": (False, "yes")},
    "06_tensors": {
        "message_size": ("hardly any", 4_000_000), "moved": (True, "no"), "copier": ("feeder", "put"),
        "segments": (3, 4), "view": ("640,000 bytes", 40_000), "copies": ("one", 2)},
    "07_device": {
        "pinner": ("pin thread", "worker"), "copied_meanwhile": (6, 5), "who_waits": ("the computing stream", "a"),
        "returns_early": {"pinned": ("yes", False), "pageable": (False, True)}, "hidden": ("nearly all", 0.5),
        "times_the_bytes": ("four", 1)},
    "08_shutdown": {
        "first_told": ("the pin thread", "workers"), "sentinels": (5, 4), "unyielded": (8, 0),
        "died_of_it": ("none", 1), "unguarded": {"sentinel": ("late", "a"), "watchdog": ("orphans", "late")}},
    "09_hang_lab": {
        "who": (1, 0), "sample": (13, 12),
        "what": {
            "one": ("fifo", "file lock"), "two": ("stopped", "circle"), "three": ("lost", "a worker that has died"),
            "four": ("deadlock", "signal"), "five": ("h", "barrier"), "six": ("a barrier that not all reach", "g")}},
    "10_bottleneck": {
        "inside_next": (8, 0), "who_waits": {"starved": ("loop", "workers"), "healthy": ("workers", "loop")},
        "doing": ("computing", "a disk"), "fewest_workers": ("eight", 12), "fastest": (8, 12),
        "greatest": ("the first batch", "starting workers"), "blocked_by": ("worker 1", 0), "helps": (True, "no")},
    "11_transport": {
        "segments": ("four", 8), "writer": ("main", "feeder"), "copies": ("none", 1), "saver": ("recycling", "inline"),
        "files": {"inlined": (2, 4), "in_one": (1, 2)}, "made": ("a few", "one for each"),
        "held": {"views": ("one for each", "a few"), "clones": ("a few", "one for each")}},
    "12_checkpointing": {
        "lost": ("24 samples", 28), "lost_late": (8, 16), "numbered": ("zero", 5), "again": (2, 6),
        "count_alone": ("both", "nothing")},
    "13_one_timeline": {
        "processes": (6, 4), "named": ("four", 1), "shifted": ("none", 6_137), "halfway": ("4 ms", 2),
        "together": ("the end", "beginning"), "batches_each": (12, 48)},
}  # fmt: skip
"""Of each question a right answer and a wrong one, in readers' own forms; by its argument if it is asked twice."""

ASKED = re.compile(r"^ask\.(\w+)\(.*answer=\.\.\.\)$", re.MULTILINE)
CHECKED = re.compile(r"^ask\.(\w+)\((?!.*answer=)", re.MULTILINE)
UNANSWERED = "Write your answer in the place of ... and run this cell again."
UNWRITTEN = "Not written yet. Write it, and run this cell again."


def stem(path: Path) -> str:
    return path.stem


by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=stem)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell: Any) -> str:
    """What the cell shows as text."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(shown)


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for cell in code(notebook) for output in cell.outputs)


def unwanted(notebook: Any) -> list[Any]:
    """Errors and warnings."""
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


# --- What is committed ------------------------------------------------------------------------------------------------
COMMITTED = [*NOTEBOOKS, *sorted((FOLDER / "labs").glob("*.ipynb"))]


@pytest.mark.parametrize("path", COMMITTED, ids=stem)
def test_what_is_committed_is_whole(path: Path) -> None:
    """No error, no path of a machine, no link that leads nowhere, and no printed line that a saved page would break."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not unwanted(notebook)
    for promise in ("What you'll do", "What you'll learn", "What you need"):
        assert promise in notebook.cells[0].source
    assert re.findall(r"(?<![\w.])/(?:tmp|root|home|work|usr|var)/[^\s\"'<]*", path.read_text()) == []
    links = [link for cell in notebook.cells for link in re.findall(r"\]\(([^)#]+)[^)]*\)", cell.source)]
    assert links
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert [line for line in printed.splitlines() if len(line) > course.WIDTH] == []


@by_name
def test_what_is_committed_is_a_run_without_answers(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert pictures(notebook) >= 1
    assert all(cell.execution_count for cell in code(notebook))
    asked = [cell for cell in code(notebook) if ASKED.search(cell.source)]
    checked = [cell for cell in code(notebook) if CHECKED.search(cell.source)]
    assert {ASKED.search(cell.source)[1] for cell in asked} == set(ANSWERS[path.stem])
    assert len(asked) >= 5
    assert 2 <= len(checked) <= 4
    for cell in asked:
        assert said(cell).endswith(UNANSWERED)
        assert cell.outputs[-1]["data"]["text/html"].count("<details") == 2  # hint; answer and reason
    for cell in checked:
        assert "raise NotImplementedError" in cell.source
        assert said(cell) == UNWRITTEN


def test_numbers_of_05_tell_formulas_apart() -> None:
    """Of the run with a slow sample: workers, tasks for each, their sum and product, and what is stored."""
    notebook = nbformat.read(FOLDER / "05_many_workers.ipynb", as_version=4)
    sources = "\n".join(cell.source for cell in code(notebook))
    workers, each = map(int, re.search(r"blocked = .*num_workers=(\d+), prefetch_factor=(\d+)", sources).groups())
    formulas = {workers, each, workers + each, workers * each, (workers - 1) * each, workers * (each - 1)}
    assert len(formulas) == 6


# --- What teachers are told -------------------------------------------------------------------------------------------
def table(name: str) -> list[list[str]]:
    """The rows of a table in notebooks/README.md, without its head."""
    _, inside, _ = re.split(f"<!-- /?{name} -->\n", (FOLDER / "README.md").read_text())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.splitlines()[2:]]


@by_name
def test_the_teachers_tables_know_each_question_and_exercise(path: Path) -> None:
    cells = code(nbformat.read(path, as_version=4))
    asked, checked = ([m[1] for cell in cells if (m := kind.search(cell.source))] for kind in (ASKED, CHECKED))
    (row,) = [row for row in table("order") if f"({path.name})" in row[0]]
    assert row[3:5] == [str(len(asked)), str(len(checked))]
    goals = [(which.split(", "), *cells) for _, which, *cells in table("goals")]
    mine = [cells for which, *cells in goals if path.name[:2] in which]
    questions, exercises = (set(re.findall(r"`(\w+)`", " ".join(column))) for column in zip(*mine, strict=True))
    assert set(asked) <= questions
    assert set(checked) <= exercises


def test_each_goal_has_a_question_of_its_notebook() -> None:
    known = {path.name[:2]: path.read_text() for path in NOTEBOOKS}
    for goal, which, questions, exercises in table("goals"):
        names = re.findall(r"`(\w+)`", questions)
        assert names, goal
        for name in names + re.findall(r"`(\w+)`", exercises):
            assert any(f"ask.{name}(" in known[number] for number in which.split(", ")), (goal, name)


# --- Running ----------------------------------------------------------------------------------------------------------
def answered(notebook: Any, place: int) -> Any:
    """The notebook with right (0) or wrong (1) answers; with the right ones, the exercises are solved, too."""
    name = notebook.metadata["stem"]
    for cell in code(notebook):
        if asked := ASKED.search(cell.source):
            both = ANSWERS[name][asked[1]]
            if isinstance(both, dict):
                (both,) = [of for about, of in both.items() if re.search(rf"\b{about}\b", cell.source)]
            cell.source = cell.source.replace("answer=...", f"answer={both[place]!r}")
        elif CHECKED.search(cell.source) and not place:
            names = [node.name for node in ast.parse(cell.source).body if hasattr(node, "name")]
            solved = f"from solutions.{name[3:]} import {', '.join(names)}\n"
            cell.source = CHECKED.sub(lambda match, solved=solved: solved + match[0], cell.source, count=1)
    return notebook


def versions(path: Path, *, unanswered: bool) -> list[Any]:
    """The notebook as it is, if that is asked for, with right answers, and its questions with wrong ones."""
    read = [nbformat.read(path, as_version=4) for _ in range(3)]
    for notebook in read:
        notebook.metadata["stem"] = path.stem
    as_it_is, right, wrong = read[0], answered(read[1], 0), answered(read[2], 1)
    wrong.cells = [cell for cell in wrong.cells if re.search(r"^ask\..*answer=", cell.source, re.MULTILINE)]
    return [*([as_it_is] if unanswered else []), right, wrong]


def executed(paths: list[Path], folder: Path, *, unanswered: bool) -> dict[Path, list[Any]]:
    """Each notebook's versions, run in one kernel, which forgets its names between two notebooks."""
    here = copied(folder)
    (here / "matplotlibrc").write_text("savefig.dpi: 30\n")  # the same pictures, faster
    given = [(path, version) for path in paths for version in (*versions(path, unanswered=unanswered), FORGET)]
    ran = together([version for _, version in given], here)
    return {path: [done for (one, _), done in zip(given, ran, strict=True) if one == path][:-1] for path in paths}


FORGET = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])
LONG = {"11_transport", "12_checkpointing"}
"""They take twice as long as the others."""

QUICK = [path for path in NOTEBOOKS if path.stem not in LONG]
GROUPS = [QUICK[at : at + 4] for at in range(0, len(QUICK), 4)] + [[path] for path in NOTEBOOKS if path.stem in LONG]
"""Notebooks that share a kernel, whose start and imports take as long as a notebook."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[Any]]:
    """Give a notebook's run with right answers, and that of its questions with wrong ones."""
    done: dict[Path, list[Any]] = {}

    def of(path: Path) -> list[Any]:
        if path not in done:
            (group,) = (group for group in GROUPS if path in group)
            done.update(executed(group, tmp_path_factory.mktemp("notebooks"), unanswered=False))
        return done[path]

    return of


@pytest.mark.live
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", [*QUICK, *slow(*(path for path in NOTEBOOKS if path.stem in LONG))], ids=stem)
def test_it_grades_right_and_wrong_answers(path: Path, ran: Callable[[Path], list[Any]]) -> None:
    grades(path, *ran(path))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(300)
@by_name
def test_it_runs_twice_as_what_is_committed_has_run(path: Path, tmp_path: Path) -> None:
    first, right, wrong = executed([path], tmp_path, unanswered=True)[path]
    assert not unwanted(first)
    assert pictures(first) == pictures(right)
    for cell in code(first):
        if ASKED.search(cell.source):
            assert said(cell).endswith(UNANSWERED)
    grades(path, right, wrong)


def grades(path: Path, right: Any, wrong: Any) -> None:
    assert not unwanted(right)
    assert not unwanted(wrong)
    assert pictures(right) == pictures(nbformat.read(path, as_version=4))
    for cell in code(right):
        if re.search(r"^ask\..*answer=", cell.source, re.MULTILINE):
            assert "\nRight: " in said(cell), said(cell)
        elif CHECKED.search(cell.source):
            assert said(cell).startswith("Right. "), said(cell)
    for cell in code(wrong):
        assert "\nNot " in said(cell), said(cell)
        open_part, *folds = cell.outputs[-1]["data"]["text/html"].split("<details")
        assert "answer and reason" in folds[-1]
        assert "answer and reason" not in open_part
