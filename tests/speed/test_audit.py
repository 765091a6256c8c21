"""The audit of real gloo ranks that train in DistributedDataParallel: each planted mistake is found, and no other."""

from __future__ import annotations

import gc
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import rank_runs
import torch
from subclassed_loaders import Repeating

import minidl
from minidl import cli
from minidl.speed.audit import Audit, audit
from minidl.speed.audit_rules import _ordinal, _unseen
from minidl.speed.findings import HARMLESS, MISTAKE, QUESTION, UNKNOWN
from minidl.speed.passes import Share, Subject
from minidl.tracefile import events as ev
from minidl.tracefile.format import TraceError
from minidl.tracefile.join import join
from minidl.tracefile.members import traces_in
from minidl.tracefile.reader import Trace, read_trace

pytestmark = pytest.mark.timeout(240)  # the first test runs all of rank_runs


@pytest.fixture(scope="module")
def place(rank_traces: Path) -> Path:
    return rank_traces


def traces(place: Path, name: str) -> list[Trace]:
    return [read_trace(path) for path in traces_in([place / name])]


def rules(report: Audit, level: str) -> list[str]:
    found = [*report.findings, *(f for subject in report.subjects for f in subject.findings)]
    return sorted(finding.rule for finding in found if finding.level == level)


EXPECTED: dict[str, tuple[list[str], list[str], list[str]]] = {
    "correct": ([], ["padding"], []),
    "four ranks": ([], ["padding"], []),
    "persistent": ([], [], []),
    "dropping": ([], ["dropped"], []),
    "no workers": ([], ["padding"], ["seeds"]),
    "in order": ([], ["no shuffling", "padding"], []),
    "forgotten sampler": (["forgotten DistributedSampler"], [], []),
    "forgotten set_epoch": (["forgotten set_epoch"], ["padding"], []),
    "persistent, forgotten set_epoch": (["forgotten set_epoch"], ["padding"], []),
    "set_epoch on one rank": (["set_epoch on some ranks"], ["padding"], []),
    "uneven": (["uneven batches"], [], ["set_epoch"]),
    "same seeds, and worker_init_fn reseeds": ([], ["padding"], []),
    "ended early": ([], ["padding"], []),
    "ended early, no workers": ([], ["padding"], ["seeds"]),
    "ended early, forgotten set_epoch": (["forgotten set_epoch"], ["padding"], []),
    "same seeds": (["same seeds on several ranks"], ["padding"], []),
    "seeded in each epoch": (["same seeds in each epoch"], ["padding"], []),
    "one share twice": (["wrong share"], [], []),
    "batches: correct": ([], [], ["overlap"]),
    "batches: forgotten sampler": (["forgotten DistributedSampler"], [], []),
    "batches: forgotten set_epoch": (["forgotten set_epoch"], [], ["overlap"]),
    "batches in turn: correct": ([], ["padding"], []),
    "observed: correct": ([], ["padding"], []),
    "observed: forgotten sampler": (["forgotten DistributedSampler"], [], []),
    "each rank its own data": ([], [], ["overlap"]),
    "at once: correct": ([], ["padding"], []),
    "at once: forgotten sampler": (["forgotten DistributedSampler"], [], []),
}
"""Scene -> rules of mistakes, of what is harmless, of what can't be told."""


def test_every_scene_is_expected_to_show_something() -> None:
    assert EXPECTED.keys() == rank_runs.SCENES.keys()


@pytest.mark.live
@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_planted_is_found_and_nothing_else(place: Path, name: str) -> None:
    """One trace a rank, or joined: the same."""
    report = audit(traces(place, name))
    assert tuple(rules(report, level) for level in (MISTAKE, HARMLESS, UNKNOWN)) == EXPECTED[name]


@pytest.mark.live
@pytest.mark.parametrize("name", ["correct", "forgotten set_epoch", "uneven", "same seeds", "persistent"])
def test_a_joined_trace_says_the_same(place: Path, tmp_path: Path, name: str) -> None:
    joined, _ = join([place / name], tmp_path / "joined.minidl")
    apart, together = (audit(each).to_json() for each in (traces(place, name), [read_trace(joined)]))
    for report in (apart, together):
        for loader in report["dataloaders"]:
            for one in loader["passes"]:
                del one["loader"]  # which has a number of its own in a joined trace
    assert apart == together


# --- Samplers that repeat samples by design ---------------------------------------------------------------------------
def of_ranks(place: Path, *ranks: dict[str, Any] | None, told: list[int] | None = None) -> Audit:
    """The audit of ranks, each with a loader of these options, in two epochs, one rank after the other; None = absent.

    told: the epoch that each rank begins with.
    """
    for rank, options in enumerate(ranks):
        group = mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(ranks)))
        if options is None:
            continue
        with group, minidl.trace(place / f"rank{rank}"):
            loader: Any = minidl.DataLoader(**{"batch_size": 4, **options})
            for epoch in range(2):
                if hasattr(loader.sampler, "set_epoch"):
                    loader.sampler.set_epoch(epoch + (told[rank] if told else 0))
                list(loader)
    return audit([read_trace(path) for path in traces_in([place])])


def repeating(place: Path, ranks: int, *present: int, **options: Any) -> Audit:
    """The audit of ranks with a `Repeating` sampler over 31 samples."""
    each = [{"dataset": range(31), "sampler": Repeating(31, rank, ranks, **options)} for rank in range(ranks)]
    return of_ranks(place, *(one if rank in (present or range(ranks)) else None for rank, one in enumerate(each)))


@pytest.mark.parametrize(
    ("ranks", "repeats", "most", "declared"),
    [(2, 3, 15, True), (2, 3, None, False), (4, 3, 7, False), (2, 2, 15, True), (3, 2, None, False), (4, 2, 7, True)]
    + [(2, 4, None, True), (3, 3, 10, True), (2, 32, 40, True), (4, 8, 9, True)],
)
def test_a_sampler_that_repeats_by_design_is_no_mistake(
    ranks: int, repeats: int, most: int | None, declared: bool, tmp_path: Path
) -> None:
    """Of all the places of its order or of the first ones, as timm's; told by an attribute, or by the order alone."""
    report = repeating(tmp_path, ranks, repeats=repeats, most=most, declared=declared)
    assert rules(report, MISTAKE) == []
    assert rules(report, HARMLESS) == ["repeated"]
    (finding,) = [f for f in report.subjects[0].findings if f.rule == "repeated"]
    assert f"came {repeats} times each, in a row in the order that Repeating deals out" in finding.text
    assert finding.text.endswith("All samples came" if most is None else "of 31 came to no rank")


def test_a_sampler_that_repeats_is_known_without_one_of_its_ranks(tmp_path: Path) -> None:
    report = repeating(tmp_path, 4, 0, 1, 3, repeats=3, most=None)
    assert (rules(report, MISTAKE), rules(report, HARMLESS)) == ([], ["repeated"])


WRONG: dict[str, dict[str, Any]] = {
    "each rank its own order": {"repeats": 3, "most": 15, "own": lambda rank: rank},
    "once each, and each rank its own order": {"repeats": 1, "most": None, "own": lambda rank: rank},
    "no share, and the whole order": {"repeats": 1, "most": None, "dealing": False, "declared": False},
    "no share, and the order's begin": {"repeats": 1, "most": 15, "dealing": False, "declared": False},
    "no share, but it repeats": {"repeats": 3, "most": 15, "dealing": False},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_of_shares_is_not_taken_for_one_that_repeats(name: str, tmp_path: Path) -> None:
    report = repeating(tmp_path, 2, **WRONG[name])
    assert "overlap" in rules(report, MISTAKE)
    assert "repeated" not in rules(report, HARMLESS)


def test_ranks_of_one_order_are_told_to_deal_it_out(tmp_path: Path) -> None:
    (subject,) = repeating(tmp_path, 2, **WRONG["no share, and the order's begin"]).subjects
    (finding,) = [f for f in subject.findings if f.rule == "overlap"]
    assert "15 samples came 2 times each: ranks 0, 1 had the same samples in the same order" in finding.text
    assert "attribute num_repeats" in finding.fix


def parallel(place: Path, dealt: list[tuple[int, int]], samples: int = 32, told: list[int] | None = None) -> Audit:
    """The audit of ranks, each of which is dealt a share of so many."""
    data = range(samples)
    samplers = [minidl.DistributedSampler(data, num_replicas=shares, rank=share) for share, shares in dealt]  # type: ignore[arg-type]
    return of_ranks(place, *({"dataset": data, "sampler": sampler} for sampler in samplers), told=told)


def test_ranks_that_hold_the_parts_of_one_model_may_have_one_share(tmp_path: Path) -> None:
    """Tensor parallelism: ranks 0 and 1 are one model, 2 and 3 another. Whether they are is not in the trace."""
    report = parallel(tmp_path, [(0, 2), (0, 2), (1, 2), (1, 2)], samples=33)
    assert rules(report, MISTAKE) == []
    assert rules(report, HARMLESS) == ["padding"]
    assert "shares of several ranks" in rules(report, QUESTION)
    (finding,) = [f for f in report.subjects[0].findings if f.rule == "shares of several ranks"]
    assert "2 shares to 4 ranks, each to 2 ranks (share 0 to 0, 1; share 1 to 2, 3)" in finding.text


def test_many_ranks_with_equal_counts_are_taken_together(tmp_path: Path) -> None:
    audited = of_ranks(tmp_path, *({"dataset": range(4 if rank == 3 else 8)} for rank in range(12)))
    assert "  0       2/8 of 11 ranks; 1/4 of rank 3" in audited.text()


def test_ranks_of_one_share_need_not_be_neighbours(tmp_path: Path) -> None:
    """Pipeline parallelism; or the sampler's rank is the local rank, on two machines. They look alike: it is asked."""
    report = parallel(tmp_path, [(0, 2), (1, 2), (0, 2), (1, 2)])
    assert rules(report, MISTAKE) == []
    (finding,) = [f for f in report.subjects[0].findings if f.level == QUESTION]
    assert "(share 0 to 0, 2; share 1 to 1, 3)" in finding.text


def test_which_rank_has_which_share_is_the_programs_choice(tmp_path: Path) -> None:
    report = parallel(tmp_path, [(1, 2), (0, 2)])
    assert (rules(report, MISTAKE), rules(report, QUESTION)) == ([], [])


@pytest.mark.parametrize(
    ("dealt", "told", "rule"),
    [([(0, 1), (0, 1)], None, "wrong share"), ([(0, 2), (0, 2), (0, 2), (1, 2)], None, "wrong share")]
    + [([(0, 2), (0, 2), (1, 2), (1, 2)], [0, 1, 0, 0], "set_epoch on some ranks")],
)
def test_other_shares_of_several_ranks_are_mistakes(dealt: Any, told: Any, rule: str, tmp_path: Path) -> None:
    assert rules(parallel(tmp_path, dealt, told=told), MISTAKE) == [rule]


class Subset(list[int]):
    """Samples that say, as Hugging Face's datasets do, which ones they are."""

    def __init__(self, samples: range) -> None:
        super().__init__(samples)
        self._fingerprint = repr(samples)


def seeded(seed: int) -> dict[str, Any]:
    return {"dataset": range(32), "shuffle": True, "generator": torch.Generator().manual_seed(seed)}


@pytest.mark.parametrize(
    ("ranks", "level"),
    [
        ([seeded(1), seeded(2)], MISTAKE),
        ([seeded(3), seeded(3)], QUESTION),  # as the parts of one model have them
        ([{"dataset": range(32)}] * 2, QUESTION),  # an evaluation on each rank
        ([{"dataset": range(32)}, {"dataset": range(32), "sampler": [*range(31, -1, -1)]}], MISTAKE),
        ([{"dataset": Subset(range(32))}, {"dataset": Subset(range(32, 64))}], UNKNOWN),
    ],
    ids=["shuffled apart", "shuffled alike", "in order", "orders of their own", "datasets of their own"],
)
def test_the_same_samples_without_shares_are_a_mistake_only_if_they_can_not_be_meant(
    ranks: list[dict[str, Any]], level: str, tmp_path: Path
) -> None:
    (subject,) = of_ranks(tmp_path, *ranks).subjects
    rule = {MISTAKE: "forgotten DistributedSampler", QUESTION: "the same samples on each rank", UNKNOWN: "overlap"}
    assert rule[level] in [f.rule for f in subject.findings if f.level == level]
    assert [f.level for f in subject.findings if f.rule in rule.values()] == [level]


@pytest.mark.parametrize(
    ("sampler", "level"),
    [
        ({"shuffle": True}, MISTAKE),
        ({"shuffle": False}, QUESTION),
        ({"even_batches": False}, QUESTION),
        (None, QUESTION),
    ],
    ids=["shuffled", "in order", "by the sampler's own word", "stream"],
)
def test_uneven_batches_are_a_mistake_only_where_batches_are_to_be_even(
    sampler: dict[str, Any] | None, level: str, tmp_path: Path
) -> None:
    ranks: list[dict[str, Any]] = []
    for rank, batch_size in enumerate((4, 2)):
        if sampler is None:
            ranks.append({"dataset": Stream(), "batch_size": batch_size})
        else:
            shares: Any = minidl.DistributedSampler(range(32), 2, rank, shuffle=sampler.get("shuffle", True))
            vars(shares).update(sampler)
            ranks.append({"dataset": range(32), "sampler": shares, "batch_size": batch_size})
    (subject,) = of_ranks(tmp_path, *ranks).subjects
    assert [f.level for f in subject.findings if f.rule == "uneven batches"] == [level]


class Stream(minidl.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


def test_what_ranks_saw_before_they_were_started_anew_is_not_judged(tmp_path: Path, monkeypatch: Any) -> None:
    """torchrun --max-restarts: rank 0 had begun an epoch when rank 1 failed; both begin again, with the same seed."""
    sampler: Any = minidl.DistributedSampler(range(32), num_replicas=2, rank=0)
    loader = minidl.DataLoader(range(32), batch_size=4, sampler=sampler)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with minidl.trace(tmp_path / "trace"):
        next(iter(loader))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            list(loader)
    report = audit([read_trace(tmp_path / "trace")])
    assert [(one.batches, one.whole) for one in report.subjects[0].passes[0]] == [(4, True), (4, True)]
    assert (rules(report, MISTAKE), rules(report, HARMLESS)) == ([], ["restarted"])


def test_a_forgotten_set_epoch_of_a_sampler_that_repeats_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Repeating, "set_epoch", lambda self, epoch: None)
    report = repeating(tmp_path, 2, repeats=3, most=15)
    assert rules(report, MISTAKE) == ["forgotten set_epoch"]


# --- What the ranks saw -----------------------------------------------------------------------------------------------
@pytest.mark.live
def test_the_ranks_saw_what_torchs_sampler_deals_out(place: Path) -> None:
    """Index by index: the audit's account against torch's own sampler, for each rank and epoch."""
    from torch.utils.data import DistributedSampler

    (subject,) = audit(traces(place, "four ranks")).subjects
    for rank in range(4):
        sampler: Any = DistributedSampler(rank_runs.Samples(33), num_replicas=4, rank=rank)
        for epoch, one in enumerate(subject.passes[rank]):
            sampler.set_epoch(epoch)
            assert one.indices == tuple(sampler)
            assert (one.batches, one.samples, one.complete) == (3, 9, True)


@pytest.mark.live
def test_what_the_samplers_were_told_goes_with_its_epoch(place: Path) -> None:
    for name in ("correct", "persistent"):
        (subject,) = audit(traces(place, name)).subjects
        for rank, passes in subject.passes.items():
            assert [one.share for one in passes] == [Share(epoch, rank, 2) for epoch in (0, 1)]


def one_rank(directory: Path, samples: int, epochs: int = 2, most: int = 99, **options: Any) -> Audit:
    """The audit of a rank that takes `most` batches an epoch, in this process."""
    dataset = rank_runs.Samples(samples)
    sampler: Any = minidl.DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = minidl.DataLoader(dataset, batch_size=2, sampler=sampler, **options)
    with minidl.trace(directory), loader:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for _ in itertools.islice(loader, most):
                pass
    return audit([read_trace(directory)])


@pytest.mark.live
def test_only_what_was_yielded_was_seen(tmp_path: Path) -> None:
    """Of 8 batches 3 are taken; the workers had made more."""
    report = one_rank(tmp_path / "trace", 16, most=3, num_workers=1, persistent_workers=True)
    (subject,) = report.subjects
    sampler: Any = minidl.DistributedSampler(rank_runs.Samples(16), num_replicas=1, rank=0)
    for epoch, one in enumerate(subject.passes[0]):
        sampler.set_epoch(epoch)
        assert (one.batches, one.samples, one.complete, one.indices) == (3, 6, False, tuple(sampler)[:6])
    assert report.mistakes == 0


@pytest.mark.live
def test_orders_that_are_alike_by_chance_are_no_mistake(tmp_path: Path) -> None:
    """There is one order of one sample."""
    report = one_rank(tmp_path / "trace", 1)
    (subject,) = report.subjects
    assert subject.passes[0][0].indices == subject.passes[0][1].indices == (0,)
    assert report.mistakes == 0


@pytest.mark.live
@pytest.mark.parametrize(
    ("sampler", "level"), [("random", MISTAKE), ("own", UNKNOWN), ("sequential", HARMLESS), ("advancing", "")]
)
def test_one_order_is_judged_by_the_sampler(tmp_path: Path, sampler: str, level: str) -> None:
    """A generator seeded anew shuffles alike; a sampler of the user's may mean to; one without shuffling should."""
    dataset, generator = rank_runs.Samples(12), torch.Generator()
    made: dict[str, dict[str, Any]] = {
        "random": {"shuffle": True, "generator": generator},
        "own": {"sampler": range(11, -1, -1)},
        "sequential": {},
        "advancing": {"shuffle": True},
    }
    loader = minidl.DataLoader(dataset, batch_size=2, **made[sampler])
    with minidl.trace(tmp_path / "trace"):
        for _ in range(2):
            generator.manual_seed(5)
            assert len(list(loader)) == 6
    (subject,) = audit([read_trace(tmp_path / "trace")]).subjects
    assert [f.level for f in subject.findings if f.rule != "seeds"] == ([level] if level else [])


@pytest.mark.live
def test_padding_is_told_by_its_place(place: Path) -> None:
    """33 samples on 4 ranks: the three that begin the order come again at its end."""
    from torch.utils.data import DistributedSampler

    first = [next(iter(DistributedSampler(rank_runs.Samples(33), num_replicas=4, rank=rank))) for rank in range(3)]
    (subject,) = audit(traces(place, "four ranks")).subjects
    (finding,) = [f for f in subject.findings if f.rule == "padding"]
    assert (
        f"3 samples came twice so that all ranks have the same number: {', '.join(map(str, sorted(first)))}"
        in finding.text
    )


@pytest.mark.live
def test_evidence_is_told(place: Path) -> None:
    def the(name: str) -> str:
        return next(f.text for s in audit(traces(place, name)).subjects for f in s.findings if f.level == MISTAKE)

    assert "31 of 31 samples were seen by several of 2 ranks (0, 1, 2, 3, 4, 5, ...)" in the("forgotten sampler")
    assert "RandomSampler" in the("forgotten sampler")
    assert "rank 0 had the same order in epochs 0 and 1 (and in 1 more pair)" in the("forgotten set_epoch")
    assert "its epoch was 0 both times" in the("forgotten set_epoch")
    assert "rank 0 5, rank 1 4" in the("uneven")
    assert "worker 0 of rank 0 and worker 0 of rank 1 have the same seed" in the("same seeds")
    assert "rank 0 epoch 0, rank 1 epoch 1" in the("set_epoch on one rank")
    assert "the sampler of rank 1 of 2 deals out share 0 of 2" in the("one share twice")


@pytest.mark.live
def test_the_uneven_rank_was_left_alone(place: Path) -> None:
    """The mistake is real: DistributedDataParallel failed on the rank that went on."""
    assert (place / "uneven" / "error0").exists()
    assert not (place / "uneven" / "error1").exists()


@pytest.mark.live
def test_a_loader_that_is_gone_and_the_next_one_are_two(tmp_path: Path) -> None:
    """A script makes one loader after the other; what is wrong with one is not said of the other."""
    with minidl.trace(tmp_path / "trace"):
        for dataset in (rank_runs.Samples(4), rank_runs.AtOnce(4)):
            assert len(list(minidl.DataLoader(dataset, batch_size=2))) == 2
            del dataset
            gc.collect()
    subjects = audit([read_trace(tmp_path / "trace")]).subjects
    assert [subject.name for subject in subjects] == ["DataLoader of Samples", "DataLoader of AtOnce"]


# --- What is missing --------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_a_rank_that_is_missing_is_said(place: Path) -> None:
    report = audit(traces(place, "four ranks")[:3])
    assert rules(report, UNKNOWN) == ["ranks"]
    assert "the traces of 3 are missing" in report.findings[0].text
    assert report.mistakes == 0


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ([0, 2], "in epoch 3, 7 samples of 9 came to no rank: 1, 3, 4, 5, 6, 7, ..."),
        ([0, 2, 8], "in epoch 3, 6 samples of 9 came to no rank: 1, 3, 4, 5, 6, 7"),
        ([0, 1, 2, 3, 4, 6, 7, 8, 99], "in epoch 3, 1 sample of 9 came to no rank: index 5"),
    ],
)
def test_samples_that_came_to_no_rank_are_counted_and_named(seen: list[int], text: str) -> None:
    subject = Subject("D", facts={0: {"dataset_length": 9, "batch_size": 2}})
    (finding,) = _unseen(subject, 3, 2, Counter(seen))
    assert finding.text.startswith(text)
    assert not list(_unseen(subject, 3, 2, Counter(range(9))))


def test_one_rank_twice_is_refused(tmp_path: Path) -> None:
    parallel(tmp_path, [(0, 2), (1, 2)])
    one = read_trace(tmp_path / "rank0")
    with pytest.raises(TraceError, match="audit: two traces of rank 0"):
        audit([one, one])


@pytest.mark.live
def test_one_rank_alone_can_be_audited(place: Path) -> None:
    report = audit(traces(place, "forgotten set_epoch")[:1])
    assert rules(report, MISTAKE) == ["forgotten set_epoch"]


@pytest.mark.live
def test_overwritten_events_are_said(place: Path) -> None:
    one, other = traces(place, "correct")
    one.processes[0].whole_from = 1
    assert rules(audit([one, other]), UNKNOWN) == ["overwritten"]


@pytest.mark.live
def test_no_order_no_verdict(place: Path) -> None:
    """A trace without digests, as earlier ones are, is compared by first indices; without either, it is said."""
    both = traces(place, "batches: forgotten set_epoch")
    for trace in both:
        rows = trace.events["code"] == ev.SAMPLER_NEXT[1]
        trace.events["z"][rows] = 0
    assert rules(audit(both), MISTAKE) == ["forgotten set_epoch"]
    for trace in both:
        rows = trace.events["code"] == ev.SAMPLER_NEXT[1]
        trace.events["y"][rows] = -1
    assert rules(audit(both), UNKNOWN) == ["overlap", "set_epoch"]


@pytest.mark.parametrize(
    ("number", "word"), [(0, "first"), (3, "4th"), (10, "11th"), (20, "21st"), (22, "23rd"), (111, "112th")]
)
def test_ordinals(number: int, word: str) -> None:
    assert _ordinal(number) == word


# --- The command ------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_the_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(place / "correct")]) == 0
    out = capsys.readouterr().out
    assert "2 ranks of 2, 1 DataLoader" in out
    assert "rank 0        rank 1" in out
    assert out.endswith("no mistake found\n")
    assert cli.main(["audit", str(place / "same seeds" / "rank0"), str(place / "same seeds" / "rank1")]) == 1
    assert "fix: torch.manual_seed(seed + rank)" in capsys.readouterr().out


@pytest.mark.live
def test_a_finding_is_allowed_by_its_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(place / "same seeds")
    assert cli.main(["audit", run, "--allow", "same seeds on several ranks"]) == 0
    out = capsys.readouterr().out
    assert "allowed (same seeds on several ranks): worker 0" in out
    assert "fix:" not in out
    assert cli.main(["audit", run, "--allow", "overlap", "--allow", "no such"]) == 2
    said = capsys.readouterr().err
    assert "no finding is called 'no such': give one of different sampler seeds, drawn twice" in said


@pytest.mark.live
def test_the_command_for_machines(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--json", str(place / "uneven")]) == 1
    report = json.loads(capsys.readouterr().out)
    (loader,) = report["dataloaders"]
    assert (report["mistakes"], report["world_size"], report["ranks"]) == (1, 2, [0, 1])
    assert [(p["rank"], p["batches"], p["complete"]) for p in loader["passes"]] == [(0, 5, False), (1, 4, True)]
    assert {f["rule"] for f in loader["findings"]} == {"uneven batches", "set_epoch"}
