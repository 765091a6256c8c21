"""The line that slow steps were mostly in: stacks that are written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.speed.hot_spots import hot_spot
from minidl.tracefile import events as ev
from minidl.tracefile.spans import SPAN
from minidl.tracefile.stack_samples import CodeLine, StackSamples

ITEM = CodeLine("/home/me/tiles.py", 31, "Tiles.__getitem__", "return load(self.paths[i])")
READ = CodeLine("/home/me/files.py", 7, "load", "return gzip.open(path).read()  # slow")
OTHER = CodeLine("/home/me/files.py", 8, "load", "return check(path)")
GZIP = CodeLine("/usr/lib/python3.11/gzip.py", 301, "GzipFile.read", "")
ZLIB = CodeLine("/usr/lib/python3.11/gzip.py", 507, "_GzipReader.read", "")


def told(*stacks: tuple[CodeLine, ...], times: int = 10, cpu: int = 900, spans: int = 1) -> str:
    """The words for looks that fell into a fetch, `times` at each stack, and 5 that did not."""
    every = [stack for stack in stacks for _ in range(times)]
    known = list(dict.fromkeys([(), *every]))
    at = np.arange(len(every) + 5) * 1000
    rows = np.zeros(spans, SPAN)
    rows["code"], rows["tid"], rows["end"] = ev.FETCH[0], 7, 1000 * len(every) - 1
    columns = [at, 0 * at, 0 * at + 7, np.array([*map(known.index, every), *[0] * 5]), 0 * at + cpu, 0 * at + 1000]
    found = hot_spot(StackSamples(*columns, stacks=tuple(known)), rows)
    return "" if found is None else f"{found.brief(20)} | {found.words()}"


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        (
            [(ITEM, READ, GZIP, ZLIB), (ITEM, READ, GZIP), (ITEM, OTHER)],
            "67% at files.py:7 `return gzip.open(...` | stack samples: 67% of 30 looks at load (files.py:7): "
            "`return gzip.open(path).read()  # slow`, in GzipFile.read; there it had a CPU for 90% of the time",
        ),
        (  # the line that calls both
            [(ITEM, READ), (ITEM, OTHER), (ITEM,)],
            "100% at tiles.py:31 `return load(self....` | stack samples: 100% of 30 looks at "
            "Tiles.__getitem__ (tiles.py:31): `return load(self.paths[i])`; there it had a CPU for 90% of the time",
        ),
        (  # no line, but a function
            [(ITEM._replace(line=number),) for number in range(4)],
            "100% at Tiles.__getitem__ (tiles.py) | stack samples: 100% of 40 looks at Tiles.__getitem__ "
            "(tiles.py); there it had a CPU for 90% of the time",
        ),
        (  # a dataset that a library has
            [(GZIP, ZLIB), (GZIP,), (GZIP,)],
            "100% at gzip.py:301 | stack samples: 100% of 30 looks at GzipFile.read (gzip.py:301); there it "
            "had a CPU for 90% of the time",
        ),
        ([(ITEM,), (), ()], ""),  # mostly in the loader
    ],
)
def test_the_innermost_place_that_most_looks_share(stacks: list[tuple[CodeLine, ...]], words: str) -> None:
    assert told(*stacks) == words


def test_few_looks_tell_nothing() -> None:
    assert told((ITEM,), times=7) == ""
    assert told((ITEM,), times=8)
    assert told((ITEM,), times=8, cpu=-1, spans=0) == ""
