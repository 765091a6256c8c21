"""The page with five replays."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_five_replays_are_one_page_that_loads_nothing() -> None:
    """Each is there without a problem of its recording."""
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "replays.py"))["page"]()
    assert page.count("<iframe ") == page.count("srcdoc=") == 5
    assert "cannot be read" not in page
    assert " src=" not in page.replace("&quot;", '"').split("<details")[0]
