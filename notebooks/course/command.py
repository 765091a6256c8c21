"""`minidl course`: what teachers and translators do with the notebooks. `run` gets the command's parsed arguments."""

from __future__ import annotations

import csv
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from course import own_mysteries, texts
from course.handout import FACTS, HANG_LAB, Handout, build, check_new, originals, read, reset, slides
from minidl.hang.evidence.stacks import py_spy
from minidl.live_repr import counted

LANGUAGES = ("ru", "zh")


def run(arguments: Namespace) -> int:
    """Do what the command's arguments say; return the exit code. Raises ValueError for what cannot be done."""
    return ACTIONS[arguments.action](arguments)


def _build(arguments: Namespace) -> int:
    if not arguments.paths + arguments.student:
        raise ValueError("build: give a folder")
    has_mysteries = any(path.stem == HANG_LAB for path in originals(arguments.only)) and not arguments.same_mysteries
    if has_mysteries and arguments.student and py_spy() is None:
        raise ValueError(
            "build: own hung runs for 09 need py-spy: pip install 'minidl[doctor]', or build with --same-mysteries"
        )
    planned = {}
    for folder in arguments.paths + arguments.student:
        check_new(folder)
        student = folder.resolve().name if folder in arguments.student else ""
        planned[folder] = Handout(student, arguments.language, arguments.seed, has_mysteries and bool(student))
    mysteries = own_mysteries.recorded_for([given for given in planned.values() if given.mysteries])
    for folder, given in planned.items():
        written = build(folder, given, arguments.only)
        if given.mysteries:
            own_mysteries.write(folder, given, mysteries)
        whose = f"for {given.student}" if given.student else "with solutions"
        print(f"{folder}: {counted(len(written), 'notebook')}, {whose}")
    return 0


def _folders(arguments: Namespace) -> list[Path]:
    if not arguments.paths:
        raise ValueError(f"{arguments.action}: give a folder")
    if lacking := [str(folder) for folder in arguments.paths if not folder.is_dir()]:
        raise ValueError(f"{arguments.action}: there is no folder {', '.join(lacking)}")
    for folder in arguments.paths:
        if not (folder / FACTS).is_file():
            raise ValueError(f"{arguments.action}: {folder} is no student's folder: it has no {FACTS}")
        read(folder)  # raises before anything is run or written
    return list(arguments.paths)


def _reset(arguments: Namespace) -> int:
    if not arguments.only:
        raise ValueError("reset: name what to write anew, for instance --only 04 or --only loader")
    for folder in _folders(arguments):
        for path, kept in reset(folder, arguments.only).items():
            print(f"{path} is new" + (f"; the old one: {kept}" if kept else ""))
    return 0


def _slides(arguments: Namespace) -> int:
    folder = arguments.paths[0] if arguments.paths else Path("slides")
    print("\n".join(map(str, slides(folder, Handout(language=arguments.language), arguments.only))))
    return 0


# --- Grades -----------------------------------------------------------------------------------------------------------
def _grade(arguments: Namespace) -> int:
    from course import grading

    folders = _folders(arguments)
    names = [folder.resolve().name for folder in folders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"{arguments.action}: several folders of the same name, which is the student's: {', '.join(twice)}"
        )
    for folder in folders:
        if (student := read(folder).student) != folder.resolve().name:
            print(
                f"minidl: {folder}: its {FACTS} is of {student!r}, whose numbers and mysteries it is graded with",
                file=sys.stderr,
            )
        grading.tell_missing(folder, arguments.only)
    if arguments.action == "progress":
        marks = {folder.resolve().name: grading.progress(folder, arguments.only) for folder in folders}
    else:
        print(f"minidl: running the code of {counted(len(folders), 'student')}", file=sys.stderr)
        marks = grading.of_all(folders, arguments.only)
    sum_of = "begun" if arguments.action == "progress" else "points"
    table = grading.rows(marks, sum_of)
    if arguments.json:
        print(grading.as_json(marks, sum_of))
    elif arguments.csv:
        csv.writer(sys.stdout).writerows(table)
    else:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print(
            "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
        )
    return 0


# --- Texts ------------------------------------------------------------------------------------------------------------
def of_file(name: str) -> list[texts.Text]:
    """The texts whose translations are in the file of this name."""
    if name in texts.SHARED:
        return texts.of_modules(*texts.SHARED[name])
    (path,) = (path for path in originals() if path.stem == name)
    return texts.of_cells(json.loads(path.read_text(encoding="utf-8"))) + texts.of_modules(texts.module_of(name))


def _texts(arguments: Namespace) -> int:
    """Print what a language lacks: of all files in numbers, or of those that are named as entries to be translated."""
    only = [name for name in arguments.only if name not in texts.SHARED]
    names = [path.stem for path in originals(only)] if only else []
    names += [name for name in texts.SHARED if name in arguments.only]
    lacks = 0
    for language in (arguments.language,) if arguments.language != "en" else LANGUAGES:
        for name in names or [*(path.stem for path in originals()), *texts.SHARED]:
            all_of_it = of_file(name)
            faults = texts.faults(all_of_it, texts.read(texts.file_of(language, name)))
            lacks += len(faults)
            if names:
                print(texts.skeleton(all_of_it, faults), end="")
                told = {key: fault for key, fault in faults.items() if fault != "missing"}
                print("".join(f"<!-- {place} {mark}: {fault} -->\n" for (place, mark), fault in told.items()), end="")
            else:
                wanted = sum(text.wanted for text in all_of_it)
                print(f"{language} {name}: {len(faults)} of {wanted} texts are missing or older than their original")
    return int(lacks > 0)


ACTIONS: dict[str, Callable[[Namespace], int]] = {
    "build": _build, "grade": _grade, "progress": _grade, "reset": _reset, "slides": _slides, "texts": _texts,
}  # fmt: skip
