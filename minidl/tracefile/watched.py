"""What a watchdog saw of a run: signs of life, deaths, and evidence of each hang.

Interface: `read(attachments)` -> `Watched`, whose `looks` hold evidence (see `minidl.hang.evidence`); a trace's is
`Trace.watched`. `description`, `sample`, `ended`, `look`, `said` and `over` make the lines.

It is an attachment of the kind "watch" (see `attachments`): JSON by the line, each line stands alone, and a damaged one
is left out. Times are CLOCK_MONOTONIC ns. Reading executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from minidl.hang.evidence.model import RunEvidence
from minidl.tracefile import attachments
from minidl.tracefile.attachments import line, time_in
from minidl.tracefile.events import Call
from minidl.tracefile.facts import LATEST

KIND: Final = "watch"


class Vitals(NamedTuple):
    """One sample of one process. state: the kernel's letter; cpu_ms: used since its start; memory in KiB.

    shm_kib: of `rss_kib`, what is shared memory. fds, threads: how many. wchan: the kernel's function that its main
    thread sleeps in, "" = none or hidden. -1 = could not be read.
    """

    state: str
    cpu_ms: int
    rss_kib: int
    shm_kib: int
    fds: int
    threads: int
    wchan: str = ""


@dataclass(frozen=True)
class Sample:
    """All processes at one moment. shm_free: bytes that /dev/shm has left, oom_kills: of the cgroup; -1 = unknown."""

    at: int
    processes: dict[int, Vitals]
    shm_free: int = -1
    oom_kills: int = -1


@dataclass(frozen=True)
class Ended:
    """A process that the watchdog saw end. code: as multiprocessing's exitcode, -9 = SIGKILL; None = not seen."""

    pid: int
    at: int
    code: int | None


@dataclass(frozen=True)
class Stall:
    """A wait that took too long. call: the open call of the iterator; pid: of the process that waits.

    `Call.OWN`: no iterator of the process waits for anything, and its own code has not come back to one.
    """

    loader: int
    call: Call
    since: int
    pid: int


@dataclass(frozen=True)
class StallLook:
    """Evidence of one moment of a stall. number: from 1, in its stall; evidence: as `hang.evidence` writes it."""

    stall: Stall
    number: int
    at: int
    evidence: dict[str, Any]

    def seen(self) -> RunEvidence:
        """Return the evidence. Raises EvidenceError if it is damaged, or of another version."""
        return RunEvidence.from_json(json.dumps(self.evidence))


@dataclass
class Watched:
    """What the watchdogs of a trace saw. hang_after_s: their setting, 0 = there was none.

    complete: they ended with their run, and were not killed. cpu_ms: CPU time that they used themselves.
    """

    hang_after_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    looks: list[StallLook] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    complete: bool = False
    cpu_ms: int = 0
    damaged: int = 0

    def __bool__(self) -> bool:
        return bool(self.hang_after_s or self.samples)

    def seen_alive(self) -> dict[int, int]:
        """pid -> when it was seen alive last."""
        samples = [(pid, vitals, one.at) for one in self.samples for pid, vitals in one.processes.items()]
        return {pid: at for pid, vitals, at in samples if vitals.state not in "ZX"}

    def most_threads(self, pid: int) -> int:
        """The most threads that a process was seen to have; -1 = unknown."""
        return max((one.processes[pid].threads for one in self.samples if pid in one.processes), default=-1)

    def death_of(self, pid: int) -> Ended | None:
        return next((one for one in self.ended if one.pid == pid), None)

    @property
    def until(self) -> int:
        """The last moment that anything was seen at; 0 = none."""
        last: list[Sample | Ended | StallLook] = [*self.samples[-1:], *self.ended[-1:], *self.looks[-1:]]
        return max((one.at for one in last), default=0)


# --- Writing ----------------------------------------------------------------------------------------------------------
def description(version: str, pid: int, hang_after_s: float, **facts: Any) -> bytes:
    """Return the first line. pid: of the process that began the trace."""
    clock = "CLOCK_MONOTONIC, read by the watchdog"
    return attachments.description(KIND, "minidl", version, pid, clock, 0, hang_after_s=hang_after_s, **facts)


def sample(one: Sample) -> bytes:
    processes = {str(pid): list(vitals) for pid, vitals in one.processes.items()}
    return line({"sample": one.at, "processes": processes, "shm_free": one.shm_free, "oom_kills": one.oom_kills})


def ended(one: Ended) -> bytes:
    return line({"ended": one.pid, "at": one.at, "code": one.code})


def look(stall: Stall, number: int, at: int, evidence: Mapping[str, Any]) -> bytes:
    about = {"loader": stall.loader, "what": stall.call.value, "since": stall.since, "pid": stall.pid}
    return line({"look": number, "at": at, "stall": about, "evidence": evidence})


def said(text: str) -> bytes:
    """Return the line on what the watchdog has said on stderr."""
    return line({"said": text})


def over(cpu_ms: int) -> bytes:
    """Return the last line. cpu_ms: what the watchdog itself has used."""
    return line({"end": True, "cpu_ms": cpu_ms})


# --- Reading ----------------------------------------------------------------------------------------------------------
def read(files: Iterable[attachments.Attachment]) -> Watched:
    """Read the attachments of this kind; nothing here raises for what is in a file."""
    out = Watched(complete=True)
    found = [one for one in files if one.about]
    for attachment in found:
        after = attachment.about.get("hang_after_s")
        out.hang_after_s = max(out.hang_after_s, float(after) if isinstance(after, (int, float)) else 0.0)
        try:
            lines = attachment.data().split(b"\n")[1:]
        except OSError:
            continue
        complete = False
        for text in filter(None, lines):
            try:
                complete |= _take(out, json.loads(text))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                out.damaged += 1
        out.complete &= complete
    out.complete &= bool(found)
    out.samples.sort(key=lambda one: one.at)
    out.ended.sort(key=lambda one: one.at)
    out.looks.sort(key=lambda one: one.at)
    return out


def _take(out: Watched, content: dict[str, Any]) -> bool:
    """Take in a line; return whether it is the last one. Raises ValueError, TypeError or KeyError if it is damaged."""
    if "sample" in content:
        processes = {int(pid): _vitals(values) for pid, values in content["processes"].items()}
        shm_free, oom_kills = _number(content["shm_free"]), _number(content["oom_kills"])
        out.samples.append(Sample(time_in(content["sample"]), processes, shm_free, oom_kills))
    elif "ended" in content:
        code = content["code"]
        out.ended.append(Ended(int(content["ended"]), time_in(content["at"]), None if code is None else int(code)))
    elif "look" in content:
        about, evidence = content["stall"], content["evidence"]
        if not isinstance(evidence, dict):
            raise TypeError("evidence that is no object")
        stall = Stall(int(about["loader"]), Call(about["what"]), time_in(about["since"]), int(about["pid"]))
        out.looks.append(StallLook(stall, int(content["look"]), time_in(content["at"]), evidence))
    elif "said" in content:
        out.said.append(str(content["said"]))
    elif "note" not in content:
        out.cpu_ms += int(content.get("cpu_ms", 0))
        return content["end"] is True
    return False


def _vitals(values: Sequence[Any]) -> Vitals:
    state, *numbers, wchan = values
    cpu, rss, shm, fds, threads = map(_number, numbers)
    return Vitals(str(state), cpu, rss, shm, fds, threads, str(wchan))


def _number(value: Any) -> int:
    """A number that an array of 64-bit integers holds."""
    number = int(value)
    if abs(number) >= LATEST:
        raise ValueError("no number of the kernel's")
    return number
