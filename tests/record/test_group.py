"""Each rank finds its rank, and its own place, by the variables that its launcher sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidl.job.digests import read_job
from minidl.job.report import JobReport
from minidl.process_stat import LAUNCHERS
from minidl.record.group import job_directory, place_in_group, rank_directory, rank_name
from minidl.record.recorder import _rank

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "b2c4"}  # fmt: skip
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "PMIX_NAMESPACE": "prterun-host-77@1"}  # fmt: skip
RAY_TRAIN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

LAUNCHED = {
    "torchrun": (TORCHRUN, "rank-3", "job-b2c4"),
    "torchrun without an id": (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "rank-3", ""),
    "torchrun, started anew": (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, "rank-3.3", "job-b2c4"),
    "srun": (SRUN, "rank-3", "job-4711.0"),
    "srun, requeued": (SRUN | {"SLURM_RESTART_COUNT": "1"}, "rank-3.2", "job-4711.0"),
    "torchrun under srun": (SRUN | TORCHRUN | {"SLURM_PROCID": "0"}, "rank-3", "job-b2c4"),
    "mpirun": (OPEN_MPI, "rank-3", "job-prterun-host-77-1"),
    "mpirun of MPICH": ({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}, "rank-3", ""),
    "Ray Train": (RAY_TRAIN, "rank-3", ""),
    "Accelerate": (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, "rank-3", "job-b2c4"),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in LAUNCHERS:
        for name in " ".join(names).split():
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", LAUNCHED)
def test_a_rank_has_its_own_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, name, job = LAUNCHED[kind]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert rank_name() == name
    assert rank_directory("traces/job") == Path("traces/job", name)
    assert job_directory() == (Path("minidl-traces", job, name) if job else None)
    place = place_in_group()
    assert (place["rank"], place["world_size"], place.get("restart", 0)) == (3, 8, int((name + ".1").split(".")[1]) - 1)
    assert _rank() == {"rank": 3, "world_size": 8, "local_rank": 1}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"},  # a batch script, outside of srun
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
    ],
)
def test_what_is_no_rank_records_where_it_is_told(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert (rank_name(), place_in_group(), job_directory()) == ("", {}, None)
    assert _rank()["rank"] == (int(variables["RANK"]) if variables.get("RANK", "x").isdecimal() else None)


PROGRAM = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset

again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for number, batch in enumerate(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4)):
    if number == 3 and os.environ["RANK"] == "1" and not again:
        raise SystemExit("planted")
"""


@pytest.mark.live
def test_torchrun_starts_ranks_anew_and_each_attempt_is_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "minidl", "run", "--trace", "job"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["rank-0", "rank-0.2", "rank-1", "rank-1.2"]
    job = read_job([tmp_path / "job"])
    assert [table.path for table in job.ranks] == [tmp_path / "job" / f"rank-{rank}.2" for rank in (0, 1)]
    assert [table.facts.taken for table in job.ranks] == [10] * 2
    assert "traces of several runs" in JobReport(job).lacks[0]
