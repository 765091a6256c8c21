"""The machine that is measured on, and its load from other processes meanwhile."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import minidl

BUSY = 0.1
"""Share of the machine's cores that others may use while the absolute figures are still trusted."""


def machine() -> dict[str, str]:
    """CPU model, cores, kernel and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "minidl": minidl.__version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


@dataclass(frozen=True)
class Load:
    """The machine's load.

    before, after: load averages of the last minute. others: cores that other processes used on average, those of the
    hypervisor's other guests included. cores: of the machine.
    """

    before: float
    after: float
    others: float
    cores: int

    @property
    def busy(self) -> bool:
        return self.others > BUSY * self.cores

    def text(self) -> str:
        """Return the load as one line."""
        verdict = "busy machine: trust the ratios only" if self.busy else "a quiet machine"
        others = f"meanwhile other processes used {self.others:.2f} of {self.cores} cores"
        return f"{verdict}: load average {self.before:.2f} before, {self.after:.2f} after; {others}"

    def facts(self) -> dict[str, Any]:
        """Return the load for JSON."""
        return {**asdict(self), "busy": self.busy}


class Watch:
    """Watches the machine's load from its creation."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._start = time.monotonic(), _used_by_all(), _used_by_us()

    def stop(self) -> Load:
        """Return the load; call it after each process that was started since has been waited for."""
        start, by_all, by_us = self._start
        elapsed = time.monotonic() - start
        others = (_used_by_all() - by_all - (_used_by_us() - by_us)) / elapsed
        return Load(self._load, os.getloadavg()[0], max(0.0, others), os.cpu_count() or 1)


def _used_by_all() -> float:
    """Return the CPU seconds of all cores so far, with those that a hypervisor gave to other guests."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _used_by_us() -> float:
    """Return the CPU seconds of this process and of its descendants that have been waited for."""
    return sum(os.times()[:4])
