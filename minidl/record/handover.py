"""Hand a run on to the interpreters that its program starts, through the environment.

Interface: while `handed_on(settings)` is open, a Python process that the program starts (a rank that a framework
relaunches, a process of multiprocessing's spawn or forkserver) finds the `Settings` in MINIDL_RUN and the folder
`startup` in front of PYTHONPATH, whose `sitecustomize` calls `run.take_over` when the process imports torch.

It cannot reach an interpreter that reads no environment (`python -I`, `-E`), that runs no site (`-S`), or whose
launcher drops PYTHONPATH; `tracefile.ranks` says which ranks are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minidl.process_stat import boot_id
from minidl.record.recorder import TraceConfig
from minidl.tracefile.format import MANIFEST, TraceError

VARIABLE = "MINIDL_RUN"
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Settings:
    """How a run records. observe: torch's own loader stays; others: the options of `minidl run`."""

    config: TraceConfig
    observe: bool = False
    align_clocks: bool = False
    harden: bool = False
    auto: bool = False

    def to_text(self) -> str:
        """The value of MINIDL_RUN. package: where minidl is imported from; boot_id: whose clock the trace is on."""
        return json.dumps(asdict(self) | {"package": str(PACKAGE.parent), "boot_id": boot_id()})

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """The settings that a run has handed to this process. Raises TraceError if its trace is not to be reached."""
        config = TraceConfig(**given["config"])
        remedy = "start each rank under `minidl run` (torchrun ... -m minidl run SCRIPT), and join the traces"
        if given["boot_id"] != boot_id():
            raise TraceError(f"the run that started this process is on another machine, with another clock: {remedy}")
        if not (Path(config.directory) / MANIFEST).is_file():
            raise TraceError(f"the run's trace {config.directory} does not exist: {remedy}")
        return cls(config, given["observe"], given["align_clocks"], given["harden"], given["auto"])


@contextlib.contextmanager
def handed_on(settings: Settings) -> Iterator[None]:
    """While this is open, Python processes that this one starts record into the same trace."""
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    startup = str(PACKAGE / "startup")
    others = [place for place in (before["PYTHONPATH"] or "").split(os.pathsep) if place not in ("", startup)]
    os.environ |= {VARIABLE: settings.to_text(), "PYTHONPATH": os.pathsep.join([startup, *others])}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
