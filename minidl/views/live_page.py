"""The page of a running job: the page of `page`, and the answers to its repeated requests for updates.

Interface: `LivePage(directory)`: `html()` is the page, `look()` the answer to its request. `whole` is the trace once
the run is over, if it is small.

Rules of use: the page holds the newest events (see `analysis.recent`); neither it nor this process grows with the run.
The follower of the replay follows all events, as for `top`, so the headline knows what the window no longer shows. A
trace that can no longer be read ends the page's requests, and the page keeps what was read last.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, Final

from minidl.hang.headline import headline
from minidl.hang.live import LiveTrace, is_small
from minidl.hang.recent import MOST_KEPT, Recent
from minidl.hang.snapshot import Doing, IteratorSnapshot, Job, Snapshot
from minidl.tracefile.format import TraceError
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import duration
from minidl.views.frame import Page
from minidl.views.page import columns, describe, joined, packed
from minidl.views.scene import scene_of, title_of

EVERY: Final = 1.0
"""The shortest time between two requests of a page, s; longer after a slow answer, for at most a fifth of a CPU."""

SELDOM: Final = 5.0
"""The longest time between two requests of a page, s."""

REQUEST: Final = "live"
"""The address of the answers, beside the page's own."""


class LivePage:
    """The page of the run that is recorded in `directory`. Raises TraceError if there is no trace.

    ended: what the page says when the run is over; perfetto: address that it links to then. most: events that it holds.
    over: nothing more will come.
    """

    def __init__(self, directory: Path, *, ended: str = "", perfetto: str = "", most: int = MOST_KEPT) -> None:
        self.directory = directory
        self.ended = ended
        self.perfetto = perfetto
        self.over = False
        self.whole: Trace | None = None
        self.told_over = threading.Event()  # a page has been told that the run is over
        self._live, self._job, self._recent = LiveTrace(directory), Job(), Recent(most)
        self._lock = threading.Lock()
        self._made, self._took = 0.0, 0.0
        self._asked = -1e9  # when a page has asked last
        self._words: dict[str, Any] = {}
        self._numbers = ""
        self._read()
        self._took = 0.0  # the first look loads modules, and says nothing about the next

    def html(self) -> Page:
        """The page, as of a look of this moment."""
        with self._lock:
            self._renew()
            return joined(self._words, self._numbers, connect="'self'")

    def look(self) -> bytes:
        """The page's words and numbers as of now, JSON. Not made again for a second page that asks at the same time."""
        self._asked = time.monotonic()
        with self._lock:
            self._renew()
            answer = json.dumps({"words": self._words, "numbers": self._numbers}).encode()
            if self.over:
                self.told_over.set()
            return answer

    def say_over(self, most: float) -> None:
        """Look once more; if a page is open, wait up to `most` s until it has been told that the run is over."""
        with self._lock:
            self._made = 0.0
            self._renew()
        if self.over and time.monotonic() - self._asked < 3 * self._pause():
            self.told_over.wait(most)

    def _pause(self) -> float:
        return min(max(EVERY, 4 * self._took), SELDOM)

    def _renew(self) -> None:
        if not self.over and time.monotonic() - self._made >= EVERY / 2:
            try:
                self._read()
            except TraceError as error:
                self.over = True
                why = f"the trace can no longer be read: {error}"
                self._words = self._words | {"live": {**self._words["live"], "state": why, "over": True, "lost": True}}

    def _read(self) -> None:
        begun = time.monotonic()
        trace, lives = self._live.read()
        self._job.take(trace)
        shot = self._job.snapshot(trace, self._job.moment(trace, lives), lives)
        self.over = shot.over
        if shot.over and is_small(self.directory):
            self.whole = trace = _with_lives(read_trace(self.directory), trace)
            begin = 0
        else:
            trace = self._recent.take(trace)
            begin = self._recent.begin
        self._draw(trace, begin, shot)
        self._made = time.monotonic()
        self._took = self._made - begun

    def _draw(self, trace: Trace, begin: int, shot: Snapshot) -> None:
        since = max(0, begin - trace.start) / 1e9
        headline(trace, job=None if trace is self.whole else self._job)  # is kept, and the scene has it
        scene = scene_of(trace, since=since if since else None)
        words = describe(scene, title_of(trace))
        words["live"] = {
            "state": shot.state, "over": shot.over, "lost": False, "every": round(1000 * self._pause()),
            "since": since, "now": [] if shot.over else [_now(one) for one in shot.loaders],
            "ended": self.ended if shot.over else "",
        }  # fmt: skip
        words["perfetto"] = self.perfetto if self.whole is not None else ""
        self._words, self._numbers = packed(words, columns(scene), level=1)


def _now(one: IteratorSnapshot) -> dict[str, Any]:
    """The present steps of an iterator and its workers, for the page beside the timeline."""
    rows = [["loader", one.doing.words, _time(one.doing)]]
    for worker in one.workers:
        words = worker.doing.words
        words += f", {worker.life.value}" if worker.life not in (ProcessLife.ALIVE, ProcessLife.UNKNOWN) else ""
        rows.append([f"worker {worker.worker}", words, _time(worker.doing)])
    return {"title": one.title(), "rates": one.rates(), "rows": rows}


def _time(doing: Doing) -> str:
    return duration(doing.seconds * 1e9)


def _with_lives(whole: Trace, followed: Trace) -> Trace:
    """The whole trace, which knows which processes are there, as the followed one does."""
    lives = {process.file: process.life for process in followed.processes}
    for process in whole.processes:
        process.life = lives.get(process.file, process.life)
    return whole
