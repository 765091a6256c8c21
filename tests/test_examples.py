"""The pages' examples: the Python of the guides runs as it stands; the tutorials' commands print what is shown."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import console
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
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]


def test_pages_with_examples_are_found() -> None:
    assert {"arena.md", "resume.md", "torchdata.md"} <= {page.name for page in PAGES}


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("page", sorted({*PAGES} - {*TUTORIALS}), ids=lambda page: str(page.relative_to(ROOT)))
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


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """The first words of each output, up to a verdict: that, and each number, depends on what else the machine does."""

    def begins(text: str) -> list[tuple[str, list[str]]]:
        outputs = console.commands_and_outputs(text)
        return [(command, first_words(re.sub(r"[\d.]+", "0", output))) for command, output in outputs]

    def first_words(output: str) -> list[str]:
        return list(itertools.takewhile(lambda word: word not in ("slow:", "fine:"), output.split()[:2]))

    shown = page.read_text()
    assert begins(console.remade(shown, tmp_path)) == begins(shown) != []
