"""Why a batch is missing: where the batch is that the loader waits for, by the protocol's state.

Interface: `missing_batch(state)` -> `MissingBatch`. Pure. `hang.snapshot` words it, and `hang.headline` chooses by it
the process to look at. `hang.chain`, which has stacks and may have no trace, finds the thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from minidl.playback.state import STARTING, MessageStage, ProtocolState, Queued, WorkerNow
from minidl.tracefile.events import Message


class BatchPlace(enum.Enum):
    """Where a batch is that has not reached the loader. The value says so, and `hang.snapshot` fills it in."""

    PIN_THREAD = "{task} has left worker {worker}: the pin thread has it"
    READY_QUEUE = "{task} has left worker {worker}: it is in the ready queue"
    WORKER = "waiting for {maker}"
    INDEX_QUEUE = "waiting for {maker}; {task} is still in its index queue"
    RESULT_QUEUE = "worker {worker} has put {task} into the result queue; {stage}"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class MissingBatch:
    """The batch that the loader waits for. task: its number, -1 = whichever comes, or none.

    maker: the worker that makes it, the first busy one if any batch will do; -1 = none. unstarted: that worker has
    recorded nothing yet. stage: of the batch's result in the result queue, None = it is not there. finished: the tasks
    whose batches can be received before it.
    """

    task: int
    maker: int
    unstarted: bool
    place: BatchPlace
    stage: MessageStage | None
    finished: tuple[int, ...]


def missing_batch(state: ProtocolState, gone: Collection[int] = ()) -> MissingBatch:
    """Find the batch that the loader waits for. gone: workers whose processes have ended."""
    task = -1 if state.waiting_for is None else state.waiting_for
    number = state.waiting_worker
    worker = next((one for one in state.workers if one.worker == number), WorkerNow(number))
    results = [m for m in state.result_queue if m.kind is Message.RESULT]
    own = [message for message in results if message.task == task]
    places = (
        (BatchPlace.PIN_THREAD, state.pin is not None and state.pin.task == task),
        (BatchPlace.READY_QUEUE, _holds(state.ready_queue, task)),
        (BatchPlace.WORKER, worker.held == task or number in gone),
        (BatchPlace.INDEX_QUEUE, _holds(worker.index_queue, task)),
        (BatchPlace.RESULT_QUEUE, own),
        (BatchPlace.WORKER, not worker.idle),
    )
    piped = (message.task for message in results if message.stage.sent)
    ready = (message.task for message in state.ready_queue if message.kind is Message.RESULT)
    maker = _maker(state)
    return MissingBatch(
        task=task,
        maker=maker,
        unstarted=any(one.worker == maker and one.activity == STARTING for one in state.workers),
        place=next((place for place, holds in places if task >= 0 and holds), BatchPlace.UNKNOWN),
        stage=own[0].stage if own else None,
        finished=tuple(sorted({*state.reorder_buffer, *piped, *ready} - {task})),
    )


def _maker(state: ProtocolState) -> int:
    if state.waiting_worker >= 0 or state.alone:
        return state.waiting_worker
    return next((worker.worker for worker in state.workers if not worker.idle), -1)


def _holds(queue: Iterable[Queued], task: int) -> bool:
    return any(message.task == task for message in queue)
