"""The reading companion: `minidl companion`, as a page beside an article, or as text in a terminal.

Interface: `run(arguments)` is the command; `page.html(path)` writes the page; `text.render(what)` is the terminal form.
`rows`, `reading` and `drift` are the data, in files beside them; `coverage` says what they cover.
"""

from __future__ import annotations

import argparse
from pathlib import Path

OK = 0


def run(arguments: argparse.Namespace) -> int:
    """Write the page, serve it, or print what is asked for. Raises ValueError for a section that there is not."""
    from minidl import terminal
    from minidl.companion import page, serve, text

    if arguments.what:
        print(text.render(" ".join(arguments.what), arguments.language, terminal.columns()))
        return OK
    if arguments.compare is not None:
        return _compare(arguments.compare)
    with terminal.busy("making the page"):
        made = page.html()
    if arguments.serve:
        serve.serve(made, arguments.port)
    else:
        print(made.written(arguments.output))
    return OK


def _compare(folder: Path) -> int:
    """Print what moved in another torch."""
    from minidl.companion.drift import moved

    if not (folder / "utils" / "data" / "dataloader.py").is_file():
        raise ValueError(f"{folder}: no torch is there: name the folder that holds utils/data/dataloader.py")
    found = list(moved(folder))
    print("\n".join(found) or "nothing has moved")
    return OK
