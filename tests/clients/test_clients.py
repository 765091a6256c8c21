"""Other people's programs see the same samples on minidl's loader as on torch's, and are recorded in one trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from client_runs import CLIENTS, Client, Run, in_readme, ranks_of, require, row, run, without_time
from sizes import slow

from minidl.check import check
from minidl.speed.audit import audit
from minidl.tracefile import events as ev
from minidl.tracefile.members import traces_in
from minidl.tracefile.ranks import lacking
from minidl.tracefile.reader import read_trace

pytestmark = [pytest.mark.live, pytest.mark.timeout(420)]  # two programs, each bounded by client_runs.BOUND

Ran = Callable[[Client, str], Run]

USUAL = {"Lightning ddp": "run", "Accelerate": "direct", "Transformers": "run", "torchdata": "run"}
"""Clients that are tried each time, each in one mode; everything else by `-m slow`."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Give a client's run in a mode; each is made once, when it is first asked for."""
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


def cases(*modes: str) -> list[object]:
    """Each client in each of these modes that it has."""
    return [
        pytest.param(each, mode, id=f"{each}-{mode}", marks=() if mode == USUAL.get(each.name) else pytest.mark.slow)
        for each in CLIENTS
        for mode in each.modes
        if mode in modes
    ]


def named(name: str) -> Client:
    return next(client for client in CLIENTS if client.name == name)


@pytest.mark.parametrize(("client", "mode"), cases("direct", "run", "observe"))
def test_a_client_sees_the_samples_that_torchs_loader_gives(client: Client, mode: str, ran: Ran) -> None:
    sees_torchs_samples(client, mode, ran)


@pytest.mark.parametrize(("client", "mode"), cases("run", "observe"))
def test_a_clients_run_is_recorded_and_keeps_the_protocol(client: Client, mode: str, ran: Ran) -> None:
    is_recorded(client, mode, ran)


@pytest.mark.parametrize(("name", "mode"), [("webdataset", "run arena"), *slow(("torchdata", "observe arena"))])
def test_a_client_sees_the_same_samples_with_slabs(name: str, mode: str, ran: Ran) -> None:
    """By minidl's loader, and by a loader of torch's kind; `client_runs` has these modes for all of them."""
    sees_torchs_samples(named(name), mode, ran)
    is_recorded(named(name), mode, ran)


@pytest.mark.slow
@pytest.mark.parametrize("client", [client for client in CLIENTS if "direct" in client.modes], ids=str)
def test_a_client_sees_the_same_samples_on_the_one_page(client: Client, ran: Ran) -> None:
    sees_torchs_samples(client, "mini", ran)


BASELINES = list(dict.fromkeys(client.baseline for client in CLIENTS))


@pytest.mark.parametrize(
    "client",
    [pytest.param(c, id=str(c), marks=() if c.name == "webdataset" else pytest.mark.slow) for c in BASELINES],
)
def test_a_client_sees_the_same_samples_with_guards_around_torchs_loader(client: Client, ran: Ran) -> None:
    sees_torchs_samples(client, "harden", ran)


@pytest.mark.parametrize(
    "client",
    [pytest.param(c, id=str(c), marks=() if c.modes == (USUAL.get(c.name),) else pytest.mark.slow) for c in CLIENTS],
)
def test_the_readme_says_what_came(client: Client, ran: Ran) -> None:
    """Except for the times, and the runs that the tests do not have; of another version, what it says of minidl's."""
    runs = {mode: ran(client, mode) for mode in ("torch", *client.modes)}
    told = [cells(line) for line in in_readme() if line.startswith(f"| {client.name} |")]
    came = cells(row(client, runs))
    version, first_mode = 1, 5  # columns
    of_minidl = 0 if told[0][version] == came[version] else first_mode
    assert [line[of_minidl:] for line in told] == [came[of_minidl:]], "write it: python tests/support/client_runs.py"


def sees_torchs_samples(client: Client, mode: str, ran: Ran) -> None:
    """Batch by batch, on every rank and in every epoch."""
    torchs, ours = ran(client, "torch"), ran(client, mode)
    assert sorted(ours.ranks) == sorted(torchs.ranks) == list(range(client.ranks))
    for rank, seen in ours.ranks.items():
        assert seen["epochs"] == torchs.ranks[rank]["epochs"]
        # A sampler that the program's own minidl.DataLoader made is minidl's.
        assert seen["facts"] == torchs.ranks[rank]["facts"] or mode in ("direct", "mini")


def is_recorded(client: Client, mode: str, ran: Ran) -> None:
    """All ranks are in one trace, which keeps the protocol, lacks nothing, and shows no mistake of the ranks."""
    done = ran(client, mode)
    assert done.trace is not None
    (path,) = traces_in([done.trace])
    trace = read_trace(path)
    assert ranks_of(trace) == set(range(client.ranks))
    assert check(trace) == []
    assert lacking(trace.manifest, trace.lines) == []
    assert audit([trace]).mistakes == 0, audit([trace]).text()
    if client.name in TRAINS:
        codes = np.unique(trace.events["code"]).tolist()
        assert set(codes) > {*ev.FORWARD, *ev.BACKWARD, *ev.OPTIMIZER}


TRAINS = {"Transformers", "skorch"}
"""Clients whose programs train a model: the parts of their steps are recorded."""


def cells(line: str) -> list[str]:
    """The cells of a line of the table, without times; the last one is left out: of runs that the tests do not have."""
    return [cell.strip() for cell in without_time(line).strip("|").split("|")][:-1]
