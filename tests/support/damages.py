"""Recorded traces, damaged at random, and the commands that read them: none may fail in another way than by words.

`damaged(seed)` gives the files of a trace; `write` puts them into a directory or a packed file; `commands` are the
command lines that read it. `python tests/support/damages.py FIRST COUNT [COMMANDS]` runs all of them, or so many drawn
at random, on COUNT traces, and prints each error with the seed that makes it.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minidl import cli
from minidl.tracefile.format import HEADER_BYTES, MANIFEST, RECORD
from minidl.tracefile.packs import write_packed

TRACES = Path(__file__).parents[2] / "traces"
Members = dict[str, bytes]
Damage = Callable[[random.Random, Members], None]


def nested(depth: int) -> Any:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


NUMBERS = [0, 1, -1, 2, 5, 100, 1 << 15, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63), 10**400]
ODD = [
    *NUMBERS, None, True, "", "x", "\ud800", "\x1b[2J", "9" * 30, 1.5, 1e308, float("nan"), float("-inf"), [], {},
    [None], [[1, 2], "x"], {"a": None}, nested(50), nested(900), "a" * 5000,
]  # fmt: skip
KINDS = ["loader", "uncaught", "clock", "device", "device_failed", "passed over", "program_end", "trace_end", "string"]


def members_of(path: Path) -> Members:
    with tarfile.open(path) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]


# --- Ways to damage ---------------------------------------------------------------------------------------------------
def overwrite(draw: random.Random, files: Members) -> None:
    name = draw.choice(sorted(files))
    data = bytearray(files[name])
    for _ in range(draw.randint(1, 60) if data else 0):
        data[draw.randrange(len(data))] = draw.randrange(256)
    files[name] = bytes(data)


def truncate(draw: random.Random, files: Members) -> None:
    name = draw.choice(sorted(files))
    files[name] = files[name][: draw.choice([0, draw.randint(0, len(files[name]))])]


def lose(draw: random.Random, files: Members) -> None:
    del files[draw.choice(sorted(files))]


def exchange(draw: random.Random, files: Members) -> None:
    a, b = draw.choices(sorted(files), k=2)
    files[a], files[b] = files[b], files[a]


def rename(draw: random.Random, files: Members) -> None:
    data = files.pop(draw.choice(sorted(files)))
    stem = draw.choice(["7-7", "0-0", "x", "999999999-9223372036854775807"])
    ends = ["profiler-1.attachment.jsonl", "watch-1.attachment.jsonl", f"{stem}.events", f"{stem}.meta.jsonl", MANIFEST]
    files[draw.choice(ends)] = data


def change_the_manifest(draw: random.Random, files: Members) -> None:
    with contextlib.suppress(KeyError, ValueError):
        files[MANIFEST] = dumped(spoiled(draw, json.loads(files[MANIFEST])))


def change_lines(draw: random.Random, files: Members) -> None:
    sides = [name for name in sorted(files) if name.endswith(".jsonl") and files[name]]
    if not sides:
        return
    name = draw.choice(sides)
    lines = files[name].splitlines()
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(lines))
        with contextlib.suppress(ValueError, RecursionError):
            lines[at] = changed(draw, lines[at])
    files[name] = b"\n".join(lines) + b"\n"


def changed(draw: random.Random, line: bytes) -> bytes:
    new = {"kind": draw.choice(KINDS), "loader": draw.choice(ODD), "process": draw.choice(ODD)}
    others = [b"\xff\xfe" + line, b"[" * 100_000, dumped(new)]
    return draw.choice(others) if draw.random() < 0.3 else dumped(spoiled(draw, json.loads(line)))


def change_a_fact(draw: random.Random, files: Members) -> None:
    """Of all lines of one kind, the same fact: gone, or of another type."""
    sides = {name: data for name, data in sorted(files.items()) if name.endswith(".meta.jsonl")}
    with contextlib.suppress(ValueError, LookupError, AttributeError, TypeError, RecursionError):
        told = json.loads(draw.choice(draw.choice(list(sides.values())).splitlines()))
        fact, value, gone = draw.choice(sorted(told)), draw.choice(ODD), draw.random() < 0.5
        for name, data in sides.items():
            lines = [json.loads(line) for line in data.splitlines()]
            for line in lines:
                if line["kind"] == told["kind"] and fact in line:
                    line[fact] = value
                    gone and line.pop(fact)
            files[name] = b"".join(dumped(line) + b"\n" for line in lines)


def change_events(draw: random.Random, files: Members) -> None:
    def edit(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        for _ in range(draw.choice([1, 2, 5, 20])):
            column = draw.choice(["time", "code", "loader", "tid", "task", "worker", "x", "y", "z"])
            range_ = np.iinfo(RECORD[column])
            value = draw.choice([*NUMBERS, int(rows[column][draw.randrange(len(rows))])])
            where = slice(None) if draw.random() < 0.1 else draw.randrange(len(rows))
            rows[column][where] = min(max(value, range_.min), range_.max)
        return rows

    edited(draw, files, edit)


def drop_events(draw: random.Random, files: Members) -> None:
    def edit(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        begin = draw.randrange(len(rows))
        of_a_kind = rows["code"] == rows["code"][begin]
        rows[of_a_kind if draw.random() < 0.5 else slice(begin, begin + draw.randint(1, len(rows)))] = 0
        if draw.random() < 0.5:  # so that the numbers do not give it away
            rows = rows[rows["seq"] > 0]
            rows["seq"] = np.arange(1, len(rows) + 1)
        return rows

    edited(draw, files, edit)


def change_a_header(draw: random.Random, files: Members) -> None:
    name = draw.choice([name for name in sorted(files) if name.endswith(".events")] or [""])
    at, size = draw.choice([(0, 8), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (64, 8), (72, 8), (80, 8), (88, 8)])
    data, value = files.get(name, b""), draw.choice([0, 1, 2, 64, 1 << 31, 1 << 63, (1 << 64) - 1])
    if len(data) >= HEADER_BYTES:
        files[name] = data[:at] + (value % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


DAMAGES: list[Damage] = [
    overwrite, truncate, lose, exchange, rename, change_a_header,
    *[change_the_manifest, change_a_fact, drop_events] * 2, *[change_lines, change_events] * 3,
]  # fmt: skip


def edited(draw: random.Random, files: Members, edit: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> None:
    """Edit the events of one process."""
    names = [name for name in sorted(files) if name.endswith(".events") and len(files[name]) >= HEADER_BYTES + 64]
    if names:
        name = draw.choice(names)
        rows = np.frombuffer(files[name], RECORD, (len(files[name]) - HEADER_BYTES) // 64, HEADER_BYTES).copy()
        files[name] = files[name][:HEADER_BYTES] + edit(rows).tobytes()


def spoiled(draw: random.Random, value: Any) -> Any:
    """Spoil one place of a JSON value: remove it, or put something odd there."""
    places = sorted(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not places:
        return draw.choice(ODD)
    out, place = value.copy(), draw.choice(places)
    what = draw.random()
    if what < 0.3:
        del out[place]
    else:
        out[place] = draw.choice(ODD) if what < 0.7 else spoiled(draw, out[place])
    return out


def dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("ascii")
    except RecursionError:
        return b"[" * 3000


# --- A damaged trace, and what reads it -------------------------------------------------------------------------------
def damaged(seed: int) -> Members:
    """The files of a recorded trace, damaged in one to eight ways."""
    draw = random.Random(seed)
    files = members_of(draw.choice(sorted(TRACES.glob("*.minidl"))))
    for _ in range(draw.choice([1, 1, 1, 2, 2, 4, 8])):
        if files:
            draw.choice(DAMAGES)(draw, files)
    return files


def write(files: Members, place: Path, seed: int) -> Path:
    """Write the files as a directory or as a packed file, which may be damaged once more; return its path."""
    draw, path = random.Random(seed), place / "rank0"
    if draw.random() < 0.6:
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        return path
    path = write_packed(path, files.items())
    data = bytearray(path.read_bytes())
    if draw.random() < 0.3:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])
    return path


def commands(path: Path, place: Path, seed: int) -> list[list[str]]:
    """The command lines that read a trace, with files that they write in `place`."""
    draw, one, other = random.Random(seed), str(path), str(TRACES / "persistent.minidl")
    number, batch = str(draw.choice([0, 1, 2, 3, 99])), str(draw.randrange(12))
    alone = draw.choice([[], [], [], ["--dataloader", draw.choice(["a", "zzz", "Images", ":"])]])
    window = [[], ["--width", "40"], ["--since", "0.1"], ["--since", "1e300"], ["--worker", number], ["--batch", batch]]
    at = [[], ["--batch", batch], ["--at", "0.1"], ["--event", "5"], ["--event", "-3"], ["--iterator", number]]
    written = {suffix: str(place / f"out{suffix}") for suffix in (".html", ".svg", ".json", ".pftrace", ".minidl")}
    return [
        ["summary", one, *alone], ["timeline", one, *draw.choice(window), *alone], ["ledger", one, *alone],
        ["check", one, *draw.choice([[], ["--json"]]), *alone], ["audit", one, *draw.choice([[], ["--json"]])],
        ["audit", one, other], ["replay", one, *draw.choice(at)], ["before", one, "--batch", batch, *alone],
        ["diff", one, other, "--force", "--workers"], ["diff", other, one], ["top", "--once", one, *alone],
        ["doctor", one, *draw.choice([[], ["--json"]])], ["pack", one, "-o", written[".minidl"]],
        *(["export", one, "-o", written[suffix], *alone] for suffix in (".json", ".pftrace")),
        *(["timeline", one, "-o", written[suffix], *alone] for suffix in (".html", ".svg")),
        ["replay", one, "--html", written[".html"]], ["merge", one, other, "-o", str(place / "joined.minidl")],
    ]  # fmt: skip


def said(command: list[str]) -> str:
    """Run one command; return why it did not end as a command does, "" if it did."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(command)
    except Exception:
        return traceback.format_exc()
    told = err.getvalue()
    if code not in (0, 1, 2) or (code == 2) != ("minidl: " in told and not out.getvalue()):
        return f"exit code {code}, and on stderr: {told}"
    return ""


def main() -> None:
    first, count, *most = map(int, sys.argv[1:])
    runs, wrong = 0, 0
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as place:
            path = write(damaged(seed), Path(place), seed)
            reading = commands(path, Path(place), seed)
            for command in random.Random(seed).sample(reading, *most) if most else reading:
                runs += 1
                if why := said(command):
                    wrong += 1
                    print(f"seed {seed}: minidl {' '.join(command)}\n{why}", flush=True)
        if not (seed + 1 - first) % 100:
            print(f"{seed + 1 - first} of {count} traces", flush=True)
    print(f"{count} damaged traces, {runs} commands, {wrong} that failed")


if __name__ == "__main__":
    main()
