"""Kill trainings at random moments, resume them, and count the samples that are lost or repeated.

    python tests/check_resume.py --kills 5 --seed 1     # of each loader; prints a table, fails if a number is not 0
    python tests/check_resume.py --frameworks           # of trainings of Lightning's, Accelerate's, ...

Each training runs two or three epochs and is killed with its workers, by SIGKILL; `tests/support/kill_resume.py` and
`kill_frameworks.py` say how.
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
import kill_frameworks
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
    parser.add_argument("--frameworks", action="store_true", help="kill trainings of frameworks")
    arguments = parser.parse_args()
    if arguments.frameworks:
        return of_frameworks(arguments.kills, random.Random(arguments.seed))
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


def of_frameworks(kills: int, dice: random.Random) -> int:
    wrong = refused = total = 0
    print(f"{'framework':<12} {'training':<80} {'kills':>5} {'lost':>5} {'repeated':>8}  error")
    for case in kill_frameworks.CASES:
        kill_frameworks.prepare(case.framework)
        done = kill_frameworks.train(case, kill_frameworks.chosen(case, kills, dice))
        error = done.error.splitlines()[0] if done.error else ""
        line = f"{case.framework:<12} {case.name():<80} {done.kills:>5} {done.lost:>5} {done.repeated:>8}  {error}"
        print(line, flush=True)
        refused, total = refused + done.refused, total + done.kills
        wrong += done.lost + done.repeated + (bool(done.error) and not done.refused)
    print(f"{total} kills; samples lost or repeated, and errors: {wrong}; refused with a reason: {refused}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
