"""Rules for threads that move by themselves: sleep, a GPU, computing, no CPU; and the last rule, for all the rest."""

from __future__ import annotations

import os
import re
from typing import Final

from minidl.hang.chain import Chain
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import EvidenceLine, HangCause, Sure
from minidl.hang.limits import LONG
from minidl.hang.places import USERS
from minidl.hang.rules.activity import any_at_work, at_work, holders_of, times_asleep
from minidl.hang.rules.judgement import Judgement, source_of, wait_seen

_IN_BLOCK: Final = re.compile(r"(while|for|if|elif|except)\b")

STARVED: Final = 0.05
"""Share of a CPU below which a thread that is ready to run does not compute: it waits for a CPU."""


def sleeps(chain: Chain) -> Judgement | None:
    end, apart, times = chain.end, chain.end.case.apart, times_asleep(chain.end)
    if end.in_timed_wait:
        helped = any(map(at_work, end.case.helpers(end.pid, but=end.tid))) or any_at_work(end.case, holders_of(end))
        return Judgement(
            HangCause.SLEEP, f"is {end.wait.words}", Sure.LIKELY, (wait_seen(end),), fix=_SHORTER, helped=helped
        )
    if end.kind is not Blocked.SLEEPS:
        return None
    what, seen = f"is {end.wait.words}", wait_seen(end)
    source = end.place.inside[0].source if end.place.inside else ""
    at = f", in `{source}`" if _IN_BLOCK.match(source) and end.call.timeout <= LONG else ""
    what += at
    if times:
        what = f"polls: it slept for about {apart / times:.1g} s repeatedly in the {apart:.1f} s observed{at}"
        seen = EvidenceLine(f"it fell asleep {times} times between the looks, at one place", source_of(end))
    fix = _OF_A_FILE if at and _FILE.search(source) else ""
    return Judgement(HangCause.SLEEP, what, facts=(seen,), fix=fix, moves=0 <= end.call.timeout <= LONG)


_SHORTER: Final = "find what should end that wait, or give it a shorter timeout"
_FILE: Final = re.compile(r"\bexists\(|\bis_file\(|\bglob\(|\bstat\(|\blistdir\(")
_OF_A_FILE: Final = (
    "see whether the file of that line is there, and which process should make or remove it: if that has ended, do it "
    "by hand; limit the wait, and lock with flock, which ends with its process"
)


_GPU: Final = re.compile(r"/dev/(nvidia\d|kfd$|dri/renderD)")
_WAITS_FOR_GPU: Final = re.compile(r"\.(item|cpu|tolist|numpy|nonzero|to|cuda)\(|_?synchronize\(|\b(bool|float|int)\(")


def waits_for_a_gpu(chain: Chain) -> Judgement | None:
    """A GPU's result is waited for with a busy CPU, which looks like computing."""
    end = chain.end
    inside = end.place.inside[0] if end.place.inside else None
    if end.kind is not Blocked.COMPUTES or not end.stays or inside is None or not _WAITS_FOR_GPU.search(inside.source):
        return None
    gpu = next((one.target for one in end.process.descriptors if _GPU.match(one.target)), None)
    if gpu is None:
        return None
    what = f"probably waits for the GPU, with a busy CPU, in `{inside.source}`"
    facts = (wait_seen(end), EvidenceLine(f"it has {gpu} open", f"/proc/{end.pid}/fd"))
    return Judgement(HangCause.DEVICE, what, Sure.LIKELY, facts, ("it computes on the CPU in that line",))


def computes(chain: Chain) -> Judgement | None:
    end, before = chain.end, chain.end.place_before
    moved = before is not None and (before.task, before.sample) != (end.place.task, end.place.sample)
    stays = before is not None and not moved
    share = end.seen.used / max(end.case.now.interval, 1e-3)
    starves = end.kind is Blocked.READY and stays and end.step in USERS and share >= STARVED
    if end.kind is not Blocked.COMPUTES and not starves:
        return None
    what = f"is {end.wait.words}" + (f" in the {end.case.apart:.1f} s observed" if stays else "")
    also = ("an endless loop, or one slow sample: look again later", "other threads use the CPUs that it needs")
    return Judgement(HangCause.COMPUTING, what, Sure.LIKELY, (wait_seen(end),), also[: 1 + starves], moves=moved)


def no_cpu(chain: Chain) -> Judgement | None:
    end, machine = chain.end, chain.end.case.now.machine
    if end.kind is not Blocked.READY:
        return None
    quotas = [one.cpu_quota for one in machine.cgroups if one.cpu_quota > 0]
    may = f"it may use CPUs {list(end.process.cpus)} of {machine.cpus}; load {machine.load:.1f}"
    facts = [EvidenceLine(may, "/proc")]
    facts += [EvidenceLine(f"its cgroup has {min(quotas):g} CPUs", "cgroup")] if quotas else []
    return Judgement(HangCause.NO_CPU, f"is {end.wait.words}", Sure.LIKELY, tuple(facts), moves=True)


def moves(chain: Chain) -> Judgement | None:
    end, then, apart = chain.end, chain.end.before, chain.end.case.apart
    if end.kind is not Blocked.MOVES:
        return None
    times = end.seen.switches[1] - then.switches[0] if then is not None else 0
    naps = bool(end.place.inside) and "sleep" in end.place.inside[0].source
    if not naps or times <= 1 or not end.stays:
        return Judgement(HangCause.NONE, f"is {end.wait.words}", moves=True)
    what = f"polls: it woke {times} times in the {apart:.1f} s observed, and is still at the same line"
    return Judgement(HangCause.SLEEP, what, Sure.LIKELY, (wait_seen(end),), moves=True)


def unknown(chain: Chain) -> Judgement:
    end, command = chain.end, chain.end.process.command
    hidden = not end.place.seen and (not command or "python" in os.path.basename(command[0]))
    what = f"is {end.wait.words}" + ("; the cause is unknown without its Python stack" if hidden else "")
    fix = "" if not hidden else "install py-spy and run the doctor again, as root or with CAP_SYS_PTRACE"
    return Judgement(HangCause.UNKNOWN, what, Sure.UNKNOWN, (wait_seen(end),), fix=fix)
