"""Limits that root does not meet: a user without capabilities gets torch's batches, or an error with torch's reason."""

from __future__ import annotations

import os
import shutil
import subprocess

import programs
import pytest

PROGRAM = """
import os, resource, sys, warnings, torch, torch.utils.data, minidl

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((64, 1024), float(index))

def batches(make, **options):
    try:
        return [batch[:, 0, 0].tolist() for batch in make(Samples(), 4, num_workers=2, **options)]
    except RuntimeError as error:
        return str(error)

warnings.simplefilter("ignore")
name, value = sys.argv[1:]
if name != "SHM":
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
theirs = batches(torch.utils.data.DataLoader)
reason = theirs.strip().splitlines()[-1].split(": ")[-1] if isinstance(theirs, str) else ""
for transport in ("upstream", "arena"):
    ours = batches(minidl.DataLoader, transport=transport)
    if isinstance(ours, str):
        assert reason and reason in ours, (transport, reason, ours)
    else:
        assert ours == [[float(i) for i in range(n, n + 4)] for n in range(0, 32, 4)], (transport, ours)
print(reason or "all batches")
"""


@pytest.mark.live
@pytest.mark.parametrize(
    ("limit", "value", "theirs"),
    [
        ("MEMLOCK", "0", "all batches"),
        ("NOFILE", "48", "all batches"),
        ("SHM", "700k", "No space left on device (28)"),
    ],
)
def test_a_limit_costs_no_batch_that_torch_delivers(limit: str, value: str, theirs: str) -> None:
    """Memory that may be locked, open files, bytes of /dev/shm, which this process mounts anew."""
    prefix: tuple[str, ...] = ()
    if limit == "SHM":
        mount = f"mount -t tmpfs -o size={value},mode=1777 none /dev/shm && exec"
        prefix = ("unshare", "-m", "sh", "-c", f'{mount} "$@"', "sh")
        if os.geteuid() != 0 or shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
            pytest.skip("needs a mount namespace of its own: root, and unshare")
    done = programs.unprivileged(PROGRAM, limit, value, prefix=prefix)
    assert (done.returncode, done.stdout) == (0, f"{theirs}\n"), done.stderr
