"""The pages of `docs`, to be read in a terminal: `minidl help NAME`.

A page's name is that of its file: `hang` is docs/guides/hang.md.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

_FOLDERS = ("guides", "explanation", "reference")


def pages() -> dict[str, Path]:
    """Name -> file, the guides first: of `docs` in a checkout, else where the list of installed files says."""
    docs = Path(__file__).parents[1] / "docs"
    if docs.is_dir():
        found = [page for folder in _FOLDERS for page in sorted((docs / folder).glob("*.md"))]
    else:
        installed = importlib.metadata.files("minidl") or []
        found = sorted(Path(str(file.locate())) for file in installed if file.match("share/minidl/*/*.md"))
        found.sort(key=lambda page: _FOLDERS.index(page.parent.name))
    return {page.stem: page for page in found}


def title(page: Path) -> str:
    """Its first heading."""
    with page.open(encoding="utf-8") as file:
        return next(line.lstrip("# ").strip() for line in file if line.startswith("#"))
