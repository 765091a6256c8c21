"""The checker: compare a trace with the protocol, by the live loader's own decisions and lifecycles.

`check(trace)` gives the violations; `examine(trace)` a `Report`: the first impossible event with the state before it,
the rule it breaks and the shortest slice that shows it, all other violations, the spans open at the trace's end, and
the parts that could not be judged, with reasons. `RULES` names each rule and its demand. `run(trace)`: `minidl check`.

An incomplete trace is judged as far as possible: a rule that relies on missing events is judged only for tasks and
epochs after the last loss, and the report says so. If an exception interrupts next() and it is called again, its
repeated steps are judged once (`LoaderView`). Steps that a killed or running process has not done are `open`.
Rules: `recording`, `tasks` (their way), `dispatch` (decisions), `actors` (starts, deaths),
`joint` (what one may do depends on the others), `resumption` (a loader's state), `device`, `slabs`, `spans`,
`replayed`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl import terminal
from minidl.check import (
    actors,
    device,
    dispatch,
    joint,
    recording,
    replayed,
    resumption,
    slabs,
    slices,
    spans,
    tasks,
)
from minidl.check.report import Report, state_before
from minidl.check.view import TABLE, LoaderView, Violation
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Positions
from minidl.tracefile.open_spans import alive_at_end, open_spans
from minidl.tracefile.words import how

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

__all__ = ["MOST_LISTED", "RULES", "Report", "Violation", "check", "examine", "rules_text", "run"]

MOST_LISTED: Final = 20
"""The most violations of one rule and loader that are listed; the others are counted."""

_PARTS: Final = [
    part.__name__ for part in (recording, tasks, dispatch, resumption, actors, joint, device, slabs, spans, replayed)
]
"""If one event breaks two rules, the rule that comes first names the reason."""

TABLE = dict(sorted(TABLE.items(), key=lambda item: _PARTS.index(item[1].check.__module__)))
RULES: dict[str, str] = {name: rule.demand for name, rule in TABLE.items()}
_PLACE: Final = {name: place for place, name in enumerate(RULES)}


@np.errstate(over="ignore")  # a damaged event may hold any number: sums of such ones wrap, and break the rule
def check(trace: Trace) -> list[Violation]:
    """Return every breach of the protocol in `trace`: the first impossible event's first, then by time."""
    return _judge(trace).violations


@np.errstate(over="ignore")
def examine(trace: Trace) -> Report:
    """Judge every iterator in `trace`; near-linear in its events, at most 10 s for a million."""
    report = _judge(trace)
    report.open += open_spans(trace)
    report.alive += alive_at_end(trace)
    first = report.first
    if first is not None and first.at >= 0:
        loader = next((loader for loader in _loaders(trace) if loader.number == first.loader), None)
        report.slice = slices.Slice(tuple(sorted(first.rows)), True)
        if loader is not None:
            report.slice = slices.shortest(loader, first)
            report.state = state_before(trace, first.at)
    return report


def _judge(trace: Trace) -> Report:
    report = Report(trace, events=len(trace.events))
    found = list(_limited(recording.recording(trace), report.more))
    for loader in _loaders(trace):
        report.loaders += 1
        for rule in TABLE.values():
            if rule.needs != "all" or loader.complete:
                found += _limited(rule.check(loader), report.more)
        report.unjudged += _unjudged(loader)
        report.deaths += _deaths(loader)
    found.sort(key=lambda violation: (violation.at, _PLACE[violation.rule]))
    report.violations = found
    report.unjudged += trace.problems
    if trace.manifest.get("explored"):
        report.unjudged.append("times: a model made this run, so its times have no meaning")
    return report


def _loaders(trace: Trace) -> Iterator[LoaderView]:
    numbers = trace.events["loader"]
    order: Positions = np.argsort(numbers, kind="stable")
    known, starts = np.unique(numbers[order], return_index=True)
    for number, rows in zip(known.tolist(), np.split(order, starts[1:]), strict=bool(len(known))):
        if number:
            yield LoaderView(trace, number, rows)


def _limited(found: Iterator[Violation], more: Counter[str]) -> list[Violation]:
    """Keep the first violations, by time, and count the rest: one root cause may break a rule for every task."""
    everything = sorted(found, key=lambda violation: violation.at)
    if len(everything) > MOST_LISTED:
        more[everything[0].rule] += len(everything) - MOST_LISTED
    return everything[:MOST_LISTED]


# --- What was not judged ----------------------------------------------------------------------------------------------
def _unjudged(loader: LoaderView) -> Iterator[str]:
    """The rules that were not judged for this loader, the part concerned, and the reason."""
    name, lacks = f"iterator {loader.number}", loader.lacks
    if lacks.partial:
        lacking = ", ".join(loader.unseen) or "some kinds of events"
        yield f"{name}: the rules on {lacking}, which an observed loader does not show"
    if lacks.beyond:
        yield f"{name}: {lacks.beyond} events after {_second(loader, len(loader.time))}: {lacks.cut}"
    for worker in sorted(lacks.absent):
        yield f"{name}: the steps of worker {worker}: none is recorded, though its results arrived"
    if not loader.complete:
        who = ", ".join(f"{count} of {process}" for process, count in lacks.overwritten)
        since = _second(loader, lacks.since)
        yield f"{name}: the oldest events were overwritten ({who}); from {since} on the trace is complete"
        if lacks.start:
            yield f"{name}: {lacks.start} events of other processes before the loader's own oldest event"
        tasks_, epochs = loader.pick(ev.TASK_ASSIGNED), loader.begins
        behind = int(loader.whole_task(tasks_).sum()), int(loader.whole_epoch(epochs).sum())
        yield f"{name}: {_names('task')}: judged for the {behind[0]} tasks assigned since"
        yield f"{name}: {_names('epoch')}: judged for the {behind[1]} epochs begun since"
        yield f"{name}: {_names('all')}: not judged, they need an actor's events from its start"


def _names(needs: str) -> str:
    return ", ".join(rule.name for rule in TABLE.values() if rule.needs == needs)


def _second(loader: LoaderView, row: int) -> str:
    if not len(loader.time):
        return "+0 s"
    at = int(loader.time[min(row, len(loader.time) - 1)]) - loader.trace.start
    return f"+{at / 1e9:.3f} s"


def _deaths(loader: LoaderView) -> Iterator[str]:
    """Workers that were killed or left with their own exit code: no breach of the protocol, but worth a line."""
    sent = loader.pick(ev.TERMINATE)
    for row in loader.pick(ev.WORKER_GONE):
        worker, code = int(loader.worker[row]), int(loader.y[row])
        signals = loader.y[loader.of_worker(sent, worker)].tolist()
        sent_by = ", sent by the loader" if -code in signals else ", which the loader did not send"
        if code:
            yield f"iterator {loader.number}: worker {worker} {how(code)}{sent_by * (code < 0)}"


# --- The command ------------------------------------------------------------------------------------------------------
def run(trace: Trace, *, as_json: bool = False) -> int:
    """Print the report; 0 if the trace is accepted, 1 if it is not."""
    with terminal.busy("checking"):
        report = examine(trace)
    print(json.dumps(report.json(), indent=1) if as_json else report.text())
    return 1 if report.violations else 0


def rules_text() -> str:
    """Every rule with what it demands, a line each, for `minidl check --rules`."""
    return "\n".join(f"{name:<{max(map(len, RULES))}}  {demand}" for name, demand in RULES.items())
