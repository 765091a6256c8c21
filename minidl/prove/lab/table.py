"""The table of all cases: name -> row, in the order of their themes."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Final

from minidl.prove.lab.case import LabCase

THEMES: Final = (
    "a sample that never comes",
    "a worker that does not begin",
    "fork in a program with threads",
    "a result that is lost on its way",
    "cycles of waiting",
    "the program's own code",
    "several ranks",
    "the end of a program",
    "a process that dies",
    "an error that ends the run",
    "healthy but slow",
)


@functools.cache
def cases() -> dict[str, LabCase]:
    """All cases by name, sorted by theme."""
    package = importlib.import_module("minidl.prove.lab.cases")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    found = {name: importlib.import_module(f"{package.__name__}.{name}").CASE for name in names}
    return dict(sorted(found.items(), key=lambda item: (THEMES.index(item[1].theme), item[0])))
