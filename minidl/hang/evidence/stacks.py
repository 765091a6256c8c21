"""Stacks of Python of other processes, through py-spy if it is installed and allowed.

Interface: `spied(pids, unseen)` -> `Stacks`, by process and thread. `py_spy()` finds the program.

Rules of use: py-spy runs with --nonblocking: it stops no thread that it looks at. A stack that it read while the thread
ran on may be wrong, so it is only asked for stacks and not for proof. Of a frame's variables stay those of the loader's
own frames, integers, addresses of objects, and names of lock files: other values may be secret, and the evidence is
stored.
"""

from __future__ import annotations

import json
import linecache
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minidl.hang.evidence.model import Frame

MOST_FRAMES: Final = 200
_SHORT: Final = 120
_NUMBER: Final = re.compile(r"-?\d{1,20}|\[[-\d, ]{0,100}\]|\([-\d, ]{0,100}\)|None|True|False|<frame at 0x[0-9a-f]+>")
_LOCK_FILE: Final = re.compile(r"""["']([^"'\n]{1,200}\.(?:lock|lck|pid))["']""")
_HANDLERS: Final = re.compile(r"\(\d+, (<frame at 0x[0-9a-f]+)\b.*")
"""The arguments of a signal handler that takes them as one tuple."""
_OBJECT: Final = re.compile(r"<(?!frame )[^<>]* at (0x[0-9a-f]+)>")
_LOADERS: Final = re.compile(r"[/\\](torch[/\\]utils[/\\]data|minidl|multiprocessing)[/\\]|[/\\](threading|queue)\.py$")


@dataclass(frozen=True, slots=True)
class Stack:
    """A thread's stack, innermost frame first, as a dump or py-spy has shown it."""

    frames: tuple[Frame, ...]
    thread_name: str = ""
    gil: bool | None = None


Stacks = dict[int, dict[int, Stack]]
"""process -> thread -> its stack"""


def py_spy() -> str | None:
    """The path of py-spy: beside this Python, or on the search path; None = it is not installed."""
    homes = Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))  # under -S the scripts are not a venv's
    return next((str(one) for home in homes if (one := home / "py-spy").exists()), shutil.which("py-spy"))


def spied(
    pids: Iterable[int],
    unseen: Callable[[int, str], None],
    program: str | None = None,
    seconds: float = 5.0,
    altogether: float = 30.0,
) -> Stacks:
    """Ask py-spy for the stacks of Python processes, for so many seconds each, and altogether.

    unseen: is told (pid, why) where there is none.
    """
    program = program or py_spy()
    found: Stacks = {}
    until = time.monotonic() + altogether
    for pid in pids:
        if program is None:
            unseen(pid, "py-spy is not installed (pip install py-spy)")
            continue
        left = until - time.monotonic()
        if left <= 0:
            unseen(pid, f"py-spy took {altogether:g} s for the processes before")
            continue
        text, why = _dump(program, pid, min(seconds, left))
        if why:
            unseen(pid, why)
        else:
            found[pid] = parsed(text)
    return found


def _dump(program: str, pid: int, seconds: float) -> tuple[str, str]:
    """The answer of py-spy about a process, or why there is none. A process that runs on may take several tries."""
    command = [program, "dump", "--nonblocking", "--locals", "--full-filenames", "--json", "--pid", str(pid)]
    why = ""
    for _ in range(3):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return "", f"py-spy gave no answer within {seconds:g} s"
        except OSError as error:
            return "", f"py-spy can't be run: {error.strerror}"
        if done.returncode == 0 and done.stdout.lstrip().startswith("["):
            return done.stdout, ""
        why = _explained(done.stderr)
        if why == NOT_ALLOWED:
            break
    return "", why


NOT_ALLOWED: Final = "py-spy may not look into it (ptrace is forbidden here; as root, or with CAP_SYS_PTRACE, it may)"


def _explained(text: str) -> str:
    if re.search(r"ermission|not permitted|os error 1\b|EPERM|root", text):
        return NOT_ALLOWED
    first = next((line.strip() for line in text.splitlines() if line.strip()), "it said nothing")
    return f"py-spy failed: {first[:160]}"


def parsed(text: str) -> dict[int, Stack]:
    """Thread -> stack, of py-spy's JSON; {} if that is not what py-spy writes."""
    try:
        return {int(one["os_thread_id"]): _stack(one) for one in json.loads(text) if one.get("os_thread_id")}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _stack(one: Mapping[str, Any]) -> Stack:
    frames = []
    for frame in one["frames"][:MOST_FRAMES]:
        file = str(frame["filename"])
        seen = {str(local["name"]): str(local.get("repr")) for local in frame.get("locals") or ()}
        line = int(frame["line"])
        frames.append(frame_at(str(frame["name"]), file, line, kept(file, seen)))
    gil = one.get("owns_gil")
    return Stack(tuple(frames), str(one.get("thread_name") or ""), gil if isinstance(gil, bool) else None)


def kept(file: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a frame that are kept: the loader's, integers, a signal handler's frame, objects' addresses."""
    if _LOADERS.search(file):
        return {name: text[:_SHORT] for name, text in variables.items()}
    plain = {name: text for name, text in variables.items() if _NUMBER.fullmatch(text) or _LOCK_FILE.fullmatch(text)}
    plain |= {name: f"{found[1]}>" for name, text in variables.items() if (found := _HANDLERS.fullmatch(text))}
    return plain | {name: found[1] for name, text in variables.items() if (found := _OBJECT.fullmatch(text))}


def named_lock_files(frames: Iterable[Frame]) -> list[str]:
    """The names of lock files among the variables of frames."""
    texts = dict.fromkeys(text for frame in frames for text in frame.variables.values())
    return [found[1] for text in texts if (found := _LOCK_FILE.fullmatch(text))]


def frame_at(function: str, file: str, line: int, variables: dict[str, str]) -> Frame:
    """A frame with what its file says of it, if that is here."""
    around = () if _INSTALLED.search(file) else within(file, line)
    return Frame(function, file, line, variables, source_of(file, line), around)


_INSTALLED: Final = re.compile(r"(site|dist)-packages|/lib/python3")


def source_of(file: str, line: int) -> str:
    """A line of a program's source, "" if it is not here; before a sleep, the heads of the blocks that it is in."""
    text = linecache.getline(file, line)
    heads = _heads(file, line) if "sleep(" in text else []
    return " ".join([*heads, text.strip()])[:_SHORT]


_HEAD: Final = re.compile(r"\s*(while|for|if|elif|except)\b.*:\s*$")
_NEAR: Final = 30
"""Lines above a sleep in which the head of its loop is looked for."""


def _heads(file: str, line: int) -> list[str]:
    """The heads of the two innermost blocks around a line: why it sleeps there, and until when."""
    found: list[str] = []
    depth = _depth(linecache.getline(file, line))
    for above in range(line - 1, max(0, line - _NEAR), -1):
        text = linecache.getline(file, above)
        if not text.strip() or _depth(text) >= depth:
            continue
        depth = _depth(text)
        if _HEAD.match(text):
            found.insert(0, text.strip())
        elif text.lstrip().startswith(("def ", "async def ", "class ")):
            break
        if len(found) == 2:
            break
    return found


_TAKES: Final = re.compile(r"\s*(async )?with\b|.*\.(acquire|release)\(")


def within(file: str, line: int) -> tuple[str, ...]:
    """The `with` statements around a line, and the calls of acquire and release before it in its function."""
    found: list[str] = []
    depth = _depth(linecache.getline(file, line))
    for above in range(line - 1, max(0, line - _NEAR), -1) if depth else ():
        text = linecache.getline(file, above)
        if not text.strip() or _depth(text) > depth:
            continue
        around, depth = _depth(text) < depth, _depth(text)
        if text.lstrip().startswith(("def ", "async def ", "class ")):
            break
        if (taken := _TAKES.match(text)) and (around or taken[2]):
            found.append(text.strip()[:_SHORT])
    return tuple(found)


def _depth(text: str) -> int:
    return len(text) - len(text.lstrip())
