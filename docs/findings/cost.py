"""Measure what the patches cost while nothing goes wrong: `python cost.py [PATCH ...]`; "hardened": `minidl.harden()`.

Runs of 2,000 batches on two workers, in pairs without and with a patch, of which the order alternates. A line has the
processor time of a batch in all processes: without, the median of the differences, and the smallest and the largest.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BATCHES, PAIRS = 2_000, 3
ON_THE_WAY = ("torn-result", "unreadable-batch", "done-event-lock", "unwritable-task", "all", "hardened")
"""Patches with a line that runs for each batch; the others have none."""

EPOCH = f"""
import os, torch
from torch.utils.data import DataLoader

class Small(list):
    def __getitem__(self, index):
        return {{name: torch.zeros(64) for name in "abcdefgh"}}

loader, began = DataLoader(Small(range({BATCHES})), num_workers=2, batch_size=None), sum(os.times()[:4])
for _ in loader:
    pass
print((sum(os.times()[:4]) - began) / {BATCHES} * 1e6)
"""


def spent(patch: str) -> float:
    """Microseconds of processor time a batch, in a fresh process with this patch."""
    harden = "import minidl; minidl.harden()\n" if patch == "hardened" else ""
    patches = "none" if patch == "hardened" else patch
    command = [sys.executable, str(HERE / "patched.py"), patches, "-c", harden + EPOCH]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(patches: list[str]) -> None:
    """Print a line for each patch."""
    known = {"hardened", "all", *(path.parent.name for path in HERE.glob("*/fix.patch"))}
    if unknown := sorted(set(patches) - known):
        sys.exit(f"cost.py: {', '.join(unknown)}: no such patch; give none, or some of {', '.join(sorted(known))}")
    for patch in patches or ON_THE_WAY:
        without, differences = [], []
        for number in range(PAIRS):
            order = ("none", patch) if number % 2 == 0 else (patch, "none")
            took = {way: spent(way) for way in order}
            without.append(took["none"])
            differences.append(took[patch] - took["none"])
        middle, low, high = statistics.median(differences), min(differences), max(differences)
        more = f"{middle:+.0f} ({low:+.0f} to {high:+.0f})"
        print(f"{patch:<18} {statistics.median(without):6.0f} us, {more}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
