"""The script that draws the package's imports and prints its figures."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

script = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("draw_structure.py"))))

SOURCES = {
    "base.py": "import math\n",
    "first.py": "from minidl import base\nfrom minidl.room import second\n",
    "room/__init__.py": '"""A folder."""\n',
    "room/second.py": (
        "import minidl.first\ndef long(x):\n    '''Docs.'''\n    if x:\n        return 1\n    return 2\n"
    ),
    "room/third.py": "import minidl.room.second, minidl.base\n",
}
EDGES = {
    "base": frozenset(),
    "first": frozenset({"base", "room.second"}),
    "room.second": frozenset({"first"}),
    "room.third": frozenset({"base", "room.second"}),
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / "minidl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "minidl"


def test_the_picture_names_modules_wrong_imports_and_circles(package: Path) -> None:
    output = package.parent / "picture.svg"
    script.draw(package, package.parent / "no test of the architecture", output, "")
    text = output.read_text()
    for words in ("4 modules", "1 in the wrong direction, 1 circles", "third", "first → room.second → first"):
        assert words in text


def test_modules_come_after_what_they_import() -> None:
    assert script.sorted_by_imports(EDGES, EDGES) == ["base", "first", "room.second", "room.third"]
    assert script.computed_bands(EDGES) == [("", ["base", "first"]), ("room", ["room.second", "room.third"])]


def test_order_gives_the_bands_and_what_it_lacks_comes_last() -> None:
    order = [("", "base gone"), ("room", "third second")]
    assert script.bands_of(order, EDGES) == [("", ["base"]), ("room", ["room.third", "room.second"]), ("", ["first"])]


@pytest.mark.live
def test_figures_count_lines_and_rank_functions(package: Path) -> None:
    text = script.figures(package)
    assert "minidl/                       2        3      0" in text
    assert "minidl/room/                  3        8      0" in text
    assert "1 functions; lines of a body: median 3, 90th percentile 3, longest 3" in text
    assert "    2  long                             minidl/room/second.py:2" in text


def test_something_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([])
    assert "nothing to do: give -o PICTURE, --figures, or both" in capsys.readouterr().err
