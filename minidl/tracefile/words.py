"""Times, sizes, counts, events and steps in words: one wording for all outputs. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from minidl.live_repr import counted as counted
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Field, Phase


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of time. ns: its length. What is too long for the unit is told in a longer one."""

    name: str
    ns: int

    def of(self, ns: float) -> str:
        """A duration in this unit, to three significant digits, or two of a small part of it: "1.51 s", "0.011 s"."""
        if unit_of(ns).ns > self.ns:
            return duration(ns)
        value = ns / self.ns
        return f"{_digits(value) if abs(value) >= 0.1 or not ns else f'{value:.2g}'} {self.name}"

    def at(self, ns: float) -> str:
        """A moment in this unit, as exact as one can point at it: "0.35 s", "12.41 min", "359.9 ms"."""
        unit = max(self, unit_of(ns), key=lambda each: each.ns)
        return f"{ns / unit.ns:.{2 if unit.ns >= 10**9 else 1}f} {unit.name}"


_UNITS: Final = (Unit("ns", 1), Unit("µs", 10**3), Unit("ms", 10**6), Unit("s", 10**9), Unit("min", 60 * 10**9))


def unit_of(ns: float) -> Unit:
    """Return the unit that `duration` tells so long a time in."""
    for unit in _UNITS[:-1]:
        if float(_digits(abs(ns) / unit.ns)) < (600 if unit.name == "s" else 1000):
            return unit
    return _UNITS[-1]


def duration(ns: float) -> str:
    """Return a duration to three significant digits: "450 ns", "12.3 µs", "1.50 ms", "45.6 s", "20.0 min"."""
    unit = unit_of(ns)
    return f"{ns:.0f} ns" if unit.ns == 1 else f"{'-' if ns < 0 else ''}{_digits(abs(ns) / unit.ns)} {unit.name}"


def seconds(value: float) -> str:
    """The same of seconds: "1.50 ms", "45.6 s"."""
    return duration(value * 1e9)


def micros(us: float) -> str:
    """The same of microseconds."""
    return duration(float(us) * 1e3)


def _digits(value: float) -> str:
    """Three significant digits, or all of a whole number's."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def rounded(value: float) -> str:
    """Return a rate or a factor to three significant digits, and none after the point from 100 on: "1.5", "1,250"."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def size(number: float) -> str:
    """Return a number of bytes to three or four digits: "512 B", "31.2 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def percent(share: float) -> str:
    """Return a share of 1 as "65%"; "<1%" of one that is not 0."""
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def listed(items: Iterable[object], most: int = 8) -> str:
    """Return the first `most` items with commas, and "..." if there are more."""
    every = list(items)
    return ", ".join(map(str, every[:most])) + (", ..." if len(every) > most else "")


def named_ranks(numbers: Sequence[object], most: int = 8, joined: Callable[[list[str], int], str] = listed) -> str:
    """Return "rank 3", or "ranks 3, 9": the first `most`; with `and_joined` "ranks 3 and 9"."""
    return f"rank{'s' * (len(numbers) > 1)} {joined(list(map(str, numbers)), most)}"


def and_joined(items: Sequence[str], most: int = 4) -> str:
    """The first items as words: "a, b and 3 more"."""
    shown = [*items[:most], *([f"{len(items) - most} more"] if len(items) > most else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def table(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Return a line for each row of cells; a column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(align, row, widths)).rstrip() for row in rows]


def lacking(problems: Iterable[str]) -> list[str]:
    """Return a line for each missing part of a trace (`Trace.problems`), escaped."""
    return [plain(f"missing from the trace: {problem}") for problem in problems]


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; "signal 99" for a number that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(code: int) -> str:
    """How a process ended, by multiprocessing's exit code: "SIGKILL", "exit code 3"."""
    return signal_name(-code) if code < 0 else f"exit code {code}"


def how(code: int) -> str:
    """The same behind "ended": "by SIGKILL", "with exit code 3"."""
    return f"{'with' if code >= 0 else 'by'} {ending(code)}"


def plain(text: str) -> str:
    """Escape control characters: a trace's texts are untrusted, and a terminal obeys them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# --- Events -----------------------------------------------------------------------------------------------------------
def name_of(code: int) -> str:
    """Return an event's name, with "begin" or "end" if it is one of a span's two."""
    event = EVENTS.get(code)
    if event is None:
        return f"event {code}"
    return event.name if event.phase is Phase.INSTANT else f"{event.name} {event.phase.name.lower()}"


def value_of(field: Field, value: int) -> str | int:
    """Return the value of an event's own field; a known value of an enumeration by its name, in lower case."""
    names = {int(member): member.name.lower() for member in field.enum or ()}
    return names.get(value, value)


def sample_asked_for(position: int, index: int) -> str:
    """The requested sample in words, by its event's fields: "sample 4"; with `__getitems__` "the samples"."""
    if index >= 0:
        return f"sample {index}"
    return f"the sample at position {position}" if position >= 0 else "the samples"


def doing(span: np.void | Mapping[str, int]) -> str:
    """What a thread is doing, by its innermost open span (a row of `spans.SPAN`): "fetching task 3"."""
    code, task, worker = int(span["code"]), int(span["task"]), int(span["worker"])
    if code == ev.SAMPLE[0]:
        return f"in {sample_asked_for(int(span['bx']), int(span['by']))} (task {task})"
    if code in ev.AWAITS:
        return f"waiting for task {task} of worker {worker}" if task >= 0 else "waiting for a result"
    if code == ev.CONSUMER[0]:
        return "in the consumer's code" + (f", after task {task}" if task >= 0 else "")
    event = EVENTS[code]
    words = event.doing or f"in {event.name}" + " (task {task})" * (task >= 0)
    return words.format(task=task, worker=worker)
