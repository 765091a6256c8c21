"""What a trace says of ranks and iterators that it does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minidl.tracefile import files
from minidl.tracefile.folded import fold
from minidl.tracefile.ranks import lacking, words_of


def rank(process: str, number: int, of: int = 2, iterators: int = 1) -> list[dict[str, Any]]:
    """The lines of a process that is a rank."""
    lines: list[dict[str, Any]] = [{"kind": "process", "process": process, "rank": number, "world_size": of}]
    return lines + [{"kind": "loader", "process": process, "loader": n + 1} for n in range(iterators)]


ONE: dict[str, Any] = {"kind": "loader", "process": "a", "loader": 1}


def test_a_run_that_has_all_lacks_nothing() -> None:
    assert lacking({}, [ONE]) == []
    assert lacking({}, rank("a", 0) + rank("b", 1)) == []


def test_ranks_that_are_missing() -> None:
    (text,) = lacking({}, rank("a", 0, of=4) + rank("b", 2, of=4, iterators=0))
    assert text.startswith("the process group had 4 ranks, 1 recorded; missing: 1, 2, 3. rank 2 joined the group and")
    assert "ranks 1, 3 left nothing" in text


def test_where_each_rank_has_its_trace_the_others_are_not_missed() -> None:
    assert lacking({"rank": 0}, rank("a", 0)) == []
    assert lacking({"ranks": [{"rank": 0}]}, rank("a", 0)) == []


def test_ranks_that_were_killed_are_said_when_the_run_is_over() -> None:
    ends = [{"kind": "program_end", "process": "main"}, {"kind": "trace_end", "process": "main"}]
    pid = {"kind": "process", "process": "b", "pid": 77}
    both = rank("a", 0) + rank("b", 1) + [pid]
    over = {"kind": "program_end", "process": "a"}
    (text,) = lacking({}, [*both, over, *ends])
    assert text.startswith("rank 1 (pid 77) wrote no end: killed (a launcher kills all")
    assert lacking({}, [*both, over]) == [], "the run is not over"
    assert lacking({}, [*both, over, {"kind": "program_end", "process": "b"}, *ends]) == []
    assert lacking({}, [*both, *ends])[0].startswith("ranks 0 (pid ?), 1 (pid 77) wrote no end")
    assert lacking({}, [*rank("a", 0), *rank("b", 1, iterators=0), over, *ends])[1:] == [], "missing, said once"
    assert lacking({}, [*both, {"kind": "trace_end", "process": "a"}]) == [], "of a minidl that wrote no ends"


def test_only_the_ranks_last_start_counts() -> None:
    """torchrun starts all ranks anew after a failure, perhaps fewer of them; the files' order says nothing."""
    ends = [{"kind": kind, "process": "main"} for kind in ("program_end", "trace_end")]
    first = rank("b", 0, of=3) + rank("c", 1, of=3) + rank("d", 2, of=3)
    again = [line | {"restart": 1} for line in rank("a", 0) + rank("e", 1, iterators=0)]
    found = lacking({}, again + first + ends)
    assert len(found) == 2
    assert found[0].startswith("the process group had 2 ranks, 1 recorded; missing: 1. rank 1 joined the group")
    assert found[1].startswith("rank 0 (pid ?) wrote no end")


def test_no_iterator_and_why() -> None:
    (text,) = lacking({}, [{"kind": "process", "process": "a"}])
    assert text.startswith("no iterator was recorded: neither the program nor a Python process")
    passed = {"kind": "passed over", "process": "a", "iterator": "Own", "why": "without workers"}
    (text,) = lacking({}, [passed, passed])
    assert text == "no iterator was recorded: Own iterates without workers"
    assert lacking({}, [passed, ONE]) == ["not recorded: Own iterates without workers"]


def test_words_of_a_directory_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "1-1.meta.jsonl").write_bytes(b'{"kind": "loader", "loader": 1}\n[1]\nno line\n"text"\n')
    assert words_of(tmp_path) == ({}, [{"kind": "loader", "loader": 1, "process": "1-1.meta.jsonl"}])


def test_words_of_a_directory_whose_files_are_being_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's side file that is folded between its listing and its reading is read in the pack."""
    for pid in (1, 2):
        (tmp_path / f"{pid}-1.meta.jsonl").write_bytes(b'{"kind": "process", "rank": %d}\n' % pid)
    plain = files.members_in

    def listed(place: Path, problems: list[str]) -> Any:
        found = plain(place, problems)
        fold(tmp_path, ["2-1"], None)
        monkeypatch.setattr(files, "members_in", plain)
        return found

    monkeypatch.setattr(files, "members_in", listed)
    assert [line["rank"] for line in words_of(tmp_path)[1]] == [1, 2]
    assert not (tmp_path / "2-1.meta.jsonl").exists()
    assert words_of(tmp_path / "gone") == ({}, [])
