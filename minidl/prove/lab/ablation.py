"""The ablation of each guard of the loader: a program that ends well with the guard, and fails without it.

`TABLE` names for each guard a program of `guard_programs`, and its result without the guard. `outcome` runs one in
processes of its own, for a bounded time; `show` also records it, and prints it beside the explorer's counterexample.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import minidl
from minidl.explore.guards import GUARDS
from minidl.process_stat import is_alive, kill_if
from minidl.prove.lab import guard_programs as programs

WELL, HANGS, ORPHANS = "well", "hangs", "leaves orphans"
PATIENCE: Final = 4.0
"""Seconds after which a program that should hang counts as hanging; the waits of such programs last 0.3 s."""

SCRIPT: Final = "from minidl.prove.lab import guard_programs; guard_programs.main()"

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
    "epoch-in-acknowledgement": (programs.is_interrupted_while_an_epoch_begins, "bad: DispatchError"),
    "leftovers-ended": (programs.is_interrupted_while_it_joins, "bad: a worker is alive"),
    "pin-sentinel-left": (programs.exits_with_the_pin_sentinel_unwritten, HANGS),
}


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended: WELL, "bad: ...", HANGS or ORPHANS; and how many seconds that took."""

    what: str
    seconds: float


def outcome(program: str, guard: str = "", trace: Path | None = None) -> ProgramEnd:
    """Run a program, without a guard if one is named; nothing that it has started is left afterwards.

    trace: record it there.
    """
    began = time.monotonic()
    patience = PATIENCE if guard and TABLE[guard][1] in (HANGS, ORPHANS) else programs.BOUND
    child = _started(program, guard, trace)
    assert child.stdout is not None
    pids: list[int] = []
    try:
        said = ""
        while "\n" not in said and (more := _read(child, programs.BOUND)):
            said += more
        if not said.startswith("waits "):
            raise RuntimeError(f"the program {program} ended before its step that counts, and said {said!r}")
        line, _, said = said.partition("\n")
        pids = [int(pid) for pid in line.split()[1:]]
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            return ProgramEnd(HANGS, time.monotonic() - began)
        said = (said + _read(child, 0)).strip()
        if child.returncode == -signal.SIGKILL:
            said = WELL if _gone(pids, patience) else ORPHANS
        elif child.returncode:
            said = f"bad: exit code {child.returncode}, {said}"
        return ProgramEnd(said, time.monotonic() - began)
    finally:
        for pid in (child.pid, *pids):
            kill_if(pid, lambda fields: int(fields[3]) == child.pid)
        child.wait()
        child.stdout.close()
        if not _gone(pids, programs.BOUND):
            raise RuntimeError(f"still there: {list(filter(is_alive, pids))}")


def _started(program: str, guard: str, trace: Path | None) -> subprocess.Popen[str]:
    """Start a program in a session of its own."""
    paths = [str(Path(minidl.__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if trace is not None:
        environment |= {"MINIDL_TRACE": str(trace), "MINIDL_HANG_AFTER": "2"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, program, *([guard] if guard else [])]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def _read(child: subprocess.Popen[str], seconds: float) -> str:
    """The program's output, once there is some; its workers may keep the pipe open after its end."""
    assert child.stdout is not None
    pipe = child.stdout.fileno()
    return os.read(pipe, 1 << 16).decode() if select.select([pipe], [], [], seconds)[0] else ""


def _gone(pids: list[int], seconds: float) -> bool:
    """Whether these processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- For people -------------------------------------------------------------------------------------------------------
def listed() -> Iterator[str]:
    """A line for each guard: what it is for, and what its program does without it."""
    for name, guard in GUARDS.items():
        yield f"{name:<34} {guard.purpose}"
        yield f"{'':<34} without it, {TABLE[name][0].__name__} {_verb(TABLE[name][1])}"


def _verb(what: str) -> str:
    return what if what in (HANGS, ORPHANS) else f"says {what.strip(' :')!r}"


def show(name: str, trace: Path, tell: Callable[[str], None]) -> bool:
    """Run the program of a guard with and without it; whether it ended well with it, and as expected without it.

    tell: gets the lines, of the recorded run and of the model's.
    """
    guard, (program, expected) = GUARDS[name], TABLE[name]
    tell(f"{name}: it {guard.purpose}")
    tell(f"  ours: {guard.ours}; torch: {guard.upstream or 'has none'}")
    kept = outcome(program.__name__)
    tell(f"\n{program.__name__}, with the guard: {kept.what} ({kept.seconds:.1f} s)")
    lost = outcome(program.__name__, name, trace)
    ended = f" (killed after {lost.seconds:.1f} s)" if lost.what in (HANGS, ORPHANS) else f" ({lost.seconds:.1f} s)"
    tell(f"without it: {lost.what}{ended}; expected: {_verb(expected)}")
    for line in (*_recorded(trace), *_explored(name)):
        tell(line)
    if kept.what != WELL:
        tell(f"\n{program.__name__} did not end well even with the guard: this run shows nothing")
    elif not lost.what.startswith(expected):
        tell(f"\nwithout the guard, {program.__name__} did not end as expected: the run does not show its purpose")
    return kept.what == WELL and lost.what.startswith(expected)


def _recorded(trace: Path) -> Iterator[str]:
    """The headline of a recorded run, and its last state."""
    from minidl.hang.headline import headline
    from minidl.playback.stepper import Replay
    from minidl.tracefile.reader import read_trace
    from minidl.views.replay_terminal import render

    read = read_trace(trace)
    yield f"\nthe run, recorded in {trace}:"
    yield from (f"  {line}" for line in headline(read).lines())
    at = Replay(read)
    at.to(len(at))
    yield from (f"  {line}" for line in render(at, cut=False)[1:])


def _explored(name: str) -> Iterator[str]:
    """The shortest run of the model that goes wrong without the guard."""
    from minidl.explore.configurations import OURS
    from minidl.explore.model import Model
    from minidl.explore.search import shortest

    guard = GUARDS[name]
    configuration = guard.where[0]
    found = shortest(Model(configuration, OURS.without(guard.field), reduced=True))
    if found is None or found.bad is None:
        yield "\nthe explorer finds no run that goes wrong"
        return
    yield f"\nthe explorer's counterexample ({configuration.describe()}), {len(found)} steps:"
    yield f"  {found.bad.kind}: {found.bad.what}"
    steps = "; ".join(f"{who} {what}{f' {which}' if which >= 0 else ''}" for who, what, which in found.labels)
    yield textwrap.indent(textwrap.fill(steps, 110), "  ")
    yield f"  as a trace: minidl explore --guard {name} -o DIR"
