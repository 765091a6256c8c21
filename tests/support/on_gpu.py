"""All that is owed on a GPU, by one command of at most ten minutes: tests, benchmark, recordings.

    python tests/support/on_gpu.py                            # on a machine with a GPU; the recordings go to traces/
    python tests/support/on_gpu.py --device sim -o /tmp/sim   # the same parts, on the simulated accelerator

Each part is a process with a limit of time. A part that fails or is too slow does not keep the next one from running.
At the end a table says what passed, and which files were written. Exit codes: 0 all parts passed; 1 not all; 2 no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/device", "tests/prove/bench/test_bench_device.py")
MINUTES = 9.5
LAST_RECORDING = 45.0
"""Seconds that are left for the last recording, once no more are begun."""


@dataclass(frozen=True)
class Part:
    """A command. share: of the remaining seconds, the most that it may take."""

    name: str
    command: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Outcome:
    """What became of a part. last: the last line of its output."""

    name: str
    result: str
    seconds: float
    last: str


def parts(device: str, output: Path) -> list[Part]:
    """Return the parts for "cuda" or "sim"."""
    real_or_sim = "sim" if device == "sim" else "real"
    return [
        Part("tests", (sys.executable, "-m", "pytest", "-q", "--timeout=120", *TESTS), 0.4),
        Part("benchmark", (sys.executable, "-m", "minidl", "bench", "--quick", "--device", real_or_sim,
                           "--json", str(output / f"bench-device-{device}.json")), 0.3),
        Part("recordings", (sys.executable, "-m", "minidl.prove.recordings", "--device", device, "-o", str(output),
                            "--minutes", "{minutes}"), 1),
    ]  # fmt: skip


def run(todo: Sequence[Part], deadline: float, device: str) -> list[Outcome]:
    """Run the parts one after the other. deadline: on time.monotonic()."""
    outcomes = []
    for number, part in enumerate(todo, start=1):
        left = deadline - time.monotonic()
        if left <= 0:
            outcomes.append(Outcome(part.name, "NOT BEGUN: the time is over", 0, ""))
            continue
        limit = left * part.share
        print(f"\n=== {number} of {len(todo)}: {part.name}, at most {limit:.0f} s", flush=True)
        outcomes.append(_one(part, limit, device))
        print(f"=== {part.name}: {outcomes[-1].result}", flush=True)
    return outcomes


def _one(part: Part, limit: float, device: str) -> Outcome:
    start = time.monotonic()
    minutes = max(0.1, (limit - LAST_RECORDING) / 60)
    command = [word.format(minutes=f"{minutes:.1f}") if "{minutes}" in word else word for word in part.command]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {} if device == "sim" else {"MINIDL_TEST_GPU": "1"}
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    late = threading.Event()
    timer = threading.Timer(limit, lambda: (late.set(), _kill(child)))
    timer.start()
    last = ""
    try:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        code = child.wait()
    finally:
        timer.cancel()
        timer.join()
        _kill(child)  # what it has started and left running
        child.wait()
    result = (
        f"FAILED: stopped after {limit:.0f} s" if late.is_set() else f"FAILED: exit code {code}" if code else "passed"
    )
    return Outcome(part.name, result, time.monotonic() - start, last)


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def report(outcomes: Sequence[Outcome], written: Sequence[Path], seconds: float, on: str) -> str:
    """Say in a few lines what was done."""
    width = max(len(each.name) for each in outcomes)
    lines = [f"{each.name:<{width}}  {each.seconds:5.0f} s  {each.result}: {each.last}" for each in outcomes]
    names = ", ".join(path.name for path in written) or "nothing"
    return "\n".join([f"on {on}, in {seconds:.0f} s:", *lines, f"written: {names}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return the exit code."""
    command = argparse.ArgumentParser(description="Run all that is owed on a GPU: tests, benchmark, recordings.")
    command.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="default: cuda; sim is simulated")
    command.add_argument("-o", "--output", type=Path, default=ROOT / "traces", metavar="DIR", help="default: traces")
    command.add_argument("--minutes", type=float, default=MINUTES, metavar="N", help="limit (default: %(default)s)")
    arguments = command.parse_args(argv)
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("on_gpu: torch finds no GPU: run it on a machine that has one, or choose --device sim", file=sys.stderr)
        return 2
    on = torch.cuda.get_device_name() if arguments.device == "cuda" else "the simulated accelerator"
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    start, since = time.monotonic(), time.time()
    outcomes = run(parts(arguments.device, output), start + 60 * arguments.minutes, arguments.device)
    written = sorted(path for path in output.iterdir() if path.stat().st_mtime >= since)
    print("\n" + report(outcomes, written, time.monotonic() - start, on))
    return 0 if all(each.result == "passed" for each in outcomes) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
