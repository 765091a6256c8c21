"""Moments of recorded runs: the event that a row points at, the state there, and a small picture around it.

A moment is written "TRACE EVENT FIELD=VALUE ...", e.g. "head-of-line-in-order reorder_store task=12": the first event
of this name in `traces/TRACE.minidl` whose fields have these values. EVENT.end is the end of a span; task, worker and
each field of the event's own can be named; nth=2 takes the second one; ms=40 shows 40 ms around it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import minidl
from minidl.playback import words
from minidl.playback.stepper import Replay
from minidl.tracefile.events import BY_NAME, Event, Phase
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import duration

TRACES: Final = Path(minidl.__file__).parent.parent / "traces"
"""The recorded runs: beside the package in a checkout, and not in a wheel."""

NOTEBOOKS: Final = TRACES.parent / "notebooks"
"""The notebooks, which are there likewise."""


@functools.cache
def heading_of(notebook: str, language: str = "en") -> str:
    """Return the heading that "file.ipynb#3" stands for; "" if there is none, or no notebook."""
    file, _, number = notebook.partition("#")
    path = NOTEBOOKS / (file if language == "en" else f"texts/{language}/{Path(file).stem}.md")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text and language == "en":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    headings = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    return next((heading for heading in headings if heading.startswith(f"{number}. ")), "")


class MomentError(ValueError):
    """A moment that is not in the recorded runs; the message says what is."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment, looked up. row: its event in the trace; window: ns around it, 0 = chosen by the run."""

    trace: Trace
    name: str
    event: Event
    row: int
    window: int

    @property
    def time(self) -> int:
        """ns since the trace's first event."""
        return int(self.trace.events["time"][self.row] - self.trace.events["time"][0])

    @property
    def loader(self) -> int:
        return int(self.trace.events["loader"][self.row])

    @property
    def command(self) -> str:
        """The command that steps through the run from here."""
        return f"minidl replay traces/{self.name}.minidl --iterator {self.loader} --at {self.time / 1e9:.6f}"

    def state(self) -> tuple[str, list[str], list[words.StateLine]]:
        """Return the event in words, what it changed, and the state after it, in lines."""
        if self.loader <= 0:
            return f"{self.event.name} at {duration(self.time)}", [], []
        at = _replay(self.name, self.loader)
        at.to_row(self.row)
        happened = self.event.meaning if at.words == self.event.name.replace("_", " ") else at.words
        return happened, [str(change) for change in at.changed], list(words.lines(at.state))


@functools.cache
def _trace(name: str) -> Trace:
    path = TRACES / f"{name}.minidl"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in TRACES.glob("*.minidl"))) or "none: this is not a checkout"
        raise MomentError(f"no recorded run {name!r}; there are {known}")
    return read_trace(path)


@functools.cache
def _replay(name: str, loader: int) -> Replay:
    return Replay(_trace(name), loader)


def find(text: str) -> Moment:
    """Look a moment up. Raises MomentError if the run, the event or a field does not exist, or no event fits."""
    name, _, rest = text.partition(" ")
    event_name, *conditions = rest.split()
    bare, _, side = event_name.partition(".")
    phase = Phase.END if side == "end" else Phase.BEGIN
    event = BY_NAME.get((bare, phase)) or BY_NAME.get((bare, Phase.INSTANT))
    if event is None or side not in ("", "begin", "end"):
        raise MomentError(f"{text!r}: no event {event_name!r}; `minidl events` lists them")
    trace = _trace(name)
    columns = {"task": "task", "worker": "worker", "loader": "loader"}
    columns |= {field.name: column for column, field in event.columns.items()}
    found, nth, window = trace.events["code"] == event.code, 1, 0
    for condition in conditions:
        field, _, value = condition.partition("=")
        if field == "nth":
            nth = int(value)
        elif field == "ms":
            window = round(float(value) * 1e6)
        elif field in columns:
            found = found & (trace.events[columns[field]] == int(value))
        else:
            raise MomentError(f"{text!r}: {event.name} has no field {field!r}; it has {', '.join(columns)}")
    rows = np.flatnonzero(found)
    if len(rows) < nth:
        raise MomentError(f"{text!r}: the run has {len(rows)} such events")
    return Moment(trace, name, event, int(rows[nth - 1]), window)
