"""Faults that are injected into a running loader at each step of the protocol, and what must follow: `minidl faults`.

`cells` is the table: steps, faults and outcomes. `program` is what runs in a process of its own, `runner` runs cells
and judges them. `run(arguments)` is the command. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import queue
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from minidl import terminal
from minidl.faults.cells import Cell, cells
from minidl.faults.runner import Runner


@dataclass(frozen=True)
class Judged:
    """What was found wrong with a cell, in words, and how long it took."""

    cell: Cell
    wrong: list[str]
    seconds: float

    def __str__(self) -> str:
        return f"{self.cell}: {'; '.join(self.wrong) or 'ok'} ({self.seconds:.1f} s)"


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen cells, print a table, and return 1 if one failed; or list them and return 0.

    Raises ValueError if no cell has such a name.
    """
    chosen = select(arguments.patterns, arguments.transport)
    if arguments.list:
        print("\n".join(f"{cell}: {cell.outcome.kind.value}" for cell in chosen))
        return 0
    began, results = time.monotonic(), []
    for result in run_all(chosen, arguments.jobs):
        results.append(result)
        terminal.progress(f"{len(results)} of {len(chosen)} cells  {result}"[: terminal.columns() - 1])
        if result.wrong:
            terminal.progress("")
            print(result, flush=True)
    terminal.progress("")
    failed = [result for result in results if result.wrong]
    longest = max(results, key=lambda result: result.seconds)
    print("\n".join(table(results)))
    print(f"{len(results)} cells in {time.monotonic() - began:.0f} s, {len(failed)} failed")
    print(f"the longest took {longest.seconds:.1f} s: {longest.cell}")
    if arguments.json is not None:
        report = [{**asdict(result), "outcome": result.cell.outcome.kind.value} for result in results]
        arguments.json.write_text(json.dumps(report, indent=1))
    return int(bool(failed))


def select(patterns: Sequence[str], transport: str) -> list[Cell]:
    """The cells in whose names one of the words or shell patterns is found; all, if there are none."""
    found = [
        cell for cell in cells(transport)
        if not patterns or any(fnmatch.fnmatchcase(str(cell), f"*{pattern}*") for pattern in patterns)
    ]  # fmt: skip
    if not found:
        raise ValueError(f"no cell's name holds {' or '.join(map(repr, patterns))}: --list prints the names")
    return found


def run_all(chosen: Sequence[Cell], jobs: int) -> Iterator[Judged]:
    """Run the cells, `jobs` at a time; yields their results in order."""
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()

    def judged(cell: Cell) -> Judged:
        runner, began = idle.get(), time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="minidl-faults-") as folder:
                return Judged(cell, runner.run(cell, Path(folder)), time.monotonic() - began)
        finally:
            idle.put(runner)

    with contextlib.ExitStack() as stack:
        for _ in range(min(jobs, len(chosen))):
            idle.put(stack.enter_context(Runner()))
        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(judged, chosen)


def table(results: Iterable[Judged]) -> Iterator[str]:
    """One line a step and fault: what follows, how many cells, how long the longest took, how many failed."""
    yield f"{'step':26}{'fault':40}{'what follows':20}{'cells':>5}{'longest':>9}"
    for (step, fault), group in groupby(results, key=lambda result: (result.cell.step, result.cell.fault)):
        same = list(group)
        longest, failed = max(result.seconds for result in same), sum(bool(result.wrong) for result in same)
        line = f"{step:26}{fault:40}{same[0].cell.outcome.kind.value:20}{len(same):5}{longest:7.1f} s"
        yield f"{line}  {failed} failed" if failed else line
