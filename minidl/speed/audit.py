"""`minidl audit`: check that the ranks of a run saw the samples that they should have seen.

Interface: `audit(traces)` takes a joined trace, or one trace a rank, and gives an `Audit`: per DataLoader and epoch
what each rank saw (`passes`), and findings (`findings`, judged in `audit_rules`). A finding is a mistake; a question,
if the same facts are right in one program and a mistake in another; harmless (such as padding); or it says what the
trace does not show. `run(arguments)` is the command; its exit code is 1 after a mistake that the user has not allowed
by name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from minidl import terminal
from minidl.guides import more
from minidl.speed import findings
from minidl.speed.audit_rules import judge
from minidl.speed.findings import ALLOWED, MISTAKE, QUESTION, RULES, AuditFinding
from minidl.speed.passes import Subject, collect
from minidl.tracefile.format import TraceError
from minidl.tracefile.join import rank_of, told
from minidl.tracefile.loaders import only
from minidl.tracefile.members import traces_in
from minidl.tracefile.ranks import last_start
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import counted, listed, named_ranks, plain

MOST_COLUMNS: Final = 8
"""The ranks that have a column each; of more, those with equal counts are taken together."""


@dataclass
class Audit:
    """All findings. world: the number of ranks of the run, as far as known."""

    ranks: list[int]
    world: int
    subjects: list[Subject]
    findings: list[AuditFinding]

    @property
    def mistakes(self) -> int:
        return self._count(MISTAKE)

    @property
    def questions(self) -> int:
        return self._count(QUESTION)

    def _count(self, level: str) -> int:
        return sum(f.level == level for found in self._each() for f in found)

    def _each(self) -> list[list[AuditFinding]]:
        return [self.findings, *(subject.findings for subject in self.subjects)]

    def allow(self, rules: Iterable[str]) -> None:
        """Allow the findings of these rules, as the user asked. Raises TraceError for an unknown name."""
        for rule in rules:
            if rule not in RULES:
                raise TraceError(f"audit --allow: no finding is called {rule!r}: give one of {listed(RULES, 99)}")
            for found in self._each():
                found[:] = [replace(one, level=ALLOWED, fix="") if one.rule == rule else one for one in found]

    def text(self) -> str:
        """Return the audit as lines for a terminal."""
        lines = [f"{counted(len(self.ranks), 'rank')} of {self.world}, {counted(len(self.subjects), 'DataLoader')}"]
        lines += [line for finding in self.findings for line in finding.lines()]
        for subject in self.subjects:
            lines += ["", *_table(subject)]
            lines += [f"  {line}" for finding in subject.findings for line in finding.lines()]
        found = counted(self.mistakes, "mistake") if self.mistakes else "no mistake"
        asked = f", and {counted(self.questions, 'question')} for you" if self.questions else ""
        help = [f"  {more('ranks')}"] if self.mistakes or self.questions else []
        return "\n".join([*map(plain, lines), "", f"{found} found{asked}", *help])

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain values."""
        return {
            "ranks": self.ranks,
            "world_size": self.world,
            "mistakes": self.mistakes,
            "questions": self.questions,
            "findings": [asdict(finding) for finding in self.findings],
            "dataloaders": [_subject_json(subject) for subject in self.subjects],
        }


def _subject_json(subject: Subject) -> dict[str, Any]:
    told = ("rank", "epoch", "loader", "batches", "samples", "complete")
    passes = [one for rank in subject.ranks for one in subject.passes[rank]]
    return {
        "name": subject.name,
        "dataset_length": subject.length,
        "passes": [{name: getattr(one, name) for name in told} for one in passes],
        "findings": [asdict(finding) for finding in subject.findings],
    }


def _table(subject: Subject) -> list[str]:
    """Return the table of batches/samples by rank and epoch."""
    size = "" if subject.length is None else f" of {counted(subject.length, 'sample')}"
    lines = [f"{subject.name}{size}, sampler {subject.samplers}: batches/samples seen; * = ended early"]
    few = len(subject.ranks) <= MOST_COLUMNS
    lines += ["  epoch " + "".join(f"{f'rank {rank}':>14}" for rank in subject.ranks)] * few
    for epoch, passes in subject.epochs():
        cells = [f"{p.batches}/{p.samples}{'' if p.whole else '*'}" if p else "-" for p in
                 (passes.get(rank) for rank in subject.ranks)]  # fmt: skip
        columns = "".join(f"{cell:>14}" for cell in cells) if few else f"  {_grouped(subject.ranks, cells)}"
        lines.append(f"  {epoch:<6}{columns}")
    return lines


def _grouped(ranks: Sequence[int], cells: Sequence[str]) -> str:
    """The cells of many ranks: "100/800 of 1022 ranks; 99/792 of ranks 3, 5"."""
    counts = Counter(cells).most_common()
    alike = {cell: [rank for rank, own in zip(ranks, cells, strict=True) if own == cell] for cell, _ in counts}
    named = (f"{len(one)} ranks" if len(one) > MOST_COLUMNS else named_ranks(one) for one in alike.values())
    return "; ".join(f"{cell} of {who}" for cell, who in zip(alike, named, strict=True))


def run(arguments: argparse.Namespace) -> int:
    """`minidl audit`: print the report; return 1 if a mistake was found that is not allowed, else 0."""
    with terminal.busy("comparing the ranks"):
        report = audit([only(read_trace(path), arguments.dataloader) for path in traces_in(arguments.traces)])
    report.allow(arguments.allow)
    json.dump(report.to_json(), sys.stdout) if arguments.json else print(report.text(), end="")
    print()
    return 1 if report.mistakes else 0


def audit(traces: Sequence[Trace]) -> Audit:
    """Judge what the ranks saw. Raises TraceError if two traces are of one rank, or one does not say its rank."""
    subjects: dict[tuple[Any, ...], Subject] = {}
    ranks: set[int] = set()
    for trace in traces:
        of = _ranks(trace)
        here = set(of.values()) or {_alone(trace, traces)}
        if ranks & here:
            raise TraceError(
                f"audit: two traces of rank {min(ranks & here)}, one is {trace.path}: give the traces of one run"
            )
        ranks |= here
        for rank in sorted(here):
            collect(trace, [loader for loader, its in of.items() if its == rank], rank, subjects)
    world = max([len(ranks), *_sizes(traces)])
    report = Audit(sorted(ranks), world, list(subjects.values()), list(_about_the_traces(traces, ranks, world)))
    for subject in report.subjects:
        subject.findings += judge(subject, world)
    return report


def _alone(trace: Trace, traces: Sequence[Trace]) -> int:
    rank = rank_of(trace)
    if rank is None and len(traces) > 1:
        raise TraceError(f"audit: {trace.path} does not name its rank: rename its directory to rank0, rank1, ...")
    return rank or 0


def _ranks(trace: Trace) -> dict[int, int]:
    """Return loader -> rank, of the loaders of the ranks' last start that have events: as recorded, if several are."""
    restarts, _ = last_start(trace.lines)
    numbers = [number for number in np.unique(trace.events["loader"]).tolist() if number]
    numbers = [number for number in numbers if trace.loaders.get(number, {}).get("restart", 0) == restarts]
    recorded = {n: rank for n in numbers if type(rank := trace.loaders.get(n, {}).get("rank")) is int}
    if trace.manifest.get("ranks") or len(set(recorded.values())) > 1:
        return recorded
    rank = rank_of(trace)
    return {} if rank is None else dict.fromkeys(numbers, rank)


def _sizes(traces: Iterable[Trace]) -> Iterator[int]:
    for trace in traces:
        yield from told(trace, "world_size")
        yield from (size for line in last_start(trace.lines)[1] if type(size := line.get("world_size")) is int)


def _about_the_traces(traces: Sequence[Trace], ranks: set[int], world: int) -> Iterator[AuditFinding]:
    absent = sorted(set(range(world)) - ranks)
    if absent:
        yield findings.ABSENT.of(world=world, absent=listed(absent))
    for trace in traces:
        restarts, _ = last_start(trace.lines)
        if restarts:
            yield findings.RESTARTED.of(times=counted(restarts, "time"))
        cut = sum(process.whole_from > 0 for process in trace.processes)
        if cut:
            yield findings.OVERWRITTEN.of(name=trace.path.name, processes=counted(cut, "process", "processes"))
