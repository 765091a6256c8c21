"""The package's shape: who may import whom, what stays pure, what an import costs, what the event table points at."""

from __future__ import annotations

import ast
import functools
import importlib.util
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minidl.tracing.events import EVENTS, Event

PACKAGE = Path(__file__).parent.parent / "minidl"

ROWS = (
    {"worker_info", "errors", "messages"},
    {"_libstdcxx", "dataset", "sampler", "distributed", "collate", "fetch", "nest", "augment"},
    {"dispatcher", "protocol"},
    {"transport", "ports", "progress", "streams"},
    {"dataloader", "iterators", "worker", "pin_memory", "shutdown", "signals", "device"},
    {"tracing"},
    {"demo", "run", "bench", "explore", "recordings", "cli", "__main__"},
)
"""A module imports from its own row and the rows before it. A subpackage counts as one module."""

PURE = {"dispatcher", "protocol"}
PURE_STDLIB = {"__future__", "abc", "collections", "dataclasses", "enum", "itertools", "typing"}
"""The parts of the standard library that know no clock, no file, no process and no chance."""

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
)


def row_of(module: str) -> int:
    """The row of a module given without the package's name; the package itself stands after all of them."""
    first = module.split(".")[0]
    for number, row in enumerate(ROWS):
        if first in row:
            return number
    assert not first, f"minidl/{first} has no row: add it to ROWS, as high as its imports allow"
    return len(ROWS)


def source_of(module: str) -> Path:
    return PACKAGE / Path(*module.split(".")).with_suffix(".py")


def run_time_imports(path: Path) -> Iterator[str]:
    """Yield the absolute names that a file imports, also inside functions; not those for type checkers only."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


def within_package(name: str) -> str:
    """The module of this package that an imported name is or lies in; "" for the package itself."""
    parts = name.split(".")[1:]
    while parts and not (source_of(".".join(parts)).is_file() or (PACKAGE / Path(*parts)).is_dir()):
        parts.pop()
    return ".".join(parts)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    own = row_of(module)
    names = [name for name in run_time_imports(source_of(module)) if name.split(".")[0] == "minidl"]
    targets = {target for name in names if (target := within_package(name)) or own < len(ROWS) - 1}
    wrong = sorted(target or "minidl itself" for target in targets if row_of(target) > own)
    assert not wrong, f"minidl.{module} imports {', '.join(wrong)}, which come in rows after its own"


@pytest.mark.parametrize("module", sorted(PURE))
def test_decisions_are_pure(module: str) -> None:
    roots = {name.split(".")[0] for name in run_time_imports(source_of(module))}
    assert roots <= PURE_STDLIB, f"minidl.{module} decides and does nothing else, but imports {roots - PURE_STDLIB}"


def loaded_by(statements: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `statements`."""
    program = f"{statements}\nimport sys; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(done.stdout.split())


def test_importing_needs_torch_and_numpy_alone() -> None:
    """Also of modules whose functions need more: they import it when they are called."""
    theirs = loaded_by("import numpy, torch, torch.utils.data, torch.multiprocessing")
    ours = loaded_by("\n".join(f"import minidl.{name}" for name in MODULES if name != "__main__"))
    roots, known = ({name.split(".")[0] for name in names} for names in (ours, theirs))
    assert roots - known - set(sys.stdlib_module_names) == {"minidl"}


# --- The event table --------------------------------------------------------------------------------------------------
@functools.cache
def names_in(path: Path) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def upstream_files(module: str) -> list[Path]:
    """Where an event's upstream module may lie: torch.utils.data, or torch's multiprocessing on top of Python's."""
    first, *rest = module.split(".")
    if first == "multiprocessing":
        homes = [folder_of("torch") / "multiprocessing", Path(multiprocessing.__file__).parent]
        found = [home.joinpath(*rest).with_suffix(".py") for home in homes]
    else:
        found = [folder_of("torch").joinpath("utils", "data", first, *rest).with_suffix(".py")]
    return [path for path in found if path.is_file()]


def event_id(event: Event) -> str:
    return f"{event.name}-{event.phase.value}"


@pytest.mark.parametrize("event", EVENTS.values(), ids=event_id)
def test_each_event_stands_for_code_that_exists(event: Event) -> None:
    module, name = event.ours.split(":")
    assert name in names_in(source_of(module)), f"{event.ours}: no such function or class in minidl"
    if event.upstream:
        module, name = event.upstream.split(":")
        files = upstream_files(module)
        assert any(name in names_in(path) for path in files), (
            f"{event.upstream}: not in {files or 'the installed torch'}"
        )


def test_the_check_of_names_can_fail() -> None:
    assert "no_such_function" not in names_in(source_of("dispatcher"))
    assert upstream_files("no_such_module") == []
