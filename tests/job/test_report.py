"""The headline of a job: on made jobs with one planted problem each, and on recorded ones of real gloo ranks."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted_jobs
import pytest
from made_jobs import FETCH, STEP_TAKES, MadeJob

from minidl import cli
from minidl.hang.finding import RunOutcome
from minidl.hang.headline.uneven import LastEpoch
from minidl.job import digests
from minidl.job.digests import read_job
from minidl.job.report import JobReport, program
from minidl.merge import merge
from minidl.tracefile.reader import read_trace

SLOW = 60_000  # µs of a fetch: its step hides 20,000 of it
WAITED = {"outcome": "cut", "what": "cut: it waits", "waits_for_others": True, "over": False, "last": LastEpoch(0, 60)}
GONE = {"outcome": "cut", "what": "cut: ...", "over": False, "last": LastEpoch(0, 12), "taken": 12, "ended": 5}
SILENT = {"outcome": "cut", "what": "cut: the recording ends before the program iterated over a DataLoader",
          "taken": 0, "events": 0}  # fmt: skip


IN_TURN = "slow: 98% of the job's steps wait for one rank, another one each time"


def node(rank: int) -> str:
    return f"node{rank // 4}"


def late(when: Callable[[int, int], object], ranks: int = 8, steps: int = 60, **more: Any) -> MadeJob:
    """A job in which a fetch takes long if `when` says so, of a rank and a step."""
    return MadeJob(ranks, steps, fetch=lambda rank, step: SLOW if when(rank, step) else FETCH, **more)


def longer(times: Callable[[int, int], int], **more: Any) -> MadeJob:
    """A job in which a rank's own step takes so many times more than the others'."""
    return MadeJob(step=lambda rank, step: STEP_TAKES * (1 + times(rank, step)), **more)


MADE = {
    "none": (MadeJob(), "fine: no straggler; all ranks: not input-bound"),
    "all alike": (late(lambda rank, step: True), "slow: no straggler; all ranks: supply-bound"),
    "slow shard": (
        late(lambda rank, step: rank == 3 and step % 2),
        "slow: 50% of the job's steps wait for rank 3: its worker 1 takes 15 times as long for a batch",
    ),
    "slow storage": (
        late(lambda rank, step: rank == 3, nodes=node),
        "slow: 98% of the job's steps wait for rank 3 (node0): its workers take 15 times as long for a batch",
    ),
    "since the middle": (
        late(lambda rank, step: rank == 3 and step >= 30),
        "slow: 50% of the job's steps wait for rank 3, since batch 30 of epoch 0: its workers take 15 times",
    ),
    "since the middle, and a little late before": (
        late(lambda rank, step: rank == 3 and step >= 30,
             step=lambda rank, step: STEP_TAKES + 6_000 * (rank == 3 and 25 <= step < 30)),
        "slow: 58% of the job's steps wait for rank 3, since batch 30 of epoch 0: its workers take 15 times",
    ),
    "slow node": (
        MadeJob(12, fetch=lambda rank, step: SLOW + rank if 4 <= rank < 8 else FETCH, nodes=node),
        "slow: 98% of the job's steps wait for node1 (ranks 4, 5, 6, ...): their workers take 15 times as long",
    ),
    "ranks of a node in turn": (
        late(lambda rank, step: rank == 4 + step % 4, 12, nodes=node),
        "slow: 98% of the job's steps wait for node1 (ranks 4, 5, 6, ...): some of their batches take long",
    ),
    "two ranks of a node of four": (
        late(lambda rank, step: rank in (4, 5), nodes=node),
        "slow: 98% of the job's steps wait for 2 ranks (4, 5): their workers take 15 times as long",
    ),
    "two ranks at once": (
        late(lambda rank, step: rank in (2, 5)),
        "slow: 98% of the job's steps wait for 2 ranks (2, 5): their workers take 15 times as long",
    ),
    "two ranks in turn, of eight": (late(lambda rank, step: rank == (2, 5)[step % 2]), IN_TURN),
    "ranks that do not meet": (
        late(lambda rank, step: rank == 3, meet=False, seen="",
             step=lambda rank, step: STEP_TAKES - 6_000 * (rank == 3)),
        "slow: no straggler; all ranks: supply-bound",
    ),
    "ranks that begin apart": (
        MadeJob(4, 24, fetch=lambda rank, step: 100_000 if rank == 1 and step % 2 else FETCH,
                begins=(0, 2_000_000, 0, 0)),
        "slow: 50% of the job's steps wait for rank 1: its worker 1",
    ),
    "moving": (
        late(lambda rank, step: random.Random(step).randrange(8) == rank), f"{IN_TURN}, and mostly for their batches"
    ),
    "two in turn": (late(lambda rank, step: step // 3 % 2 == rank, 2), IN_TURN),
    "computes": (
        longer(lambda rank, step: 2 * (rank == 5)),
        "slow: 98% of the job's steps wait for rank 5: its own step takes 40.0 ms longer (forward, 3 times as long)",
    ),
    "checkpoints": (
        longer(lambda rank, step: 9 * (rank == 0 and step % 10 == 9)),
        "slow: 10% of the job's steps wait for rank 0: its own step takes 180 ms longer",
    ),
    "an accident": (longer(lambda rank, step: 90 * (rank == 0 and step == 9)), "fine: no"),
    "twice the data": (
        MadeJob(
            fetch=lambda rank, step: SLOW * (1 + (rank == 2)), samples=lambda rank: 32 * (1 + (rank == 2)),
            step=lambda rank, step: STEP_TAKES * (1 + (rank == 2)),
        ),
        "slow: 98% of the job's steps wait for rank 2: it loads 2 times the data of other ranks (64 samples a batch",
    ),
    "fewer workers": (
        late(lambda rank, step: rank == 0, facts={0: {"workers": 1}}),
        "slow: 98% of the job's steps wait for rank 0: its workers take 15 times as long",
    ),
    "meets in backward": (
        longer(lambda rank, step: 2 * (rank == 5), seen="backward"),
        "slow: 98% of the job's steps wait for rank 5: its own step takes 40.0 ms longer",
    ),
    "meets unseen": (
        late(lambda rank, step: rank == 3, seen=""),
        "slow: 98% of the job's steps wait for rank 3: its workers take 15 times as long",
    ),
    "computes, unseen": (longer(lambda rank, step: 2 * (rank == 5), seen=""), "fine: no str"),
    "in turn for a while": (
        late(lambda rank, step: (0, 1, 0, 0, 2, 0)[step // 10] == rank, 3),
        "slow: 98% of the job's steps wait for one rank, most often rank 0, and mostly for their batches",
    ),
    "by chance": (
        late(lambda rank, step: (2, 0, 2, 2, 1, 2)[step % 6] == rank and step % 5, 3, 24),
        "slow: 79% of the job's steps wait for one rank, most often rank 2",
    ),
    "dies": (
        MadeJob(4, facts=dict.fromkeys((0, 1, 2), WAITED) | {3: GONE}),
        "died, rank 3: nothing is recorded after its batch 12: it was killed, or its machine is gone; 3 other ranks",
    ),
    "hangs": (
        MadeJob(4, facts=dict.fromkeys((0, 1, 2), WAITED) | {3: GONE | {"outcome": "hung", "what": "hung for 9 s: x"}}),
        "hung for 9 s, rank 3: x; 3 other ranks waited for it",
    ),
    "never joins": (
        MadeJob(4, steps=0, missing=(3,), facts=dict.fromkeys((0, 1, 2), WAITED)),
        "hung: rank 3 of 4 left no trace: never started, or recorded elsewhere; the other ranks took 0 batches",
    ),
    "is there, and never joins": (
        MadeJob(3, steps=0, facts=dict.fromkeys((0, 2), WAITED | {"taken": 0, "events": 0, "outcome": "error"})
                | {1: {"taken": 0, "events": 0}}),
        "hung: rank 1 took no batch and did not join the others: 2 other ranks waited in vain, and took none",
    ),
    "one raises, and the launcher ends another before its first batch": (
        MadeJob(3, steps=0, facts={0: WAITED | SILENT | {"last": LastEpoch(0, 0)}, 2: SILENT | {"over": False},
                                   1: SILENT | {"outcome": "error", "what": "error: no such file", "events": 5}}),
        "error, rank 1: no such file; 1 other rank waited for it",
    ),
    "does not join, and the launcher ends those that still wait": (
        MadeJob(4, steps=0, facts={0: WAITED | SILENT | {"outcome": "error"}, 1: SILENT, 2: SILENT | {"over": False},
                                   3: SILENT | {"over": False}}),
        "hung: rank 1 took no batch and did not join the others: 3 other ranks waited in vain, and took none"
    ),
    "does not join, and the launcher ends all": (
        MadeJob(3, steps=0, facts={0: WAITED | SILENT | {"outcome": "error"}, 1: SILENT | {"over": False},
                                   2: SILENT | {"over": False}}),
        "hung: ranks 1, 2 took no batch, and one of them or more did not join the others: another rank waited in vain"
    ),
    "is killed in its first sample": (
        MadeJob(2, steps=0, facts={0: WAITED | SILENT | {"outcome": "error"}, 1: GONE | {"taken": 0}}),
        "died, rank 1: nothing is recorded after its batch 0: it was killed, or its machine is gone; 1 other rank"
    ),
    "recorded nothing": (
        MadeJob(3, 0, facts=dict.fromkeys(range(3), GONE | {"events": 0, "taken": 0})),
        "cut: no rank has recorded an iterator of a DataLoader",
    ),
    "not given": (MadeJob(4, missing=(3,)), "fine: no straggler"),
    "uneven": (
        MadeJob(4, facts={0: {"taken": 59, "last": LastEpoch(0, 59, True)}, 1: WAITED, 2: WAITED, 3: WAITED}),
        "hung: rank 1 waited in its step after batch 60 of epoch 0; rank 0 had only 59",
    ),
    "an error is no wait": (
        MadeJob(
            2, facts={0: {"outcome": "error", "what": "error: ValueError", "last": LastEpoch(0, 60)},
                      1: {"taken": 4, "last": LastEpoch(0, 4, True)}}
        ),
        "error, rank 0: ValueError",
    ),
    "one batch, and a rank elsewhere": (
        MadeJob(2, 1, missing=(1,), facts={0: {"over": True}}), "fine: one rank alone"
    ),
    "nothing yet": (
        MadeJob(4, 0, facts={rank: {"events": 0, "running": True, "outcome": "running"} for rank in range(4)}),
        "running: no rank has recorded an iterator of a DataLoader yet",
    ),
    "a rank without iterators": (
        MadeJob(4, 0, facts={3: GONE | {"events": 0, "taken": 0}}), "died, rank 3: nothing is recorded after its"
    ),
    "killed as a whole": (
        MadeJob(4, facts=dict.fromkeys(range(4), GONE)), "cut: all 4 recordings end after 12 batches"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_the_headline_of_a_made_job_names_what_was_planted(kind: str) -> None:
    job, begins = MADE[kind]
    report = JobReport(job.record())
    assert report.finding.sentence.startswith(begins), report.finding.sentence
    assert len(report.finding.title) <= 160
    assert len(report.text().splitlines()) < 30


def test_a_straggler_that_moves_by_lot_is_not_taken_for_one_that_stays() -> None:
    named = 0
    for seed in range(60):
        dice = random.Random(seed)
        ranks, steps, each = dice.choice((2, 3, 4, 8)), dice.choice((24, 60, 120)), dice.choice((1, 2, 3))
        late = [dice.randrange(ranks) for _ in range(steps)]
        much = [dice.choice((SLOW, SLOW * 4)) for _ in range(steps)]
        job = MadeJob(ranks, steps, fetch=lambda r, s, who=late, us=much, n=each: us[s] if who[s // n] == r else FETCH)
        named += "wait for rank" in JobReport(job.record()).finding.sentence
    assert named <= 2


def test_a_thousand_ranks_fit_a_screen_and_the_straggler_comes_first() -> None:
    report = JobReport(MadeJob(1024, 50, fetch=lambda rank, step: SLOW if rank == 37 else FETCH).record())
    lines = report.text().splitlines()
    assert "wait for rank 37: " in lines[0]
    assert len(lines) < 24
    rows = [line.split()[0] for line in lines if line[:10].strip().isdecimal()]
    assert rows[0] == "37"
    assert lines[-1] == "  the other 1021 ranks were late in at most 0 steps each; --rank N shows one"


def test_the_next_step_names_a_rank_that_is_there() -> None:
    job = MadeJob(5, fetch=lambda rank, step: SLOW, missing=(0, 1, 2)).record()
    assert JobReport(job).finding.next_step == "minidl summary made --rank 3 says more"
    said = JobReport(replace(job, problems=("x",) * 8)).lacks
    assert said[6] == "2 more problems"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("minidl run --trace job/rank-1 train.py", "minidl run train.py"),
        ("python /lib/ray/_private/workers/default_worker.py --worker-id=4920", ""),
        ("python train.py --trace=x 3", "python train.py 3"),
    ],
)
def test_what_each_rank_has_of_its_own_is_no_difference(command: str, said: str) -> None:
    assert program(command) == said


def test_what_differs_between_ranks_is_said() -> None:
    facts = {0: {"command": "other.py", "workers": 4}, 2: {"problem": "x is truncated"}, 3: {"began": 31 * 10**9}}
    assert JobReport(MadeJob(4, facts=facts, missing=(1,)).record()).lacks == (
        "no trace of 1 rank of 4: 1",
        "rank 2: x is truncated",
        "the ranks have different commands: rank 0: other.py; the others: train.py",
        "the ranks have different numbers of workers: rank 0: 4; the others: 2",
        "rank 3 began 31.0 s after the others, by the time of day",
    )
    own = {rank: {"command": f"minidl run --trace job/rank-{rank} train.py"} for rank in range(2)}
    assert JobReport(MadeJob(2, facts=own).record()).lacks == ()


def test_a_rank_whose_manifest_names_no_node_is_on_none_of_its_own() -> None:
    report = JobReport(MadeJob(2, facts={0: {"node": "node4"}, 1: {"node": ""}}).record())
    assert " nodes" not in report.text()
    (numbered,) = {table.facts.node for table in digests.whole_job("job", report.record).ranks}
    assert numbered == ""


# --- Recorded ---------------------------------------------------------------------------------------------------------
RECORDED = {
    "shard": "of the job's steps wait for rank 1: its worker 1 takes",
    "node": "of the job's steps wait for node1 (ranks 2, 3): their workers take",
    "compute": "of the job's steps wait for rank 1: its own step takes",
    "twice": "of the job's steps wait for rank 1: it loads 2 times the data of other ranks",
    "dies": "died, rank 1: ",
    "never starts": "hung: rank 1 of 3 left no trace",
    "never joins": " did not join the others: ",  # the launcher may end the third rank before it says anything
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("planted")
    planted_jobs.record(place, [*RECORDED])
    return place


def report_on(place: Path) -> JobReport:
    job = read_job([place])
    assert job is not None
    return JobReport(job)


@pytest.mark.live
@pytest.mark.parametrize("kind", RECORDED)
def test_the_headline_of_a_recorded_job_names_what_was_planted(planted: Path, kind: str) -> None:
    report, says = report_on(planted / kind), RECORDED[kind]
    finding = report.finding
    sentence = re.sub(", since batch [0-9]+ of epoch [0-9]+", "", finding.sentence)  # a busy machine's first batches
    assert says in sentence, report.text()
    assert "minidl summary --rank" not in finding.next_step  # it says which job


@pytest.mark.live
def test_commands_take_a_job_and_a_rank_of_it(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(planted / "shard")
    for whole in ([job], [f"{job}/rank-0", f"{job}/rank-1"]):
        assert cli.main(["summary", *whole]) == cli.OK
        assert "wait for rank 1" in capsys.readouterr().out.partition("\n")[0]
    assert cli.main(["summary", job, "--rank", "1"]) == cli.OK
    alone = capsys.readouterr().out
    assert cli.main(["summary", f"{job}/rank-1"]) == cli.OK
    assert capsys.readouterr().out == alone
    assert cli.main(["summary", job, "--rank", "9"]) == cli.USAGE
    assert "it has 0, 1, 2" in capsys.readouterr().err
    assert cli.main(["doctor", "--no-py-spy", str(planted / "dies")]) == cli.FOUND
    assert "it was killed" in (said := capsys.readouterr().out) or "died" in said


@pytest.mark.live
def test_a_joined_trace_is_judged_as_its_ranks_are(planted: Path, tmp_path: Path) -> None:
    joined = digests.job_of(read_trace(merge([planted / "shard"], tmp_path / "joined")))
    assert joined is not None
    assert JobReport(joined).finding.sentence == report_on(planted / "shard").finding.sentence


@pytest.mark.live
def test_what_cannot_be_read_is_said_and_the_rest_is_read(planted: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(planted / "shard", tmp_path / "job"))
    events = next(one for one in (place / "rank-0").glob("*.events") if one.stat().st_size > 40_000)
    os.truncate(events, events.stat().st_size // 2)
    shutil.rmtree(place / "rank-2")
    (place / "rank-2").mkdir()
    report = report_on(place)
    assert any("rank-2 is an empty directory" in text for text in report.lacks)
    assert any("truncated" in text for text in report.lacks)
    assert report.finding.outcome is not RunOutcome.UNKNOWN
