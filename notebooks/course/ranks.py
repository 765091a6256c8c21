"""Questions and checks of 03_ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import minidl
from course.asking import Asked, Choice, Count, Listed, question, rows, yes_no
from course.checking import Wrong, exercise


def shares(size: int, ranks: int, **options: object) -> list[list[int]]:
    """What each rank's DistributedSampler gives in an epoch, in order."""
    return [list(minidl.DistributedSampler(range(size), ranks, rank, **options)) for rank in range(ranks)]  # type: ignore[arg-type]


@question
def share_of(of_ranks: Sequence[Sequence[int]], rank: int = 1) -> Asked:
    """Every n-th."""
    return Asked(
        f"{sum(map(len, of_ranks))} samples, {len(of_ranks)} ranks, no shuffling. Which indices does rank {rank} get?",
        Listed(tuple(of_ranks[rank])),
        "The order is dealt like cards, one index to each rank in turn.",
        f"Positions {rank}, {rank} + {len(of_ranks)}, ... of an order that all ranks have in common. No rank asks another one: each computes the order and takes its share.",
    )  # fmt: skip


@question
def repeated(of_ranks: Sequence[Sequence[int]], size: int) -> Asked:
    """Padding."""
    times = Counter(index for share in of_ranks for index in share)
    often = {index: count for index, count in times.items() if count > 1}
    return Asked(
        f"{size} samples, {len(of_ranks)} ranks. {size} is no multiple of {len(of_ranks)}, and each rank must make as many steps as the others. How many samples come twice in an epoch?",
        Count(sum(count - 1 for count in times.values())),
        f"How many must be added so that {len(of_ranks)} divides the sum?",
        f"The order is padded from its own beginning: {often} (index: times). Ranks with fewer batches would leave the others "
        "waiting in a collective operation, forever.",
    )  # fmt: skip


@question
def dropped(of_ranks: Sequence[Sequence[int]], size: int) -> Asked:
    """... or cut."""
    seen = {index for share in of_ranks for index in share}
    return Asked(
        "The same with `drop_last=True`. How many samples does no rank see in this epoch?",
        Count(size - len(seen)),
        f"The largest multiple of {len(of_ranks)} that is not greater than {size} stays.",
        "The order is cut. If it is shuffled, they are others in each epoch.",
    )  # fmt: skip


@question
def forgotten(first: Sequence[int], second: Sequence[int]) -> Asked:
    """set_epoch."""
    return Asked(
        "A shuffling `DistributedSampler`, two epochs, and nobody called `set_epoch`. Is the order of the second epoch the same as that of the first: yes or no?",
        yes_no(
            list(first) == list(second),
            "A `DistributedSampler` counts no epochs. From which two numbers does it make its seed?",
        ),
        "A `RandomSampler` draws a seed from the global generator. What would happen to ranks that did so?",
        "All ranks need the same order, so it comes from `seed + epoch` alone, and the sampler does not count epochs: you call `set_epoch`.",
    )


@question
def other_seeds(of_ranks: Sequence[Sequence[int]], size: int) -> Asked:
    """One order for all."""
    times = Counter(index for share in of_ranks for index in share)
    lost, twice = size - len(times), sum(count > 1 for count in times.values())
    return Asked(
        "Two ranks shuffle with different seeds. What happens to the samples of an epoch?",
        Choice("some are lost, and some come twice" if lost and twice else "nothing", {
            "nothing": ("Each rank's own share is in order. But do the shares still fit together?", "none"),
            "some are lost": ("The ranks still make as many draws as before. What was drawn in the place of the lost ones?", "lost"),
            "some come twice": ("The ranks still make as many draws as before. What is left out for a sample that comes twice?", "twice", "repeated"),
            "some are lost, and some come twice": ("Do the ranks' shares of this epoch have a sample in common?", "both", "lost and twice", "both of them"),
        }),
        "Each rank takes every second one of *its* order.".replace("*", ""),
        f"{lost} of {size} samples are seen by no rank, {twice} by both. No error tells you; the loss goes down anyhow.",
    )  # fmt: skip


@question
def told_epoch(trace: minidl.Trace) -> Asked:
    """What a recorded job says."""
    events = trace.to_pandas()
    last = rows(trace, "share")[-1]
    epochs = sorted({int(events.epoch[row]) for row in rows(trace, "share")})
    return Asked(
        "A recorded job of two ranks notes which share each sampler was told (`share`). How many epochs does it have whose orders differ?",
        Count(len(epochs)),
        "Count the values of `epoch` in the events `share`.",
        f"`set_epoch` was called with {', '.join(map(str, epochs))}.",
        last,
    )


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def share(function: Callable[[Sequence[int], int, int], Sequence[int]]) -> str:
    """A rank's share of an order, padded, held against DistributedSampler."""
    for size, ranks in ((8, 2), (10, 4), (3, 4), (1, 3), (7, 3)):
        wanted = shares(size, ranks, shuffle=False)
        for rank in range(ranks):
            given = list(function(list(range(size)), rank, ranks))
            if len(given) != len(wanted[rank]):
                raise Wrong(
                    f"{size} samples, {ranks} ranks: rank {rank} gets {len(wanted[rank])} indices; yours gets {len(given)}.",
                    "The step `share`: every rank gets the same number, `ceil(size / ranks)`. A rank with fewer batches would leave the others waiting in their next collective operation.",
                    evidence=f"DistributedSampler: {wanted[rank]}\nyours:              {given}",
                )  # fmt: skip
            if given != wanted[rank]:
                raise Wrong(
                    f"{size} samples, {ranks} ranks: rank {rank} gets {wanted[rank]}; yours gets {given}.",
                    "The step `share`: positions rank, rank + ranks, ... of the order, which is padded from its own beginning (again and again, if it is short).",
                    evidence="\n".join(f"rank {number}: {one}" for number, one in enumerate(wanted)),
                )  # fmt: skip
    return "The same shares as torch's and minidl's `DistributedSampler`, index for index, also for fewer samples than ranks."


@exercise
def audit(function: Callable[[Sequence[Sequence[int]], int], tuple[Collection[int], Collection[int]]]) -> str:
    """What no rank saw, and what several saw."""
    cases = {
        "a right job": shares(12, 3, seed=1), "padding": shares(10, 4, shuffle=False), "cut": shares(10, 4, shuffle=False, drop_last=True),
        "a forgotten sampler": [list(range(8)), list(range(8))], "one rank sees a sample twice": [[0, 0, 1], [2, 3, 4]],
    }  # fmt: skip
    for name, of_ranks in cases.items():
        size = max(index for one in of_ranks for index in one) + 1 if name != "cut" else 10
        lost = set(range(size)) - {index for one in of_ranks for index in one}
        several = {index for index in range(size) if sum(index in one for one in of_ranks) > 1}
        said = function(of_ranks, size)
        for kind, right, given in (("no rank saw", lost, said[0]), ("several ranks saw", several, said[1])):
            if set(given) != right:
                raise Wrong(
                    f"{name}: {kind} {sorted(right) or 'none'}; your function says {sorted(given) or 'none'}.",
                    "The step `sample`: which index was asked for, in which rank. Compare the ranks' sets; what one rank saw twice is not shared between ranks.",
                    evidence="\n".join(f"rank {number}: {one}" for number, one in enumerate(of_ranks)),
                )  # fmt: skip
    return "It is what `minidl audit` looks for first. It also tells padding, which is no mistake, from a forgotten sampler."
