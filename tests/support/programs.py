"""Programs that a test writes and runs as a user would."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NOT_HANDED_ON = ("MINIDL_RUN", "MINIDL_TRACE", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What an outer run or launcher may have put into the environment of the tests."""


def write(path: Path, program: str) -> Path:
    """Write a program, and the folders above it; its lines may be indented."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(program))
    return path


def python(*arguments: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this Python; the package is found where the tests find it."""
    own = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=own | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=110,
    )


def loaded_after(statements: str, **env: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `statements`."""
    done = python("-c", f"{statements}\nimport sys; print(*sys.modules, sep='\\n')", cwd=ROOT, **env)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


NOBODY = 65534
"""The user that runs what root would not fail at: limits of a user, permissions, what needs a capability."""


_AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
)  # fmt: skip


@functools.cache
def _others_run_python() -> bool:
    probe = f"import numpy, os; os.stat({str(ROOT / 'minidl' / '__init__.py')!r})"
    return (
        shutil.which("setpriv") is not None
        and not subprocess.run(
            [*_AS_NOBODY, sys.executable, "-c", probe], cwd="/", capture_output=True, timeout=60
        ).returncode
    )


def unprivileged(
    program: str, *arguments: object, seconds: float = 110, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program as another user without capabilities, or as this one, if that is not root already.

    prefix: a command that root runs before it gives up its rights.

    Skips the test if the user can't read this Python, or the package, where they are. The program may fork, but it may
    find no Python that it could execute.
    """
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    if os.geteuid() == 0:
        if not _others_run_python():
            pytest.skip("setpriv is not installed, or no other user can read this Python or this folder")
        command = [*prefix, *_AS_NOBODY, *command]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    env = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=seconds)
