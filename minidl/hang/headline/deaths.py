"""Headlines of processes that a signal or an exit ended: workers, the pin thread, the loop's process."""

from __future__ import annotations

import dataclasses
import signal

import numpy as np

from minidl.hang import remedies
from minidl.hang.finding import Finding, Focus, RunOutcome, from_trace
from minidl.hang.headline.hangs import hang_with_evidence, hung
from minidl.hang.headline.run_context import RunContext
from minidl.hang.limits import SUDDEN
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.events import Actor
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.words import counted, doing, duration, ending


def _dead(row: np.void) -> tuple[int, int]:
    """The pid and exit code of a death: the two events that report one have them in different fields."""
    pid, code = ("y", "z") if row["code"] == ev.FOUND_DEAD else ("x", "y")
    return int(row[pid]), int(row[code])


def _exit(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"{'ended with' if code >= 0 else 'was killed by'} {ending(code)}"


def deaths_seen(run: RunContext) -> Rows:
    """The events by which workers or the pin thread were found dead, without the workers that the loader ended."""
    events = run.events
    found = events[(events["code"] == ev.FOUND_DEAD) & (events["x"] != Actor.LOADER)]
    gone = events[(events["code"] == ev.WORKER_GONE) & (events["y"] != 0)]
    ended = events[events["code"] == ev.TERMINATE]
    ours = set(zip(ended["loader"].tolist(), ended["worker"].tolist(), strict=True))
    named = [(int(row["loader"]), int(row["worker"])) in ours for row in gone]
    rows: Rows = np.concatenate([found, gone[~np.array(named, bool)]])
    return rows[np.argsort(rows["time"], kind="stable")]


def hung_before(run: RunContext, death: np.void) -> Finding | None:
    """The hang of a run that was killed as a whole, so that the loader found a worker dead just before its own end.

    A person ends a hanging run with kill -9. A loader that survives a worker's death ends its `next` with an error.
    """
    home, (pid, code) = int(death["process"]), _dead(death)
    together = run.until[home] - int(death["time"]) < SUDDEN * 1e9 and home not in run.over and not run.trace.seen
    wait = run.last_wait(home)
    if code != -signal.SIGKILL or not together or run.out_of_memory or wait is None or wait.ended or not wait.for_data:
        return None
    wait = dataclasses.replace(wait, until=int(death["time"]) - 1)
    if not wait.is_hang(goes_on=False) and hang_with_evidence(run, [wait]) is None:
        return None
    found = hung(run, wait, [])
    if found.outcome is not RunOutcome.HUNG:
        return None
    at = run.at(int(death["time"]))
    both = f"SIGKILL ended the whole run at {at}: the loader found pid {pid} dead just before its own end"
    return dataclasses.replace(found, evidence=(*found.evidence, *from_trace(both)))


def died(run: RunContext, deaths: Rows) -> Finding:
    """The death of a worker or of the pin thread: the first one."""
    row = deaths[0]
    if row["code"] == ev.FOUND_DEAD and row["x"] == Actor.PIN_THREAD:
        return _pin_thread_died(run, row)
    pid, code = _dead(row)
    loader, worker = int(row["loader"]), int(row["worker"])
    process = run.process_of(loader, worker, pid)
    of = f"rank {run.trace.processes[process].rank} " if run.trace.processes[process].rank >= 0 else ""
    step = run.step_at(process, run.until[process])
    if step is not None and int(step["tid"]) != pid:  # the step is its feeder thread's, and its main thread is at work
        spans = run.spans
        own = spans[(spans["process"] == process) & (spans["end"] < 0) & (spans["tid"] == pid)]
        own = own[np.isin(own["code"], [ev.SAMPLE[0], ev.FETCH[0], ev.COLLATE[0]])]
        step = own[-1] if len(own) else step
    last = min(run.until[process], int(row["time"]))  # a watchdog may notice the end later than the loader
    what = f"{of}worker {worker} (pid {pid}), last seen at {run.at(last)}, {_exit(code)}"
    what += f" while it was {doing(step)}" if step is not None else ""
    others = {(int(other["loader"]), int(other["worker"])) for other in deaths} - {(loader, worker)}
    also = f"; so did {counted(len(others), 'other worker')}" if others else ""
    begin = last if step is None else min(int(step["begin"]), last)
    focus = run.focus(step, begin, int(row["time"]), worker, loader, process)
    noticed = duration(int(row["time"]) - last)
    evidence = [f"found dead {noticed} after its last sign of life"]
    evidence += run.steps_around(focus)
    return run.finding(RunOutcome.DIED, what + also, evidence, remedies.after_signal(code, run.sample(focus)), focus)


def _pin_thread_died(run: RunContext, row: np.void) -> Finding:
    loader, home = int(row["loader"]), int(row["process"])
    exits = run.events[(run.events["code"] == ev.PIN_EXIT) & (run.events["loader"] == loader)]
    place = exits[-1] if len(exits) else row
    pins = run.spans[(run.spans["code"] == ev.PIN[0]) & (run.spans["loader"] == loader)]
    task = int(pins["task"][-1]) if len(pins) else -1
    where = f", last seen with task {task}" if task >= 0 else ""
    code = int(pins["code"][-1]) if len(pins) else 0
    begin = int(pins["begin"][-1]) if len(pins) else int(place["time"])
    focus = Focus(
        loader, begin, int(row["time"]), home, int(place["tid"]), code, begin, task,
        epoch=run.epoch(loader, begin),
    )  # fmt: skip
    what = f"the pin thread of {run.trace.processes[home].name} ended with an error{where}"
    step = "read the program's error, which contains the pin thread's error; try pin_memory=False"
    return run.finding(RunOutcome.DIED, what, (f"found at {run.at(int(row['time']))}",), step, focus)


def killed(run: RunContext) -> Finding | None:
    """The death of an iterating process by a signal, as the watchdog saw it.

    A person may end a run with kill -9 to examine it, so SIGKILL counts only if memory ran out.
    """
    starved = run.out_of_memory
    for home in run.homes:
        process = run.trace.processes[home]
        seen = run.trace.watched.death_of(process.pid)
        if seen is None or seen.code is None or home in run.over:
            continue
        code = seen.code
        if code >= 0 or code == -signal.SIGINT or (code == -signal.SIGKILL and not starved):
            continue
        same = [one for one in run.trace.watched.ended if one.code == code and one.pid != process.pid]
        with_it = f" (with {counted(len(same), 'other process', 'other processes')})" if same else ""
        step = run.step_at(home, run.until[home])
        what = f" while it was {doing(step)}" if step is not None else ""
        begin = seen.at if step is None else min(int(step["begin"]), seen.at)
        focus = run.focus(step, begin, seen.at, process=home)
        evidence = [f"the watchdog saw it end at {run.at(seen.at)}"]
        evidence += ["the out-of-memory killer has killed processes of its cgroup"] if starved else []
        said = f"{process.name} {_exit(code)}{with_it}{what}"
        return run.finding(RunOutcome.DIED, said, evidence, remedies.after_signal(code, -1), focus)
    return None


def loop_died(run: RunContext) -> Finding | None:
    """The end of an iterating process without a shutdown, as a worker noticed, or the reader of the trace."""
    rows = run.events[(run.events["code"] == ev.FOUND_DEAD) & (run.events["x"] == Actor.LOADER)]
    found = {home: run.trace.processes[home] for home in run.homes}
    homes = [home for home, process in found.items() if process.pid in set(rows["y"].tolist())]
    gone = [home for home, process in found.items() if process.life is ProcessLife.GONE]
    gone = [home for home in gone if (wait := run.last_wait(home)) is not None and not wait.ended]
    if not homes and not gone:
        return None
    home = (homes or gone)[0]
    last, process = run.until[home], run.trace.processes[home]
    step = run.step_at(home, last)
    what = f" while it was {doing(step)}" if step is not None else ""
    loader = int(rows["loader"][0]) if homes else -1
    focus = None if step is None else run.focus(step, int(step["begin"]), last, loader=loader)
    later = (f"a worker noticed its end {duration(int(t) - last)} later, at its next check" for t in rows["time"])
    evidence = (next(later, "the process no longer exists"), "no wait was longer than the waits before")
    helps = "find the sender of the signal: see the scheduler's log, or dmesg for the kernel's out-of-memory killer"
    died = f"{process.name}, last seen at {run.at(last)}, ended without a shutdown{what}"
    return run.finding(RunOutcome.DIED, died, evidence, helps, focus)
