"""Kill trainings at random moments, resume them, and count the samples that are lost or repeated.

    python tests/check_resume.py --kills 5 --seed 1     # of each loader; prints a table, fails if a number is not 0

Each training runs two epochs and is killed with its workers, by SIGKILL; `tests/support/kill_resume.py` says how.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from kill_resume import Case, lost_and_repeated, run, whole

CASES = [
    *(Case("map", workers) for workers in range(5)),
    Case("map", 2, persistent=True),
    *(Case("map", workers, in_order=False) for workers in (2, 4)),
    *(Case("iterable", workers) for workers in range(5)),
    *(Case("iterable with state", workers, state_every=1) for workers in range(5)),
    Case("iterable with state", 3, state_every=4, persistent=True),
    Case("iterable with state", 3, state_every=2, in_order=False),
    Case("iterable", 2, in_order=False),
    Case("map", 2, ranks=2),
    Case("iterable with state", 2, state_every=2, ranks=2),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="of each training and rank")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    dice, wrong, kills, start = random.Random(arguments.seed), 0, 0, time.monotonic()
    print(f"{'loader':<62} {'kills':>5} {'lost':>5} {'repeated':>8}  order")
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="minidl-resume-") as place:
            lives = [run(case, Path(place) / str(rank), arguments.kills, dice, rank) for rank in range(case.ranks)]
        got, count = [epochs for epochs, _ in lives], sum(killed for _, killed in lives)
        lost, repeated = lost_and_repeated(case, got)
        same = not case.in_order or got == whole(case)
        order = ("the same" if same else "ANOTHER") if case.in_order else "any"
        print(f"{case.name():<62} {count:>5} {lost:>5} {repeated:>8}  {order}", flush=True)
        kills, wrong = kills + count, wrong + lost + repeated + (not same)
    print(f"{kills} kills in {time.monotonic() - start:.0f} s; samples lost or repeated, and other orders: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
