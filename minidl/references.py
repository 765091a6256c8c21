"""Where the functions stand that the event table, the guards and the reading companion name: here and in torch.

Interface: `places(reference, package)` finds the lines of a "module:name" by parsing the source file, so no line number
is ever written down; `source_line` gives them in words. A name is a function or class, or its path:
"Dispatcher.assign".

package "minidl": a module of this package. package "torch": a module of torch.utils.data ("_utils.worker"), any other
of torch's ("torch._tensor"), or a header that comes with it ("torch/include/.../distributed.h"). A module
"multiprocessing.*" is torch's or, if torch has none, Python's. Nothing is imported but the packages' parents.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A definition in a file: the file as a reader names it, where it is, and its first and last line (from 1)."""

    file: str
    path: Path
    name: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.first}-{self.last} {self.name}"

    @property
    def text(self) -> str:
        """The lines themselves."""
        return "\n".join(self.path.read_text(encoding="utf-8").splitlines()[self.first - 1 : self.last])

    def line_with(self, text: str) -> int | None:
        """Return the number of the first of the lines that has the text."""
        lines = enumerate(self.text.splitlines(), self.first)
        return next((number for number, line in lines if text in line), None)


def places(reference: str, package: str, torch: Path | None = None) -> tuple[SourcePlace, ...]:
    """Return each definition that "module:name" stands for: several if classes share a method's name; () if none.

    torch: the folder of another torch than the installed one, such as an unpacked wheel's.
    """
    module, _, name = reference.partition(":")
    for file, path in _files(module, package, torch):
        found = _definitions(path).get(name, ()) if path.is_file() else ()
        if found:
            return tuple(SourcePlace(file, path, name, first, last) for first, last in found)
    return ()


def source_line(reference: str, package: str) -> str:
    """Return where a "module:name" is: "minidl/data/fetch.py:61 fetch"; the reference itself if it is not found."""
    found = places(reference, package)
    return f"{found[0].file}:{', '.join(str(f.first) for f in found)} {found[0].name}" if found else reference


def names_in(path: Path) -> list[str]:
    """Return the path of each function and class that a file defines, nested functions left out, in its order."""
    return list(dict.fromkeys(name for name, _, node in _walk(ast.parse(path.read_bytes()), "") if name and node))


def source_of(module: str, package: str, torch: Path | None = None) -> Path | None:
    """Return the file of a module, named as in a reference; None if there is none."""
    return next((path for _, path in _files(module, package, torch) if path.is_file()), None)


def _files(module: str, package: str, torch: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the files that the module may be: as a reader names it, and where it is."""
    if module.startswith("torch/"):
        folder = torch or _folder("torch")
        if folder is not None:
            yield module, folder.parent / module if torch is None else folder / module.removeprefix("torch/")
        return
    for home, rest in _homes(module, package):
        folder = _folder_of(home, torch)
        if folder is not None:
            name, path = "/".join([*home.split("."), *rest]), folder.joinpath(*rest)
            yield f"{name}.py", path.with_suffix(".py")
            yield f"{name}/__init__.py", path / "__init__.py"


def _homes(module: str, package: str) -> list[tuple[str, list[str]]]:
    """Return the packages that the module may be in, and its path in each."""
    first, *rest = module.split(".")
    if first == "multiprocessing":
        return [("torch.multiprocessing", rest), ("multiprocessing", rest)]
    if package != "torch":
        return [(package, [first, *rest])]
    return [("torch", rest)] if first == "torch" else [("torch.utils.data", [first, *rest])]


def _folder_of(home: str, torch: Path | None) -> Path | None:
    first, *rest = home.split(".")
    if torch is not None and first == "torch":
        return torch.joinpath(*rest)
    return _folder(home)


@functools.cache
def _folder(package: str) -> Path | None:
    """Return the folder of an installed package without importing more than its parents."""
    spec = importlib.util.find_spec(package)
    found = spec.submodule_search_locations if spec else None
    return Path(found[0]) if found else None


@functools.cache
def _definitions(source: Path) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the first and last lines of each definition of a file, by its path, or by its last name alone."""
    try:
        text = source.read_text(encoding="utf-8")
        is_header = source.suffix == ".h"
        found = _classes_of_header(text) if is_header else [each[:2] for each in _walk(ast.parse(text), "")]
    except (OSError, SyntaxError, ValueError):
        return {}
    out: dict[str, list[tuple[int, int]]] = {}
    for name, lines in found:
        out.setdefault(name, []).append(lines)
    known = set(out)
    for name, lines in found:
        if (last := name.rpartition(".")[2]) not in known:
            out.setdefault(last, []).append(lines)
    return {name: tuple(lines) for name, lines in out.items()}


def _walk(node: ast.AST, around: str) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Yield path, lines, and whether no function is around it, of each definition."""
    for child in ast.iter_child_nodes(node):
        if any(isinstance(each, ast.Name) and each.id == "overload" for each in getattr(child, "decorator_list", ())):
            continue  # a signature for type checkers, which never runs
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{around}.{child.name}" if around else child.name
            yield name, (child.lineno, child.end_lineno or child.lineno), "<" not in around
            inner = name if isinstance(child, ast.ClassDef) else f"{name}.<locals>"
            yield from _walk(child, inner)
        else:
            yield from _walk(child, around)


def _classes_of_header(text: str) -> list[tuple[str, tuple[int, int]]]:
    """Return the classes of a C++ header: from `class NAME` to the next line that is `};`."""
    lines = text.splitlines()
    out = []
    for number, line in enumerate(lines, 1):
        match = re.match(r"class (?:[A-Z_]+_API )?(\w+)\b(?!;)", line)
        if match:
            last = next((at for at, each in enumerate(lines[number:], number + 1) if each == "};"), number)
            out.append((match[1], (number, last)))
    return out
