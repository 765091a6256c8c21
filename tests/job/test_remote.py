"""A job that is read where fsspec reads, and by dask's workers, of which one is killed: the same answer."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from made_jobs import copied

from minidl import cli
from minidl.job.digests import JobRecord, make, place_of, read_job
from minidl.job.remote import read_remote
from minidl.job.report import JobReport
from minidl.tracefile.format import TraceError

pytestmark = pytest.mark.heavy

TRACES = Path(__file__).parent.parent.parent / "traces"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Three ranks, on two nodes."""
    place = copied(tmp_path / "job", "workers-4", "workers-1", "workers-2")
    for rank in range(3):
        node = place / f"node{rank // 2}"
        node.mkdir(exist_ok=True)
        (place / f"rank-{rank}.minidl").rename(node / f"rank-{rank}.minidl")
    return place


@pytest.fixture
def memory() -> Iterator[str]:
    files = fsspec.filesystem("memory")
    yield "memory://traces/job"
    files.rm("/traces", recursive=True)


def upload(job: Path, url: str) -> None:
    fsspec.filesystem("memory").put(f"{job}/", url.removeprefix("memory:/"), recursive=True)


def same(one: JobRecord, other: JobRecord) -> bool:
    both = [*zip(one.ranks, other.ranks, strict=True)]
    return (one.problems, one.kept) == (other.problems, other.kept) and all(
        a.facts == b.facts and np.array_equal(a.steps, b.steps) for a, b in both
    )


def here(job: Path) -> JobRecord:
    found = read_job([job])
    assert found is not None
    return found


def test_a_job_in_memory_is_read_as_here_by_events_and_by_digests(job: Path, memory: str) -> None:
    upload(job, memory)
    by_events = read_remote(memory, "processes")
    known = here(job)
    assert same(by_events, known)
    assert [table.facts.node for table in by_events.ranks] == ["node0", "node0", "node1"]
    upload(job, memory)  # with digests
    for trace in fsspec.filesystem("memory").find("/traces"):
        if trace.endswith("rank-0.minidl"):
            data = fsspec.filesystem("memory").cat_file(trace)
            fsspec.filesystem("memory").pipe_file(trace, b"x" * len(data))  # is not read
    assert same(read_remote(memory, "processes"), known)
    assert JobReport(by_events).finding.sentence == JobReport(known).finding.sentence


def test_a_job_may_be_a_whole_archive(job: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", job)
    assert same(read_remote(f"zip://::{archive}", "processes"), here(job))


def test_what_is_not_read_is_said(tmp_path: Path, memory: str) -> None:
    with pytest.raises(TraceError, match="no traces of ranks are there"):
        read_remote(str(tmp_path), "processes")
    for name in ("rank-0", "rank-0.2", "rank-1.2"):
        shutil.copy(TRACES / "workers-2.minidl", tmp_path / f"{name}.minidl")
    (tmp_path / "rank-2.2.minidl").write_bytes(b"nothing")
    upload(tmp_path, memory)
    for place in (str(tmp_path), memory):
        found = read_remote(place, "processes")
        assert len(found.ranks) == 2
        assert found.problems[0].startswith("several traces of rank 0: ")
        assert "rank-0.minidl" in found.problems[0]
        assert found.problems[1].startswith("rank not read: ")


def test_the_commands_take_a_url(job: Path, memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    upload(job, memory)
    assert cli.main(["summary", memory]) == cli.OK
    assert f"{memory}: 3 ranks on 2 nodes" in capsys.readouterr().out
    assert cli.main(["timeline", memory]) == cli.OK
    for refused in ([memory, "--rank", "1"], ["nothing://x"], ["memory://nothing"]):
        assert cli.main(["summary", *refused]) == cli.USAGE


@pytest.mark.live
def test_dask_gives_the_same_answer_also_if_a_worker_is_killed(tmp_path: Path) -> None:
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    copied(tmp_path, *["workers-4", "workers-1", "workers-2"] * 8)
    make(tmp_path / "rank-3.minidl")
    cluster = distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None)
    with (
        cluster,
        distributed.Client(cluster) as client,
        dask.config.set({"scheduler-address": client.scheduler.address}),
    ):
        pids = [*client.run(os.getpid).values()]
        read: list[JobRecord] = []
        thread = threading.Thread(target=lambda: read.append(read_remote(str(tmp_path), "dask")))
        thread.start()
        until = time.monotonic() + 60
        while len([*tmp_path.glob("*.npz")]) < 4 and time.monotonic() < until:
            time.sleep(0.005)
        begun = len([*tmp_path.glob("*.npz")])
        os.kill(pids[0], signal.SIGKILL)
        thread.join(90)
    distributed.utils._offload_executor.shutdown()  # dask keeps this thread for the life of the process
    assert begun < 24, "it had ended before"
    assert same(read[0], here(tmp_path))
    assert place_of(tmp_path / "rank-23.minidl").is_file()
