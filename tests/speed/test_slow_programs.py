"""Thirty programs with a planted problem: the headline names it, and all views say the same.

`planted/` was written without sight of the rules, and `planted.json` says what a right answer has to name. The programs
take minutes, and what they show depends on the machine's load: they are in the slow size of the suite.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import python

from minidl.hang.headline import headline
from minidl.tracefile.reader import read_trace
from minidl.views.scene import scene_of
from minidl.views.summary import summary

HERE = Path(__file__).parent
PROGRAMS: dict[str, dict[str, Any]] = json.loads((HERE / "planted.json").read_text())["programs"]


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_headline_names_what_is_planted(name: str, tmp_path: Path) -> None:
    planted = PROGRAMS[name]
    ran = python("-m", "minidl", "run", "--trace", "trace", HERE / "planted" / f"{name}.py", cwd=tmp_path)
    if "not permitted" in ran.stdout + ran.stderr:
        pytest.skip("the program may not plant its problem here")
    trace = read_trace(tmp_path / "trace")
    title = headline(trace).title
    for words in planted["must"]:
        assert any(re.search(word, title, re.IGNORECASE) for word in words), f"{title!r} names none of {words}"
    assert f"minidl: {title}" in ran.stderr
    assert summary(trace).text().startswith(title)
    assert scene_of(trace).headline.title == title


def test_each_program_is_in_the_table_and_has_what_a_step_changes() -> None:
    texts = {path.stem: path.read_text() for path in (HERE / "planted").glob("*.py")}
    assert texts.keys() == PROGRAMS.keys()
    edits = [(name, *edit) for name in PROGRAMS for step in PROGRAMS[name].get("tried", {}).values()
             for edit in step.get("edits", ())]  # fmt: skip
    assert [(name, old) for name, old, _ in edits if old not in texts[name]] == []


def test_the_guides_factors_were_measured() -> None:
    guide = (HERE.parent.parent / "docs" / "guides" / "starves.md").read_text()
    rows = re.findall(r"^\|.*\| ([0-9.; ]+) \|$", guide, re.MULTILINE)
    measured = {float(f"{factor:.2g}") for one in PROGRAMS.values() if (factor := one["measured"].get("factor"))}
    measured |= {tried["factor"] for one in PROGRAMS.values() for tried in one.get("tried", {}).values()}
    stated = [float(number) for row in rows for number in row.split(";")]
    assert len(stated) > 10
    assert measured.issuperset(stated)
