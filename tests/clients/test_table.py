"""The guide's table of clients, and what a machine without them sees."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import client_runs
import pytest
from client_runs import CLIENTS, Client, Run, in_readme, row, without_time

TORCH = Client("Torch", "torch", "torch", "none.py", modes=("direct",))


def ran(*batches: list[int]) -> Run:
    return Run(0, "", None, {0: {"epochs": {"0": list(batches)}, "facts": {}, "spent": 2.0}})


def test_the_table_has_a_line_for_each_client() -> None:
    head, lines = client_runs.HEAD.splitlines(), in_readme()
    assert lines[:2] == head
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [client.name for client in CLIENTS]


def test_a_line_says_whether_the_samples_are_the_same() -> None:
    torchs, others = ran([0, 1], [2, 3]), ran([1, 0], [2, 3])
    slower = replace(torchs, ranks={0: torchs.ranks[0] | {"spent": 3.0}})
    line = row(TORCH, {"torch": torchs, "direct": slower})
    assert line == f"| Torch | {TORCH.version} | 1 | 4 | `{torchs.digest}` | same; 1.50 |  |  |  |"
    assert f"| `{others.digest}`; 1.00 |" in row(TORCH, {"torch": torchs, "direct": others})


def test_only_times_are_left_out_of_the_comparison() -> None:
    assert without_time("| a | 1.5 | 2 | same; 1.5 | same, traced, checked; 12.0 |  |") == (
        "| a | 1.5 | 2 | same | same, traced, checked |  |"
    )


@pytest.mark.parametrize("module", ["no_such_module", "blocked"])
def test_a_client_that_is_not_there_is_skipped(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, or None in its place; the extra is named."""
    monkeypatch.setitem(sys.modules, "blocked", None)
    with pytest.raises(pytest.skip.Exception, match=r"no-such is not installed: pip install -e '.\[clients\]'"):
        client_runs.require(Client("none", "no-such", module, "none.py"))
    client_runs.require(TORCH)


def test_each_client_has_its_program() -> None:
    missing = [client.program for client in CLIENTS if not Path(client_runs.PROGRAMS / client.program).is_file()]
    assert missing == []
