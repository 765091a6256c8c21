"""What teachers hand out and what they get back: copies without answers, marks, progress, notebooks written anew."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import minidl
from course import grading, handout, hang_lab, own_mysteries
from course.grading import Mark, merged
from course.handout import OWN, Handout, build, made, originals
from minidl import cli
from minidl.hang.evidence.stacks import py_spy
from minidl.process_stat import is_alive
from minidl.prove.lab.case import LabOptions

QUESTION = "ask.owner(trace, answer=...)"
COUNT = "ask.batch_count(10, 4, drop_last=False, answer=3)"
EXERCISE = "def mine(task):\n    raise NotImplementedError\n\n\nask.mine(mine)"


@pytest.mark.parametrize(("original", "submitted", "runs"), [
    (QUESTION, None, QUESTION), (QUESTION, "ask.owner(trace, answer=4)", "ask.owner(trace, answer=4)"),
    (QUESTION, "import os\nprint(1)\nask.owner(other, 7, answer='worker 1')", "ask.owner(trace, answer='worker 1')"),
    (QUESTION, "mine = 1 + 1\nask.owner(trace, answer=1)\nask.owner(trace, answer=mine)",
     "mine = 1 + 1\nask.owner(trace, answer=mine)"),
    (f"trace = made()\n{QUESTION}", "trace = made()\nmine = 2\nask.owner(trace, answer=mine)",
     "trace = made()\nmine = 2\nask.owner(trace, answer=mine)"),
    (QUESTION, "print('gone')", QUESTION), (QUESTION, "x = '\0'", "x = '\0'"),
    (QUESTION, "ask.owner(trace, answer=", "ask.owner(trace, answer="),
    (EXERCISE, EXERCISE.replace("raise NotImplementedError", "pass"), "def mine(task):\n    pass\nask.mine(mine)"),
    (EXERCISE, "mine = abs\nask.other(mine)", "mine = abs\nask.mine(mine)"),
    (EXERCISE, "f = abs\nask.mine(1)\nask.mine(other, f)\nask.mine(2).said", "f = abs\nask.mine(2)"),
    ("ask.put(Ours, mine)", "ask.put(Theirs, lambda: 1)", "ask.put(Ours, lambda: 1)"),
    (EXERCISE, "f = abs\nsaid = ask.mine(f)\nprint(said)", "f = abs\nprint(said)\nask.mine(f)"),
    (EXERCISE, "f = abs\nassert ask.mine(function=f).passed", "f = abs\nask.mine(f)"),
    ("labs.check(1)", "labs.check(1, rounds=0)", "labs.check(1)"), ("x = 1", "x = 2", "x = 1"),
])  # fmt: skip
def test_a_student_gives_answers_and_code_and_the_teacher_the_rest(
    original: str, submitted: str | None, runs: str
) -> None:
    assert merged(original, submitted) == runs


def test_what_is_jupyters_in_a_cell_is_left_out() -> None:
    cell = "%%time\n%pip list\n!nproc\n?abs\nabs?\nnp.sum??\nmine = 7 % 4  # is it?\n%time ask.owner(answer=mine)"
    assert grading.plain(cell) == "mine = 7 % 4  # is it?\nask.owner(answer=mine)"


def test_marks_that_are_known_outlive_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def grade(folder: Path, chosen: Any) -> list[Mark]:
        if folder.name == "bo":
            raise KeyboardInterrupt
        return [Mark("03", "owner", "question", True, "")]

    monkeypatch.setattr(grading, "grade", grade)
    assert "anna" in grading.of_all([Path("anna"), Path("bo"), Path("cy")], [], jobs=1)
    assert "of 3 students are graded" in capsys.readouterr().err


def test_cells_run_on_after_an_error_and_each_graded_one_gets_a_mark() -> None:
    asks = (("question", "batch_count"), COUNT), (("exercise", "mine"), "no python("), (("lab", "check"), "exit()")
    cells = [(None, "from course import samplers as ask"), (None, "1 / 0"), *asks]
    marks = list(grading.run_cells(cells, "02"))
    assert [(mark.name, mark.right, mark.points, mark.of) for mark in marks] == [
        ("batch_count", True, 1, 1), ("mine", False, 0, 2), ("check", False, 0, 5)
    ]  # fmt: skip
    assert "SyntaxError" in marks[1].said


@pytest.mark.parametrize("instead", ["ask.batch_count = Right", "ask = N(batch_count=Right)"])
def test_a_check_that_a_cell_has_replaced_is_not_believed(instead: str) -> None:
    right = "from types import SimpleNamespace as N\nRight = lambda *_, **__: N(right=True, passed=True)"
    cell = f"{right}\n{instead}\n{COUNT.replace('3', '99')}"
    cells = [(None, "from course import samplers as ask"), (("question", "batch_count"), cell)]
    assert [mark.points for mark in grading.run_cells(cells, "02")] == [0]


# --- Copies -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def anna(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("course") / "anna"
    build(folder, Handout("anna", "ru"))
    return folder


@pytest.mark.heavy
def test_a_student_gets_no_solution_and_no_link_that_leads_nowhere(anna: Path) -> None:
    assert {path.name for path in anna.iterdir() if path.is_dir()} == {"course", "labs", "traces"}
    for path in (*anna.glob("*.ipynb"), *anna.glob("labs/*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            assert not re.search("solutions/|tests/support/", source), (path.name, cell["id"])
            links = re.findall(r"\]\(([^)#]+)", source) if cell["cell_type"] == "markdown" else []
            assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
            assert cell.get("outputs", []) == []
    assert "Первый взгляд" in (anna / "00_first_look.ipynb").read_text()
    assert "Впишите ответ" in (anna / "course" / "asking.py").read_text()


def test_no_section_of_a_students_copy_is_missing_and_the_doctors_verdicts_are_the_teachers() -> None:
    for path in originals():
        text = "\n".join("".join(cell["source"]) for cell in made(path, Handout("anna"))["cells"])
        numbers = [int(number) for number in re.findall(r"^## (\d+)\.", text, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1)), path.name
        assert not re.search(r"ask\.verdict\(|explained:|[Ss]olutions", text), path.name
    assert "ask.verdict(" in str(made(next(originals(["09"])), Handout())["cells"])


def test_each_student_has_numbers_of_their_own_and_always_the_same() -> None:
    for name, old, _, values in OWN:
        path = next(originals([name]))
        texts = {student: json.dumps(made(path, Handout(student))) for student in map(str, range(12))}
        assert path.read_text().count(json.dumps(old)[1:-1]) == 1
        assert len(set(texts.values())) > len(values) / 2
        assert texts["3"] == json.dumps(made(path, Handout("3")))
        assert json.dumps(made(path, Handout("3", seed=1))) in texts.values()


def test_a_copy_says_whose_it_is_and_has_no_module_of_the_teachers(anna: Path) -> None:
    assert handout.read(anna) == Handout("anna", "ru")
    assert handout.read(anna / "course") == Handout()
    assert not any((anna / "course" / name).exists() for name in handout.TEACHERS)
    assert all((handout.FOLDER / "course" / name).exists() for name in handout.TEACHERS)


# --- Commands ---------------------------------------------------------------------------------------------------------
def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["course", *map(str, arguments)])
    return code, *capsys.readouterr()  # type: ignore[return-value]


def edited(folder: Path, name: str, changes: dict[str, str]) -> None:
    path = folder / name
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        for old, new in changes.items():
            cell["source"] = "".join(cell["source"]).replace(old, new)
    path.write_text(json.dumps(notebook))


@pytest.mark.heavy
def test_an_untouched_copy_and_an_empty_folder_have_begun_nothing(tmp_path: Path) -> None:
    build(tmp_path / "bo", Handout("bo"))
    (tmp_path / "nobody").mkdir()
    for name in ("bo", "nobody"):
        assert [mark for mark in grading.progress(tmp_path / name) if mark.points] == []


@pytest.mark.parametrize("lab", "12345")
def test_a_lab_is_begun_when_its_stub_is_gone(lab: str, anna: Path, tmp_path: Path) -> None:
    loader = tmp_path / "labs" / "loader.py"
    loader.parent.mkdir()
    loader.write_text((anna / "labs" / "loader.py").read_text().replace(grading.STUB[lab], ""))
    begun = [mark.notebook[3] for mark in grading.progress(tmp_path, ["lab"]) if mark.right]
    assert begun == (["2", "3"] if lab in "23" else [lab])


def test_progress_counts_without_running_and_reset_keeps_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bo"
    assert command(capsys, "build", "--student", folder, "--only", "03", "--only", "lab1")[0] == 0
    edited(folder, "03_ranks.ipynb", {"ask.repeated(padded, 10, answer=...)": "ask.repeated(padded, 10, answer=1/0)"})
    code, out, _ = command(capsys, "progress", folder, "--only", "03", "--only", "lab1", "--csv")
    assert (code, list(csv.reader(io.StringIO(out)))[1]) == (0, ["bo", "1", "0", "1", "15", "7"])
    assert out.splitlines()[0].split(",")[-3:] == ["begun", "of", "%"]
    _, out, _ = command(capsys, "progress", folder, "--only", "03", "--json")
    assert {(mark["begun"], len(mark)) for mark in json.loads(out)["bo"]} == {(True, 4), (False, 4)}
    code, out, _ = command(capsys, "reset", folder, "--only", "03")
    assert "03_ranks.ipynb is new; the old one: " in out
    assert "answer=1/0" in (folder / "03_ranks.ipynb.before").read_text()
    assert "answer=1/0" not in (folder / "03_ranks.ipynb").read_text()
    (folder / "03_ranks.ipynb").write_text("later work")
    _, out, _ = command(capsys, "reset", folder, "--only", "03")
    assert out == f"{folder / '03_ranks.ipynb'} is new; the old one: {folder / '03_ranks.ipynb.before2'}\n"
    assert (folder / "03_ranks.ipynb.before2").read_text() == "later work"
    assert "answer=1/0" in (folder / "03_ranks.ipynb.before").read_text()


@pytest.mark.parametrize("facts", ["{", "[1]", '{"student": 3}', '{"student": "bo", "age": 20}'])
def test_a_wrong_handout_is_told_before_anything_runs(
    facts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "handout.json").write_text(facts)
    code, _, errors = command(capsys, "grade", tmp_path)
    assert code == cli.USAGE
    assert f"{tmp_path / 'handout.json'} does not say what the copy is for" in errors
    assert "running the code" not in errors


def test_whose_a_folder_is_has_to_be_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("a/anna", "b/anna", "b/bo")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "handout.json").write_text('{"student": "anna"}')
    for action in ("grade", "progress"):
        code, _, errors = command(capsys, action, *folders[:2])
        assert code == cli.USAGE
        assert "several folders of the same name, which is the student's: anna" in errors
    _, _, errors = command(capsys, "progress", folders[2], "--only", "03")
    assert f"{folders[2]}: its handout.json is of 'anna'" in errors


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": [{"cell_type": "code", "id": "cell-01"}]}'])
def test_a_damaged_notebook_stops_nobody_elses_marks(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("anna", "bo")]
    assert command(capsys, "build", "--student", *folders, "--only", "03")[0] == 0
    (folders[0] / "03_ranks.ipynb").write_text(text)
    edited(folders[1], "03_ranks.ipynb", {"ask.dropped(cut, 10, answer=...)": "ask.dropped(cut, 10, answer=2)"})
    code, out, errors = command(capsys, "progress", *folders, "--only", "03", "--csv")
    assert (code, [row.split(",")[-3:-1] for row in out.splitlines()[1:]]) == (0, [["0", "10"], ["1", "10"]])
    assert f"{folders[0]}: 03_ranks is not counted: {folders[0] / '03_ranks.ipynb'} is no notebook" in errors
    said = grading.grade(folders[0], ["03"])  # runs nothing: there is nothing that could be run
    assert {(mark.right, "is no notebook" in mark.said) for mark in said} == {(False, True)}


@pytest.mark.parametrize(("arguments", "said"), [
    (["build"], "give a folder"), (["grade"], "grade: give a folder"), (["grade", "/none"], "there is no folder /none"),
    (["reset", "."], "name what to write anew"), (["build", "/tmp"], "is not empty"),
    (["grade", "/tmp"], "/tmp is no student's folder: it has no handout.json"),
    (["texts", "--only", "99"], "no notebook '99': choose from 00_first_look"),
    (["texts", "--course", "/none"], "which an installed package does not contain: give --course"),
])  # fmt: skip
def test_what_cannot_be_done_is_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = command(capsys, *arguments)
    assert code == cli.USAGE
    assert said in errors


REPEATED, FORGOTTEN, DROPPED = (
    f"ask.{call}, answer=" for call in ("repeated(padded, 10", "forgotten(first, second", "dropped(cut, 10")
)
STARTED = """(
    own := __import__('subprocess').Popen(['sleep', '600'], start_new_session=True).pid,
    open('PLACE/pid', 'w').write(str(own)),
)[0]"""
SUBMITTED = {
    "right": ("en", {REPEATED: "2", DROPPED: "'2'"}, 2),
    "ends its process": ("en", {REPEATED: "2", DROPPED: "__import__('os')._exit(3)"}, 1),
    "starts another": ("en", {REPEATED: "2", DROPPED: STARTED}, 1),
    "Russian": ("ru", {REPEATED: "'два'", FORGOTTEN: "'да'", DROPPED: "'обе'"}, 3),  # noqa: RUF001
    "Chinese": ("zh", {REPEATED: "'两'", FORGOTTEN: "'是'", DROPPED: "'双份'"}, 3),
    "no cells": ("en", {}, 0),
}
"""Student -> the language of the copy, the answers, and their points."""


Graded = tuple[dict[str, list[Mark]], str, Path]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Graded:
    """The marks of all students, what the command has said, and the folder of their copies."""
    place = tmp_path_factory.mktemp("graded")
    for student, (language, answers, _) in SUBMITTED.items():
        build(place / student, Handout(student, language), ["03"])
        given = {f"{asks}...)": f"{asks}{said})".replace("PLACE", str(place)) for asks, said in answers.items()}
        edited(place / student, "03_ranks.ipynb", given)
    notebook = place / "no cells" / "03_ranks.ipynb"
    other = json.loads(notebook.read_text())
    other["cells"] = [{name: value for name, value in cell.items() if name != "id"} for cell in other["cells"]]
    notebook.write_text(json.dumps(other))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        assert cli.main(["course", "grade", *(str(place / name) for name in SUBMITTED), "--only", "03", "--json"]) == 0
    marks = {student: [Mark(**mark) for mark in of_one] for student, of_one in json.loads(out.getvalue()).items()}
    return marks, errors.getvalue(), place


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("student", SUBMITTED)
def test_a_submission_is_run_and_graded(student: str, graded: Graded) -> None:
    """In each language; also if it is no notebook, or if its code ends its process or starts another one."""
    marks, errors, _ = graded
    points = SUBMITTED[student][-1]
    assert (sum(mark.points for mark in marks[student]), sum(mark.of for mark in marks[student])) == (points, 10)
    assert f": {student}: {points} of 10 points\n" in errors


@pytest.mark.live
def test_what_is_said_of_submissions(graded: Graded) -> None:
    marks, errors, place = graded
    assert f"running the code of {len(SUBMITTED)} students" in errors
    assert "with the cells (by their ids) that were handed out as 03_ranks: 0 points" in errors
    assert "ended its process" in marks["ends its process"][-1].said
    assert not is_alive(int((place / "pid").read_text())), "it has left its session, and is killed too"


@pytest.mark.live
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("language", "words"), [("ru", "FIFO, в который никто не пишет"), ("zh", "没有人写入的 FIFO")])
def test_a_cause_planned_for_a_student_is_judged_in_the_students_language(
    language: str, words: str, tmp_path: Path
) -> None:
    """The student has no run of their own, and so the course's of the same cause is shown."""
    given = Handout("bo", language, mysteries=True)
    build(tmp_path / "bo", given, ["09"])
    edited(tmp_path / "bo", "09_hang_lab.ipynb", {"ask.what(one, answer=...)": f"ask.what(one, answer={words!r})"})
    right = [mark.right for mark in grading.grade(tmp_path / "bo", ["09"]) if mark.name == "what"]
    assert right == [True] + [None] * 5


@pytest.mark.heavy
def test_a_notebook_becomes_slides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nbconvert", reason="slides need nbconvert: pip install -e '.[notebooks]'")
    code, out, _ = command(capsys, "slides", tmp_path, "--only", "00", "--language", "zh")
    assert code == 0
    page = Path(out.strip()).read_text()
    assert page.count("<section") > 15
    assert "数据集与加载器" in page
    assert "Predict." not in page


# --- Mysteries of one's own -------------------------------------------------------------------------------------------
def test_each_student_has_six_causes_in_an_order_of_their_own_and_always_the_same() -> None:
    plans = {student: own_mysteries.plan(Handout(student, mysteries=True)) for student in map(str, range(30))}
    for planned in plans.values():
        assert planned["one"].cause == "fifo"
        assert {one.cause for one in planned.values()} == hang_lab.KINDS.keys() == own_mysteries.CASES.keys()
    assert len({tuple(planned.items()) for planned in plans.values()}) == 30
    answers = {(planned["one"].answers.sample, planned["one"].answers.worker) for planned in plans.values()}
    assert answers == {(sample, worker) for sample in own_mysteries.SAMPLES for worker in (0, 1)}
    assert plans["3"] == own_mysteries.plan(Handout("3", mysteries=True))
    assert plans["3"] != own_mysteries.plan(Handout("3", seed=1, mysteries=True))
    assert len({one for planned in plans.values() for one in planned.values()}) <= 30


def test_the_traces_of_a_student_are_not_believed(tmp_path: Path) -> None:
    """The course's first run is of sample 13, which no student has: its answers are told wrong, and so is no trace."""
    given = Handout("anna", mysteries=True)
    place = tmp_path / "course" / "mysteries"
    place.mkdir(parents=True)
    (place / "one.minidl").write_bytes((hang_lab.MYSTERIES / "one.minidl").read_bytes())
    (place / "two.minidl").write_text("no trace")
    found = own_mysteries.of_student(tmp_path, given)
    assert {Path(trace).parent for trace, _ in found.values()} == {hang_lab.MYSTERIES}
    assert {name: answers for name, (_, answers) in found.items()} == {
        name: planned.answers for name, planned in own_mysteries.plan(given).items()
    }
    assert own_mysteries.of_student(tmp_path, Handout("anna")) == {}


def test_a_copy_has_no_mysteries_of_the_courses_beside_its_own(tmp_path: Path) -> None:
    build(tmp_path / "bo", Handout("bo", mysteries=True), ["09"])
    assert not (tmp_path / "bo" / "course" / "mysteries").exists()


def fails(planned: own_mysteries.Planned) -> bytes:
    raise ValueError(f"{planned.cause} could not be recorded")


@pytest.mark.parametrize(("found", "said"), [
    ("py-spy", "could not be recorded"),
    (None, "need py-spy: pip install 'minidl[doctor]', or build with --same-mysteries"),
])  # fmt: skip
def test_a_build_without_its_recordings_leaves_nothing(
    found: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("course.command.py_spy", lambda: found)
    monkeypatch.setattr(own_mysteries, "_packed", fails)
    code, _, errors = command(capsys, "build", "--student", tmp_path / "anna", "--only", "09")
    assert (code, list(tmp_path.iterdir())) == (cli.USAGE, [])
    assert said in errors


@pytest.mark.live
@pytest.mark.skipif(py_spy() is None, reason="py-spy is not installed")
@pytest.mark.timeout(300)
def test_own_mysteries_are_recorded_and_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One student answers what was planned, one what is right of the course's own runs."""
    folders = [tmp_path / name for name in ("own", "others")]
    code, _, errors = command(capsys, "build", "--student", *folders, "--only", "09")
    assert code == 0, errors
    assert re.search(r"recording (\d+) hung runs for 09\n(.*\n)*minidl: recorded \1 hung runs of \1 for 09", errors)
    planned = {folder.name: own_mysteries.plan(handout.read(folder)) for folder in folders}
    for folder in folders:
        for path in (folder / "course" / "mysteries").glob("*.minidl"):
            trace = minidl.read_trace(path)
            assert planned[folder.name][path.stem].is_found(trace)
            assert not re.search(rf"{tmp_path.parents[1]}|mystery-|--at", json.dumps([trace.manifest, trace.lines]))
    causes = zip(hang_lab.NAMES, hang_lab.KINDS, strict=True)
    usual = {name: own_mysteries.Planned(cause, LabOptions()) for name, cause in causes}
    lost = "def lost(loop, workers):\n    "
    for folder, given in zip(folders, (planned["own"], usual), strict=True):
        solved = {lost + "raise NotImplementedError": lost + "return loop == 'NEXT' and {*workers} == {'IDLE'}"}
        for name, one in given.items():
            kind = hang_lab.KINDS[one.answers.kind]
            for asks, said in (("who", one.answers.worker), ("what", kind), ("sample", one.answers.sample)):
                solved[f"ask.{asks}({name}, answer=...)"] = f"ask.{asks}({name}, answer={said!r})"
        edited(folder, "09_hang_lab.ipynb", solved)
    _, out, _ = command(capsys, "grade", *folders, "--only", "09", "--json")
    right = {name: [mark["right"] for mark in of_one] for name, of_one in json.loads(out).items()}
    assert right["own"] == [True] * 8 + [None, True]
    same = [planned["others"][name].cause == usual[name].cause for name in hang_lab.NAMES]
    assert right["others"][1:8] == [same[0], False, *same[1:]]
