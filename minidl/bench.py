"""What the samplers cost at a size where it shows, beside torch's.

Interface: `bench_samplers(n)` measures every case for torch and for minidl and returns one row for each case.
Rules of use: Linux only. Each measurement runs in a fresh process, one after another, so that one's memory is not
another's; an idle machine gives steadier seconds. At n = 20 million it takes about a minute and up to 2 GiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.utils.data

import minidl.distributed
import minidl.sampler

_Libraries = dict[str, Any]
_DISTRIBUTED: _Libraries = {"torch": torch.utils.data, "minidl": minidl.distributed}
_SAMPLER: _Libraries = {"torch": torch.utils.data, "minidl": minidl.sampler}
_CASES: dict[str, Callable[[str, range], Iterable[int]]] = {
    "RandomSampler": lambda library, data: _SAMPLER[library].RandomSampler(data),
    "SubsetRandomSampler": lambda library, data: _SAMPLER[library].SubsetRandomSampler(data),
    "DistributedSampler, one rank of 8": lambda library, data: _DISTRIBUTED[library].DistributedSampler(data, 8, 3),
    "DistributedSampler, one rank of 8, not shuffled": lambda library, data: (
        _DISTRIBUTED[library].DistributedSampler(data, 8, 3, shuffle=False)
    ),
}


def bench_samplers(n: int = 20_000_000) -> list[dict[str, Any]]:
    """One epoch of each sampler over `n` indices, torch's and ours.

    A row holds `sampler`, `n`, seconds until the first index and until the last (`torch_first_s`, `torch_s`,
    `minidl_first_s`, `minidl_s`), growth of the process's peak memory (`torch_mib`, `minidl_mib`), and the ratios
    `speedup` (torch's seconds / ours) and `memory_ratio` (our memory / torch's).
    RuntimeError with the process's own message when a measurement fails.
    """
    return [_row(case, n) for case in _CASES]


def _row(case: str, n: int) -> dict[str, Any]:
    torchs, ours = _measured_afresh("torch", case, n), _measured_afresh("minidl", case, n)
    row: dict[str, Any] = {"sampler": case, "n": n}
    row |= {f"torch_{key}": value for key, value in torchs.items()}
    row |= {f"minidl_{key}": value for key, value in ours.items()}
    return row | {"speedup": torchs["s"] / ours["s"], "memory_ratio": ours["mib"] / max(torchs["mib"], 1.0)}


def _measured_afresh(library: str, case: str, n: int) -> dict[str, float]:
    command = [sys.executable, "-m", "minidl.bench", library, case, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"bench: {case} of {library} failed with exit code {done.returncode}:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _measure(library: str, case: str, n: int) -> dict[str, float]:
    sampler = _CASES[case](library, range(n))
    before, start = _peak_mib(), time.perf_counter()
    indices = iter(sampler)
    next(indices)
    first = time.perf_counter()
    deque(indices, maxlen=0)
    return {"first_s": first - start, "s": time.perf_counter() - start, "mib": _peak_mib() - before}


def _peak_mib() -> float:
    # Not getrusage: its peak is inherited through exec, so a large parent would hide what happens here.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
