"""A worker asks the job's TCPStore for a key. The rank that should set it never does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a key of the TCPStore that no process sets",
    users_see="The loader hangs, and the stack ends in store.get.",
    fix="Set the key before the workers start; give the store a timeout of seconds.",
    truth=in_sample("nobody-answers"),
    methods=FORK,
)


class Planned(Pictures):
    """One sample asks for the plan of its shard."""

    def __init__(self, options: LabOptions, port: int) -> None:
        super().__init__(options)
        self.port = port

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            store = TCPStore("127.0.0.1", self.port, None, False, timeout=timedelta(hours=1))
            store.get("plan")
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    if options.fixed:
        store.set("plan", "ready")
    for number, _ in enumerate(DataLoader(Planned(options, store.port), **options.loading)):
        step(number)
