"""Which traces are a job's: flat, nested, packed, listed, of two runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minidl.tracefile.members import members_at, rank_in_name, traces_in


def put(place: Path, *names: str, age: float = 0) -> Path:
    """Make traces as far as their names go; the manifests are `age` seconds old."""
    for name in names:
        path = place / name
        file = path if path.suffix == ".minidl" else path / "manifest.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        os.utime(file, (1e9 - age, 1e9 - age))
    return place


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank-3", 3), ("rank3.minidl", 3), ("rank_12", 12), ("rank-0.2", 0), ("ranks-4-one", -1), ("lora-rank8", -1)],
)
def test_a_name_tells_the_rank(name: str, rank: int) -> None:
    assert rank_in_name(Path(name)) == rank


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["rank-0", "rank-1"], [(0, ""), (1, "")]),
        (["rank-10", "rank-9"], [(9, ""), (10, "")]),
        (["a/rank-0", "a/rank-1", "b/rank-2.minidl"], [(0, "a"), (1, "a"), (2, "b")]),
        (["x/y/rank-0", "x/z/rank-1"], [(0, "x/y"), (1, "x/z")]),
        (["rank-5"], [(5, "")]),
    ],
)
def test_a_directory_of_ranks_is_a_job(tmp_path: Path, names: list[str], found: list[tuple[int, str]]) -> None:
    members = members_at([put(tmp_path, *names)])
    assert [(one.rank, one.node) for one in members.places] == found
    assert members.problems == ()


def test_what_is_no_job(tmp_path: Path) -> None:
    put(tmp_path, "run-1", "run-2", "rank-0")
    assert members_at([tmp_path]) is None  # several runs
    assert members_at([tmp_path / "rank-0"]) is None  # a trace
    assert members_at([tmp_path / "nothing"]) is None
    listed = members_at([tmp_path / "run-1", tmp_path / "run-2"])
    assert [one.rank for one in listed.places] == [-1, -1]
    assert traces_in([tmp_path / "run-2", tmp_path / "rank-0"]) == [tmp_path / "run-2", tmp_path / "rank-0"]


def test_a_directory_that_cannot_be_looked_into_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a/rank-0", "b/rank-1")
    scan = os.scandir

    def denied(path: Path) -> object:
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    members = members_at([tmp_path])
    assert [one.rank for one in members.places] == [0]
    assert members.problems == (f"not looked into: {tmp_path}/b: Permission denied",)
    with pytest.raises(PermissionError):
        traces_in([tmp_path])


def test_of_two_jobs_in_a_directory_the_later_one_is_read(tmp_path: Path) -> None:
    put(tmp_path, "a/rank-0", "a/rank-1", age=100)
    put(tmp_path, "b/rank-0", "b/rank-1", "b/rank-2")
    members = members_at([tmp_path])
    assert {one.node for one in members.places} == {"b"}
    assert members.problems == (
        "several traces of rank 0, 1: these are traces of several runs. The latest one is read (3 ranks), these are "
        f"not: {tmp_path}/a/rank-0 and others. To read another one, give its traces alone",
    )


def test_of_two_runs_into_a_directory_the_later_one_is_read_on_all_nodes(tmp_path: Path) -> None:
    put(tmp_path, "a/rank-0", "b/rank-1", age=100)
    put(tmp_path, "a/rank-0.2", "b/rank-1.2")
    members = members_at([tmp_path])
    assert [one.path.name for one in members.places] == ["rank-0.2", "rank-1.2"]
    assert (members.of(1).node, members.of(7)) == ("b", None)


def test_a_rank_of_an_old_run_on_another_node_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, "a/rank-0", "b/rank-1", age=100)
    put(tmp_path, "a/rank-0.2")
    members = members_at([tmp_path])
    assert [one.path for one in members.places] == [tmp_path / "a/rank-0.2"]
    assert members.problems[0].partition("these are not: ")[2].startswith(f"{tmp_path}/a/rank-0, {tmp_path}/b/rank-1. ")
