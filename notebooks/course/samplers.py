"""Questions and checks of 02_samplers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

import minidl
from course.asking import Asked, Count, Share, question, rows, yes_no
from course.checking import Wrong, exercise


@question
def never_drawn(draws: Sequence[int], size: int) -> Asked:
    """With replacement, a third is left out."""
    missed = size - len(set(draws))
    return Asked(
        f"{len(draws)} draws with replacement from {size} samples: one epoch's worth. How many of the samples were never drawn: nearly all, about a third, "
        "or hardly any?",
        Share(missed, size, "about a third"),
        "The probability that one draw misses a sample is 1 - 1/n. What is it for n draws?",
        f"{missed} of {size}: (1 - 1/n)^n is close to 1/e, 37 %. Others came twice or more. Without replacement, each comes once.",
        slips={"hardly any": "As many draws as samples need not hit each once: where one comes twice, another is left out.",
               "nearly all": "Each draw hits some sample, and most draws hit one that was not drawn yet."},
    )  # fmt: skip


@question
def same_epochs(first: Sequence[int], second: Sequence[int]) -> Asked:
    """A new order in each epoch."""
    return Asked(
        "`torch.manual_seed(0)` was called once, before the first of two epochs. Is the order of the second epoch the same as that of the first: yes or no?",
        yes_no(first == second, "Draws move the global generator on. What is its state when the second epoch begins?"),
        "Where does the sampler's generator get its seed, and what has become of the state it came from?",
        "In each epoch the sampler draws one number from torch's global generator, and seeds a generator of its own with it. The draw moves the global state "
        "on, so the next epoch has another seed. Call `manual_seed(0)` again, and the first order comes again.",
    )  # fmt: skip


@question
def same_with_workers(alone: Sequence[object], together: Sequence[object]) -> Asked:
    """The sampler is in the loop's process."""
    return Asked(
        "The same seed, once without workers and once with three. Do the batches come with the same samples, in the same order: yes or no?",
        yes_no(alone == together, "Workers answer at different times. But who draws the order, and who restores it?"),
        "In which process does the sampler run?",
        "The sampler runs in the loop's process, whatever the number of workers; workers get indices, and the loader yields in order.",
    )


@question
def drawn_by_then(trace: minidl.Trace) -> Asked:
    """The sampler is ahead of the loop."""
    events = trace.to_pandas()
    first = rows(trace, "yield")[0]
    drawn = int(sum(events["count"][row] for row in rows(trace, "sampler_next", "E") if row < first))
    (facts,) = trace.loaders.values()
    workers, prefetch = facts["num_workers"], facts["prefetch_factor"]
    return Asked(
        f"{workers} workers, `prefetch_factor={prefetch}`, batches of {facts['batch_size']}. How many indices has the sampler given when the loop gets its first batch?",
        Count(drawn),
        "A task is sent for each place at the beginning, and one more before a batch is yielded (04, section 9). How many indices has a task?",
        f"{prefetch} * {workers} tasks at the beginning, and one in the place of the first batch: {drawn // facts['batch_size']} tasks of "
        f"{facts['batch_size']} indices. A sampler that counts or logs what it gives is ahead of your loop by that.",
        first,
        {facts["batch_size"]: "That is the batch that the loop gets. The workers have work for more."},
    )  # fmt: skip


@question
def batch_count(size: int, batch_size: int, *, drop_last: bool) -> Asked:
    """The last, shorter batch."""
    sampler = minidl.BatchSampler(range(size), batch_size, drop_last)
    return Asked(
        f"{size} samples in batches of {batch_size}, `drop_last={drop_last}`. How many batches?",
        Count(len(list(sampler))),
        f"{size} is {size // batch_size} times {batch_size}, and {size % batch_size} are left.",
        f"The last {size % batch_size} samples "
        + ("are dropped, in each epoch others." if drop_last else "make a shorter batch."),
    )


@question
def zero_weight(draws: Sequence[int], sample: int) -> Asked:
    """A weight is a rate."""
    return Asked(
        f"A `WeightedRandomSampler` has drawn {len(draws)} times, and sample {sample} has the weight 0. How often was it drawn?",
        Count(Counter(draws)[sample]),
        "Weights are proportional to probabilities.",
        "The others come in proportion to their weights; they need not add up to 1.",
    )


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def shuffled(kind: Callable[[Sequence[int], torch.Generator], Iterable[int]]) -> str:
    """A sampler without replacement, with a generator."""
    data = range(50)
    sampler = kind(data, torch.Generator().manual_seed(5))
    again = kind(data, torch.Generator().manual_seed(5))
    first, second, repeated = list(sampler), list(sampler), list(again)
    if sorted(first) != list(data):
        twice = sorted(index for index, times in Counter(first).items() if times > 1)
        raise Wrong(
            f"An epoch has to give each of 50 indices once. Yours gave {len(first)}" + (f", and {twice[:5]} more than once." if twice else "."),
            "The step `sampler_next`: without replacement, an epoch is a permutation of the indices.", evidence=str(first),
        )  # fmt: skip
    for is_wrong, words, step in (
        (first == list(data), "The indices come in their own order.", "The step `sampler_next`: the order is drawn from the generator."),
        (first == second, "Two epochs have the same order.",
         "The step `sampler_next`, at the begin of an epoch: `__iter__` draws a new permutation. What is drawn in `__init__` is drawn once."),
        (first != repeated, "Two samplers with generators of the same seed give different orders.",
         "The step `sampler_next`: everything random comes from the generator, or a run cannot be repeated."),
    ):  # fmt: skip
        if is_wrong:
            raise Wrong(words, step, evidence=f"{first}\n{second}")
    loader = minidl.DataLoader(data, batch_size=5, sampler=kind(data, torch.Generator().manual_seed(5)))  # type: ignore[arg-type]
    assert [index for batch in loader for index in batch.tolist()] == first
    return "Each index once, another order in each epoch, the same again from the same seed; `minidl.DataLoader` takes it as `sampler=`."


def _padding(lengths: Sequence[int], order: Sequence[int]) -> int:
    """The padding of samples of these lengths, in batches of four."""
    return sum(max(order[n : n + 4]) * len(order[n : n + 4]) for n in range(0, len(lengths), 4)) - sum(lengths)


@exercise
def buckets(function: Callable[[Sequence[int], int], Iterable[Sequence[int]]]) -> str:
    """Batches of samples of similar length."""
    generator = torch.Generator().manual_seed(1)
    for size in (40, 42):
        lengths = torch.randint(1, 100, (size,), generator=generator).tolist()
        batches = [list(batch) for batch in function(lengths, 4)]
        given = [index for batch in batches for index in batch]
        if sorted(given) != list(range(size)):
            lost = sorted(set(range(size)) - set(given))
            raise Wrong(
                f"{size} samples: the batches hold {len(given)} indices; {f'{lost} are lost' if lost else 'some come twice'}.",
                "The step `sampler_next` of a batch sampler: in an epoch, each index is in one batch.", evidence=str(batches),
            )  # fmt: skip
        if any(len(batch) > 4 for batch in batches) or len(batches) != -(-size // 4):
            raise Wrong(
                f"{size} samples in batches of 4 are {-(-size // 4)} batches; yours are {len(batches)}.",
                "The step `sampler_next`: one list of indices for each batch.",
                evidence=str(batches),
            )
        padding = sum(max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in batches)
        enough = max(_padding(lengths, order) for order in (sorted(lengths), sorted(lengths, reverse=True)))
        if padding > enough:
            raise Wrong(
                f"Your batches need {padding} numbers of padding; sorted by length, {enough} suffice.",
                "The step `collate`: a batch is as wide as its longest sample. So samples of similar length belong together.", evidence=str(batches),
            )  # fmt: skip
    return "Each sample once, and as little padding as possible. (In a training, shuffle the batches, too.) Pass it as `batch_sampler=`."
