"""Write the replays of five recordings as one page: `python docs/replays.py [FILE]`, `build/replays.html` by default.

The page needs no installation, no server and no network: it can be sent, or put on any web host. Each recording opens
when its line is clicked.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

import minidl

ROOT = Path(__file__).parents[1]
RECORDINGS = {
    "workers-2": "Two workers: tasks go out in turn, batches come back",
    "head-of-line-in-order": "One slow sample: the reorder buffer fills",
    "head-of-line-out-of-order": "The same with in_order=False",
    "shutdown-closed": "The loop breaks: who is told to leave, in which order",
    "worker-sigkilled": "A worker is killed, and the loader notices",
}
"""Name in traces/ -> what is to be seen in it."""

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Five runs of a data loader, step by step</title>
<style>body{{font:16px system-ui,sans-serif;max-width:1200px;margin:1em auto;padding:0 1em}}
summary{{cursor:pointer;font-size:1.1em;padding:.4em 0}} iframe{{width:100%;height:760px;border:1px solid #8a94a0}}
</style><h1>Five runs of a data loader, step by step</h1>
<p>Recorded with minidl. Move the slider: each step is an event of the run; the page shows what each process, queue and
thread then was doing.</p>{parts}</html>"""


def page() -> str:
    """Return the page."""
    parts = []
    for number, (name, about) in enumerate(RECORDINGS.items()):
        replay = str(minidl.replay(ROOT / "traces" / f"{name}.minidl").html())
        frame = f'<iframe title="{html.escape(about)}" loading="lazy" srcdoc="{html.escape(replay)}"></iframe>'
        parts.append(f"<details{' open' * (number == 0)}><summary>{html.escape(about)}</summary>{frame}</details>")
    return PAGE.format(parts="\n".join(parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the replays of five recordings as one page.")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", default=ROOT / "build" / "replays.html")
    to: Path = parser.parse_args().file
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(page(), encoding="utf-8")
    print(to)
