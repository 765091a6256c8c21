"""`minidl run` hands itself on: ranks that a program relaunches, spawns or forks record into the run's one trace."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from programs import python, write
from sizes import slow

from minidl import cli
from minidl.check import check
from minidl.record.handover import PACKAGE, VARIABLE, Settings, handed_on
from minidl.record.recorder import TraceConfig
from minidl.speed.audit import audit
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import Trace, read_trace

RANKS = """
    import os
    import subprocess
    import sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.utils.data import DataLoader, DistributedSampler

    def train(rank, place):
        torch.manual_seed(rank)
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
        loader = DataLoader(range(8), batch_size=2, num_workers=1, sampler=DistributedSampler(range(8), shuffle=False))
        batches = [batch.tolist() for batch in loader]
        os.write(1, f"{rank} {type(loader).__module__} {batches}\\n".encode())
        dist.destroy_process_group()

    def main(how, place):
        if "OWN_RANK" in os.environ:
            train(int(os.environ["OWN_RANK"]), place)
        elif how in ("spawn", "fork", "forkserver"):
            mp.start_processes(train, (place,), nprocs=2, start_method=how)
        else:
            command = [sys.executable, *(["-I"] if how == "isolated" else []), *sys.argv]
            with subprocess.Popen(command, env=os.environ | {"OWN_RANK": "1"}):
                train(0, place)

    if __name__ == "__main__":
        main(*sys.argv[1:])
"""
"""A program of two ranks: a relaunched rank is a program of its own, as Lightning's `ddp` starts it."""


OURS, TORCHS = "minidl.stand_in", "torch.utils.data.dataloader"


def run(place: Path, *arguments: object, **env: str) -> tuple[subprocess.CompletedProcess[str], Trace]:
    done = python("-m", "minidl", "run", "--trace", "trace", *arguments, cwd=place, **env)
    return done, read_trace(place / "trace")


def yields(trace: Trace) -> Counter[int]:
    """How many batches the iterators of each rank have yielded."""
    return Counter(trace.processes[row["process"]].rank for row in trace.select("yield"))


@pytest.mark.live
@pytest.mark.parametrize(
    ("how", "options", "loader"),
    [("relaunch", [], OURS), ("fork", ["--observe"], TORCHS), *slow(("spawn", [], OURS), ("forkserver", [], OURS))],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_all_ranks_are_in_one_trace(tmp_path: Path, how: str, options: list[str], loader: str) -> None:
    write(tmp_path / "train.py", RANKS)
    done, trace = run(tmp_path, *options, "train.py", how, tmp_path)
    said = [f"0 {loader} [[0, 2], [4, 6]]", f"1 {loader} [[1, 3], [5, 7]]"]
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, said), done.stderr
    assert "recorded;" not in done.stderr
    assert check(trace) == []
    assert trace.problems == []
    assert yields(trace) == {0: 2, 1: 2}
    workers = [process.rank for process in trace.processes if process.role == "worker"]
    assert sorted(workers) == [0, 1]
    assert {facts["rank"] for facts in trace.loaders.values()} == {0, 1}
    report = audit([trace])
    assert (report.ranks, report.world, report.mistakes) == ([0, 1], 2, 0)


@pytest.mark.live
def test_a_rank_that_cannot_be_reached_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.py", RANKS)
    done, trace = run(tmp_path, "train.py", "isolated", tmp_path)
    assert "1 torch.utils.data.dataloader [[1, 3], [5, 7]]" in done.stdout.splitlines()
    told = "the process group had 2 ranks, 1 recorded; missing: 1. rank 1 left nothing"
    assert told in done.stderr
    assert "python -I" in done.stderr
    assert "torchrun ... -m minidl run" in done.stderr
    assert cli.main(["summary", str(trace.path)]) == 0
    assert told in capsys.readouterr().out


LAUNCHER = """
    import os, subprocess, sys
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}
        subprocess.run([sys.executable, *sys.argv[1:]], env=env, check=True)
"""

RANK = """
    import os
    from torch.utils.data import DataLoader
    assert [len(batch) for batch in DataLoader(range(4), batch_size=2)] == [2, 2]
"""


@pytest.mark.live
def test_a_launcher_that_is_a_console_script(tmp_path: Path) -> None:
    """`minidl run -- torchrun train.py`; a rank without a process group is known by RANK and WORLD_SIZE."""
    launcher = write(tmp_path / "bin" / "launch", LAUNCHER)
    launcher.chmod(0o755)
    write(tmp_path / "train.py", RANK)
    path = os.pathsep.join([str(launcher.parent), os.environ["PATH"]])
    done, trace = run(tmp_path, "--", "launch", "train.py", PATH=path)
    assert done.returncode == 0, done.stderr
    assert yields(trace) == {0: 2, 1: 2}
    assert check(trace) == []
    assert "recorded;" not in done.stderr


HELPERS = """
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "import helped"], check=True)
    for flags in ([], ["-I"], ["-S"]):
        subprocess.run([sys.executable, *flags, "-c", "import sys; print('torch' in sys.modules, sys.meta_path)"])
    from multiprocessing import resource_tracker
    resource_tracker.ensure_running()
"""

HELPED = """
    import sys
    print(hidden.seen, "minidl" in sys.modules, [place for place in sys.path if place.endswith("startup")])
"""


@pytest.mark.live
def test_helpers_are_not_disturbed(tmp_path: Path) -> None:
    """The `sitecustomize` that is hidden runs; without torch nothing of minidl is imported, and nothing is written."""
    write(tmp_path / "train.py", HELPERS)
    write(tmp_path / "site" / "sitecustomize.py", "import helped_by\nhelped_by.seen = __name__\n")
    write(tmp_path / "site" / "helped_by.py", "")
    write(tmp_path / "site" / "helped.py", HELPED.replace("hidden.seen", "__import__('helped_by').seen"))
    places = os.pathsep.join([str(tmp_path / "site"), str(PACKAGE.parent)])
    done, trace = run(tmp_path, "train.py", PYTHONPATH=places)
    lines = done.stdout.splitlines()
    assert lines[0] == "sitecustomize False []"
    assert [line.split()[0] for line in lines[1:]] == ["False"] * 3
    assert len(trace.processes) <= 1
    assert "neither the program nor a Python process that it started made an iterator" in done.stderr


@pytest.mark.live
def test_a_process_that_cannot_take_over_says_so_and_goes_on(tmp_path: Path) -> None:
    settings = Settings(TraceConfig(str(tmp_path / "gone")))
    program = "import torch.utils.data as d; print(d.DataLoader.__module__, len(list(d.DataLoader(range(3)))))"
    startup = os.pathsep.join([str(PACKAGE / "startup"), str(PACKAGE.parent)])
    done = python("-c", program, cwd=tmp_path, PYTHONPATH=startup, **{VARIABLE: settings.to_text()})
    assert (done.returncode, done.stdout) == (0, "torch.utils.data.dataloader 3\n")
    assert "IS NOT RECORDED and uses torch's DataLoader: TraceError: the run's trace" in done.stderr
    assert "its command: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_settings_are_handed_on_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    for config in (TraceConfig(str(tmp_path)), TraceConfig(str(tmp_path), "batch", None, 2.5)):
        settings = Settings(config, observe=True, align_clocks=True)
        assert Settings.read(json.loads(settings.to_text())) == settings


def test_another_machine_is_refused(tmp_path: Path) -> None:
    """Its clock is another one, and its pids may be the same."""
    (tmp_path / "manifest.json").touch()
    given = json.loads(Settings(TraceConfig(str(tmp_path))).to_text()) | {"boot_id": "another"}
    with pytest.raises(TraceError, match="on another machine"):
        Settings.read(given)


@pytest.mark.parametrize("before", [None, "", "/one:/two"])
def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    environment = dict(os.environ)
    settings = Settings(TraceConfig(str(tmp_path)))
    with handed_on(settings), handed_on(settings):
        places = os.environ["PYTHONPATH"].split(os.pathsep)
        assert places == [str(PACKAGE / "startup"), *filter(None, (before or "").split(":"))]
    assert dict(os.environ) == environment
