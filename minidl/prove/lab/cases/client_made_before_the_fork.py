"""The program runs an event loop in a thread, as fsspec and aiohttp do. A worker submits to it: no thread answers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="fork in a program with threads",
    title="an asynchronous client was made before the fork",
    users_see="Reading from the object store works in the main process, and hangs in workers.",
    thread="https://github.com/fsspec/gcsfs/issues/379",
    fix="Make the client in the worker, or use multiprocessing_context='forkserver'.",
    truth=lambda o: Truth("worker", 0, 0, ("sample",), ("thread-missing-after-fork",)),
    methods=FORK,
)


class Client:
    """Gets objects, by an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="io").start()

    async def fetch(self, index: int) -> float:
        """The object of a sample."""
        await asyncio.sleep(0.001)
        return float(index)

    def get(self, index: int) -> float:
        """The same, for callers that do not await."""
        return asyncio.run_coroutine_threadsafe(self.fetch(index), self.loop).result()


class Objects(Pictures):
    """Each sample is an object of a store."""

    def __init__(self, options: LabOptions) -> None:
        super().__init__(options)
        self.client: Client | None = None if options.fixed else Client()

    def __getitem__(self, index: int) -> Any:
        self.client = self.client or Client()
        return super().__getitem__(index) * self.client.get(index)


def main(options: LabOptions) -> None:
    objects = Objects(options)
    if not options.fixed:
        print("a first look:", float(objects[0].sum()), flush=True)
    for number, _ in enumerate(DataLoader(objects, **options.loading)):
        step(number)
