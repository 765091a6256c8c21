"""Grading of what students hand in: their answers and code in the teacher's own notebooks, run and counted.

`grade(folder)` takes from each notebook of a student the answers, the code of exercises and `labs/loader.py`; all other cells are
the teacher's. **This runs the student's code**: each notebook in a session of its own, in a folder of its own, for a bounded time, and
what it leaves is killed. It is no protection from a student who means harm: grade such work in a container. `progress(folder)` runs nothing.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import course
from course import handout, own_mysteries
from course.handout import Handout
from minidl.live_repr import counted
from minidl.process_stat import every_process, remove_segments_of, signal_if
from minidl.prove.kept import in_parallel
from minidl.prove.sessions import running

SECONDS = 240.0
"""Bound of one notebook."""

ASKED = re.compile(r"^ask\.(\w+)\(.*answer=", re.MULTILINE)
CHECKED = re.compile(r"^(?:ask\.(\w+)\((?!.*answer=)|(labs\.check)\()", re.MULTILINE)


STUB = {
    "1": 'Error("lab 1', "2": 'Error("lab 2', "3": 'Error("lab 2', "4": 'Error("lab 4', "5": "# lab 5: what if it never comes?",
}  # fmt: skip
"""Lab -> what stands in labs/loader.py until it is begun; lab 3 is written in the places of lab 2."""


@dataclass(frozen=True)
class Mark:
    """One question, exercise or lab. right: None = not answered. said: what the student was or would be told."""

    notebook: str
    name: str
    kind: str
    right: bool | None
    said: str

    POINTS = {"question": 1, "exercise": 2, "lab": 5}  # noqa: RUF012

    @property
    def points(self) -> int:
        """What it is worth."""
        return self.POINTS[self.kind] * bool(self.right)

    @property
    def of(self) -> int:
        """What it could be worth."""
        return self.POINTS[self.kind]


def kind_of(source: str) -> tuple[str, str] | None:
    """What a cell asks for: its kind and name; None if it is not graded."""
    if found := ASKED.search(source):
        return "question", found[1]
    if found := CHECKED.search(source):
        return ("lab", "check") if found[2] else ("exercise", found[1])
    return None


def _cells(folder: Path, path: Path) -> dict[str, str]:
    """The student's cells, by their ids. Raises ValueError if the notebook cannot be read."""
    try:
        notebook = json.loads((folder / path).read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return {cell["id"]: plain("".join(cell["source"])) for cell in cells if "id" in cell}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / path} is no notebook that can be read: {error!r}") from None


def plain(source: str) -> str:
    """A cell without what is Jupyter's and not Python: `%%time`, `%time f()`, `!ls`, `f?`."""
    source = re.sub(r"^(?:%%|!|\?).*\n?|^[\w.]+\?{1,2}[ \t]*$\n?", "", source, flags=re.MULTILINE)
    return re.sub(r"^%(?:time|timeit) +|^%.*\n?", "", source, flags=re.MULTILINE)


# --- Putting a submission together ------------------------------------------------------------------------------------
def merged(original: str, submitted: str | None) -> str:
    """The teacher's cell with the student's answer, or with the code that stands before the check and what it checks.

    An answer that has names in it takes the student's statements before it along: they may define these names.
    """
    kind = kind_of(original)
    if kind is None or submitted is None or kind[0] == "lab":
        return original
    try:
        body = ast.parse(submitted).body
    except (SyntaxError, ValueError, RecursionError):  # ValueError: a null character, before Python 3.12
        return submitted  # running it says what is wrong
    ours: Any = ast.parse(original).body[-1]
    if kind[0] == "exercise":
        asks = {node: [call for call in ast.walk(node) if isinstance(call, ast.Call) and _asks(call)] for node in body}
        own = [ast.unparse(node) for node in body if not asks[node]]
        for call in (call for node in body for call in asks[node] if _asks(call) == kind):
            checked = call.args or [keyword.value for keyword in call.keywords]  # it may have another name
            ours.value.args[-1:] = checked[-1:] or ours.value.args[-1:]
        return "\n".join([*own, ast.unparse(ours)])
    answers = [
        (number, node.value)
        for number, statement in enumerate(body)
        for node in ast.walk(statement)
        if isinstance(node, ast.keyword) and node.arg == "answer"
    ]
    if not answers:
        return original
    number, answer = answers[-1]
    filled = original.replace("answer=...", f"answer={ast.unparse(answer)}")
    given = [ast.unparse(node) for node in ast.parse(filled).body]
    own = [source for source in map(ast.unparse, body[:number]) if kind_of(source) is None and source not in given]
    if not own or not any(isinstance(node, ast.Name) for node in ast.walk(answer)):
        return filled
    return "\n".join([*given[:-1], *own, given[-1]])


def _asks(node: ast.AST) -> tuple[str, str] | None:
    return kind_of(ast.unparse(node))


def sources(folder: Path, path: Path, given: Handout) -> list[tuple[tuple[str, str] | None, str]]:
    """The code cells of a submitted notebook, each with what the teacher's asks for."""
    submitted = _cells(folder, path.relative_to(handout.FOLDER))
    cells = [cell for cell in handout.made(path, given)["cells"] if cell["cell_type"] == "code"]
    return [(kind_of(cell["source"]), merged(cell["source"], submitted.get(cell["id"]))) for cell in cells]


def _loader(folder: Path) -> bytes | None:
    """The student's code of the labs; None = there is no such file."""
    path = folder / handout.LOADER
    return path.read_bytes() if path.is_file() else None


# --- Running it -------------------------------------------------------------------------------------------------------
def run_cells(cells: Iterable[tuple[tuple[str, str] | None, str]], notebook: str) -> Iterator[Mark]:
    """Run cells one after the other, as a kernel does; the marks of those that are graded."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for kind, source in cells:
        said: Any = None
        ours = _of_the_course(names) if kind else []
        try:
            body = ast.parse(source).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
            for changed, values in ours:
                changed |= values
            said = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
        except (Exception, SystemExit) as error:
            said = error
        if kind:
            right = getattr(said, "right", getattr(said, "passed", False))
            told = f"{type(said).__name__}: {said}" if isinstance(said, BaseException) else repr(said)
            yield Mark(notebook, kind[1], kind[0], right, told)


def _of_the_course(names: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What a student's code may have put something of its own in place of, as `ask.room = ...` does; each with what it holds now."""
    modules = [vars(module) for name, module in sys.modules.items() if name.partition(".")[0] == "course"]
    of_cells = {name: value for name, value in names.items() if isinstance(value, ModuleType)}
    return [*((held, dict(held)) for held in modules), (names, of_cells)]


def _damaged(folder: Path, path: Path, given: Handout, error: Exception) -> list[Mark]:
    """Say on stderr that a student's notebook or code cannot be read; the marks that it gets: none is right."""
    print(f"minidl: {folder}: {path.stem} is not counted: {error}", file=sys.stderr)
    kinds = [kind_of(cell["source"]) for cell in handout.made(path, given)["cells"] if cell["cell_type"] == "code"]
    return [Mark(path.stem, kind[1], kind[0], False, str(error)) for kind in kinds if kind]


def _run(folder: Path, path: Path, given: Handout, ours: Path) -> list[Mark]:
    try:
        cells, loader = sources(folder, path, given), _loader(folder)
    except (ValueError, OSError) as error:
        return _damaged(folder, path, given, error)
    with tempfile.TemporaryDirectory(prefix="grade-") as made:
        place = Path(made)
        own = own_mysteries.of_student(folder, given) if path.stem == handout.HANG_LAB else {}
        told = {name: (trace, asdict(answers)) for name, (trace, answers) in own.items()}
        (place / "cells.json").write_text(json.dumps([path.stem, cells, told]))
        if loader is not None:
            (place / "loader.py").write_bytes(loader)
        paths = {
            "PYTHONPATH": f"{ours}{os.pathsep}{Path(course.minidl.__file__).parents[1]}",
            "MPLBACKEND": "agg",
        }
        try:
            with running(
                [sys.executable, "-m", "course.grading", "cells.json"], place, TMPDIR=made, **paths
            ) as program:
                program.wait_for_end(SECONDS)
        finally:
            _kill_those_with(f"TMPDIR={made}".encode())
        written = (place / "marks").read_text().splitlines() if (place / "marks").exists() else []
        marks = [Mark(**json.loads(line)) for line in written]
    lacking = [kind for kind, _ in cells if kind][len(marks) :]
    told = f"its notebook did not come to its end within {SECONDS:g} s, or ended its process"
    return marks + [Mark(path.stem, name, kind, False, told) for kind, name in lacking]


def _kill_those_with(variable: bytes) -> None:
    """Kill the processes that were started with this variable: those that have left the program's session."""
    killed: set[int] = set()

    def is_meant(pid: int) -> bool:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    deadline = time.monotonic() + 20
    while pids := [pid for pid, _ in every_process() if signal_if(pid, signal.SIGKILL, partial(is_meant, pid))]:
        killed.update(pids)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # one may just have been forked
    remove_segments_of(killed)


def tell_missing(folder: Path, chosen: Iterable[str]) -> None:
    """Say on stderr which notebooks, or all cells of them, a student's folder lacks: they are counted as untouched."""
    given, missing = handout.read(folder), []
    for path in handout.originals(chosen):
        with suppress(ValueError, OSError):  # those who count it say so
            known = {cell["id"] for cell in handout.made(path, given)["cells"]}
            if not known & _cells(folder, path.relative_to(handout.FOLDER)).keys():
                missing.append(path.stem)
    if missing:
        said = "there is no notebook with the cells (by their ids) that were handed out as"
        print(f"minidl: {folder}: {said} {', '.join(missing)}: 0 points", file=sys.stderr)


def grade(folder: Path, chosen: Iterable[str] = ()) -> list[Mark]:
    """The marks of one student's folder. It runs the student's code, with the course in the student's language: answers are words of it."""
    given = handout.read(folder)
    with tempfile.TemporaryDirectory(prefix="course-") as made:
        ours = handout.FOLDER
        if given.language != "en":
            ours = Path(made) / "course"
            handout.build(ours, Handout(language=given.language))
        return [mark for path in handout.originals(chosen) for mark in _run(folder, path, given, ours)]


def progress(folder: Path, chosen: Iterable[str] = ()) -> list[Mark]:
    """What a student has answered or written, right or not. It runs nothing."""
    given, found = handout.read(folder), []
    for path in handout.originals(chosen):
        try:
            cells, loader = sources(folder, path, given), _loader(folder)
        except (ValueError, OSError) as error:
            found += _damaged(folder, path, given, error)
            continue
        for kind, source in cells:
            if kind:
                begun = "answer=..." not in source and "NotImplementedError" not in source
                if kind[0] == "lab":
                    begun = bool(loader) and STUB[path.stem[3]].encode() not in loader
                found.append(Mark(path.stem, kind[1], kind[0], True if begun else None, ""))
    return found


def of_all(folders: Sequence[Path], chosen: Sequence[str], jobs: int = 2) -> dict[str, list[Mark]]:
    """The marks of many students, two at a time; each one's points on stderr as soon as they are known."""
    marks: dict[str, list[Mark]] = {}
    with suppress(KeyboardInterrupt), in_parallel(lambda folder: grade(folder, chosen), folders, jobs) as coming:
        for folder, of_one in coming:
            name = folder.resolve().name
            marks[name], points, most = of_one, sum(mark.points for mark in of_one), sum(mark.of for mark in of_one)
            print(f"minidl: {len(marks)} of {len(folders)}: {name}: {points} of {most} points", file=sys.stderr)
    if len(marks) < len(folders):
        print(f"minidl: stopped: {len(marks)} of {counted(len(folders), 'student')} are graded", file=sys.stderr)
    return {name: marks[name] for folder in folders if (name := folder.resolve().name) in marks}


# --- Tables -----------------------------------------------------------------------------------------------------------
def rows(marks: dict[str, list[Mark]], counted: str = "points") -> list[list[str]]:
    """A head, and a row for each student: points of each notebook, and of all. counted: the name of their sum."""
    notebooks = list(dict.fromkeys(mark.notebook for of_one in marks.values() for mark in of_one))
    table = [["student", *(name[:2] if name[:2].isdecimal() else name[:4] for name in notebooks), counted, "of", "%"]]
    for student, of_one in marks.items():
        each = [sum(mark.points for mark in of_one if mark.notebook == name) for name in notebooks]
        most = sum(mark.of for mark in of_one)
        table.append([student, *map(str, each), str(sum(each)), str(most), f"{100 * sum(each) / max(1, most):.0f}"])
    return table


def as_json(marks: dict[str, list[Mark]], counted: str = "points") -> str:
    """Each mark, with what was said; or only what is begun, right or not."""
    told = {student: [asdict(mark) for mark in of_one] for student, of_one in marks.items()}
    for mark in itertools.chain(*told.values()) if counted == "begun" else ():
        mark["begun"] = bool(mark.pop("right"))
        del mark["said"]
    return json.dumps(told, indent=1)


def main(name: str) -> None:
    """Run the cells of a file, and write each mark as soon as it is known."""
    from course import hang_lab, labs  # noqa: F401, so that cells import the teacher's

    notebook, cells, own = json.loads(Path(name).read_text())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a loop that prints would fill the disk
    hang_lab.OWN |= {mystery: (Path(trace), hang_lab.Answers(**answers)) for mystery, (trace, answers) in own.items()}
    with Path("marks").open("w", buffering=1) as out:
        for mark in run_cells(cells, notebook):
            out.write(json.dumps(asdict(mark)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
