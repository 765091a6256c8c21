"""Pages with commands and what they print: `python tests/support/console.py PAGE` runs the commands and writes it anew.

A page has files, below `<!-- file: NAME -->`, and blocks below `<!-- console -->`, in which a line after "$ " is run by
a shell in the folder of these files. A line that is run has the output of the one before above it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"(<!-- console -->\n```console\n)(.*?)(```)", re.DOTALL)


def remade(page: str, folder: Path) -> str:
    """Run a page's commands in `folder`; return the page with what they print."""
    for name, text in FILE.findall(page):
        (folder / name).write_text(text)
    return BLOCK.sub(lambda block: block[1] + _run(block[2], folder) + block[3], page)


def commands_and_outputs(page: str) -> list[tuple[str, str]]:
    """Return each command with its output."""
    blocks = (re.split(r"^\$ (.*)\n", block[2], flags=re.MULTILINE)[1:] for block in BLOCK.finditer(page))
    return [pair for parts in blocks for pair in zip(parts[::2], parts[1::2], strict=True)]


def _run(block: str, folder: Path) -> str:
    commands = [line for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"{line}\n{_output(line[2:], folder)}" for line in commands)


def _output(command: str, folder: Path) -> str:
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout.replace(f"{programs}/", "")


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as place:
            path.write_text(remade(path.read_text(), Path(place)))
