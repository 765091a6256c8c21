"""The page as an instrument, in a browser: a range's statistics, the slowest steps, stalls, links, search, lanes."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, driven, needs_driver
from made_trace import HUNG, Run, made
from pages import Read

from minidl.tracefile.reader import Trace
from minidl.tracefile.words import duration
from minidl.views.colours import paint, rgb
from minidl.views.page import html
from minidl.views.scene import scene_of

pytestmark = [pytest.mark.live, needs_driver]

MS = 1_000_000
STALLS = (5, 17, 24)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with driven(tmp_path_factory.mktemp("browser") / "profile") as one:
        one.resize(1366, 768)
        yield one


@pytest.fixture(scope="module")
def stalling(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Three batches take 300 ms and more, the others 2 ms."""
    run = {"batches": 40, "workers": 2, "step": 2 * MS, "epochs": 2}
    cost = lambda task: 2 * MS if task not in STALLS else (300 + task) * MS  # noqa: E731
    return made(tmp_path_factory.mktemp("trace"), cost=cost, **run)


def show(browser: Browser, page: Path, place: str = "") -> None:
    browser.post("/url", url="about:blank")
    browser.post("/url", url=page.as_uri() + place)
    browser.until("return Boolean(document.documentElement.dataset.frame)")


@pytest.fixture
def page(browser: Browser, stalling: Trace, tmp_path: Path) -> Path:
    path = html(stalling, tmp_path / "page.html")
    show(browser, path)
    return path


def panel(browser: Browser) -> str:
    browser.settle(12)  # it counts once the range is as it stays
    return str(browser.run("return document.getElementById('about').innerText"))


def test_a_range_says_where_its_time_went(browser: Browser, stalling: Trace, page: Path) -> None:
    """Of the whole trace: as many steps as the trace has, and the loop's time adds up."""
    browser.press("0", "r")
    text = panel(browser)
    spans = stalling.spans()
    for code, name in ((24, "sample"), (22, "fetch"), (56, "next")):
        took = np.sort((spans["end"] - spans["begin"])[spans["code"] == code])
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{name}\t"))
        count, _, p50, _, most = line.split("\t")[1:]
        assert count == str(len(took))
        assert (p50, most) == (duration(took[len(took) // 2]), duration(took[-1]))
    assert "80 batches" in text
    shares = re.findall(r"(\d+)%", text[text.index("THE LOOP") : text.index("STEPS")])
    assert 98 <= sum(map(int, shares)) <= 102
    browser.press("Escape")
    assert "HOW TO READ THIS PAGE" in panel(browser)


def test_a_range_is_dragged_on_the_axis_and_moved_by_keys(browser: Browser, page: Path) -> None:
    top = browser.run("return document.getElementById('canvas').getBoundingClientRect().top")
    browser.drag(300, int(top) + 12, 500)
    assert (first := panel(browser)).startswith("Range of ")
    browser.press("Shift Right", "Shift Right")
    assert (longer := panel(browser)).startswith("Range of ")
    assert first.splitlines()[0] != longer.splitlines()[0]
    browser.press("Escape")
    assert not panel(browser).startswith("Range of ")


def status(browser: Browser) -> str:
    return str(browser.run("return document.getElementById('status').innerText"))


def test_n_goes_from_stall_to_stall(browser: Browser, page: Path) -> None:
    """Two epochs of three stalls: each is named with its wait, its task, worker and slowest sample."""
    said = []
    for _ in range(7):
        browser.press("n")
        said.append(status(browser))
    assert [line.split(":")[0] for line in said] == [f"stall {n} of 6" for n in (1, 2, 3, 4, 5, 6, 1)]
    assert [int(re.findall(r"for task (\d+)", line)[0]) for line in said] == [*STALLS, *STALLS, STALLS[0]]
    first = r"stall 1 of 6: next\(\) waited \d+ ms for task 5 \(worker 1, slowest sample 2\d: .*ms\)"
    assert re.fullmatch(first, said[0])
    browser.press("Shift n")
    assert status(browser).startswith("stall 6 of 6")


def test_the_slowest_samples_are_a_list_and_a_key(browser: Browser, stalling: Trace, page: Path) -> None:
    browser.press("Escape", "0")
    text = panel(browser)
    assert "24 of 320 took more than 5 times the median: " in text
    browser.press("o", "o")
    assert status(browser).startswith("slowest sample 2 of 320: sample ")
    browser.press("Escape")
    times = browser.run("return [...document.querySelectorAll('.slowest b')].map(e => e.innerText)")
    spans = stalling.spans()
    took = np.sort((spans["end"] - spans["begin"])[spans["code"] == 24])[::-1]
    assert times == [duration(ns) for ns in took[:12]]
    browser.run("document.querySelector('.slowest button').focus()")
    browser.press("Enter")
    assert status(browser).startswith("slowest sample 1 of 320: sample ")
    browser.run("document.getElementById('close').click()")
    choose = "box.value = 'next'; box.dispatchEvent(new Event('change'))"
    browser.run(f"const box = document.querySelector('#about select'); {choose}")
    calls = int((spans["code"] == 56).sum())
    assert f"of {calls} took more than 5 times the median: " in panel(browser)


def test_the_panel_lists_the_stalls_and_the_workers(browser: Browser, page: Path) -> None:
    browser.press("Escape")
    text = panel(browser)
    assert "6 long calls of next()" in text
    workers = text[text.index("WORKERS, THE BUSIEST FIRST") :]
    batches = re.findall(r"^(worker \d)\s+\d+%\s+(\d+)\s", workers, re.M)
    assert sorted(batches) == [("worker 0", "40"), ("worker 1", "40")]
    browser.run("document.querySelectorAll('.stalls button')[1].click()")
    assert status(browser).startswith("stall 2 of 6: next() waited 3")
    assert f"for task {STALLS[1]} " in status(browser)


def test_a_narrow_page_shows_its_summary_on_demand(browser: Browser, page: Path) -> None:
    shown = "return getComputedStyle(document.getElementById('panel')).display !== 'none'"
    browser.press("Escape")
    browser.resize(400, 800)
    try:
        assert not browser.run(shown)
        browser.run("document.getElementById('summary').click()")
        assert browser.run(shown)
        assert "THE SLOWEST STEPS" in panel(browser)
        browser.run("document.getElementById('close').click()")
        browser.press("r")
        assert browser.run(shown)
        browser.run("document.getElementById('close').click()")
        assert not browser.run(shown)
    finally:
        browser.resize(1366, 768)


FOUND = """
const box = document.getElementById("query"), read = id => document.getElementById(id).innerText;
box.value = arguments[0]; box.dispatchEvent(new Event("input"));
const many = read("found");
document.getElementById("on").click();
return [many, (document.querySelector("#about h2") || {innerText: ""}).innerText, read("found")];
"""


@pytest.mark.parametrize(("text", "many", "first"), [
    ("s21", 2, "sample 21"), ("21 sample", 2, "sample 21"), ("sample 21", 2, "sample 21"),
    ("t17 fetch", 2, "fetch 17"), ("fetch task 17 e1", 1, "fetch 17"), ("sample >50ms", 24, "sample "),
    ("epoch 1", 1, "epoch 1"), ("sample epoch 1 worker 1 >50 ms", 8, "sample "), ("sample <1us", 0, ""),
])  # fmt: skip
def test_it_finds_what_is_written_in_a_bar(browser: Browser, page: Path, text: str, many: int, first: str) -> None:
    found, name, at = browser.post("/execute/sync", script=FOUND, args=[text])
    assert found == (f"{many} found" if many else "none found")
    assert name.startswith(first)
    assert at == (f"1 of {many}" if many else "none found")


def test_what_is_found_lies_within_the_window(browser: Browser, page: Path) -> None:
    """A found bar of 0.3 s, after one of microseconds: both its ends are shown."""
    browser.post("/execute/sync", script=FOUND, args=["t17 fetch"])
    browser.press("[", "Enter")
    _, name, _ = browser.post("/execute/sync", script=FOUND, args=["t5 fetch"])
    assert name == "fetch 5"
    browser.settle(20)
    place = address(browser)
    begins = float(place["selected"][0].split(".")[3]) / 1e9
    assert float(place["begin"][0]) < begins < begins + 0.3 < float(place["end"][0])


def address(browser: Browser) -> dict[str, list[str]]:
    browser.until("return location.hash.length > 1")
    time.sleep(0.3)
    return urllib.parse.parse_qs(str(browser.run("return location.hash"))[1:])


def test_a_link_opens_the_same_view(browser: Browser, page: Path) -> None:
    browser.press("n", "r", "Shift Right", "+")
    was, told = address(browser), panel(browser)
    assert was.keys() == {"begin", "end", "range", "selected"}
    show(browser, page, str(browser.run("return location.hash")))
    assert panel(browser) == told
    assert address(browser) == was
    browser.press("Escape", "Escape", "f")
    browser.until("return location.hash === ''")


def test_a_link_keeps_the_filter_and_the_collapsed_lanes(browser: Browser, page: Path) -> None:
    typed = "const box = document.getElementById('lanes'); box.value = {!r}; box.dispatchEvent(new Event('input'))"
    browser.press("Shift C")
    browser.run(typed.format("worker, loader"))
    was, seen = address(browser), browser.run(SEEN)
    assert (was["lanes"], was["collapsed"]) == (["worker, loader"], ["0-0,0-1"])
    show(browser, page, str(browser.run("return location.hash")))
    assert browser.run("return document.getElementById('lanes').value") == "worker, loader"
    assert (address(browser), browser.run(SEEN)) == (was, seen)
    browser.run(typed.format(""))
    browser.press("Shift C")
    browser.until("return !/lanes|collapsed/.test(location.hash)")


SEEN = "return document.querySelector('canvas').toDataURL()"
SHOWN = """
const done = arguments[0], names = [], pen = CanvasRenderingContext2D.prototype, write = pen.fillText;
pen.fillText = function (text, x, y) {
  if (this.canvas.id === "canvas" && this.textAlign === "right" && y > 30) names.push([text, y]);
  return write.call(this, text, x, y);
};
window.dispatchEvent(new Event("resize"));
document.getElementById("canvas").dispatchEvent(new KeyboardEvent("keydown", {key: "0", bubbles: true}));
requestAnimationFrame(() => requestAnimationFrame(() => { pen.fillText = write; done(names); }));
"""
"""Names of the lanes, as the page writes them beside the canvas, with their y."""


def lanes(browser: Browser) -> dict[str, float]:
    return dict(browser.post("/execute/async", script=SHOWN, args=[]))


def test_a_click_on_a_name_collapses_its_process(browser: Browser, page: Path) -> None:
    browser.press("0")
    whole, top = lanes(browser), browser.run("return document.getElementById('canvas').getBoundingClientRect().top")
    assert {"worker 0", "feeder 0", "worker 1", "feeder 1", "loader"} <= whole.keys()
    browser.drag(60, round(top + whole["worker 0"]), 60)
    closed = lanes(browser)
    assert whole.keys() - closed.keys() == {"feeder 0"}
    browser.press("r")
    assert "pickle" in panel(browser), "a collapsed process counts all the same"
    browser.press("Escape", "o", "Escape", "Shift c")
    assert {"feeder 0", "feeder 1"} <= whole.keys() - lanes(browser).keys()
    browser.press("Shift c")
    assert lanes(browser).keys() == whole.keys()


def test_a_filter_leaves_some_lanes(browser: Browser, page: Path) -> None:
    def narrowed(text: str) -> set[str]:
        choose = f"box.value = '{text}'; box.dispatchEvent(new Event('input'))"
        browser.run(f"const box = document.getElementById('lanes'); {choose}")
        names = lanes(browser).keys()
        return {name for name in names if "max" not in name} - {"outstanding", "reorder buffer", "in flight"}

    assert narrowed("worker 1, consumer") == {"worker 1", "feeder 1", "consumer"}
    assert narrowed("w0-1 feeder") == {"feeder 0", "feeder 1"}
    browser.press("n")
    assert status(browser).startswith("stall 1 of 6"), "what is gone to is shown"
    assert "loader" in narrowed("")


def test_a_page_of_many_workers_opens_with_them_collapsed(browser: Browser, tmp_path: Path) -> None:
    ranks = [Run(batches=20, workers=32, loader=n + 1, first_pid=1000 * (n + 1)) for n in range(4)]
    show(browser, html(made(tmp_path / "trace", *ranks), tmp_path / "page.html"))
    names = lanes(browser).keys()
    assert sum(name.startswith("worker") for name in names) == 32
    assert sum(name.startswith("feeder") for name in names) <= 1, "of the worker that the title is about"


COLOURED = """
const canvas = document.getElementById("overview"), left = arguments[0], rows = canvas.height;
const n = canvas.width - left, data = canvas.getContext("2d").getImageData(left, 0, n, rows).data, out = [];
const grey = at => Math.max(...data.slice(at, at + 3)) - Math.min(...data.slice(at, at + 3)) < 30;
for (const y of [5, rows - 6]) {
  let wide = 0;
  for (let x = 0, run = 0; x <= n; x++) {
    if (x < n && !grey(4 * (y * n + x))) run++;
    else { wide += run > 40; run = 0; }
  }
  out.push(wide);
}
return out;
"""


def test_the_overview_shows_when_the_loop_waited_and_who_was_busy(browser: Browser, page: Path) -> None:
    """The long waits of two epochs, on top; the long fetches of the last worker, in the last row."""
    browser.press("0")
    browser.settle(10)
    gutter = 1 + round(browser.run("return document.getElementById('overview').clientWidth") * 0.13)
    waits, busy = browser.post("/execute/sync", script=COLOURED, args=[gutter])
    assert waits == 2 * len(STALLS)
    assert busy


MEAN = """
const canvas = document.getElementById("canvas"), y = arguments[0], sums = [0, 0, 0];
const left = Math.floor(canvas.width * 0.5), n = Math.floor(canvas.width * 0.4);
const data = canvas.getContext("2d").getImageData(left, y, n, 1).data;
for (let i = 0; i < data.length; i++) if (i % 4 < 3) sums[i % 4] += data[i] / n;
return sums;
"""


def test_bars_that_are_drawn_by_group_have_the_colour_of_their_shares(browser: Browser, tmp_path: Path) -> None:
    """A row of 7,200 samples and collations in 200 pixels is as dense as the time that they take."""
    trace = made(tmp_path / "trace", batches=1440, workers=1)
    browser.resize(400, 700)
    try:
        show(browser, html(trace, tmp_path / "page.html"))
        y = lanes(browser)["worker 0"] + 8  # within the lane's second row
        mean = browser.post("/execute/sync", script=MEAN, args=[round(y)])
    finally:
        browser.resize(1366, 768)
    spans, colour, share = trace.spans(), np.zeros(3), 0.0
    for code in (24, 26):
        mine = spans[spans["code"] == code]
        part = float((mine["end"] - mine["begin"]).sum()) / (trace.last - trace.start)
        colour += part * np.array(rgb(paint(code).colour))
        share += part
    band = np.array(rgb("#f4f6f8"))
    np.testing.assert_allclose(mean, colour + (1 - share) * band, atol=8)


SAVED = """
const done = arguments[0];
URL.createObjectURL = file => { file.text().then(done); return "blob:none"; };
document.getElementById("canvas").dispatchEvent(new KeyboardEvent("keydown", {key: "S", bubbles: true}));
"""


def test_a_part_is_saved_as_a_page_of_its_own(browser: Browser, stalling: Trace, page: Path, tmp_path: Path) -> None:
    """It has the bars and marks that the same window of the trace has, and opens."""
    browser.press("n", "n", "r")
    found = re.search(r"minidl timeline \S+ --since (\S+) --until (\S+) -o part.html", panel(browser))
    assert found
    window = {"since": float(found[1]), "until": float(found[2])}
    saved = tmp_path / "part.html"
    saved.write_text(browser.post("/execute/async", script=SAVED, args=[]), encoding="utf-8")
    part, drawn = Read(saved.read_text(encoding="utf-8")), scene_of(stalling, **window)
    whole = Read(page.read_text(encoding="utf-8"))
    assert 10 < len(part.begin) < len(whole.begin) / 2
    np.testing.assert_array_equal(part.begin, drawn.bars["begin"])
    np.testing.assert_array_equal(part["bar.code"], drawn.bars["code"])
    np.testing.assert_array_equal(np.cumsum(part["mark.time"]), drawn.marks["time"])
    assert part.words["runs"] == Read(html(stalling, **window)).words["runs"]
    puts = part["batch.put"][part["bar.batch"][part["bar.batch"] >= 0]]
    np.testing.assert_array_equal(puts, drawn.batches["put"][drawn.bars["batch"][drawn.bars["batch"] >= 0]])
    show(browser, saved)
    browser.press("n")
    assert status(browser).startswith("stall 1 of 1: next() waited 3")


def test_a_wait_that_did_not_end_is_a_stall(browser: Browser, tmp_path: Path) -> None:
    show(browser, html(made(tmp_path / "trace", **HUNG), tmp_path / "page.html"))
    browser.press("n")
    said = "stall 1 of 1: next() has waited 7.70 ms for task 9 (worker 1, slowest sample 38: did not end)"
    assert status(browser) == said
