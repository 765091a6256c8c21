"""Which iterators belong to one DataLoader, and what it is called: a program makes a new iterator in each epoch.

Interface: `dataloaders(trace)` lists them; `only(trace, name)` is the trace of one of them alone; `first_epochs(trace)`
and `in_words(trace, number)` count the epochs of a DataLoader, whichever iterator ran them.

A DataLoader is named by its dataset, its sampler and the line of code that made it. A trace of a minidl that recorded
no such line, or of torch's loader without `minidl run`, has the first two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.tracefile.events import EPOCH
from minidl.tracefile.format import TraceError
from minidl.tracefile.words import plain

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


@dataclass(frozen=True, slots=True)
class NamedLoader:
    """One DataLoader. iterators: their numbers, in the order of their epochs. name: no two of a rank have the same.

    place: its name as far as others share it, which the same line of the program made.
    """

    name: str
    place: str
    rank: int
    iterators: tuple[int, ...]


def dataloaders(trace: Trace) -> list[NamedLoader]:
    """Return the DataLoaders of a trace, by their first iterator; an iterator that says nothing is one of its own."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for number, params in sorted(trace.loaders.items()):
        known = params.get("dataloader") or -number  # 0: the number that its iterators share is not known
        found.setdefault((_rank(params), known, name_of(params)), []).append(number)
    same = Counter((rank, name) for rank, _, name in found)
    out, seen = [], Counter[tuple[int, str]]()
    for (rank, _, name), numbers in found.items():
        seen[rank, name] += 1
        several = f" #{seen[rank, name]}" if same[rank, name] > 1 else ""
        out.append(NamedLoader(name + several, name, rank, tuple(numbers)))
    return out


def only(trace: Trace, name: str | None) -> Trace:
    """Return the trace with the events of one DataLoader: of one whose name holds `name`, in every rank.

    The trace itself if the name is None. Time 0 and the numbers of epochs stay those of the whole trace.

    Raises TraceError if there is none, or several.
    """
    if name is None:
        return trace
    there = dataloaders(trace)
    exact = [one for one in there if one.name == name]
    found = exact or [one for one in there if name in one.name]
    if len({one.name for one in found}) != 1:
        known = "; ".join(dict.fromkeys(one.name for one in there)) or "none that says its name"
        raise TraceError(
            f"{trace.path}: {'several DataLoaders are' if found else 'no DataLoader is'} {name!r}: {known}"
        )
    numbers = [number for one in found for number in one.iterators]
    out = trace.cut(np.isin(trace.events["loader"], [0, *numbers]))
    out.loaders = {number: trace.loaders[number] for number in numbers}
    return out


def in_slabs(trace: Trace) -> list[int]:
    """Return the iterators whose batches travel in slabs (transport "arena")."""
    return [number for number, params in sorted(trace.loaders.items()) if params.get("transport") == "arena"]


def first_epochs(trace: Trace) -> dict[int, int]:
    """Return for each iterator the number of its first epoch, from 0 among all of its DataLoader's.

    An iterator whose DataLoader is not known is missing: its epochs are its own.
    """
    return trace.once("first epochs", lambda: _first_epochs(trace))


def _first_epochs(trace: Trace) -> dict[int, int]:
    known = (one.iterators for one in dataloaders(trace))
    firsts = {number: first for numbers in known for number, first in numbered_epochs(trace, numbers).items()}
    return {number: first for number, first in firsts.items() if trace.loaders[number].get("dataloader")}


def numbered_epochs(trace: Trace, iterators: Sequence[int]) -> dict[int, int]:
    """Return for each of some iterators, which follow each other, the number of its first epoch among all of theirs."""
    begun = Counter(trace.events["loader"][trace.events["code"] == EPOCH[0]].tolist())
    firsts = accumulate((max(1, begun[number]) for number in iterators), initial=0)
    return dict(zip(iterators, firsts, strict=False))


def in_words(trace: Trace, number: int) -> str:
    """Return which iterator it is, with its DataLoader if there are several: "iterator 3 (Photos, train.py:12)"."""
    named = [one for one in dataloaders(trace) if trace.loaders[one.iterators[0]].get("dataloader")]
    mine = [one.name for one in named if number in one.iterators and len({other.name for other in named}) > 1]
    return f"iterator {number}" + "".join(f" ({name})" for name in mine)


def _rank(params: dict[str, Any]) -> int:
    rank = params.get("rank")
    return rank if type(rank) is int else -1


def name_of(params: dict[str, Any]) -> str:
    """Return what an iterator's DataLoader is called: "Photos by RandomSampler, train.py:12", or what is known.

    Escaped, since it is printed.
    """
    dataset, sampler, made_at = (plain(str(params.get(key) or "")) for key in ("dataset", "sampler", "made_at"))
    what = f"{dataset} by {sampler}" if dataset and sampler else dataset or "DataLoader"
    return f"{what}, {PurePath(made_at).name}" if made_at else what
