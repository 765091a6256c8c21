"""The figures of article 2: what they show is what the samplers do."""

from __future__ import annotations

import pytest

from minidl.companion.rows import entries
from minidl.companion.shares import caption, figure, run

FIGURES = [text for entry in entries().values() for text in entry.figures]


@pytest.mark.parametrize("text", FIGURES)
def test_a_figure_deals_each_sample_and_says_which_twice_or_not_at_all(text: str) -> None:
    shares = run(text)
    samples = [sample for share in shares.given for sample in share]
    assert sorted(sample for _, sample in shares.dealt) == sorted(samples)
    assert {*samples, *shares.left_out} == {*range(shares.length)}
    assert len(samples) - len(shares.twice) + len(shares.left_out) == shares.length
    assert ("given out twice" in caption(text), "given to no rank" in caption(text)) == (
        bool(shares.twice),
        bool(shares.left_out),
    )
    assert figure(text).count("<rect") == 2 * len(samples) + len(shares.left_out)


@pytest.mark.parametrize(
    ("text", "order", "given"),
    [
        ("DistributedSampler length=5 ranks=2 shuffle=0", [0, 1, 2, 3, 4, 0], [(0, 2, 4), (1, 3, 0)]),
        ("DistributedSampler length=5 ranks=2 shuffle=0 drop_last=1", [0, 1, 2, 3], [(0, 2), (1, 3)]),
        ("DistributedSequentialSampler length=5 ranks=2", [0, 1, 2, 3, 4, 0], [(0, 1, 2), (3, 4, 0)]),
    ],
)
def test_torch_interleaves_and_cpp_deals_blocks(text: str, order: list[int], given: list[tuple[int, ...]]) -> None:
    shares = run(text)
    assert [sample for _, sample in shares.dealt] == order
    assert [*shares.given] == given


def test_articles_sections_on_samplers_have_figures() -> None:
    shown = {entry.section.anchor for entry in entries().values() if entry.figures}
    known = {entry.section.anchor for entry in entries().values() if entry.section.article == 2}
    assert shown == {anchor for anchor in known if anchor.startswith("3.") or anchor == "0x03"}
