"""A trace that is truncated, overwritten, old or incomplete: each view opens, or says in words what it lacks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damages
import made_trace
import pytest
from made_trace import Run
from sizes import slow

from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.chrome import to_chrome
from minidl.views.page import html
from minidl.views.perfetto import write_perfetto
from minidl.views.picture import timeline
from minidl.views.replay_page import replay, to_focus
from minidl.views.replay_terminal import render as replayed
from minidl.views.scene import scene_of
from minidl.views.summary import summary
from minidl.views.text import render
from minidl.views.viewer import focus

pytest.importorskip("matplotlib")

RUNS: list[dict[str, Any]] = [
    made_trace.HEALTHY, made_trace.HUNG, {"batches": 8, "pin": True, "simulated": True}, {"batches": 5, "epochs": 2},
    made_trace.SLABS,
]  # fmt: skip


def shown_as_figure(trace: Trace) -> object:
    figure = timeline(trace)
    figure.draw_without_rendering()
    return figure


def stepped(trace: Trace) -> object:
    at = replay(trace)
    to_focus(at)
    return replayed(at), at.html()


VIEWS: dict[str, Callable[[Trace], object]] = {
    "figure": shown_as_figure, "page": html, "text": render, "chrome": to_chrome,
    "perfetto": lambda trace: write_perfetto(trace, trace.path.with_suffix(".pftrace")), "replay": stepped,
    "its window": lambda trace: focus(scene_of(trace)), "summary": lambda trace: str(summary(trace)),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1, 5, *slow(2, 3, 4, 6, 7)])
def test_each_view_opens_it_or_says_why_not(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    whole = made_trace.write(tmp_path / "t", Run(**draw.choice(RUNS)))
    files = {file.name: file.read_bytes() for file in sorted(whole.iterdir()) if file.is_file()}
    for _ in range(draw.randint(1, 3)):
        draw.choice(damages.DAMAGES)(draw, files)
    path = damages.write(files, tmp_path, seed)
    why = said(lambda: read_trace(path))
    assert not why or str(tmp_path) in why
    if not why:
        trace = read_trace(path)
        told = {name: words for name, view in VIEWS.items() if (words := said(functools.partial(view, trace)))}
        assert [words for words in told.values() if "trace" not in words] == []
        assert not told or not len(trace), "what was read is shown"


def said(act: Callable[[], object]) -> str:
    """The words of the error of a view, or of the reader, which has nothing to show; "" if there is none."""
    try:
        act()
    except (TraceError, ValueError) as error:
        return str(error)
    return ""
