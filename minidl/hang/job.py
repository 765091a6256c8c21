"""The processes of a job: the ranks that a launcher has started beside a process.

Interface: `ranks_beside(pid)`. Reads /proc and nothing else.
"""

from __future__ import annotations

import re

from minidl.hang.evidence.proc import ProcFiles
from minidl.process_stat import children_of


def ranks_beside(pid: int) -> list[int]:
    """The processes that the parent of a process has started with the same command: the other ranks of its job.

    A child that has ended, which has no command any more, is one of them if another one is.
    """
    stat, command = ProcFiles(pid).stat(), _command(pid)
    if stat is None or stat.ppid <= 1 or not command:
        return []
    others = [one for one in children_of(stat.ppid) if one != pid and _command(one) in (command, "")]
    return others if any(map(_command, others)) else []


def _command(pid: int) -> str:
    """A process's command; without the numbers of descriptors that multiprocessing gives each child it starts."""
    command = " ".join(ProcFiles(pid).command())
    return re.sub(r"\d+", "", command) if "multiprocessing" in command else command
