"""`python -m minidl.faults [WORD ...]`: run the cells whose names hold one of the words, or all; print the table."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from minidl.faults.matrix import Cell, cells, run_cell, table


def main(words: list[str]) -> int:
    """Return the exit code: 1 if a cell failed."""
    chosen = [cell for cell in cells() if not words or any(word in str(cell) for word in words)]
    results: dict[Cell, tuple[list[str], float]] = {}
    for number, cell in enumerate(chosen, 1):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            wrong = run_cell(cell, Path(folder))
        results[cell] = wrong, time.monotonic() - began
        print(f"{number} of {len(chosen)}  {cell}: {'; '.join(wrong) or 'ok'} ({results[cell][1]:.1f} s)", flush=True)
    print("\n".join(table(results)))
    failed = sum(bool(wrong) for wrong, _ in results.values())
    print(f"{len(results)} cells, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
