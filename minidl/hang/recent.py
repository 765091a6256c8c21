"""The newest events of a run that is followed, as a trace of bounded size.

Interface: `Recent().take(trace)`, with what `live.LiveTrace` has read, returns the trace of the window.
"""

from __future__ import annotations

import numpy as np

from minidl.tracefile.arrays import Bools, Rows
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import pairs

MOST_KEPT = 20_000
"""The number of newest events that `Recent` keeps: a page of them takes 0.2 s to make."""

MOST_OPEN = 1_000
"""The number of older begins of open spans that `Recent` keeps."""


class Gaps:
    """Events that were not read, look by look. last: a process's file -> sequence number and time of its last event."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, int]] = {}

    def take(self, trace: Trace) -> dict[int, int]:
        """Take the new events; return process index -> time up to which events are missing since the last look."""
        missing = {}
        for index in np.unique(trace.events["process"]).tolist():
            rows, file = trace.events[trace.events["process"] == index], trace.processes[index].file
            first, last = rows[np.argmin(rows["seq"])], rows[np.argmax(rows["seq"])]
            known = self.last.get(file, (0, 0))
            if int(first["seq"]) > known[0] + 1:
                missing[index] = int(first["time"])
            self.last[file] = int(last["seq"]), max(known[1], int(rows["time"].max()))
        return missing


class Recent:
    """The newest events of a followed run as a trace: a window of time without gaps in any process.

    begin: of the window, CLOCK_MONOTONIC ns; 0 = from the start. It also keeps older begins of open spans.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self.begin = 0
        self._files: list[str] = []
        self._rows: Rows | None = None
        self._gaps = Gaps()

    def take(self, trace: Trace) -> Trace:
        """Add the new events of `trace`, the latest reading; return it with the events of the window."""
        after_gaps = self._gaps.take(trace)
        self.begin = max([self.begin, *after_gaps.values()])
        rows = trace.events
        if self._rows is not None:
            index = {process.file: at for at, process in enumerate(trace.processes)}
            new = np.array([index.get(file, -1) for file in self._files], np.int64)[self._rows["process"]]
            there = (new >= 0) & ~np.isin(
                new, list(after_gaps)
            )  # a span that was open before a gap may have ended in it
            kept = self._rows[there]
            kept["process"] = new[there]
            rows = np.concatenate([kept, rows])
            rows = rows[np.argsort(rows["time"], kind="stable")]
        if len(rows) > self.most:
            self.begin = max(self.begin, int(rows["time"][-self.most]))
        rows = rows[(rows["time"] >= self.begin) | self._is_open(rows)]
        self._files, self._rows = [process.file for process in trace.processes], rows.copy()
        trace.events = rows
        for process in trace.processes:
            process.whole_from = self.begin if process.start_ns < self.begin else 0
        return trace

    def _is_open(self, rows: Rows) -> Bools:
        """Which of the events before the window are begins without an end."""
        out = np.zeros(len(rows), bool)
        if self.begin and len(rows) and rows["time"][0] < self.begin:
            spans = pairs(rows)
            spans = spans[(spans["end"] < 0) & (spans["begin"] < self.begin)][-MOST_OPEN:]
            before = np.flatnonzero(rows["time"] < self.begin)
            names = ("time", "code", "tid", "process")
            known = set(zip(*(spans["begin" if n == "time" else n].tolist() for n in names), strict=True))
            mine = zip(*(rows[n][before].tolist() for n in names), strict=True)
            out[before[[one in known for one in mine]]] = True
        return out
