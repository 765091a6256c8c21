"""Every citation of an article names a section that exists; `minidl.articles` has them all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minidl.articles import ARTICLES, sections
from minidl.check.joint_rules import JOINT_RULES
from minidl.tracefile.events import EVENTS

ROOT = Path(__file__).parent.parent

MENTION = re.compile(r"\barticles?[:,]? ([0-9][^a-z(;:]{0,3}.{0,4})", re.IGNORECASE)
"""A word "article" before a number, with what follows the number."""

CITED = re.compile(r"[0-9] §")


def texts() -> dict[str, str]:
    """File -> its text with single spaces; of a notebook, what its cells say and not what they printed."""
    found = {}
    for path in sorted((ROOT / "minidl").rglob("*.py")):
        if path.name != "articles.py":
            found[str(path.relative_to(ROOT))] = path.read_text()
    for path in (ROOT / "README.md", ROOT / "traces" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        found[str(path.relative_to(ROOT))] = path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        found[path.name] = "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    return {name: re.sub(r"\s+(# )?", " ", text) for name, text in found.items()}


@pytest.mark.heavy
def test_each_citation_resolves() -> None:
    cited = 0
    for name, text in texts().items():
        sections(text)
        cited += len(CITED.findall(text))
        if name != "docs/explanation/articles.md":  # which tells what the articles are
            vague = [found for found in MENTION.findall(text) if not CITED.match(found)]
            assert not vague, f"{name}: cite a section, as in 'article 1 §2.4.3': {vague}"
    assert cited > 40


def test_each_event_cites_sections() -> None:
    for event in EVENTS.values():
        assert bool(sections(event.article)) == bool(event.article), event
        assert all(sections(part) for part in event.article.split("; ") if part), event


def test_each_joint_rule_cites_sections() -> None:
    assert all(sections(rule.article) for rule in JOINT_RULES)


def test_forms_of_a_citation() -> None:
    assert [s.anchor for s in sections("Article 1 §2.4.3, §2.4.4; article 4 §shutdown.")] == [
        "2.4.3",
        "2.4.4",
        "shutdown",
    ]
    assert [s.name for s in sections("2 §3.3.1 to §3.3.3")] == ["use: set_epoch", "in C++"]
    assert sections("3 §storage") == (ARTICLES[3].sections[2],)
    assert sections("nothing cited") == ()


@pytest.mark.parametrize("wrong", ["1 §2.6", "5 §1.1", "4 §0x00", "3 §shutdown", "1 §2.4.3, §2.4.9"])
def test_a_section_that_is_not_there(wrong: str) -> None:
    with pytest.raises(LookupError, match=r"no such section; see minidl/articles\.ini"):
        sections(wrong)


def test_sections_are_told_apart() -> None:
    for number, article in ARTICLES.items():
        anchors = [section.anchor for section in article.sections]
        assert len(set(anchors)) == len(anchors)
        assert {section.article for section in article.sections} == {number}
        assert all(section.name for section in article.sections)
