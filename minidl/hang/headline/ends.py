"""Headlines of runs that ended early: by the death of a process or thread, or by an exception."""

from __future__ import annotations

import dataclasses
import errno
import re
import signal
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np

from minidl.hang import remedies
from minidl.hang.finding import Finding, Focus, RunOutcome, from_trace
from minidl.hang.headline.hangs import hung, shown_to_hang
from minidl.hang.headline.held_up import held_up
from minidl.hang.headline.run_context import RunContext
from minidl.hang.limits import SUDDEN
from minidl.hang.places import LoaderStep, library
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import Actor, Outcome
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace
from minidl.tracefile.stack_samples import CodeLine
from minidl.tracefile.words import counted, doing, duration, how, listed, plain, size

_FETCHES: Final = (ev.FETCH[0], ev.SAMPLE[0], ev.COLLATE[0])


def _while_it_was(step: np.void | None) -> str:
    return f" while it was {doing(step)}" if step is not None else ""


def _exit(code: int) -> str:
    """The end of a process in words, by its exit code."""
    return f"{'ended' if code >= 0 else 'was killed'} {how(code)}"


# --- Workers and the pin thread ---------------------------------------------------------------------------------------
def found_dead(run: RunContext) -> Finding | None:
    """The death of a worker or of the pin thread, as the loader found it: the first one."""
    deaths = _deaths(run)
    if not len(deaths):
        return None
    row = deaths[0]
    if (found := _hung_before(run, row)) is not None:
        return found
    of_pin_thread = row["code"] == ev.FOUND_DEAD and row["x"] == Actor.PIN_THREAD
    return _pin_thread_died(run, row) if of_pin_thread else _worker_died(run, deaths)


def _deaths(run: RunContext) -> Rows:
    """The events by which workers or the pin thread were found dead, without the workers that the loader ended."""
    events = run.events
    found = events[(events["code"] == ev.FOUND_DEAD) & (events["x"] != Actor.LOADER)]
    gone = events[(events["code"] == ev.WORKER_GONE) & (events["y"] != 0)]
    ended = events[events["code"] == ev.TERMINATE]
    ours = set(zip(ended["loader"].tolist(), ended["worker"].tolist(), strict=True))
    named = [(int(row["loader"]), int(row["worker"])) in ours for row in gone]
    rows: Rows = np.concatenate([found, gone[~np.array(named, bool)]])
    return rows[np.argsort(rows["time"], kind="stable")]


def _hung_before(run: RunContext, death: np.void) -> Finding | None:
    """The hang of a run that was killed as a whole, so that the loader found a worker dead just before its own end.

    A person ends a hanging run with kill -9. A loader that survives a worker's death ends its `next` with an error; one
    that is killed after it may do so, too. Then the watchdog has seen that SIGKILL ended both, or that it was a hang.
    """
    home, (pid, code) = int(death["process"]), ev.death_of(death)
    together = run.until[home] - int(death["time"]) < SUDDEN * 1e9 and home not in run.over and not run.runs
    wait = run.last_wait(home) if code == -signal.SIGKILL and together and not run.out_of_memory else None
    if wait is None or not wait.begin < int(death["time"]) <= wait.until or not wait.for_data:
        return None
    seen = run.trace.watched.death_of(run.processes[home].pid)
    whole = seen is not None and seen.code == code and abs(seen.at - int(death["time"])) < SUDDEN * 1e9
    raised, wait = wait.ended, dataclasses.replace(wait, until=int(death["time"]) - 1, ended="")
    is_hang = shown_to_hang(run, wait) or ((whole or not raised) and wait.is_hang(goes_on=False))
    found = hung(run, wait, []) if is_hang else None
    if found is None or not (found.outcome is RunOutcome.HUNG or (whole and found.outcome is RunOutcome.MAYBE_HUNG)):
        return None
    at = run.at(int(death["time"]))
    both = f"SIGKILL ended the whole run at {at}: the loader found pid {pid} dead just before its own end"
    return dataclasses.replace(found, evidence=(*found.evidence, *from_trace(both)))


def _worker_died(run: RunContext, deaths: Rows) -> Finding:
    row, (pid, code) = deaths[0], ev.death_of(deaths[0])
    loader, worker, time = int(row["loader"]), int(row["worker"]), int(row["time"])
    process = run.process_of(loader, worker, pid)
    of = f"rank {run.processes[process].rank} " if run.processes[process].rank >= 0 else ""
    step = run.step_at(process, run.until[process])
    if step is not None and int(step["tid"]) != pid:  # the step is its feeder thread's, and its main thread is at work
        own = run.spans_of(_FETCHES, process=process, end=-1, tid=pid)
        step = own[-1] if len(own) else step
    last = min(run.until[process], time)  # a watchdog may notice the end later than the loader
    others = {(int(other["loader"]), int(other["worker"])) for other in deaths} - {(loader, worker)}
    also = f"; so did {counted(len(others), 'other worker')}" if others else ""
    who, new = f"{of}worker {worker} (pid {pid})", "" if run.processes[process].pid == pid else " while it started"
    told = _line_at_death(run, process, pid, step)
    what = f"{who}, last seen at {run.at(last)}, {_exit(code)}{new or _while_it_was(step)}{told.words}{also}"
    focus = run.focus(step, last if step is None else min(int(step["begin"]), last), time, worker, loader, process)
    evidence = [f"found dead {duration(time - last)} after its last sign of life", *run.steps_around(focus)]
    evidence += _shared_memory_at(run, time) if code == -signal.SIGBUS else []
    in_user_code = focus.code in (ev.SAMPLE[0], ev.FETCH[0])
    helps = remedies.after_signal(code, run.sample(focus), in_user_code, told.base)
    helps = remedies.START if new and code >= 0 else helps
    return _with_line(run.finding(RunOutcome.DIED, what, [*evidence, *told.facts], helps, focus), told)


class _Line(NamedTuple):
    """The line of the program that a process died in. at: None = unknown."""

    at: CodeLine | None = None
    facts: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        return "" if self.at is None else self.at.base

    @property
    def words(self) -> str:
        return f", at {self.base}" if self.at is not None else ""


def _line_at_death(run: RunContext, process: int, pid: int, step: np.void | None) -> _Line:
    """The line that a process died in: by the stack that it wrote at a fault, or else by its last stack sample.

    step: the step that it was in; a stack sample of before tells nothing.
    """
    death, looks = run.trace.watched.death_of(pid), run.trace.stack_samples
    stack, how = (death.stack if death is not None else ()), "its stack, which it wrote when the signal came"
    if not stack and step is not None:
        mine = np.flatnonzero((looks.process == process) & (looks.at >= step["begin"]) & (looks.tid == step["tid"]))
        stack = looks.stacks[int(looks.stack[mine[-1]])] if len(mine) else ()
        how = f"its last stack sample, at {run.at(int(looks.at[mine[-1]]))}" if len(mine) else ""
    own = [frame for frame in stack if not library(frame.file)]
    if not own:
        return _Line()
    at, inner = own[-1], stack[-1]
    facts = [f"{at.function}, {at.file}:{at.line}{f': {at.source}' if at.source else ''}: {how}"]
    facts += [f"innermost frame: {inner.function} ({inner.base})"] if inner is not at else []
    return _Line(at, tuple(facts))


def _with_line(found: Finding, line: _Line) -> Finding:
    """A finding with the line that its process died in."""
    if line.at is None:
        return found
    place = {"function": line.at.function, "file": line.at.file, "line": line.at.line}
    return dataclasses.replace(found, where=found.where | place)


def _shared_memory_at(run: RunContext, moment: int) -> list[str]:
    """The free space of /dev/shm before a moment, as the watchdog saw it."""
    seen = [one for one in run.trace.watched.samples if one.at <= moment and one.shm_size > 0]
    return [f"free in /dev/shm before it: {size(seen[-1].shm_free)} of {size(seen[-1].shm_size)}"] if seen else []


def _pin_thread_died(run: RunContext, row: np.void) -> Finding:
    loader, home, time = int(row["loader"]), int(row["process"]), int(row["time"])
    exits, pins = run.events_of(ev.PIN_EXIT, loader), run.spans_of(ev.PIN[:1], loader=loader)
    tid = int((exits[-1] if len(exits) else row)["tid"])
    task, code, begin = -1, 0, int((exits[-1] if len(exits) else row)["time"])
    if len(pins):
        task, code, begin = (int(pins[field][-1]) for field in ("task", "code", "begin"))
    focus = Focus(loader, begin, time, home, tid, code, begin, task, epoch=run.epoch(loader, begin))
    where = f", last seen with task {task}" if task >= 0 else ""
    what = f"the pin thread of {run.processes[home].name} ended with an error{where}"
    step = "read the program's error, which contains the pin thread's error; try pin_memory=False"
    return run.finding(RunOutcome.DIED, what, (f"found at {run.at(time)}",), step, focus)


# --- The loop's process -----------------------------------------------------------------------------------------------
def killed(run: RunContext) -> Finding | None:
    """The death of an iterating process by a signal, as the watchdog saw it.

    A person may end a run with kill -9 to examine it, so SIGKILL counts only if memory ran out.
    """
    starved, watched = run.out_of_memory, run.trace.watched
    by_request = (-signal.SIGINT,) if starved else (-signal.SIGINT, -signal.SIGKILL)
    for home in run.homes:
        seen = watched.death_of(run.processes[home].pid)
        code = 0 if seen is None or seen.code is None or home in run.over else seen.code
        if seen is None or code >= 0 or code in by_request:
            continue
        same = sum(one.code == code and one.pid != seen.pid for one in watched.ended)
        with_it = f" (with {counted(same, 'other process', 'other processes')})" if same else ""
        step = run.step_at(home, run.until[home])
        focus = run.focus(step, seen.at if step is None else min(int(step["begin"]), seen.at), seen.at, process=home)
        evidence = [f"the watchdog saw it end at {run.at(seen.at)}"]
        evidence += ["the out-of-memory killer has killed processes of its cgroup"] if starved else []
        told = _line_at_death(run, home, seen.pid, step)
        said = f"{run.processes[home].name} {_exit(code)}{with_it}{_while_it_was(step)}{told.words}"
        helps = remedies.after_signal(code, -1, line=told.base)
        return _with_line(run.finding(RunOutcome.DIED, said, [*evidence, *told.facts], helps, focus), told)
    return None


def loop_died(run: RunContext) -> Finding | None:
    """The end of an iterating process without a shutdown, as a worker noticed, or the reader of the trace."""
    rows = run.events[(run.events["code"] == ev.FOUND_DEAD) & (run.events["x"] == Actor.LOADER)]
    noticed = [home for home in run.homes if run.processes[home].pid in set(rows["y"].tolist())]
    waits = [wait.home for wait in run.waits if not wait.ended]
    homes = noticed or [home for home in waits if run.processes[home].life is ProcessLife.GONE]
    if not homes:
        return None
    home, last = homes[0], run.until[homes[0]]
    step = run.step_at(home, last)
    loader = int(rows["loader"][0]) if noticed else -1
    focus = None if step is None else run.focus(step, int(step["begin"]), last, loader=loader)
    later = (f"a worker noticed its end {duration(int(t) - last)} later, at its next check" for t in rows["time"])
    evidence = (next(later, "the process no longer exists"), "no wait was longer than the waits before")
    helps = "find the sender of the signal: see the scheduler's log, or dmesg for the kernel's out-of-memory killer"
    name = run.processes[home].name
    died = f"{name}, last seen at {run.at(last)}, ended without a shutdown{_while_it_was(step)}"
    return run.finding(RunOutcome.DIED, died, evidence, helps, focus)


# --- Exceptions -------------------------------------------------------------------------------------------------------
_BY_REQUEST: Final = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
"""Exceptions that end a program on request."""

_GAVE_UP: Final = "timed out after"
"""Words in the error of both loaders after a timeout."""


def failed_next(run: RunContext) -> Finding | None:
    """The first error after the last batch of a process: the program survived earlier errors."""
    for home in run.homes:
        nexts = run.spans_of(ev.NEXT[:1], process=home)
        nexts = nexts[nexts["end"] >= 0]
        good = np.flatnonzero(nexts["ey"] == Outcome.DATA)
        failed = nexts[(good[-1] + 1 if len(good) else 0) :]
        failed = failed[failed["ey"] == Outcome.ERROR]
        if len(failed):
            inside = run.within(failed[0])
            errors = inside[(inside["code"] == ev.YIELD) & (inside["x"] == Outcome.ERROR) & (inside["task"] >= 0)]
            alone = not len(run.events_of(ev.INDEX_PUT, int(failed[0]["loader"])))  # else it has only no more indices
            errors = errors[:0] if alone and _of_the_sampler(_before(run, failed[0])) else errors
            return _task_failed(run, failed[0], errors[0]) if len(errors) else _failed_outside(run, home, failed[0])
    return None


def _before(run: RunContext, row: np.void) -> np.void:
    """The last event of a `next`'s thread before it was known to fail."""
    inside = run.within(row)
    own: Rows = inside[(inside["tid"] == row["tid"]) & ~np.isin(inside["code"], [ev.NEXT[1], ev.YIELD])]
    last: np.void = own[-1]
    return last


def _of_the_sampler(before: np.void) -> bool:
    return bool(before["code"] == ev.SAMPLER_NEXT[1] and not before["x"])


def _task_failed(run: RunContext, row: np.void, error: np.void) -> Finding:
    """The finding of a `next` that raised a task's error. error: the event that handed it over."""
    loader, task, worker = (int(error[field]) for field in ("loader", "task", "worker"))
    every = run.events_of(ev.TASK_ERROR, loader)
    every = every[every["time"] <= row["end"]]
    told = every[every["task"] == task]
    steps = run.spans_of((*_FETCHES, ev.RESULT_PICKLE[0], ev.RESULT_REBUILD[0]), loader=loader, task=task)
    steps = steps[steps["begin"] <= (told[-1]["time"] if len(told) else row["end"])]
    step = steps[-1] if len(steps) else row
    focus = run.focus(step, int(step["begin"]), int(row["end"]), worker)
    asked = int(told[-1]["y"]) if len(told) and step["code"] == ev.FETCH[0] else run.sample(focus)
    where = f"in sample {asked} (task {task})" if asked >= 0 else doing(step) if len(steps) else f"of task {task}"
    by = " of" if step["code"] == ev.RESULT_REBUILD[0] else ","  # the loop rebuilds it
    when, who = "", f"{by} worker {worker}" * (worker >= 0)
    text, uncaught = run.trace.text(told[-1]) if len(told) else "", _uncaught_line(run, [int(row["process"])])
    if text:
        when = f", at {run.at(int(told['time'][-1]))}"
    elif uncaught:  # without workers, no event has the text
        text = _last_error(str(uncaught.get("error")))
    rank, place = run.rank(int(row["process"])), f" {where}{_users_line(uncaught, text)}{who}{when}"
    evidence = [f"next() raised it at {run.at(int(row['end']))}, when the batch was due", *_of_a_thread(run, row)]
    evidence += _earlier(run, every, task)
    evidence += _descriptors_at(run, int(row["end"])) if _NO_DESCRIPTOR.search(text) else []
    helps = remedies.after_error(text, remedies.in_step(LoaderStep.SAMPLE, asked))
    found = run.finding(RunOutcome.ERROR, f"{rank}{named(text) or 'an exception'}{place}", evidence, helps, focus)
    brief = f"{rank}{shortened(text) or 'an exception'}{place}"
    return dataclasses.replace(found, brief=brief, where={**found.where, "sample": asked})


_NO_DESCRIPTOR: Final = re.compile(r"Errno 24\b|Too many open files|ancdata")


def _descriptors_at(run: RunContext, moment: int) -> list[str]:
    """The processes with the most open descriptors before a moment, as the watchdog saw them."""
    seen = [one for one in run.trace.watched.samples if one.at <= moment]
    has = {process.name: seen[-1].processes[process.pid].fds for process in run.processes
           if seen and process.pid in seen[-1].processes}  # fmt: skip
    said = [f"{name} {has[name]}" for name in sorted(has, key=lambda name: -has[name])[:3]]
    return [f"open descriptors at {run.at(seen[-1].at)}: {listed(said)}"] if said else []


def _of_a_thread(run: RunContext, row: np.void) -> list[str]:
    """What is to be known of a `next` that was not called in the main thread."""
    own = (row["process"], row["tid"]) if row["tid"] != row["pid"] else None
    names = [line.get("name") for line in run.trace.described("thread") if (line["process"], line.get("tid")) == own]
    return [f"thread {name} called next(): what waits for it knows of the error only if it is told" for name in names]


def _earlier(run: RunContext, errors: Rows, task: int) -> list[str]:
    """The first error of a loader's workers, if another one was handed over. errors: of all tasks."""
    first = errors[np.argmin(errors["time"])] if len(errors) else None
    if first is None or first["task"] == task:
        return []
    sample = f" in sample {first['y']}" if first["y"] >= 0 else ""
    where = f"{sample} (task {first['task']}), worker {first['worker']}, at {run.at(int(first['time']))}"
    return [f"another error came first, and its batch was not due yet: {named(run.trace.text(first))}{where}"]


def _failed_outside(run: RunContext, home: int, row: np.void) -> Finding:
    """The finding of a `next` that failed without a task: an error of the sampler, or one from outside."""
    of, took = run.rank(home), run.unit.of(int(row["end"] - row["begin"]))
    before = _before(run, row)
    if _of_the_sampler(before):
        what = f"{of}the sampler raised an exception when it drew the indices of task {before['task']}"
        helps, focus = remedies.in_step(LoaderStep.SAMPLER), run.focus_of(row, int(row["end"]))
        return run.finding(RunOutcome.ERROR, what, (f"next() had lasted {took}",), helps, focus)
    if line := _uncaught_line(run, [home]):
        raised, gave_up = _raised(run, line, row), _GAVE_UP in str(line.get("error"))
        return _timed_out(run, home, raised) if gave_up else raised
    wait = run.last_wait(home)
    if wait is None:  # the program has gone on
        return run.finding(RunOutcome.ERROR, f"{of}next() raised an exception at {run.at(int(row['end']))}")
    held = held_up(run, wait)
    what = f"{of}interrupted (Ctrl-C?) after waiting {took}, since {run.at(wait.begin)}: {held.what}"
    evidence = (f"too short for a hang: the longest wait before was {duration(wait.past)}",)
    return run.finding(RunOutcome.CUT, what, (*evidence, *run.steps_around(held.focus)), held.step, held.focus)


def _timed_out(run: RunContext, home: int, raised: Finding) -> Finding:
    """The finding of a loader's exception that ended a wait, with the step that the wait was for."""
    wait = run.last_wait(home)
    if wait is None or not wait.for_data:
        return raised
    held = held_up(run, wait)
    what = raised.what + "".join(f"; {one}" for one in run.steps_around(held.focus)[:1])
    return run.finding(RunOutcome.ERROR, what, (fact.text for fact in raised.evidence), held.step, held.focus)


def uncaught(run: RunContext) -> Finding | None:
    """The recorded exception that ended an iterating program."""
    line = _uncaught_line(run, run.homes)
    return _raised(run, line) if line else None


def failed_before(trace: Trace) -> Finding | None:
    """The recorded exception that ended a program before it made an iterator."""
    errors = [str(line.get("error")) for line in trace.described("uncaught")]
    errors = [error for error in errors if not error.startswith(_BY_REQUEST)]
    if trace.events["loader"].any() or not errors:
        return None
    return Finding(RunOutcome.ERROR, plain(errors[-1]), next_step="read the program's traceback")


def _uncaught_line(run: RunContext, homes: list[int]) -> dict[str, Any]:
    """The trace's facts on the first exception that ended one of these processes; {} = none."""
    lines = (line for line in run.trace.described("uncaught") if line["process"] in homes)
    return next((line for line in lines if not str(line.get("error")).startswith(_BY_REQUEST)), {})


_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')


def _users_line(uncaught: dict[str, Any], text: str) -> str:
    """The line of the user's code that raised an error of this text, if that ended the program: " at data.py:24"."""
    error = str(uncaught.get("error"))
    frames = [match.groups() for match in _FRAME.finditer(error)][::-1]
    frames = frames or [str(one).rpartition(" ")[0].rpartition(":")[::2] for one in uncaught.get("at", [])]
    known = text and text in error
    return next((f" at {PurePath(file).name}:{line}" for file, line in frames if known and not library(file)), "")


def _raised(run: RunContext, line: dict[str, Any], row: np.void | None = None) -> Finding:
    """The finding of an uncaught exception. row: the `next` that raised it, None = the program's own code."""
    process, error, at = (
        int(line["process"]),
        _last_error(str(line.get("error"))),
        [str(one) for one in line.get("at", [])],
    )
    last = run.events["time"][run.events["process"] == process].max(initial=0)
    moment = line.get("monotonic_ns", int(last))
    where, focus = " in next", None if row is None else run.focus_of(row, int(row["end"]))
    if focus is None:
        where = " in the program's own code"
        focus = Focus(0, moment, moment, process, run.processes[process].pid, ev.CONSUMER[0], moment)
    place = where + (f", at {PurePath(at[0]).name}" if at else "")
    evidence = [f"raised at {run.at(moment)}", *(f"called from {one}" for one in at[1:4])]
    evidence += _descriptors_at(run, moment) if _NO_DESCRIPTOR.search(error) else []
    found = run.finding(RunOutcome.ERROR, named(error) + place, evidence, remedies.after_error(error), focus)
    return dataclasses.replace(found, brief=shortened(error) + place)


_FILE: Final = re.compile(r" for file </?[^>]*>| /\S*/(?=\S)")
"""What an error's text can lack: the name of a segment, and the folders of a path."""


_MEANS: Final = (("ancdata", "the limit of open files is reached"),)
"""Errors whose text does not say what happened."""

_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")


_ERROR: Final = re.compile(r"[A-Za-z_][\w.]*(: .*)?")


def _last_error(text: str) -> str:
    """The error of an exception's text: the last line, if it contains the traceback of a worker."""
    lines = text.strip().splitlines() or [""]
    return lines[-1] if "Traceback" in text and _ERROR.fullmatch(lines[-1]) else lines[0] if len(lines) > 1 else text


def named(text: str) -> str:
    """An error's text with the name of its errno, and what it means if it does not say so."""
    text = _ERRNO.sub(lambda found: f"[Errno {found[1]}, {errno.errorcode.get(int(found[1]), 'unknown')}]", text)
    return text + "".join(f" ({meaning})" for word, meaning in _MEANS if word in text)


def shortened(text: str, most: int = 90) -> str:
    """An error's text in at most so many characters. Its end says why: errno and its name come last."""
    text = named(text)
    if len(text) > most:
        text = _FILE.sub(lambda found: "" if "<" in found[0] else " .../", text)
    return text if len(text) <= most else f"{text[: most // 2 - 5]} ... {text[-(most // 2) :]}"
