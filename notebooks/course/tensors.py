"""Questions and checks of 06_tensors, and the datasets of its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import minidl
from course import record
from course.asking import Asked, Choice, Count, Share, question, rows, yes_no
from course.checking import Wrong, exercise
from course.data import Sized
from minidl.speed.ledger import ledger


class Records(Sized):
    """24 samples: a dict of an image of 16,384 floats, a box of 4, and a label."""

    size = 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": torch.full((16_384,), float(index)), "box": torch.zeros(4), "label": torch.tensor(index)}


class Table(Sized):
    """16 rows of a table of 16 * 10,000 floats. A row is a view of the table."""

    def __init__(self) -> None:
        self.rows = torch.arange(16.0).repeat_interleave(10_000).reshape(16, 10_000)

    size = 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Sentences(Sized):
    """20 samples of different length: sample i is i + 1 times the number i."""

    size = 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


def stacked(samples: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As `default_collate` does, but in the worker's own memory."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def unchanged(sample: Any) -> Any:
    """Send a sample as it is."""
    return sample


def run(dataset: Any, **options: Any) -> tuple[list[Any], minidl.Trace]:
    """Load a dataset with two workers; the batches and the trace."""
    return record("tensors", dataset, keep=unchanged, num_workers=2, **options)


def epoch(trace: minidl.Trace) -> dict[str, float]:
    """For `timeline`: from the first batch that is fetched to the epoch's end, without start and end of the workers."""
    times = trace.to_pandas().time_ns
    begin, end = rows(trace, "fetch", "E")[0], rows(trace, "epoch", "E")[-1]
    return {"since": (times[begin] - times[0]) / 1e9, "until": (times[end] - times[0]) / 1e9}


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def message_size(tensor: torch.Tensor, payload: bytes) -> Asked:
    """A handle, not the tensor."""
    size = tensor.numel() * tensor.element_size()
    return Asked(
        f"A tensor of {size:,} bytes was pickled as a worker does it. How large is the message: nearly all of these bytes, about half, or hardly any?",
        Share(len(payload), size),
        "Look for the tensor's numbers in the message. What does a process need to know to find them?",
        f"{len(payload)} bytes: the name of a function that rebuilds the tensor, its type, shape and strides, and the handle of the shared memory in which its "
        "storage lies.",
        slips={"nearly all": "That is what `pickle.dumps` does without torch's reducers. Here, a reducer has put the numbers elsewhere.",
               "about half": "A message has the numbers, or it has not. They are not compressed."},
    )  # fmt: skip


@question
def moved(tensor: torch.Tensor) -> Asked:
    """Pickling changes the tensor's memory."""
    return Asked(
        "Before, `tensor.is_shared()` was False. Is this tensor, the sender's own, in shared memory after it was pickled: yes or no?",
        yes_no(tensor.is_shared(), "If the sender kept its own memory, a change of the tensor would not be seen by the receiver: there would be two copies."),
        "Somebody has to copy the numbers into shared memory. Does the sender need two copies afterwards?",
        "`reduce_storage` moves the storage: it makes a segment, copies the bytes once, and lets the sender's tensor use the segment from "
        "now on. That is the one copy that a tensor in private memory costs.",
    )  # fmt: skip


@question
def copier(trace: minidl.Trace) -> Asked:
    """The feeder copies, while the worker fetches."""
    (row, *_) = rows(trace, "shm_copy", "B")
    return Asked(
        "Here a collate_fn of our own has stacked in private memory. Which thread copies the batch into shared memory?",
        Choice("the worker's feeder thread", {
            "the worker's main thread, in `put`": ("`put` appends the batch to a buffer, and returns. What is copied later, is copied by another thread.", "worker", "main", "put", "the worker's main thread"),
            "the worker's feeder thread": ("", "feeder", "the feeder thread"),
            "the loader's main thread": ("The loader cannot read the worker's private memory: the copy must be made before.", "loader", "loop"),
        }),
        "The copy is a part of pickling. Which thread pickles? See 00, section 4.",
        "`shm_copy` lies inside `result_pickle`. The worker's main thread already fetches its next task, so the copy is hidden, until "
        "the feeder has more to copy than the worker to fetch.",
        row,
    )  # fmt: skip


@question
def segments(trace: minidl.Trace) -> Asked:
    """One segment, one descriptor for each tensor."""
    row = rows(trace, "result_rebuild", "E")[0]
    tensors = int(trace.to_pandas().tensors[row])
    return Asked(
        "A batch is a dict of three entries: images, boxes, labels. How many segments of shared memory travel with it?",
        Count(tensors),
        "Each tensor of the batch has a storage of its own.",
        "One for each tensor, each with a descriptor that goes through a socket, a map and an unmap. A batch of hundreds of small tensors pays this "
        "hundreds of times.",
        row,
        {1: "They are three tensors, and nobody has put them into one.", 4: "`default_collate` has stacked the samples: count tensors, not samples."},
    )  # fmt: skip


@question
def view(trace: minidl.Trace) -> Asked:
    """A view takes its whole storage along."""
    events = trace.to_pandas()
    row = rows(trace, "result_rebuild", "E")[0]
    shared = int(events.shared[row])
    return Asked(
        "Each sample is a row of a table: a view of 40,000 bytes of a tensor of 640,000. How many bytes of shared memory come with one sample?",
        Count(shared),
        "What is shared is a storage. Whose storage does a view have?",
        "The whole table. A view has no storage of its own; its message names the storage, an offset, and a shape. Each worker has moved its own "
        "copy of the table into shared memory, once.",
        row,
        {40_000: "That is what the row needs. But it has no memory of its own."},
    )  # fmt: skip


@question
def copies(shortcut: minidl.Trace, extra: minidl.Trace) -> Asked:
    """What the shortcut saves."""
    a, b = (ledger(trace).copies_per_byte for trace in (shortcut, extra))
    return Asked(
        "The two recorded runs differ in their collate_fn: `default_collate`, and one that stacks in private memory. How many copies more does each byte of a batch "
        "go through in the second?",
        Count(round(b - a)),
        "`default_collate` stacks into shared memory. What does the other one stack into, and what must follow?",
        f"The feeder's. The ledger counts {a:.2f} copies of each byte that is sent in the first, {b:.2f} in the second.",
        rows(extra, "shm_copy", "B")[0],
        trace=extra,
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def packed(collate_fn: Callable[[list[torch.Tensor]], Any]) -> str:
    """A collate for ragged samples: two tensors, whatever the batch."""
    step = "The step `collate`: it makes one batch of samples; here `(values, lengths)`, two tensors."
    collate_fn([Sentences()[index] for index in range(3)])  # an error of it is seen here, and not as a worker's
    batches, trace = run(Sentences(), batch_size=4, collate_fn=collate_fn)
    events = trace.to_pandas()
    most = int(events.tensors[rows(trace, "result_rebuild", "E")].max())
    for number, batch in enumerate(batches):
        wanted = [Sentences()[index] for index in range(4 * number, 4 * number + 4)]
        if (
            not isinstance(batch, (tuple, list))
            or len(batch) != 2
            or not all(isinstance(part, torch.Tensor) for part in batch)
        ):
            raise Wrong(
                f"A batch has to be `(values, lengths)`, two tensors. Yours came with {most} segments of shared memory.",
                "The step `result_pickle`: each tensor of a batch gets a segment and a descriptor of its own. " + step, trace, batches=[number],
            )  # fmt: skip
        values, lengths = batch
        if lengths.tolist() != [len(one) for one in wanted]:
            raise Wrong(
                f"Batch {number}: the lengths are {[len(one) for one in wanted]}; yours are {lengths.tolist()}.",
                step,
                trace,
            )
        if values.numel() != sum(map(len, wanted)):
            raise Wrong(
                f"Batch {number} has {sum(map(len, wanted))} numbers; your values have {values.numel()}.",
                step + " Padding would be sent, pinned and copied, too.", trace, batches=[number],
            )  # fmt: skip
        if not all(torch.equal(a, b) for a, b in zip(values.split(lengths.tolist()), wanted, strict=True)):
            raise Wrong(
                f"Batch {number}: split by the lengths, your values are other numbers than the samples.", step, trace
            )
    return f"Two tensors, two segments and two descriptors a batch ({most} in the trace), and no byte of padding."


@exercise
def small(collate_fn: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Send a row, and not the table."""
    table = Table()
    collate_fn(table[3])
    batches, trace = run(Table(), batch_size=None, collate_fn=collate_fn)
    for index, row in enumerate(batches):
        if not isinstance(row, torch.Tensor) or not torch.equal(row, table[index]):
            raise Wrong(
                f"Row {index} has come with other numbers.",
                "The step `collate`: it may change where the numbers lie, not the numbers.",
                trace,
            )
    events = trace.to_pandas()
    shared = int(events.shared[rows(trace, "result_rebuild", "E")].max())
    if shared > 40_000:
        raise Wrong(
            f"A row needs 40,000 bytes; {shared:,} bytes of shared memory come with it.",
            "The step `shm_copy`, inside `result_pickle`: it moves a storage, as a whole. A view (and what `detach` or `contiguous` return of a row, which is contiguous "
            "already) still has the storage of the table.",
            trace, batches=[0],
        )  # fmt: skip
    return "The row has a storage of its own. It costs a copy of 40,000 bytes, and saves a segment of 640,000 that lives as long as any of its rows."
