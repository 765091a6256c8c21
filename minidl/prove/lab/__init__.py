"""The hang lab: real-world failures as programs, the doctor's score on them, and minidl's loader without guards.

`run(arguments)` is `minidl lab`. A case is a module of `minidl.prove.lab.cases`; see `lab.case` for what one holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minidl import terminal

if TYPE_CHECKING:
    from minidl.prove.lab.case import LabCase
    from minidl.prove.lab.runner import LabRun, Mode

OK, FOUND = 0, 1


def run(arguments: argparse.Namespace) -> int:
    """List, run one case, or score. Raises ValueError for an unknown name."""
    if arguments.guards or arguments.without is not None:
        return _ablate(arguments.without)
    if arguments.score:
        return _score(arguments)
    if arguments.case is None:
        return _list()
    from minidl.prove.lab.table import cases

    if arguments.case not in cases():
        raise ValueError(f"no case is called {arguments.case!r}: `minidl lab` lists the cases")
    if not (case := cases()[arguments.case]).can_run:
        raise ValueError(f"{arguments.case} needs {case.needs}, which is not installed: pip install {case.needs}")
    return _show(arguments.case, case, arguments)


def _ablate(guard: str | None) -> int:
    """List the guards, or run minidl's loader without one; FOUND if the run does not show the guard's purpose."""
    from minidl.explore.guards import GUARDS
    from minidl.prove.lab.ablation import listed, show
    from minidl.run import free_directory

    if guard is None:
        print("\n".join(listed()))
        return OK
    if guard not in GUARDS:
        raise ValueError(f"no guard is called {guard!r}: `minidl lab --guards` lists the guards")
    trace = free_directory(Path("minidl-traces"), f"without-{guard}")
    return OK if show(guard, trace, functools.partial(print, flush=True)) else FOUND


def _list() -> int:
    from minidl.prove.lab.table import cases

    theme = ""
    for name, case in cases().items():
        if case.theme != theme:
            theme = case.theme
            print(f"{theme}:")
        needs = "" if case.can_run else f" (needs {case.needs})"
        print(f"  {name:<28} {case.title}{' (simulated)' if case.simulated else ''}{needs}")
    return OK


def _mode(name: str) -> Mode:
    from minidl.prove.lab.runner import Mode

    return {"torch": Mode.PLAIN, "observed": Mode.OBSERVED, "ours": Mode.OURS}[name]


def _show(name: str, case: LabCase, arguments: argparse.Namespace) -> int:
    """Run a case as a user would, and run the doctor on it."""
    from minidl.prove.lab.runner import running

    mode = _mode(arguments.loader or ("observed" if case.ended("torch") and not arguments.fixed else "torch"))
    options = dataclasses.replace(case.draw(arguments.seed), fixed=arguments.fixed)
    print(f"{name}: {case.title}\n  users see: {case.users_see}")
    print(f"  reported:  {case.thread}\n" * bool(case.thread), end="")
    print(f"  simulated: {case.simulated}\n" * bool(case.simulated), end="")
    print(f"\n$ python train.py {' '.join(options.arguments())}    # {mode.value}", flush=True)
    with running(name, options, mode) as run:
        if arguments.fixed or (case.truth is None and not case.ended(mode.loader)):
            return _end_of(run)
        run.wait()
        print("\n".join((run.said() + run.errors()).splitlines()[-12:]))
        if not _diagnosed(run):
            return FOUND
    truth = case.expected(options, mode.loader)
    print(f"\nthe truth: {truth.words() if truth is not None else 'it is healthy'}\nthe fix:   {case.fix}")
    print(f"           minidl lab {name} --fixed    # runs the program with it")
    return OK


def _end_of(run: LabRun) -> int:
    """Wait for the end of a program that should end well."""
    ended = run.wait_for_end()
    print(run.said() + run.errors(), end="")
    print(f"\nit {'ended' if ended else 'did not end'}; exit code {run.process.poll()}")
    return OK if run.process.poll() == 0 else FOUND


def _diagnosed(run: LabRun) -> bool:
    """Print what the doctor says of the program, or of its trace if it has ended; whether there is one of them."""
    from minidl.prove.lab.runner import Mode
    from minidl.prove.lab.score import doctor_says

    if run.ended and run.mode is Mode.PLAIN:
        print("\nit has ended without a recording: choose --loader observed")
        return False
    pid = str(run.process.pid)
    print(f"\n$ minidl doctor {'TRACE' if run.ended else pid}", flush=True)
    print(doctor_says(str(run.trace) if run.ended else pid, run))
    return True


def _score(arguments: argparse.Namespace) -> int:
    from minidl.prove.lab.runner import Mode
    from minidl.prove.lab.score import as_json, report, score
    from minidl.prove.lab.table import cases

    names = [name for name, case in cases().items() if fnmatch.fnmatch(name, arguments.cases) and case.can_run]
    if not names:
        raise ValueError(f"no case matches {arguments.cases!r}: `minidl lab` lists the cases")
    modes = [_mode(arguments.loader)] if arguments.loader else None
    answers = score(names, arguments.runs, arguments.jobs, terminal.say, modes or list(Mode), arguments.keep)
    print(as_json(answers) if arguments.json else "\n".join(report(answers)))
    sys.stdout.flush()
    return FOUND if any(answer.verdict != "right" for answer in answers) else OK
