"""The headline of a trace: what held the loader up, in one sentence, with its evidence, its place and what to do next.

Interface: `headline(trace)` -> `Finding`. Every view shows its `title`, and begins at its `focus`. For a running job
(`Trace.seen`), the headline says what holds the loader up now.

Rules of use: the headline is the first of `CAUSES` that happened; if none of them did, it says what bounds the loader.
A wait is a hang if it is long, and long compared with the run's earlier waits: a run that was killed while it made
progress has not hung. A duration ends with the last event of its process, or with the last sign of life of a process
that was found dead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, NamedTuple

from minidl.hang.finding import Finding, RunOutcome
from minidl.hang.headline import bounds, ends, hangs, uneven
from minidl.hang.headline.run_context import RunContext
from minidl.hang.snapshot import Job
from minidl.tracefile.arrays import Rows
from minidl.tracefile.reader import Trace


def headline(trace: Trace, spans: Rows | None = None, job: Job | None = None) -> Finding:
    """The cause that held the loader up in `trace`. spans: `trace.spans()`, if the caller has them already.

    job: has followed the run up to this trace, if the trace has only the newest events.
    """
    return trace.once("headline", lambda: _computed(trace, spans, job))


def _computed(trace: Trace, spans: Rows | None, job: Job | None) -> Finding:
    if (failed := ends.failed_before(trace)) is not None:
        return failed
    if not len(trace):
        return hangs.before_any_loader(trace) or Finding(*_NOTHING[trace.seen > 0])
    run = RunContext(trace, trace.spans() if spans is None else spans, job)
    found = next(finding for cause in CAUSES if (finding := cause.test(run)) is not None)
    explored = trace.manifest.get("explored")
    if found.outcome is RunOutcome.CUT and isinstance(explored, dict):  # the model's run ends there: no kill
        words = f"a run of minidl explore ends here: {explored.get('wrong')}"
        return dataclasses.replace(found, what=words, brief="", next_step="", fix="")
    simulated = trace.manifest.get("planned")
    if isinstance(simulated, dict):
        return dataclasses.replace(found, what=f"simulated by minidl plan, {simulated.get('setting')}: {found.what}")
    return found


_NOTHING: Final = (
    (RunOutcome.CUT, "the recording ends before the program iterated over a DataLoader"),
    (RunOutcome.RUNNING, "no iterator of a DataLoader has recorded anything yet"),
)
"""The headlines of a trace without events: of an ended run, and of a running one."""


class RunCause(NamedTuple):
    """One cause. test: the finding, None if this did not happen."""

    about: str
    test: Callable[[RunContext], Finding | None]


CAUSES: Final = (
    RunCause("a worker or the pin thread died", ends.found_dead),
    RunCause("a wait was long for this run", hangs.long_wait),
    RunCause("evidence shows that a wait does not end", hangs.wait_with_evidence),
    RunCause("a rank waits for one that has no more batches", uneven.uneven_ranks),
    RunCause("the program ended, and its process did not", hangs.at_exit),
    RunCause("a signal ended the loop's process", ends.killed),
    RunCause("the loop's process is gone", ends.loop_died),
    RunCause("next raised an error", ends.failed_next),
    RunCause("the program raised an error", ends.uncaught),
    RunCause("a worker outlived its loader", hangs.outlived),
    RunCause("the run goes on", hangs.running),
    RunCause("a signal ended a process that waited after its program", lambda run: hangs.at_exit(run, killed=True)),
    RunCause("the recording ends before the run", hangs.cut),
    RunCause("the loader was slow, or fast enough", bounds.what_bounds),
)
"""The first cause that happened is the headline."""
