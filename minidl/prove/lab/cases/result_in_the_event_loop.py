"""A worker reads from a store with an asyncio loop in a thread; one of its coroutines waits for another by result()."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="cycles of waiting",
    title="a coroutine waits for another coroutine of its own event loop",
    users_see="It hangs at the first object whose size is not known yet.",
    fix="Await the other coroutine.",
    truth=in_sample("cycle", "nobody-answers"),
)


class Objects(Pictures):
    """The size of the object `at` has to be asked for."""

    loop: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="store", daemon=True).start()
        self.call(self.read(index))
        return super().__getitem__(index)

    def call(self, coroutine: Coroutine[Any, Any, int]) -> int:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    async def read(self, index: int) -> int:
        if index != self.options.at:
            return 0
        return await self.size() if self.options.fixed else self.call(self.size())

    async def size(self) -> int:
        await asyncio.sleep(0.001)
        return 1
