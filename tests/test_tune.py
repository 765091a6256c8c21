"""`minidl tune`: an unmodified script is tried with other settings, for so many batches, and writes nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
from programs import write

from minidl import cli, tune
from minidl.speed.plan.settings import LoaderSetting
from minidl.tracefile import events as ev
from minidl.tracefile.reader import read_trace
from minidl.tune import Trial, Tried, Tuned, TuneError

TRAIN = """
    import sys, tempfile, time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            time.sleep(0.002)
            return index

    if __name__ == "__main__":
        for batch in DataLoader(range(9), 3, num_workers=1):  # a shorter loader comes first
            pass
        if len(sys.argv) > 1:
            tempfile.TemporaryDirectory().cleanup()
            torch.save({}, sys.argv[1])
            with open("log.txt", "a") as log:
                log.write("begun")
        for epoch in range(3):
            for batch in DataLoader(Slow(), 2, num_workers=1):
                pass
            other = list(DataLoader(range(3)))
        print("not reached")
"""


def predicted(workers: int, by_s: float) -> Any:
    return SimpleNamespace(
        setting=LoaderSetting(workers), by_s=by_s, low=by_s - 1, high=by_s + 1, facts=lambda: {"num_workers": workers}
    )


def result(*tried: Tried, writes: tuple[str, ...] = ()) -> Tuned:
    """With as much of a SpeedPlan as a result needs."""
    recorded = SimpleNamespace(base=LoaderSetting(1), rate=20.0)
    plan: Any = SimpleNamespace(recorded=recorded, sentence="4 workers: the plan")
    return Tuned(plan, list(tried), list(writes))


def test_the_fastest_that_was_measured_is_named() -> None:
    found = result(
        Tried(predicted(4, 50), 30.0), Tried(predicted(2, 38), 40.0), Tried(predicted(3, 45), 0.0, "it failed")
    )
    assert found.sentence == "2 workers: 40 batches/s measured, 2 times today's (1 worker: 20)"
    lines = found.text().splitlines()
    assert lines[3].split() == ["1", "worker", "20"]
    assert lines[4].split() == ["4", "workers", "50", "(49", "to", "51)", "30", "-40%"]
    assert lines[6].split() == ["3", "workers", "45", "(44", "to", "46)", "-", "it", "failed"]
    assert [one["measured_batches_per_s"] for one in found.facts()["tried"]] == [30.0, 40.0, None]


def test_a_setting_that_is_no_faster_is_not_recommended() -> None:
    found = result(Tried(predicted(4, 50), 21.0)).sentence
    assert found == "keep 1 worker: 20 batches/s; nothing that was tried is faster by 10%"


def test_what_the_program_writes_is_named() -> None:
    found = result(writes=("a.pt", "b.pt", "c.pt", "d.pt", "e.pt"))
    assert found.sentence == (
        "nothing was tried, because the program writes: a.pt, b.pt, c.pt and 2 more. --yes tries it all the same"
    )
    assert "4 workers: the plan" in found.text()


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_takes_the_options(workers: int) -> None:
    given: dict[str, Any] = {"timeout": 3, "persistent_workers": True, "prefetch_factor": 4, "num_workers": 1}
    options = tune._options(LoaderSetting(workers, 3, persistent_workers=True), given)
    transport = options.pop("transport", "upstream")
    loader = torch.utils.data.DataLoader(range(3), **given | options)
    assert (loader.num_workers, loader.persistent_workers, transport) == (workers, workers > 0, "upstream")
    assert loader.prefetch_factor == (3 if workers else None)


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(TuneError, match="at least 20 are needed"):
        next(tune.tune(["train.py"], batches=19))


def loaders(trace: Path) -> dict[str, tuple[int, int]]:
    """Of the loaders by their line: how many workers, how many batches."""
    found = read_trace(trace)
    yields = found.events[found.events["code"] == ev.YIELD]
    return {
        str(one["made_at"]): (one["num_workers"], int((yields["loader"] == number).sum()))
        for number, one in found.loaders.items()
    }


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 3])
def test_one_run_has_its_setting_and_ends_with_its_batches(workers: int, tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", TRAIN)
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "Slow()" in text)
    trial = Trial(
        str(tmp_path / "trace"), 25, made_at=f"train.py:{line}", setting=LoaderSetting(workers, in_order=True)
    )
    tune._run(trial, [str(script)], 100)
    assert loaders(tmp_path / "trace") == {"train.py:15": (1, 3), f"train.py:{line}": (workers, 26)}


@pytest.mark.live
def test_nothing_is_written_twice_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path / "train.py", TRAIN)
    *_, found = tune.tune([str(script), "model.pt"], batches=20, settings=1)
    assert isinstance(found, Tuned)
    assert (found.writes, found.tried) == (["model.pt", "log.txt"], [])
    assert Path("log.txt").read_text() == "begun"
    *said, found = tune.tune([str(script), "model.pt"], batches=20, settings=1, again=True)
    assert isinstance(found, Tuned)
    assert Path("log.txt").read_text() == "begun" * 3
    assert len(found.tried) == 1
    assert tune._made_at(found.plan).startswith("train.py:")
    assert tune._made_at(found.plan) != "train.py:15"
    assert found.tried[0].by_s > 0, found.tried[0].problem
    assert [str(text).partition(" ")[0] for text in said] == ["recording", "trying"]


@pytest.mark.live
def test_a_program_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path / "train.py", "raise ValueError('no data')")
    assert cli.main(["tune", str(script)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "minidl: tune: the program ended with exit code 1: ValueError: no data"
    )
    assert cli.main(["tune", "--json", str(tmp_path / "none.py")]) == 2
    assert "cannot read the script" in capsys.readouterr().err


def test_the_setting_survives_its_way_to_the_process() -> None:
    trial = Trial("t", 20, setting=LoaderSetting(2, cpus=1.5))
    facts = json.loads(json.dumps(tune.asdict(trial)))
    assert replace(trial, setting=LoaderSetting(**facts.pop("setting"))) == trial
