"""Copies of the course: in another language, and for students, without solutions and folded answers.

`build` writes a folder that stands alone: notebooks without outputs, labs, the package `course` and the recorded runs.
Students open it with Jupyter; minidl is installed. What a copy is for stands in its `handout.json`.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course import texts
from course.texts import FOLDER

FACTS = "handout.json"
HANG_LAB = "09_hang_lab"
"""The notebook whose runs each student has recorded for themselves."""
LOADER = Path("labs/loader.py")
TEACHER = "teacher"
"""The tag of cells that students do not get: they give an answer away."""
TEACHERS = ("command.py", "grading.py", "own_mysteries.py")
"""Modules that students do not get."""


OWN = [
    ("00_first_look", "ask.owner(trace,", "ask.owner(trace, task={},", (3, 5, 6, 7, 8)),
    ("02_samplers", "ask.batch_count(10, 4,", "ask.batch_count({}, 4,", (9, 11, 13, 14, 15, 18, 19)),
    ("03_ranks", "ask.share_of(twelve,", "ask.share_of(twelve, rank={},", (0, 1, 2, 3)),
    ("05_many_workers", "ask.owner(even,", "ask.owner(even, task={},", (4, 6, 7, 8, 9, 10)),
]  # fmt: skip
"""Notebook, what stands in a cell, what stands there for a student, and the values to choose from."""


@dataclass(frozen=True)
class Handout:
    """What a copy of the course is for. student: "" = for no student, with solutions. mysteries: 09 has runs of their own."""

    student: str = ""
    language: str = "en"
    seed: int = 0
    mysteries: bool = False

    def own(self, source: str, notebook: str) -> str:
        """A cell with the student's own numbers, which the seed and the name choose."""
        for name, old, new, values in OWN:
            if self.student and name == notebook:
                chosen = random.Random(f"{self.seed} {self.student} {old}").choice(values)
                source = source.replace(old, new.format(chosen))
        return source


def read(folder: Path) -> Handout:
    """What the copy in a folder is for. Raises ValueError if its handout.json does not say so."""
    path = folder / FACTS
    if not path.exists():
        return Handout()
    usual = asdict(Handout())
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or any(type(facts[name]) is not type(usual.get(name)) for name in facts):
            raise ValueError(f"{facts!r} has other names or types than {usual}")
    except ValueError as error:
        raise ValueError(
            f"{path} does not say what the copy is for, take it from a copy of the course: {error}"
        ) from None
    return Handout(**facts)


def originals(chosen: Iterable[str] = ()) -> Iterator[Path]:
    """The course's notebooks, or those of which a name of `chosen` is the beginning. Raises ValueError for others."""
    paths = [*sorted(FOLDER.glob("*.ipynb")), *sorted((FOLDER / "labs").glob("*.ipynb"))]
    for name in chosen:
        if not any(path.name.startswith(name) for path in paths):
            raise ValueError(f"no notebook {name!r}: choose from {', '.join(path.stem for path in paths)}")
    return (path for path in paths if not chosen or path.name.startswith(tuple(chosen)))


def _translated(path: Path, language: str) -> Any:
    translations = texts.read(texts.file_of(language, path.stem))
    return texts.translated(json.loads(path.read_text(encoding="utf-8")), translations)


def made(path: Path, handout: Handout) -> Any:
    """A notebook for this handout, without outputs."""
    notebook = _translated(path, handout.language)
    if handout.student:
        notebook["cells"] = [cell for cell in notebook["cells"] if TEACHER not in cell["metadata"].get("tags", ())]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None, "source": handout.own(cell["source"], path.stem)}
        elif handout.student:
            cell["source"] = _alone(cell["source"])
    return notebook


def _alone(source: str) -> str:
    """A text without its lines on solutions and on scripts of the tests, and without links to files that a student has not got."""
    source = re.sub(r"^.*(?:\]\((?:\.\./)?solutions/|tests/support/).*\n*", "", source, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?:minidl|docs|traces)/[^)]*\)", r"\1", source)


def check_new(folder: Path) -> None:
    """Raise ValueError if a copy cannot be written into a folder, since something is in it."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder, or delete it")


def build(folder: Path, handout: Handout, chosen: Iterable[str] = ()) -> list[Path]:
    """Write a copy of the course into a folder, which must be new or empty; return its notebooks."""
    check_new(folder)
    paths = list(originals(chosen))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(FOLDER.parent / "traces", folder / "traces", ignore=shutil.ignore_patterns("h200", "*.png"))
    left_out = ("__pycache__", "*.ipynb", ".ipynb*", *(TEACHERS if handout.student else ()))
    left_out += ("mysteries",) if handout.mysteries else ()  # a build that stops half-way hands out no others
    for part in ("course", "labs") if handout.student else ("course", "labs", "solutions"):
        if (FOLDER / part).exists():
            shutil.copytree(FOLDER / part, folder / part, ignore=shutil.ignore_patterns(*left_out))
    for module in sorted((folder / "course").glob("*.py")):
        translate(module, handout.language, paths)
    written = [folder / path.relative_to(FOLDER) for path in paths]
    for path, to in zip(paths, written, strict=True):
        to.write_text(json.dumps(made(path, handout), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / FACTS).write_text(json.dumps(asdict(handout), indent=1) + "\n", encoding="utf-8")  # last: it is whole
    return written


def reset(folder: Path, chosen: Iterable[str]) -> dict[Path, Path | None]:
    """Write notebooks of a copy anew, and "loader" the labs' file; return where what was there is kept, if it was.

    It is kept beside the new one as NAME.before, or .before2 and so on: nothing is overwritten.
    """
    given = read(folder)
    notebooks = [name for name in chosen if name != "loader"]
    new = {path.relative_to(FOLDER): made(path, given) for path in (originals(notebooks) if notebooks else ())}
    kept: dict[Path, Path | None] = {}
    texts_of = {name: json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" for name, notebook in new.items()}
    if "loader" in chosen:
        texts_of[LOADER] = (FOLDER / LOADER).read_text(encoding="utf-8")
    for name, text in texts_of.items():
        path = folder / name
        kept[path] = _put_aside(path) if path.exists() else None
        path.write_text(text, encoding="utf-8")
    return kept


def _put_aside(path: Path) -> Path:
    """Rename a file to the first name with `.before` that is free."""
    names = (path.with_name(f"{path.name}.before{number}") for number in ("", *range(2, 1000)))
    return path.rename(next(name for name in names if not name.exists()))


def slides(folder: Path, handout: Handout, chosen: Iterable[str] = ()) -> list[Path]:
    """Write notebooks as slides: a slide for each heading, one below it for each further text. Raises ValueError without nbconvert."""
    try:
        import nbformat
        from nbconvert import SlidesExporter
    except ImportError:
        raise ValueError("slides need nbconvert: pip install nbconvert") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in originals(chosen):
        notebook = _translated(path, handout.language)
        for cell in notebook["cells"]:
            first = "slide" if "".join(cell["source"]).startswith("#") else "subslide"
            if handout.language != "en" and re.search(r"^(?:ask|labs)\.", "".join(cell["source"]), re.MULTILINE):
                cell["outputs"] = []  # what is asked there is English
            cell["metadata"]["slideshow"] = {"slide_type": first if cell["cell_type"] == "markdown" else "-"}
        page, _ = SlidesExporter().from_notebook_node(nbformat.reads(json.dumps(notebook), as_version=4))
        written.append(folder / f"{path.stem}.slides.html")
        written[-1].write_text(page, encoding="utf-8")
    return written


def translate(module: Path, language: str, notebooks: Iterable[Path]) -> None:
    """Put a language's texts into a copied module of the course."""
    owner = next((path.stem for path in notebooks if texts.module_of(path.stem) == module.stem), None)
    owner = owner or next((name for name, modules in texts.SHARED.items() if module.stem in modules), "")
    chosen = {key: said for key, said in texts.read(texts.file_of(language, owner)).items() if said != "="}
    if chosen:
        source = module.read_text(encoding="utf-8")
        module.write_text(texts.replaced(source, module.stem, chosen), encoding="utf-8")
