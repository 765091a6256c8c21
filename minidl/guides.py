"""The pages of `docs`, to be read in a terminal: `minidl help NAME`; and which of them explains an error or a finding.

A page's name is that of its file: `hang` is docs/guides/hang.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDERS: Final = ("tutorials", "guides", "explanation", "reference", "findings")

PAGE_OF: Final = {
    "hung": "hang",
    "may hang": "hang",
    "died": "hang",
    "error": "hang",
    "slow": "starves",
    "not seen": "cluster",
    "ranks": "ranks",
    "state": "resume",
    "slabs": "arena",
    "device": "device",
    "left to torch": "record",
}
"""What has happened -> the page that explains it. The first ones are outcomes of a run, in `RunOutcome`'s words."""


def more(about: str) -> str:
    """Say which page explains `about`, a key of PAGE_OF; an error or a finding ends with it."""
    return f"more: minidl help {PAGE_OF[about]}"


def pages() -> dict[str, Path]:
    """Name -> file, in the order of _FOLDERS: of `docs` in a checkout, else where the list of installed files says."""
    docs = Path(__file__).parents[1] / "docs"
    if docs.is_dir():
        found = [page for folder in _FOLDERS for page in sorted((docs / folder).glob("*.md"))]
    else:
        from importlib import metadata

        installed = metadata.files("minidl") or []
        found = sorted(Path(str(file.locate())) for file in installed if file.match("share/minidl/*/*.md"))
        found.sort(key=lambda page: _FOLDERS.index(page.parent.name))
    return {page.stem: page for page in found}


def title(page: Path) -> str:
    """Its first heading."""
    with page.open(encoding="utf-8") as file:
        return next(line.lstrip("# ").strip() for line in file if line.startswith("#"))
