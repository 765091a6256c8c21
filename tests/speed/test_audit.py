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
from torch.utils.data import DistributedSampler

import minidl
from minidl import cli
from minidl.speed.audit import Audit, audit
from minidl.speed.audit_rules import _ordinal, _unseen
from minidl.speed.findings import HARMLESS, MISTAKE, QUESTION, UNKNOWN, AuditFinding
from minidl.speed.passes import Share, Subject
from minidl.tracefile import events as ev
from minidl.tracefile.format import TraceError
from minidl.tracefile.join import join
from minidl.tracefile.members import traces_in
from minidl.tracefile.reader import Trace, read_trace

pytestmark = pytest.mark.timeout(240)  # the first test runs all of rank_runs


def traces(place: Path, name: str) -> list[Trace]:
    return [read_trace(path) for path in traces_in([place / name])]


def found(report: Audit) -> list[AuditFinding]:
    return [*report.findings, *(one for subject in report.subjects for one in subject.findings)]


def rules(report: Audit, level: str) -> list[str]:
    return sorted(finding.rule for finding in found(report) if finding.level == level)


def the(report: Audit, rule: str) -> AuditFinding:
    (finding,) = [one for one in found(report) if one.rule == rule]
    return finding


EXPECTED: dict[str, tuple[list[str], list[str], list[str]]] = {
    "persistent": ([], [], []),
    "dropping": ([], ["dropped"], []),
    "no workers": ([], ["padding"], ["seeds"]),
    "in order": ([], ["no shuffling", "padding"], []),
    "forgotten sampler": (["forgotten DistributedSampler"], [], []),
    "forgotten set_epoch": (["forgotten set_epoch"], ["padding"], []),
    "persistent, forgotten set_epoch": (["forgotten set_epoch"], ["padding"], []),
    "set_epoch on one rank": (["set_epoch on some ranks"], ["padding"], []),
    "uneven": (["uneven batches"], [], ["set_epoch"]),
    "ended early, no workers": ([], ["padding"], ["seeds"]),
    "ended early, forgotten set_epoch": (["forgotten set_epoch"], ["padding"], []),
    "same seeds": (["same seeds on several ranks"], ["padding"], []),
    "seeded in each epoch": (["same seeds in each epoch"], ["padding"], []),
    "one share twice": (["wrong share"], [], []),
    "batches: correct": ([], [], ["overlap"]),
    "batches: forgotten sampler": (["forgotten DistributedSampler"], [], []),
    "batches: forgotten set_epoch": (["forgotten set_epoch"], [], ["overlap"]),
    "observed: forgotten sampler": (["forgotten DistributedSampler"], [], []),
    "each rank its own data": ([], [], ["overlap"]),
    "at once: forgotten sampler": (["forgotten DistributedSampler"], [], []),
}
"""Scene -> rules of mistakes, of what is harmless, of what can't be told; of other scenes only the padding is told."""


@pytest.mark.live
@pytest.mark.parametrize("name", rank_runs.SCENES)
def test_what_was_planted_is_found_and_nothing_else(rank_traces: Path, name: str) -> None:
    report = audit(traces(rank_traces, name))
    assert tuple(rules(report, level) for level in (MISTAKE, HARMLESS, UNKNOWN)) == EXPECTED.get(
        name, ([], ["padding"], [])
    )


@pytest.mark.live
@pytest.mark.parametrize("name", ["forgotten set_epoch", "uneven", "same seeds", "persistent"])
def test_a_joined_trace_says_the_same(rank_traces: Path, tmp_path: Path, name: str) -> None:
    joined, _ = join([rank_traces / name], tmp_path / "joined.minidl")
    without_numbers = {"object_hook": lambda facts: {key: facts[key] for key in facts if key != "loader"}}
    apart, together = (
        json.loads(json.dumps(audit(each).to_json()), **without_numbers)
        for each in (traces(rank_traces, name), [read_trace(joined)])
    )
    assert apart == together


@pytest.mark.live
@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("forgotten sampler", "forgotten DistributedSampler",
         ["31 of 31 samples were seen by several of 2 ranks (0, 1, 2, 3, 4, 5, ...)", "RandomSampler"]),
        ("forgotten set_epoch", "forgotten set_epoch",
         ["rank 0 had the same order in epochs 0 and 1 (and in 1 more pair)", "its epoch was 0 both times"]),
        ("uneven", "uneven batches", ["rank 0 5, rank 1 4"]),
        ("same seeds", "same seeds on several ranks", ["worker 0 of rank 0 and worker 0 of rank 1 have the same seed"]),
        ("set_epoch on one rank", "set_epoch on some ranks", ["rank 0 epoch 0, rank 1 epoch 1"]),
        ("one share twice", "wrong share", ["the sampler of rank 1 of 2 deals out share 0 of 2"]),
    ],
)  # fmt: skip
def test_evidence_is_told(rank_traces: Path, name: str, rule: str, words: list[str]) -> None:
    text = the(audit(traces(rank_traces, name)), rule).text
    assert [one for one in words if one not in text] == []


# --- Ranks in this process --------------------------------------------------------------------------------------------
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
    assert (rules(report, MISTAKE), rules(report, HARMLESS)) == ([], ["repeated"])
    text = the(report, "repeated").text
    assert f"came {repeats} times each, in a row in the order that Repeating deals out" in text
    assert text.endswith("All samples came" if most is None else "of 31 came to no rank")


def test_a_sampler_that_repeats_is_known_without_one_of_its_ranks(tmp_path: Path) -> None:
    report = repeating(tmp_path, 4, 0, 1, 3, repeats=3, most=None)
    assert (rules(report, MISTAKE), rules(report, HARMLESS)) == ([], ["repeated"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "each rank its own order": ({"repeats": 3, "most": 15, "own": lambda rank: rank}, ""),
    "once each, and each rank its own order": ({"repeats": 1, "most": None, "own": lambda rank: rank}, ""),
    "no share, and the whole order": ({"repeats": 1, "most": None, "dealing": False, "declared": False}, ""),
    "no share, and the order's begin": (
        {"repeats": 1, "most": 15, "dealing": False, "declared": False},
        "15 samples came 2 times each: ranks 0, 1 had the same samples in the same order",
    ),
    "no share, but it repeats": ({"repeats": 3, "most": 15, "dealing": False}, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_of_shares_is_not_taken_for_one_that_repeats(name: str, tmp_path: Path) -> None:
    options, words = WRONG[name]
    report = repeating(tmp_path, 2, **options)
    assert "repeated" not in rules(report, HARMLESS)
    finding = the(report, "overlap")
    assert finding.level == MISTAKE
    assert words in finding.text
    assert not words or "attribute num_repeats" in finding.fix


def test_a_forgotten_set_epoch_of_a_sampler_that_repeats_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Repeating, "set_epoch", lambda self, epoch: None)
    assert rules(repeating(tmp_path, 2, repeats=3, most=15), MISTAKE) == ["forgotten set_epoch"]


def parallel(place: Path, dealt: list[tuple[int, int]], told: list[int] | None = None) -> Audit:
    """The audit of ranks, each of which is dealt a share of so many, of 33 samples."""
    shares: list[Any] = [minidl.DistributedSampler(range(33), num_replicas=of, rank=share) for share, of in dealt]  # type: ignore[arg-type]
    return of_ranks(place, *({"dataset": range(33), "sampler": sampler} for sampler in shares), told=told)


@pytest.mark.parametrize(
    ("dealt", "told", "mistakes", "question"),
    [
        ([(0, 2), (0, 2), (1, 2), (1, 2)], None, [], "2 shares to 4 ranks, each to 2 ranks (share 0 to 0, 1; share 1 "),
        ([(0, 2), (1, 2), (0, 2), (1, 2)], None, [], "(share 0 to 0, 2; share 1 to 1, 3)"),
        ([(1, 2), (0, 2)], None, [], None),
        ([(0, 1), (0, 1)], None, ["wrong share"], None),
        ([(0, 2), (0, 2), (0, 2), (1, 2)], None, ["wrong share"], None),
        ([(0, 2), (0, 2), (1, 2), (1, 2)], [0, 1, 0, 0], ["set_epoch on some ranks"], None),
    ],
    ids=["tensor parallelism", "pipeline parallelism, or local ranks", "shares in another order", "one share",
         "shares of unequal numbers of ranks", "an epoch of its own"],
)  # fmt: skip
def test_ranks_that_hold_the_parts_of_one_model_may_have_one_share(
    dealt: list[tuple[int, int]], told: list[int] | None, mistakes: list[str], question: str | None, tmp_path: Path
) -> None:
    """Whether they are one model is not in the trace: it is asked."""
    report = parallel(tmp_path, dealt, told)
    assert rules(report, MISTAKE) == mistakes
    if not mistakes:
        assert (rules(report, HARMLESS), len(rules(report, QUESTION))) == (["padding"], question is not None)
    if question is not None:
        assert question in the(report, "shares of several ranks").text


def test_many_ranks_with_equal_counts_are_taken_together(tmp_path: Path) -> None:
    audited = of_ranks(tmp_path, *({"dataset": range(4 if rank == 3 else 8)} for rank in range(12)))
    assert "  0       2/8 of 11 ranks; 1/4 of rank 3" in audited.text()


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
    assert [(f.rule, f.level) for f in subject.findings if f.rule in rule.values()] == [(rule[level], level)]


class Stream(minidl.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


@pytest.mark.parametrize(
    ("sampler", "level"),
    [
        ({"shuffle": True}, MISTAKE),
        ({"shuffle": False}, QUESTION),
        ({"shuffle": True, "even_batches": False}, QUESTION),
        (None, QUESTION),
    ],
    ids=["shuffled", "in order", "by the sampler's own word", "stream"],
)
def test_uneven_batches_are_a_mistake_only_where_batches_are_to_be_even(
    sampler: dict[str, Any] | None, level: str, tmp_path: Path
) -> None:
    ranks: list[dict[str, Any]] = [{"dataset": Stream(), "batch_size": 4}, {"dataset": Stream(), "batch_size": 2}]
    for rank, options in enumerate(ranks if sampler else ()):
        shares: Any = minidl.DistributedSampler(range(32), 2, rank)  # type: ignore[arg-type]
        vars(shares).update(sampler or {})
        options |= {"dataset": range(32), "sampler": shares}
    assert the(of_ranks(tmp_path, *ranks), "uneven batches").level == level


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


def test_orders_that_are_alike_by_chance_are_no_mistake(tmp_path: Path) -> None:
    """There is one order of one sample."""
    sampler: Any = minidl.DistributedSampler(range(1), 1, 0)  # type: ignore[arg-type]
    report = of_ranks(tmp_path, {"dataset": range(1), "sampler": sampler})
    assert [one.indices for one in report.subjects[0].passes[0]] == [(0,), (0,)]
    assert report.mistakes == 0


@pytest.mark.parametrize(
    ("options", "level"),
    [({"shuffle": True, "generator": torch.Generator()}, MISTAKE), ({"sampler": range(11, -1, -1)}, UNKNOWN)]
    + [({}, HARMLESS), ({"shuffle": True}, "")],
    ids=["a generator that is seeded anew", "a sampler of the user's", "without shuffling", "shuffled"],
)
def test_one_order_is_judged_by_the_sampler(tmp_path: Path, options: dict[str, Any], level: str) -> None:
    loader = minidl.DataLoader(rank_runs.Samples(12), batch_size=2, **options)
    with minidl.trace(tmp_path / "trace"):
        for _ in range(2):
            options.get("generator", torch.Generator()).manual_seed(5)
            assert len(list(loader)) == 6
    (subject,) = audit([read_trace(tmp_path / "trace")]).subjects
    assert [f.level for f in subject.findings if f.rule != "seeds"] == ([level] if level else [])


def test_a_loader_that_is_gone_and_the_next_one_are_two(tmp_path: Path) -> None:
    """A script makes one loader after the other; what is wrong with one is not said of the other."""
    with minidl.trace(tmp_path / "trace"):
        for dataset in (rank_runs.Samples(4), rank_runs.AtOnce(4)):
            assert len(list(minidl.DataLoader(dataset, batch_size=2))) == 2
            del dataset
            gc.collect()
    subjects = audit([read_trace(tmp_path / "trace")]).subjects
    assert [subject.name for subject in subjects] == ["DataLoader of Samples", "DataLoader of AtOnce"]


# --- What the ranks saw -----------------------------------------------------------------------------------------------
@pytest.mark.live
def test_the_ranks_saw_what_torchs_sampler_deals_out(rank_traces: Path) -> None:
    """Index by index: the audit's account against torch's own sampler, for each rank and epoch.

    33 samples on 4 ranks: the three that begin the order come again at its end.
    """
    report, first = audit(traces(rank_traces, "four ranks")), []
    for rank in range(4):
        sampler: Any = DistributedSampler(rank_runs.Samples(33), num_replicas=4, rank=rank)
        first.append(next(iter(sampler)))
        for epoch, one in enumerate(report.subjects[0].passes[rank]):
            sampler.set_epoch(epoch)
            assert one.indices == tuple(sampler)
            assert (one.batches, one.samples, one.complete, one.share) == (3, 9, True, Share(epoch, rank, 4))
    twice = ", ".join(map(str, sorted(first[:3])))
    assert f"3 samples came twice so that all ranks have the same number: {twice}" in the(report, "padding").text


@pytest.mark.live
def test_only_what_was_yielded_was_seen(tmp_path: Path) -> None:
    """Of 8 batches 3 are taken; the workers, which stay for the next epoch, had made more."""
    sampler: Any = minidl.DistributedSampler(range(16), num_replicas=1, rank=0)
    options: dict[str, Any] = {"sampler": sampler, "num_workers": 1, "persistent_workers": True}
    with minidl.trace(tmp_path), minidl.DataLoader(rank_runs.Samples(16), batch_size=2, **options) as loader:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert len(list(itertools.islice(loader, 3))) == 3
    report = audit([read_trace(tmp_path)])
    for epoch, one in enumerate(report.subjects[0].passes[0]):
        sampler.set_epoch(epoch)
        assert (one.batches, one.samples, one.complete) == (3, 6, False)
        assert (one.indices, one.share) == (tuple(sampler)[:6], Share(epoch, 0, 1))
    assert report.mistakes == 0


@pytest.mark.live
def test_the_uneven_rank_was_left_alone(rank_traces: Path) -> None:
    """The mistake is real: DistributedDataParallel failed on the rank that went on."""
    assert [path.name for path in (rank_traces / "uneven").glob("error*")] == ["error0"]


# --- What is missing --------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_a_rank_that_is_missing_is_said_and_one_rank_alone_can_be_audited(rank_traces: Path) -> None:
    report = audit(traces(rank_traces, "four ranks")[:3])
    assert (rules(report, UNKNOWN), report.mistakes) == (["ranks"], 0)
    assert "the traces of 3 are missing" in report.findings[0].text
    assert rules(audit(traces(rank_traces, "forgotten set_epoch")[:1]), MISTAKE) == ["forgotten set_epoch"]


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ([0, 2], "in epoch 3, 7 samples of 9 came to no rank: 1, 3, 4, 5, 6, 7, ..."),
        ([0, 2, 8], "in epoch 3, 6 samples of 9 came to no rank: 1, 3, 4, 5, 6, 7"),
        ([0, 1, 2, 3, 4, 6, 7, 8, 99], "in epoch 3, 1 sample of 9 came to no rank: index 5"),
        ([*range(9)], None),
    ],
)
def test_samples_that_came_to_no_rank_are_counted_and_named(seen: list[int], text: str | None) -> None:
    subject = Subject("D", facts={0: {"dataset_length": 9, "batch_size": 2}})
    said = [finding.text[: len(text or "")] for finding in _unseen(subject, 3, 2, Counter(seen))]
    assert said == ([] if text is None else [text])


def test_one_rank_twice_is_refused(tmp_path: Path) -> None:
    parallel(tmp_path, [(0, 2), (1, 2)])
    one = read_trace(tmp_path / "rank0")
    with pytest.raises(TraceError, match="audit: two traces of rank 0"):
        audit([one, one])


@pytest.mark.live
def test_overwritten_events_are_said(rank_traces: Path) -> None:
    one, other = traces(rank_traces, "correct")
    one.processes[0].whole_from = 1
    assert rules(audit([one, other]), UNKNOWN) == ["overwritten"]


@pytest.mark.live
def test_no_order_no_verdict(rank_traces: Path) -> None:
    """A trace without digests, as earlier ones are, is compared by first indices; without either, it is said."""
    both = traces(rank_traces, "batches: forgotten set_epoch")
    for column, value, level, said in (
        ("z", 0, MISTAKE, ["forgotten set_epoch"]),
        ("y", -1, UNKNOWN, ["overlap", "set_epoch"]),
    ):
        for trace in both:
            trace.events[column][trace.events["code"] == ev.SAMPLER_NEXT[1]] = value
        assert rules(audit(both), level) == said


@pytest.mark.parametrize(
    ("number", "word"), [(0, "first"), (3, "4th"), (10, "11th"), (20, "21st"), (22, "23rd"), (111, "112th")]
)
def test_ordinals(number: int, word: str) -> None:
    assert _ordinal(number) == word


# --- The command ------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_the_command(rank_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = str(rank_traces / "same seeds")
    assert cli.main(["audit", str(rank_traces / "correct")]) == 0
    out = capsys.readouterr().out
    assert "2 ranks of 2, 1 DataLoader" in out
    assert "rank 0        rank 1" in out
    assert out.endswith("no mistake found\n")
    assert cli.main(["audit", f"{seeds}/rank0", f"{seeds}/rank1"]) == 1
    assert "fix: torch.manual_seed(seed + rank)" in capsys.readouterr().out
    assert cli.main(["audit", seeds, "--allow", "same seeds on several ranks"]) == 0
    out = capsys.readouterr().out
    assert "allowed (same seeds on several ranks): worker 0" in out
    assert "fix:" not in out
    assert cli.main(["audit", seeds, "--allow", "overlap", "--allow", "no such"]) == 2
    said = capsys.readouterr().err
    assert "no finding is called 'no such': give one of different sampler seeds, drawn twice" in said


@pytest.mark.live
def test_the_command_for_machines(rank_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--json", str(rank_traces / "uneven")]) == 1
    report = json.loads(capsys.readouterr().out)
    (loader,) = report["dataloaders"]
    assert (report["mistakes"], report["world_size"], report["ranks"]) == (1, 2, [0, 1])
    assert [(p["rank"], p["batches"], p["complete"]) for p in loader["passes"]] == [(0, 5, False), (1, 4, True)]
    assert {f["rule"] for f in loader["findings"]} == {"uneven batches", "set_epoch"}
