"""Results that are kept: they come back, for the code that made them alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minidl.prove import kept
from minidl.prove.kept import Kept, code


def test_results_come_back_without_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    Kept(path).add(cell=1)
    path.write_bytes(path.read_bytes() + b'{"cell": 2, "co')
    Kept(path).add(cell=3)
    assert Kept(path).results == [{"cell": 1, "code": code()}, {"cell": 3, "code": code()}]
    assert path.read_bytes().count(b"\n") == 3


def test_results_of_other_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    Kept(path).add(cell=1)
    made_by = code()
    monkeypatch.setattr(kept, "code", lambda: "minidl of tomorrow")
    with pytest.raises(ValueError) as error:
        Kept(path)
    assert str(error.value) == f"{path}: results of {made_by}; this is minidl of tomorrow: name another file"
    path.write_text(json.dumps({"cell": 1}) + "\n")
    with pytest.raises(ValueError, match="results of other code; this is minidl of tomorrow"):
        Kept(path)


def test_nothing_is_kept_without_a_file() -> None:
    nothing = Kept(None)
    nothing.add(cell=1)
    assert nothing.results == []


def test_the_code_is_known_by_its_files() -> None:
    assert code().startswith("minidl ")
    assert ", torch " in code()
