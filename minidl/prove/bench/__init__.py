"""Benchmarks of this package beside what it replaces: `minidl bench`.

Interface: `run(arguments)` is the command. Each benchmark is a module with one function that returns rows
(`pairs.Row`): `events`, `loader`, `transports`, `states`, `files`, `samplers`, `planned`, `chosen`, and `device`, which
needs an accelerator or simulates one.
Rules of use: Linux only. Alternatives are measured in turns, and the result is the ratio of neighbours in time, which
holds even if the microseconds do not. Run it on an idle machine, and outside of any trace.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Callable

from minidl.prove.bench import chosen, device, events, files, loader, machine, planned, samplers, states, transports
from minidl.prove.bench.pairs import Row, table
from minidl.speed.transport_costs import keep

_Benchmark = tuple[str, Callable[[bool], list[Row]]]
"""What it measures, and the function: quick -> rows."""

_BENCHMARKS: dict[str, _Benchmark] = {
    "events": (
        "the cost of recording one event, compared with other recorders",
        lambda quick: events.bench_events(rounds=5 if quick else 15),
    ),
    "loader": (
        "the cost of a batch: torch, minidl, minidl traced",
        lambda quick: loader.bench_loader(rounds=5 if quick else 15, length=0.25 if quick else 1.0),
    ),
    "transport": (
        "the cost of a batch by its transport: torch, minidl with torch's transport, minidl with slabs",
        lambda quick: transports.bench_transports(rounds=4 if quick else 15),  # a short epoch is all beginning
    ),
    "state": (
        "the cost of a loader's state: unused, sent with every 100th, 10th or each batch",
        lambda quick: states.bench_states(rounds=5 if quick else 15, length=0.5 if quick else 1.0),
    ),
    "files": (
        "the cost of reading and analysing a trace",
        lambda quick: files.bench_files((10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)),
    ),
    "samplers": (
        "one epoch of many indices: torch, minidl",
        lambda quick: samplers.bench_samplers(1_000_000 if quick else 20_000_000),
    ),
    "auto": ("the number of workers that a loader chooses, compared with fixed ones", chosen.bench_auto),
    "plan": ("what minidl plan predicts from one recording, compared with what is measured", planned.bench_plan),
}


def _asked(arguments: argparse.Namespace) -> dict[str, _Benchmark]:
    """Return the benchmarks to run. That of a device must be named, because most machines have none."""
    asked = {name: _BENCHMARKS[name] for name in arguments.what or (() if arguments.device else _BENCHMARKS)}
    if arguments.device:
        simulate = arguments.device == "sim"
        about = "copies to a device, and steps that are fed from there"
        asked["device"] = about, lambda quick: device.bench_device(quick, simulate)
    return asked


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen benchmarks, print a table of each, and return 0; 2 if there is no such device.

    Raises OSError if --json cannot be written, TraceError if this process already records a trace, RuntimeError if a
    measurement failed.
    """
    if arguments.device:
        try:
            device.plan(arguments.device == "sim")
        except LookupError as error:
            print(f"minidl: {error.args[0]}", file=sys.stderr)
            return 2
    if arguments.calibrate:
        print(f"kept in {keep(planned.calibrated().lines, socket.gethostname())}")
        return 0
    if arguments.json is not None:
        arguments.json.touch()  # fails now rather than after the measurements
    facts, watch, rows = machine.machine(), machine.Watch(), {}
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
