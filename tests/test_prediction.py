"""Plans of imagined runs, whose costs are known, of live ones, and what is refused."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_trace import HUNG, MIB, Run, describe, write

import minidl
from minidl import cli
from minidl.hang.headline import headline
from minidl.prediction import SpeedPlan, plan
from minidl.speed.more_workers import more_workers
from minidl.speed.plan.settings import PlanError
from minidl.speed.reasons import SlowReason
from minidl.speed.transport_costs import TransportCosts
from minidl.speed.verdict import verdict
from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.summary import summary

pytestmark = pytest.mark.heavy

MS = 1_000_000
TRACES = Path(__file__).parents[1] / "traces"
FREE = TransportCosts(dict.fromkeys(("alone", "upstream", "arena"), ((0.0,) * 3,) * 2), measured=True)


def waits(took: int) -> tuple[int, int]:
    return took // 100, 0


def computes(took: int) -> tuple[int, int]:
    return took, 0


def made(path: Path, *, params: Any = None, cpus: int = 2, took: int = 8, **run: Any) -> Trace:
    """A run of 60 batches, each of which takes 8 ms, by 2 workers on 2 CPUs."""
    write(path, Run(**{"batches": 60, "cost": lambda task: took * MS, "cpu": waits} | run))
    describe(
        path, **{"num_workers": run.get("workers", 2), "dataset": "Photos", "dataset_kind": "map"} | (params or {})
    )
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"cpus": cpus}))
    return read_trace(path)


def rates(found: SpeedPlan) -> list[float]:
    return [one.by_s for one in found.predicted]


def planned(trace: Trace, **values: Any) -> SpeedPlan:
    return plan(trace, transports=FREE, **{"transport": "upstream"} | values)


def note(found: SpeedPlan, pattern: str) -> bool:
    return any(re.match(pattern, one) for one in found.notes)


EIGHT = [0, 1, 2, 4, 8]
COMPUTING, LONG_STEPS = {"cpu": computes}, {"step": 20 * MS}


@pytest.mark.parametrize(
    ("run", "values", "expected"),
    [
        ({}, {"num_workers": EIGHT}, [120, 124, 251, 502, 982]),
        (COMPUTING, {"num_workers": EIGHT}, [120, 124, 241, 241, 241]),
        (COMPUTING, {"num_workers": 4, "cpus": [2, 8]}, [236, 480]),
        (LONG_STEPS, {"num_workers": 4, "consumer": 0.5}, [97]),
        ({}, {"num_workers": 2, "samples": 0.5}, [502]),
        ({}, {"num_workers": 2, "samples": 2.0}, [125]),
        ({}, {"num_workers": 2, "batch_size": 8}, [125]),
        ({}, {"num_workers": 2, "batch_size": 2}, [502]),
    ],
    ids=lambda value: ", ".join(map(str, value)),
)
def test_workers_wait_together_and_compute_with_as_many_cpus(
    tmp_path: Path, run: dict[str, Any], values: dict[str, Any], expected: list[float]
) -> None:
    found = planned(made(tmp_path / "t", **run), **values)
    assert rates(found) == [pytest.approx(rate, rel=0.08) for rate in expected]
    assert [one.low <= one.by_s <= one.high for one in found.predicted] == [True] * len(expected)
    assert found.same.by_s == pytest.approx(found.recorded.rate, rel=0.08)


@pytest.mark.parametrize(
    ("run", "workers", "limit"),
    [
        (LONG_STEPS, 2, "the training loop"),
        ({}, 2, "the workers"),
        (COMPUTING, 6, "the CPUs"),
        ({"cost": lambda task: (200 if task % 20 == 5 else 4) * MS}, 4, "one slow batch in order"),
        ({"cost": lambda task: 20_000, "step": 10_000}, 8, "the loader's thread"),
        ({}, 0, "fetching in the loop itself"),
    ],
)
def test_what_limits_is_named(tmp_path: Path, run: dict[str, Any], workers: int, limit: str) -> None:
    assert planned(made(tmp_path / "t", **run), num_workers=workers).predicted[0].limited_by == limit


def test_the_sentence_and_the_table(tmp_path: Path) -> None:
    found = planned(made(tmp_path / "t", step=3 * MS, batches=400))
    assert re.match(
        r"3 workers: \d+ batches/s \(\d+ to \d+\), 1\.\d+ times today's; more do not help, the training loop limits",
        found.sentence,
    )
    table = found.text().splitlines()
    assert " ".join(table[2].split()) == "workers batches/s range waits first epoch ahead memory limited by"
    assert [(line.split()[0], line.endswith(" *")) for line in table[3:10]] == [(n, n == "3") for n in "0123468"]
    assert found.predicted[3].peak_bytes == found.predicted[3].peak_batches * (MIB + 900)


def test_faster_workers_may_take_too_long_to_start_for_a_short_epoch(tmp_path: Path) -> None:
    trace = made(tmp_path / "t")
    found = planned(trace, num_workers=[4, 16])
    four, more = found.predicted
    late = replace(found, predicted=[four, replace(more, epoch=2 * four.epoch)])
    assert "; more take too long to start, the workers limit" in late.sentence
    kept = r"keep 2 workers: 25\d batches/s, and no setting has a shorter epoch; the workers limit"
    assert re.match(kept, planned(trace, num_workers=2).sentence)


@pytest.mark.parametrize(
    ("run", "values", "said"),
    [
        ({"batches": 12}, {}, "shows 12 batches from begin to end, at least 20 are needed: record a longer run"),
        ({"cpu": lambda took: (0, 0)}, {}, "no CPU times, .* it shows 25. batches/s with 2 workers, .* --cpu-time on"),
        (HUNG | {"poll": 5_000_000_000}, {}, "the run did not end well .*: see minidl doctor"),
        ({"params": {"unseen": ["next"]}}, {}, "does not show when the loop waits: an older minidl observed"),
        ({}, {"num_workers": [-1]}, "num_workers=-1 is refused by the loader: give 0 or more"),
        ({}, {"num_workers": [2000]}, "num_workers=2000: at most 1024 are simulated"),
        ({}, {"num_workers": "4"}, "num_workers='4': give a value such as 1"),
        ({}, {"num_workers": []}, r"num_workers=\[\]: give values of num_workers, "),
        ({}, {"in_order": "no"}, "in_order='no': give a value such as True"),
        ({}, {"persistent": True}, r"persistent=\[True\]: give values of num_workers, "),
        ({}, {"prefetch_factor": [0]}, "prefetch_factor=0 is refused by the loader: give 1 or more"),
        ({}, {"transport": ["pigeon"]}, "transport='pigeon' is refused by the loader: choose from upstream, arena"),
        ({}, {"worker_method": "fibre"}, "worker_method='fibre' is refused by the loader: choose from multi"),
        ({}, {"consumer": 0.0}, r"consumer=0: give a number above 0"),
        ({}, {"pin_memory": True}, "no batch was pinned in the recording: record with pin_memory=True"),
        ({}, {"dataloader": "Sounds"}, "no DataLoader is 'Sounds'"),
    ],
)
def test_what_cannot_be_predicted_is_said(
    tmp_path: Path, run: dict[str, Any], values: dict[str, Any], said: str
) -> None:
    with pytest.raises(minidl.TraceError, match=said):
        planned(made(tmp_path / "t", **run), **values)


@pytest.mark.parametrize(
    ("names", "values", "said"),
    [
        (
            ["iterable-uneven-shards"],
            {},
            r"had 2, 6, 10 and 14 batches: .* shares .* unequally.* 17\.9 batches/s, .*re",
        ),
        (["workers-1"], {"batch_size": 100_000}, "the recording has 1536 samples"),
        (["workers-1"], {"num_workers": 2, "prefetch_factor": 2000}, "at most 2048 batches in advance"),
        (["workers-1", "many-small-tensors"], {}, "are of different loaders: collate_fn is"),
    ],
    ids=["unequal shares of a stream", "large batches", "many batches in advance", "different programs"],
)
def test_what_a_recording_does_not_tell_is_refused(names: list[str], values: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(*(TRACES / f"{name}.minidl" for name in names), **values)


def test_only_the_whole_part_of_a_ring_counts(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", batches=100)
    trace.processes[0].whole_from = trace.start + 200 * MS
    assert len(planned(trace).recorded.steps.sizes) < 60
    trace.processes[0].lost, trace.processes[0].whole_from = 7, trace.start + 350 * MS
    with pytest.raises(PlanError, match="7 events are lost: record with minidl run --full"):
        planned(trace)


# --- Threads ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cpu", "slowest", "fastest", "limit"),
    [(waits, 490, 515, "the workers"), (computes, 121, 241, "the interpreter's lock")],
)
def test_threads_compute_as_far_as_a_lock_lets_them(
    tmp_path: Path, cpu: Any, slowest: float, fastest: float, limit: str
) -> None:
    """How long their code holds the interpreter's lock, a recording of processes does not tell."""
    trace, large = made(tmp_path / "t", cpu=cpu), made(tmp_path / "large", cpu=cpu, batch_size=64)
    one, more = (planned(each, num_workers=4, worker_method="thread").predicted[0] for each in (trace, large))
    assert one.by_s == pytest.approx(slowest, rel=0.08)
    assert one.low < one.by_s < one.high
    assert one.high / one.by_s == pytest.approx(fastest / slowest * 1.15, rel=0.15)
    assert (one.limited_by, one.facts()["transport"]) == (limit, None)
    assert more.low < 0.8 * one.low, "64 samples in which threads may take the lock from each other"
    advice = "4 workers, worker_method.* record a run with worker_method='thread', and give both recordings"
    assert note(planned(trace, num_workers=4), advice)
    trace.manifest["versions"] = {"python": "3.13.1t"}
    found = planned(trace, num_workers=4)
    assert [one.by_s for one in found.predicted if one.setting.threads] == [pytest.approx(fastest, rel=0.08)]
    assert not note(found, ".*interpreter's lock")


@pytest.mark.parametrize(("took", "held"), [(8, "0%"), (16, r"9\d%"), (11, r"6\d%")])
def test_a_recording_of_threads_tells_how_long_they_hold_the_lock(tmp_path: Path, took: int, held: str) -> None:
    processes = made(tmp_path / "p", cpu=computes)
    threads = made(tmp_path / "t", cpu=computes, took=took, params={"transport": "thread"})
    for one, other in ((processes, threads), (threads, processes)):
        found = planned(one, other=other, num_workers=2, worker_method="thread")
        assert note(found, f"workers that are threads hold .* lock for {held} of their")
        assert rates(found) == [pytest.approx(2000 / took, rel=0.1)]
    assert note(planned(threads), ".*recorded with threads")


# --- Two recordings ---------------------------------------------------------------------------------------------------
def test_two_recordings_tell_what_workers_use_one_at_a_time(tmp_path: Path) -> None:
    """Samples wait for 4 ms together, and then for 4 ms for a disk that serves one worker at a time."""
    few, many = (made(tmp_path / str(n), workers=n, took=max(8, 4 * n)) for n in (2, 4))
    assert rates(planned(few, num_workers=[2, 8]))[1] > 900
    together, swapped = planned(few, other=many, num_workers=[2, 8]), planned(many, other=few, num_workers=[2, 8])
    assert rates(together) == [pytest.approx(235, rel=0.1), pytest.approx(245, rel=0.1)]
    assert rates(swapped) == [pytest.approx(235, rel=0.15), pytest.approx(245, rel=0.15)]
    assert together.predicted[1].limited_by == "what workers share"
    assert note(together, r"workers use something one at a time for (3\.\d+|4\.[0-4]\d) ms")


def test_two_recordings_tell_how_cpu_time_grows(tmp_path: Path) -> None:
    few, many = (made(tmp_path / str(n), cpu=computes, took=4 + 2 * n, workers=n) for n in (1, 2))
    found = planned(few, other=many, num_workers=[1, 2])
    assert "CPU time of a fetch grows by 33% with each CPU in use" in found.notes
    assert rates(found)[1] == pytest.approx(2 / 8.3e-3, rel=0.1)


def test_two_recordings_that_wait_alike_change_nothing(tmp_path: Path) -> None:
    few, many = made(tmp_path / "few"), made(tmp_path / "many", workers=4)
    assert rates(planned(few, other=many, num_workers=8)) == rates(planned(few, num_workers=8))
    with pytest.raises(PlanError, match="have 2 workers each: record one with another number"):
        planned(few, other=few)


# --- Recorded runs ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("recorded", "within"), [(1, 0.16), (2, 0.17), (4, 0.22)])
def test_recordings_of_a_training_predict_each_other(recorded: int, within: float) -> None:
    """One program, with an H200 and 16 CPUs; with 8 and 12 workers the device limits, with fewer it is mostly idle."""
    known = {n: yielded(read_trace(TRACES / f"workers-{n}.minidl"), n) for n in (0, 1, 2, 4, 8, 12)}
    found = plan(TRACES / f"workers-{recorded}.minidl", num_workers=[*known], transport="upstream")
    for one, rate in zip(found.predicted, known.values(), strict=True):
        assert one.by_s == pytest.approx(rate, rel=within), one.setting
    assert found.predicted[-1].limited_by == "the training loop"


def yielded(trace: Trace, workers: int) -> float:
    """Batches/s after the first of each worker."""
    times = trace.select("yield")["time"].astype(float)
    return float(1e9 * (len(times) - 1 - workers) / (times[-1] - times[workers]))


def test_what_the_device_takes_is_unknown_if_it_is_not_recorded() -> None:
    trace = read_trace(TRACES / "workers-2.minidl")
    assert not note(plan(trace, num_workers=2), ".*the device's own time")
    trace.events = trace.events[~np.isin(trace.events["code"], ev.DEVICE_COMPUTE)]
    assert note(plan(trace, num_workers=2), ".*the device's own time is not recorded")


def test_another_batch_size_is_named_and_compared_by_samples() -> None:
    found = plan(TRACES / "workers-1.minidl", batch_size=16, num_workers=6)
    times = found.recommended.by_s * 16 / (found.recorded.rate * found.recorded.steps.samples)
    assert found.sentence.startswith("6 workers, batch_size=16, pin_memory=True: ")
    assert f"{times:.3g} times today's in samples/s" in found.sentence


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
def test_a_recording_of_sleeping_samples_predicts_other_workers(tmp_path: Path, workers: int) -> None:
    """The ratios: how long a sleep takes depends a little on the machine's load."""
    place = tmp_path / "t"
    with minidl.trace(place, cpu_time=True), minidl.DataLoader(Sleepy(), 2, num_workers=workers) as loader:
        for _ in loader:
            time.sleep(0.001)
    alone, one, two = rates(minidl.plan(place, num_workers=[0, 1, 2], transport="upstream"))
    assert 0.9 * alone < one
    assert two == pytest.approx(2 * one, rel=0.15)


class Sleepy:
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


# --- The command ------------------------------------------------------------------------------------------------------
def test_facts_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "t")
    assert cli.main(["plan", str(tmp_path / "t"), "--workers", "0,4", "--transport", "arena", "--json"]) == cli.OK
    facts = json.loads(capsys.readouterr().out)
    names = (
        "prefetch_factor transport in_order batches_per_s low high waiting_share first_batch_s peak_bytes limited_by"
    )
    assert {*names.split()} <= facts["settings"][1].keys()
    assert [one["num_workers"] for one in facts["settings"]] == [0, 4]
    assert facts["recommended"]["num_workers"] == 4
    assert facts["recorded"]["batches_per_s"] == pytest.approx(250, rel=0.05)
    both = planned(read_trace(tmp_path / "t"), num_workers=4, transport=["arena", "upstream"])
    assert both.recommended.setting.transport == "upstream"


def test_a_plan_never_takes_the_place_of_its_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, simulated = tmp_path / "t.minidl", tmp_path / "plan.minidl"
    path.write_bytes((TRACES / "workers-1.minidl").read_bytes())
    assert cli.main(["plan", str(path), "--workers", "2", "-o", str(path)]) == cli.USAGE
    assert "is the recording itself" in capsys.readouterr().err
    assert cli.main(["plan", str(path), "--workers", "2", "-o", str(simulated)]) == cli.OK
    assert cli.main(["plan", str(simulated)]) == cli.USAGE
    assert re.match(rf"minidl: {simulated} is simulated by minidl plan.*\n\Z", capsys.readouterr().err)
    assert cli.main(["diff", str(path), str(simulated), "--fail-if", "slower:5%"]) == cli.USAGE
    assert cli.main(["diff", str(path), str(simulated), "--force"]) == cli.OK
    assert "B is " in capsys.readouterr().out


# --- The next step of a headline --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"cpus": 8, **COMPUTING}, r"cheaper; 8 workers: about 3\.\d times .* \(3\S* to 4\S*\), by minidl plan$"),
        ({"cpus": 3, **COMPUTING}, r"cheaper; 3 workers: about 1\.[4-6] times.* minidl plan"),
        (COMPUTING, None),
        ({}, None),
        ({"cpus": 8, **COMPUTING, "params": {"dataset_kind": "iterable"}}, None),
        ({"cpus": 8, **COMPUTING, "batches": 15}, None),
    ],
    ids=["CPUs are idle", "one is", "none is", "what samples wait for may be shared", "streams", "few batches"],
)
def test_the_next_step_says_how_much_more_workers_would_help(
    tmp_path: Path, run: dict[str, Any], said: str | None
) -> None:
    """Where a plan can be relied on; the summary says it once."""
    trace = made(tmp_path / "t", **run)
    helps = headline(trace).helps
    assert re.search(said, helps) if said else "minidl plan" not in helps
    assert summary(trace).text().count("next step: ") == 1


def test_nothing_is_said_of_samples_that_sleep(tmp_path: Path) -> None:
    """All workers may share the limit of requests that they sleep for."""
    trace = made(tmp_path / "t", cpus=8)
    sleep = replace(verdict(trace, 1), reason=SlowReason("sleep", "workers sleep in their samples", "more workers"))
    assert more_workers(trace, 1, sleep) == ""
