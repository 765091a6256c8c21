"""The guides' examples in Python run as they stand, one after the other, in a program that has what they name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import minidl
from course import many_workers

ROOT = Path(__file__).parents[1]
FILES = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "notebooks" / "README.md")
PAGES = sorted(page for page in FILES if "```python" in page.read_text())


def test_pages_with_examples_are_found() -> None:
    assert {"arena.md", "resume.md", "torchdata.md"} <= {page.name for page in PAGES}


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    document = Sybil(parsers=[PythonCodeBlockParser()], path=str(ROOT)).parse(page)
    if page.parent.name == "notebooks":  # whose example is part of a module of the course
        document.namespace |= vars(many_workers)
    document.namespace |= {"minidl": minidl, "torch": torch, "np": np, "dataset": torch.arange(640).unbind()}
    for example in document.examples():
        example.evaluate()
    rest = document.namespace.get("rest", [])  # of the guide to torchdata
    assert [batch[0].item() for batch in rest] == list(range(11 * 32, 640, 32))[: len(rest)]
