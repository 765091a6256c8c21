"""Each guard of the loader, taken out of the running code: a program that ends well with it, and does not without it.

`TABLE` names for each guard a program of `guard_programs`, and what happens without the guard. Every program runs in
processes of its own, for a bounded time. `python tests/explore/check_live_guards.py` runs all, or those named, and
prints the table.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

import guard_programs as programs
import workloads as wl

from minidl.explore.guards import GUARDS

HANGS, ORPHANS = "hangs", "leaves orphans"
PATIENCE: Final = 4.0
"""Seconds after which a program that should hang counts as hanging; the waits of such programs last 0.3 s."""

SCRIPT: Final = "import guard_programs; guard_programs.main()"

TABLE: Final = {
    # guard: the program, and how what it says begins without the guard
    "sentinel": (programs.closes, "bad: 2 signals to workers"),
    "none-after-exhaustion": (programs.ends_streams, "bad: 2 signals to workers"),
    "done-event": (programs.closes, "bad: exit codes [1, 1]"),
    "pin-done-event": (programs.closes_pinned, "bad: the pin thread did not end in time"),
    "pin-sentinel": (programs.closes_pinned, "bad: the pin thread did not end in time"),
    "watchdog": (programs.the_loader_is_killed, ORPHANS),
    "get-timeout-loader": (programs.a_worker_is_killed, HANGS),
    "get-timeout-worker": (programs.the_loader_is_killed, ORPHANS),
    "get-timeout-pin": (programs.a_worker_is_killed_in_a_message_pinned, "bad: the pin thread did not end in time"),
    "liveness-check": (programs.a_worker_is_killed, HANGS),
    "pin-liveness-check": (programs.the_pin_thread_dies, HANGS),
    "cancel-join-index": (programs.exits_unclosed_with_a_full_index_queue, HANGS),
    "join-results-until-done": (programs.a_stream_ends_while_its_feeder_writes, HANGS),
    "cancel-join-results-when-done": (programs.closes_with_full_pipe, "bad: "),
    "pin-first": (programs.closes_while_a_worker_tears, "bad: the pin thread did not end in time"),
    "bounded-joins": (programs.closes_while_a_worker_is_stuck, HANGS),
    "daemon": (programs.exits_unclosed, HANGS),
    "exit-flag": (programs.exits_while_a_lock_is_held, HANGS),
    "bounded-read": (programs.a_worker_is_killed_in_a_message, HANGS),
    "bounded-index-read": (programs.the_loader_is_killed_in_a_message, ORPHANS),
    "lock-free-event": (programs.a_worker_is_killed_asking_the_done_event, HANGS),
    "leavers-checked": (programs.a_worker_is_killed_after_its_stream, HANGS),
    "bounded-pin-join": (programs.closes_while_the_pin_thread_is_stuck, HANGS),
    "pin-told-at-last": (programs.is_interrupted_before_the_pin_thread_is_told, "bad: the pin thread is alive"),
    "kill-at-last": (programs.closes_while_a_worker_ignores_sigterm, HANGS),
    "cancel-join-results-when-orphaned": (programs.the_loader_is_killed_with_full_pipe, ORPHANS),
}


@dataclass(frozen=True)
class Outcome:
    """How a program ended: "well", "bad: ...", HANGS or ORPHANS; and how many seconds that took."""

    what: str
    seconds: float


def outcome(program: str, guard: str = "") -> Outcome:
    """Run a program, without a guard if one is named; nothing that it has started is left afterwards."""
    began = time.monotonic()
    patience = PATIENCE if guard and TABLE[guard][1] in (HANGS, ORPHANS) else wl.BOUND
    child = wl.started(SCRIPT, program, *([guard] if guard else []))
    assert child.stdout is not None
    pids: list[int] = []
    try:
        said = ""
        while "\n" not in said and (more := _read(child, wl.BOUND)):
            said += more
        assert said.startswith("waits "), f"{program} says {said!r}"
        line, _, said = said.partition("\n")
        pids = [int(pid) for pid in line.split()[1:]]
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            return Outcome(HANGS, time.monotonic() - began)
        said = (said + _read(child, 0)).strip()
        if child.returncode == -signal.SIGKILL:
            said = "well" if _gone(pids, patience) else ORPHANS
        elif child.returncode:
            said = f"bad: exit code {child.returncode}, {said}"
        return Outcome(said, time.monotonic() - began)
    finally:
        for pid in (child.pid, *pids):
            _kill(pid)
        child.wait()
        child.stdout.close()
        wl.wait_until_gone(pids)


def _read(child: subprocess.Popen[str], seconds: float) -> str:
    """What the program has written, once there is something; its workers may hold the pipe open after its end."""
    assert child.stdout is not None
    pipe = child.stdout.fileno()
    return os.read(pipe, 1 << 16).decode() if select.select([pipe], [], [], seconds)[0] else ""


def _gone(pids: list[int], seconds: float) -> bool:
    """Whether these processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(wl.alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _kill(pid: int) -> None:
    if wl.alive(pid):
        os.kill(pid, signal.SIGKILL)


def main(*only: str) -> int:
    """Print the table; 1 if a program ends otherwise than it says."""
    wrong = 0
    for name, (program, without) in TABLE.items():
        if only and name not in only:
            continue
        kept, lost = outcome(program.__name__), outcome(program.__name__, name)
        right = kept.what == "well" and lost.what.startswith(without)
        wrong += not right
        print(f"{name:<34} {'' if right else 'WRONG: '}{program.__name__}: {kept.what}; without it: {lost.what}")
        print(f"    it {GUARDS[name].purpose} ({kept.seconds:.1f} s, {lost.seconds:.1f} s)", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
