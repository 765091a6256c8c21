"""A worker reads the tiles of a picture with a pool of threads, and the margins of each tile with the same pool."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="cycles of waiting",
    title="tasks of a pool wait for tasks of the same pool",
    users_see="It works for small pictures, and hangs at the first one with as many tiles as the pool has threads.",
    fix="A pool of its own for the inner tasks.",
    truth=in_sample("cycle", "nobody-answers"),
)


class Slides(Pictures):
    """The picture `at` has as many tiles as the pool has threads."""

    pools: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.pools is None:
            outer = ThreadPoolExecutor(2, "tiles")
            self.pools = outer, ThreadPoolExecutor(2, "margins") if self.options.fixed else outer
        tiles = 2 if index == self.options.at else 1
        list(self.pools[0].map(self.tile, range(tiles)))
        return super().__getitem__(index)

    def tile(self, number: int) -> list[Any]:
        inner = [self.pools[1].submit(abs, number + side) for side in range(4)]
        return [one.result() for one in inner]
