"""Programs that a test writes and runs as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

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
