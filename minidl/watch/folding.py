"""Folds the files of workers that have ended, beside the run: see `tracefile.folded` for the rule.

Interface: `ended_workers(directory, names)`, `runs(stem)`, `fold_gently(directory, stems, most_bytes)`;
`main(directory, most_bytes)` is a process of its own that folds what is due, for a trace without a watchdog
(`record.watchdog` starts it).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from minidl.hang.life import life
from minidl.tracefile.folded import due, fold
from minidl.tracefile.format import SIDE_SUFFIX, parts_of

WORKER = b'"role": "worker"'


def ended_workers(directory: Path, names: Iterable[str]) -> list[str]:
    """The stems of workers that have ended, and whose files are there. names: of the files of the trace."""
    stems = [name.removesuffix(SIDE_SUFFIX) for name in names if name.endswith(SIDE_SUFFIX)]
    return [stem for stem in stems if not runs(stem) and _is_worker(directory / (stem + SIDE_SUFFIX))]


def runs(stem: str) -> bool:
    """Whether the process that has given a file this name still runs."""
    return life(*parts_of(stem)).there


def _is_worker(side: Path) -> bool:
    try:
        return WORKER in side.read_bytes()
    except OSError:
        return False


def fold_gently(directory: Path, stems: list[str], most_bytes: int | None) -> None:
    """Fold with a lower priority than the run. If that fails, the files stay as they are."""
    os.nice(5)
    with contextlib.suppress(OSError):  # another process folds, or the disk is full
        fold(directory, stems, most_bytes)


def main(directory: str, most_bytes: int | None) -> None:
    """Fold the due files of a trace."""
    place = Path(directory)
    names = os.listdir(place)
    running = sum(name.endswith(SIDE_SUFFIX) and runs(name.removesuffix(SIDE_SUFFIX)) for name in names)
    if stems := due(ended_workers(place, names), running):
        fold_gently(place, stems, most_bytes)
