"""Hold the loader's core to its floor of coverage: 100% of lines, 98% of branches.

    coverage run -m pytest -n 2 --dist loadfile -m core     # each process writes a file of its own
    python tests/core_coverage.py                           # combines them, reports, fails below the floor

Which files are the core stands in pyproject.toml; conftest.py marks the tests that mirror them.
A line that no test can reach has `# pragma: no cover: REASON`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coverage import Coverage
from coverage.exceptions import CoverageException

BRANCHES = 98.0
"""Percent of the core's branches that have to be covered."""

PRAGMA = re.compile(r"#\s*pragma:\s*no (?:cover|branch)\b(?P<rest>.*)")


def main() -> int:
    try:
        faults = list(shortfalls(*combined()))
    except CoverageException as error:
        print(
            f"core_coverage: {error}; first run: coverage run -m pytest -n 2 --dist loadfile -m core", file=sys.stderr
        )
        return 2
    print("\n".join(faults) or f"the loader's core: every line, and at least {BRANCHES:g}% of the branches")
    return 1 if faults else 0


def combined() -> tuple[dict[str, Any], list[str]]:
    """Combine the data files of all processes into one; return coverage's report, and the files that make the core."""
    coverage = Coverage()
    coverage.combine()
    coverage.save()
    coverage.report(show_missing=True, skip_covered=True)
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "coverage.json"
        coverage.json_report(outfile=str(output))
        report: dict[str, Any] = json.loads(output.read_text())
    return report, list(coverage.get_option("run:include"))


def shortfalls(report: dict[str, Any], core: list[str]) -> Iterator[str]:
    """List what is below the floor: files not run, missing lines of each file, branches of all."""
    for name in core:
        if "*" not in name and name not in report["files"]:
            yield f"{name}: not measured; no test imports it, or it is gone (then delete it from pyproject.toml)"
    for name, found in sorted(report["files"].items()):
        if found["missing_lines"]:
            lines = ", ".join(map(str, found["missing_lines"]))
            yield f"{name}: no test runs lines {lines}: write one, or give the reason (# pragma: no cover: REASON)"
    total = report["totals"]
    if total["num_branches"] and (percent := 100 * total["covered_branches"] / total["num_branches"]) < BRANCHES:
        yield f"{percent:.1f}% of {total['num_branches']} branches are covered; the floor is {BRANCHES:g}%"


def without_reason(text: str) -> list[int]:
    """List the lines whose pragma leaves a line or branch out and gives no reason (`: REASON`)."""
    found = ((number, PRAGMA.search(line)) for number, line in enumerate(text.splitlines(), 1))
    return [number for number, pragma in found if pragma and not re.match(r":\s*\w{2,}", pragma["rest"])]


if __name__ == "__main__":
    sys.exit(main())
