"""Run the planted programs beside other tools: what each shows first, and what it costs.

    python tests/speed/beside.py OUT [--times 3] [--tools minidl,py-spy] [PROGRAM ...]

Needs viztracer, py-spy and traceml-ai in the environment of this Python. OUT gets a folder a program and tool, with
`first.txt`, which is what a user sees when the command ends, and what the tool has written. Each round runs every tool,
and the program alone before and after. A line a program and tool: the median of the wall times, by that of the plain
runs, and the load. A person judges whether a first screen names the cause: words alone tell it badly.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

PLANTED = Path(__file__).parent / "planted"
BIN = Path(sys.executable).parent
SECONDS = 240
LINES = 12

PROFILED = f"""
import runpy, sys
from torch.profiler import profile
with profile() as seen:
    runpy.run_path(sys.argv[1], run_name="__main__")
print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit={LINES}))
"""

STEPS = """
import torch
import traceml_ai as traceml
traceml.init()

def traced(loader, model):
    for batch in loader:
        with traceml.trace_step(model):
            yield batch

"""
"""TraceML's lines in a plain loop: its verdict needs the steps."""

PROGRAMS = (
    *("one_worker_remote", "outlier_samples", "slow_collate", "busy_host"),
    *("consumer_bound", "gil_thread", "slow_worker_init", "large_batches"),
)
TOOLS = ("minidl", "viztracer", "torch.profiler", "py-spy", "traceml")


def command(tool: str, program: Path, place: Path) -> list[str | Path]:
    """The command line that runs a program under a tool."""
    python = [sys.executable, program]
    if tool == "torch.profiler":
        (place / "profiled.py").write_text(PROFILED)
        return [sys.executable, place / "profiled.py", program]
    if tool == "traceml":
        text = program.read_text()
        models = [name for name in ("model", "embedding") if f"{name} = " in text] or ["torch.nn.Identity()"]
        text = re.sub(r"\b(in |enumerate\()loader\b", rf"\1traced(loader, {models[0]})", text)
        (place / program.name).write_text(STEPS + text)
        return [BIN / "traceml", "run", "--mode", "summary", place / program.name]
    return {
        "plain": python,
        "minidl": [sys.executable, "-m", "minidl", "run", "--trace", place / "trace", program],
        "viztracer": [BIN / "viztracer", "-o", place / "result.json", program],
        "py-spy": [BIN / "py-spy", "record", "--subprocesses", "-f", "raw", "-o", place / "raw.txt", "--", *python],
    }[tool]


def widest(raw: Path) -> str:
    """What a flame graph of py-spy shows as widest beside imports: by function at any depth, by line at its top."""
    functions: Counter[str] = Counter()
    tops: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        if "<frozen importlib" in stack:
            continue
        frames = [frame for frame in stack.split(";") if not frame.startswith("process ")]
        functions.update({re.sub(r":\d+\)$", ")", frame): int(count) for frame in set(frames)})
        tops.update({frame: int(count) for frame in frames[-1:]})
    return "\n".join(
        f"{title}\n" + "\n".join(f"{count:7} {name}" for name, count in of.most_common(LINES))
        for title, of in (("samples by function", functions), ("samples by line on top", tops))
    )


def once(tool: str, name: str, out: Path) -> float:
    """The wall time of a run, seconds; its first screen goes to `out`."""
    place = out / name / tool
    rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    began = time.perf_counter()
    ran = subprocess.Popen(
        command(tool, PLANTED / f"{name}.py", place), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"COLUMNS": "160"}, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = ran.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)  # what the tool has started, too
    took = time.perf_counter() - began
    (place / "first.txt").write_text(said)
    if (place / "raw.txt").exists():
        (place / "first.txt").write_text(widest(place / "raw.txt"))
    return took


def beside(names: list[str], tools: list[str], times: int, out: Path) -> Iterator[str]:
    yield "| program | tool | seconds | times the plain run | load |\n|---|---|---|---|---|"
    for name in names:
        plain: list[float] = [once("plain", name, out)]
        took: dict[str, list[float]] = {tool: [] for tool in tools}
        for _ in range(times):
            for tool in tools:
                took[tool].append(once(tool, name, out))
            plain.append(once("plain", name, out))
        for tool in tools:
            with_it, load = statistics.median(took[tool]), os.getloadavg()[0]
            yield f"| {name} | {tool} | {with_it:.1f} | {with_it / statistics.median(plain):.2f} | {load:.0f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=lambda path: Path(path).resolve())
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("programs", nargs="*")
    given = parser.parse_intermixed_args()
    for line in beside(given.programs or list(PROGRAMS), given.tools.split(","), given.times, given.out):
        print(line, flush=True)
