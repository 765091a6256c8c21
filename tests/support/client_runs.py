"""Programs of other frameworks, run on torch's loader and on minidl's, and what their ranks saw.

`CLIENTS` lists them. `run(client, mode, folder)` runs one in processes of its own and returns a `Run`. The modes:

    torch    the program as it is
    run      under `minidl run`: minidl's loader takes the place of torch's
    observe  under `minidl run --observe`: torch's loader, recorded
    direct   the program makes `minidl.DataLoader` itself
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import minidl

PROGRAMS = Path(__file__).parents[1] / "clients" / "programs"
MODES = ("torch", "run", "observe", "direct")
BOUND = 110.0
"""Seconds within which a program has to end."""


@dataclass(frozen=True)
class Client:
    """A program. distribution: the package that it needs. launched: by torchrun, with two ranks."""

    name: str
    distribution: str
    module: str
    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    launched: bool = False
    direct: bool = True

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """The version of the package that is installed."""
        return importlib.metadata.version(self.distribution)


CLIENTS = (
    Client("Lightning", "lightning", "lightning", "lightning_ddp.py", ("ddp",), ranks=2),
    Client("Lightning spawn", "lightning", "lightning", "lightning_ddp.py", ("ddp_spawn",), ranks=2),
    Client("Lightning fork", "lightning", "lightning", "lightning_ddp.py", ("ddp_fork",), ranks=2),
    Client("Accelerate", "accelerate", "accelerate", "accelerate_two.py", ranks=2, launched=True),
    Client("Transformers", "transformers", "transformers", "transformers_trainer.py", direct=False),
    Client("datasets", "datasets", "datasets", "arrow_datasets.py"),
    Client("torchdata", "torchdata", "torchdata", "torchdata_stateful.py", direct=False),
    Client("ignite", "pytorch-ignite", "ignite", "ignite_deterministic.py"),
    Client("skorch", "skorch", "skorch", "skorch_net.py"),
    Client("PyG", "torch-geometric", "torch_geometric", "pyg_graphs.py", direct=False),
    Client("MONAI", "monai", "monai", "monai_loader.py", direct=False),
    Client("webdataset", "webdataset", "webdataset", "webdataset_shards.py", direct=False),
)
"""direct=False: the framework makes the loader itself, of a class that it does not let the user choose."""


@dataclass
class Run:
    """What came of a program. ranks: each rank's epochs and facts, by its number."""

    code: int
    seconds: float
    output: str
    trace: Path | None
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A hash over all batches of all ranks, in their order."""
        batches = [self.ranks[rank]["epochs"] for rank in sorted(self.ranks)]
        return hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:12]

    def samples(self, epoch: int = 0) -> int:
        """How many different samples all ranks together saw in an epoch."""
        return len({i for rank in self.ranks.values() for batch in rank["epochs"][str(epoch)] for i in batch})


def command_of(client: Client, mode: str, trace: Path) -> list[str]:
    """The command line of a program in a mode."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(client.ranks)] if client.launched else []
    under = {"run": ["-m", "minidl", "run"], "observe": ["-m", "minidl", "run", "--observe"]}.get(mode, [])
    traced = [*under, "--trace", str(trace)] if under else []
    return [sys.executable, *launcher, *traced, str(PROGRAMS / client.program), *client.arguments]


def run(client: Client, mode: str, folder: Path) -> Run:
    """Run a program in a mode; whatever it starts has ended when this returns."""
    trace = folder / "trace"
    seen = folder / "seen"
    root = str(Path(minidl.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, str(PROGRAMS)]),
        "SEEN": str(seen),
        "LOADER": "minidl" if mode == "direct" else "torch",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "default",
    }
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command_of(client, mode, trace), env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout=BOUND)
        finally:
            _end_group(process)
    text = (folder / "output.txt").read_text(errors="replace")
    ranks = {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in sorted(seen.glob("rank-*.json"))}
    traced = trace if mode in ("run", "observe") else None
    return Run(code, time.monotonic() - begin, text, traced, ranks)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever the program left in its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
