"""Results of a long series in a file, a line of JSON each: a series that was stopped goes on where it was.

Interface: `Kept(path)`; `results` are those that the file had, `add` appends one. A result counts only for the code
that made it: a file of another minidl or another torch is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

import minidl


@functools.cache
def code() -> str:
    """Which code makes results now: versions, and a digest of this package's files."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]
    return f"minidl {minidl.__version__} ({digest}), torch {torch.__version__}"


class Kept:
    """The results in the file at `path`, which need not exist; None keeps nothing. A line that was cut is left out.

    Raises ValueError if a line is no result, or is one of other code.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results = self._read(path) if path is not None and path.exists() else []

    def _read(self, path: Path) -> list[dict[str, Any]]:
        out = []
        for line in path.read_bytes().splitlines():
            try:
                result = json.loads(line)
            except ValueError:
                continue
            made_by = result.get("code") if isinstance(result, dict) else None
            if made_by != code():
                raise ValueError(f"{path}: results of {made_by or 'other code'}; this is {code()}: name another file")
            out.append(result)
        return out

    def add(self, **result: Any) -> None:
        """Append a result, and what code made it, so that a kill from now on does not lose it."""
        if self.path is None:
            return
        with self.path.open("ab+") as file:
            file.seek(-1 if file.tell() else 0, os.SEEK_END)
            begun = file.read() not in (b"", b"\n")  # a line that was cut stands alone
            file.write(b"\n" * begun + json.dumps({**result, "code": code()}).encode() + b"\n")
