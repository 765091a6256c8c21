"""torch with patches from this folder, without changing the installed one: `python patched.py PATCH,... PROGRAM ...`.

PATCH is the name of a finding, "all", or "none". The files that a patch changes are copied into a temporary folder and
patched there; every Python process of PROGRAM, workers started by spawn included, imports them from it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FOR_TORCH = "2.13."
"""How the version begins that the patches are for."""

SITE = """
import importlib.abc, importlib.util, pathlib, sys

class Patched(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        file = pathlib.Path(__file__).parent.joinpath(*name.split(".")).with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None

sys.meta_path.insert(0, Patched())
"""
"""What each process runs first: imports of the patched modules come from the folder."""


def patches(names: str) -> list[Path]:
    """The patches with these names, separated by commas; "all" is one file, because some touch the same lines.

    Exits with a message if there is no such patch.
    """
    there = {"all": HERE / "all.patch"} | {patch.parent.name: patch for patch in sorted(HERE.glob("*/fix.patch"))}
    chosen = [] if names == "none" else names.split(",")
    for name in chosen:
        if name not in there:
            sys.exit(f"no patch {name!r}: choose from none, {', '.join(there)}")
    return [there[name] for name in chosen]


def overlay(folder: Path, chosen: list[Path]) -> dict[str, str]:
    """Fill the folder with the patched modules; return the variables with which Python imports them.

    Raises subprocess.CalledProcessError if a patch does not apply to the installed torch.
    """
    for patch in chosen:
        for line in patch.read_text().splitlines():
            name = line.removeprefix("--- a/")
            if name != line and not (folder / name).exists():
                package, _, rest = name.partition("/")
                installed = Path(str(importlib.util.find_spec(package).origin)).parent / rest  # type: ignore[union-attr]
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(installed.read_bytes())
        command = ["patch", "-p1", "--no-backup-if-mismatch", "-s", "-i", str(patch.resolve())]
        subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    (folder / "sitecustomize.py").write_text(SITE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python patched.py PATCH,... PROGRAM ...; PATCH is the name of a finding, all, or none")
    torch_version = importlib.metadata.version("torch")
    if sys.argv[1] != "none" and not torch_version.startswith(FOR_TORCH):
        sys.exit(f"the patches are for torch {FOR_TORCH}x, and this is {torch_version}")
    with tempfile.TemporaryDirectory() as folder:
        variables = overlay(Path(folder), patches(sys.argv[1]))
        sys.exit(subprocess.run([sys.executable, *sys.argv[2:]], env=os.environ | variables, check=False).returncode)
