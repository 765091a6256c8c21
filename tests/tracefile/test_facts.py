"""Facts of a damaged record: a value that its name does not allow is left out, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracle_trace import write_process

from minidl.tracefile import events as ev
from minidl.tracefile.facts import LATEST, MOST_RANKS, NUMBERS, is_long, loads, read_facts
from minidl.tracefile.reader import read_trace


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_a_whole_number_in_its_range(name: str) -> None:
    """A damaged record must not make a reader count up to a number that no run has."""
    least, most = NUMBERS[name][0], NUMBERS[name][-1]
    for value in (least, most):
        assert read_facts(json.dumps({name: value}).encode()) == ({name: value}, [])
    for value in (least - 1, most + 1, True, "1", 1.0, [1], {}, 10**400):
        assert read_facts(json.dumps({name: value}).encode()) == ({}, [name]), value
    assert NUMBERS["world_size"][-1] == MOST_RANKS
    assert NUMBERS["monotonic_ns"][-1] == LATEST - 1


def test_none_is_a_value_only_where_a_program_may_choose_it() -> None:
    assert read_facts(b'{"prefetch_factor": null, "command": null, "at_ns": null}') == ({"prefetch_factor": None}, [])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("dataset", "Photos", 3),
        ("made_at", "train.py:12", ["train.py"]),
        ("command", ["train.py"], "train.py"),
        ("versions", {"minidl": "1"}, []),
        ("timeout_s", 1.5, True),
        ("weather", {"sun": [1]}, 1 << 64),
    ],
)
def test_other_facts_have_the_type_that_their_name_promises(name: str, good: Any, bad: Any) -> None:
    assert read_facts(json.dumps({name: good, "x": 1}).encode()) == ({name: good, "x": 1}, [])
    assert read_facts(json.dumps({name: bad, "x": 1}).encode()) == ({"x": 1}, [name])


@pytest.mark.parametrize("text", [b"[]", b"3", b"null", b'"a"', b"{", b"", b"\xff"])
def test_what_is_no_object(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_facts(text)


def test_numbers_that_strict_viewers_refuse() -> None:
    assert loads(b"[NaN, -Infinity, 1e999, 1.5]") == ["NaN", "-Infinity", "1e999", 1.5]
    assert [is_long(value) for value in (1 << 64, (1 << 64) - 1, -(1 << 63) - 1, -(1 << 63), "9" * 30)] == [
        True, False, True, False, False,
    ]  # fmt: skip


def test_a_reader_says_which_facts_it_left_out(tmp_path: Path) -> None:
    facts = {"kind": "loader", "batch_size": 4}
    lines = [facts | {"loader": 1, "num_workers": 1 << 62}, facts | {"loader": "two"}]
    write_process(tmp_path, [{"code": ev.YIELD}], lines=lines)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "cpus": "all", "versions": 3}))
    trace = read_trace(tmp_path)
    assert (trace.loaders, trace.manifest) == ({1: {"batch_size": 4}}, {"format": 1})
    assert trace.problems == [
        "manifest.json: its cpus cannot be read",
        "manifest.json: its versions cannot be read",
        "pid 100: 2 lines of 100-1.meta.jsonl cannot be read",
    ]
