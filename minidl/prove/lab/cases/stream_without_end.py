"""An IterableDataset reads from a queue until a sentinel comes. The producer has ended without one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Truth, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a stream waits for samples that no process produces any more",
    users_see="Every epoch hangs at its last batch.",
    fix="One sentinel for each worker; or get(timeout=...) and a look at the producer.",
    truth=lambda o: Truth("worker", -1, -1, ("iterate", "sample"), ("nobody-answers", "empty-queue")),
    methods=FORK,
)


class Records(IterableDataset[Any]):
    """What the producer puts."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        while (record := self.records.get()) is not None:
            yield torch.tensor(record)


def produce(records: Any, sentinels: int) -> None:
    """Put all records; then the sentinels."""
    for number in range(64):
        records.put(number)
    for _ in range(sentinels):
        records.put(None)


def main(options: LabOptions) -> None:
    context = multiprocessing.get_context("fork")
    records = context.Queue()
    producer = context.Process(target=produce, args=(records, options.workers if options.fixed else 0))
    producer.start()
    for number, _ in enumerate(DataLoader(Records(records), **options.loading)):
        step(number)
    producer.join()
