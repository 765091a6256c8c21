"""Programs of other frameworks, run on torch's loader and on minidl's, and what their ranks saw.

`CLIENTS` lists them. `run(client, mode, folder)` runs one in processes of its own and returns a `Run`. The modes:

    torch    the program as it is
    run      under `minidl run`: minidl's loader takes the place of torch's
    observe  under `minidl run --observe`: torch's loader, recorded
    direct   the program makes `minidl.DataLoader` itself
    harden   the program has called `minidl.harden()`: torch's loader, guarded
    run arena, observe arena   the same with the transport "arena", and every tensor in a slab

`row(client, runs)` is the client's line in the guide's table. `python tests/support/client_runs.py` writes the table;
with names of clients, their lines. The line of a client that is not installed stays. With `--transport arena`, it runs
them all with slabs, compares their hashes with the table's, and exits with 1 if one differs; with `--harden`, it runs
each in pairs without and with the guards of `minidl.harden()`, compares their batches, and prints what the guards cost.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import minidl
from minidl.check import check
from minidl.prove.sessions import running
from minidl.tracefile.members import traces_in
from minidl.tracefile.reader import Trace, read_trace

PROGRAMS = Path(__file__).parents[1] / "clients" / "programs"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "frameworks.md"
MODES = ("torch", "direct", "run", "observe", "observe arena")
TORCHRUN = ("--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"),
)  # its --cpu starts one process; "multi" is what counts, and the program chooses the CPU
BOUND = 200.0
"""Seconds within which a program has to end."""


@dataclass(frozen=True)
class Client:
    """A program. distribution, module: of the package that it needs. launcher: the command in front of it, "-m" for a
    module. modes: besides torch's own. like: the client whose run on torch's loader is also this one's, "" = its own.
    extra: of this package, which installs what it needs.
    """

    name: str
    distribution: str
    module: str
    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    launcher: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("direct", "run", "observe")
    like: str = ""
    extra: str = "clients"

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):  # ValueError: None stands in its place in sys.modules
            return False

    @property
    def version(self) -> str:
        """The version of the package that is installed."""
        return importlib.metadata.version(self.distribution)

    @property
    def baseline(self) -> Client:
        """The client whose run on torch's loader this one is compared with."""
        return next((client for client in CLIENTS if client.name == self.like), self)


def module_of(program: str) -> Any:
    """A program as a module: what is planted in it, or asked."""
    spec = importlib.util.spec_from_file_location(program.removesuffix(".py"), PROGRAMS / program)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(PROGRAMS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(PROGRAMS))
    return module


def require(client: Client) -> None:
    """Skip the test if the client's package is not there."""
    if not client.installed:
        pytest.skip(f"{client.distribution} is not installed: pip install -e '.[{client.extra}]'")


FOREIGN = ("run", "observe")
"""Modes of a client whose framework makes the loader itself, of a class that it does not let the user choose.

`observe` is left out where the framework imports for seconds and its iterator is one that others below show.
"""

SEVERAL_RANKS = (
    Client("Lightning ddp", "lightning", "lightning", "lightning_ddp.py", ("ddp",), ranks=2),
    *(
        Client(
            f"Lightning {how}", "lightning", "lightning", "lightning_ddp.py", (how,), ranks=2,
            modes=("run",), like="Lightning ddp",
        )
        for how in ("ddp_spawn", "ddp_fork", "ddp_notebook")
    ),
    Client(
        "Accelerate", "accelerate", "accelerate", "accelerate_two.py", ranks=2,
        launcher=ACCELERATE,
    ),
    Client(
        "ignite", "pytorch-ignite", "ignite", "ignite_deterministic.py", ranks=2,
        launcher=("-m", "torch.distributed.run", *TORCHRUN),
    ),
)  # fmt: skip

ONE_PROCESS = (
    Client("Transformers", "transformers", "transformers", "transformers_trainer.py", modes=("run",)),
    Client("datasets", "datasets", "datasets", "arrow_datasets.py"),
    Client("torchdata", "torchdata", "torchdata", "torchdata_stateful.py", modes=FOREIGN),
    Client("skorch", "skorch", "skorch", "skorch_net.py", modes=("direct", "run")),
    Client("PyG", "torch-geometric", "torch_geometric", "pyg_graphs.py", modes=FOREIGN),
    Client("MONAI", "monai", "monai", "monai_loader.py", modes=("run",)),
    Client("webdataset", "webdataset", "webdataset", "webdataset_shards.py", modes=FOREIGN),
)

MORE = (
    Client(
        "Transformers resumed", "transformers", "transformers", "transformers_resume.py", ranks=2,
        launcher=("-m", "torch.distributed.run", *TORCHRUN), modes=FOREIGN,
    ),
    Client("fastai", "fastai", "fastai", "fastai_learner.py", modes=FOREIGN, extra="clients-more"),
    Client("timm", "timm", "timm", "timm_loaders.py", modes=FOREIGN, extra="clients-more"),
    Client(
        "streaming", "mosaicml-streaming", "streaming", "mosaicml_streaming.py", modes=FOREIGN, extra="clients-more",
    ),
)  # fmt: skip
"""What the tests leave out unless they are asked for it."""

CLIENTS = SEVERAL_RANKS + ONE_PROCESS + MORE


@dataclass
class Run:
    """What came of a program. ranks: each rank's epochs and facts, by its number."""

    code: int
    output: str
    trace: Path | None
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A hash over all batches of all ranks, in their order."""
        batches = [self.ranks[rank]["epochs"] for rank in sorted(self.ranks)]
        return hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:12]

    @property
    def spent(self) -> float:
        """Processor seconds of all ranks and their workers, imports included: of a busy machine too."""
        return float(sum(rank["spent"] for rank in self.ranks.values()))

    def samples(self, epoch: int = 0) -> int:
        """How many different samples all ranks together saw in an epoch."""
        return len({i for rank in self.ranks.values() for batch in rank["epochs"][str(epoch)] for i in batch})


def command_of(client: Client, mode: str, trace: Path) -> list[str]:
    """The command line of a program in a mode, as its user would write it."""
    program = [*client.launcher, str(PROGRAMS / client.program), *client.arguments]
    by_slabs = ["--transport", "arena"]
    under = {
        "run": [], "observe": ["--observe"], "run arena": by_slabs, "observe arena": ["--observe", *by_slabs],
    }.get(mode)  # fmt: skip
    if under is not None:
        separator = [] if client.launcher[:1] == ("-m",) else ["--"]
        return [sys.executable, "-m", "minidl", "run", *under, "--trace", str(trace), *separator, *program]
    by_python = client.launcher[:1] in ((), ("-m",))
    return [*([sys.executable] if by_python else []), *program]


def run(client: Client, mode: str, folder: Path) -> Run:
    """Run a program in a mode; whatever it starts has ended when this returns."""
    trace, seen = folder / "trace", folder / "seen"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path(minidl.__file__).parents[1]), str(PROGRAMS)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SEEN": str(seen),
        "LOADER": {"direct": "minidl", "mini": "mini", "harden": "hardened"}.get(mode, "torch"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "default",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with running(command_of(client, mode, trace), folder, **environment) as program:
        assert program.wait_for_end(BOUND), f"{client} {mode} does not end: {program.errors()[-3000:]}"
        code, output = program.process.returncode, program.said() + program.errors()
    ranks = {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in sorted(seen.glob("rank-*.json"))}
    traced = trace if mode.startswith(("run", "observe")) else None
    return Run(code, output, traced, ranks)


# --- The guide's table -----------------------------------------------------------------------------------------------
HEAD = f"""\
| client | version | ranks | samples an epoch | hash of all batches | `minidl.DataLoader` | `minidl run` | `--observe` \
| with slabs |
{"|---" * 9}|"""


def row(client: Client, runs: Mapping[str, Run]) -> str:
    """The client's line in the table. runs: by mode."""
    for mode, done in runs.items():
        assert done.code == 0, f"{client} {mode}: {done.output[-3000:]}"
    torchs = runs["torch"]
    seen = f"{torchs.samples()} | `{torchs.digest}`"
    against = torchs.spent if client.baseline is client else None  # another strategy's time says nothing
    cells = " | ".join(_cell(torchs, runs[mode], against) if mode in runs else "" for mode in MODES[1:])
    return f"| {client.name} | {client.version} | {len(torchs.ranks)} | {seen} | {cells} |"


def _cell(torchs: Run, ours: Run, against: float | None) -> str:
    """Whether the samples are the same, whether all ranks are traced, what the checker says, and the time."""
    words = ["same" if ours.digest == torchs.digest else f"`{ours.digest}`"]
    if ours.trace is not None:
        traces = [read_trace(path) for path in traces_in([ours.trace])]
        ranks = {rank for trace in traces for rank in ranks_of(trace)}
        words.append("traced" if ranks == ours.ranks.keys() else f"traced: {sorted(ranks)}")
        words.append("checked" if not any(map(check, traces)) else "breaks rules")
    return ", ".join(words) + ("" if against is None else f"; {ours.spent / against:.2f}")


def ranks_of(trace: Trace) -> set[int]:
    """The ranks that yielded batches in a trace; a program without a process group is rank 0."""
    processes = set(trace.select("yield")["process"].tolist())
    return {max(0, trace.processes[process].rank) for process in processes}


def without_time(line: str) -> str:
    """A line of the table, without its times."""
    return re.sub("; [0-9.]+ ", " ", line)


def in_readme() -> list[str]:
    """The table's lines as they stand in the guide."""
    _, _, rest = GUIDE.read_text().partition("<!-- clients -->\n")
    return rest.partition("<!-- /clients -->")[0].strip().splitlines()


def table(names: Collection[str] = ()) -> Iterator[str]:
    """The table's lines; each needs the client's runs. names: of the clients to run, () = all."""
    yield from HEAD.splitlines()
    stays = {line.split(" | ")[0].removeprefix("| "): line for line in in_readme()}
    torchs: dict[Client, Run] = {}
    with tempfile.TemporaryDirectory() as place:
        for client in CLIENTS:
            if not client.installed or (names and client.name not in names):
                yield stays.get(client.name, f"| {client.name} |")
                continue
            home = Path(place) / str(client)
            if client.baseline not in torchs:
                torchs[client.baseline] = run(client.baseline, "torch", home / "torch")
            modes = [*client.modes, *(["observe arena"] if "observe" in client.modes else [])]
            runs = {mode: run(client, mode, home / mode) for mode in modes}
            yield row(client, {"torch": torchs[client.baseline]} | runs)


def with_slabs() -> Iterator[str]:
    """A line for each run of a client with the transport "arena"."""
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in in_readme()[2:]}
    with tempfile.TemporaryDirectory() as place:
        for client in CLIENTS:
            for mode in (f"{mode} arena" for mode in client.modes if mode != "direct"):
                done = run(client, mode, Path(place) / f"{client}-{mode}")
                assert done.code == 0, f"{client} {mode}: {done.output[-3000:]}"
                assert done.trace is not None
                sent = sum(len(read_trace(path).select("slab_send")) for path in traces_in([done.trace]))
                same = "same" if f"`{done.digest}`" == cells[client.name][4] and sent else "OTHER"
                facts = _cell(done, done, None).removeprefix("same, ")
                yield f"{same}: {client.name} {client.version}, {mode}, {sent} slabs sent, {facts}"


def with_guards(pairs: int = 3) -> Iterator[str]:
    """A line for each client on torch's loader: its processor time with guards, by that without, of pairs of runs."""
    with tempfile.TemporaryDirectory() as place:
        for client in dict.fromkeys(client.baseline for client in CLIENTS if client.installed):
            ratios, same = [], True
            for number in range(pairs):
                order = ("torch", "harden") if number % 2 == 0 else ("harden", "torch")
                runs = {mode: run(client, mode, Path(place) / f"{client}-{number}-{mode}") for mode in order}
                for mode, done in runs.items():
                    assert done.code == 0, f"{client} {mode}: {done.output[-3000:]}"
                same = same and runs["torch"].digest == runs["harden"].digest
                ratios.append(runs["harden"].spent / runs["torch"].spent)
            low, *_, high = sorted(ratios)
            cost = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
            about = f"{client.name} {client.version}, {runs['torch'].samples()} samples"
            yield f"{'same' if same else 'OTHER'}: {about}, {cost}"


MODES_OF_ALL = {("--transport", "arena"): with_slabs, ("--harden",): with_guards}

if __name__ == "__main__":
    if (compared := MODES_OF_ALL.get(tuple(sys.argv[1:]))) is not None:
        outcomes = []
        for outcome in compared():
            print(outcome, flush=True)
            outcomes.append(outcome)
        sys.exit(any(not outcome.startswith("same: ") for outcome in outcomes))
    written = []
    for line in table(sys.argv[1:]):
        print(line, flush=True)
        written.append(line)
    old = "\n".join(in_readme())
    GUIDE.write_text(GUIDE.read_text().replace(old, "\n".join(written)))
