"""The page: the same facts as the lanes and the figure; needs nothing, trusts nothing, opens in a browser."""

from __future__ import annotations

import base64
import hashlib
import html as markup
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
from browser import WRITTEN, Browser, driven, needs_driver
from made_trace import made, made_killed
from oracle_trace import rows_of, trace_of, write_process
from pages import EVIL, Parsed, Read

from minidl.references import source_line
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS
from minidl.tracefile.format import FORMAT_VERSION
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.page import Page, before_and_after, html
from minidl.views.picture import timeline
from minidl.views.replay_page import describe, replay
from minidl.views.scene import FADING, scene_of

RUNS = {
    "healthy": made_trace.HEALTHY,
    "hung": made_trace.HUNG,
    "pinned": {"batches": 12, "pin": True, "simulated": True},
    "epochs": {"batches": 5, "epochs": 3, "workers": 3},
}


# --- The headline ---------------------------------------------------------------------------------------------------
def test_the_page_opens_on_the_headline(tmp_path: Path) -> None:
    """A hang late in a run: its window is a part of the run, and its bar is the innermost open step."""
    run = {"batches": 400, "workers": 3, "step": 30_000_000, "polls": 1, "poll": 6_000_000_000}
    trace = made(tmp_path, cost=lambda task: made_trace.NEVER if task == 300 else 60_000_000, **run)
    page, drawn = Read(html(trace)), scene_of(trace)
    told = page.words["headline"]
    assert (told["sentence"], told["kind"], told["wrong"]) == (drawn.headline.title, "hung", True)
    assert told["next"] == drawn.headline.next_step
    bar = told["bar"]
    assert (EVENTS[int(page["bar.code"][bar])].name, page["bar.by"][bar]) == ("sample", 4 * 300 + 2)
    assert drawn.begin < told["begin"] < page.begin[bar] < told["end"] <= drawn.end
    assert page["bar.known"][bar] == drawn.last - page.begin[bar] < page.end[bar] - page.begin[bar]


def test_polls_that_continue_one_wait_are_one_wait_without_a_timeout(hung: Trace) -> None:
    page = Read(html(hung))
    waits = page["bar.code"] == ev.RESULT_GET[0]
    assert np.count_nonzero(waits & (page["bar.wanted"] == 9) & (page["bar.fate"] > 0)) == 1
    assert page.words["timeouts"] == [], "the user has set none, so no wait tells one"


def test_the_page_says_what_is_to_blame_as_the_figure_does(tmp_path: Path) -> None:
    """The frame and the arrow, what did not end, the trace's end, the legend: all from the scene."""
    trace = made(tmp_path, **made_trace.HUNG | {"poll": 5_000_000_000})
    page, drawn = Read(html(trace)).words, scene_of(trace)
    assert page["framed"]["rows"] == [list(row) for row in drawn.framed.rows]
    assert (page["framed"]["words"], page["framed"]["bar"]) == (drawn.framed.words, drawn.framed.bar)
    assert (page["cause"]["begin"], page["cause"]["end"]) == (drawn.cause.begin, drawn.cause.end)
    assert page["unended"] == drawn.unended()
    said = [text.get_text() for text in timeline(trace).axes[0].texts]
    assert {page["framed"]["words"], page["end_of_trace"]} <= set(said)


@pytest.mark.heavy
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_figure_page_and_replay_have_one_legend(tmp_path: Path, run: dict[str, object]) -> None:
    trace = made(tmp_path, **run)
    page = Read(html(trace)).words["legend"]
    (shown,) = timeline(trace).legends
    assert [sign["label"] for sign in page] == [text.get_text() for text in shown.get_texts()]
    at = replay(trace)
    signs = [(sign["label"], sign["colour"]) for sign in describe(at, 0, len(at))["legend"]]
    assert signs
    assert [sign for sign in signs if "next" not in sign[0]] == [
        (sign["label"], sign["colour"]) for sign in page if (sign["label"], sign["colour"]) in signs
    ], "the replay draws fewer steps: those have the same signs in the same order"


def test_a_fact_that_is_empty_is_not_shown(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", batches=4)
    trace.loaders[1] = {"dataset": "Photos", "dataset_fingerprint": "", "timeout_s": 0, "sampler": None}
    assert dict(Read(html(trace)).words["facts"])["iterator 1"] == "dataset Photos, timeout_s 0"


# --- The same facts ---------------------------------------------------------------------------------------------------
def test_what_is_said_of_a_kind_is_the_tables(healthy: Trace) -> None:
    kinds, drawn, event = Read(html(healthy)).words["kinds"], scene_of(healthy), EVENTS[ev.FETCH[0]]
    fetch, get = kinds[str(event.code)], kinds[str(ev.INDEX_GET[0])]
    assert (fetch["meaning"], fetch["article"], fetch["colour"]) == (event.meaning, event.article, event.colour)
    assert fetch["begin"] == [{"name": "count", "unit": "samples", "values": None}]
    assert get["end"][0]["values"][str(int(ev.Message.TASK))] == "task"
    assert set(kinds) == {str(code) for code in np.union1d(drawn.bars["code"], drawn.marks["code"])}


def test_what_went_wrong_is_said_beside_its_mark(tmp_path: Path) -> None:
    gone = (ev.WORKER_GONE, 0, 7, 0), (ev.WORKER_GONE, 1, 8, -9)
    events = rows_of("code worker x y", *((code, -1, 0, 0) for code in ev.NEXT), *gone)
    page = Read(html(trace_of(tmp_path, events)))
    assert page["mark.alarm"].tolist() == [0, 1]
    assert page.words["alarms"] == {"1": "worker 1 gone: killed by SIGKILL"}


def test_numbers_beyond_a_double_arrive_whole(tmp_path: Path) -> None:
    seed = 0x1234_5678_9ABC_DEF1
    trace = trace_of(tmp_path, [{"code": ev.WORKER_READY, "worker": 0, "z": seed}], role="worker", worker=0)
    assert Read(html(trace))["mark.z"].tolist() == [seed]


def test_windows_and_workers_narrow_it_down(healthy: Trace) -> None:
    options: dict[str, Any] = {"since": 0.002, "until": 0.004, "workers": [1]}
    page, drawn = Read(html(healthy, **options)), scene_of(healthy, **options)
    assert len(page.begin) == len(drawn.bars) > 0
    assert (page.words["begin"], page.words["end"]) == (2_000_000, 4_000_000)


# --- As a file and in a notebook --------------------------------------------------------------------------------------
def test_the_same_trace_gives_the_same_page_compressed_or_not(healthy: Trace, tmp_path: Path) -> None:
    page = html(healthy)
    assert html(healthy, tmp_path / "a.html") == tmp_path / "a.html"
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page == html(healthy)
    plain, small = Read(html(healthy, compress=False)), Read(page)
    assert plain.columns.keys() == small.columns.keys()
    for name, column in small.columns.items():
        np.testing.assert_array_equal(column, plain[name])


def test_a_notebook_shows_it_in_a_frame_that_reaches_nothing(healthy: Trace) -> None:
    page = html(healthy)
    assert isinstance(page, Page)
    ((tag, attributes),) = Parsed(page._repr_html_()).tags
    assert (tag, attributes["sandbox"], attributes["srcdoc"]) == ("iframe", "allow-scripts", page)
    assert len(repr(page)) < 100  # a notebook keeps it beside the frame


# --- It needs nothing, and trusts nothing -----------------------------------------------------------------------------
def test_it_refers_to_nothing_outside(healthy: Trace) -> None:
    page = html(healthy)
    for tag, attributes in Parsed(page).tags:
        assert not {"src", "href", "action", "srcset", "data", "style"} & attributes.keys(), f"<{tag} {attributes}>"
        assert not [name for name in attributes if name.startswith("on")]
    code = Parsed(page).inside["script"] + Parsed(page).inside["style"]
    forbidden = (  # a page of a run that goes on asks its own server for "live": the policy of others forbids it
        r"\beval\b|new Function|fetch\((?!\"live\", )|XMLHttpRequest|WebSocket|import\(|@import|url\(|https?:|innerHTML"
        r"|insertAdjacentHTML|document\.write|localStorage"
    )
    assert re.findall(forbidden, code) == []


def test_its_policy_lets_its_own_script_run_and_nothing_else(healthy: Trace) -> None:
    parsed = Parsed(html(healthy))
    (policy,) = [a["content"] for tag, a in parsed.tags if tag == "meta" and "http-equiv" in a]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "base-uri", "form-action", "script-src", "style-src"}
    assert rules["default-src"] == "'none'"
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parsed.inside[tag].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_what_a_trace_says_stays_text(tmp_path: Path) -> None:
    folder = tmp_path / "a<b>&'\""
    events = [{"code": ev.NEXT[0]}, {"code": ev.TASK_ERROR, "task": 0, "worker": 0, "z": 7}]
    lines = [{"kind": "string", "id": 7, "text": EVIL}, {"kind": "loader", "loader": 1, "dataset": EVIL}]
    write_process(folder, events, pid=7, role=EVIL, lines=lines)
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT_VERSION, "command": [EVIL], "host": EVIL}))
    trace = read_trace(folder)
    page = html(trace, title=EVIL.replace("\ud800", ""))
    plain = Parsed(html(trace, title=""))
    assert [tag for tag, _ in Parsed(page).tags] == [tag for tag, _ in plain.tags]
    words = Read(page).words
    shown = EVIL.replace("\ud800", "\\ud800")  # as the reader gives it: printable
    assert [words["texts"][number] for number in Read(page)["mark.z"]] == [shown]
    assert words["title"] in markup.unescape(page)
    assert dict(words["facts"])["host"] == EVIL
    assert html(trace, tmp_path / "page.html").read_text(encoding="utf-8")


def test_each_event_points_at_a_line_that_defines_what_it_stands_for() -> None:
    references = {(ours, "minidl") for event in EVENTS.values() for ours in event.ours.split(", ")}
    references |= {(event.upstream, "torch") for event in EVENTS.values()}
    for reference, package in references:
        if not reference:
            continue
        name = reference.partition(":")[2]
        match = re.fullmatch(r"(?P<file>[\w/]+\.py):(?P<lines>[\d, ]+) (?P<name>\w+)", source_line(reference, package))
        assert match, f"{reference}: no line was found"
        assert match["name"] == name
        roots = [Path(__file__).parents[2], Path(np.__file__).parent.parent, Path(os.__file__).parent]
        (source,) = [root / match["file"] for root in roots if (root / match["file"]).is_file()]
        code = source.read_text(encoding="utf-8").splitlines()
        for line in match["lines"].split(", "):
            assert re.search(rf"(def|class) {name}\b", code[int(line) - 1])


def test_an_unknown_function_has_no_line() -> None:
    assert source_line("fetch:no_such_function", "minidl") == "fetch:no_such_function"
    assert source_line("no_such_module:x", "torch") == "no_such_module:x"
    assert source_line("", "torch") == ""


# --- In a browser -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with driven(tmp_path_factory.mktemp("browser") / "profile") as one:
        yield one


def opened(browser: Browser, page: Path) -> tuple[str, dict[str, str]]:
    """The document when its first picture is drawn, and what the page's script says of itself at its root."""
    browser.post("/url", url="about:blank")
    browser.post("/url", url=page.as_uri())
    browser.until("return Boolean(document.documentElement.dataset.frame)")
    dom = "return [document.documentElement.outerHTML, {...document.documentElement.dataset}]"
    return tuple(browser.run(dom))


@pytest.mark.live
@needs_driver
@pytest.mark.parametrize("run", [made_trace.HUNG, {"batches": 0}], ids=["hung", "nothing sent"])
def test_a_browser_opens_it(tmp_path: Path, run: dict[str, object], browser: Browser) -> None:
    trace = made(tmp_path / "trace", **run)
    dom, root = opened(browser, html(trace, tmp_path / "page.html"))
    drawn = scene_of(trace)
    assert root["bars"] == str(len(drawn.bars)), "the page's script has failed"
    assert root["marks"] == str(len(drawn.marks))
    assert root["lanes"] == str(len(drawn.lanes))
    fading = int(np.isin(drawn.bars["fate"], FADING).sum())
    step = drawn.headline.next_step
    assert f"<b>next step: </b>{markup.escape(step, quote=False)}</p>" in dom
    idle = bool(fading)  # the other worker waits for a task: that is no step that did not end
    assert (f">{fading - idle} not ended<" in dom) == bool(fading)


CHOOSE = """
const box = document.getElementById("query");
box.value = "fetch task 2";
box.dispatchEvent(new Event("input"));
document.getElementById("on").click();
return document.documentElement.outerHTML;
"""


@pytest.mark.live
@needs_driver
@pytest.mark.parametrize("measured", [True, False])
def test_the_details_of_a_step_tell_what_it_computed(tmp_path: Path, measured: bool, browser: Browser) -> None:
    cpu = {"cpu": lambda took: (took // 5, took // 10)} if measured else {}
    page = html(made(tmp_path / "trace", batches=4, **cpu), tmp_path / "page.html")
    columns = Read(page.read_text(encoding="utf-8"))
    assert columns["bar.cpu"].any() == measured
    assert not columns["bar.ey"][columns["bar.code"] == ev.FETCH[0]].any()  # once is enough
    opened(browser, page)
    dom = browser.run(CHOOSE)
    assert ">fetch 2<" in dom, "the search has chosen nothing"
    assert bool(re.search(r">computing</td><td[^>]*>[^<]+ \(20%\)<", dom)) == measured
    assert bool(re.search(r">ready, without a CPU</td><td[^>]*>[^<]+ \(10%\)<", dom)) == measured


@pytest.mark.live
@needs_driver
def test_a_tab_that_is_given_no_frames_has_its_first_picture(tmp_path: Path, browser: Browser) -> None:
    page = html(made(tmp_path / "trace", **made_trace.HUNG), tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<head>", "<head><script>requestAnimationFrame = () => 0</script>"), encoding="utf-8")
    assert "bars" in opened(browser, page)[1]


@pytest.mark.live
@needs_driver
def test_no_words_in_the_lanes_cover_others(tmp_path: Path, browser: Browser) -> None:
    """On the first screen, of a hang, of several deaths that are found together, and of a slow run."""
    traces = {
        "hung": made(tmp_path / "hung", **made_trace.HUNG),
        "killed": made_killed(tmp_path / "killed", workers=4, dead=3),
        "slow": made(tmp_path / "slow", batches=40, step=10_000, workers=4),
    }
    for name, trace in traces.items():
        page = html(trace, tmp_path / f"{name}.html")
        for size in ((1366, 768), (900, 600)):
            browser.resize(*size)
            browser.post("/url", url=page.as_uri())
            browser.until("return Boolean(document.documentElement.dataset.frame)")
            boxes = browser.post("/execute/async", script=WRITTEN, args=[])
            assert len(boxes) > 8
            for one, other in itertools.combinations(boxes, 2):
                across, down = (
                    min(one[2], other[2]) - max(one[1], other[1]),
                    min(one[4], other[4]) - max(one[3], other[3]),
                )
                assert across <= 1 or down <= 2, (name, size, one, other)


# --- Two traces -------------------------------------------------------------------------------------------------------
def test_two_traces_are_shown_on_one_axis_from_their_first_batches(tmp_path: Path) -> None:
    quick, slow = (
        made(tmp_path / name, cost=lambda task, ms=ms: ms * 1_000_000, batches=12, workers=1, step=1_000_000)
        for name, ms in (("quick", 2), ("slow", 5))
    )
    page = Read(
        before_and_after((quick, slow), ((1,), (1,)), "B is slower", ["why"], tmp_path / "both.html").read_text()
    )
    head = page.words["headline"]
    assert (head["sentence"], head["evidence"], head["bar"]) == ("B is slower", ["why"], -1)
    assert [title[0] for title in page.words["slots"]] == ["A", "B"]
    yields = [int(code) for code, kind in page.words["kinds"].items() if kind["name"] == "yield"]
    times = np.cumsum(page["mark.time"].astype(np.int64))[np.isin(page["mark.code"], yields)]
    firsts = [int(times[page["mark.loader"][np.isin(page["mark.code"], yields)] == number][0]) for number in (1, 2)]
    assert head["begin"] < firsts[0] == firsts[1] < head["end"]
