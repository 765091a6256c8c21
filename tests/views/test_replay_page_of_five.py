"""The page with five replays."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
def test_replays_are_one_page_that_loads_nothing() -> None:
    """Each is there without a problem of its recording; of the five, the two that are made soonest are tried."""
    docs = runpy.run_path(str(ROOT / "docs" / "replays.py"))
    recordings = docs["RECORDINGS"]
    assert all((ROOT / "traces" / f"{name}.minidl").is_file() for name in recordings)
    for name in recordings.keys() - {"shutdown-closed", "worker-sigkilled"}:
        del recordings[name]
    page = docs["page"]()
    assert page.count("<iframe ") == page.count("srcdoc=") == 2
    assert "cannot be read" not in page
    assert " src=" not in page.replace("&quot;", '"').split("<details")[0]
