"""minidl: a readable, faithful reimplementation of PyTorch's data loading that records what it does.

`DataLoader`, the datasets and the samplers stand for their namesakes in `torch.utils.data`, and mix with them.
`trace(directory)` records a run, `read_trace(path)` reads it. Start reading at `mini.py`.

Each name is imported when it is first used. A training program loads the loader and nothing that reads or draws
traces, and `minidl --help` loads neither torch nor NumPy.
"""

import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def _modules() -> Mapping[str, str]:
    """Public name -> its module, by the imports of `__init__.pyi`."""
    import ast

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> object:
    """Import a public name's module, or the module `name`, at its first use."""
    if name == "__all__":
        return list(_modules())
    if name.startswith("__"):
        raise AttributeError(f"module 'minidl' has no attribute {name!r}")
    if name in _modules():
        value = getattr(importlib.import_module(_modules()[name]), name)
        globals()[name] = value  # the next use finds it here
        return value
    if importlib.util.find_spec(f"minidl.{name}") is None:
        raise AttributeError(f"module 'minidl' has no attribute {name!r}")
    return importlib.import_module(f"minidl.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


if os.environ.get("MINIDL_TRACE"):
    from minidl.record.session import trace_from_environment

    trace_from_environment()
