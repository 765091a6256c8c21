"""The pictures of the protocol: current with the tables, complete, and legible."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from minidl.explore import diagrams
from minidl.loader.protocol import LOADER_TABLE, PIN_TABLE, WORKER_TABLE, LoaderState

SVG = "{http://www.w3.org/2000/svg}"
every_picture = pytest.mark.parametrize("name", diagrams.PICTURES)


@every_picture
def test_the_committed_picture_is_what_the_tables_say(name: str) -> None:
    committed = (diagrams.FOLDER / name).read_text(encoding="utf-8")
    assert committed == diagrams.PICTURES[name](), "run python -m minidl.explore.diagrams"


@pytest.mark.parametrize(
    ("name", "table"), [("loader.svg", LOADER_TABLE), ("worker.svg", WORKER_TABLE), ("pin-thread.svg", PIN_TABLE)]
)
def test_a_lifecycle_shows_each_transition_once(name: str, table: dict[object, dict[object, object]]) -> None:
    picture = ET.fromstring(diagrams.PICTURES[name]())
    words = [text.text or "" for text in picture.iter(f"{SVG}text")]
    labels = [event for label in words for event in label.split(" / ")[0].split(", ")]
    for state, row in table.items():
        assert words.count(state.name) == 1  # type: ignore[attr-defined]
        for event in row:
            assert event.name in labels  # type: ignore[attr-defined]
    assert sum(map(len, table.values())) == len(labels) - len(table) - 1  # the states and the title are no events


@every_picture
def test_no_two_texts_overlap(name: str) -> None:
    picture = ET.fromstring(diagrams.PICTURES[name]())
    places = []
    for text in picture.iter(f"{SVG}text"):
        width, x, y = len(text.text or "") * diagrams.LETTER, float(text.attrib["x"]), float(text.attrib["y"])
        left = x - {"start": 0, "middle": width / 2, "end": width}[text.attrib["text-anchor"]]
        places.append((left, y - diagrams.SIZE, left + width, y + 3))
        assert left >= 0
        assert left + width <= float(picture.attrib["width"])
    for (left, top, right, bottom), (left_2, top_2, right_2, bottom_2) in itertools.combinations(places, 2):
        assert right <= left_2 or right_2 <= left or bottom <= top_2 or bottom_2 <= top


def test_a_table_that_changes_changes_the_picture() -> None:
    other = {state: dict(row) for state, row in LOADER_TABLE.items()}
    other[LoaderState.NEW].popitem()
    assert diagrams.lifecycle("", other) != diagrams.lifecycle("", LOADER_TABLE)


@pytest.mark.parametrize("language", ["ru", "zh"])
def test_the_shutdown_on_the_wall_is_whole_in_its_language(language: str) -> None:
    english, other = (ET.fromstring(diagrams.PICTURES[name]()) for name in ("shutdown.svg", f"shutdown.{language}.svg"))
    bold = [[text.text for text in picture.findall(f".//{SVG}text[@class='title']")] for picture in (english, other)]
    assert len(bold[0]) == len(bold[1]) > 10
    assert set(bold[0]) & set(bold[1]) <= {"worker"}


def test_the_command_writes_all_of_them(tmp_path: Path) -> None:
    diagrams.main(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(diagrams.PICTURES)
