"""The committed notebooks as saved pages, in a real browser without a network.

One browser opens all of them, in frames of one page that looks into them: pictures are drawn, interactive parts are
there with their whole document, answers are folded, and nothing is wider than the page.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pages
import pytest

pytest.importorskip("nbconvert", reason="the notebooks need Jupyter: pip install -e '.[notebooks]'")

import nbformat
from nbconvert import HTMLExporter

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

LOOK = """
const names = NAMES;
function looked(name, inside) {
  const count = what => inside.querySelectorAll(what).length;
  const folds = [...inside.querySelectorAll("details")];
  return {
    name, width: inside.documentElement.scrollWidth,
    pictures: [...inside.images].filter(one => one.complete && one.naturalWidth > 100).length,
    images: inside.images.length, frames: count("iframe[srcdoc][sandbox=allow-scripts]"),
    folded: folds.length, open: folds.filter(one => one.open).length,
    answers: folds.filter(one => one.textContent.startsWith("answer and reason")).length,
  };
}
window.addEventListener("load", () => {
  const found = names.map(name => looked(name, document.getElementById(name).contentDocument));
  document.documentElement.dataset.found = JSON.stringify(found);
});
"""


def shown(path: Path) -> tuple[str, Any]:
    """The notebook as a saved page, and the notebook."""
    notebook = nbformat.read(path, as_version=4)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    return page, notebook


@pytest.mark.live
@pytest.mark.timeout(180)
@pages.needs_chromium
def test_saved_pages_work_without_a_network(tmp_path: Path) -> None:
    notebooks = {}
    frames = []
    for path in NOTEBOOKS:
        page, notebooks[path.stem] = shown(path)
        frames.append(f'<iframe id="{path.stem}" width="1000" height="700" srcdoc="{html.escape(page)}"></iframe>')
    script = LOOK.replace("NAMES", json.dumps(list(notebooks)))
    place = tmp_path / "all.html"
    place.write_text(f"<!doctype html><html><body>{''.join(frames)}<script>{script}</script></body></html>")
    _, root = pages.opened(place, tmp_path / "profile")
    found = {one["name"]: one for one in json.loads(root["data-found"] or "[]")}
    assert set(found) == set(notebooks)
    for name, notebook in notebooks.items():
        outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
        frames_there = sum("<iframe" in output.get("data", {}).get("text/html", "") for output in outputs)
        asked = sum("answer and reason" in output.get("data", {}).get("text/html", "") for output in outputs)
        seen = found[name]
        assert seen["pictures"] == seen["images"] >= 1, name
        assert seen["frames"] == frames_there, name
        assert seen["answers"] == asked >= 5, name
        assert seen["folded"] == 2 * asked, name
        assert seen["open"] == 0, name
        assert seen["width"] <= 1000, name
