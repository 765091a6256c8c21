"""Workers ask a cache process by a queue and wait for its answer by another. The cache process has died."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a worker waits for the answer of a process that has died",
    users_see="The loader hangs, and the log of the cache process ends with an out-of-memory kill.",
    thread="https://github.com/python/cpython/issues/88304",
    fix="get(timeout=...), and check that the server lives each time it passes.",
    truth=in_sample("nobody-answers", "empty-queue"),
    simulated="the cache process kills itself",
    methods=FORK,
)


def serve(questions: Any, answers: Any, last: int) -> None:
    """The cache: answers until it is killed."""
    while True:
        index = questions.get()
        if index == last:
            os.kill(os.getpid(), signal.SIGKILL)
        answers.put(index)


class Cached(Pictures):
    """Every eighth sample comes from the cache process."""

    def __init__(self, options: LabOptions, questions: Any, answers: Any) -> None:
        super().__init__(options)
        self.questions, self.answers = questions, answers

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            self.questions.put(index)
            try:
                self.answers.get(timeout=2 if self.options.fixed else None)
            except queue.Empty:
                return torch.zeros(3, 16, 16)
        return super().__getitem__(index)


def main(options: LabOptions) -> None:
    context = multiprocessing.get_context("fork")
    questions, answers = context.Queue(), context.Queue()
    server = context.Process(target=serve, args=(questions, answers, options.at), daemon=True)
    server.start()
    for number, _ in enumerate(DataLoader(Cached(options, questions, answers), **options.loading)):
        step(number)
    server.kill()
