"""Spawned workers import a heavy library, each for itself, before the first sample."""

from __future__ import annotations

import sys
import time

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, step

CASE = LabCase(
    theme="healthy but slow",
    title="spawned workers with a slow import",
    users_see="Ten seconds at the begin of each epoch without a batch.",
    thread="https://github.com/pytorch/pytorch/issues/139792",
    fix="persistent_workers=True; import what is heavy where it is needed; forkserver with a preload.",
    truth=None,
    methods=("spawn", "forkserver"),
    workers=(1, 2),
)

if __name__ == "__mp_main__" and "--fixed" not in sys.argv:
    time.sleep(6)


def main(options: LabOptions) -> None:
    for _ in range(2):
        for number, _ in enumerate(DataLoader(Pictures(options), **options.loading)):
            step(number)
