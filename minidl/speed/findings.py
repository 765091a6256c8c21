"""What an audit may find: one row for each, with its level, its name, its text and its remedy.

`finding.of(**facts)` is a finding with the facts in its text. RULES are the names, which `minidl audit --allow` takes;
FOLLOW says which findings follow from a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

MISTAKE, QUESTION, HARMLESS, UNKNOWN, ALLOWED = "mistake", "question", "harmless", "unknown", "allowed"


@dataclass(frozen=True)
class AuditFinding:
    """One verdict, or the template of one. text: the evidence; fix: the remedy, "" = none is needed."""

    level: str
    rule: str
    text: str
    fix: str = ""

    def of(self, **facts: Any) -> AuditFinding:
        """Return the finding with the facts in its text."""
        return replace(self, text=self.text.format(**facts))

    def lines(self) -> list[str]:
        word = {MISTAKE: "MISTAKE", UNKNOWN: "unknown"}.get(self.level, self.level)
        return [f"{word} ({self.rule}): {self.text}"] + ([f"    fix: {self.fix}"] if self.fix else [])


# --- The table --------------------------------------------------------------------------------------------------------
UNEVEN: Final = AuditFinding(
    MISTAKE, "uneven batches", "in epoch {epoch}, the ranks took different numbers of batches: {counts}. In "
    "DistributedDataParallel, the rank that takes one more waits for gradients that no other rank sends",
    "give all ranks the same number of batches by a DistributedSampler (it pads, or drops with drop_last=True), or run "
    "the loop under torch.distributed.algorithms.join.Join")  # fmt: skip
UNEVEN_OR_NOT: Final = AuditFinding(
    QUESTION, "uneven batches", "in epoch {epoch}, the ranks took different numbers of batches: {counts}. That is "
    "right if the ranks do not wait for each other in each step, as in an evaluation or under Join. In "
    "DistributedDataParallel, the rank that takes one more waits for gradients that no other rank sends",
    "if you train on these batches: give all ranks the same number")  # fmt: skip
WRONG_SHARE: Final = AuditFinding(
    MISTAKE, "wrong share", "in epoch {epoch}, the sampler of rank {rank} of {world} deals out share {share.replica} "
    "of {share.replicas}{more}",
    "make the sampler after init_process_group, without rank= and num_replicas=: it finds both itself")  # fmt: skip
SHARED: Final = AuditFinding(
    QUESTION, "shares of several ranks", "the samplers deal out {shares} shares to {world} ranks, each to {each} ranks "
    "({which}). That is right if these ranks hold the parts of one model (tensor or pipeline parallelism). If each has "
    "a whole model, they train on the same samples",
    "if each rank has a whole model: make the sampler without rank= and num_replicas=")  # fmt: skip
SET_EPOCH_ON_SOME: Final = AuditFinding(
    MISTAKE, "set_epoch on some ranks", "in epoch {epoch} of the loader, the samplers had different epochs "
    "({which}), so their shares come from different permutations: some samples are seen twice, some by no rank",
    "call sampler.set_epoch(epoch) with the same number on every rank")  # fmt: skip
SAMPLER_SEEDS: Final = AuditFinding(
    MISTAKE, "different sampler seeds", "the ranks' samplers have different seeds ({seeds}), so their shares come from "
    "different permutations: some samples are seen twice, some by no rank",
    "give DistributedSampler the same seed on every rank")  # fmt: skip
OVERLAP: Final = AuditFinding(
    MISTAKE, "overlap", "{found}, and that is not padding: the ranks' shares come from different orders",
    "give all ranks' samplers the same dataset length, seed, shuffle and epoch, and each its own rank")  # fmt: skip
ONE_SHARE: Final = AuditFinding(
    MISTAKE, "overlap", "{found}: {ranks} had the same samples in the same order, and the sampler, {samplers}, has a "
    "share for each",
    "let the sampler's order depend on its rank: indices[rank::num_replicas]. If it repeats samples by design, give it "
    "an attribute num_repeats")  # fmt: skip
REPEATED: Final = AuditFinding(
    HARMLESS, "repeated", "in epoch {epoch}, {samples} came {times} times each, in a row in the order that "
    "{samplers} deals out: it repeats them by design. {unseen}")  # fmt: skip
NO_SHARES: Final = AuditFinding(
    MISTAKE, "forgotten DistributedSampler", "{found}, and no sampler dealt out shares: it was {samplers} on each "
    "rank. Unless each rank's dataset contains only its own share, every rank trains on the same data",
    "use DataLoader(dataset, sampler=DistributedSampler(dataset), ...) instead of shuffle=True")  # fmt: skip
EACH_ALL: Final = AuditFinding(
    QUESTION, "the same samples on each rank", "{found}, and no sampler dealt out shares: it was {samplers} on each "
    "rank. That is right if each rank evaluates all samples, or if the ranks hold the parts of one model. If "
    "they train copies of one model, every rank trains on the same data",
    "if they train copies: use DataLoader(dataset, sampler=DistributedSampler(dataset), ...)")  # fmt: skip
OWN_DATA: Final = AuditFinding(
    UNKNOWN, "overlap", "no sampler dealt out shares, and the ranks' datasets differ: each may be a separate "
    "share, as split_dataset_by_node and Subset make it")  # fmt: skip
ITERABLE: Final = AuditFinding(
    UNKNOWN, "overlap", "an iterable dataset has no indices: the trace does not show whether ranks and workers saw the "
    "same samples")  # fmt: skip
NO_INDICES: Final = AuditFinding(
    UNKNOWN, "overlap", "the trace does not contain the samples' indices, so it does not show which were seen twice",
    'record with detail="sample"')  # fmt: skip
DRAWN_TWICE: Final = AuditFinding(
    HARMLESS, "drawn twice", "in epoch {epoch}, {samples} came twice or more ({which}), some of them on the same rank: "
    "the sampler draws with replacement")  # fmt: skip
PADDED: Final = AuditFinding(
    HARMLESS, "padding", "in epoch {epoch}, {samples} came twice so that all ranks have the same number: {which}. For "
    "training that is fine, but a metric counts them twice")  # fmt: skip
DROPPED: Final = AuditFinding(
    HARMLESS, "dropped", "{found}. This is due to drop_last; with set_epoch, each epoch drops others")  # fmt: skip
MISSED: Final = AuditFinding(
    MISTAKE, "missing", "{found}, more than drop_last explains",
    "give each rank's sampler its own rank, and all of them the same length, seed and epoch")  # fmt: skip
SKIPPED: Final = AuditFinding(
    QUESTION, "missing", "{found}: the samplers gave fewer than the ranks' shares. That is right if an epoch was "
    "resumed in its middle, or if a sampler leaves samples out by design",
    "otherwise find out why the sampler ends early, or begins late")  # fmt: skip
ONE_EPOCH: Final = AuditFinding(
    UNKNOWN, "set_epoch", "there is only one whole epoch, so no two orders can be compared")  # fmt: skip
NO_ORDER: Final = AuditFinding(UNKNOWN, "set_epoch", "the trace does not show the order of the samples")
NO_SHUFFLING: Final = AuditFinding(
    HARMLESS, "no shuffling", "{found}: its sampler does not shuffle, which is right for validation")  # fmt: skip
FORGOTTEN_SET_EPOCH: Final = AuditFinding(
    MISTAKE, "forgotten set_epoch", "{found}: its sampler shuffles by its seed and epoch, and its epoch was "
    "{share.epoch} both times",
    "call sampler.set_epoch(epoch) before each epoch, on every rank")  # fmt: skip
PERHAPS_SHUFFLING: Final = AuditFinding(
    UNKNOWN, "same order in each epoch", "{found}. It is unknown whether its sampler should shuffle")  # fmt: skip
SAME_ORDER: Final = AuditFinding(
    MISTAKE, "same order in each epoch", "{found}, and its sampler ({samplers}) shuffles: its generator restarts in "
    "each epoch",
    "seed the generator once, before the first epoch")  # fmt: skip
NO_WORKERS: Final = AuditFinding(
    UNKNOWN, "seeds", "there are no workers, so samples use the random numbers of the rank's own process, "
    "whose seed is not in the trace")  # fmt: skip
SEEDS_OF_RANKS: Final = AuditFinding(
    MISTAKE, "same seeds on several ranks", "{whom} have the same seed, {seed}{more}, and draw random numbers "
    "for their samples: the ranks draw the same numbers",
    "torch.manual_seed(seed + rank), or DataLoader(generator=torch.Generator().manual_seed(seed + rank))")  # fmt: skip
SEEDS_OF_ONE_STREAM: Final = AuditFinding(
    QUESTION, "same seeds on several ranks", "{whom} have the same seed, {seed}{more}, and the ranks had the same "
    "samples in the same order. That is right if they should see the same samples, as the parts of one model do",
    "otherwise call torch.manual_seed(seed + rank)")  # fmt: skip
SEEDS_UNDRAWN: Final = AuditFinding(
    QUESTION, "same seeds on several ranks", "{whom} have the same seed, {seed}{more}. That is right if samples are "
    "not random. No worker drew from torch's, random's or NumPy's generator; other generators are not recorded",
    "if samples are random: call torch.manual_seed(seed + rank)")  # fmt: skip
SEEDS_UNDRAWN_AGAIN: Final = AuditFinding(
    QUESTION, "same seeds in each epoch", "the workers of rank {rank} had the same seeds when the loader was iterated "
    "for the {earlier} and for the {later} time. That is right if samples are not random. No worker drew from "
    "torch's, random's or NumPy's generator; other generators are not recorded",
    "if samples are random: seed once, before the first epoch")  # fmt: skip
SEEDS_AFTER_BREAK: Final = AuditFinding(
    QUESTION, "same seeds in each epoch", "the workers of rank {rank} had the same seeds when the loader was iterated "
    "for the {earlier} and for the {later} time. That is right if the later iteration resumes the earlier one, "
    "which did not reach its end",
    "otherwise seed once, before the first epoch")  # fmt: skip
SEEDS_OF_EPOCHS: Final = AuditFinding(
    MISTAKE, "same seeds in each epoch", "the workers of rank {rank} had the same seeds when the loader was iterated "
    "for the {earlier} and for the {later} time, and draw random numbers for samples, the same in each epoch",
    "seed once, before the first epoch: do not seed, or make a generator, in the loop")  # fmt: skip

ABSENT: Final = AuditFinding(
    UNKNOWN, "ranks", "of {world} ranks, the traces of {absent} are missing: it is unknown what they saw")  # fmt: skip
RESTARTED: Final = AuditFinding(
    HARMLESS, "restarted", "the ranks were restarted {times}: the audit judges only the last start")  # fmt: skip
OVERWRITTEN: Final = AuditFinding(
    UNKNOWN, "overwritten", "{name}: the oldest events of {processes} were overwritten, with the first epochs",
    "record with ring_bytes=None, or with MINIDL_TRACE_RING=full")  # fmt: skip

RULES: Final = tuple(sorted({one.rule for one in globals().values() if isinstance(one, AuditFinding)}))
"""The findings' names, which `--allow` takes."""

FOLLOW: Final = {
    WRONG_SHARE.rule: ("overlap", "missing"),
    SET_EPOCH_ON_SOME.rule: ("overlap", "missing", "forgotten set_epoch"),
    SAMPLER_SEEDS.rule: ("overlap", "missing"),
}
"""Findings that follow from a mistake; the audit does not report them separately."""
