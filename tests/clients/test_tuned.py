"""`minidl tune` tries other settings on a framework's program as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client_runs import PROGRAMS

from minidl import cli

pytestmark = [pytest.mark.live, pytest.mark.timeout(420)]


def test_a_lightning_program_is_tuned_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    command = ["--json", "--batches", "60", str(PROGRAMS / "lightning_plain.py")]
    assert cli.main(["tune", *command]) == cli.FOUND
    found = json.loads(capsys.readouterr().out)
    assert found["writes"]
    assert all(one.startswith("lightning_logs") for one in found["writes"]), "only what is new in the program's folder"
    assert cli.main(["tune", "--yes", "--settings", "1", *command]) == cli.OK
    (tried,) = json.loads(capsys.readouterr().out)["tried"]
    assert tried["problem"] is None
    assert tried["num_workers"] > 1
    assert tried["measured_batches_per_s"] > found["batches_per_s"]
