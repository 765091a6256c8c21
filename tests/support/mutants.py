"""How much of the loader's core its tests hold fast: `mutmut` changes the code in small ways, and a test should notice.

    pip install mutmut
    mutmut run 'minidl.driver.*'             # by tests without processes; a second run goes on where the first ended
    python tests/support/mutants.py --live   # tries what has survived with the live tests of its module
    python tests/support/mutants.py          # each module's score, and survivors without a reason: then exit code 1

What is changed, and which tests run, stands in pyproject.toml. `data/mutants.json` has the reasons: function -> the
line as it was changed -> why no test can notice, or why none needs to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
REASONS = Path(__file__).parent / "data" / "mutants.json"
LIVE = Path("mutants", "killed-live.json")
"""Names of mutants that a live test has killed; in the folder that mutmut makes."""


def results() -> Iterator[tuple[str, str, str]]:
    """Each mutant that was tried: its file, its name, and what became of it."""
    from mutmut.__main__ import status_by_exit_code

    killed = json.loads(LIVE.read_text()) if LIVE.exists() else []
    for meta in sorted(Path("mutants", "minidl").rglob("*.meta")):
        path = str(meta.relative_to("mutants")).removesuffix(".meta")
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            if code is not None:
                yield path, name, "killed" if name in killed else status_by_exit_code[code]


def function_of(name: str) -> str:
    """`minidl.driver.xǁDriverǁclose__mutmut_3` is one of `driver:Driver.close`."""
    module, _, function = name.partition("__mutmut_")[0].removeprefix("minidl.").rpartition(".")
    return f"{module}:{function.replace('xǁ', '').replace('ǁ', '.') if 'ǁ' in function else function[2:]}"


def changed(name: str, path: str) -> str:
    """The lines as the mutant has them."""
    from mutmut.__main__ import get_diff_for_mutant

    lines = get_diff_for_mutant(name, path=path).splitlines()
    return " ".join(line[1:].strip() for line in lines if line[:1] == "+" and line[:3] != "+++")


def tests_of(path: str) -> list[str]:
    """Test files whose live tests run the module."""
    own = Path(path.replace("minidl", "tests", 1))
    files = [own.with_name(f"test_{own.name}"), Path("tests/test_iterators.py"), Path("tests/test_live.py")]
    return [str(file) for file in dict.fromkeys(files) if (ROOT / file).exists()]


def is_killed_live(name: str, path: str) -> bool:
    """Whether a live test fails with the mutant; workers are forked with its name in their environment."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "live", *tests_of(path)]
    done = subprocess.run(command, cwd="mutants", env=os.environ | {"MUTANT_UNDER_TEST": name}, capture_output=True)
    return done.returncode == 1


def main(live: bool) -> int:
    """Print the score of each module, and each survivor that has no reason; how many there are is the exit code's."""
    reasons, scores, left = json.loads(REASONS.read_text()), {}, 0
    for path, name, status in results():
        score = scores.setdefault(path, {"killed": 0, "accepted": 0, "survived": 0})
        if status not in ("survived", "no tests"):
            score["killed"] += 1
        elif changed(name, path) in reasons.get(function_of(name), {}):
            score["accepted"] += 1
        elif live and is_killed_live(name, path):
            LIVE.write_text(json.dumps([*(json.loads(LIVE.read_text()) if LIVE.exists() else []), name]))
            score["killed"] += 1
        else:
            score["survived"] += 1
            print(f"{name}: {function_of(name)}: {changed(name, path)}", flush=True)
    for path, score in scores.items():
        left += score["survived"]
        print(f"{path:<34} {', '.join(f'{number} {what}' for what, number in score.items())}")
    return min(left, 1)


if __name__ == "__main__":
    sys.exit(main("--live" in sys.argv[1:]))
