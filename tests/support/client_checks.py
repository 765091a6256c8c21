"""What holds for every client, in every mode; the test files in tests/clients ask it of theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from client_runs import Client, Run, in_readme, ranks_of, row, without_time

from minidl.check import check
from minidl.speed.audit import audit
from minidl.tracefile.join import traces_in
from minidl.tracefile.ranks import lacking
from minidl.tracefile.reader import read_trace

Ran = Callable[[Client, str], Run]


def cases(clients: tuple[Client, ...], *modes: str) -> list[object]:
    """Each client in each of these modes that it has."""
    return [
        pytest.param(client, mode, id=f"{client}-{mode}", marks=marks(client, mode))
        for client in clients
        for mode in client.modes
        if mode in modes
    ]


def each(clients: tuple[Client, ...]) -> list[object]:
    """Each client, in all of its modes."""
    return [pytest.param(client, id=str(client), marks=marks(client, *client.modes)) for client in clients]


USUAL = {"Lightning ddp": "run", "Accelerate": "direct", "Transformers": "run", "torchdata": "run"}
"""Clients that are tried each time, each in one mode; everything else by `-m slow`."""


def marks(client: Client, *modes: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if modes == (USUAL.get(client.name),) else (pytest.mark.slow,)


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


def cells(line: str) -> list[str]:
    """The cells of a line of the table; without the last one, of runs that the tests do not have."""
    return [cell.strip() for cell in line.strip("|").split("|")][:-1]


VERSION, FIRST_MODE = 1, 5
"""Columns of the table."""


def is_told(client: Client, ran: Ran) -> None:
    """The guide's table says what came, except for the times; of another version, what it says of minidl's loader."""
    runs = {mode: ran(client, mode) for mode in ("torch", *client.modes)}
    told = [cells(without_time(line)) for line in in_readme() if line.startswith(f"| {client.name} |")]
    came = cells(without_time(row(client, runs)))
    of_minidl = 0 if told[0][VERSION] == came[VERSION] else FIRST_MODE
    assert [line[of_minidl:] for line in told] == [came[of_minidl:]], "write it: python tests/support/client_runs.py"
