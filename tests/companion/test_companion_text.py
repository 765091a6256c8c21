"""The terminal form: from a section, and from a file, a function or an event back to the sections."""

from __future__ import annotations

import re

import pytest

from minidl import cli
from minidl.companion.text import render, select


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("1 §2.4.4", "1 §2.4.4"),
        ("2.4.4", "1 §2.4.4"),
        ("4 shutdown", "4 §shutdown"),
        ("task_assigned", "1 §2.4.4"),
        ("minidl/loader/dispatcher.py", "1 §2.4.4"),
        ("_try_put_index", "1 §2.4.4"),
        ("Dispatcher.assign", "1 §2.4.4"),
        ("torch/utils/data/dataloader.py", "4 §shutdown"),
        ("关闭", "4 §shutdown"),
        ("СБРОС БИЗНЕСА", "1 §2.4.3"),
    ],
)
def test_each_way_leads_to_its_row(asked: str, key: str) -> None:
    assert key in [entry.key for entry in select(asked)[0]]


def test_a_row_in_words() -> None:
    text = render("1 §2.4.4", "zh")
    assert text.startswith("1 §2.4.4  获取索引")
    assert "torch/utils/data/dataloader.py:" in text
    assert "task_assigned" in text
    assert "FAILS" not in render("drift")


def test_chinese_lines_keep_to_the_width() -> None:
    lines = render("4 §shutdown", "zh", 60).splitlines()
    text = [line for line in lines if re.search("[\u4e00-\u9fff]", line) and line.startswith("  ") and ":" not in line]
    assert len(text) > 20
    assert max(len(line) + len(re.findall("[\u3000-\u9fff\uff00-\uffef]", line)) for line in text) <= 62
    assert not [line for line in text if line.strip()[0] in "\u3002\uff0c\uff1b"]


@pytest.mark.heavy
def test_what_has_no_row_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no row has 'no_such_thing': give a section"):
        render("no_such_thing")
    assert cli.main(["companion", "no_such_thing"]) == cli.USAGE
    assert capsys.readouterr().err.startswith("minidl: companion: no row has 'no_such_thing'")
