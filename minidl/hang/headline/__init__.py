"""The headline of a trace: what held the loader up, in one sentence, with its evidence, its place and what to do next.

Interface: `headline(trace)` -> `Finding`. Every view shows its `title`, and begins at its `focus`. For a running job
(`Trace.seen`), the headline says what holds the loader up now.

Rules of use: the headline is the first of these that happened: a worker or the pin thread died; a wait did not end; the
loop's process died; an error was raised; a worker outlived its loader. If none of them happened, it says what bounds
the loader. A wait is a hang if it is long, and long compared with the run's earlier waits: a run that was killed while
it made progress has not hung. A duration ends with the last event of its process, or with the last sign of life of a
process that was found dead.
"""

from __future__ import annotations

import dataclasses
from typing import Final
from weakref import WeakKeyDictionary

from minidl.hang.finding import Finding, RunOutcome
from minidl.hang.headline import bounds, deaths, errors, goes_on, hangs
from minidl.hang.headline.run_context import RunContext
from minidl.hang.snapshot import Job
from minidl.tracefile.arrays import Rows
from minidl.tracefile.reader import Trace

_known: WeakKeyDictionary[Trace, tuple[Rows, Finding]] = WeakKeyDictionary()
"""Known headlines, each with the events that it was computed from."""


def headline(trace: Trace, spans: Rows | None = None, job: Job | None = None) -> Finding:
    """What held the loader up in `trace`. spans: `trace.spans()`, if the caller has them already.

    job: has followed the run up to this trace, if the trace has only the newest events.
    """
    events, found = _known.get(trace, (None, None))
    if found is None or events is not trace.events:
        found = _computed(trace, spans, job)
        _known[trace] = trace.events, found
    return found


def _computed(trace: Trace, spans: Rows | None, job: Job | None) -> Finding:
    if not len(trace):
        return Finding(*_NOTHING[trace.seen > 0])
    found = _first_cause(RunContext(trace, trace.spans() if spans is None else spans, job))
    explored = trace.manifest.get("explored")
    if found.outcome is RunOutcome.CUT and isinstance(explored, dict):  # the model's run ends there: no kill
        words = f"a run of minidl explore ends here: {explored.get('wrong')}"
        return dataclasses.replace(found, what=words, brief="", next_step="", fix="")
    return found


_NOTHING: Final = (
    (RunOutcome.CUT, "nothing was recorded"),
    (RunOutcome.RUNNING, "no iterator of a DataLoader has recorded anything yet"),
)
"""The headlines of a trace without events: of an ended run, and of a running one."""


def _first_cause(run: RunContext) -> Finding:
    """The first headline that applies, in the order of the rules of use."""
    dead = deaths.deaths_seen(run)
    if len(dead):
        return deaths.hung_before(run, dead[0]) or deaths.died(run, dead)
    waits = [wait for home in run.homes if (wait := run.last_wait(home)) is not None]
    still_runs = run.trace.seen > 0
    hung = [wait for wait in waits if wait.is_hang(still_runs)]
    hung.sort(key=lambda wait: (not wait.for_data, wait.begin))
    if hung and (hung[0].for_data or not still_runs):  # in a running job, the loop may do something else
        return hangs.hung(run, hung[0], hung[1:])
    if (seen := hangs.hang_with_evidence(run, waits)) is not None:
        return hangs.hung(run, seen, [])
    for look in (
        hangs.at_exit, deaths.killed, deaths.loop_died, errors.failed_next, errors.uncaught, hangs.outlived
    ):  # fmt: skip
        if (found := look(run)) is not None:
            return found
    ended = goes_on.running(run, waits) if still_runs else goes_on.cut(run, waits)
    return ended or bounds.what_bounds(run)
