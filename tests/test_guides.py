"""`minidl help`: the pages are found in a checkout and where a wheel has put them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from minidl import cli, guides


def test_each_page_is_printed_by_its_name_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(__file__).parents[1] / "docs"
    assert cli.main(["help"]) == cli.OK
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(page.stem for page in docs.glob("*/*.md"))
    assert cli.main(["help", "hang"]) == cli.OK
    assert capsys.readouterr().out.strip() == (docs / "guides" / "hang.md").read_text().strip()
    assert cli.main(["help", "nowhere"]) == cli.USAGE
    assert "there is no page 'nowhere': choose from arena, ci," in capsys.readouterr().err


def test_a_wheel_has_put_them_where_its_list_of_files_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed(importlib.metadata.PackagePath):
        def locate(self) -> Path:
            return tmp_path / Path(*self.parts[-3:])

    where = [f"../../../share/minidl/{name}.md" for name in ("reference/words", "guides/hang")]
    monkeypatch.setattr(guides, "__file__", str(tmp_path / "minidl" / "guides.py"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [Installed(one) for one in ("minidl/cli.py", *where)])
    assert list(guides.pages().items()) == [
        ("hang", tmp_path / "minidl/guides/hang.md"),
        ("words", tmp_path / "minidl/reference/words.md"),
    ]
