"""Which ranks recorded into a trace, and what a run lacks that no event can show.

Interface: `lacking(manifest, lines)` says it in sentences. `words_of(directory)` reads manifest and lines of a trace's
directory without its events; a `Trace` has them as `manifest` and `lines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minidl.tracefile.facts import facts_in, read_facts
from minidl.tracefile.files import read_words
from minidl.tracefile.format import SIDE_SUFFIX
from minidl.tracefile.words import listed, named_ranks

Line = Mapping[str, Any]
"""A line of a side file, with "process" added: which process wrote it."""


def words_of(directory: Path) -> tuple[dict[str, Any], list[Line]]:
    """The manifest and the side files' lines of the trace in a directory. Lines that make no sense are left out."""
    files = read_words(directory)
    return facts_in(files.manifest), [
        line for stem, data in sorted(files.side.items()) for line in _lines_of(stem + SIDE_SUFFIX, data)
    ]


def _lines_of(name: str, data: bytes) -> Iterator[Line]:
    for text in data.splitlines():
        try:
            yield {**read_facts(text).said, "process": name}
        except (ValueError, RecursionError):
            continue


def lacking(manifest: Mapping[str, Any], lines: Iterable[Line]) -> list[str]:
    """What the run lacks: iterators at all, ranks of the process group, their ends; and why, and the remedy.

    Nothing is said of the other ranks if the manifest has a rank (then each rank has a trace of its own), or if the
    trace joins several, which says it by itself.
    """
    lines = list(lines)
    found = [*_without_iterators(lines)]
    if manifest.get("rank") is None and not manifest.get("ranks"):
        found += [*_without_ranks(lines), *_without_ends(lines)]
    return found


def _without_iterators(lines: list[Line]) -> Iterator[str]:
    over = (line for line in lines if line.get("kind") == "passed over")
    passed = [f"{line.get('iterator')} iterates {line.get('why')}" for line in over]
    told = "; ".join(dict.fromkeys(passed))
    nothing = "neither the program nor a Python process that it started made an iterator of a DataLoader"
    if not any(line.get("kind") == "loader" for line in lines):
        yield f"no iterator was recorded: {told or nothing}"
    elif told:
        yield f"not recorded: {told}"


def last_start(lines: Iterable[Line]) -> tuple[int, list[Line]]:
    """How often torchrun started the ranks anew, and the lines of the last start that have a rank."""
    places = [line for line in lines if type(line.get("rank")) is int]
    restarts = max((line["restart"] for line in places if type(line.get("restart")) is int), default=0)
    return restarts, [line for line in places if line.get("restart", 0) == restarts]


def _without_ranks(lines: list[Line]) -> Iterator[str]:
    _, places = last_start(lines)
    ranks = {line["process"]: line["rank"] for line in places}
    sizes = (line["world_size"] for line in places if type(line.get("world_size")) is int)
    size = max(sizes, default=0)
    loaders = {line["process"] for line in lines if line.get("kind") == "loader"}
    recorded = {rank for process, rank in ranks.items() if process in loaders}
    missing = sorted(set(range(size)) - recorded)
    if size < 2 or not missing:
        return
    text = f"the process group had {size} ranks, {len(recorded)} recorded; missing: {listed(missing)}"
    idle = [rank for rank in missing if rank in ranks.values()]
    absent = [rank for rank in missing if rank not in idle]
    if idle:
        text += f". {named_ranks(idle)} joined the group and made no iterator of a DataLoader"
    if absent:
        text += (
            f". {named_ranks(absent)} left nothing: its interpreter did not read PYTHONPATH (python -I, -E or -S, or a "
            "launcher that drops it), or it ran on another machine, or it ended too early, and it used torch's own "
            "DataLoader. Start each rank under minidl run: torchrun ... -m minidl run SCRIPT"
        )
    yield text


def _without_ends(lines: list[Line]) -> Iterator[str]:
    """Ranks that wrote no end, though the run's own process did: they did not end by themselves."""
    if not any(line.get("kind") == "program_end" for line in lines):
        return  # the program runs, or was killed as a whole, or is of a minidl that wrote none
    over = {line["process"] for line in lines if line.get("kind") in ("program_end", "trace_end")}
    if not any(line.get("kind") == "trace_end" for line in lines):
        return
    made = {line["process"] for line in lines if line.get("kind") == "loader"}
    ranks = {line["rank"]: line["process"] for line in last_start(lines)[1]}
    pids = {line["process"]: line["pid"] for line in lines if type(line.get("pid")) is int}
    killed = [rank for rank, process in sorted(ranks.items()) if process in made - over]
    if killed:
        named = named_ranks([f"{rank} (pid {pids.get(ranks[rank], '?')})" for rank in killed])
        yield (
            f"{named} wrote no end: killed (a launcher kills all ranks when one fails), ended by os._exit, or still "
            "running; the trace has what came before"
        )
