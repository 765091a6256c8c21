"""The processes of a job: the ranks that a launcher has started beside a process.

Interface: `ranks_beside(pid)`. Reads /proc and nothing else.
"""

from __future__ import annotations

import re

from minidl.hang.evidence.proc import ProcFiles
from minidl.process_stat import children_of


def ranks_beside(pid: int) -> list[int]:
    """The processes that the parent of a process has started with the same command: the other ranks of its job.

    They are forks of the parent, or multiprocessing's, or their launcher has given them numbers: a parent may also
    start the same program several times. A child that has ended, which has no command any more, is one of them if
    another one is.
    """
    stat, command, (rank, _) = ProcFiles(pid).stat(), _command(pid), ProcFiles(pid).rank()
    if stat is None or stat.ppid <= 1 or not command:
        return []
    forked = "multiprocessing" in command or command == _command(stat.ppid)
    others = [one for one in children_of(stat.ppid) if one != pid and _command(one) in (command, "")]
    numbers = {one: ProcFiles(one).rank()[0] for one in others if _command(one)}
    there = [one for one, number in numbers.items() if forked or (rank >= 0 <= number != rank)]
    return [one for one in others if one in there or not _command(one)] if there else []


def _command(pid: int) -> str:
    """A process's command; without the numbers of descriptors that multiprocessing gives each child it starts."""
    command = " ".join(ProcFiles(pid).command())
    return re.sub(r"\d+", "", command) if "multiprocessing" in command else command
