"""The scheduler ends the job: SIGTERM to every process of the group. The workers go first; the main process raises."""

from __future__ import annotations

import os
import signal

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a process that dies",
    title="the whole job gets SIGTERM",
    users_see="Killed by signal: Terminated, in several workers at once. The data is suspected.",
    thread="https://github.com/KempnerInstitute/KempnerForge/issues/177",
    fix="No fault of the data: see the scheduler's log for the time limit or the preemption.",
    truth=lambda o: Truth("", -1, -1, (), ("died",)),
    simulated="the program signals its own group",
    ends=True,
    methods=FORK,
)


def main(options: LabOptions) -> None:
    for number, _ in enumerate(DataLoader(Pictures(options), **options.loading)):
        step(number)
        if number == 3 and not options.fixed:
            os.killpg(os.getpgrp(), signal.SIGTERM)
