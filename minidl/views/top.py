"""`minidl top`: a running job, followed in the terminal through its trace.

Interface: `follow(target)` reads, prints and sleeps in turn; `run` is the command. It prints a `snapshot.Snapshot`, and
of a job its `screen`: `follow_job(paths)`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TextIO

from minidl.hang.headline import headline
from minidl.hang.live import LiveTrace, find_trace
from minidl.hang.snapshot import Job, Snapshot
from minidl.job.digests import trace_of
from minidl.job.live_job import LiveJob, state
from minidl.job.report import JobReport
from minidl.tracefile.format import TraceError
from minidl.tracefile.loaders import only
from minidl.tracefile.members import members_at
from minidl.tracefile.reader import read_trace
from minidl.tracefile.words import counted
from minidl.views.heat_map import in_text


def follow(
    target: str | PathLike[str], interval: float = 1.0, once: bool = False, out: TextIO | None = None,
    dataloader: str | None = None,
) -> Snapshot:  # fmt: skip
    """Show the state of the job `target` (see `find_trace`) every `interval` seconds, until its run is over.

    once: show it once. out: where to (default: sys.stdout); a terminal is redrawn, anything else gets one snapshot
    after the other. dataloader: of this one's iterators alone (see `loaders.only`). Returns the last one. Raises
    TraceError if there is no trace.
    """
    out = sys.stdout if out is None else out
    place = find_trace(target)
    live, job = None if place.is_file() else LiveTrace(place), Job()
    while True:
        trace, lives = (read_trace(place), {}) if live is None else live.read()
        job.take(trace)
        shot = job.snapshot(trace, job.moment(trace, lives), lives)
        if dataloader is not None:
            mine = only(trace, dataloader).loaders
            shot = replace(shot, loaders=[one for one in shot.loaders if one.number in mine])
        if shot.over:
            whole = trace if live is None else read_trace(place)
            shot = replace(shot, headline=headline(only(whole, dataloader)).title)
        out.write(_framed(shot.text()) if out.isatty() and not once else f"{shot.text()}\n")
        out.flush()
        if once or shot.over:
            return shot
        time.sleep(interval)
        out.write("" if out.isatty() else "\n")


def follow_job(
    paths: Sequence[Path], interval: float = 1.0, once: bool = False, out: TextIO | None = None
) -> JobReport:
    """Show the state of the job at `paths`, as `follow` does. Raises TraceError if it is none, or cannot be read."""
    out = sys.stdout if out is None else out
    job = LiveJob(paths)
    while True:
        report = job.look()
        redrawn = out.isatty() and not once
        text = screen(report, shutil.get_terminal_size().columns)
        out.write(_framed(text) if redrawn else f"{text}\n")
        out.flush()
        if once or job.over:
            return report
        time.sleep(max(interval, job.pause))
        out.write("" if redrawn else "\n")


def screen(report: JobReport, width: int) -> str:
    """The job now: its headline, the ranks that matter, and what they did in each step."""
    _, *rows = in_text(report, width).splitlines()
    now = f"{state(report)}; the newest {counted(len(report.meetings.keys), 'step')}:"
    return "\n".join([report.text(), now, *rows])


def _framed(text: str) -> str:
    """The text for a cleared screen, wrapped to its width and cut to its height."""
    columns, rows = shutil.get_terminal_size()
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, columns, subsequent_indent=" " * 4)]
    if len(lines) > rows - 1:
        lines = [*lines[: max(0, rows - 2)], f"({len(lines) - rows + 2} more lines)"]
    return "\x1b[H\x1b[2J" + "\n".join(lines) + "\n"


def _alone(places: Sequence[Path], rank: int) -> Path:
    """Where the trace of one rank is. Raises TraceError if there is none, or if other ranks are in it."""
    trace = trace_of(places, rank)
    if len({process.rank for process in trace.processes} - {-1}) > 1:
        raise TraceError(f"{trace.path} has several ranks in one trace, which are shown together: omit --rank")
    return trace.path


def run(arguments: argparse.Namespace) -> int:
    """`minidl top`; the exit code. Raises TraceError if there is no trace."""
    places = [Path(arguments.target)]
    try:
        is_path = os.path.exists(arguments.target)
        if arguments.rank is not None:
            if not is_path:
                raise TraceError(f"{arguments.target} is no trace, nor a directory of ranks: omit --rank")
            arguments.target = _alone(places, arguments.rank)
        elif is_path and members_at(places) is not None:
            if arguments.dataloader is not None:
                raise TraceError(f"{arguments.target} is a job: --dataloader needs one of its ranks, by --rank N")
            follow_job(places, arguments.interval, arguments.once)
            return 0
        follow(arguments.target, arguments.interval, arguments.once, dataloader=arguments.dataloader)
    except KeyboardInterrupt:  # the usual way to leave
        print()
    return 0
