"""The report of `minidl check`: the verdict, the first impossible event, the state before it, the slice, open spans.

`Report.text()` is for people, `Report.json()` for machines. Texts of a trace are untrusted and shown escaped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from minidl.check.slices import Slice
from minidl.check.view import TABLE, Violation
from minidl.playback.stepper import Replay
from minidl.playback.words import lines
from minidl.tracefile.events import EVENTS
from minidl.tracefile.words import counted, name_of, plain

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

MOST_SLICE: Final = 40
"""The most lines of a slice that are shown; the JSON has all."""


@dataclass(slots=True)
class Report:
    """The result of `examine`.

    violations: the first impossible event's first, then by time. state: the protocol's state before that event, in
    words. slice: the shortest slice of events that shows it. open: spans without an end that break no rule.
    alive: iterators that were open when the program ended. unjudged: the parts that were not judged, with reasons.
    """

    trace: Trace
    violations: list[Violation] = field(default_factory=list)
    more: Counter[str] = field(default_factory=Counter)
    state: list[str] = field(default_factory=list)
    slice: Slice | None = None
    open: list[str] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
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
        lines = [f"{counted(self.events, 'event')} of {counted(self.loaders, 'iterator')}: {self._verdict()}"]
        if self.violations and self.trace.problems:  # first: rules that seem broken may be broken by that alone
            lines[:0] = ["the recording is damaged or incomplete, which may be the only reason for broken rules:"]
            lines[1:1] = [f"  {problem}" for problem in self.trace.problems]
        if self.first is not None:
            lines += self._first(self.first)
            lines += self._others(self.violations[1:])
        lines += [f"  open: {text}" for text in self.open]
        lines += [f"  alive at the program's end: {text}" for text in self.alive]
        lines += [f"  died: {text}" for text in self.deaths]
        said = self.trace.problems if self.violations else []
        lines += [f"  not judged: {text}" for text in self.unjudged if text not in said]
        return "\n".join(plain(line) for line in lines)

    def _verdict(self) -> str:
        if not self.violations:
            judged = ", as far as it could be judged" if self.unjudged else ""
            return f"none of {len(TABLE)} rules is broken{judged}" if self.loaders else "no iterator in this trace"
        count = len(self.violations) + sum(self.more.values())
        rules = len({violation.rule for violation in self.violations})
        return f"NOT a behaviour of the protocol: {counted(count, 'violation')} of {counted(rules, 'rule')}"

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
            least = "" if self.slice.minimal else "; a shorter one may exist"
            lines += ["", f"shortest slice that shows it: {counted(len(rows), 'event')}{least}"]
            shown = rows if len(rows) <= MOST_SLICE else [*rows[: MOST_SLICE // 2], *rows[-MOST_SLICE // 2 :]]
            lines += [f"  {line}" for line in table(self.trace, shown, mark=first.at)]
            lines += [f"  … {len(rows) - len(shown)} in the middle are left out"] if len(shown) < len(rows) else []
        return [*lines, ""]

    def _others(self, others: list[Violation]) -> list[str]:
        """The first breach of each rule and the number of breaches: an error often repeats itself."""
        counts = Counter(violation.rule for violation in others) + self.more
        firsts = {violation.rule: violation for violation in reversed(others)}
        shown = sorted(firsts.values(), key=lambda violation: violation.at)
        return [
            f"  also: {violation}" + (f" and {counts[violation.rule] - 1} more" if counts[violation.rule] > 1 else "")
            for violation in shown
        ]

    def json(self) -> dict[str, Any]:
        """The report as plain values. Positions are positions in `Trace.events`."""
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
            "alive": self.alive,
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
    """The protocol's state before the event at `row`, in words; [] for an event of no iterator."""
    loader = int(trace.events["loader"][row])
    if not loader:
        return []
    run = Replay(trace, loader)
    state = run.to(run.position_of(row) - 1)
    return [str(line) for line in lines(state) if line.text] + ([f"({state.note})"] if state.note else [])


# --- Events in words --------------------------------------------------------------------------------------------------
def facts(trace: Trace, row: int) -> dict[str, Any]:
    """An event as plain values: where it is, when, who, what, and its own fields by name."""
    event = trace.events[row]
    kind = EVENTS[int(event["code"])]
    return {
        "row": row,
        "time_s": (int(event["time"]) - trace.start) / 1e9,
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
    for column, spec in EVENTS[int(event["code"])].columns.items():
        value = int(event[column])
        if spec.may_lack and not value:
            continue
        known = spec.enum is not None and value in {int(member) for member in spec.enum}
        out[spec.name] = spec.enum(value).name if known and spec.enum is not None else value
    return out


def actor(trace: Trace, row: int) -> str:
    """Whose event it is: "worker 1", "worker 1's feeder", "pin thread", "loader", "consumer"."""
    event = trace.events[row]
    process = trace.processes[int(event["process"])]
    who = process.actor
    track = EVENTS[int(event["code"])].track.value
    if track == "feeder":
        of_main = trace.loaders.get(int(event["loader"]), {}).get("transport") == "arena" and process.role == "worker"
        return who if of_main else f"{who}'s feeder"
    if trace.threads.get((int(event["pid"]), int(event["tid"]))) == "pin_memory":
        return "pin thread"
    return track if track in ("pin thread", "consumer") else who


def table(trace: Trace, rows: list[int], mark: int = -1) -> list[str]:
    """Events as a small table: seconds since the first, who, what, which task and worker, the event's own fields."""
    cells = []
    for row in rows:
        known = facts(trace, row)
        task = f"task {known['task']}" if known["task"] >= 0 else ""
        worker = f"worker {known['worker']}" if known["worker"] >= 0 else ""
        own = " ".join(f"{name}={value}" for name, value in known["fields"].items())
        mine = "◀" if row == mark else ""
        seq = f"#{known['seq']}"
        cells.append((f"+{known['time_s']:.6f} s", known["actor"], seq, known["event"], task, worker, own, mine))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True) if width) for cell in cells]
    return [line.rstrip() for line in lines]
