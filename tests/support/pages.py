"""HTML pages under test, read back as a browser and the page's own script read them."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl.prove.sessions import running

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ words }} \u2028 \ud800 &lt; \x00"
"""Text that must be shown as text, wherever a page shows it."""


class Parsed(HTMLParser):
    """A page as a browser takes it apart: its tags, and the content of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self.within = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self.within = dict(attrs).get("id") or tag
            self.inside[self.within] = ""

    def handle_endtag(self, tag: str) -> None:
        self.within = ""

    def handle_data(self, data: str) -> None:
        if self.within:
            self.inside[self.within] += data


class Read:
    """A page's words and numbers, read as its script reads them."""

    def __init__(self, page: str) -> None:
        inside = Parsed(page).inside
        self.words: dict[str, Any] = json.loads(inside["words"])
        data = base64.b64decode(inside["numbers"])
        data = gzip.decompress(data) if self.words["compressed"] else data
        self.columns = {
            name: np.frombuffer(data, f"<{kind}", length, offset)
            for name, kind, offset, length in self.words["columns"]
        }
        self.begin = np.cumsum(self["bar.begin"].astype(np.int64))
        self.end = self.begin + self["bar.took"].astype(np.int64)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def rows(self) -> list[tuple[int, int]]:
        """Lane and row of each bar."""
        return [(lane, row) for lane, row, _, count in self.words["runs"] for _ in range(count)]


# --- In a browser -----------------------------------------------------------------------------------------------------
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-crash-reporter --virtual-time-budget=20000"
)


def opened(page: Path, profile: Path) -> tuple[str, dict[str, str | None]]:
    """The document after the page's script has run in Chromium, and the attributes of its root."""
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [str(CHROMIUM), *FLAGS.split(), offline, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    profile.mkdir(parents=True, exist_ok=True)
    with running(command, profile) as browser:
        assert browser.wait_for_end(90)
        dom = browser.said()
    ((_, root), *_) = [(tag, a) for tag, a in Parsed(dom).tags if tag == "html"]
    return dom, root


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
