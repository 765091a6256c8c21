"""The judgement of an audit: what is wrong, or may be, in what the ranks saw of one DataLoader.

Interface: `judge(subject, world)` yields the findings. Functions compare ranks (batches, shares, overlap, seeds) and
epochs (order, seeds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Final

import numpy as np

from minidl.speed import findings
from minidl.speed.findings import AuditFinding
from minidl.speed.passes import Pass, Subject
from minidl.tracefile.arrays import Ints
from minidl.tracefile.words import counted, listed, named_ranks

BY_CHANCE: Final = 8
"""With this many samples, two epochs have the same order by chance less than once in 40,000 times."""

MOST_REPEATS: Final = 32
"""The most times in a row that a sampler may give a sample by design; each needs a pass over the order."""

_SHUFFLING: Final = ("RandomSampler", "SeedableRandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
_IN_ORDER: Final = ("SequentialSampler", "_InfiniteConstantSampler")


def judge(subject: Subject, world: int) -> Iterator[AuditFinding]:
    yield from _uneven(subject)
    of_share = _ranks_of_shares(subject, world)
    each = len(of_share[0])
    if each > 1:
        which = "; ".join(f"share {share} to {listed(ranks)}" for share, ranks in enumerate(of_share))
        yield findings.SHARED.of(shares=len(of_share), world=world, each=each, which=which)
    one_of_each = subject.of_ranks(ranks[0] for ranks in of_share) if each > 1 else subject
    causes = list(_shares(subject, world, of_share))
    found = [*causes, *_coverage(one_of_each, world // each), *_same_order(subject)]
    follow = {rule for cause in causes for rule in findings.FOLLOW[cause.rule]}
    yield from (finding for finding in found if finding.rule not in follow)
    yield from _seeds(one_of_each)


def _ranks_of_shares(subject: Subject, world: int) -> list[list[int]]:
    """The ranks of each share, if all shares have equally many; else one rank each, with the share's number."""
    shares = {rank: mine[0].share for rank, mine in subject.passes.items() if mine and mine[0].share is not None}
    replicas = {share.replicas for share in shares.values()}
    count = replicas.pop() if len(replicas) == 1 else 0
    each = range(min(count, world))
    of_share = [[rank for rank in sorted(shares) if shares[rank].replica == share] for share in each]
    equally = len(shares) == world and count > 1 and {len(ranks) for ranks in of_share} == {world // count}
    return of_share if equally else [[rank] for rank in range(world)]


def _uneven(subject: Subject) -> Iterator[AuditFinding]:
    """Find ranks that take different numbers of steps: a rank that takes more waits for the others' gradients forever.

    The trace does not show whether they wait. It is a question if batches need not be even: by the sampler's own
    attribute, without shuffling, or for a stream.
    """
    by_design = subject.has(sampler_even_batches=False) or _in_order(subject)
    finding = findings.UNEVEN_OR_NOT if by_design else findings.UNEVEN
    for epoch, passes in subject.epochs():
        least = min((one.batches for one in passes.values() if one.whole), default=1 << 62)
        counts = {rank: one.batches for rank, one in passes.items() if one.whole or one.batches > least}
        if len(set(counts.values())) > 1:
            yield finding.of(epoch=epoch, counts=", ".join(f"rank {rank} {n}" for rank, n in sorted(counts.items())))
            return


def _in_order(subject: Subject) -> bool:
    """Whether its sampler does not shuffle, as in an evaluation or for a stream."""
    return subject.has(sampler_shuffle=False) or subject.fact("sampler") <= set(_IN_ORDER)


def _shares(subject: Subject, world: int, of_share: list[list[int]]) -> Iterator[AuditFinding]:
    """Judge the settings of the ranks' samplers. of_share: the ranks of each share."""
    right = {rank: (share, len(of_share)) for share, ranks in enumerate(of_share) for rank in ranks}
    for epoch, passes in subject.epochs():
        shares = {rank: one.share for rank, one in passes.items() if one.share is not None}
        wrong = {r: s for r, s in shares.items() if world > 1 and (s.replica, s.replicas) != right.get(r)}
        if wrong:
            rank, share = min(wrong.items())
            others = counted(len(wrong) - 1, "more rank's is", "more ranks' are")
            more = f", and {others} wrong too" if len(wrong) > 1 else ""
            yield findings.WRONG_SHARE.of(epoch=epoch, rank=rank, world=world, share=share, more=more)
            return
        if len({share.epoch for share in shares.values()}) > 1:
            which = ", ".join(f"rank {rank} epoch {share.epoch}" for rank, share in sorted(shares.items()))
            yield findings.SET_EPOCH_ON_SOME.of(epoch=epoch, which=which)
            return
    seeds = subject.fact("sampler_seed")
    if len(seeds) > 1 and any(p[0].share is not None for p in subject.passes.values() if p):
        yield findings.SAMPLER_SEEDS.of(seeds=", ".join(sorted(map(str, seeds))))


def _coverage(subject: Subject, world: int) -> Iterator[AuditFinding]:
    """Find samples that several ranks saw, or no rank. Each kind of finding is reported for its first epoch."""
    if "iterable" in subject.fact("dataset_kind"):
        yield findings.ITERABLE
        return
    first: dict[str, AuditFinding] = {}
    for epoch, passes in subject.epochs():
        known = all(one.indices is not None for one in passes.values())
        judged = _overlap(subject, epoch, passes, world) if known else _without_indices(subject, epoch, passes)
        for finding in judged:
            first.setdefault(finding.rule, finding)
    yield from first.values()


def _dealt(passes: dict[int, Pass]) -> bool:
    """Whether a sampler dealt out shares."""
    return any(one.share is not None for one in passes.values())


def _without_indices(subject: Subject, epoch: int, passes: dict[int, Pass]) -> Iterator[AuditFinding]:
    found = _alike(subject, passes) if len(passes) > 1 and not _dealt(passes) else ""
    yield _without_shares(subject, f"in epoch {epoch}, {found}", passes) if found else findings.NO_INDICES


def _overlap(subject: Subject, epoch: int, passes: dict[int, Pass], world: int) -> Iterator[AuditFinding]:
    dealt = _dealt(passes)
    seen = Counter(index for one in passes.values() for index in one.seen)
    if dealt and (times := _repeats(subject, passes)):
        yield _repeated(subject, epoch, passes, seen, times)
        return
    cut = _is_cut(subject, passes)
    padding = _padding(subject, passes) + (_at_the_ends(passes) if cut else Counter())
    twice = {index: count for index, count in (seen - padding).items() if count > 1}
    if twice and _across(passes, twice) and not _redraws(subject, passes, dealt):
        which = f"{len(twice)} of {len(seen)} samples were seen by several of {len(passes)} ranks ({_some(twice)})"
        found = f"in epoch {epoch}, {which}"
        yield findings.OVERLAP.of(found=found) if dealt else _without_shares(subject, found, passes)
    elif twice:
        yield findings.DRAWN_TWICE.of(epoch=epoch, samples=counted(len(twice), "sample"), which=_some(twice))
    elif padding:
        yield findings.PADDED.of(epoch=epoch, samples=counted(padding.total(), "sample"), which=_some(padding))
    if dealt and len(passes) == world and all(one.whole for one in passes.values()):
        yield from _unseen(subject, epoch, len(passes), seen, cut)


def _redraws(subject: Subject, passes: dict[int, Pass], dealt: bool) -> bool:
    """Whether a rank may see a sample twice by its sampler's design."""
    again = not dealt and any(len(set(one.seen)) < len(one.seen) for one in passes.values())
    return again or subject.has(sampler_replacement=True) or subject.has(sampler="WeightedRandomSampler")


def _without_shares(subject: Subject, found: str, passes: dict[int, Pass]) -> AuditFinding:
    """Judge that several ranks saw the same indices, which are the same samples only in the same dataset.

    In the same order, that may be intended: ranks with different orders are certainly not the parts of one model.
    """
    if len(subject.fact("dataset_fingerprint")) > 1:
        return findings.OWN_DATA
    meant = _in_order(subject) or len({one.order for one in passes.values()}) == 1
    return (findings.EACH_ALL if meant else findings.NO_SHARES).of(found=found, samplers=subject.samplers)


def _is_cut(subject: Subject, passes: dict[int, Pass]) -> bool:
    """Whether every rank's sampler gave fewer than its share, as in an epoch that was resumed in its middle."""
    shares = [(len(one.seen), one.share.replicas) for one in passes.values() if one.share is not None]
    length = subject.length or 0
    dropped = not subject.has(sampler_drop_last=False)
    return bool(shares) and all(count < (length if dropped else length + n - 1) // n for count, n in shares)


def _at_the_ends(passes: dict[int, Pass]) -> Counter[int]:
    """Count the repeated samples at the end of the ranks' shares: padding, if the begin of a share is missing."""
    ends, seen = Counter[int](), Counter(index for one in passes.values() for index in one.seen)
    for one in passes.values():
        ends.update(index for index in one.seen[-one.dealt_in :] if seen[index] > 1 + ends[index])
    return ends


def _places(one: Pass) -> Ints:
    """Return the place of each of the pass's samples in the order that the sampler of shares deals out."""
    assert one.share is not None
    turn, place = np.divmod(np.arange(len(one.seen)), one.dealt_in)
    return (turn * one.share.replicas + one.share.replica) * one.dealt_in + place


def _padding(subject: Subject, passes: dict[int, Pass]) -> Counter[int]:
    """Count the samples that a sampler of shares repeats to make all shares equally long, after its order's end."""
    length, out = subject.length, Counter[int]()
    for one in passes.values():
        if one.share is not None and length and one.indices is not None:
            out.update(one.indices[at] for at in np.flatnonzero(_places(one) >= length).tolist())
    return out


def _repeats(subject: Subject, passes: dict[int, Pass]) -> int:
    """The number of times that the ranks' order repeats each sample in a row, as timm's RepeatAugSampler does; or 0.

    Such an order consists of blocks of equal size, with one sample in each block. Its end may be padding.
    """
    if subject.length is None or any(one.share is None for one in passes.values()):
        return 0
    places = np.concatenate([_places(one) for one in passes.values()])
    samples = np.concatenate([np.array(one.indices, np.int64) for one in passes.values()])
    order = np.lexsort((places, samples))
    places, samples = places[order], samples[order]
    if len(places) < BY_CHANCE or not np.diff(places)[np.diff(samples) == 0].all():  # two ranks have the same place
        return 0
    for times in range(2, MOST_REPEATS + 1):
        inside = places < times * subject.length
        block, again = places[inside] // times, np.diff(samples[inside]) == 0
        in_one_block = again.any() and not np.diff(block)[again].any()
        if in_one_block and len(np.unique(block)) == len(block) - again.sum():
            return times
    return 0


def _repeated(subject: Subject, epoch: int, passes: dict[int, Pass], seen: Counter[int], times: int) -> AuditFinding:
    """Judge samples that the ranks' common order repeats in a row; ranks with the same share look alike."""
    most = min(len(one.seen) for one in passes.values())
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank, one in passes.items():
        ranks_of.setdefault(one.seen[:most], []).append(rank)
    alike = max(ranks_of.values(), key=len) if most else []
    samples = counted(len(seen), "sample")
    if len(alike) > 1 and not subject.has(sampler_repeats=times):
        found = f"in epoch {epoch}, {samples} came {times} times each"
        return findings.ONE_SHARE.of(found=found, ranks=named_ranks(alike), samplers=subject.samplers)
    missing = (subject.length or 0) - len(seen)
    unseen = f"{counted(missing, 'sample')} of {subject.length} came to no rank" if missing else "All samples came"
    return findings.REPEATED.of(epoch=epoch, samples=samples, times=times, samplers=subject.samplers, unseen=unseen)


def _across(passes: dict[int, Pass], indices: dict[int, int]) -> bool:
    """Whether several ranks saw one of these."""
    sets = [indices.keys() & set(one.seen) for one in passes.values()]
    return sum(map(len, sets)) > len(set().union(*sets))


def _alike(subject: Subject, passes: dict[int, Pass]) -> str:
    """Name the marks or counts that show that all ranks saw the same; "" if none does."""
    marks = [one.marks for one in passes.values()]
    if all(marks) and len(set(marks)) == 1:
        return "all ranks had the same samples in the same order"
    if subject.length and all(one.samples == subject.length and one.whole for one in passes.values()):
        return f"each rank saw {subject.length} samples, as many as the dataset has"
    return ""


def _unseen(subject: Subject, epoch: int, ranks: int, seen: Counter[int], cut: bool = False) -> Iterator[AuditFinding]:
    length = subject.length or 0
    missing = length - sum(0 <= index < length for index in seen)
    if not missing:
        return
    which = _some(islice((index for index in range(length) if index not in seen), 7))
    by_sampler = length % ranks if subject.has(sampler_drop_last=True) else 0
    sizes = {size for size in subject.fact("batch_size") if type(size) is int}
    in_turn = max(sizes, default=1) * ranks - (1 if subject.has(dealt_in="batches") else ranks)
    by_loader = in_turn if subject.has(drop_last=True) else 0
    found = f"in epoch {epoch}, {counted(missing, 'sample')} of {length} came to no rank: {which}"
    explained = missing <= by_sampler + by_loader
    yield (findings.DROPPED if explained else findings.SKIPPED if cut else findings.MISSED).of(found=found)


def _same_order(subject: Subject) -> Iterator[AuditFinding]:
    """Find the same order in several epochs: a forgotten `set_epoch`, a reseeded generator, or no shuffling."""
    if "iterable" in subject.fact("dataset_kind"):
        return
    whole = [[one for one in mine if one.whole] for _, mine in sorted(subject.passes.items())]
    pairs = [pair for mine in whole for pair in pairwise(mine)]
    alike = [(first, second) for first, second in pairs if first.order and first.order == second.order]
    if not pairs:
        yield findings.ONE_EPOCH
    elif not any(first.order for first, _ in pairs):
        yield findings.NO_ORDER
    elif alike:
        yield from _judged_order(subject, [pair for pair in alike if pair[0].rank == alike[0][0].rank])


def _judged_order(subject: Subject, alike: list[tuple[Pass, Pass]]) -> Iterator[AuditFinding]:
    """Judge one rank's pairs of epochs with the same order."""
    first, second = alike[0]
    found = f"rank {first.rank} had the same order in epochs {first.epoch} and {second.epoch}"
    found += f" (and in {counted(len(alike) - 1, 'more pair')})" if len(alike) > 1 else ""
    shuffles = subject.fact("sampler") <= set(_SHUFFLING) or subject.has(sampler_shuffle=True)
    if _in_order(subject):
        yield findings.NO_SHUFFLING.of(found=found)
    elif first.share is not None and second.share is not None and first.share.epoch == second.share.epoch >= 0:
        yield findings.FORGOTTEN_SET_EPOCH.of(found=found, share=first.share)
    elif not shuffles:
        yield findings.PERHAPS_SHUFFLING.of(found=found)
    elif first.samples >= BY_CHANCE:
        yield findings.SAME_ORDER.of(found=found, samplers=subject.samplers)


def _seeds(subject: Subject) -> Iterator[AuditFinding]:
    """Find equal seeds of several ranks' workers, or of one rank's workers in several epochs."""
    if not any(seeds.of for each in subject.seeds.values() for seeds in each):
        yield findings.NO_WORKERS
        return
    yield from _seeds_of_ranks(subject)
    yield from islice(_seeds_of_epochs(subject), 1)


def _seeds_of_ranks(subject: Subject) -> Iterator[AuditFinding]:
    owners: dict[int, set[tuple[int, int]]] = {}
    for rank, iterators in subject.seeds.items():
        for worker, seed in (pair for seeds in iterators for pair in seeds.of.items()):
            owners.setdefault(seed, set()).add((rank, worker))
    shared = {seed: who for seed, who in owners.items() if len({rank for rank, _ in who}) > 1}
    if shared:
        seed, who = min(shared.items(), key=lambda item: sorted(item[1]))
        whom = " and ".join(f"worker {worker} of rank {rank}" for rank, worker in sorted(who)[:4])
        more = f"; so have {len(shared) - 1} more" if len(shared) > 1 else ""
        drawn = any(seeds.drawn for rank, _ in who for seeds in subject.seeds[rank])
        finding = findings.SEEDS_OF_RANKS if drawn else findings.SEEDS_UNDRAWN
        finding = findings.SEEDS_OF_ONE_STREAM if _one_stream(subject) else finding
        yield finding.of(whom=whom, seed=seed, more=more)


def _seeds_of_epochs(subject: Subject) -> Iterator[AuditFinding]:
    for rank, iterators in sorted(subject.seeds.items()):
        again = [(i, j) for i, a in enumerate(iterators) for j, b in enumerate(iterators[:i]) if a.of and a.of == b.of]
        if again:
            later, earlier = min(again, key=lambda pair: not iterators[pair[1]].whole)
            drawn = any(seeds.drawn for seeds in iterators)
            finding = findings.SEEDS_OF_EPOCHS if drawn else findings.SEEDS_UNDRAWN_AGAIN
            finding = finding if iterators[earlier].whole else findings.SEEDS_AFTER_BREAK
            yield finding.of(rank=rank, earlier=_ordinal(earlier), later=_ordinal(later))


def _one_stream(subject: Subject) -> bool:
    """Whether all ranks had the same samples in the same order, in every epoch."""
    orders = [{one.order for one in passes.values()} for _, passes in subject.epochs()]
    return bool(orders) and all(len(order) == 1 and order != {()} for order in orders)


def _ordinal(number: int) -> str:
    """Return "first" for 0, "21st" for 20."""
    nth = number + 1
    ending = "th" if nth % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(nth % 10, "th")
    return {1: "first", 2: "second", 3: "third"}.get(nth, f"{nth}{ending}")


def _some(indices: Iterable[int]) -> str:
    found = sorted(set(indices))
    return "index " * (len(found) == 1) + listed(found, most=6)
