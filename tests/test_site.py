"""The documentation site: it builds without a warning, each link leads to a place, and nothing comes from elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[1]
SOURCES = {"img": "src", "script": "src", "iframe": "src", "link": "href"}
"""What a page loads by itself."""


class Read(HTMLParser):
    """A page's anchors, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.anchors, self.links, self.loads = path, set[str](), list[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if "href" in found and tag == "a":
            self.links.append(found["href"])
        if found.get(SOURCES.get(tag, "")):
            self.loads.append(found[SOURCES[tag]])


def is_elsewhere(link: str) -> bool:
    return link.startswith(("http:", "https:", "//", "mailto:"))


@pytest.fixture(scope="module")
def pages() -> dict[Path, Read]:
    """The site's pages. Its Markdown is this project's; the generator is a package of its own."""
    if not Path(sys.executable).with_name("zensical").is_file() or shutil.which("zensical") is None:
        pytest.skip("zensical is not installed: pip install -e '.[docs]'")
    done = subprocess.run([sys.executable, "docs/build.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    site = ROOT / "build" / "site"
    return {path: Read(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_each_link_leads_somewhere(pages: dict[Path, Read]) -> None:
    lost = []
    for page in pages.values():
        for link in [*page.links, *page.loads]:
            if is_elsewhere(link) or link.startswith(("data:", "javascript:", "blob:")):
                continue
            place, _, anchor = link.partition("#")
            target = (page.path.parent / unquote(place.partition("?")[0])).resolve() if place else page.path
            if not target.exists() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
                lost.append((page.path.name, link))
    assert lost == []


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Read]) -> None:
    assert [(page.path.name, link) for page in pages.values() for link in page.loads if is_elsewhere(link)] == []
