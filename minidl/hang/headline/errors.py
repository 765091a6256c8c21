"""Headlines of exceptions that ended the run: of a task, of the sampler, of a timeout, of the program."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Final

import numpy as np

from minidl.hang import remedies
from minidl.hang.finding import Finding, Focus, RunOutcome
from minidl.hang.headline.run_context import RunContext
from minidl.hang.headline.waiting import state_in, what_is_missing
from minidl.hang.places import LoaderStep
from minidl.tracefile import events as ev
from minidl.tracefile.events import Outcome
from minidl.tracefile.words import doing, duration

_NO_ERRORS: Final = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
"""Exceptions that end a program on request."""


def failed_next(run: RunContext) -> Finding | None:
    """The first error after the last batch of a process: the program survived earlier errors."""
    for home in run.homes:
        nexts = run.spans[(run.spans["process"] == home) & (run.spans["code"] == ev.NEXT[0])]
        nexts = nexts[nexts["end"] >= 0]
        good = np.flatnonzero(nexts["ey"] == Outcome.DATA)
        failed = nexts[(good[-1] + 1 if len(good) else 0) :]
        failed = failed[failed["ey"] == Outcome.ERROR]
        if len(failed):
            return _failed(run, home, failed[0])
    return None


def _failed(run: RunContext, home: int, row: np.void) -> Finding:
    """The finding of a `next` that raised: a task's error, or an error from outside."""
    loader, inside = int(row["loader"]), run.within(row)
    errors = inside[(inside["code"] == ev.YIELD) & (inside["x"] == Outcome.ERROR)]
    of = f"rank {run.trace.processes[home].rank}: " if run.trace.processes[home].rank >= 0 else ""
    if not len(errors):
        return _failed_outside(run, home, row, of)
    task, worker = int(errors["task"][0]), int(errors["worker"][0])
    told = run.events[(run.events["loader"] == loader) & (run.events["code"] == ev.TASK_ERROR)]
    told = told[(told["task"] == task) & (told["time"] <= row["end"])]
    text = run.trace.text(told[-1]) if len(told) else ""
    steps = run.spans[(run.spans["loader"] == loader) & (run.spans["task"] == task)]
    steps = steps[np.isin(steps["code"], [ev.FETCH[0], ev.SAMPLE[0], ev.COLLATE[0]])]
    steps = steps[(steps["begin"] <= row["end"])]
    step = steps[-1] if len(steps) else row
    where = f" {doing(step)}" if len(steps) else f" of task {task}"
    unseen = len(told) > 0 and step["code"] == ev.FETCH[0]  # torch's loader shows no step for a sample
    asked = int(told["y"][-1]) if unseen else -1
    where = f" in sample {asked} (task {task})" if asked >= 0 else where
    who = f", worker {worker}" if worker >= 0 else ""
    when = f", at {run.at(int(told['time'][-1]))}" if len(told) else ""
    what = f"{of}{shortened(text) or 'an exception'}{where}{who}{when}"
    focus = run.focus(step, int(step["begin"]), int(row["end"]), worker)
    evidence = [f"next() raised it at {run.at(int(row['end']))}, when the batch was due"]
    sample = asked if asked >= 0 else run.sample(focus)
    helps = remedies.in_step(LoaderStep.SAMPLE, sample)
    return run.finding(RunOutcome.ERROR, what, evidence, helps, focus)


def _failed_outside(run: RunContext, home: int, row: np.void, of: str) -> Finding:
    """The finding of a `next` that failed without a task: an error of the sampler, or one from outside."""
    inside = run.within(row)
    before = inside[(inside["tid"] == row["tid"]) & (inside["code"] != ev.NEXT[1])][-1]
    took = run.unit.of(int(row["end"] - row["begin"]))
    if before["code"] == ev.SAMPLER_NEXT[1] and not before["x"]:
        what = f"{of}the sampler raised an exception when it drew the indices of task {before['task']}"
        focus = run.focus_of(row, int(row["end"]))
        return run.finding(
            RunOutcome.ERROR, what, (f"next() had lasted {took}",), remedies.in_step(LoaderStep.SAMPLER), focus
        )
    if line := _uncaught_line(run, [home]):
        raised, gave_up = _raised(run, line, row), _GAVE_UP in str(line.get("error"))
        return _timed_out(run, home, raised) if gave_up else raised
    wait = run.last_wait(home)
    assert wait is not None
    missing, step, focus = what_is_missing(run, wait, *state_in(run, wait))
    what = f"{of}interrupted (Ctrl-C?) after waiting {took}, since {run.at(wait.begin)}: {missing}"
    evidence = (f"too short for a hang: the longest wait before was {duration(wait.past)}",)
    return run.finding(RunOutcome.CUT, what, (*evidence, *run.steps_around(focus)), step, focus)


def _timed_out(run: RunContext, home: int, raised: Finding) -> Finding:
    """The finding of a loader's exception that ended a wait, with the step that the wait was for."""
    wait = run.last_wait(home)
    if wait is None or not wait.for_data:
        return raised
    _, step, focus = what_is_missing(run, wait, *state_in(run, wait))
    opened = run.steps_around(focus)
    what = raised.what + "".join(f"; {one}" for one in opened[:1])
    return run.finding(RunOutcome.ERROR, what, (fact.text for fact in raised.evidence), step, focus)


_GAVE_UP: Final = "timed out after"
"""Words in the error of both loaders after a timeout."""


def uncaught(run: RunContext) -> Finding | None:
    """The recorded exception that ended an iterating program."""
    line = _uncaught_line(run, run.homes)
    return _raised(run, line) if line else None


def _uncaught_line(run: RunContext, homes: list[int]) -> dict[str, Any]:
    """The trace's facts on the first exception that ended one of these processes; {} = none."""
    lines = (line for line in run.trace.described("uncaught") if line["process"] in homes)
    return next((line for line in lines if not str(line.get("error")).startswith(_NO_ERRORS)), {})


def _raised(run: RunContext, line: dict[str, Any], row: np.void | None = None) -> Finding:
    """The finding of an uncaught exception. row: the `next` that raised it, None = the program's own code."""
    process, error, at = int(line["process"]), str(line.get("error")), [str(one) for one in line.get("at", [])]
    where = " in next" if row is not None else " in the program's own code"
    what = f"{shortened(error)}{where}" + (f", at {PurePath(at[0]).name}" if at else "")
    last = run.events["time"][run.events["process"] == process].max(initial=0)
    moment = line.get("monotonic_ns", int(last))
    if row is not None:
        focus = run.focus_of(row, int(row["end"]))
    else:
        focus = Focus(0, moment, moment, process, run.trace.processes[process].pid, ev.CONSUMER[0], moment)
    evidence = (f"raised at {run.at(moment)}", *(f"called from {one}" for one in at[1:4]))
    return run.finding(RunOutcome.ERROR, what, evidence, remedies.after_error(error), focus)


def shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
