"""What `minidl check` says: the verdict, the first impossible event, the state before it, the slice, what is open.

`Report.text()` is for people, `Report.json()` for machines. What a trace holds is data: it is shown escaped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from minidl.tracing.attachments import plain
from minidl.tracing.check.slices import Slice
from minidl.tracing.check.view import TABLE, Violation, name_of
from minidl.tracing.events import EVENTS
from minidl.tracing.state import ProtocolState, Queued
from minidl.tracing.stepper import replay

if TYPE_CHECKING:
    from minidl.tracing.reader import Trace

MOST_SLICE: Final = 40
"""Lines of a slice that are shown; the JSON has all."""


@dataclass(slots=True)
class Report:
    """What `examine` found.

    violations: the first impossible event's first, then by time. state: the protocol's state before that event, in
    words. slice: the shortest slice of events that shows it. open: spans without an end that nothing forbids.
    unjudged: what could not be judged, and why.
    """

    trace: Trace
    violations: list[Violation] = field(default_factory=list)
    more: Counter[str] = field(default_factory=Counter)
    state: list[str] = field(default_factory=list)
    slice: Slice | None = None
    open: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    loaders: int = 0
    events: int = 0

    @property
    def first(self) -> Violation | None:
        """The breach at the first impossible event, by the rule that names its reason best; None if there is none."""
        return self.violations[0] if self.violations else None

    def text(self) -> str:
        """The report for a reader."""
        lines = [f"{self.events} events of {self.loaders} loader iterator(s): {self._verdict()}"]
        if self.first is not None:
            lines += self._first(self.first)
            lines += self._others(self.violations[1:])
        lines += [f"  open: {text}" for text in self.open]
        lines += [f"  died: {text}" for text in self.deaths]
        lines += [f"  not judged: {text}" for text in self.unjudged]
        return "\n".join(plain(line) for line in lines)

    def _verdict(self) -> str:
        if not self.violations:
            judged = ", as far as it could be judged" if self.unjudged else ""
            return f"none of {len(TABLE)} rules is broken{judged}" if self.loaders else "no loader in this trace"
        count = len(self.violations) + sum(self.more.values())
        rules = len({violation.rule for violation in self.violations})
        return f"NOT a behaviour of the protocol: {count} violation(s) of {rules} rule(s)"

    def _first(self, first: Violation) -> list[str]:
        rule = TABLE[first.rule]
        lines = ["", "first impossible event"]
        lines += [f"  {line}" for line in (table(self.trace, [first.at]) if first.at >= 0 else [])]
        lines += [f"  rule    {first.rule}: {rule.demand}", f"  why     {first.message}"]
        lines += [f"  missing {first.missing}"] if first.missing else []
        lines += [f"  means   {rule.means}"]
        if self.state:
            lines += ["", "state before it", *(f"  {line}" for line in self.state)]
        if self.slice is not None:
            rows = list(self.slice.rows)
            least = "" if self.slice.minimal else "; it may be longer than it need be"
            lines += ["", f"shortest slice that shows it: {len(rows)} event(s){least}"]
            shown = rows if len(rows) <= MOST_SLICE else [*rows[: MOST_SLICE // 2], *rows[-MOST_SLICE // 2 :]]
            lines += [f"  {line}" for line in table(self.trace, shown, mark=first.at)]
            lines += [f"  … {len(rows) - len(shown)} in the middle are left out"] if len(shown) < len(rows) else []
        return [*lines, ""]

    def _others(self, others: list[Violation]) -> list[str]:
        """Of each rule the first breach, and how many there are: what is wrong once is often wrong ever after."""
        counts = Counter(violation.rule for violation in others) + self.more
        firsts = {violation.rule: violation for violation in reversed(others)}
        shown = sorted(firsts.values(), key=lambda violation: violation.at)
        return [
            f"  also: {violation}" + (f" and {counts[violation.rule] - 1} more" if counts[violation.rule] > 1 else "")
            for violation in shown
        ]

    def json(self) -> dict[str, Any]:
        """The report as plain values. Rows are positions in `Trace.events`."""
        first = self.first
        return {
            "trace": str(self.trace.path),
            "events": self.events,
            "loaders": self.loaders,
            "verdict": "violated" if first else "accepted",
            "first": None if first is None else self._json(first) | {
                "demand": TABLE[first.rule].demand,
                "means": TABLE[first.rule].means,
                "state_before": self.state,
                "slice": [] if self.slice is None else [facts(self.trace, row) for row in self.slice.rows],
                "slice_minimal": self.slice is not None and self.slice.minimal,
            },
            "violations": [self._json(violation) for violation in self.violations],
            "not_listed": dict(self.more),
            "open": self.open,
            "died": self.deaths,
            "not_judged": self.unjudged,
        }  # fmt: skip

    def _json(self, violation: Violation) -> dict[str, Any]:
        event = None if violation.at < 0 else facts(self.trace, violation.at)
        return {
            "rule": violation.rule,
            "message": violation.message,
            "missing": violation.missing,
            "loader": violation.loader,
            "rows": list(violation.rows),
            "event": event,
        }


# --- The state before -------------------------------------------------------------------------------------------------
def state_before(trace: Trace, row: int) -> list[str]:
    """The protocol's state before the event at `row`, in words; [] for an event of no loader."""
    loader = int(trace.events["loader"][row])
    if not loader:
        return []
    run = replay(trace, loader)
    return state_in_words(run.to(run.position_of(row) - 1))


def state_in_words(state: ProtocolState) -> list[str]:
    """A line each for the loader, its tasks, every worker, the queues, the pin thread."""
    waits = f", waits for task {state.waiting_for}" if state.waiting_for is not None and state.waiting_for >= 0 else ""
    counts = f"send_idx {_or_none(state.send_idx)}, rcvd_idx {_or_none(state.rcvd_idx)}"
    counts += f", outstanding {_or_none(state.tasks_outstanding)}, yielded {state.yielded}"
    epoch = "no epoch" if state.epoch is None else f"epoch {state.epoch}"
    lines = [f"loader         {state.loader.name}{waits}; {epoch}; {counts}"]
    tasks = [
        f"{task} (worker {info.worker_id}{', here' if info.fetched else ''})" for task, info in state.task_info.items()
    ]
    lines += [f"task_info      {', '.join(tasks)}"] if tasks else []
    lines += [f"reorder buffer {', '.join(map(str, state.reorder_buffer))}"] if state.reorder_buffer else []
    for worker in state.workers:
        name = f"worker {worker.worker}" if worker.worker >= 0 else "this process"
        queued = _queued("its queue", worker.index_queue)
        lines.append(f"{name:<14} {worker.state.name}, {worker.doing}{queued}")
    for name, queue in (("result queue", state.result_queue), ("ready queue", state.ready_queue)):
        lines += [f"{name:<14} {_messages(queue)}"] if queue else []
    if state.pin is not None:
        held = f", holds task {state.pin.task}" if state.pin.task >= 0 else ""
        simulated = " (simulated)" if state.pin.simulated else ""
        lines.append(f"pin thread     {state.pin.state.name}{held}{simulated}")
    done = [which.name.lower().replace("_", " ") for which in state.done_events]
    lines += [f"done events    {', '.join(done)}"] if done else []
    return lines + ([f"({state.note})"] if state.note and not state.known else [])


def _or_none(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _queued(name: str, queue: tuple[Queued, ...]) -> str:
    return f"; {name}: {_messages(queue)}" if queue else ""


def _messages(queue: tuple[Queued, ...]) -> str:
    return ", ".join(f"{message.name} ({message.stage.value})" for message in queue)


# --- Events in words --------------------------------------------------------------------------------------------------
def facts(trace: Trace, row: int) -> dict[str, Any]:
    """An event as plain values: where it is, when, who, what, and its own fields by name."""
    event = trace.events[row]
    kind = EVENTS[int(event["code"])]
    return {
        "row": row,
        "time_s": (int(event["time"]) - int(trace.events["time"][0])) / 1e9,
        "actor": actor(trace, row),
        "pid": int(event["pid"]),
        "seq": int(event["seq"]),
        "event": name_of(kind.code),
        "task": int(event["task"]),
        "worker": int(event["worker"]),
        "loader": int(event["loader"]),
        "fields": _fields(event),
    }


def _fields(event: Any) -> dict[str, Any]:
    """The event's own fields; a value of an enumeration by its name."""
    out: dict[str, Any] = {}
    for column, spec in zip("xyz", EVENTS[int(event["code"])].fields, strict=False):
        value = int(event[column])
        known = spec.enum is not None and value in {int(member) for member in spec.enum}
        out[spec.name] = spec.enum(value).name if known and spec.enum is not None else value
    return out


def actor(trace: Trace, row: int) -> str:
    """Whose event it is: "worker 1", "worker 1's feeder", "pin thread", "loader", "consumer"."""
    event = trace.events[row]
    process = trace.processes[int(event["process"])]
    who = f"worker {process.worker}" if process.role == "worker" and process.worker >= 0 else process.role
    track = EVENTS[int(event["code"])].track.value
    if track == "feeder":
        return f"{who}'s feeder"
    if trace.threads.get((int(event["pid"]), int(event["tid"]))) == "pin_memory":
        return "pin thread"
    return track if track in ("pin thread", "consumer") else who


def table(trace: Trace, rows: list[int], mark: int = -1) -> list[str]:
    """Events as a small table: seconds since the first, who, what, which task and worker, the event's own fields."""
    cells = []
    for row in rows:
        told = facts(trace, row)
        task = f"task {told['task']}" if told["task"] >= 0 else ""
        worker = f"worker {told['worker']}" if told["worker"] >= 0 else ""
        own = " ".join(f"{name}={value}" for name, value in told["fields"].items())
        mine = "◀" if row == mark else ""
        seq = f"#{told['seq']}"
        cells.append((f"+{told['time_s']:.6f} s", told["actor"], seq, told["event"], task, worker, own, mine))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True) if width) for cell in cells]
    return [line.rstrip() for line in lines]
