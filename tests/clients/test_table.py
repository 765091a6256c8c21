"""The guide's table of clients."""

from __future__ import annotations

from pathlib import Path

import client_runs
from client_runs import CLIENTS, in_readme


def test_the_table_has_a_line_for_each_client() -> None:
    head, lines = client_runs.HEAD.splitlines(), in_readme()
    assert lines[:2] == head
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [client.name for client in CLIENTS]


def test_each_client_has_its_program() -> None:
    missing = [client.program for client in CLIENTS if not Path(client_runs.PROGRAMS / client.program).is_file()]
    assert missing == []
