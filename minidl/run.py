"""Run an unmodified training script with minidl's DataLoader in torch's place, and record it.

Interface: `minidl run` calls `run_script(command, module=..., trace=..., ...)`, which returns the script's exit code.
`replaced()` is the replacement alone, as a context manager.

`torch.utils.data.DataLoader` and `torch.utils.data.dataloader.DataLoader` are replaced. Datasets, samplers and
`default_collate` stay torch's, because both loaders accept them. The samplers that the loader makes by default are of
torch's very types here, because frameworks compare them (`type(loader.batch_sampler) is BatchSampler`) and would wrap
or synchronise others wrongly. A `minidl.DataLoader` that a program makes itself has minidl's samplers, which are
subclasses of torch's. Iterators that are still torch's are observed (`record.observe`): of a module that was imported
before and bound the class to its own name, or of a class that has an iterator of its own (torchdata's, fastai's).

Python processes that the script starts, by multiprocessing or by itself, record into the same trace (`take_over`; see
`record.handover`).

The script runs in the real `__main__`, so that a spawned worker finds the script's definitions.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import sys
import threading
import types
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import torch.utils.data
import torch.utils.data.dataloader
import torch.utils.data.sampler

import minidl
from minidl import terminal
from minidl.arena.arena import budget
from minidl.dataloader import checked_transport
from minidl.device import sim
from minidl.loader import dataloader
from minidl.record.clocks import aligning
from minidl.record.group import at_process_group
from minidl.record.handover import PACKAGE, Settings, handed_on
from minidl.record.harmless import NO_PLACE, substituted
from minidl.record.observe import observed_iterators, shut_down_observed
from minidl.record.session import current_recorder, join_trace, write_place
from minidl.record.shared import write_program_end, write_uncaught
from minidl.record.step_parts import step_parts_recorded
from minidl.record.watchdog import stay_to_the_exit
from minidl.stand_in import StandIn
from minidl.tracefile.ranks import lacking, words_of


class RunError(Exception):
    """The script cannot be started; the message says why."""


@contextlib.contextmanager
def replaced(auto: bool = False) -> Iterator[None]:
    """While this is open, `torch.utils.data.DataLoader` is minidl's, without states, and makes torch's samplers.

    auto: loaders of map datasets choose their number of workers.
    """
    samplers = ("SequentialSampler", "RandomSampler", "BatchSampler")
    with substituted(
        *((home, "DataLoader", StandIn) for home in (torch.utils.data, torch.utils.data.dataloader)),
        *((dataloader, name, getattr(torch.utils.data.sampler, name)) for name in samplers),
        (StandIn, "chooses", auto),
    ):
        yield


def run_script(
    command: Sequence[str],
    *,
    module: bool,
    trace: Path,
    observe: bool = False,
    transport: str | None = None,
    align_clocks: bool = False,
    harden: bool = False,
    auto: bool = False,
    exits: bool = False,
    **recording: Any,
) -> int:
    """Run `command` (a script or a module's name, with arguments) and record it into `trace`.

    observe: keep torch's loader, and record loaders that have workers (see `record.observe`).
    transport: of the loaders that do not choose one (see `DataLoader`), in all processes of the run.
    align_clocks: compare the ranks' clocks when their process group begins and ends (see `record.clocks`). harden:
    guard torch's own loader (see `hardening`). auto: loaders of map datasets choose their number of workers (see
    `auto.loading`). exits: this process ends with the script, so that the watchdog watches its exit handlers, too.
    recording: further options of `minidl.trace`. Returns how the script ends: its exit code, 1 after an uncaught
    exception or if it is no Python, -2 if SIGINT (Ctrl-C) ends it. Raises RunError if the script or module cannot be
    loaded, or the simulated accelerator if the environment asks for it, or if torch's loader cannot be guarded, or if
    `transport`, MINIDL_TRANSPORT or MINIDL_ARENA_BYTES is unusable; TraceError if `trace` already holds a trace, or
    functions are to be recorded and viztracer is missing.
    """
    _check_transport(transport)
    name, *arguments = command if module else [_on_path(command[0]), *command[1:]]
    with _in_front(os.getcwd() if module else _folder(Path(name))):
        try:
            program = _find_module(name) if module else _read_script(Path(name))
        except SyntaxError as error:
            _show(error.with_traceback(None))
            return 1
        _load_sim()
        if harden:
            _say_guards()
        with minidl.trace(trace, **recording), contextlib.ExitStack() as stack:
            stack.enter_context(_default_transport(transport))
            writer = current_recorder()
            assert writer is not None  # the trace has just begun
            settings = Settings(writer.config, observe, align_clocks, harden, auto)
            stack.enter_context(_recorded(settings))
            stack.enter_context(handed_on(settings))
            others = set(threading.enumerate())
            code = _run(program, arguments)
            code = _wait_for_threads(others) or code
            shut_down_observed()
            gc.collect()  # ends loaders that only the script's globals held, while the recording is on
            write_program_end()
            if exits:
                stay_to_the_exit()
        for text in lacking(*words_of(trace)):
            terminal.say(f"minidl: {text}")
        return code


def _check_transport(transport: str | None) -> None:
    """Refuse now what the script's first loader, or its first one with slabs, would refuse."""
    try:
        checked_transport(transport)
        budget()
    except ValueError as error:
        raise RunError(str(error)) from error


@contextlib.contextmanager
def _default_transport(transport: str | None) -> Iterator[None]:
    """While this is open, MINIDL_TRANSPORT is `transport`, if one is given."""
    before = os.environ.get("MINIDL_TRANSPORT", "")
    os.environ["MINIDL_TRANSPORT"] = transport or before
    try:
        yield
    finally:
        os.environ["MINIDL_TRANSPORT"] = before


def _say_guards() -> None:
    """Refuse a torch whose loader cannot be guarded, before the trace begins; say what the others get."""
    try:
        from minidl.hardening import GUARDS, check_torch

        check_torch()
    except (ImportError, RuntimeError) as error:
        raise RunError(str(error)) from error
    terminal.say(f"minidl: torch's DataLoader has {len(GUARDS)} more guards: minidl help holes")


def _load_sim() -> None:
    """Load the simulated accelerator if it is asked for: later than the first backward pass were too late."""
    try:
        sim.load_if_wanted()
    except sim.SimError as error:
        raise RunError(str(error)) from error


@contextlib.contextmanager
def _recorded(settings: Settings) -> Iterator[None]:
    """While this is open, the program's loaders and training steps are recorded, and its rank as soon as it has one."""
    clocks = aligning() if settings.align_clocks else contextlib.nullcontext()
    loaders = contextlib.nullcontext() if settings.observe else replaced(settings.auto)
    with (
        loaders,
        observed_iterators(),
        step_parts_recorded(),
        at_process_group(write_place),
        clocks,
        contextlib.ExitStack() as stack,
    ):
        if settings.harden:  # later than observed_iterators(): an observed queue wraps a guarded one
            from minidl.hardening import harden

            stack.callback(harden().undo)
        yield


_for_ever = contextlib.ExitStack()


def take_over(given: Mapping[str, Any]) -> None:
    """Record this process, which a program under `minidl run` has started, from its first iterator on.

    given: what MINIDL_RUN holds (see `record.handover`). Raises TraceError if the run's trace is not to be reached.
    """
    settings = Settings.read(given)
    _for_ever.enter_context(_recorded(settings))
    join_trace(settings.config)


@dataclass(frozen=True)
class _Program:
    """A program to run. spec: None for a script; for a module, what `multiprocessing` lets a spawned child import."""

    path: str
    code: types.CodeType
    name: str  # its sys.argv[0]
    loader: Any
    spec: ModuleSpec | None = None

    def main(self) -> types.ModuleType:
        """Make the module `__main__` as the interpreter does."""
        main = types.ModuleType("__main__")
        main.__file__, main.__loader__, main.__spec__ = self.path, self.loader, self.spec
        main.__package__ = self.spec.parent if self.spec is not None else None
        main.__dict__["__builtins__"] = builtins
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        if sys.version_info < (3, 15):
            main.__dict__["__cached__"] = self.spec.cached if self.spec is not None else None
        return main


def _on_path(name: str) -> str:
    """The script `name`, or if there is no such file, the console script of that name on PATH (`torchrun`, say)."""
    return name if os.path.exists(name) or os.sep in name else shutil.which(name) or name


def _is_package(path: Path) -> bool:
    """Whether this is a directory or a zip file, of which Python runs the `__main__.py`."""
    return path.is_dir() or (path.is_file() and zipfile.is_zipfile(path))


def _folder(script: Path) -> str:
    """The folder that Python puts in front of sys.path for a script: its own, where a link leads to."""
    return os.path.abspath(script) if _is_package(script) else os.path.dirname(os.path.realpath(script))


def _read_script(path: Path) -> _Program:
    """Raises SyntaxError if it is no Python."""
    if _is_package(path):
        spec = PathFinder.find_spec("__main__", [os.path.abspath(path)])
        return _of_spec(spec, str(path), f"{path} holds no __main__.py to run")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read the script {path}: {error.strerror}") from error
    whole = os.path.abspath(path)  # as Python gives it to a script
    try:
        code = compile(source, whole, "exec", dont_inherit=True)
    except ValueError as error:
        raise RunError(f"{path} is not a Python script: {error}") from error
    return _Program(whole, code, str(path), SourceFileLoader("__main__", whole))


def _find_module(name: str) -> _Program:
    """Find a module as `python -m` does: a package stands for its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise RunError(f"cannot load the module {name}: {error}") from error
    return _of_spec(spec, None, f"no module {name} was found to run (a package needs a __main__.py)")


def _of_spec(spec: ModuleSpec | None, name: str | None, missing: str) -> _Program:
    """The program of a module. name: its sys.argv[0]; None: its file. Raises RunError if there is no code."""
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or spec.origin is None or code is None:
        raise RunError(missing)
    return _Program(spec.origin, code, name or spec.origin, spec.loader, spec)


@contextlib.contextmanager
def _in_front(folder: str) -> Iterator[None]:
    """Put `folder` first in sys.path, in place of the folder of this program; minidl's own stays, at the end.

    Under `python -P` neither of them is there.
    """
    before = sys.path[:]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[:1] = [folder]
    if str(PACKAGE.parent) not in sys.path:
        sys.path.append(str(PACKAGE.parent))
    try:
        yield
    finally:
        sys.path[:] = before


def _run(program: _Program, arguments: list[str]) -> int:
    """Execute the program as `__main__`; return its exit code."""
    main = program.main()
    names = "__main__", "__mp_main__"  # the second is what its definitions are called in a spawned worker
    before = {name: sys.modules[name] for name in names if name in sys.modules}, sys.argv
    sys.modules.update(dict.fromkeys(names, main))
    sys.argv = [program.name, *arguments]
    try:
        return _execute(program.code, main)
    finally:
        sys.modules.update(before[0])
        sys.argv = before[1]


def _execute(code: types.CodeType, main: types.ModuleType) -> int:
    """Execute the script; return its exit code. An uncaught exception is printed as by the interpreter."""
    try:
        exec(code, main.__dict__)
        return 0
    except SystemExit as request:
        return _exit_code(request)
    except BaseException as error:
        failure = error
    _show(failure)  # an error of the script's own hook has no other one as its context
    return -signal.SIGINT if isinstance(failure, KeyboardInterrupt) else 1


def _wait_for_threads(others: Set[threading.Thread]) -> int:
    """Join the threads that the script leaves, as the interpreter does at its end. Return -2 after Ctrl-C, else 0."""
    try:
        for thread in threading.enumerate():
            if not thread.daemon and thread not in others:
                thread.join()
    except KeyboardInterrupt as error:
        _show(error)
        return -signal.SIGINT
    return 0


def _exit_code(request: SystemExit) -> int:
    """Return a SystemExit's exit code, as the interpreter does: None is 0; any other object is printed and is 1."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF if -(1 << 63) <= request.code < 1 << 63 else 0xFF
    with contextlib.suppress(Exception):
        if sys.stderr is None:
            os.write(2, f"{request.code}\n".encode("utf-8", "backslashreplace"))
        else:
            print(request.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Record an exception, and print it as the interpreter does, without this module's frames."""
    frames = _without_ours(error)
    write_uncaught(error.with_traceback(frames))
    try:
        sys.excepthook(type(error), error, frames)
    except Exception as another:  # of a hook of the script's
        another = another.with_traceback(_without_ours(another))
        for title, one in (("Error in sys.excepthook:", another), ("\nOriginal exception was:", error)):
            terminal.say(title)
            sys.__excepthook__(type(one), one, one.__traceback__)


def _without_ours(error: BaseException) -> types.TracebackType | None:
    """The frames of an exception behind its first, which is this module's; without what stands in torch's place."""
    frame = error.__traceback__
    while frame is not None:
        after = frame.tb_next
        while after is not None and after.tb_frame.f_code.co_filename.endswith(NO_PLACE):
            after = after.tb_next
        frame.tb_next = after
        frame = after
    return error.__traceback__.tb_next if error.__traceback__ is not None else None


def free_directory(parent: Path, name: str) -> Path:
    """Make the first of `parent`/`name`-1, -2, … that does not exist, so that no other process takes it."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (parent / f"{name}-{number}").mkdir(0o700)
            return parent / f"{name}-{number}"
        except FileExistsError:
            number += 1
