"""The ablation of each guard of the loader: a program that ends well with the guard, and fails without it.

`TABLE` names for each guard a program of `guard_programs`, and its result without the guard. `outcome` runs one in
processes of its own, for a bounded time; `show` also records it, and prints it beside the explorer's counterexample.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minidl.explore.guards import GUARDS
from minidl.prove.lab import guard_programs as programs
from minidl.prove.sessions import Program, living, running

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
    bound = PATIENCE if guard and TABLE[guard][1] in (HANGS, ORPHANS) else programs.BOUND
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, program, *([guard] if guard else [])]
    recording = {} if trace is None else {"MINIDL_TRACE": str(trace.absolute()), "MINIDL_HANG_AFTER": "2"}
    with tempfile.TemporaryDirectory() as place, running(command, Path(place), TMPDIR=place, **recording) as run:
        if not run.wait_for_words(programs.WAITS, programs.BOUND):
            raise RuntimeError(f"the program {program} ended before its step that counts: {run.said()}{run.errors()}")
        return ProgramEnd(_end_of(run, bound), time.monotonic() - began)


def _end_of(run: Program, bound: float) -> str:
    """What becomes of a program within so many seconds, and of its workers if it has killed itself."""
    if not run.wait_for_end(bound):
        return HANGS
    said, code = run.said().partition(programs.WAITS)[2].strip(), run.process.returncode
    if code != -signal.SIGKILL:
        return f"bad: exit code {code}, {said}" if code else said
    deadline = time.monotonic() + bound
    while (left := living(run.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ORPHANS if left else WELL


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
    from minidl.explore.search import counterexample, in_words

    configuration = GUARDS[name].where[0]
    _, found = counterexample(GUARDS[name], configuration)
    if found is None or found.bad is None:
        yield "\nthe explorer finds no run that goes wrong"
        return
    yield f"\nthe explorer's counterexample ({configuration.describe()}), {len(found)} steps:"
    yield f"  {found.bad.kind}: {found.bad.what}"
    yield textwrap.indent(textwrap.fill("; ".join(in_words(found)), 110), "  ")
    yield f"  as a trace: minidl explore --guard {name} -o DIR"
