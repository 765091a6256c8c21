"""The figure holds what the lanes hold: bars, open ends, arrows, counters, legend; and touches nothing else."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
from made_trace import Run, made, made_killed
from oracle_trace import rows_of, trace_of, write_process
from pictures import artists, drawn_bars
from sizes import slow

from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace
from minidl.views import picture
from minidl.views.colours import paint
from minidl.views.picture import timeline
from minidl.views.scene import legend_of, per_pixel, scene_of

matplotlib = pytest.importorskip("matplotlib")


def texts(figure: object) -> list[str]:
    from matplotlib.text import Text

    return [t.get_text() for t in figure.findobj(Text) if t.get_text()]  # type: ignore[attr-defined]


def test_two_runs_are_drawn_on_one_scale_from_their_first_batches(tmp_path: Path) -> None:
    """A is ten times as slow; B's trace ends before the axis does."""
    a = made(tmp_path / "a", Run(12, cost=lambda task: 9_000_000))
    b = made(tmp_path / "b", Run(12, pin=True))
    figure = picture.before_and_after((a, b), ((1,), (1,)), "B is faster")
    above, below = figure.axes
    assert above.get_position().y0 > below.get_position().y1
    first, *_, last = a.select("yield")["time"].tolist()
    for axes, trace in ((above, a), (below, b)):
        begin, end = axes.get_xlim()  # ms since the first event
        assert begin == pytest.approx((trace.select("yield")["time"][0] - trace.events["time"][0]) / 1e6)
        assert end - begin == pytest.approx((last - first) / 1e6)
        assert axes.get_xlabel() == "ms since the first batch"
        assert [tick.get_text() for tick in axes.get_xticklabels()][:3] == ["0", "10", "20"]
    said = texts(figure)
    assert {"B is faster", "epochs", "worker 1", "pin thread"} <= set(said)
    assert sum(text.startswith(("A: a: ", "B: b: ")) for text in said) == 2
    assert any(text.startswith("end of the trace, ") for text in said)
    assert said.count("collate") == 1, "one legend"


LONG_HANG = made_trace.HUNG | {"poll": 5_000_000_000}


@pytest.mark.heavy
@pytest.mark.parametrize(("run", "wrong"), [(LONG_HANG, True), ({"batches": 200, "step": 10_000}, False)])
def test_the_headline_is_the_title_and_its_bar_is_outlined_and_named(
    tmp_path: Path, run: dict[str, Any], wrong: bool
) -> None:
    """In red only if it went wrong."""
    trace = made(tmp_path, **run)
    figure, drawn = timeline(trace), scene_of(trace)
    frames = artists(figure, "framed")
    ((_, arrow),) = artists(figure, "cause")
    edges = {matplotlib.colors.to_hex(shape.get_edgecolor()) for shape in (arrow, *(outline for _, outline in frames))}
    assert edges == {picture.RED} if wrong else picture.RED not in edges
    assert {tuple(key) for key, _ in frames} == set(drawn.framed.rows)
    said = texts(figure)
    assert drawn.headline.title in " ".join(said)
    assert ("sample 38: did not end" in said) == wrong, "for how long is said once, in the title"
    ends = [text for text in said if "end of the trace" in text]
    assert ends == (["end of the trace, 30.01 s"] if wrong else []), "the line before what is not in the trace"
    assert ("s since the first event" in said) == wrong, "the title's unit"


def test_a_death_is_marked_on_the_lane_that_died_and_weakly_where_it_was_found(tmp_path: Path) -> None:
    figure = timeline(made_killed(tmp_path / "killed"))
    colours = {t.get_text(): t.get_color() for t in figure.findobj(matplotlib.text.Text)}
    assert colours["killed by SIGKILL; last sign of life"] == picture.RED
    assert colours["found dead worker 1"] == picture.FAINT


def boxes_of(texts: Iterable[Any]) -> list[Any]:
    return [text.get_window_extent() for text in texts]


def overlapping(boxes: list[Any], across: float = 0, down: float = 0) -> list[Any]:
    """The pairs of boxes that cover each other by more than so many pixels."""
    return [
        (a, b) for a, b in itertools.combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > across and min(a.y1, b.y1) - max(a.y0, b.y0) > down
    ]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("width", [6, *slow(13)])
@pytest.mark.parametrize("run", [LONG_HANG, {"batches": 40, "step": 10_000, "workers": 4}, None])
def test_no_label_covers_another(tmp_path: Path, run: dict[str, object] | None, width: float) -> None:
    trace = made_killed(tmp_path / "t", workers=4, dead=3) if run is None else made(tmp_path / "t", **run)
    figure = timeline(trace, width=width)
    figure.draw_without_rendering()
    boxes = boxes_of([*figure.axes[0].texts, *figure.texts, *figure.legends])
    assert len(boxes) > 8
    assert overlapping(boxes, across=1, down=2) == []


# --- Bars -------------------------------------------------------------------------------------------------------------
def test_bars_lie_in_their_rows(healthy: Trace) -> None:
    drawn = scene_of(healthy)
    for (lane, row, _), shape in artists(timeline(healthy, width=400), "bars"):
        y = np.array([path.vertices[:4, 1] for path in shape.get_paths()])  # type: ignore[attr-defined]
        place = drawn.lanes[lane]
        assert place.row_top(row) <= y.min() < y.max() <= place.bottom + 1e-9


def test_narrow_bars_become_columns(healthy: Trace) -> None:
    figure = timeline(healthy, width=3)
    drawn = scene_of(healthy)
    pixels = round((3 - picture.LEFT - picture.RIGHT) * picture.DPI)
    bars, columns = per_pixel(drawn.bars, drawn.begin, drawn.end, pixels)
    assert 0 < len(bars) < len(drawn.bars)
    assert sum(drawn_bars(figure)[0].values()) == len(bars)
    cells = {(int(c["lane"]), int(c["row"]), int(c["pixel"])) for c in columns}
    shown = {tuple(key): len(shape.get_paths()) for key, shape in artists(figure, "narrow")}  # type: ignore[attr-defined]
    assert shown == Counter((lane, row) for lane, row, _ in cells)


def test_a_column_is_as_dense_as_its_bars_fill_it(tmp_path: Path) -> None:
    """Two fetches fill a half and a quarter of two pixels; each pixel's rectangle is that opaque."""
    last = round((13 - picture.LEFT - picture.RIGHT) * picture.DPI) * 1000  # a pixel is 1000 ns
    spans = [(0, 500), (5000, 5250), (last - 1, last)]  # the last one sets the scale
    steps = [(10 + t, code, n) for n, span in enumerate(spans) for t, code in zip(span, ev.FETCH, strict=True)]
    trace = trace_of(tmp_path, rows_of("time code task", *steps, worker=0), role="worker", worker=0)
    ((_, shape),) = artists(timeline(trace, width=13), "narrow")
    opacity = shape.get_facecolors()[:, 3]  # type: ignore[attr-defined]
    np.testing.assert_allclose(opacity, [0.5, 0.25, picture.FAINTEST])


def test_what_did_not_end_fades_and_says_so(hung: Trace) -> None:
    figure, drawn = timeline(hung, width=400), scene_of(hung)
    assert max(figure.axes[0].get_xticks()) * 1e6 <= drawn.last < drawn.end, "ms: no number is beyond the trace's end"
    _, fading = drawn_bars(figure)
    assert fading.total() == 6
    for _, shape in artists(figure, "open"):
        opacity = shape.get_facecolors()[:, 3]  # type: ignore[attr-defined]
        assert (np.diff(opacity) < 0).all()
        assert opacity[-1] < 0.2
    said = {text.strip() for text in texts(figure)}
    assert {"fetch 9: did not end", "wait for task 9: did not end", "no end recorded"} <= said
    assert any(text.startswith("sample 38: did not end") for text in said)  # with its length: the headline is about it


@pytest.mark.parametrize("simulated", [True, False])
def test_a_simulated_pin_is_dotted_and_waits_and_nothing_else_are_hatched(tmp_path: Path, simulated: bool) -> None:
    figure = timeline(made(tmp_path, batches=12, pin=True, simulated=simulated), width=400)
    hatches = {key[2]: shape.get_hatch() for key, shape in artists(figure, "bars")}  # type: ignore[attr-defined]
    assert {code for code in hatches if hatches[code] == picture.DOTS} == ({ev.PIN[0]} if simulated else set())
    waits = {code for code in hatches if paint(code).waits}
    assert {code for code in hatches if hatches[code] == picture.WAIT} == waits != set()
    assert ("simulated" in texts(figure)) == simulated


def test_without_its_headline_a_picture_tells_no_verdict(hung: Trace) -> None:
    told, silent = timeline(hung), timeline(hung, headline=False)
    for part in ("framed", "cause"):
        assert (len(artists(told, part)), len(artists(silent, part))) == (1, 0)
    assert [text.get_text() for text in silent.texts] == [text.get_text() for text in told.texts[-1:]]
    assert {text.get_weight() for text in told.texts} == {"bold", "normal"}
    assert silent.get_figheight() < told.get_figheight()


def test_the_legend_names_what_occurs_in_the_tables_colours(healthy: Trace) -> None:
    (legend,) = timeline(healthy).legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [sign.label for sign in legend_of(scene_of(healthy))]
    assert {"fetch", "epoch, next", "waiting", "numbers: t task, s sample, w worker, e epoch"} < set(labels)
    assert "pin" not in labels
    colour = matplotlib.colors.to_hex(legend.get_patches()[labels.index("fetch")].get_facecolor())
    assert colour == ev.EVENTS[ev.FETCH[0]].colour


# --- Arrows, alarms, counters -----------------------------------------------------------------------------------------
@pytest.mark.heavy
def test_arrows_of_the_chosen_batches(healthy: Trace) -> None:
    figure, drawn = timeline(healthy, batches=[0, 1, 2, 3]), scene_of(healthy)
    shapes = artists(figure, "arrow")
    assert Counter(key[0] for key, _ in shapes) == {0: 6, 1: 6, 2: 6, 3: 6}
    ends = np.array([patch._posA_posB for _, patch in shapes]) * 1e6  # type: ignore[attr-defined]
    arrows = drawn.arrows(drawn.pick([0, 1, 2, 3]))
    np.testing.assert_allclose(np.sort(ends[:, 0, 0]), np.sort(arrows["left"]))
    np.testing.assert_allclose(np.sort(ends[:, 1, 0]), np.sort(arrows["reached"]))
    assert not artists(timeline(healthy), "arrow")
    figure.draw_without_rendering()
    numbers = [t for t in figure.axes[0].texts if t.get_text().startswith("batch ")]
    assert [t.get_text() for t in numbers] == [f"batch {n}" for n in range(4)]
    assert overlapping(boxes_of(numbers)) == [], "the batches begin together"


def test_what_went_wrong_is_written_beside_its_mark(tmp_path: Path) -> None:
    dead = {"code": ev.FOUND_DEAD, "worker": 1, "x": ev.Actor.WORKER, "y": 7, "z": -9}
    failed = {"code": ev.TASK_ERROR, "task": 2, "worker": 1, "z": 1}
    text = {"kind": "string", "id": 1, "text": r"KeyError: '$\frac$'"}
    figure = timeline(trace_of(tmp_path, [{"code": ev.NEXT[0]}, dead, failed], lines=[text]))
    assert figure._repr_png_()  # type: ignore[attr-defined]
    assert {"found dead worker 1", r"task error worker 1: KeyError: '$\frac$'"} <= set(texts(figure))


def test_a_loaders_state_is_marked_where_it_is_sent_and_where_it_counts(tmp_path: Path, healthy: Trace) -> None:
    events = rows_of(
        "time code task worker x y",
        (0, ev.NEXT[0], -1, -1, 0, 0), (5, ev.WORKERS_CHOSEN, -1, -1, 2, 0), (10, ev.RESUMED, -1, -1, 1, 1),
        (30, ev.STATE_KEPT, 0, 0, 1, 0), (40, ev.STATE_TAKEN, -1, -1, 2, 0), (90, ev.NEXT[1], -1, -1, 0, 0),
    )  # fmt: skip
    write_process(tmp_path, events, role="loader")
    sent = rows_of("time code task worker x y", (20, ev.STATE_PUT, 0, 0, 64, 1))
    trace = trace_of(tmp_path, sent, pid=1001, role="worker", worker=0)
    figure, drawn = timeline(trace), scene_of(trace)
    for code in picture.STATES:
        ((_, shape),) = [found for found in artists(figure, "state") if found[0] == [code]]
        (mark,) = drawn.marks[drawn.marks["code"] == code]
        place = drawn.lanes[mark["lane"]]
        assert shape.get_xdata().tolist() == [mark["time"]]  # type: ignore[attr-defined]  # the axis is in ns
        assert place.top <= shape.get_ydata()[0] <= place.bottom  # type: ignore[attr-defined]
    said = {"resumed after 1 batch", "state taken: 2 batches", "resumed", "state_put", "state_kept", "state_taken"}
    assert said <= set(texts(figure))
    assert not any("state" in text for text in texts(timeline(healthy)))


def test_captions_of_states_do_not_cover_each_other(tmp_path: Path) -> None:
    """The last one is written, and of those before it the ones that there is room for; every line is drawn."""
    times = [100, 3000, *range(9000, 9400, 50)]
    taken = [(time, ev.STATE_TAKEN, n) for n, time in enumerate(times)]
    events = rows_of("time code x", (0, ev.NEXT[0], 0), *taken, (9500, ev.NEXT[1], 0))
    figure = timeline(trace_of(tmp_path, events))
    figure.draw_without_rendering()
    shown = [t for t in figure.axes[0].texts if t.get_text().startswith("state taken")]
    assert shown[0].get_text() == "state taken: 9 batches"
    assert 3 <= len(shown) < len(times)
    assert overlapping(boxes_of(shown)) == []
    assert sum(line.get_linestyle() == "--" for line in figure.axes[0].get_lines()) == len(times)


@pytest.mark.parametrize("run", [made_trace.HEALTHY, made_trace.HUNG])
def test_counters_are_step_plots_of_the_lanes_counters(tmp_path: Path, run: dict[str, object]) -> None:
    trace = made(tmp_path / "trace", **run)
    figure = timeline(trace)
    lines = {line.get_gid(): line for axes in figure.axes for line in axes.get_lines() if line.get_gid()}
    counters = scene_of(trace).counters
    assert len(counters) == 3
    for counter in counters:
        line = lines[f"counter {counter.name} {counter.slot}"]
        assert line.get_drawstyle() == "steps-post"
        np.testing.assert_allclose(line.get_xdata()[1:-1] * 1e6, counter.times)
        np.testing.assert_array_equal(line.get_ydata()[1:-1], counter.values)


def test_a_loaders_counters_have_its_own_colour_also_where_another_lacks_one(tmp_path: Path) -> None:
    """Loader 1 has no reorder buffer here; loader 2's is not drawn in loader 1's colour."""
    steps = (10, ev.EPOCH[0], 0, 2), (20, ev.TASK_ASSIGNED, 1, 1), (30, ev.REORDER_STORE, 0, 1), (90, ev.EPOCH[1], 0, 0)
    rows = [(*step, loader) for step in steps for loader in (1, 2) if loader == 2 or step[1] != ev.REORDER_STORE]
    figure = timeline(trace_of(tmp_path, rows_of("time code x y loader", *rows)))
    colours = {line.get_gid(): line.get_color() for axes in figure.axes for line in axes.get_lines() if line.get_gid()}
    assert colours["counter reorder buffer 1"] == colours["counter outstanding 1"] != colours["counter outstanding 0"]
    lanes = [matplotlib.colors.to_hex(patch.get_facecolor()) for _, patch in artists(figure, "actor")]
    areas = [part for axes in figure.axes[1:] for part in axes.collections]
    assert len(areas) == 1, "an area under a counter's line only where no other counter lies over it"
    assert set(lanes) == {colours["counter outstanding 0"], colours["counter outstanding 1"]}


@pytest.mark.parametrize("width", [2.5, 6])
def test_the_legend_stays_inside_the_figure_and_above_the_lanes(hung: Trace, width: float) -> None:
    figure = timeline(hung, width=width)
    figure.draw_without_rendering()
    (box,), lanes_top = boxes_of(figure.legends), figure.axes[0].get_window_extent().y1
    assert box.x1 <= figure.bbox.x1
    assert lanes_top <= box.y0 <= lanes_top + 0.45 * figure.dpi


@pytest.mark.parametrize("width", [0, 1, -3, float("nan")])
def test_a_width_without_room_is_refused(healthy: Trace, width: float) -> None:
    with pytest.raises(ValueError, match=r"a figure is at least 2\.5 inches wide"):
        timeline(healthy, width=width)


# --- The window, and what is not there --------------------------------------------------------------------------------
def test_a_window_and_workers_narrow_it_down(healthy: Trace) -> None:
    options: dict[str, Any] = {"since": 0.002, "until": 0.004, "workers": [1]}
    figure = timeline(healthy, width=400, **options)
    bars = scene_of(healthy, **options).bars
    assert drawn_bars(figure)[0] == Counter(bars[["lane", "row", "code"]].tolist())
    assert figure.axes[0].get_xlim() == (2, 4)
    labels = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert ("worker 1" in labels, "worker 0" in labels) == (True, False)


def test_an_empty_trace_is_drawn_as_one(tmp_path: Path) -> None:
    assert timeline(trace_of(tmp_path, []))._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_what_the_trace_lacks_is_said(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [{"code": ev.NEXT[0]}, {"code": 9999}])
    said = [text for text in texts(timeline(trace)) if text.startswith("Missing from the trace")]
    assert len(said) == len(trace.problems)
    assert any("code 9999" in line for line in said)


# --- As a matplotlib figure -------------------------------------------------------------------------------------------
@pytest.mark.heavy
def test_it_saves_and_shows_itself(healthy: Trace, tmp_path: Path) -> None:
    figure = timeline(healthy, title=r"cost: 5 $ \frac $")  # text; as mathematics it would be an error
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    figure.savefig(tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert 'id="bars' in svg
    assert any(text.startswith(r"cost: 5 $ \frac $: ") for text in texts(figure))


PROGRAM = """
import sys, minidl
from minidl.views.picture import timeline
assert 'matplotlib' not in sys.modules, 'imported too early'
timeline(minidl.read_trace(sys.argv[1])).savefig(sys.argv[2])
assert 'matplotlib.pyplot' not in sys.modules, 'pyplot was imported'
"""


@pytest.mark.live
def test_it_needs_no_display_and_leaves_pyplot_alone(healthy: Trace, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(healthy.path), str(tmp_path / "a.png")]
    subprocess.run(program, check=True, cwd=Path(__file__).parents[2])


def test_without_matplotlib_the_remedy_is_named(healthy: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    picture.figure_class.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline(healthy)
