"""The processes of a job beside one of its ranks, and the rank that a launcher has told a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minidl.hang.evidence.collect import collect
from minidl.hang.evidence.proc import ProcFiles
from minidl.hang.job import ranks_beside

SLEEPS = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]


@pytest.fixture
def ranks() -> Iterator[list[int]]:
    """Three ranks, of which the first has ended; another program, and a fourth run of the same one by itself."""
    programs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | variables)
        for command, variables in (
            *((SLEEPS, {"RANK": str(rank), "WORLD_SIZE": "4"}) for rank in range(3)),
            ([*SLEEPS, "other"], {}),
            (SLEEPS, {}),
        )
    ]
    for program in programs:
        program.stdout.read(1)
    programs[0].kill()
    os.waitid(os.P_PID, programs[0].pid, os.WEXITED | os.WNOWAIT)
    yield [program.pid for program in programs]
    for program in programs:
        program.kill()
        program.communicate()


@pytest.mark.live
def test_the_ranks_beside_a_rank_have_its_parent_and_its_command_or_have_ended(ranks: list[int]) -> None:
    gone, first, second, other, alone = ranks
    assert {gone, second} <= set(ranks_beside(first))
    assert not {first, other, alone} & set(ranks_beside(first))
    assert ranks_beside(other) == ranks_beside(alone) == [], "a program that is started twice is no job"
    assert ProcFiles(first).rank() == (1, 4)
    assert os.getpid() not in ranks_beside(first)
    assert ProcFiles(gone).rank() == (-1, -1)


@pytest.mark.live
def test_torchrun_is_looked_at_with_its_ranks(ranks: list[int]) -> None:
    """It has the store that ranks ask for keys, and a watchdog looks at its own rank alone."""
    own = Path("/proc/self/comm").read_text()
    seen = []
    for name in (own.strip(), "pt_elastic"):
        try:
            Path("/proc/self/comm").write_text(name)
            seen.append(collect(ranks[1], interval=0, py_spy=False).process(os.getpid()))
        finally:
            Path("/proc/self/comm").write_text(own.strip())
    before, torchrun = seen
    assert before is None
    assert torchrun is not None
