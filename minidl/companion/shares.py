"""Which samples each rank gets, as a small picture of a run (article 2 §0x03 to §3.4.2.2).

Interface: `run(text)` -> Shares; `figure(text)` -> SVG, and `caption(text)` in words. A figure is written
"CLASS length=10 ranks=4 ...": a sampler of `data.distributed`, how many samples and ranks there are, and options of the
sampler (epoch=1, seed=1, shuffle=1, drop_last=1, allow_duplicates=0).

The top row has all places in the order in which they are dealt, each with its sample, in the colour of its rank. Below
are the ranks' shares. A sample that is dealt a second time has a dashed frame; one that no rank gets stands pale.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from minidl.companion.phrases import labels, told
from minidl.data import distributed

CELL, ROW, LEFT = 22, 23, 78
"""Pixels: a place's width, a row's height, and the room for the rows' names."""

PLACES: Final = 12
"""Room for so many, so that figures beside each other have one scale."""

COLOURS: Final = ("#9ecae9", "#fdd49e", "#b7e1a1", "#d9c2ec", "#f4b6b6")
"""Of the ranks: pale, under dark numbers, in both themes."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What a run has dealt. dealt: rank and sample of each place, in order; given: the samples of each rank."""

    length: int
    given: tuple[tuple[int, ...], ...]
    dealt: tuple[tuple[int, int], ...]

    @property
    def left_out(self) -> list[int]:
        """Samples that no rank gets."""
        return sorted({*range(self.length)}.difference(*self.given))

    @property
    def twice(self) -> list[int]:
        """Samples of the places that have one that an earlier place had."""
        return [sample for at, (_, sample) in enumerate(self.dealt) if self.is_repeated(at)]

    def is_repeated(self, place: int) -> bool:
        return self.dealt[place][1] in [sample for _, sample in self.dealt[:place]]


def _options(text: str) -> tuple[str, dict[str, int]]:
    name, *options = text.split()
    return name, {key: int(value) for key, _, value in (option.partition("=") for option in options)}


def run(text: str) -> Shares:
    """Deal the samples, each rank's with a sampler of its own, as in a distributed run."""
    name, options = _options(text)
    length, ranks, epoch = options.pop("length"), options.pop("ranks"), options.pop("epoch", 0)
    given = tuple(_share(name, length, ranks, rank, epoch, options) for rank in range(ranks))
    of_rank = [[(rank, sample) for sample in share] for rank, share in enumerate(given)]
    in_turns = name == "DistributedSampler"  # the samplers of C++ give each rank a block
    dealt = chain(*zip(*of_rank, strict=True)) if in_turns else chain(*of_rank)
    return Shares(length, given, tuple(dealt))


def _share(name: str, length: int, ranks: int, rank: int, epoch: int, options: dict[str, int]) -> tuple[int, ...]:
    sampler: Any
    if name == "DistributedSampler":
        numbers = {key: value if key == "seed" else bool(value) for key, value in options.items()}
        sampler = distributed.DistributedSampler(range(length), ranks, rank, **numbers)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        return tuple(sampler)
    sampler = getattr(distributed, name)(length, ranks, rank, bool(options.get("allow_duplicates", 1)))
    sampler.set_epoch(epoch)
    sampler.reset()
    return tuple(sampler.next(length) or ())


def caption(text: str) -> str:
    """Return what the run was, and which samples were dealt twice or not at all."""
    (name, options), shares = _options(text), run(text)
    words = [f"{options.pop('length')} samples, {options.pop('ranks')} ranks"]
    words += [f"epoch {options.pop('epoch')}"] if "epoch" in options else []
    words += [f"{key}={value if key == 'seed' else bool(value)}" for key, value in options.items()]
    for what, samples in (("given out twice", shares.twice), ("given to no rank", shares.left_out)):
        words += [f"{what}: {', '.join(map(str, samples))}"] if samples else []
    return f"{name}: {'; '.join(words)}"


def figure(text: str) -> str:
    """Return the picture."""
    shares = run(text)
    cells = [
        _cell(place, 0, sample, rank, shares.is_repeated(place)) for place, (rank, sample) in enumerate(shares.dealt)
    ]
    cells += [_cell(len(shares.dealt) + at, 0, sample, None) for at, sample in enumerate(shares.left_out)]
    column = [0] * len(shares.given)
    for place, (rank, sample) in enumerate(shares.dealt):
        cells.append(_cell(column[rank], rank + 1, sample, rank, shares.is_repeated(place)))
        column[rank] += 1
    names = ["all places", *(f"rank {rank}" for rank in range(len(shares.given)))]
    at = (f'x="{LEFT - 6}" y="{ROW * row + 16}" text-anchor="end"' for row in range(len(names)))
    rows = chain(*(labels("t", where, told(name)) for where, name in zip(at, names, strict=True)))
    width, height = LEFT + CELL * max(PLACES, len(shares.dealt) + len(shares.left_out)) + 4, ROW * len(names) + 2
    head = f'<svg class="shares" width="{width}" viewBox="0 0 {width} {height}" role="img">'
    return "".join([head, f"<title>{html.escape(caption(text))}</title>", *rows, *cells, "</svg>"])


def _cell(column: int, row: int, sample: int, rank: int | None, repeated: bool = False) -> str:
    """Return a place with its sample. rank: None for one that no rank gets."""
    x, y = LEFT + CELL * column, ROW * row + 3
    fill = "none" if rank is None else COLOURS[rank % len(COLOURS)]
    frame = ' stroke="#b3261e" stroke-width="1.6" stroke-dasharray="3 2"' if repeated else ""
    word = f'class="{"f0" if rank is None else "k"}" x="{x + CELL / 2 - 1:g}" y="{y + 13}" text-anchor="middle"'
    box = f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="18" rx="3" fill="{fill}"{frame}/>'
    return f"{box}<text {word}>{sample}</text>"
