"""What this package costs, beside what it stands for: `minidl bench`.

Interface: `add_arguments(parser)` and `run(arguments)` are the command. Each benchmark is a module with one function
that returns rows (`pairs.Row`): `events`, `loader`, `files`, `samplers`, and `device`, which needs one.
Rules of use: Linux only. What is compared is measured in turns, and the ratio of neighbours is the result: it stands
where the microseconds do not. Run it on a machine that does nothing else, and outside of any trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidl.bench.pairs import Row


def _events(quick: bool) -> list[Row]:
    from minidl.bench.events import bench_events

    return bench_events(rounds=5 if quick else 15)


def _loader(quick: bool) -> list[Row]:
    from minidl.bench.loader import bench_loader

    return bench_loader(rounds=5 if quick else 15, length=0.25 if quick else 1.0)


def _files(quick: bool) -> list[Row]:
    from minidl.bench.files import bench_files

    return bench_files((10_000, 100_000) if quick else (10_000, 100_000, 1_000_000))


def _samplers(quick: bool) -> list[Row]:
    from minidl.bench.samplers import bench_samplers

    return bench_samplers(1_000_000 if quick else 20_000_000)


def _device(quick: bool, simulate: bool) -> list[Row]:
    from minidl.bench.device import bench_device

    return bench_device(3 if quick else 9, simulate)


_BENCHMARKS: dict[str, tuple[str, Callable[[bool], list[Row]]]] = {
    "events": ("what it costs to record one event, beside other ways to record it", _events),
    "loader": ("what a batch costs: torch, minidl, minidl traced", _loader),
    "files": ("what it costs to read a trace and to make something of it", _files),
    "samplers": ("one epoch of many indices: torch, minidl", _samplers),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `minidl bench`."""
    what = "; ".join(f"{name}: {about}" for name, (about, _) in _BENCHMARKS.items())
    parser.add_argument("what", nargs="*", type=_known, metavar="WHAT", help=f"{what} (default: all)")
    parser.add_argument(
        "--device", nargs="?", const="real", choices=("real", "simulated"), metavar="simulated",
        help="measure the device stage instead: needs an accelerator, unless 'simulated' is given",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements: a look, not a result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single measurement there")


def _known(name: str) -> str:
    if name not in _BENCHMARKS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_BENCHMARKS)}")
    return name


def _asked(arguments: argparse.Namespace) -> dict[str, tuple[str, Callable[[bool], list[Row]]]]:
    """The benchmarks that are asked for; those of a device only where it is named, since most machines have none."""
    asked = {name: _BENCHMARKS[name] for name in arguments.what or (() if arguments.device else _BENCHMARKS)}
    if arguments.device:
        simulate = arguments.device == "simulated"
        about = "copies to a device, and steps that are fed from there"
        asked["device"] = about, lambda quick: _device(quick, simulate)
    return asked


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmarks that are asked for, print a table of each, and return 0; 2 where there is no such device.

    Raises OSError where --json can't be written, TraceError where this process records a trace already, RuntimeError
    where a measurement failed.
    """
    from minidl.bench import device
    from minidl.bench.machine import Watch, machine
    from minidl.bench.pairs import table

    if arguments.device:
        try:
            device.plan(arguments.device == "simulated")
        except LookupError as error:
            print(f"minidl: {error.args[0]}", file=sys.stderr)
            return 2
    if arguments.json is not None:
        arguments.json.touch()  # better now than after the measurements
    facts, watch, rows = machine(), Watch(), {}
    print(", ".join(f"{name} {value}" if name != "cpu" else value for name, value in facts.items()))
    for name, (about, benchmark) in _asked(arguments).items():
        rows[name] = benchmark(arguments.quick)
        print(f"\n{name}: {about}\n{table(rows[name])}")
        sys.stdout.flush()
    load = watch.stop()
    print(f"\n{load.text()}")
    if arguments.json is not None:
        found = {name: [row.facts() for row in own] for name, own in rows.items()}
        arguments.json.write_text(json.dumps({"machine": facts | load.facts(), "rows": found}, indent=1) + "\n")
    return 0
