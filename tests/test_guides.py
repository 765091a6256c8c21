"""`minidl help`: the pages are found in a checkout and where a wheel has put them, and errors name those that exist."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from minidl import cli, guides
from minidl.hang.finding import RunOutcome

ROOT = Path(__file__).parents[1]


def test_each_page_is_printed_by_its_name_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    docs = ROOT / "docs"
    assert cli.main(["help"]) == cli.OK
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(page.stem for page in docs.glob("*/*.md"))
    assert cli.main(["help", "hang"]) == cli.OK
    assert capsys.readouterr().out.strip() == (docs / "guides" / "hang.md").read_text().strip()
    assert cli.main(["help", "nowhere"]) == cli.USAGE
    assert "there is no page 'nowhere': choose from " in capsys.readouterr().err


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


def test_what_has_happened_leads_to_a_page_that_exists() -> None:
    assert set(guides.PAGE_OF.values()) <= set(guides.pages())


def test_each_entry_is_said_somewhere() -> None:
    code = "".join(path.read_text() for path in (ROOT / "minidl").rglob("*.py"))
    said = {match[1] for match in re.finditer(r"\bmore\('([^']+)'\)", code)} | {outcome.value for outcome in RunOutcome}
    assert set(guides.PAGE_OF) <= said
    assert {outcome.value for outcome in RunOutcome if outcome.wrong} <= set(guides.PAGE_OF)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("trace", "page"), [("worker-sigkilled", "hang"), ("starved-gpu", "starves"), ("healthy-8-pinned", None)]
)
@pytest.mark.parametrize("command", ["summary", "doctor"])
def test_what_became_of_a_run_leads_to_its_page(
    command: str, trace: str, page: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([command, str(ROOT / "traces" / f"{trace}.minidl")])
    shown = re.findall(r"^  more: minidl help (\w+)$", capsys.readouterr().out, re.M)
    assert shown == ([page] if page else [])
