"""The package's modules and which of them import which, read from its source.

`test_architecture.py` tests the structure; `draw_structure.py` draws it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NAME = "minidl"


@dataclass(frozen=True)
class Imports:
    """What one module imports from the package, as module names without the package's own name.

    A package's `__init__.py` has a name of its own (`check.__init__`), so that a folder never imports itself.
    """

    at_run_time: frozenset[str]
    """Also those inside functions."""
    for_types: frozenset[str]
    """Those under `if TYPE_CHECKING:` only."""


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
    """Yield the absolute names that a file imports at run time, or with `for_types` those under TYPE_CHECKING."""
    found = statements(parsed(path))
    blocks = [node for node in found if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    typing = {id(inner) for block in blocks for child in block.body for inner in (child, *statements(child))}
    for node in found:
        if (id(node) in typing) != for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}:{node.lineno}: relative import; write the absolute name")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_imports(package: Path) -> dict[str, Imports]:
    """Read what each module of the package imports from the package."""
    found = modules(package)

    def within(path: Path, *, for_types: bool) -> frozenset[str]:
        names = (name.split(".") for name in imported_names(path, for_types=for_types))
        return frozenset(target for name in names if name[0] == NAME and (target := _module_of(name[1:], found)))

    imports = {}
    for module, path in found.items():
        at_run_time = within(path, for_types=False) - {module}
        imports[module] = Imports(at_run_time, within(path, for_types=True) - at_run_time - {module})
    return imports


def _module_of(parts: list[str], found: Iterable[str]) -> str:
    """Name the module that an imported name is or lies in; "" if that is a package without code."""
    while True:
        for candidate in (".".join(parts), ".".join([*parts, "__init__"])):
            if candidate in found:
                return candidate
        if not parts:
            return ""
        parts = parts[:-1]


def circles(edges: dict[str, frozenset[str]]) -> list[list[str]]:
    """Find the groups of modules that import each other in a circle (strongly connected components, Tarjan)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for target in sorted(edges[module]):
            if target not in numbers:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], numbers[target])
        if lowest[module] == numbers[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(edges):
        if module not in numbers:
            visit(module)
    return found


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
