"""Real traces of every kind are accepted; each kind of corruption is caught for the right reason, and shown in short.

The corruptions are in `check_mutations`, the real runs in `recorded`.
"""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_mutations as cm
import made_trace
import numpy as np
import pytest
import torch
import torch.utils.data
import workloads as wl
from check_mutations import HARMLESS, MUTATIONS, Mutation, double, drop, find, put, spoiled
from recorded import NAMES, drain, quiet, recorded

import minidl
from minidl import cli
from minidl.arena.arena import Mappings
from minidl.check import MOST_LISTED, RULES, Report, check, examine, slices
from minidl.check.view import LoaderView
from minidl.loader.crew import Crew
from minidl.record.slabs import TracedMappings
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Ending, Phase
from minidl.tracefile.reader import Trace, read_trace
from minidl.wire.queues import _Incoming

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

Positions = Any
TRACES = Path(__file__).parents[2] / "traces"


def cut(trace: Trace, rows: int) -> Trace:
    """The first so many events, as if everything had been killed then."""
    part = copy.copy(trace)
    part.lines = [line for line in trace.lines if line["kind"] != "trace_end"]
    part.events = trace.events[:rows]
    return part


def losing(trace: Trace, process: int, lost: int) -> Trace:
    """As if so many events of one process had been overwritten, or not recorded, and its file said so."""
    part = copy.copy(trace)
    part.processes = [copy.copy(process) for process in trace.processes]
    own, it = part.events[part.events["process"] == process], part.processes[process]
    overwritten = int(own["seq"].min()) - 1
    it.lost, it.header = lost, it.header._replace(lost_events=lost - overwritten, errno=errno.ENOSPC)
    it.whole_from = int(own["time"].min()) if overwritten else 0
    it.whole_until = int(own["time"].max()) if lost > overwritten else 0
    return part


def broken(trace: Trace) -> set[str]:
    """The rules that a trace breaks."""
    return {violation.rule for violation in check(trace)}


def view_of(trace: Trace, number: int) -> LoaderView:
    return LoaderView(trace, number, np.flatnonzero(trace.events["loader"] == number))


def test_a_worker_that_is_interrupted_may_leave_a_span_open() -> None:
    """A Ctrl-C may come between a wait and the event that ends it."""
    whole = read_trace(TRACES / "persistent.minidl")

    def left(ending: int) -> set[str]:
        def edit(e: Any) -> Any:
            last = np.flatnonzero((e["worker"] == 1) & np.isin(e["code"], [ev.INDEX_GET[1], ev.SENTINEL_GET]))[-2:]
            return drop(put(e, find(e, ev.WORKER_EXIT, worker=1), x=ending), *last)

        return {violation.rule for violation in check(spoiled(whole, edit)) if "has no end" in str(violation)}

    assert left(Ending.SENTINEL) == {"spans"}
    assert left(Ending.INTERRUPTED) == set()


# --- Real traces ------------------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("name", NAMES)
def test_a_real_run_is_accepted_and_judged_by_every_rule_if_it_is_whole(name: str) -> None:
    """Nothing is left out in silence: only what lacks events says that it was not judged."""
    report = examine(recorded(name))
    assert report.loaders >= 1
    assert report.violations == []
    if name == "ring":
        assert report.unjudged
    elif name != "killed program":
        assert not report.unjudged


@pytest.mark.live
def test_deaths_are_told_and_are_no_breach() -> None:
    report = examine(recorded("killed worker"))
    assert [text.split(": ", 1)[1] for text in report.deaths] == ["worker 0 by SIGKILL, which the loader did not send"]
    assert any("ended while it was in sample 5" in text for text in report.open)


@pytest.mark.live
def test_a_new_epoch_may_be_announced_to_a_worker_that_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to every worker, here as in torch's loader."""
    wl.impatient(monkeypatch)
    with minidl.trace(tmp_path / "trace"), wl.no_sigchld():
        dataset = wl.Gate(8, tmp_path / "die", at=5, thing=wl.kill_myself)
        with minidl.DataLoader(dataset, num_workers=2, persistent_workers=True) as loader:
            batches = iter(loader)
            assert [int(next(batches)) for _ in range(5)] == [0, 1, 2, 3, 4]
            (tmp_path / "die").touch()
            for fails in (lambda: next(batches), lambda: iter(loader)):
                with pytest.raises(RuntimeError, match="exited unexpectedly"):
                    fails()
    trace = read_trace(tmp_path / "trace")
    assert trace.select("resume_put")["worker"].tolist() == [0, 1]
    assert check(trace) == []


@pytest.mark.live
@pytest.mark.parametrize("transport", ["arena", "upstream"])
def test_what_an_interrupted_next_has_done_may_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    """Ctrl-C comes when a task is put; when a slab is mapped, when its message is rebuilt, and when that is taken."""
    places: list[tuple[Any, str, bool]] = [(Crew, "put", False)]
    places += [(_Incoming, "drop", False)] * (transport == "upstream")
    if transport == "arena":
        places += [(TracedMappings, "root", False), (Mappings, "deliver", True), (Mappings, "deliver", False)]
    options = {"num_workers": 2, "transport": transport}
    with minidl.trace(tmp_path / "trace"), minidl.DataLoader(wl.Tensors(40, width=20_000), **options) as loader:
        came: list[float] = []
        batches = iter(loader)
        for owner, name, before in places:
            with monkeypatch.context() as patch:
                _interrupt_once(patch, owner, name, before)
                with pytest.raises(KeyboardInterrupt):
                    came.extend(float(batch[0, 0]) for batch in batches)
        came.extend(float(batch[0, 0]) for batch in batches)
    assert came == list(range(40))
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("index_put")) == 40 + 1
    assert len(trace.select("result_rebuild", Phase.BEGIN)) == 40 + (transport == "arena")
    assert len(trace.select("next", Phase.END)) == 40 + 1 + len(places)
    assert check(trace) == []
    again = find(trace.events, ev.INDEX_PUT, nth=8)
    assert "once" in broken(spoiled(trace, lambda e: double(e, again)))


def test_without_workers_an_interrupted_next_fetches_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with minidl.trace(tmp_path / "trace", detail="sample"):
        came: list[float] = []
        batches = iter(minidl.DataLoader(wl.Tensors(9)))
        for before in (True, False):
            came.append(float(next(batches)[0, 0]))
            with monkeypatch.context() as patch:
                _interrupt_once(patch, wl.Tensors, "__getitem__", before)
                with pytest.raises(KeyboardInterrupt):
                    next(batches)
        came += [float(batch[0, 0]) for batch in batches]
    assert came == list(range(9))
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("sample", Phase.END)) == 9 + 2
    assert len(trace.select("yield")) == len(trace.select("fetch", Phase.END)) == 9
    assert check(trace) == []


def _interrupt_once(patch: pytest.MonkeyPatch, owner: type, name: str, before: bool) -> None:
    function, left = getattr(owner, name), [KeyboardInterrupt]

    def interrupted(*args: Any) -> Any:
        if before and left:
            raise left.pop()
        result = function(*args)
        if left:
            raise left.pop()
        return result

    patch.setattr(owner, name, interrupted)


@pytest.mark.live
def test_a_batch_that_a_failing_sampler_keeps_back_is_no_breach(tmp_path: Path) -> None:
    """Sending the next task fails, and the batch that was due goes with it: torch's loader does the same."""
    with minidl.trace(tmp_path / "trace"):
        sampler = wl.FailingSampler(list(range(7)), ArithmeticError)
        loader = minidl.DataLoader(wl.Tensors(32), batch_size=2, num_workers=1, sampler=sampler)
        batches = iter(loader)
        next(batches)
        with pytest.raises(ArithmeticError):
            next(batches)
        assert len(list(batches)) == 1
        loader.close()
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("task_assigned")) == len(trace.select("yield")) + 1
    assert check(trace) == []
    assert "in-order" in broken(spoiled(trace, lambda e: drop(e, find(e, ev.NEXT[1], -1, y=1))))


@pytest.mark.live
def test_a_pinning_that_fails_keeps_every_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_SIMULATE_DEVICE", "1")
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 1, "pin_memory": True}
    with minidl.trace(tmp_path / "trace"), minidl.DataLoader([1, 2, 3], collate_fn=Unpinnable, **options) as loader:
        batches = iter(loader)
        for _ in range(3):
            with pytest.raises(ValueError, match="can't be pinned"):
                next(batches)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    assert [trace.text(row) for row in trace.select("task_error")] == ["ValueError: can't be pinned"] * 3


class Unpinnable:
    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def pin_memory(self) -> None:
        raise ValueError("can't be pinned")


# --- Each kind of corruption ------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_corruption_is_caught_for_the_right_reason_at_the_first_impossible_event(mutation: Mutation) -> None:
    """What comes before that event could have happened; with it, it could not; its slice is the shortest."""
    trace = spoiled(recorded(mutation.run), mutation.edit)
    report = examine(trace)
    first = report.first
    assert (first.rule, cm.name_of(int(trace.events["code"][first.at]))) == (mutation.rule, mutation.event)
    assert check(cut(trace, first.at)) == []
    through = check(cut(trace, first.at + 1))[0]
    assert through.at == first.at
    assert {through.rule, first.rule} <= {first.rule, "whole-way"}  # what comes too late is not there yet

    loader = view_of(trace, first.loader)
    rows = np.searchsorted(loader.origin, report.slice.rows)
    assert report.slice.minimal
    assert first.at in report.slice.rows
    assert slices.shows(loader, first, rows)
    for at in range(len(rows)):
        assert not slices.shows(loader, first, np.delete(rows, at))


@pytest.mark.live
@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_event_can_give_away_is_accepted(name: str) -> None:
    run, _, edit = HARMLESS[name]
    trace = recorded(run)
    changed = spoiled(trace, edit)
    assert len(changed.events) < len(trace.events) or not np.array_equal(changed.events, trace.events)
    assert check(changed) == []


def test_every_rule_is_the_right_reason_for_some_corruption() -> None:
    device = {name for name in RULES if name.startswith("device-")}
    assert {mutation.rule for mutation in MUTATIONS} | {"recording"} | device == set(RULES)


WRONG_RECORDING: dict[str, cm.Edit] = {
    "an event is missing": lambda e: drop(e, find(e, ev.RESULT_READ, nth=3)),
    "an event is there twice": lambda e: double(e, find(e, ev.RESULT_READ, nth=3)),
    "a clock runs backwards": lambda e: cm.swap(e, find(e, ev.YIELD, nth=3), find(e, ev.YIELD, nth=5), "time"),
}


@pytest.mark.live
@pytest.mark.parametrize("what", WRONG_RECORDING)
def test_a_flaw_of_the_recording_is_caught(what: str) -> None:
    assert "recording" in broken(spoiled(recorded("persistent"), WRONG_RECORDING[what], renumber=False))


# --- The loss of any one event, and its doubling ----------------------------------------------------------------------
UNNOTICED = {
    "cancel_join_thread": "closing is tidiness",
    "queue_close": "closing is tidiness",
    "result_read": "it belongs to no task",
    "shm_alloc": "how many segments a batch needs is the batch's business",
    "join": "a worker may be gone before it is waited for",
}


@pytest.mark.live
def test_the_loss_of_any_one_event_is_noticed_or_excused() -> None:
    """Of every kind of event, one is dropped after which its thread went on: a last one may be missing by right."""
    trace = recorded("persistent")
    events = trace.events
    lane = events["process"].astype(np.int64) << 32 | events["tid"]
    last = {int(where): at for at, where in enumerate(lane)}
    unnoticed = set()
    for code in np.unique(events["code"]).tolist():
        kind = [at for at in np.flatnonzero(events["code"] == code).tolist() if at != last[int(lane[at])]]
        if kind and check(spoiled(trace, lambda e, kind=kind: drop(e, kind[-1]))) == []:  # type: ignore[misc]
            unnoticed.add(EVENTS[code].name)
    assert unnoticed <= set(UNNOTICED)


MAY_COME_AGAIN = {
    **UNNOTICED,
    "index_write": "how often a feeder writes is the transport's business",
    "worker_gone": "seen twice is gone",
    "done_event_set": "an event that is set stays set",
}


@pytest.mark.live
def test_the_doubling_of_any_one_event_is_noticed_or_excused() -> None:
    tried, unnoticed = set(), set()
    for run in ("persistent", "pinned"):
        trace = recorded(run)
        for code in sorted(set(trace.events["code"].tolist()) - tried):
            again = spoiled(trace, lambda e, code=code: double(e, find(e, code, nth=-1)))  # type: ignore[misc]
            if check(again) == []:
                unnoticed.add(EVENTS[code].name)
            tried.add(code)
    assert unnoticed <= set(MAY_COME_AGAIN)


# --- What can't be judged ---------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("name", ["persistent", "iterable, uneven", "pinned, persistent"])
def test_a_trace_that_ends_anywhere_breaks_no_rule_and_tells_what_was_open(name: str) -> None:
    """Cut at twenty moments: what a SIGKILL of the whole run leaves."""
    trace = recorded(name)
    for rows in np.linspace(find(trace.events, ev.EPOCH[0]) + 1, len(trace.events) - 1, 20).astype(int):
        report = examine(cut(trace, rows))
        assert report.violations == []
        assert report.open
    if name == "persistent":
        hung = examine(cut(trace, find(trace.events, ev.SAMPLE[0], 5) + 1))
        assert any("in sample 20 (task 5)" in text for text in hung.open)


@pytest.mark.live
def test_a_ring_is_judged_on_what_it_holds_and_says_what_it_lacks() -> None:
    trace = recorded("ring")
    text = " ".join(examine(trace).unjudged)
    assert "the oldest events were overwritten" in text
    assert "whole-way, state-sent, state-yielded: judged for the" in text
    assert "lifecycle" in text
    loader = view_of(trace, int(trace.events["loader"].max()))
    since, until = loader.origin[loader.lacks.since], loader.origin[-1]
    whole = [int(row) for row in np.flatnonzero(trace.events["code"] == ev.INDEX_PUT) if since < row < until]
    assert len(whole) > 10
    assert "whole-way" in broken(spoiled(trace, lambda e: drop(e, whole[len(whole) // 2])))
    assert "once" in broken(spoiled(trace, lambda e: double(e, find(e, ev.YIELD, nth=-9))))


def overwritten(trace: Trace, process: int, count: int) -> Trace:
    """As if the ring of one process had overwritten so many of its events."""
    own = np.flatnonzero(trace.events["process"] == process)
    gone = own[np.argsort(trace.events["seq"][own], kind="stable")][:count]
    return losing(spoiled(trace, lambda e: np.delete(e, gone), renumber=False), process, count)


@pytest.mark.live
def test_in_a_ring_nothing_is_concluded_from_what_is_overwritten() -> None:
    """However much of the loader's ring is left, and of each worker's."""
    trace = recorded("persistent")
    for process in range(len(trace.processes)):
        own = int((trace.events["process"] == process).sum())
        for share in (0.1, 0.4, 0.8):
            count = int(own * share)
            report = examine(overwritten(trace, process, count))
            assert report.violations == []
            assert any(f"({count} of " in text for text in report.unjudged)


@pytest.mark.live
def test_wherever_a_ring_begins_nothing_is_concluded_from_what_is_overwritten() -> None:
    """At each event of two tasks' way through the loader; and when not even the last epoch's end is left."""
    trace = recorded("persistent")
    home = [process.role for process in trace.processes].index("loader")
    codes = trace.events["code"][trace.events["process"] == home]
    begins, (*_, over) = np.flatnonzero(codes == ev.TASK_ASSIGNED), np.flatnonzero(codes == ev.EPOCH[1])
    for count in (*range(begins[4], begins[6] + 1), over + 1):
        assert check(overwritten(trace, home, int(count))) == []


@pytest.mark.live
def test_after_a_full_disk_nothing_is_judged_and_before_it_everything() -> None:
    trace = recorded("persistent")
    worker = int(trace.events["process"][find(trace.events, ev.WORKER_READY, worker=1)])
    own = np.flatnonzero(trace.events["process"] == worker)
    gone = own[len(own) // 2 :]
    lossy = losing(spoiled(trace, lambda e: np.delete(e, gone), renumber=False), worker, len(gone))
    report = examine(lossy)
    assert report.violations == []
    assert any("could not record any more" in text for text in report.unjudged)
    worse = losing(spoiled(lossy, lambda e: double(e, find(e, ev.YIELD, 0))), worker, len(gone))
    assert "once" in broken(worse)


@pytest.mark.live
def test_a_worker_of_which_nothing_is_recorded_is_said_and_excuses_nobody_else() -> None:
    trace = recorded("persistent")
    worker = trace.events["process"][find(trace.events, ev.WORKER_READY, worker=1)]
    silent = spoiled(trace, lambda e: e[e["process"] != worker])
    report = examine(silent)
    assert report.violations == []
    assert any("the steps of worker 1: none is recorded" in text for text in report.unjudged)
    assert check(spoiled(silent, lambda e: drop(e, find(e, ev.INDEX_PUT, 2)))) != []


@pytest.mark.live
def test_a_loader_that_outlives_its_trace_is_judged_up_to_there(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        loader = minidl.DataLoader(wl.Tensors(32), batch_size=2, num_workers=2)
        batches = iter(loader)
        next(batches)
    assert len(list(batches)) == 15
    loader.close()
    report = examine(read_trace(tmp_path / "trace"))
    assert report.violations == []
    assert any("had stopped recording" in text for text in report.unjudged)


@pytest.mark.live
def test_torchs_own_loader_is_judged_on_what_can_be_seen(tmp_path: Path) -> None:
    with quiet(), minidl.trace(tmp_path / "trace"):
        options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
        loader = torch.utils.data.DataLoader(wl.Tensors(16), multiprocessing_context=minidl.observe("fork"), **options)
        assert [drain(iter(loader)) for _ in range(2)] == [8, 8]
        del loader
    trace = read_trace(tmp_path / "trace")
    report = examine(trace)
    assert report.violations == []
    assert any("an observed loader does not show" in text and "pin_start" in text for text in report.unjudged)
    for edit, rule in (
        (lambda e: double(e, find(e, ev.YIELD, 3)), "once"),
        (lambda e: put(e, find(e, ev.RESULT_PUT, 3), worker=1 - cm.owner(e, 3)), "own-worker"),
        (lambda e: put(e, find(e, ev.TASK_ASSIGNED, 3), y=9), "capacity"),
    ):
        assert check(spoiled(trace, edit))[0].rule == rule


# --- The report -------------------------------------------------------------------------------------------------------
def reported(edit: Callable[[Positions], Positions], run: str = "persistent") -> Report:
    return examine(spoiled(recorded(run), edit))


@pytest.mark.live
def test_the_text_tells_rule_event_state_slice_and_meaning() -> None:
    report = reported(lambda e: double(e, find(e, ev.YIELD, 3, nth=1)))
    text = report.text()
    assert "NOT a behaviour of the protocol" in text
    first = text[text.index("first impossible event") : text.index("state before it")]
    assert "once: a task passes through each stage at most once" in first
    assert "epoch 1, task 3, worker 1, yield: happened before" in first
    assert "the training step saw the same samples again" in first
    state = text[text.index("state before it") : text.index("shortest slice")]
    assert "epoch 1; send_idx 8, rcvd_idx 4" in state
    assert "worker 1" in state
    table = [line.split() for line in text[text.index("shortest slice") :].splitlines()[1:3]]
    assert ["yield" in line for line in table] == [True, True]
    assert table[1][-1] == "◀"
    violation = next(violation for violation in report.violations if violation.rule == "once")
    assert str(violation).startswith("once: iterator 1, epoch 1, task 3, worker 1, yield: happened before  [rows ")
    assert [int(report.trace.events["code"][row]) for row in violation.rows] == [ev.YIELD, ev.YIELD]


@pytest.mark.live
def test_what_is_missing_is_named() -> None:
    text = reported(lambda e: drop(e, find(e, ev.INDEX_PUT, 3))).text()
    assert "missing index_put of task 3" in text
    assert "shortest slice that shows it: 1 event" in text


@pytest.mark.live
def test_the_json_says_the_same_and_violations_come_by_time() -> None:
    report = reported(lambda e: double(e, find(e, ev.YIELD, 3)))
    told = json.loads(json.dumps(report.json()))
    first = told["first"]
    assert told["verdict"] == "violated"
    assert (first["rule"], first["event"]["event"], first["event"]["task"]) == ("once", "yield", 3)
    assert [event["event"] for event in first["slice"]] == ["yield", "yield"]
    assert first["slice_minimal"]
    assert first["state_before"]
    assert len(told["violations"]) == len(report.violations) > 1
    assert [violation.at for violation in report.violations] == sorted(one.at for one in report.violations)
    sound = examine(recorded("persistent")).json()
    assert (sound["verdict"], sound["first"], sound["violations"]) == ("accepted", None, [])


@pytest.mark.live
def test_the_command_exits_with_0_1_or_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["check", str(recorded("fork").path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "accepted"
    assert cli.main(["check", str(tmp_path)]) == 2
    capsys.readouterr()


@pytest.mark.live
def test_many_breaches_of_one_rule_are_counted_not_listed() -> None:
    def every_message_unknown(events: Positions) -> Positions:
        return put(events, np.flatnonzero(events["code"] == ev.SAMPLE[1]), task=-1, code=ev.RESULT_PUT, x=77)  # type: ignore[arg-type]

    report = reported(every_message_unknown)
    assert len([violation for violation in report.violations if violation.rule == "vocabulary"]) == MOST_LISTED
    assert report.more["vocabulary"] == 96 - MOST_LISTED
    told = next(line for line in report.text().splitlines() if line.startswith("  also: vocabulary"))
    assert told.endswith(f"and {96 - 1 - (report.first.rule == 'vocabulary')} more")  # type: ignore[union-attr]


@pytest.mark.live
def test_a_slice_of_the_replayed_dispatcher_is_cut_out_of_its_epoch() -> None:
    """The state depends on every decision since the epoch's begin; what does not matter is left out all the same."""
    report = reported(lambda e: put(e, find(e, ev.TASK_ASSIGNED, 5), worker=1), "in_order off")
    assert (report.first.rule, report.first.at in report.slice.rows) == ("decisions", True)  # type: ignore[union-attr]
    assert report.slice.minimal
    assert 6 <= len(report.slice.rows) <= 12


# --- Size -------------------------------------------------------------------------------------------------------------
def tiled(trace: Trace, times: int) -> Trace:
    """A persistent loader's run with its second epoch many times over."""
    events, spans = trace.events.copy(), trace.spans()
    writes = spans[np.isin(spans["code"], [ev.INDEX_WRITE[0], ev.RESULT_WRITE[0]])]
    for nth in (0, 2):  # a feeder that was late ends its write before the next epoch, as the others do
        cut = events["time"][find(events, ev.RESUME_PUT, nth=nth)]
        late = writes["end"][(writes["begin"] < cut) & (writes["end"] > cut)]
        ends = np.isin(events["code"], [ev.INDEX_WRITE[1], ev.RESULT_WRITE[1]])
        events["time"][ends & np.isin(events["time"], late)] = cut - 1
    events = events[np.argsort(events["time"], kind="stable")]
    starts = [find(events, ev.RESUME_PUT, nth=0), find(events, ev.RESUME_PUT, nth=2)]
    length = int(events["time"][starts[1]] - events["time"][starts[0]])
    parts = [events[: starts[0]]]
    for number in range(times):
        end = starts[1] if number < times - 1 else len(events)
        part = events[starts[0] : end].copy()
        part["time"] += length * number
        numbered = np.isin(part["code"], [*ev.EPOCH, ev.RESUME_PUT, ev.RESUME_ACK])
        part["x"][numbered] += number
        parts.append(part)
    return spoiled(trace, lambda e: np.concatenate(parts))


@pytest.mark.live
def test_a_long_run_is_accepted_and_its_last_breach_is_found() -> None:
    long = tiled(recorded("persistent"), 200)
    assert len(long.events) > 50_000
    assert check(long) == []
    worse = check(spoiled(long, lambda e: double(e, find(e, ev.YIELD, 3, nth=-1))))
    assert (worse[0].rule, "epoch 201, task 3" in worse[0].about) == ("once", True)


# --- Damage -----------------------------------------------------------------------------------------------------------
@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1, 162])  # the last one's numbers overflow when they are added
def test_a_damaged_trace_is_judged_and_fails_nobody(seed: int) -> None:
    """Any value may stand in any column; the report is made all the same, and no number is taken for a size.

    The traces are kept ones: in a new recording, a seed would meet other events each time.
    """
    chance = np.random.default_rng(seed)
    values = np.array([-(2**63), 2**63 - 1, -1, 0, 1, 5, 10**6, 2**40])
    for run in ("persistent", "healthy-8-pinned", "iterable-uneven-shards", "workers-0"):

        def damaged(e: Positions) -> Positions:
            for column in ("task", "worker", "x", "y", "z"):
                at = chance.integers(len(e), size=4)
                e[column][at] = chance.choice(values, len(at))
            at = chance.integers(len(e), size=4)
            e["code"][at] = chance.choice(sorted(EVENTS), len(at))
            e["time"][at] = chance.permutation(e["time"][at])
            return np.delete(e, chance.integers(len(e), size=4))

        report = examine(spoiled(read_trace(TRACES / f"{run}.minidl"), damaged))
        assert report.first is not None
        assert json.dumps(report.json())
        assert report.text().replace("\n", "").isprintable()


def test_damage_is_said_before_what_it_may_have_broken(tmp_path: Path) -> None:
    path = made_trace.write(tmp_path / "trace", made_trace.Run(**made_trace.HEALTHY))
    (events,) = path.glob("1000-*.events")
    data = bytearray(events.read_bytes())
    data[6000:9000] = b"\xff" * 3000
    events.write_bytes(data)
    report = examine(read_trace(path))
    first, second, third, *rest = report.text().splitlines()
    assert first == "the recording is damaged or incomplete, which may be the only reason for broken rules:"
    assert second.startswith("  loader (pid 1000): 48 events missing")
    assert "NOT a behaviour of the protocol" in third
    assert not [line for line in rest if second.strip() in line], "it is said once"
