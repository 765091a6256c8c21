"""Run each finding's program in fresh processes, and print what it says: `python run_all.py [NAME ...]`.

Three ways: on torch as it is, where it must show the hole; with the patch that mends it, if the patches are for this
torch; and with the guards of `minidl.harden()`. Exits with 1 if a program says something else. The seconds are those of
the whole process.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import time
from pathlib import Path

from patched import FOR_TORCH

HERE = Path(__file__).parent
BOUND = 90.0
"""Seconds within which a program ends: each has a bound of its own, of 14 s at most."""

HARDENED = """
import runpy, sys, minidl, minidl.loader.worker
minidl.loader.worker.MP_STATUS_CHECK_INTERVAL = 0.5  # 5 s, shortened, as the programs shorten torch's
minidl.harden(without=[name for name in sys.argv[2].split(",") if name])
runpy.run_path(sys.argv[1], run_name="__main__")
"""

NAMES = sorted(page.parent.name for page in HERE.glob("*/README.md"))


def patch_of(name: str) -> str:
    """The finding whose patch mends this one, by its page; "" if none does."""
    found = re.search(r"\]\((?:\.\./)?([\w-]*)/?fix\.patch\)", (HERE / name / "README.md").read_text())
    return "" if found is None else found[1] or name


def said(name: str, *before: str, after: tuple[str, ...] = ()) -> tuple[str, float]:
    """The last line of a program, run by Python with these arguments before and after it; and its seconds."""
    command, began = [sys.executable, *before, str(HERE / name / "program.py"), *after], time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=False)
    return (done.stdout.splitlines() or [done.stderr])[-1], time.monotonic() - began


def patched(name: str, patches: str) -> tuple[str, float]:
    """The same on torch with these patches, "none" for none."""
    return said(name, str(HERE / "patched.py"), patches)


def hardened(name: str, without: str = "") -> tuple[str, float]:
    """The same with the guards of `minidl.harden()`, but for those that are named."""
    return said(name, "-c", HARDENED, after=(without,))


def outcome(said_by: tuple[str, float] | None, must: str) -> str:
    """A cell of the table; it begins with "WRONG" if the program's last line does not begin with `must`."""
    if said_by is None:
        return "-"
    words, seconds = said_by
    return f"{must} {seconds:.1f} s" if words.startswith(must) else f"WRONG: {words}"


def main(names: list[str]) -> int:
    """Print a line for each program; 1 if one of them says what it must not."""
    if unknown := sorted(set(names) - set(NAMES)):
        sys.exit(f"run_all.py: {', '.join(unknown)}: no such finding; give no name, or some of {', '.join(NAMES)}")
    wrong, torch_version = 0, importlib.metadata.version("torch")
    print(f"torch {torch_version}\n{'hole':<22} {'as it is':<12} {'patched':<12} hardened")
    for name in names or NAMES:
        patch = patch_of(name) if torch_version.startswith(FOR_TORCH) else ""
        guarded = "| hardened from outside | yes" in (HERE / name / "README.md").read_text()
        as_it_is = outcome(patched(name, "none"), "hole")
        mended = outcome(patched(name, patch) if patch else None, "healed")
        outside = outcome(hardened(name) if guarded else None, "healed")
        print(f"{name:<22} {as_it_is:<12} {mended:<12} {outside}", flush=True)
        wrong += "WRONG" in as_it_is + mended + outside
    print(f"{wrong or 'none'} of {len(names or NAMES)} said something else than it must")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
