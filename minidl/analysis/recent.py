"""The newest events of a run that is followed, as a trace of bounded size.

Interface: `Recent().take(trace)`, with what `live.LiveTrace` has read, returns the trace of the window.
"""

from __future__ import annotations

import numpy as np

from minidl.tracefile.arrays import Bools, Rows
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import pairs

MOST_KEPT = 20_000
"""Events of a run's newest that `Recent` keeps: a page of them is made in 0.2 s."""

MOST_OPEN = 1_000
"""Older begins that `Recent` keeps, of spans that have not ended."""


class Recent:
    """The newest events of a run that is followed, as a trace: a window in time that no process has gaps in.

    begin: of the window, CLOCK_MONOTONIC ns; 0 = everything is there. Older begins of what has not ended are kept too.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self.begin = 0
        self._files: list[str] = []
        self._rows: Rows | None = None
        self._last: dict[str, int] = {}  # of each process's file, the sequence number of its last event

    def take(self, trace: Trace) -> Trace:
        """Add the new events of `trace`, a later reading than any before; return it with those of the window."""
        after_gaps = self._after_gaps(trace)
        self.begin = max([self.begin, *after_gaps.values()])
        rows = trace.events
        if self._rows is not None:
            index = {process.file: at for at, process in enumerate(trace.processes)}
            new = np.array([index.get(file, -1) for file in self._files], np.int64)[self._rows["process"]]
            there = (new >= 0) & ~np.isin(new, list(after_gaps))  # what was open before a gap may have ended in it
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

    def _after_gaps(self, trace: Trace) -> dict[int, int]:
        """Index of each process that has events that were not read -> the time of the first that was, after these."""
        found = {}
        for index in np.unique(trace.events["process"]).tolist():
            rows, file = trace.events[trace.events["process"] == index], trace.processes[index].file
            if int(rows["seq"].min()) > self._last.get(file, 0) + 1:
                found[index] = int(rows["time"].min())
            self._last[file] = int(rows["seq"].max())
        return found

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
