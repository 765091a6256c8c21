"""The loop keeps its batches. Each tensor in them holds a descriptor, up to the limit."""

from __future__ import annotations

import resource
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import FORK, LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a process that dies",
    title="no file descriptors are left",
    users_see="RuntimeError: received 0 items of ancdata, or OSError: Too many open files.",
    thread="https://github.com/pytorch/pytorch/issues/973",
    fix="ulimit -n 65536; keep copies and not the batches; torch.multiprocessing.set_sharing_strategy('file_system').",
    truth=lambda o: Truth("", -1, -1, (), ("error",)),
    ends=True,
    workers=(1, 2),
    methods=FORK,
)


class Detections(Pictures):
    """Each sample has several tensors."""

    def __getitem__(self, index: int) -> Any:
        return [super(Detections, self).__getitem__(index) for _ in range(16)]


def main(options: LabOptions) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (110, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    kept = []
    for number, batch in enumerate(DataLoader(Detections(options), **options.loading)):
        kept.append([tensor.clone() for tensor in batch] if options.fixed else batch)
        step(number)
