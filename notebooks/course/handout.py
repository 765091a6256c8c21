"""Copies of the course: in another language, and for students, without solutions and folded answers.

`build` writes a folder that stands alone: notebooks without outputs, labs, the package `course` and the recorded runs.
Students open it with Jupyter; minidl is installed. What a copy is for stands in its `handout.json`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course import texts
from course.texts import FOLDER

FACTS = "handout.json"
TEACHER = "teacher"
"""The tag of cells that students do not get: they give an answer away."""


@dataclass(frozen=True)
class Handout:
    """What a copy of the course is for. student: ""= for no student, with solutions."""

    student: str = ""
    language: str = "en"


def read(folder: Path) -> Handout:
    """What the copy in a folder is for."""
    path = folder / FACTS
    return Handout(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Handout()


def originals(chosen: Iterable[str] = ()) -> Iterator[Path]:
    """The course's notebooks, or those of which a name of `chosen` is the beginning. Raises ValueError for others."""
    paths = [*sorted(FOLDER.glob("*.ipynb")), *sorted((FOLDER / "labs").glob("*.ipynb"))]
    for name in chosen:
        if not any(path.name.startswith(name) for path in paths):
            raise ValueError(f"no notebook {name!r}: choose from {', '.join(path.stem for path in paths)}")
    return (path for path in paths if not chosen or path.name.startswith(tuple(chosen)))


def made(path: Path, handout: Handout) -> Any:
    """A notebook for this handout, without outputs."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    translations = texts.read(texts.file_of(handout.language, path.stem))
    notebook = texts.translated(notebook, translations)
    if handout.student:
        notebook["cells"] = [cell for cell in notebook["cells"] if TEACHER not in cell["metadata"].get("tags", ())]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
        elif handout.student:
            cell["source"] = _alone(cell["source"])
    return notebook


def _alone(source: str) -> str:
    """A text without its line on solutions, and without links to files that a student has not got."""
    source = re.sub(r"^.*\]\((?:\.\./)?solutions/.*\n*", "", source, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?:minidl|docs|traces)/[^)]*\)", r"\1", source)


def build(folder: Path, handout: Handout, chosen: Iterable[str] = ()) -> list[Path]:
    """Write a copy of the course into a folder, which must be new or empty; return its notebooks."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder, or delete it")
    paths = list(originals(chosen))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(asdict(handout), indent=1) + "\n", encoding="utf-8")
    shutil.copytree(FOLDER.parent / "traces", folder / "traces", ignore=shutil.ignore_patterns("h200", "*.png"))
    for part in ("course", "labs") if handout.student else ("course", "labs", "solutions"):
        if (FOLDER / part).exists():
            shutil.copytree(
                FOLDER / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb", ".ipynb*")
            )
    for module in sorted((folder / "course").glob("*.py")):
        translate(module, handout.language, paths)
    written = [folder / path.relative_to(FOLDER) for path in paths]
    for path, to in zip(paths, written, strict=True):
        to.write_text(json.dumps(made(path, handout), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return written


def translate(module: Path, language: str, notebooks: Iterable[Path]) -> None:
    """Put a language's texts into a copied module of the course."""
    owner = next((path.stem for path in notebooks if texts.module_of(path.stem) == module.stem), None)
    owner = owner or next((name for name, modules in texts.SHARED.items() if module.stem in modules), "")
    chosen = {key: said for key, said in texts.read(texts.file_of(language, owner)).items() if said != "="}
    if chosen:
        source = module.read_text(encoding="utf-8")
        module.write_text(texts.replaced(source, module.stem, chosen), encoding="utf-8")
