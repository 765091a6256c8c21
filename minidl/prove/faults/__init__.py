"""Faults that are injected into a running loader at each step of the protocol, and what must follow: `minidl faults`.

`cells` is the table: steps, faults and outcomes. `program` is what runs in a process of its own (`threads`, if the
workers are threads), which `serve` forks; `runner` runs cells and judges them. `run(arguments)` is the command. Linux
only.
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
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from minidl.prove.faults.cells import Cell, cells
from minidl.prove.faults.runner import Runner
from minidl.prove.kept import Kept, in_parallel


@dataclass(frozen=True)
class Judged:
    """What was found wrong with a cell, in words, and how long it took."""

    cell: Cell
    wrong: list[str]
    seconds: float

    def __str__(self) -> str:
        return f"{self.cell}: {'; '.join(self.wrong) or 'ok'} ({self.seconds:.1f} s)"


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen cells, print each result as it comes, then a table; return 1 if one failed. Or list the cells.

    Ctrl-C ends it with the table of what was found so far. Raises ValueError if no cell has such a name, or if the
    results that were kept are not of this code.
    """
    chosen = select(arguments.patterns, arguments.transport)
    if arguments.list:
        print("\n".join(f"{cell}: {cell.outcome.kind.value}" for cell in chosen))
        return 0
    kept, began = Kept(arguments.keep), time.monotonic()
    results = kept.read_as("cells", lambda row: Judged(Cell(**row["cell"]), row["wrong"], row["seconds"]))
    known = {result.cell: result for result in results}
    found = {cell: known[cell] for cell in chosen if cell in known}
    if found:
        print(f"{len(found)} of {len(chosen)} cells are in {arguments.keep}")
    with running([cell for cell in chosen if cell not in found], arguments.jobs) as coming:
        try:
            for result in coming:
                kept.add(**asdict(result))
                found[result.cell] = result
                print(f"{len(found)} of {len(chosen)}, {time.monotonic() - began:.0f} s  {result}", flush=True)
        finally:
            _report([found[cell] for cell in chosen if cell in found], len(chosen), arguments)
    return int(any(result.wrong for result in found.values()))


def _report(results: Sequence[Judged], wanted: int, arguments: argparse.Namespace) -> None:
    """Print the table of the results that there are, and write them to the file that is asked for."""
    failed = sum(bool(result.wrong) for result in results)
    print("\n".join(table(results)))
    if len(results) < wanted:
        go_on = "the same command goes on" if arguments.keep is not None else "with --keep FILE it would go on"
        print(f"stopped before {wanted - len(results)} of {wanted} cells: {go_on}")
    print(f"{len(results)} cells, {failed} failed", flush=True)
    if results:
        longest = max(results, key=lambda result: result.seconds)
        print(f"the longest took {longest.seconds:.1f} s: {longest.cell}", flush=True)
    if arguments.json is not None:
        report = [{**asdict(result), "outcome": result.cell.outcome.kind.value} for result in results]
        arguments.json.write_text(json.dumps(report, indent=1))


def select(patterns: Sequence[str], transport: str) -> list[Cell]:
    """The cells in whose names one of the words or shell patterns is found; all, if there are none."""
    found = [
        cell for cell in cells(transport)
        if not patterns or any(fnmatch.fnmatchcase(str(cell), f"*{pattern}*") for pattern in patterns)
    ]  # fmt: skip
    if not found:
        raise ValueError(f"no cell's name holds {' or '.join(map(repr, patterns))}: --list prints the names")
    return found


@contextlib.contextmanager
def running(chosen: Sequence[Cell], jobs: int) -> Iterator[Iterator[Judged]]:
    """Run the cells, `jobs` at a time; gives their results as they come. At the end, cells that run are waited for."""
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
        coming = stack.enter_context(in_parallel(judged, chosen, jobs))
        yield (result for _, result in coming)


def table(results: Iterable[Judged]) -> Iterator[str]:
    """One line a step and fault: what follows, how many cells, how long the longest took, how many failed."""
    yield f"{'step':26}{'fault':40}{'what follows':20}{'cells':>5}{'longest':>9}"
    for (step, fault), group in groupby(results, key=lambda result: (result.cell.step, result.cell.fault)):
        same = list(group)
        longest, failed = max(result.seconds for result in same), sum(bool(result.wrong) for result in same)
        line = f"{step:26}{fault:40}{same[0].cell.outcome.kind.value:20}{len(same):5}{longest:7.1f} s"
        yield f"{line}  {failed} failed" if failed else line
