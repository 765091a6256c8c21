"""HTML pages that need nothing else: no network, no server and no other file.

Interface: `filled(template, **holes)` renders a jinja2 template that extends `frame.html`; `Page` is a page as a str,
which a notebook displays and `written` writes to a file. Another package keeps its templates beside its own code and
extends the same frame: `filled(template, package, **holes)`.

Rules of use: a template has three blocks, `style`, `body` and `script`; long ones include files of their own. Text goes
in as `{{ text }}`, which escapes it, and data as JSON: `{{ data | tojson }}`, with every character escaped that HTML
could interpret. Only what a template or this project has made itself may go in as `Markup`. A content security policy
allows the page's own style and script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import Self

from minidl.tracefile.packs import whole
from minidl.views.colours import THEMES

if TYPE_CHECKING:
    from jinja2 import Environment

HERE: Final = "minidl.views"


class Page(str):
    """A page as text. A notebook displays it in a sandboxed frame that can run the page's script and nothing else."""

    height = 640  # pixels, in a notebook
    shows = "timeline of a minidl trace"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} characters; html(..., path) writes it to a file>"

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" style="width:100%;height:{self.height}px;border:0" '
            f'title="{self.shows}" srcdoc="{html.escape(self)}"></iframe>'
        )

    def written(self, path: str | os.PathLike[str] | None) -> Self | Path:
        """Write the page to `path` and return that; return the page itself if there is none."""
        if path is None:
            return self
        target = Path(path)
        with whole(target) as draft:
            draft.write_text(self, encoding="utf-8")
        return target


def filled(template: str, package: str = HERE, *, connect: str = "", **holes: Any) -> str:
    """Return the page that a template of `package` makes with its holes filled: the same ones, the same page.

    connect: where the page may send requests to, as in a content security policy; "" = nowhere.
    """
    return _templates(package).get_template(template).render(connect=connect, **holes)


@functools.cache
def _templates(package: str) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    places = [str(files(place)) for place in (package, HERE)]
    found = Environment(loader=FileSystemLoader(places), autoescape=True, undefined=StrictUndefined)
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    found.globals |= {"themes": THEMES, "policy": _policy}
    return found


def _policy(style: str, script: str, connect: str) -> str:
    """Return a content security policy: this style and this script, by their hashes, and `connect` alone."""
    rules = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    for kind, source in (("style-src", style), ("script-src", script)):
        rules.append(f"{kind} 'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'")
    rules += [f"connect-src {connect}"] if connect else []
    return "; ".join(rules)
