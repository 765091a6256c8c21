"""The watchdog of a trace: its settings, its start and its end in the traced process.

Interface: `settings(...)` says when it acts, `begin(recording)` starts it, `end(dog)` ends it. `answer(recording)` lets
it ask a process for its stacks.

MINIDL_HANG_AFTER=SECONDS starts it with each trace, "off" never; MINIDL_ON_HANG is "report", "raise" or "kill";
MINIDL_HANG_STACKS=off sends no signal for stacks (when one is sent: `minidl.watch.dumps`), and samples none (see
`stack_samples`). The watchdog is a process (see `minidl.watch`), and no child of this one: a program that waits
for any child does not meet it. It ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from minidl.process_stat import HeldProcess
from minidl.record import recorder, stack_dumps, stack_samples
from minidl.record.recorder import TraceConfig
from minidl.tracefile.folded import KEPT
from minidl.tracefile.format import TraceError
from minidl.wire.errors import LoaderHangError

ON_HANG: Final = ("report", "raise", "kill")
RUN_SECONDS: Final = 120.0
"""When `minidl run` calls a wait a hang, unless it is told otherwise."""

_PACKAGE = Path(__file__).parents[2]
_END_SECONDS: Final = 2.0

_BOOT: Final = (
    "import json, os, sys; os.fork() and os._exit(0); os.setsid(); "
    "given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); "
    "from minidl.watch.{module} import main; main(**given)"
)
"""What an interpreter beside this one runs. The process that was started ends at once, so the other is no child of
ours."""


def _beside(module: str, fds: tuple[int, ...] = (), **given: Any) -> None:
    """Start a process that runs `main(**given)` of a module of `minidl.watch`. Raises OSError."""
    given["path"] = [*dict.fromkeys(place or os.getcwd() for place in [*sys.path, str(_PACKAGE)])]
    started = subprocess.Popen(
        [sys.executable, "-S", "-c", _BOOT.format(module=module), json.dumps(given)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
        env=_environment(),
        pass_fds=fds,
    )
    started.wait()


def seconds(text: str) -> float:
    """Read "off" as 0, or a number of seconds above 0. Raises ValueError."""
    if text == "off":
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e7:
        raise ValueError(f"{text!r} is neither 'off' nor a number of seconds above 0")
    return value


def settings(hang_after: float | None = None, on_hang: str | None = None) -> dict[str, Any]:
    """Return the watchdog's fields of a TraceConfig; None = as the environment says, which by default is none.

    Raises TraceError for what they do not allow.
    """
    after, what, stacks = (os.environ.get(f"MINIDL_{name}", "") for name in ("HANG_AFTER", "ON_HANG", "HANG_STACKS"))
    if stacks not in ("", "on", "off"):
        raise TraceError(f"MINIDL_HANG_STACKS is 'on' or 'off', not {stacks!r}")
    if hang_after is None:
        try:
            hang_after = seconds(after or "off")
        except ValueError as error:
            raise TraceError(f"MINIDL_HANG_AFTER: {error}") from error
    chosen = on_hang or what or "report"
    if chosen not in ON_HANG:
        raise TraceError(f"{'on_hang' if on_hang else 'MINIDL_ON_HANG'} is one of {', '.join(ON_HANG)}, not {chosen!r}")
    return {"hang_after": hang_after, "on_hang": chosen, "hang_stacks": stacks != "off"}


def answer(recording: recorder.Recorder) -> None:
    """Let the watchdog of a trace ask this process for its stacks, if there is one, and sample this thread's."""
    if recording.config.hang_after and recording.config.hang_stacks:
        stack_dumps.answer(recording.config.directory, recording.describe)
        stack_samples.begin(recording)


class Watchdog:
    """The watchdog that this process has started. Raises OSError if it can't be."""

    def __init__(self, config: TraceConfig) -> None:
        self.pid = os.getpid()
        self.stays = False  # after the trace, until this process ends
        if config.on_hang != "report":
            _must_be_held()
        self.mine, theirs = socket.socketpair()
        self._raises = _signal_that_raises(self.mine) if config.on_hang == "raise" else 0
        own = _own_pidfd()
        given = {
            "directory": config.directory,
            "main_pid": self.pid,
            "since": time.monotonic_ns(),
            "most_bytes": config.ring_bytes,
            "channel": theirs.fileno(),
            "main_fd": own,
            "hang_after": config.hang_after,
            "on_hang": config.on_hang,
            "stacks": config.hang_stacks,
            "raises": self._raises,
        }
        try:
            _beside("watcher", (theirs.fileno(), *([own] if own >= 0 else [])), **given)
        except OSError:
            self.mine.close()
            raise
        finally:
            theirs.close()
            if own >= 0:
                os.close(own)

    def end(self) -> bool:
        """End the trace; return whether that is done, which takes some ms. A forked child leaves it alone."""
        if self.pid != os.getpid():
            return False
        ended = False
        with contextlib.suppress(OSError):
            self.mine.settimeout(_END_SECONDS)
            self.mine.sendall(b"leave" if self.stays else b"end")
            while self.mine.recv(4096):  # what it had to say, until it closes its end
                pass
            ended = True
        if self._raises and ended:
            with contextlib.suppress(ValueError):
                signal.signal(self._raises, signal.SIG_DFL)
        self.mine.close()
        return ended


def fold_if_many(config: TraceConfig, workers: int) -> None:
    """Have the files of workers that have ended folded, if there are many and no watchdog is to do that.

    workers: of the iterator that begins. See `tracefile.folded`.
    """
    with contextlib.suppress(OSError):  # then they stay as they are
        if not config.hang_after and len(os.listdir(config.directory)) >= 4 * max(KEPT, workers + 1) + 2 * workers:
            _beside("folding", directory=config.directory, most_bytes=config.ring_bytes)


def begin(recording: recorder.Recorder) -> Watchdog | None:
    """Start the watchdog of a trace, if it is to have one. A failure is said on stderr, and the run goes on."""
    global _watchdog
    if not recording.config.hang_after:
        return None
    try:
        dog = Watchdog(recording.config)
    except (OSError, ValueError) as error:
        print(f"minidl: no watchdog: {error}. The run goes on without one.", file=sys.stderr)
        return None
    answer(recording)
    stack_dumps.at_a_crash()
    _watchdog = dog
    return dog


_watchdog: Watchdog | None = None
"""The one that was started last."""


def stay_to_the_exit() -> None:
    """Let the watchdog stay after the trace, until this process ends: the program's exit handlers may hang."""
    if _watchdog is not None:
        _watchdog.stays = True


def end(dog: Watchdog | None) -> None:
    """End a watchdog's trace, if there is one; then no watchdog asks this process for its stacks any more."""
    if dog is not None and dog.end():
        stack_dumps.no_longer()


def _environment() -> dict[str, str]:
    """Return the watchdog's environment: it is no process of the run, and needs one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINIDL_", "PYTHON"))}
    home = {name: os.environ[name] for name in ("PYTHONHOME",) if name in os.environ}
    return kept | home | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _own_pidfd() -> int:
    """A pidfd of this process, which may end before the watchdog could open one; -1 = the kernel has none."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError:
        return -1


def _must_be_held() -> None:
    """Raise ValueError if the watchdog could not signal this process: without a pidfd it might mean another one."""
    try:
        HeldProcess(os.getpid()).close()
    except OSError as error:
        raise ValueError(f"--on-hang needs pidfd_open (Linux 5.3 or later), which fails: {error.strerror}") from None


def _signal_that_raises(channel: socket.socket) -> int:
    """Let a free signal raise LoaderHangError in the main thread; return it. Raises ValueError if that can't be."""
    signum = stack_dumps.free_signal()
    if signum is None:
        raise ValueError("--on-hang=raise needs a real-time signal that the program does not use, and there is none")

    def raise_hang(number: int, frame: object) -> None:
        text = b""
        with contextlib.suppress(OSError):
            text = channel.recv(4096, socket.MSG_DONTWAIT)
        raise LoaderHangError(text.decode("utf-8", "replace") or "the watchdog found that the loader hangs")

    signal.signal(signum, raise_hang)
    return signum
