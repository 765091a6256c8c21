"""The clients' programs, each run once in each mode, when it is first asked for."""

from __future__ import annotations

import pytest
from client_checks import Ran
from client_runs import Client, Run, require, run


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Give a client's run in a mode."""
    known: dict[tuple[Client, str], Run] = {}

    def ask(client: Client, mode: str) -> Run:
        require(client)
        client = client.baseline if mode == "torch" else client
        if (client, mode) not in known:
            known[client, mode] = run(client, mode, tmp_path_factory.mktemp("client"))
        done = known[client, mode]
        assert done.code == 0, done.output[-3000:]
        return done

    return ask
