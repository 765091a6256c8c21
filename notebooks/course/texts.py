"""The course in other languages: which texts it has, which of them are translated, and how they are put in.

A text is a Markdown cell, the title of a picture in a code cell, or a string of a module (a question, a hint, what a check
says). texts/LANGUAGE/NAME.md has the translations for the notebook NAME and for its module; texts/LANGUAGE/course.md and
labs.md have those for modules that notebooks share. An entry begins with a line that says where the original stands, and its mark,
a hash of it. If the original changes, its mark does, and the entry is older than the original:

    <!-- cell-03 8f3a21bc -->
    A cell's text.
    <!-- first_look.owner 0b1d22aa -->
    Which worker was given task {task}?

In a string, {fields} are Python; a translation uses no name that the original does not use. `=` leaves a text as it is.
Another word for an answer of a choice, and a number, may have several forms: `a|b`.
Code is one for all languages: `notebook` and `module` return copies with the texts of a language in them.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
SHARED = {"course": ("__init__", "asking", "checking"), "labs": ("labs", "schedules")}
"""A file of translations -> modules of which several notebooks show texts."""

ENTRY = re.compile(r"^<!-- (\S+) ([0-9a-f]{8}) -->\n", re.MULTILINE)
NO_TEXT = ("query", "compile", "fullmatch", "sub", "search", "match", "filterwarnings", "replace", "described")
"""Functions whose arguments are code."""


@dataclass(frozen=True)
class Text:
    """A text of the original. place: a cell's id, or module.function. wanted: a language is not whole without it."""

    place: str
    original: str
    wanted: bool

    @property
    def mark(self) -> str:
        """The hash of the original. How its lines are broken does not count, nor which quotes it has."""
        return hashlib.sha256(" ".join(self.original.replace('"', "'").split()).encode()).hexdigest()[:8]

    @property
    def key(self) -> tuple[str, str]:
        """What a translation is found by."""
        return self.place, self.mark


# --- Strings of Python code -------------------------------------------------------------------------------------------
def strings(source: str, place: str, *, titles_only: bool = False) -> Iterator[tuple[Text, ast.expr]]:
    """The strings of a source, each with its node. titles_only: what is wanted are arguments `title=`, nothing else."""
    yield from _within(parsed(source), place, titles_only, wanted=not titles_only)


def parsed(source: str) -> ast.Module:
    """Its tree. The options of choices, and the other words for each, are marked: in the call, or under a name."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Choice"]
    options: list[Any] = [argument for call in calls for argument in call.args[1:]]
    named = {argument.id for argument in options if isinstance(argument, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            options += [node.value] * any(isinstance(one, ast.Name) and one.id in named for one in targets)
    for one in options:
        one.of_choice = True
        for others in getattr(one, "values", ()):
            for word in getattr(others, "elts", ())[1:]:
                word.is_other = True
    return tree


def _within(node: ast.AST, place: str, titles_only: bool, wanted: bool) -> Iterator[tuple[Text, ast.expr]]:
    has_docstring = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and not _is_trial(node)
    for child in ast.iter_child_nodes(node):
        if has_docstring and isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            original = template(child)
            option = hasattr(child, "is_other") or (
                isinstance(node, ast.Dict) and child in node.keys and (" " in original or hasattr(node, "of_choice"))
            )
            if re.search("[a-zA-Z]{2}", original):
                yield Text(place, original, wanted and _is_prose(original, option)), child
            continue
        inner = f"{place}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else place
        name = getattr(child.func, "attr", "") or getattr(child.func, "id", "") if isinstance(child, ast.Call) else ""
        title = titles_only and isinstance(child, ast.keyword) and child.arg == "title"
        yield from _within(child, inner, titles_only, (wanted or title) and name not in NO_TEXT)


def _is_trial(node: ast.AST) -> bool:
    """Whether it is a trial of a lab: its docstring is the hint that a failed one gives."""
    decorators = getattr(node, "decorator_list", ())
    return any(isinstance(one, ast.Call) and getattr(one.func, "id", "") == "trial" for one in decorators)


def _is_prose(text: str, option: bool) -> bool:
    """Whether it is a sentence, or one of the answers of a choice; a word or two may be a form of a number."""
    words = len(text.split())
    said = words > 1 and text.rstrip()[-1] in ".?!"
    return (option or said or words > 4) and not re.match(r"\s*<|[\w-]+:\w", text)


def template(node: ast.expr) -> str:
    """A string's text; of an f-string with its fields in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    return "".join(
        str(part.value).replace("{", "{{").replace("}", "}}") if isinstance(part, ast.Constant) else _field(part)
        for part in node.values
    )


def _field(part: Any) -> str:
    conversion = f"!{chr(part.conversion)}" if part.conversion > 0 else ""
    spec = f":{template(part.format_spec)}" if part.format_spec else ""
    code = re.sub(r"\bfor \(([\w, ]+)\) in\b", r"for \1 in", ast.unparse(part.value))  # so Python 3.10 writes it
    return f"{{{code}{conversion}{spec}}}"


def names(text: str) -> set[str]:
    """The names that the fields of a text use. Raises SyntaxError if they are no Python."""
    return {node.id for node in ast.walk(ast.parse(_written(text, True))) if isinstance(node, ast.Name)}


def _written(text: str, formatted: bool) -> str:
    """A text as Python code."""
    if not formatted:
        return repr(text)
    parts = re.split(r"(\{\{|\}\}|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})", text)
    literal = [part.replace("\\", "\\\\").replace('"', '\\"') if at % 2 == 0 else part for at, part in enumerate(parts)]
    return f'f"""{"".join(literal)}"""'


def replaced(source: str, place: str, translations: Mapping[tuple[str, str], str]) -> str:
    """A source with the translations of its strings."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    for text, node in sorted(strings(source, place), key=lambda one: (-one[1].lineno, -one[1].col_offset)):
        said = translations.get(text.key)
        if said is None:
            continue
        if hasattr(node, "is_other") and said != text.original:
            said = f"{said}|{text.original}"  # English answers are read in every language
        said = re.match(r"\s*", text.original)[0] + said + re.search(r"\s*\Z", text.original)[0]  # type: ignore[index]
        begin, end = (
            starts[line - 1] + column
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        )
        raw = raw[:begin] + _written(said, isinstance(node, ast.JoinedStr)).encode() + raw[end:]
    return raw.decode()


# --- A notebook and its translations ----------------------------------------------------------------------------------
def module_of(name: str) -> str:
    """The module of a notebook: 00_first_look's is first_look."""
    return name[3:] if name[:2].isdecimal() else ""


def of_cells(notebook: Mapping[str, Any]) -> list[Text]:
    """The texts of a notebook, as JSON has it."""
    found = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            found.append(Text(cell["id"], source, wanted=True))
        else:
            found += [text for text, _ in strings(source, cell["id"], titles_only=True)]
    return found


def of_modules(*modules: str) -> list[Text]:
    """The texts of modules of the course, each once."""
    found = [
        text
        for module in modules
        if (path := FOLDER / "course" / f"{module}.py").exists()
        for text, _ in strings(path.read_text(encoding="utf-8"), module)
    ]
    wanted = {text.key for text in found if text.wanted}
    return list({text.key: Text(text.place, text.original, text.key in wanted) for text in found}.values())


def file_of(language: str, name: str) -> Path:
    """Where the translations of a notebook, or of "course", are."""
    return FOLDER / "texts" / language / f"{name}.md"


def read(path: Path) -> dict[tuple[str, str], str]:
    """The translations in a file, without those that leave the text as it is; none if there is no file."""
    if not path.exists():
        return {}
    _, *parts = ENTRY.split(path.read_text(encoding="utf-8"))
    return {(place, mark): text.strip() for place, mark, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def faults(texts: list[Text], translations: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """What lacks: entry -> "missing", "older than its original", or what is wrong with its fields."""
    known = {text.key: text for text in texts}
    found = {text.key: "missing" for text in texts if text.wanted and text.key not in translations}
    for key, said in translations.items():
        if key not in known:
            found[key] = "older than its original"
        elif said == known[key].original.strip() or not said:
            found[key] = "not translated: `=` leaves it as it is"
        elif said != "=" and "." in key[0] and (new := _new_names(said, known[key].original)):
            found[key] = new
    return found


def _new_names(said: str, original: str) -> str:
    try:
        new = names(said) - names(original)
    except SyntaxError as error:
        return f"its fields cannot be read: {error.msg}"
    return f"its fields use {', '.join(sorted(new))}" if new else ""


def skeleton(texts: list[Text], lacking: Mapping[tuple[str, str], str]) -> str:
    """The originals of what lacks, as entries to be translated."""
    return "\n".join(
        f"<!-- {text.place} {text.mark} -->\n{text.original.strip()}\n" for text in texts if text.key in lacking
    )


def translated(notebook: Mapping[str, Any], translations: Mapping[tuple[str, str], str]) -> Any:
    """A copy of a notebook with its texts in another language; what is not translated stays."""
    chosen = {key: said for key, said in translations.items() if said != "="}
    made = copy.deepcopy(notebook)
    for cell in made["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            said = chosen.get(Text(cell["id"], source, wanted=True).key)
            cell["source"] = source if said is None else said
        else:
            cell["source"] = replaced(source, cell["id"], chosen)
    return made
