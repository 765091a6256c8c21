"""The script takes a lock at its top level, so that it runs once. A spawned worker imports the script."""

from __future__ import annotations

import fcntl
import multiprocessing
import sys

from minidl.prove.lab.case import LabCase, Truth

CASE = LabCase(
    theme="a worker that does not begin",
    title="a spawned worker hangs in the import of the script",
    users_see="With fork all is well. With spawn the first batch never comes, and no line of the dataset runs.",
    thread="https://github.com/pytorch/pytorch/issues/44267",
    fix="Move what has effects below `if __name__ == '__main__':`.",
    truth=lambda o: Truth("", -1, -1, (), ("file-lock", "cycle")),
    methods=("spawn", "forkserver"),
    workers=(1, 2),
)

if __name__ in ("__main__", "__mp_main__") and ("--fixed" not in sys.argv or multiprocessing.parent_process() is None):
    ONLY_ONE = open("train.lock", "w")  # noqa: SIM115
    fcntl.flock(ONLY_ONE, fcntl.LOCK_EX)
