"""A long series: several at a time, and its results in a file, so that a series that was stopped goes on where it was.

Interface: `Kept(path)`; `results` are those that the file had, a line of JSON each; `add` appends one. A result counts
only for the code that made it: a file of another minidl or another torch is refused. `in_parallel` runs a series.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import torch

import minidl

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def in_parallel(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[Iterator[tuple[Item, Result]]]:
    """Do the work of each item, `jobs` at a time; gives items and results as they come. The end waits for what runs."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(work, item): item for item in items}
        try:
            yield ((futures[future], future.result()) for future in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)


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

    def read_as(self, what: str, make: Callable[[dict[str, Any]], Result]) -> list[Result]:
        """The results that the file had, each made of its line. Raises ValueError if they are of something else."""
        try:
            return list(map(make, self.results))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: no results of {what}: {error!r}; name another file") from error

    def add(self, **result: Any) -> None:
        """Append a result, and what code made it, so that a kill from now on does not lose it."""
        if self.path is None:
            return
        with self.path.open("ab+") as file:
            file.seek(-1 if file.tell() else 0, os.SEEK_END)
            begun = file.read() not in (b"", b"\n")  # a line that was cut stands alone
            file.write(b"\n" * begun + json.dumps({**result, "code": code()}).encode() + b"\n")
