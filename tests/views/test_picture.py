"""The figure holds what the lanes hold: bars, open ends, arrows, counters, legend; and touches nothing else."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import made_trace
import numpy as np
import pytest
from made_trace import Run, made, made_killed
from oracle_trace import write_process
from pictures import Bars, artists, drawn_bars
from sizes import slow

from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import picture
from minidl.views.colours import paint
from minidl.views.picture import timeline
from minidl.views.scene import Fate, legend_of, per_pixel, scene_of

matplotlib = pytest.importorskip("matplotlib")


def wide(trace: Trace, **options: object) -> Bars:
    """What the lanes hold: the bars that are a pixel wide, by (lane, row, code)."""
    bars = scene_of(trace, **options).bars  # type: ignore[arg-type]
    return Counter((int(b["lane"]), int(b["row"]), int(b["code"])) for b in bars)


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


def test_the_headline_is_the_title_and_its_bar_is_outlined_and_named(tmp_path: Path) -> None:
    """In red only if it went wrong."""
    said = {}
    for name, run in (("hung", LONG_HANG), ("slow", {"batches": 200, "step": 10_000})):
        figure = timeline(made(tmp_path / name, Run(**run)))
        drawn = scene_of(read_trace(tmp_path / name))
        frames = artists(figure, "framed")
        ((_, arrow),) = artists(figure, "cause")
        for shape in (arrow, *(outline for _, outline in frames)):
            red = matplotlib.colors.to_hex(shape.get_edgecolor()) == picture.RED  # type: ignore[attr-defined]
            assert red == (name == "hung")
        assert {tuple(key) for key, _ in frames} == set(drawn.framed.rows)  # type: ignore[union-attr]
        assert drawn.headline.title in " ".join(texts(figure))
        said[name] = texts(figure)
    assert "sample 38: did not end" in said["hung"], "for how long is said once, in the title"
    assert "end of the trace, 30.01 s" in said["hung"], "the line before what is not in the trace"
    assert not any("end of the trace" in text for text in said["slow"])
    assert "s since the first event" in said["hung"], "the title's unit"


def test_a_death_is_marked_on_the_lane_that_died_and_weakly_where_it_was_found(killed: Trace) -> None:
    figure = timeline(killed)
    colours = {t.get_text(): t.get_color() for t in figure.findobj(matplotlib.text.Text)}
    assert colours["killed by SIGKILL; last sign of life"] == picture.RED
    assert colours["found dead worker 1"] == picture.FAINT


@pytest.fixture
def killed(tmp_path: Path) -> Trace:
    return made_killed(tmp_path / "killed")


@pytest.mark.parametrize("width", [6, *slow(13)])
@pytest.mark.parametrize("run", [LONG_HANG, {"batches": 40, "step": 10_000, "workers": 4}, None])
def test_no_label_covers_another(tmp_path: Path, run: dict[str, object] | None, width: float) -> None:
    trace = made_killed(tmp_path / "t", workers=4, dead=3) if run is None else made(tmp_path / "t", **run)
    figure = timeline(trace, width=width)
    figure.draw_without_rendering()
    shown = [*figure.axes[0].texts, *figure.texts, *figure.legends]
    boxes = [(part, part.get_window_extent()) for part in shown]
    assert len(boxes) > 8
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 2, (one, other)


# --- Bars -------------------------------------------------------------------------------------------------------------
def test_bars_are_where_their_spans_are(healthy: Trace) -> None:
    figure = timeline(healthy, width=400)
    drawn = scene_of(healthy)
    for (lane, row, code), shape in artists(figure, "bars"):
        bars = drawn.bars
        mine = bars[(bars["lane"] == lane) & (bars["row"] == row) & (bars["code"] == code)]
        corners = np.array([path.vertices[:4] for path in shape.get_paths()])  # type: ignore[attr-defined]
        np.testing.assert_allclose(corners[:, 0, 0] * 1e6, mine["begin"])  # the axis is in ms
        np.testing.assert_allclose(corners[:, 2, 0] * 1e6, mine["end"])
        place = drawn.lanes[lane]
        assert place.row_top(row) <= corners[:, :, 1].min() < corners[:, :, 1].max() <= place.bottom + 1e-9


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
    pixels = round((13 - picture.LEFT - picture.RIGHT) * picture.DPI)
    size = 1000
    at = [(0, 500), (5 * size, 5 * size + 250), (pixels * size - 1, pixels * size)]  # the last one sets the scale
    events = [{"time": 10 + t, "code": code, "task": n, "worker": 0}
              for n, span in enumerate(at) for t, code in zip(span, ev.FETCH, strict=True)]  # fmt: skip
    write_process(tmp_path, events, role="worker", worker=0)
    ((_, shape),) = artists(timeline(read_trace(tmp_path), width=13), "narrow")
    opacity = shape.get_facecolors()[:, 3]  # type: ignore[attr-defined]
    np.testing.assert_allclose(opacity, [0.5, 0.25, picture.FAINTEST])


def test_what_did_not_end_fades_and_says_so(hung: Trace) -> None:
    figure = timeline(hung, width=400)
    drawn = scene_of(hung)
    assert max(figure.axes[0].get_xticks()) * 1e6 <= drawn.last < drawn.end, "ms: no number is beyond the trace's end"
    _, fading = drawn_bars(figure)
    bars = scene_of(hung).bars
    assert fading.total() == (bars["fate"] == Fate.OPEN).sum() == 6
    for _, shape in artists(figure, "open"):
        opacity = shape.get_facecolors()[:, 3]  # type: ignore[attr-defined]
        assert (np.diff(opacity) < 0).all()
        assert opacity[-1] < 0.2
    said = {text.strip() for text in texts(figure)}
    assert {"fetch 9: did not end", "wait for task 9: did not end"} <= said
    assert any(text.startswith("sample 38: did not end") for text in said)  # with its length: the headline is about it
    assert "no end recorded" in said


def test_a_simulated_pin_is_dotted_and_the_legend_says_so(tmp_path: Path) -> None:
    figure = timeline(made(tmp_path / "a", batches=12, pin=True, simulated=True), width=400)
    assert hatched(figure, picture.DOTS) == {ev.PIN[0]}
    assert "simulated" in texts(figure)
    real = timeline(made(tmp_path / "b", batches=12, pin=True), width=400)
    assert "simulated" not in texts(real)
    assert not hatched(real, picture.DOTS)


def hatched(figure: object, hatch: str) -> set[int]:
    """The codes of the bars with this hatch."""
    return {key[2] for key, shape in artists(figure, "bars") if shape.get_hatch() == hatch}  # type: ignore[attr-defined]


def test_waits_and_nothing_else_are_hatched(tmp_path: Path) -> None:
    figure = timeline(made(tmp_path / "a", batches=12, pin=True), width=400)
    there = {key[2] for key, _ in artists(figure, "bars")}
    assert hatched(figure, picture.WAIT) == {code for code in there if paint(code).waits} != set()


def test_without_its_headline_a_picture_tells_no_verdict(tmp_path: Path) -> None:
    trace = made(tmp_path / "trace", **made_trace.HUNG)
    told, silent = timeline(trace), timeline(trace, headline=False)
    for part in ("framed", "cause"):
        assert (len(artists(told, part)), len(artists(silent, part))) == (1, 0)
    assert [text.get_text() for text in silent.texts] == [text.get_text() for text in told.texts[-1:]]
    assert {text.get_weight() for text in told.texts} == {"bold", "normal"}
    assert silent.get_figheight() < told.get_figheight()


def test_the_legend_names_what_occurs_in_the_tables_colours(healthy: Trace) -> None:
    figure = timeline(healthy)
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    looks = [paint(code) for code in sorted(set(scene_of(healthy).bars["code"].tolist()))]
    work = list(dict.fromkeys(look.label for look in looks if not look.soft))
    drawn = scene_of(healthy)
    assert labels == [sign.label for sign in legend_of(drawn)]
    assert labels[: len(work)] == work
    assert {"epoch, next", "waiting", "numbers: t task, s sample, w worker, e epoch"} < set(labels)
    assert "pin" not in labels
    assert "fetch" in labels
    colour = matplotlib.colors.to_hex(legend.get_patches()[labels.index("fetch")].get_facecolor())
    assert colour == ev.EVENTS[ev.FETCH[0]].colour


# --- Arrows, alarms, counters -----------------------------------------------------------------------------------------
def test_arrows_of_the_chosen_batches(healthy: Trace) -> None:
    figure = timeline(healthy, batches=[3, 5])
    drawn = scene_of(healthy)
    assert Counter(key[0] for key, _ in artists(figure, "arrow")) == {3: 6, 5: 6}
    ends = [patch._posA_posB for (batch,), patch in artists(figure, "arrow") if batch == 3]  # type: ignore[attr-defined]
    arrows = drawn.arrows(drawn.pick([3]))
    np.testing.assert_allclose([tail[0] * 1e6 for tail, _ in ends], arrows["left"])
    np.testing.assert_allclose([head[0] * 1e6 for _, head in ends], arrows["reached"])
    assert "batch 3" in texts(figure)
    assert not artists(timeline(healthy), "arrow")


def test_the_numbers_of_batches_that_begin_together_do_not_cover_each_other(healthy: Trace) -> None:
    figure = timeline(healthy, batches=[0, 1, 2, 3])
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text().startswith("batch ")]
    assert len(boxes) == 4
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_what_went_wrong_is_written_beside_its_mark(tmp_path: Path) -> None:
    events = [
        {"code": ev.NEXT[0]},
        {"code": ev.FOUND_DEAD, "worker": 1, "x": ev.Actor.WORKER, "y": 7, "z": -9},
        {"code": ev.TASK_ERROR, "task": 2, "worker": 1, "z": 1},
    ]
    write_process(tmp_path, events, role="loader", lines=[{"kind": "string", "id": 1, "text": r"KeyError: '$\frac$'"}])
    figure = timeline(read_trace(tmp_path))
    assert figure._repr_png_()  # type: ignore[attr-defined]
    said = texts(figure)
    assert "found dead worker 1" in said
    assert r"task error worker 1: KeyError: '$\frac$'" in said


def test_a_loaders_state_is_marked_where_it_is_sent_and_where_it_counts(tmp_path: Path) -> None:
    events = [
        {"time": 0, "code": ev.NEXT[0]},
        {"time": 5, "code": ev.WORKERS_CHOSEN, "x": 2},
        {"time": 10, "code": ev.RESUMED, "x": 1, "y": 1, "z": 0},
        {"time": 30, "code": ev.STATE_KEPT, "task": 0, "worker": 0, "x": 1},
        {"time": 40, "code": ev.STATE_TAKEN, "x": 2, "y": 0, "z": 0},
        {"time": 90, "code": ev.NEXT[1]},
    ]
    write_process(tmp_path, events, role="loader")
    sent = [{"time": 20, "code": ev.STATE_PUT, "task": 0, "worker": 0, "x": 64, "y": 1}]
    write_process(tmp_path, sent, pid=1001, role="worker", worker=0)
    trace = read_trace(tmp_path)
    figure, drawn = timeline(trace), scene_of(trace)
    for code in picture.STATES:
        ((_, shape),) = [found for found in artists(figure, "state") if found[0] == [code]]
        (mark,) = drawn.marks[drawn.marks["code"] == code]
        place = drawn.lanes[mark["lane"]]
        assert shape.get_xdata().tolist() == [mark["time"]]  # type: ignore[attr-defined]  # the axis is in ns
        assert place.top <= shape.get_ydata()[0] <= place.bottom  # type: ignore[attr-defined]
    assert {"resumed after 1 batch", "state taken: 2 batches"} <= set(texts(figure))
    assert {"resumed", "state_put", "state_kept", "state_taken"} <= set(texts(figure))


def test_captions_of_states_do_not_cover_each_other(tmp_path: Path) -> None:
    """The last one is written, and of those before it the ones that there is room for; every line is drawn."""
    times = [100, 3000, *range(9000, 9400, 50)]
    taken = [{"time": time, "code": ev.STATE_TAKEN, "x": n, "y": 0, "z": 0} for n, time in enumerate(times)]
    write_process(
        tmp_path, [{"time": 0, "code": ev.NEXT[0]}, *taken, {"time": 9500, "code": ev.NEXT[1]}], role="loader"
    )
    figure = timeline(read_trace(tmp_path))
    figure.draw_without_rendering()
    shown = [t for t in figure.axes[0].texts if t.get_text().startswith("state taken")]
    assert [t.get_text() for t in shown[:1]] == ["state taken: 9 batches"]
    assert 3 <= len(shown) < len(times)
    boxes = [t.get_window_extent() for t in shown]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert sum(line.get_linestyle() == "--" for line in figure.axes[0].get_lines()) == len(times)


def test_a_picture_without_states_says_nothing_of_them(healthy: Trace) -> None:
    assert not any("state" in text for text in texts(timeline(healthy)))


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
    events = []
    for loader in (1, 2):
        for time, code, x, y in ((10, ev.EPOCH[0], 0, 2), (20, ev.TASK_ASSIGNED, 1, 1), (90, ev.EPOCH[1], 0, 0)):
            events.append({"time": time, "code": code, "loader": loader, "x": x, "y": y})
    events.append({"time": 30, "code": ev.REORDER_STORE, "loader": 2, "task": 0, "y": 1})
    write_process(tmp_path, sorted(events, key=lambda event: event["time"]), role="loader")
    figure = timeline(read_trace(tmp_path))
    colours = {line.get_gid(): line.get_color() for axes in figure.axes for line in axes.get_lines() if line.get_gid()}
    assert colours["counter reorder buffer 1"] == colours["counter outstanding 1"] != colours["counter outstanding 0"]
    lanes = [matplotlib.colors.to_hex(patch.get_facecolor()) for _, patch in artists(figure, "actor")]
    areas = [part for axes in figure.axes[1:] for part in axes.collections]
    assert len(areas) == 1, "an area under a counter's line only where no other counter lies over it"
    assert set(lanes) == {colours["counter outstanding 0"], colours["counter outstanding 1"]}


@pytest.mark.parametrize("width", [2.5, 6])
def test_the_legend_stays_inside_the_figure_and_above_the_lanes(tmp_path: Path, width: float) -> None:
    figure = timeline(made(tmp_path / "trace", **made_trace.HUNG), width=width)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, lanes_top = legend.get_window_extent(), figure.axes[0].get_window_extent().y1
    assert box.x1 <= figure.bbox.x1
    assert lanes_top <= box.y0 <= lanes_top + 0.45 * figure.dpi


@pytest.mark.parametrize("width", [0, 1, -3, float("nan")])
def test_a_width_without_room_is_refused(healthy: Trace, width: float) -> None:
    with pytest.raises(ValueError, match=r"a figure is at least 2\.5 inches wide"):
        timeline(healthy, width=width)


# --- The window, and what is not there --------------------------------------------------------------------------------
def test_a_window_and_workers_narrow_it_down(healthy: Trace) -> None:
    options = {"since": 0.002, "until": 0.004, "workers": [1]}
    figure = timeline(healthy, width=400, **options)  # type: ignore[arg-type]
    assert drawn_bars(figure)[0] == wide(healthy, **options)
    assert figure.axes[0].get_xlim() == (2, 4)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "worker 1" in labels
    assert "worker 0" not in labels


def test_an_empty_trace_is_drawn_as_one(tmp_path: Path) -> None:
    write_process(tmp_path, [], role="loader")
    assert timeline(read_trace(tmp_path))._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_what_the_trace_lacks_is_said(tmp_path: Path) -> None:
    write_process(tmp_path, [{"code": ev.NEXT[0]}, {"code": 9999}], role="loader")
    trace = read_trace(tmp_path)
    said = [text for text in texts(timeline(trace)) if text.startswith("Missing from the trace")]
    assert len(said) == len(trace.problems)
    assert any("code 9999" in line for line in said)


# --- As a matplotlib figure -------------------------------------------------------------------------------------------
def test_it_saves_and_shows_itself(healthy: Trace, tmp_path: Path) -> None:
    figure = timeline(healthy, title=r"cost: 5 $ \frac $")  # text; as mathematics it would be an error
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    figure.savefig(tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert 'id="bars' in svg
    assert any(text.startswith(r"cost: 5 $ \frac $: ") for text in texts(figure))


@pytest.mark.live
def test_it_needs_no_display_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    made_trace.write(tmp_path / "trace", Run(**made_trace.HEALTHY))
    program = (
        "import sys, minidl\nfrom minidl.views.picture import timeline\n"
        "assert 'matplotlib' not in sys.modules, 'imported too early'\n"
        f"timeline(minidl.read_trace({str(tmp_path / 'trace')!r})).savefig({str(tmp_path / 'a.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_without_matplotlib_the_remedy_is_named(healthy: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    picture.figure_class.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline(healthy)
