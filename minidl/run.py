"""Run an unmodified training script with this package's DataLoader in torch's place, recorded.

Interface: `run_script(command, module=..., trace=..., ...)` is what `minidl run` calls; it returns the exit code
that the script would have had. `replaced()` is the replacement alone, as a context manager.

Replaced are `torch.utils.data.DataLoader` and `torch.utils.data.dataloader.DataLoader`; datasets, samplers and
`default_collate` stay torch's, since both loaders take the same ones. A module that was imported before and bound the
class to a name of its own keeps torch's, and so does a process that the script itself starts by spawn or forkserver.

The script runs in the real `__main__`, so that a worker that is spawned finds what the script defines.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch.utils.data
import torch.utils.data.dataloader

import minidl
from minidl.tracing.observe import observed_loaders
from minidl.tracing.ranks import aligning


class RunError(Exception):
    """The script cannot be started; the message says why."""


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """While this is open, `torch.utils.data.DataLoader` is `minidl.DataLoader`."""
    homes: tuple[Any, ...] = (torch.utils.data, torch.utils.data.dataloader)
    original = torch.utils.data.DataLoader
    try:
        for home in homes:
            home.DataLoader = minidl.DataLoader
        yield
    finally:
        for home in homes:
            home.DataLoader = original


def run_script(
    command: Sequence[str],
    *,
    module: bool,
    trace: Path,
    observe: bool = False,
    align_clocks: bool = False,
    **recording: Any,
) -> int:
    """Run `command` (a script and its arguments, or a module's name and its) and record it into `trace`.

    observe: leave torch's loader where it is, and record those that have workers (see `tracing.observe`).
    align_clocks: compare the ranks' clocks when their process group begins and ends (see `tracing.ranks`). recording:
    further options of `minidl.trace`. Returns the exit code: the script's own, 1 after an uncaught exception, 130 after
    Ctrl-C. Raises RunError where there is nothing to run, TraceError where `trace` is taken, or where functions are
    asked for and viztracer is missing.
    """
    name, *arguments = command
    folder = os.getcwd() if module else os.path.dirname(os.path.abspath(name))
    with _in_front(folder):
        program = _find_module(name) if module else _read_script(Path(name))
        clocks = aligning() if align_clocks else contextlib.nullcontext()
        with observed_loaders() if observe else replaced(), minidl.trace(trace, **recording), clocks:
            code = _run(program, arguments)
            gc.collect()  # loaders that only the script's globals held end now, and are recorded
            return code


@dataclass(frozen=True)
class _Program:
    """What is run. spec: None for a script; of a module, what `multiprocessing` tells a spawned child to import."""

    path: str
    code: types.CodeType
    name: str  # what it finds as sys.argv[0]
    spec: ModuleSpec | None = None


def _read_script(path: Path) -> _Program:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RunError(f"can't read the script {path}: {error.strerror}") from error
    try:
        whole = os.path.abspath(path)  # as Python gives it to a script
        return _Program(whole, compile(source, whole, "exec", dont_inherit=True), str(path))
    except (SyntaxError, ValueError) as error:
        raise RunError(f"{path} is no Python script: {error}") from error


def _find_module(name: str) -> _Program:
    """Find a module as `python -m` does: a package stands for its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    except (ImportError, ValueError, SyntaxError) as error:
        raise RunError(f"can't load the module {name}: {error}") from error
    if spec is None or spec.origin is None or code is None:
        raise RunError(f"there is no module {name} to run (a package needs a __main__.py)")
    return _Program(spec.origin, code, spec.origin, spec)


@contextlib.contextmanager
def _in_front(folder: str) -> Iterator[None]:
    """Let `folder` be the first place to import from, in place of the one that this program was started from."""
    before = sys.path[:]
    sys.path[:1] = [folder]
    try:
        yield
    finally:
        sys.path[:] = before


def _run(program: _Program, arguments: list[str]) -> int:
    """Execute the program as `__main__`; its exit code."""
    main = types.ModuleType("__main__")
    main.__file__ = program.path
    main.__spec__ = program.spec
    main.__loader__ = program.spec.loader if program.spec is not None else None
    main.__package__ = program.spec.parent if program.spec is not None else None
    main.__dict__["__builtins__"] = builtins
    before = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = main, [program.name, *arguments]
    try:
        return _execute(program.code, main)
    finally:
        sys.modules["__main__"], sys.argv = before


def _execute(code: types.CodeType, main: types.ModuleType) -> int:
    """Execute the script; its exit code. What it did not catch is shown as the interpreter would show it."""
    try:
        exec(code, main.__dict__)
    except SystemExit as request:
        return _exit_code(request)
    except KeyboardInterrupt as error:
        _show(error)
        return 130
    except Exception as error:
        _show(error)
        return 1
    return 0


def _exit_code(request: SystemExit) -> int:
    """What the interpreter makes of a SystemExit: nothing is 0, a number is itself, anything else is shown and is 1."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Show an exception as the script's own interpreter would: without the frame of this module that called it."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    sys.excepthook(type(error), error.with_traceback(frames), frames)
