"""The package's modules and which of them import which, read from its source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

NAME = "minidl"


def modules(package: Path) -> dict[str, Path]:
    """Find each module of the package that has code; an `__init__.py` of a docstring only is left out."""
    paths = (path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py" or _has_code(path))
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in paths}


def _has_code(path: Path) -> bool:
    return any(not isinstance(node, ast.Expr) for node in parsed(path).body)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> list[ast.AST]:
    """List the statements inside a node, and those inside them, with handlers and cases."""
    found, todo = [], [node]
    while todo:
        node = todo.pop()
        inner = [
            each for part in ("body", "handlers", "orelse", "finalbody", "cases") for each in getattr(node, part, ())
        ]
        found += inner
        todo += inner
    return found


def imported_names(path: Path, *, for_types: bool = False) -> Iterator[str]:
    """Yield the absolute names that a file imports at run time, and with `for_types` those under TYPE_CHECKING too."""
    found = statements(parsed(path))
    ifs = (node for node in found if isinstance(node, ast.If) and not for_types)
    blocks = [node for node in ifs if "TYPE_CHECKING" in ast.unparse(node.test)]
    typing = {id(inner) for block in blocks for child in block.body for inner in (child, *statements(child))}
    for node in found:
        if id(node) in typing and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}:{node.lineno}: relative import; write the absolute name")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_imports(package: Path) -> dict[str, set[str]]:
    """Read what each module of the package imports from the package, also in functions and for type checkers.

    Names of modules lack the package's own. A package's `__init__.py` has a name of its own (`check.__init__`), so that
    a folder never imports itself.
    """
    found = modules(package)
    names = {
        module: (name.split(".") for name in imported_names(path, for_types=True)) for module, path in found.items()
    }
    return {
        module: {_module_of(name[1:], found) for name in imported if name[0] == NAME} - {module, ""}
        for module, imported in names.items()
    }


def _module_of(parts: list[str], found: Iterable[str]) -> str:
    """Name the module that an imported name is or lies in; "" if that is a package without code."""
    while True:
        for candidate in (".".join(parts), ".".join([*parts, "__init__"])):
            if candidate in found:
                return candidate
        if not parts:
            return ""
        parts = parts[:-1]


def classes(package: Path) -> dict[str, list[str]]:
    """List for each class name of the package the modules that define it, classes inside classes included."""
    found: dict[str, list[str]] = {}
    for module, path in modules(package).items():
        for node in statements(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return found


def lines_of_code(text: str) -> int:
    """Lines with code: no blank ones, comments, docstrings."""
    tree, texts = ast.parse(text), set()
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in texts and bool(line.strip()) and line.strip()[0] != "#" for number, line in lines)
