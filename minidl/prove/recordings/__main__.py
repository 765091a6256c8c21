"""`python -m minidl.prove.recordings`: make the recordings of `traces/` and write their table.

Exit codes: 0 success; 1 a recording failed or is still missing; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minidl.device import sim
from minidl.prove.recordings.scenes import SCENES
from minidl.prove.recordings.suite import Suite
from minidl.prove.recordings.table import README, write_table


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="python -m minidl.prove.recordings", description="Make the recordings of traces/ and write their table."
    )
    add = whole.add_argument
    add("--device", choices=("cuda", sim.NAME), help="default: cuda; without a GPU, choose sim, the simulated one")
    add("-o", "--output", type=Path, default=Path("traces"), metavar="DIR", help="default: %(default)s")
    add("--only", nargs="+", metavar="NAME", help="make only these, and replace them if they exist")
    add("--minutes", type=float, metavar="N", help="begin no recording after N minutes")
    add("--list", action="store_true", help="list the recordings and exit")
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Make what the command line asks for; return the exit code."""
    command = parser()
    arguments = command.parse_args(argv)
    if arguments.list:
        width = max(map(len, SCENES))
        print("\n".join(f"{recording.name:<{width}}  {recording.shows}" for recording in SCENES.values()))
        return 0
    unknown = sorted(set(arguments.only or ()) - set(SCENES))
    if unknown:
        command.error(f"no recording is called {', '.join(unknown)}: --list shows all names")
    device = sim.NAME if arguments.device == sim.NAME else _gpu(command)
    arguments.output.mkdir(parents=True, exist_ok=True)
    suite = Suite(device, arguments.output, arguments.minutes)
    failed = suite.record(arguments.only or list(SCENES), again=bool(arguments.only))
    write_table(arguments.output)
    missing = f"; not made: {', '.join(failed)}" if failed else ""
    print(f"the table is in {arguments.output / README}{missing}")
    return 1 if failed else 0


def _gpu(command: argparse.ArgumentParser) -> str:
    import torch

    if not torch.cuda.is_available():
        command.error("torch finds no GPU: choose --device sim; the recordings are then marked as simulated")
    return "cuda"


if __name__ == "__main__":
    sys.exit(main())
