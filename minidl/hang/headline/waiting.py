"""What a wait of the loader, or of the program's own code, is for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

from minidl.hang import remedies
from minidl.hang.finding import Focus, FocusScope, RecordedWait, from_trace
from minidl.hang.headline.run_context import STEPS, LastWait, RunContext
from minidl.hang.places import LoaderStep
from minidl.hang.snapshot import IteratorSnapshot, Job
from minidl.playback.state import STARTING, MessageStage, ProtocolState
from minidl.tracefile import events as ev
from minidl.tracefile.events import Message
from minidl.tracefile.open_spans import since
from minidl.tracefile.process import Process, ProcessLife
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import counted, doing, listed


def _what_helps(focus: Focus, state: ProtocolState, process: Process, sample: int, silent: bool) -> str:
    """The remedy for a wait. silent: the process has recorded nothing for most of the wait."""
    look = f"print its stack: py-spy dump --pid {process.pid}"
    if silent:
        return f"check whether it is stopped (T) or swapped out: ps -o stat,wchan -p {process.pid}"
    if any(one.activity == STARTING and one.worker == focus.worker for one in state.workers):
        return f"check the start of the worker's process: its imports, the unpickling of the dataset; {look}"
    step = STEPS.get(focus.code)
    known = remedies.SHARED_MEMORY if focus.code == ev.SHM_COPY[0] else remedies.in_step(step, sample)
    forked = remedies.HELD_AT_FORK if step in (LoaderStep.INIT, LoaderStep.OPEN) else ""
    return "; ".join(filter(None, (known, forked, f"while it hangs, {look}")))


def finished_behind(state: ProtocolState) -> str:
    """The finished batches that wait behind the missing one, in words."""
    there = (MessageStage.WRITTEN, MessageStage.READ, MessageStage.REBUILDING, MessageStage.REBUILT)
    piped: Iterable[int] = (m.task for m in state.result_queue if m.kind is Message.RESULT and m.stage in there)
    ready: Iterable[int] = (m.task for m in state.ready_queue if m.kind is Message.RESULT)
    tasks = sorted({*state.reorder_buffer, *piped, *ready} - {state.waiting_for})
    return f"{counted(len(tasks), 'task')} ({listed(tasks)})" if tasks else ""


def held_up(run: RunContext, wait: LastWait, how_long: str = "") -> tuple[str, str, Focus, ProtocolState]:
    """The reason of a wait, the remedy, the focus and the loader's state. how_long: words for a wait in own code."""
    shot, state = state_in(run, wait)
    found = what_is_missing(run, wait, shot, state) if wait.for_data else _own_code(run, wait, state, how_long)
    return *found, state


def state_in(run: RunContext, wait: LastWait) -> tuple[IteratorSnapshot, ProtocolState]:
    """The loader's state in the wait; for a wait that was ended, before its end."""
    if run.job is not None and not wait.ended:
        return _followed(run, run.job, run.trace, wait)
    moment = wait.until - (wait.took // 10 if wait.ended else 0)
    cut = copy.copy(run.trace)
    cut.__dict__.pop("order", None)
    number = int(wait.row["loader"])
    until = (run.events["time"] <= moment) & (run.events["loader"] == number)
    cut.events = run.events[until]
    job = Job()
    job.take(cut)
    return _followed(run, job, cut, wait)


def _followed(run: RunContext, job: Job, trace: Trace, wait: LastWait) -> tuple[IteratorSnapshot, ProtocolState]:
    """The wait's loader, by a job that has followed `trace`."""
    number = int(wait.row["loader"])
    lives = {process.pid: process.life for process in trace.processes} if run.trace.seen else {}
    (shot,) = (one for one in job.snapshot(trace, wait.until, lives).loaders if one.number == number)
    return shot, job.iterators[number].state


def what_is_missing(
    run: RunContext, wait: LastWait, shot: IteratorSnapshot, state: ProtocolState
) -> tuple[str, str, Focus]:
    """The missing batch in words, the remedy, and the focus."""
    task, number = state.waiting_for, state.waiting_worker
    task = -1 if task is None else task
    what = shot.waits or shot.doing.words
    if number < 0:  # out of order, or no workers: the first busy one
        busy = [w.worker for w in state.workers if not w.idle]
        number = busy[0] if busy and not state.alone else -1
    home = int(wait.row["process"])
    pinned = state.pin is not None and state.pin.task == task >= 0
    process = run.process_of(int(wait.row["loader"]), number) if number >= 0 and not pinned else home
    focus = run.focus_in(wait, process, task, number)
    if pinned:
        step = f"{remedies.in_step(LoaderStep.PIN)}; while it hangs, py-spy dump --pid {run.trace.processes[home].pid}"
        return what, step, focus
    rebuilt = any(m.task == task and m.stage is MessageStage.REBUILDING for m in state.result_queue)
    quiet = run.quiet(wait, process) if number >= 0 and (rebuilt or focus.code == ev.INDEX_GET[0]) else 0
    if rebuilt and quiet > wait.took // 2:
        who = run.trace.processes[process]
        what = f"{who.name} does not react (stopped?); it has to hand over the memory of task {task}"
        step = f"check whether it is stopped (T), or keeps the GIL: ps -o stat,wchan -p {who.pid}"
        return what, step, still(run, wait, focus, "stopped?", task)
    if run.trace.processes[process].life is ProcessLife.STOPPED:
        focus = still(run, wait, focus, "stopped by a signal:", task)
    elif quiet > wait.took // 2:
        what = f"{run.trace.processes[process].name} has not taken task {task} (stopped?)"
        focus = still(run, wait, focus, "stopped?", task)
    step = _what_helps(focus, state, run.trace.processes[process], run.sample(focus), quiet > wait.took // 2)
    return what, step, focus


def still(run: RunContext, wait: LastWait, focus: Focus, words: str, task: int) -> Focus:
    """The focus on a process that stands still. task: the one that the loader waits for, -1 = unknown."""
    since = wait.until - run.quiet(wait, focus.process)
    needed = f"; the loader waits for its task {task}" if task >= 0 else ""
    words = f"{words} no sign of life since {run.at(since)}{needed}"
    return dataclasses.replace(focus, frame=FocusScope.PROCESS, since=since, words=words)


def _own_code(run: RunContext, wait: LastWait, state: ProtocolState, how_long: str = "") -> tuple[str, str, Focus]:
    """A wait in the program's own code in words, the remedy, and the focus."""
    row, home = wait.row, int(wait.row["process"])
    after = f" after task {int(row['task'])}" if row["task"] >= 0 else ""
    ready = len(state.reorder_buffer) + len(state.ready_queue) + len(state.result_queue)
    stock = f"{counted(ready, 'batch is', 'batches are')} ready"
    what = f"the training loop's own code{after} has not called next(){how_long}; {stock}"
    step = (
        f"print the loop's stack: py-spy dump --pid {run.trace.processes[home].pid}; with several ranks it may "
        "wait for another rank: see that rank's trace"
    )
    return what, step, run.focus(row, wait.begin, wait.until)


def told_of(
    run: RunContext, wait: LastWait, state: ProtocolState, focus: Focus, evidence: tuple[str, ...]
) -> RecordedWait:
    """The wait in the form that the doctor takes."""
    processes, number = run.trace.processes, focus.worker
    home, made_by = processes[int(wait.row["process"])], run.process_of(focus.loader, number)
    mine = [p for p in processes if p.role == "worker" and (p.loader, p.ppid) == (focus.loader, home.pid)]
    step = run.step_at(focus.process, wait.until) if focus.process != int(wait.row["process"]) else None
    return RecordedWait(
        hung=wait.is_hang(run.trace.seen > 0),
        since=wait.begin,
        seconds=wait.took / 1e9,
        past=wait.past / 1e9,
        pid=home.pid,
        tid=int(wait.row["tid"]),
        task=-1 if state.waiting_for is None else state.waiting_for,
        worker=number if wait.for_data else -1,
        worker_pid=processes[made_by].pid if number >= 0 and wait.for_data else 0,
        sample=run.sample(focus),
        step=doing(step) if step is not None else "",
        step_since=since(run.trace, step) if step is not None else 0,
        own_code=not wait.for_data,
        numbers={process.pid: process.worker for process in mine},
        workers=0 if state.alone else len(state.workers),
        others=frozenset(p.pid for p in processes if p.role == "worker" and p.loader != focus.loader),
        ranks={process.pid: process.rank for process in processes if process.rank >= 0 and process.worker < 0},
        facts=from_trace(*evidence),
    )
