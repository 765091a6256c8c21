"""What a transport costs: CPU time of a worker and of the loader for a batch, by its bytes.

Interface: `transport_costs(manifest)` are those that were measured on the recording's machine (`minidl bench transport
--calibrate`), or typical ones; `keep` writes what was measured.

Rules of use: a plan takes a recording's own costs, and adds the difference between two transports. "alone" is fetching
in the loader's process: what collating alone costs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.tracefile.arrays import Floats, Ints

Line = tuple[float, float]
"""ns of CPU time for a batch, and for each byte of it."""

TYPICAL: Final[Mapping[str, tuple[Line, Line]]] = {
    "alone": ((60_000.0, 0.25), (0.0, 0.0)),
    "upstream": ((400_000.0, 0.6), (500_000.0, 0.15)),
    "arena": ((250_000.0, 0.25), (250_000.0, 0.05)),
}
"""By transport: of a worker, and of the loader; of a machine that is not known."""


@dataclass(frozen=True)
class TransportCosts:
    """The costs of each transport. measured: on the recording's machine; otherwise they are typical ones."""

    lines: Mapping[str, tuple[Line, Line]]
    measured: bool = False

    def worker(self, transport: str, sizes: Ints) -> Floats:
        """CPU ns of the worker for batches of these bytes; of the loader's process if it fetches alone."""
        return _on(self.lines[transport][0], sizes)

    def loader(self, transport: str, sizes: Ints) -> Floats:
        """CPU ns of the loader's process for batches of these bytes."""
        return _on(self.lines[transport][1], sizes)


def _on(line: Line, sizes: Ints) -> Floats:
    return np.add(line[0], line[1] * sizes.astype(np.float64))


def place() -> Path:
    """Return the file in which the costs of this machine's transports are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "minidl" / "transport.json"


def keep(lines: Mapping[str, tuple[Line, Line]], host: str) -> Path:
    """Keep the measured costs of this machine; return the file."""
    file = place()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"host": host, "lines": lines}) + "\n")
    return file


def transport_costs(manifest: Mapping[str, Any]) -> TransportCosts:
    """Return the costs for the machine of a recording."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(place().read_text())
        if kept["host"] == manifest.get("host"):
            lines = {name: tuple((float(a), float(b)) for a, b in kept["lines"][name]) for name in TYPICAL}
            return TransportCosts(lines, measured=True)  # type: ignore[arg-type]
    return TransportCosts(TYPICAL)
