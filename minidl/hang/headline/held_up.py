"""The reason of a wait of the loader, or of the program's own code.

Interface: `held_up(run, wait)` -> `HeldUp`: in words, with the remedy, the focus and the state of the loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from minidl.hang import remedies
from minidl.hang.consult import diagnose_recorded
from minidl.hang.finding import Finding, Focus, FocusScope, RecordedWait, from_trace
from minidl.hang.headline.run_context import STEPS, LastWait, RunContext
from minidl.hang.limits import STILL
from minidl.hang.places import LoaderStep
from minidl.hang.snapshot import IteratorSnapshot, Job
from minidl.playback.missing import BatchPlace, MissingBatch, missing_batch
from minidl.playback.state import MessageStage, ProtocolState
from minidl.speed.hot_spots import spot_of
from minidl.tracefile import events as ev
from minidl.tracefile.loaders import first_epochs
from minidl.tracefile.open_spans import since
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import counted, doing, listed

STAYS = 0.9
"""The part of the looks at a process in a wait from which it stayed at one line."""


@dataclass(frozen=True)
class HeldUp:
    """The reason of a wait. what: in words; step: the remedy; state: of the loader in the wait; missing: its batch."""

    run: RunContext
    wait: LastWait
    what: str
    step: str
    focus: Focus
    state: ProtocolState
    missing: MissingBatch

    @property
    def finished_behind(self) -> list[str]:
        """The finished batches that wait behind the missing one, as evidence."""
        tasks = self.missing.finished
        return [f"finished behind it: {counted(len(tasks), 'task')} ({listed(tasks)})"] if tasks else []

    def told(self, evidence: Iterable[str] = ()) -> RecordedWait:
        """The wait in the form that the doctor takes."""
        run, wait, state, number = self.run, self.wait, self.state, self.focus.worker
        home, made_by = run.processes[wait.home], run.process_of(self.focus.loader, number)
        workers = [p for p in run.processes if p.role == "worker"]
        mine = [p for p in workers if (p.loader, p.ppid) == (self.focus.loader, home.pid)]
        step, step_since = self._workers_step()
        of_worker = number >= 0 and wait.for_data
        return RecordedWait(
            hung=wait.is_hang(run.runs),
            since=wait.begin,
            seconds=wait.took / 1e9,
            past=wait.past / 1e9,
            pid=home.pid,
            tid=int(wait.row["tid"]),
            task=self.missing.task,
            epoch=self._epoch(),
            worker=number if of_worker else -1,
            worker_pid=run.processes[made_by].pid if of_worker else 0,
            sample=run.sample(self.focus),
            step=step,
            step_since=step_since,
            own_code=not wait.for_data,
            numbers={process.pid: process.worker for process in mine},
            workers=0 if state.alone else len(state.workers),
            others=frozenset(process.pid for process in workers if process.loader != self.focus.loader),
            ranks={one.pid: one.rank for one in run.processes if one.rank >= 0 and one.worker < 0},
            facts=from_trace(*evidence),
        )

    def _epoch(self) -> int:
        """The loader's epoch in the wait, from 0 among all of its DataLoader's; -1 = unknown."""
        if self.state.epoch is not None:
            return self.state.epoch
        begun = self.run.epoch(self.wait.loader, self.wait.begin)
        return -1 if begun < 0 else begun + first_epochs(self.run.trace).get(self.wait.loader, 0)

    def _workers_step(self) -> tuple[str, int]:
        """The step in focus, if it is not the loop's own, in words, and since when."""
        run, focus = self.run, self.focus
        step = run.step_at(focus.process, self.wait.until) if focus.process != self.wait.home else None
        return ("", 0) if step is None else (doing(step), since(run.trace, step))

    @property
    def in_a_step(self) -> bool:
        """Whether a worker is in a sample or a collation, or fetches."""
        return self.wait.for_data and self.focus.code in (ev.FETCH[0], ev.SAMPLE[0], ev.COLLATE[0])

    @property
    def goes_on(self) -> bool:
        """Whether the worker has begun its step in the wait, and is not in it for longer than in others before."""
        past = self.run.spans_of([self.focus.code], loader=self.focus.loader)
        longest = int((past["end"] - past["begin"])[past["end"] >= 0].max(initial=0))
        young = self.wait.until - self.focus.span < max(STILL * 1e9, 2 * longest)
        return self.in_a_step and self.focus.span > self.wait.begin and young

    def opinion(self, evidence: Iterable[str] = ()) -> Finding | None:
        """The doctor's finding, if a watchdog took evidence in the wait."""
        told, begun = self.told(evidence), self.focus.span
        seen = [one.at for one in self.run.trace.watched.looks if one.stall.pid == told.pid]
        if self.in_a_step and max(seen, default=begun) < begun:  # the last look saw the worker in an earlier step
            return None
        found = diagnose_recorded(self.run.trace, told)
        return None if found is None else dataclasses.replace(found, wait=told)


def held_up(run: RunContext, wait: LastWait, how_long: str = "") -> HeldUp:
    """The reason of a wait. how_long: words for a wait in the program's own code."""
    shot, state = _state_in(run, wait)
    missing = missing_batch(state)
    found = _no_batch(run, wait, shot, missing) if wait.for_data else _own_code(run, wait, state, how_long)
    return HeldUp(run, wait, *found, state, missing)


def _state_in(run: RunContext, wait: LastWait) -> tuple[IteratorSnapshot, ProtocolState]:
    """The loader's state in the wait; for a wait that was ended, before its end."""
    if run.job is not None and not wait.ended:
        return _followed(run, run.job, run.trace, wait)
    cut = run.trace.cut((run.events["time"] <= wait.at_its_end) & (run.events["loader"] == wait.loader))
    job = Job()
    job.take(cut)
    return _followed(run, job, cut, wait)


def _followed(run: RunContext, job: Job, trace: Trace, wait: LastWait) -> tuple[IteratorSnapshot, ProtocolState]:
    """The wait's loader, by a job that has followed `trace`."""
    lives = {process.pid: process.life for process in trace.processes} if run.runs else {}
    (shot,) = (one for one in job.snapshot(trace, wait.until, lives).loaders if one.number == wait.loader)
    return shot, job.iterators[wait.loader].state


def _no_batch(run: RunContext, wait: LastWait, shot: IteratorSnapshot, missing: MissingBatch) -> tuple[str, str, Focus]:
    """The missing batch in words, the remedy, and the focus."""
    what, task, number = shot.waits or shot.doing.words, missing.task, missing.maker
    if missing.place is BatchPlace.PIN_THREAD:
        step = remedies.in_step(LoaderStep.PIN)
        dump = remedies.print_stack(run.processes[wait.home].pid)
        return what, f"{step}; while it hangs, {dump}", run.focus_in(wait, wait.home, task, number)
    process = run.process_of(wait.loader, number) if number >= 0 else wait.home
    who, focus = run.processes[process], run.focus_in(wait, process, task, number)
    rebuilt = missing.stage is MessageStage.REBUILDING
    asked = number >= 0 and (rebuilt or focus.code == ev.INDEX_GET[0])
    silent = asked and run.quiet(wait, process) > wait.took // 2
    if silent and rebuilt:
        what = f"{who.name} does not react (stopped?); it has to hand over the memory of task {task}"
        step = remedies.check_stopped(who.pid, "keeps the GIL")
        return what, step, still(run, wait, focus, "stopped?", task)
    step = _remedy(run, focus, missing, silent)
    if who.life is ProcessLife.STOPPED:
        focus = still(run, wait, focus, "stopped by a signal:", task)
    elif silent:
        what, focus = f"{who.name} has not taken task {task} (stopped?)", still(run, wait, focus, "stopped?", task)
    else:
        what += _seen_at(run, focus.process, wait)
    return what, step, focus


def _seen_at(run: RunContext, process: int, wait: LastWait) -> str:
    """The line of the program that a process did not leave in the wait, by stack samples; "" = unknown."""
    looks = run.trace.stack_samples
    spot = spot_of(looks, (looks.process == process) & (looks.at >= wait.begin) & (looks.at <= wait.until))
    return f", at {spot.place()}" if spot is not None and spot.line and spot.share >= STAYS else ""


def _remedy(run: RunContext, focus: Focus, missing: MissingBatch, silent: bool) -> str:
    """The remedy for a wait. silent: the process has recorded nothing for most of the wait."""
    pid = run.processes[focus.process].pid
    look = remedies.print_stack(pid)
    if silent:
        return remedies.check_stopped(pid, "swapped out")
    if missing.unstarted:
        return f"check the start of the worker's process: its imports, the unpickling of the dataset; {look}"
    step = STEPS.get(focus.code)
    known = remedies.SHARED_MEMORY if focus.code == ev.SHM_COPY[0] else remedies.in_step(step, run.sample(focus))
    forked = remedies.HELD_AT_FORK if step in (LoaderStep.INIT, LoaderStep.OPEN) else ""
    return "; ".join(filter(None, (known, forked, f"while it hangs, {look}")))


def still(run: RunContext, wait: LastWait, focus: Focus, words: str, task: int) -> Focus:
    """The focus on a process that stands still. task: the one that the loader waits for, -1 = unknown."""
    since = wait.until - run.quiet(wait, focus.process)
    needed = f"; the loader waits for its task {task}" if task >= 0 else ""
    words = f"{words} no sign of life since {run.at(since)}{needed}"
    return dataclasses.replace(focus, frame=FocusScope.PROCESS, since=since, words=words)


def _own_code(run: RunContext, wait: LastWait, state: ProtocolState, how_long: str) -> tuple[str, str, Focus]:
    """A wait in the program's own code in words, the remedy, and the focus."""
    after = f" after task {int(wait.row['task'])}" if wait.row["task"] >= 0 else ""
    ready = len(state.reorder_buffer) + len(state.ready_queue) + len(state.result_queue)
    stock = f"{counted(ready, 'batch is', 'batches are')} ready"
    what = f"the training loop's own code{after} has not called next(){how_long}; {stock}"
    look = remedies.print_stack(run.processes[wait.home].pid)
    step = f"{look}; with several ranks it may wait for another rank: see that rank's trace"
    return what, step, run.focus(wait.row, wait.begin, wait.until)
