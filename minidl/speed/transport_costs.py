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

Line = tuple[float, float, float]
"""ns of CPU time for a batch, for each tensor, and for each byte of it."""

TYPICAL: Final[Mapping[str, tuple[Line, Line]]] = {
    "alone": ((10_000.0, 5_000.0, 0.13), (0.0, 0.0, 0.0)),
    "upstream": ((150_000.0, 120_000.0, 0.55), (100_000.0, 100_000.0, 0.06)),
    "arena": ((35_000.0, 8_000.0, 0.15), (35_000.0, 4_000.0, 0.01)),
}
"""By transport: of a worker, and of the loader; of a machine that is not known."""


@dataclass(frozen=True)
class TransportCosts:
    """The costs of each transport. measured: on the recording's machine; otherwise they are typical ones."""

    lines: Mapping[str, tuple[Line, Line]]
    measured: bool = False

    def cpu(self, who: int, transport: str, tensors: float, sizes: Ints) -> Floats:
        """CPU ns for batches of these bytes, of the worker (who=0) or of the loader's process (1).

        transport "alone": the loader's process fetches, and stands in the worker's place.
        """
        batch, tensor, byte = self.lines[transport][who]
        return np.add(batch + tensor * tensors, byte * sizes.astype(np.float64))


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


def _line(batch: float, tensor: float, byte: float) -> Line:
    return float(batch), float(tensor), float(byte)


def transport_costs(manifest: Mapping[str, Any]) -> TransportCosts:
    """Return the costs for the machine of a recording."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(place().read_text())
        if kept["host"] == manifest.get("host"):
            pairs = {name: kept["lines"][name] for name in TYPICAL}
            lines = {name: (_line(*worker), _line(*loader)) for name, (worker, loader) in pairs.items()}
            return TransportCosts(lines, measured=True)
    return TransportCosts(TYPICAL)
