"""What this process may use of its machine: by affinity, cgroups of both versions, and what launchers say of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minidl import usable
from minidl.usable import cpu_quota, cpu_share, memory_left, private_memory, ranks_here, size_of, tasks_left


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def put(root: Path, lines: str, files: dict[str, str]) -> None:
    """lines: which cgroups this process is in. files: of these, and of /proc."""
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        place = root / name if name.startswith("proc") else root / "sys/fs/cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


JOB, STEP = "job/cpu.max", "job/step/cpu.max"
OLDER = {"cpu/elsewhere/cpu.cfs_quota_us": "10000", "cpu/elsewhere/cpu.cfs_period_us": "100000",
         "cpu/job/cpu.cfs_period_us": "100000"}  # fmt: skip
OLDER_LINES = "5:memory:/elsewhere\n4:cpu,cpuacct:/job\n"


@pytest.mark.parametrize(("lines", "files", "quota"), [
    ("", {}, None),
    ("0::/job/step\n", {STEP: "max 100000\n"}, None),
    ("0::/job/step\n", {STEP: "max 100000\n", JOB: "150000 100000\n"}, 1.5),
    ("0::/job/step\n", {STEP: "50000 100000\n", JOB: "150000 100000\n"}, 0.5),
    (OLDER_LINES, OLDER | {"cpu/job/cpu.cfs_quota_us": "-1"}, None),
    (OLDER_LINES, OLDER | {"cpu/job/cpu.cfs_quota_us": "200000"}, 2),
])  # fmt: skip
def test_the_quota_is_the_least_of_the_groups_around(
    root: Path, lines: str, files: dict[str, str], quota: float | None
) -> None:
    """Also of an older kernel."""
    assert cpu_quota(root) is None
    put(root, lines, files)
    assert cpu_quota(root) == quota


@pytest.mark.parametrize(("lines", "files", "left"), [
    ("", {}, None),
    ("", {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   4 kB\n"}, 4096),
    ("0::/job", {"job/memory.max": "max", "job/memory.current": "5"}, None),
    ("0::/job", {"job/memory.max": "9000", "job/memory.current": "5000", "job/memory.stat": "anon 1\n"}, 4000),
    ("0::/job", {"job/memory.max": "90", "job/memory.current": "80", "job/memory.stat": "inactive_file 30\n"}, 40),
    ("3:memory:/a\n2:cpu:/b", {
        "memory/a/memory.limit_in_bytes": "70", "memory/a/memory.usage_in_bytes": "60",
        "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 2\n",
    }, 11),
    ("3:memory:/a", {
        "memory/a/memory.limit_in_bytes": str((1 << 63) - 4096), "memory/a/memory.usage_in_bytes": "60",
        "memory/a/memory.stat": "",
    }, None),
])  # fmt: skip
def test_the_memory_that_is_left(root: Path, lines: str, files: dict[str, str], left: int | None) -> None:
    put(root, lines, files)
    assert memory_left(root) == left


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
        ({"LOCAL_WORLD_SIZE": "many", "MPI_LOCALNRANKS": "2"}, 2), ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)  # fmt: skip
def test_the_ranks_on_this_machine(variables: dict[str, str], ranks: int) -> None:
    assert ranks_here(variables) == ranks


@pytest.mark.parametrize(
    ("allowed", "quota", "ranks", "share"), [(8, None, 1, 8), (8, 2.5, 1, 2.5), (16, None, 4, 16), (64, None, 4, 16)]
)
def test_the_cpus_that_a_rank_may_count_on(
    monkeypatch: pytest.MonkeyPatch, allowed: int, quota: float | None, ranks: int, share: float
) -> None:
    monkeypatch.setattr(usable, "usable_cpus", lambda: {"cpus_allowed": allowed, "cpu_quota": quota})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert cpu_share() == share


@pytest.mark.parametrize(("text", "size"), [("2G", 2 << 30), ("1.5 MiB", 3 << 19), ("700", 700), ("much", None)])
def test_sizes_in_words(text: str, size: int | None) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize(("user", "most", "allowed", "left"), [
    (9, -1, "max", None), (0, 40, "max", None), (9, 40, "max", 33), (9, 40, "30", 20), (9, 4, "30", 0),
])  # fmt: skip
def test_the_processes_and_threads_that_may_be_started(
    root: Path, monkeypatch: pytest.MonkeyPatch, user: int, most: int, allowed: str, left: int | None
) -> None:
    threads = {7: (9, 5), 8: (0, 3), 9: (9, 2)}
    put(root, "0::/job", {"job/pids.max": f"{allowed}\n", "job/pids.current": "10\n"} | {
        f"proc/{pid}/status": f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nThreads:\t{count}\nSig:\t1\n"
        for pid, (uid, count) in threads.items()
    })  # fmt: skip
    monkeypatch.setattr(usable.resource, "getrlimit", lambda of: (most, 1 << 20))
    monkeypatch.setattr(usable.os, "getuid", lambda: user)
    assert tasks_left(root) == left


def test_what_this_machine_says() -> None:
    assert (memory_left() or 1) > 0
    assert (usable.shared_memory_left() or 1) > 0
    assert 1 << 20 < private_memory(os.getpid()) < 1 << 40
    assert private_memory(1 << 30) == 0
