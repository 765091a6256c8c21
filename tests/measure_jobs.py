"""Measure what jobs cost: reading one of up to 1,024 ranks, and recording one. Prints two tables.

    taskset -c 0,1 python tests/measure_jobs.py 256 512 1024

The ranks that are read are simulated: two made traces of 200 steps, of which one is copied to each rank but rank 37,
which gets the slow one. Peak memory is that of the largest process.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from made_trace import Run, write  # noqa: E402  (a script adds its helpers' folder itself)

import minidl  # noqa: E402
from minidl.job.digests import keep, place_of, tables_of  # noqa: E402
from minidl.record.step_parts import step_parts_recorded  # noqa: E402
from minidl.tracefile.reader import read_trace  # noqa: E402

STEPS, SLOW, MS = 200, 37, 1_000_000
PAGE = "import pathlib as p, sys; from minidl.views.job_page import JobPage; JobPage([p.Path(sys.argv[1])], live=False)"
MINIDL = (sys.executable, "-m", "minidl")


def make_job(place: Path, ranks: int) -> Path:
    """A job in which the others wait 40 ms in each step for rank 37, whose worker reads slowly."""
    usual = write(place / "usual", Run(STEPS, workers=1, step=60 * MS, cost=lambda task: 4 * MS, simulated=True))
    slow = write(place / "slow", Run(STEPS, workers=1, step=20 * MS, cost=lambda task: 60 * MS, simulated=True))
    for file in (*usual.iterdir(), *slow.iterdir()):
        os.utime(file, (0, 0))  # a digest is kept of a rank whose files are at rest
    for rank in range(ranks):
        shutil.copytree(slow if rank == SLOW else usual, place / "job" / f"rank-{rank}")
    return place / "job"


MEASURE = """
import os, sys, time
begun = time.monotonic()
_, status, used = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
print(status, time.monotonic() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, file=sys.stderr)
"""
"""A small process starts the command: a process counts the memory of the one that it was started by as its own."""


def measured(*command: str) -> str:
    """Run a command: what it took, the memory of its largest process, and the first line that it prints."""
    done = subprocess.run([sys.executable, "-IS", "-c", MEASURE, *command], capture_output=True, text=True, check=True)
    status, took, cpu, room = map(float, done.stderr.split()[-4:])
    says = f"status {status}" if status else done.stdout.partition("\n")[0][:90]
    return f"{took:>8.1f} s {cpu:>8.1f} s of CPU {room:>6.0f} MiB  {says}"


def reading(place: Path, ranks: int) -> Iterator[str]:
    job = make_job(place, ranks)
    commands: dict[str, tuple[str, ...]] = {
        "summary, from events": (*MINIDL, "summary", str(job)),
        "summary": (*MINIDL, "summary", str(job)),
        "doctor": (*MINIDL, "doctor", "--no-py-spy", str(job)),
        "view": (sys.executable, "-c", PAGE, str(job)),
        "top --once": (*MINIDL, "top", "--once", str(job)),
        "timeline -o job.png": (*MINIDL, "timeline", str(job), "-o", str(place / "job.png")),
    }
    for name, command in commands.items():
        yield f"{ranks:>6}  {name:<22}{measured(*command)}"


# --- Recording --------------------------------------------------------------------------------------------------------
def hook(place: Path, steps: int = 60, calls: int = 100) -> str:
    """An all_reduce of one rank, by gloo, with the hook and without it, in turns in each step of one recorded run."""
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
    number, plain = torch.zeros(1), dist.all_reduce
    took: dict[bool, list[float]] = {False: [], True: []}
    with minidl.trace(place / "rank-0"), step_parts_recorded():
        hooked: Callable[..., object] = dist.all_reduce
        for step, _ in enumerate(minidl.DataLoader(torch.utils.data.TensorDataset(torch.arange(steps)))):
            for with_hook in (step % 2 == 0, step % 2 == 1):
                reduce = hooked if with_hook else plain
                begun = time.perf_counter_ns()
                for _ in range(calls):
                    reduce(number)
                took[with_hook].append((time.perf_counter_ns() - begun) / calls / 1000)
    dist.destroy_process_group()
    more = [a - b for a, b in zip(took[True], took[False], strict=True)]
    return (
        f"hook: an all_reduce takes {statistics.median(took[False]):.1f} µs without it, {statistics.median(more):+.1f} "
        f"µs with it (middle half {statistics.quantiles(more)[0]:+.1f} to {statistics.quantiles(more)[2]:+.1f})"
    )


def digest(place: Path, steps: int) -> str:
    """What a digest of so many steps costs the watchdog's child, and its size."""
    path = write(place / f"rank-{steps}", Run(steps, simulated=True))
    begun = time.process_time()
    keep(path, 0)
    took, size = time.process_time() - begun, place_of(path).stat().st_size
    count = len(tables_of(read_trace(path))[0].steps)
    return f"digest: of {count:,} steps {took:.2f} s of CPU, {1e6 * took / count:.0f} µs a step, {size / 1000:.0f} kB"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for lines in (hook(Path(folder)), digest(Path(folder), 1_000), digest(Path(folder), 10_000)):
            print(lines, flush=True)
    for count in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            for line in reading(Path(folder), count):
                print(line, flush=True)
