"""The evidence of each drift holds in the installed torch, and another torch is told apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from minidl.companion import drift
from minidl.companion.drift import Drift, drifts, find
from minidl.companion.rows import RowError
from minidl.references import source_of

SOURCE = source_of("dataloader", "torch")
AS_READ = torch.__version__.startswith(f"{drift.READ_WITH}.")
"""Whether the installed torch is the one that the list was written for; for another one, the page says what differs."""


@pytest.mark.parametrize("each", drifts(), ids=lambda each: each.name)
def test_the_evidence_holds(each: Drift) -> None:
    assert not each.words.missing
    assert each.evidence
    for finding in each.findings():
        assert finding.holds or not AS_READ, f"drift {each.name}: {finding.claim}"


def test_evidence_can_fail() -> None:
    assert not find("dataloader:_MultiProcessingDataLoaderIter._reset has no_such_thing").holds
    assert not find("dataloader:_MultiProcessingDataLoaderIter._reset lacks self._send_idx = 0").holds
    assert not find("dataloader:DataLoader is gone").holds
    assert not find("dataloader:gone_function lacks anything").holds
    assert find("dataloader:DataLoader is there").where.startswith("torch/utils/data/dataloader.py:")
    assert find("no_such_module is gone").holds
    with pytest.raises(RowError, match="evidence 'x contains y'"):
        find("x contains y")


def test_what_moved_in_another_torch_is_reported(tmp_path: Path) -> None:
    """The installed dataloader with a line more at its head, one function less, and nothing else of torch."""
    assert SOURCE is not None
    folder = tmp_path / "torch" / "utils" / "data"
    folder.mkdir(parents=True)
    text = SOURCE.read_text(encoding="utf-8").replace("def _next_index(", "def _next_key(")
    (folder / "dataloader.py").write_text("\n" + text, encoding="utf-8")
    lines = list(drift.moved(tmp_path / "torch"))
    reset = [line for line in lines if line.startswith("dataloader:_MultiProcessingDataLoaderIter._try_put_index: ")]
    assert reset
    assert any(line.startswith("dataloader:_BaseDataLoaderIter._next_index: ") and "gone" in line for line in lines)
    assert not [line for line in lines if line.startswith("drift worker-cycle")]
    assert [line for line in lines if line.startswith("dataloader:DataLoader.__init__: ") and line.endswith("the same")]
    assert lines[-1].startswith("of ")


def test_nothing_moved_in_the_installed_torch() -> None:
    assert SOURCE is not None
    moved = list(drift.moved(SOURCE.parents[2]))
    assert moved == [] or not AS_READ


def test_each_article_and_the_note_have_drifts() -> None:
    counts = Counter(one.source.partition(" ")[0] for one in drift.drifts())
    assert counts.keys() == {"1", "2", "3", "4", "note"}
    assert min(counts.values()) > 3
