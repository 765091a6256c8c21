"""The text timeline: whole pictures, then what makes them: cells, windows, filters, shares, colours."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trace import Run, made
from oracle_trace import rows_of, trace_of

from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Phase
from minidl.tracefile.reader import Trace
from minidl.views.colours import WAITING, nearest_256, paint
from minidl.views.scene import scene_of
from minidl.views.text import LETTERS, _cover, render

HUNG = """\
cut: the recording ends after 9 batches, before the run's end (killed, or still
running); loader (pid 1000) was waiting for task 9 of worker 1 since 6.2 ms
  next step: run it longer, or run minidl doctor PID while it waits: this wait
  may have been a hang or work

              |0 ms                   |5                      |10
epochs         >>>>> epoch did not end >>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>>
consumer             TTTt  TTTt TTTTtTTTt tTt
loader        ++-0---rr -2-rn -4rrr-- r -8- -9-->9>> wait did not end >>>>>>>>>>
queue feeders   w    w w   ww   w w  ww
worker 0       .S0SCC2SSSCC4SSsC6SSCS8SSSCS10SCc>>>>> idle >>>>>>>>>>>>>>>>>>>>>
feeder 0            p     p    pp   p     p    p
worker 1        s1SSCC3SSCS5SSSCS7SSCS9>>> sample did not end >>>>>>>>>>>>>>>>>>
feeder 1             pw   p     p    p

consumer      busy 21% (consumer 21%)
loader        busy 7% (rebuild 3%, start 3%, next <1%, sampling <1%),
              still waiting 46%, wait 26%, did not end <1%
queue feeders busy <1% (write <1%)
worker 0      busy 49% (sample 36%, collate 12%, fetch <1%), still waiting 47%,
              idle 1%
feeder 0      busy 2% (pickle 2%, write <1%)
worker 1      busy 34% (sample 26%, collate 8%, fetch <1%), did not end 62%,
              idle <1%
feeder 1      busy 2% (pickle 1%, write <1%)

did not end: worker 1: sample (task 9, position 2, index 38), since 0.005006000 s
did not end: worker 1: fetch (task 9, count 4 samples), since 0.004804000 s
did not end: loader: wait (task 9, worker 1), since 0.006983000 s
did not end: loader: next (rcvd_idx 9), since 0.006215000 s
did not end: epochs: epoch (epoch 0, workers 2, prefetch_factor 2), since 0.000404000 s

I sampling  W write  . idle  F fetch  S sample  C collate  P pickle  - wait
R rebuild  N next  T consumer  + start  > did not end, still waiting
a small letter: less than half of its cell; a number: the task (of a wait: the
one needed); blank: nothing recorded; percent: of the time shown
"""


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return made(tmp_path_factory.mktemp("hung"), **made_trace.HUNG | {"batches": 12})


def lanes(text: str) -> dict[str, str]:
    """The pictures of the lanes, by their names."""
    lines = text.split("\n\n")[1].splitlines()[1:]
    width = max(m.end() for m in (re.match(r"pin thread|queue feeders|\w+( \d+)?", line) for line in lines) if m) + 1
    return {line[:width].strip(): line[width:] for line in lines}


def test_a_run_with_a_pin_thread(tmp_path: Path) -> None:
    """Beside what HUNG shows."""
    text = render(made(tmp_path, batches=4, pin=True), 80)
    assert lanes(text)["pin thread"] == "                       -R0L    -R1L       -R3-R2L"
    assert "\npin thread    busy 15% (pin 11%, rebuild 4%), wait 5%\n" in text
    assert "\n- wait  R rebuild  L pin  N next  T consumer  + start  X shutdown  J join\n" in text


def test_a_run_that_hangs(hung: Trace) -> None:
    assert render(hung, 80) + "\n" == HUNG


def test_every_kind_of_span_has_a_letter() -> None:
    drawn = {paint(code).label for code, e in EVENTS.items() if e.phase is Phase.BEGIN}
    assert drawn | {"did not end", "still waiting"} == set(LETTERS) >= set(WAITING)
    assert {len(letter) for letter in LETTERS.values()} == {1}


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8),
    st.integers(0, 2**62),
    st.lists(st.integers(0, 50), min_size=2, max_size=6, unique=True),
)
def test_cover_is_what_counting_nanoseconds_gives(raw: list[tuple[int, int]], far: int, edges: list[int]) -> None:
    begin = np.array([b for b, _ in raw], np.int64)
    end = np.array([b + length for b, length in raw], np.int64)
    edges = sorted(edges)
    counted = [sum(b <= t < b + n for b, n in raw for t in range(lo, hi)) for lo, hi in itertools.pairwise(edges)]
    assert _cover(begin + far, end + far, np.array(edges, np.int64) + far).tolist() == counted


def of_worker(path: Path, columns: str, *rows: tuple[int, ...]) -> Trace:
    return trace_of(path, rows_of(columns, *rows, worker=0), role="worker", worker=0, loader=1)


def test_time_in_an_inner_span_is_not_the_outer_ones(tmp_path: Path) -> None:
    steps = [(1, ev.FETCH[0]), (251, ev.SAMPLE[0]), (501, ev.SAMPLE[1]), (501, ev.COLLATE[0]), (751, ev.COLLATE[1])]
    text = render(of_worker(tmp_path, "time code", *steps, (1001, ev.FETCH[1])), 29)
    assert lanes(text)["worker 0"] == "FFFFFSSSSSCCCCCFFFFF"
    assert "worker 0 busy 100% (fetch 50%, collate 25%, sample 25%)" in " ".join(text.split())


def test_a_small_letter_is_less_than_half_of_the_cell(tmp_path: Path) -> None:
    steps = (1, ev.FETCH[0]), (51, ev.FETCH[1]), (101, ev.FETCH[0]), (150, ev.FETCH[1]), (2001, ev.WORKER_EXIT)
    assert lanes(render(of_worker(tmp_path, "time code", *steps), 29))["worker 0"] == "Ff"


def test_batches_lie_in_the_same_cells_in_every_lane(tmp_path: Path) -> None:
    """A batch is fetched, then rebuilt, then trained on."""
    picture = lanes(render(made(tmp_path, Run(batches=6)), 200, batch=4))
    assert list(picture) == ["consumer", "loader", "queue feeders", "worker 0", "feeder 0"]
    first = {name: len(line) - len(line.lstrip()) for name, line in picture.items()}
    assert first["loader"] <= first["queue feeders"] < first["worker 0"] < first["feeder 0"] < first["consumer"]
    assert all("4" in picture[name] for name in ("loader", "worker 0", "consumer"))


def test_a_batch_that_hangs_is_drawn_as_long_as_the_trace_is(tmp_path: Path) -> None:
    steps = (1, ev.FETCH[0], 3), (51, ev.SAMPLE[0], 3), (101, ev.SAMPLE[1], 3), (1000, ev.FOUND_DEAD, -1)
    text = render(of_worker(tmp_path, "time code task", *steps), 49, batch=3)
    assert lanes(text)["worker 0"] == ">3SS>>>> fetch did not end >>>>>>>>>>>>>"


def ruler(text: str) -> list[str]:
    return text.split("\n\n")[1].splitlines()[0].split()


def test_a_window_is_cut_out_and_its_ruler_counts_from_the_traces_begin(hung: Trace) -> None:
    text = render(hung, 80, since=0.002, until=0.006)
    assert ruler(text) == ["|2", "ms", "|3", "|4", "|5"]
    assert ">" in lanes(text)["worker 1"]
    assert ">" not in lanes(render(hung, 80, until=0.0045))["worker 1"]


def test_a_long_run_counts_in_seconds_and_no_number_is_beyond_its_end(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **made_trace.HUNG | {"poll": 4_990_000_000})
    first, unit, *others = ruler(render(trace, 80))
    assert (unit, 20 <= max(float(mark.removeprefix("|")) for mark in (first, *others)) < 30) == ("s", True)
    assert trace.last - trace.start < 30_000_000_000 < scene_of(trace).end


def test_other_workers_can_be_left_out(hung: Trace) -> None:
    titles = ["epochs", "consumer", "loader", "queue feeders", "worker 1", "feeder 1"]
    assert list(lanes(render(hung, worker=1))) == titles


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 99}, "no span of batch 99"), ({"since": 9.0}, "the trace goes from 0 to"),
        ({"batch": 9, "since": float("nan")}, "since=nan s: no part"), ({"worker": 7}, r"workers=\[7\]: the trace has"),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_draw_it_says_so(hung: Trace, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(hung, **arguments)


def test_a_trace_without_spans_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no span to draw"):
        render(trace_of(tmp_path, []))


def test_loaders_are_drawn_one_after_the_other(tmp_path: Path) -> None:
    text = render(made(tmp_path, Run(batches=3, workers=1), Run(batches=3, workers=1, loader=2, first_pid=2000)))
    names = [line.split("  ")[0].rstrip() for line in text.split("\n\n")[1].splitlines()[1:]]
    assert next(n for n in names if n.startswith("iterator ")).startswith("iterator 1:")
    assert sum(name.startswith("worker 0") for name in names) == 2


@pytest.mark.parametrize("width", [60, 133])
def test_lines_are_as_wide_as_asked_for(hung: Trace, width: int) -> None:
    assert max(map(len, render(hung, width).split("\n\n")[1].splitlines())) == width


def test_the_words_fit_too_and_break_after_commas(hung: Trace) -> None:
    text = render(hung, 50)
    shares = text.split("\n\n")[2].splitlines()
    assert max(map(len, shares + text.split("\n\n")[-1].splitlines())) <= 50
    assert all(line.endswith(",") for line, after in itertools.pairwise(shares) if after.startswith(" "))
    assert re.sub(r",\n +", ", ", "\n".join(shares)) == render(hung, 200).split("\n\n")[2]


def test_the_legend_is_of_what_the_window_shows(tmp_path: Path) -> None:
    trace = made(tmp_path, Run(batches=4, pin=True))
    legends = [render(trace, 80, until=until).split("\n\n")[-1] for until in (None, 0.0003)]
    assert ["X shutdown" in legend for legend in legends] == [True, False]
    assert ["+ start" in legend for legend in legends] == [True, True]


def test_what_went_wrong_is_told_as_plain_text(tmp_path: Path) -> None:
    events = rows_of(
        "time code task worker x y z", (5, ev.NEXT[0], 2, -1, 0, 0, 0), (10, ev.TASK_ERROR, 2, 1, 0, 0, 1),
        (20, ev.WORKER_GONE, -1, 0, 7, -9, 0), (30, ev.NEXT[1], 2, -1, 0, 0, 0),
    )  # fmt: skip
    lines = [{"kind": "string", "id": 1, "text": "KeyError: \x1b[31m\nnot a line"}]
    trace = trace_of(tmp_path, events, lines=lines)

    def told(**arguments: Any) -> list[str]:
        return [line for line in render(trace, **arguments).splitlines() if line.startswith("failure")]

    error = r"failure: loader: task error worker 1: KeyError: \x1b[31m\nnot a line, at 0.000000005 s"
    death = "failure: loader: worker 0 gone: killed by SIGKILL, at 0.000000015 s"
    assert told() == [error, death]
    assert told(since=1e-8) == [death]
    assert told(batch=2) == [error]


ANSI = re.compile(r"\x1b\[[0-9;]*m")


def test_colour_changes_nothing_but_colour(hung: Trace) -> None:
    coloured = render(hung, colour=True)
    assert ANSI.sub("", coloured) == render(hung, colour=False)
    green = nearest_256(EVENTS[ev.SAMPLE[0]].colour)
    assert f"\x1b[48;5;{green};" in coloured
    waiting = next(line for line in coloured.splitlines() if line.startswith("worker 0"))
    assert waiting.endswith(">>>>"), "an idle worker that waits for its next task is no alarm"


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colour_is_for_terminals_that_want_it(
    hung: Trace, monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str, coloured: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert bool(ANSI.search(render(hung))) is coloured


def test_the_nearest_of_256_colours() -> None:
    colours = {"#000000": 16, "#ffffff": 231, "#808080": 244, "#ff0000": 196, "#5f87af": 67, "#626262": 241}
    assert {c: nearest_256(c) for c in colours} == colours


def test_the_way_of_the_batch_that_is_asked_for(healthy: Trace) -> None:
    text = render(healthy, batch=4)
    way = text.split("batch 4 of iterator 1, epoch 0:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[-1] for line in way] == [
        "index_write", "fetch", "result_pickle", "result_write", "result_rebuild", "yield",
    ]  # fmt: skip
    assert "batch 4 of" not in render(healthy)


def test_the_batch_that_is_asked_for_tells_what_its_steps_computed(tmp_path: Path) -> None:
    text = render(made(tmp_path, batches=6, cpu=lambda took: (took // 4, took // 8)), batch=4)
    fetch, collate = (line for line in text.splitlines() if " took " in line)
    assert (fetch.split()[0], collate.split()[0]) == ("fetch", "collate")
    assert fetch.endswith(": computing 25%, ready but without a CPU 12%")
    assert collate.endswith(": computing 25%")


def test_a_damaged_time_at_the_end_of_all_time_is_drawn(tmp_path: Path) -> None:
    trace = of_worker(tmp_path, "time code task", (5, ev.FETCH[0], 1), (2**63 - 1, ev.SHM_ALLOC, 1))
    assert "worker 0" in render(trace)
