"""The page of a job: its headline, the ranks that matter with a strip of their steps, and a map of all ranks by steps.

Interface: `JobPage(paths)`: `html()` is the page, `look()` the answer to its requests while ranks run, `rank(n)` the
page of a rank. `viewer` serves them.

Rules of use: a job that runs is followed as by `minidl top` (see `job.live_job`), one that is over is read once, whole.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.hang.life import is_here, is_running
from minidl.job.digests import trace_of
from minidl.job.live_job import LiveJob, state
from minidl.job.report import JobReport
from minidl.tracefile.words import counted, micros, percent, plain
from minidl.views.colours import RED, rgb
from minidl.views.frame import Page, filled
from minidl.views.heat_map import MOST_COLUMNS, MOST_ROWS, averaged, image_of, waits_of
from minidl.views.live_page import LivePage
from minidl.views.page import page_of
from minidl.views.scene import scene_of

EVERY: Final = 2.0
"""Seconds between two requests of a page at least."""

ROWS: Final = 48
"""The ranks that have a row of their own; of more, those that matter."""


class JobPage:
    """The page of the job at `paths`. live: follow it. Raises TraceError if it is none, or cannot be read."""

    def __init__(self, paths: Sequence[Path], *, live: bool) -> None:
        self.directory = paths[0]
        self._job, self._lock = LiveJob(paths), threading.Lock()
        self._live, self._next = live, 0.0
        self._words: dict[str, Any] = {}
        self._now()

    def html(self) -> Page:
        """The page, as of now."""
        words = self._now()
        return Page(filled("job.html", connect="'self'", title=words["name"], job=words))

    def look(self) -> bytes:
        """What the page shows as of now, JSON."""
        return json.dumps(self._now()).encode()

    def rank(self, number: int) -> LivePage | Page:
        """The page of a rank, which follows it if it runs. Raises TraceError if there is no such rank."""
        trace = trace_of(self._job.paths, number)
        runs = self._live and trace.path.is_dir() and is_here(trace.manifest)
        runs = runs and is_running(trace.path, trace.manifest)
        return LivePage(trace.path) if runs else page_of(scene_of(trace))

    def _now(self) -> dict[str, Any]:
        """What the page shows; read again if that was some time ago, by one request at a time."""
        with self._lock:
            if not self._words.get("over") and time.monotonic() >= self._next:
                report = self._job.look(newest=self._live)
                pause = max(EVERY, self._job.pause)
                self._next = time.monotonic() + pause / 2
                self._words = {
                    "name": self._job.name, "over": not self._live or self._job.over, "every": round(1000 * pause),
                    "state": plain(state(report)), **_shown(report),
                }  # fmt: skip
            return self._words


def _shown(report: JobReport) -> dict[str, Any]:
    """What a page shows of a job; `image` has a pixel of three bytes for each rank and step, or some of them."""
    finding, meetings = report.finding, report.meetings
    first, *evidence = finding.lines()
    rows = report.order() if len(report.facts) <= ROWS else report.outliers()
    waits = waits_of(report) if meetings.keys else {}
    image = image_of(report, waits, np.arange(len(report.facts)))
    marked = image.copy()
    marked[meetings.last[meetings.held], meetings.held] = np.array(rgb(RED)) / 255
    image, marked = (averaged(one, MOST_COLUMNS, 1) for one in (image, marked))
    map_of_all = averaged(marked, MOST_ROWS, 0)
    strips = np.stack([image[rows], image[rows], marked[rows]], axis=1)  # three lines of pixels a rank
    legend = [{"label": f"waits for {name}", "colour": colour} for name, (colour, _) in waits.items()]
    legend += [{"label": "its own step", "colour": "#ffffff"}, {"label": "the other ranks wait for it", "colour": RED}]
    return {
        "headline": plain(first),
        "evidence": [plain(line.strip()) for line in evidence],
        "wrong": finding.outcome.wrong,
        "steps": f"{counted(len(meetings.keys), 'step')} of {micros(meetings.usual)}",
        "legend": [{**one, "pattern": "solid"} for one in legend],
        "rows": [_row(report, row) for row in rows],
        "strips": _pixels(strips),
        "ranks": [report.facts[row].rank for row in np.linspace(0, len(report.facts) - 1, len(map_of_all)).astype(int)],
        "columns": image.shape[1],
        "map": _pixels(map_of_all) if len(report.facts) > ROWS else "",
    }  # fmt: skip


def _row(report: JobReport, row: int) -> dict[str, Any]:
    facts = report.facts[row]
    return {
        "rank": facts.rank, "name": plain(facts.name), "late": percent(report.meetings.weights[row]),
        "waits": percent(report.tables[row].waiting), "batches": facts.taken, "said": plain(facts.what),
        "wrong": report.is_wrong(row),
    }  # fmt: skip


def _pixels(image: Any) -> str:
    return base64.b64encode(np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8).tobytes()).decode()
