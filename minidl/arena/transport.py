"""The arena as a loader's transport."""

from __future__ import annotations

import functools
from typing import Any

from minidl.arena.arena import Host, Mappings
from minidl.arena.arena_queue import ArenaQueue
from minidl.arena.packets import TaskQueue
from minidl.loader.ports import Ports, Transport


class SlabTransport(Transport):
    """Tensors travel in slabs, which are used again. host: page-locks them for a device."""

    def __init__(self, host: Host | None = None) -> None:
        self.host, self.page_locked = host, host is not None

    def index_queue(self, context: Any) -> TaskQueue:
        return TaskQueue()

    def result_queue(self, context: Any, num_workers: int, done_event: Any, ports: Ports) -> ArenaQueue:
        return ArenaQueue(num_workers, done_event, functools.partial(ports.decider, Mappings), self.host)
