"""Other people's programs see the same samples on minidl's loader as on torch's, on every rank, and are recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from client_runs import CLIENTS, Client, Run, run

from minidl.check import check
from minidl.tracefile.join import traces_in
from minidl.tracefile.reader import read_trace

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]  # two programs, each bounded by client_runs.BOUND

Ran = Callable[[Client, str], Run]
OBSERVED = {"Accelerate", "PyG"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Each program once in each mode, when it is first asked for."""
    known: dict[tuple[Client, str], Run] = {}

    def ask(client: Client, mode: str) -> Run:
        if not client.installed:
            pytest.skip(f"{client.distribution} is not installed; it is in the extra `clients`")
        if (client, mode) not in known:
            known[client, mode] = run(client, mode, tmp_path_factory.mktemp("client"))
        done = known[client, mode]
        assert done.code == 0, done.output[-3000:]
        return done

    return ask


CASES = [
    pytest.param(client, mode, id=f"{client}-{mode}")
    for client in CLIENTS
    for mode in ("run", "direct", "observe")
    if (mode != "direct" or client.direct) and (mode != "observe" or client.name in OBSERVED)
]


@pytest.mark.parametrize(("client", "mode"), CASES)
def test_a_client_sees_the_samples_that_torchs_loader_gives(client: Client, mode: str, ran: Ran) -> None:
    torchs, ours = ran(client, "torch"), ran(client, mode)
    assert sorted(ours.ranks) == sorted(torchs.ranks) == list(range(client.ranks))
    assert ours.samples() == torchs.samples()
    assert {rank: seen["epochs"] for rank, seen in ours.ranks.items()} == {
        rank: seen["epochs"] for rank, seen in torchs.ranks.items()
    }
    assert {rank: seen["facts"] for rank, seen in ours.ranks.items()} == {
        rank: seen["facts"] for rank, seen in torchs.ranks.items()
    } or mode == "direct"  # a sampler that the program's own minidl.DataLoader made is minidl's


@pytest.mark.parametrize(("client", "mode"), [case for case in CASES if "direct" not in case.id])  # type: ignore[operator]
def test_a_clients_run_is_recorded_and_keeps_the_protocol(client: Client, mode: str, ran: Ran) -> None:
    folder = ran(client, mode).trace
    assert folder is not None
    for path in traces_in([folder]):
        trace = read_trace(path)
        assert len(trace.events)
        assert not check(trace), f"{path}: {check(trace)}"
