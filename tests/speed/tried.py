"""Try the planted programs: is a verdict the same each time, and does its advice help?

    python tests/speed/tried.py stability [--times 5] [PROGRAM ...]
    python tests/speed/tried.py advice [--times 3] [PROGRAM ...]

`stability` records each program several times, by minidl's loader and by torch's (`--observe`), and prints how often
the headline named what is planted. `advice` applies the next step that the verdict gives to its program, and prints how
many times as many samples a second the program then makes: the median of alternate runs, without a recording. Both take
minutes, and depend on the machine's load, which they print.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minidl.hang.headline import headline
from minidl.tracefile.format import MANIFEST
from minidl.tracefile.reader import read_trace

HERE = Path(__file__).parent
PLANTED: dict[str, dict[str, Any]] = json.loads((HERE / "planted.json").read_text())["programs"]
SECONDS = 180


def _run(program: Path, fixed: bool) -> float:
    """The batches a second that a program prints."""
    ran = subprocess.run(
        [sys.executable, program.name], cwd=program.parent, env=os.environ | {"FIXED": str(int(fixed))},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    told = re.search(r"batches_per_s ([\d.]+)", ran.stdout)
    return float(told[1]) if told else 0.0


def tried(program: str, step: dict[str, Any], times: int, folder: Path) -> tuple[float, float]:
    """Samples a second with a next step, by those without: the median of alternate runs, and the least of them."""
    text = (HERE / "planted" / f"{program}.py").read_text()
    before, after = (folder / f"{program}_{name}.py" for name in ("before", "after"))
    before.write_text(text)
    for old, new in step.get("edits", ()):
        assert old in text, f"{program}.py has no {old!r}: change the edit"
        text = text.replace(old, new)
    after.write_text(text)
    factors = []
    for _ in range(times):
        without, with_it = _run(before, False), _run(after, "edits" not in step)
        factors.append(step.get("samples", 1) * with_it / without if without else 0.0)
    return statistics.median(factors), min(factors)


def judged(trace: Path, planted: dict[str, Any]) -> str:
    """What a headline is worth: its kind and whether it names what is planted."""
    title = headline(read_trace(trace)).title
    right = all(any(re.search(word, title, re.IGNORECASE) for word in words) for words in planted["must"])
    wrong = not right and any(re.search(word, title, re.IGNORECASE) for word in planted["wrong"])
    kind = re.search(r"[a-z/-]+-bound|head-of-line blocking|not input-bound|hung|died|error", title)
    return f"{'right' if right else 'WRONG' if wrong else 'partly'}: {kind[0] if kind else title[:40]}"


def recorded(name: str, observe: bool, folder: Path) -> str:
    """The verdict on one recording of a program."""
    command = [sys.executable, "-m", "minidl", "run", *(["--observe"] if observe else []), "--hang-after", "20"]
    subprocess.run(
        [*command, "--trace", folder / "trace", HERE / "planted" / f"{name}.py"],
        cwd=folder, capture_output=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    found = sorted(folder.glob(f"trace*/**/{MANIFEST}"))
    return judged(found[0].parent, PLANTED[name]) if found else "no trace"


def stability(names: Iterable[str], times: int) -> Iterator[str]:
    yield f"| program | minidl's loader, {times} times | --observe, {times} times | load |\n|---|---|---|---|"
    for name in names:
        cells = []
        for observe in (False, True):
            told: Counter[str] = Counter()
            for _ in range(times):
                with tempfile.TemporaryDirectory() as folder:
                    told[recorded(name, observe, Path(folder))] += 1
            cells.append("; ".join(f"{number} {words}" for words, number in told.most_common()))
        yield f"| {name} | {cells[0]} | {cells[1]} | {os.getloadavg()[0]:.0f} |"


def advice(names: Iterable[str], times: int) -> Iterator[str]:
    yield "| program | next step | factor (least) | load |\n|---|---|---|---|"
    for name in names:
        for words, step in PLANTED[name].get("tried", {}).items():
            with tempfile.TemporaryDirectory() as folder:
                median, least = tried(name, step, times, Path(folder))
            yield f"| {name} | {words} | {median:.2g} ({least:.2g}) | {os.getloadavg()[0]:.0f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stability", "advice"))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("programs", nargs="*", help="by default all")
    given = parser.parse_intermixed_args()
    for line in {"stability": stability, "advice": advice}[given.what](given.programs or PLANTED, given.times):
        print(line, flush=True)
