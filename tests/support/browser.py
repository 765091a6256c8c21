"""A headless Chromium, driven over WebDriver: what a page does that only a browser can tell."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minidl.prove.sessions import running

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
STARTED = "started successfully on port "
"""What the driver says before its port."""

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip

needs_driver = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs the programs chromium and chromedriver")

LOADED = "return Boolean(window.app && window.app.trace && window.app.trace.engine)"
"""Whether Perfetto has the trace."""

ASK = """
const done = arguments[arguments.length - 1];
window.app.trace.engine.query(arguments[0]).then(rows => {
  const found = [];
  for (const it = rows.iter({}); it.valid(); it.next())
    found.push(Object.fromEntries(rows.columns().map(name => [name, String(it.get(name))])));
  done(found);
}, error => done(String(error)));
"""


WRITTEN = """
const done = arguments[arguments.length - 1], boxes = new Set();
const pen = CanvasRenderingContext2D.prototype, write = pen.fillText;
pen.fillText = function (text, x, y) {
  const w = this.measureText(text).width, left = x - {left: 0, center: w / 2, right: w}[this.textAlign];
  const box = [text, left, left + w, y - 5, y + 5];
  if (this.canvas.id === "canvas" && this.textAlign !== "right" && text !== "✕") boxes.add(JSON.stringify(box));
  return write.call(this, text, x, y);
};
document.getElementById("headline").click();
requestAnimationFrame(() => requestAnimationFrame(() => { pen.fillText = write; done([...boxes].map(JSON.parse)); }));
"""
"""Words that the page writes into the lanes where it opens: each with left, right, top and bottom, pixels."""

FRAMES = """
let left = arguments[0];
const done = arguments[1], next = () => left-- ? requestAnimationFrame(next) : done();
next();
"""


KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Left": "\ue012", "Right": "\ue014", "Shift": "\ue008"}
"""WebDriver's characters of keys that write none."""


class Browser:
    """A session with a chromedriver at a port."""

    def __init__(self, port: int, profile: Path) -> None:
        self.root = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "timeouts": {"script": 60_000}}
        self.root += "/" + self.post("", capabilities={"alwaysMatch": wanted})["sessionId"]

    def post(self, path: str, **body: Any) -> Any:
        return self._asked(path, json.dumps(body).encode())

    def _asked(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self.root + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=90) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        return self.post("/execute/sync", script=script, args=[])

    def ask(self, sql: str) -> list[dict[str, str]]:
        """The rows of Perfetto's answer to a query."""
        rows = self.post("/execute/async", script=ASK, args=[sql])
        assert isinstance(rows, list), rows
        return rows

    def until(self, script: str) -> None:
        deadline = time.monotonic() + 90
        while not self.run(script):
            assert time.monotonic() < deadline, f"the page never got so far: {script}"
            time.sleep(0.1)

    def resize(self, width: int, height: int) -> None:
        """Give the page so many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.post("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)

    def settle(self, frames: int = 30) -> None:
        """Let the page draw so many frames."""
        self.post("/execute/async", script=FRAMES, args=[frames])

    def press(self, *keys: str) -> None:
        """Press keys one after the other: "n", "Enter", "Shift Right"."""
        acts = []
        for key in keys:
            held = [KEYS.get(part, part) for part in key.split(" ")]
            acts += [{"type": "keyDown", "value": part} for part in held]
            acts += [{"type": "keyUp", "value": part} for part in reversed(held)]
        self.post("/actions", actions=[{"type": "key", "id": "keys", "actions": acts}])

    def drag(self, x: int, y: int, to: int) -> None:
        """Drag the mouse along a line; no further than (x, y) is a click."""
        move, button = {"type": "pointerMove", "y": y, "duration": 0}, {"button": 0}
        acts = [move | {"x": x}, button | {"type": "pointerDown"}, move | {"x": to}, button | {"type": "pointerUp"}]
        self.post("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": acts}])

    def picture(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self._asked("/screenshot", None))


@contextlib.contextmanager
def driven(profile: Path) -> Iterator[Browser]:
    """Start a browser with its files in `profile`; end all its processes."""
    with running([str(DRIVER), "--port=0"], profile.parent) as driver:
        assert driver.wait_for_words(STARTED), driver.errors()
        yield Browser(int(driver.said().partition(STARTED)[2].split(".")[0]), profile)
