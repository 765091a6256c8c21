"""What Lightning knows of an epoch when it saves and loads a loader's state, and does not tell: read from its loops.

Lightning's fit loop goes on by its own counters of epochs and batches. They differ from what the loader was asked for:

- It takes a batch ahead from a loader without a length, and has the batch in hand before a step has learnt from it.
- A checkpoint of the callback `on_train_batch_end`, at the last batch, makes it count the epoch as done, although it
  has not seen the loader's end. What `iter()` makes after `load_state_dict` is then its next epoch.
- After that, it takes a checkpoint in the middle of an epoch for one at an epoch's end, and loads no state of loaders.
  It counts that epoch's batches from 0 again, so that its `limit_train_batches` would let too many through.

The loops are found among the callers, by the names of their modules and methods. If none is found, the loader counts
what it has handed out, as for any other program. Their attributes are those of Lightning 2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from minidl.wire.errors import StateMismatchError

_LIGHTNING: Final = ("lightning", "pytorch_lightning")


@dataclass(frozen=True)
class Saving:
    """Lightning is saving. ahead: batches that it has taken, and no step has learnt from.

    epoch: the number of the epoch that the loader is in; finished: Lightning has ended it.
    """

    ahead: int
    epoch: int
    finished: bool


def saving() -> Saving | None:
    """What Lightning's fit loop, which is saving the state, has taken and counted; None if no fit loop is saving."""
    for loop in _callers("loops.fit_loop", "on_save_checkpoint"):
        progress, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
        training = any(True for _ in _callers("loops.fit_loop", "advance"))
        in_hand = progress.current.ready - progress.current.processed
        finished = progress.is_last_batch and not (training or in_hand)
        return Saving(len(getattr(loop._data_fetcher, "batches", ())) + in_hand, epochs.processed - finished, finished)
    return None


def takes_ahead() -> int:
    """How many batches Lightning, which is making an iterator, may take before a step has learnt from them."""
    ahead = (getattr(fetcher, "prefetch_batches", None) for fetcher in _callers("loops.fetchers", "__iter__"))
    return max((batches + 1 for batches in ahead if batches is not None), default=0)


def goes_on(loader: Any, given: dict[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
    """The state from which `loader` goes on at this iter(), and whether Lightning counts the state's epoch as done.

    given: what the loader was given. Raises StateMismatchError if Lightning would leave out an epoch, or give one more
    batches than its `limit_train_batches`.
    """
    for loop in _callers("loops.fit_loop", "setup_data"):
        state = given if given is not None else _withheld(loop, loader)
        if state is None or state.get("epoch") is None:
            return given, False
        if given is None:
            begins_anew = state["finished"] or state["epoch"] < loop.epoch_progress.current.processed
            if not begins_anew and _is_limited(loop, loader):
                raise StateMismatchError(
                    "DataLoader: the checkpoint was saved within an epoch, and Lightning's counters say at an epoch's "
                    "end, so it would count limit_train_batches from 0 again and lengthen the epoch. Go on from a "
                    "checkpoint that was saved before Lightning was first resumed, or without limit_train_batches"
                )
            return (None if begins_anew else state), False
        if state["finished"] and loop.max_epochs != -1:
            raise StateMismatchError(
                "DataLoader: the checkpoint was saved at an epoch's end, and Lightning's counters say in the middle of "
                "one, so it would leave out an epoch. Go on from a checkpoint that was saved within an epoch, as "
                "ModelCheckpoint(every_n_train_steps=...) does, or set max_steps and max_epochs=-1"
            )
        return given, not state["finished"] and _counts(loop)
    return given, False


def _is_limited(loop: Any, loader: Any) -> bool:
    """Whether Lightning ends the loader's epochs before the loader does."""
    combined = loop._combined_loader
    limits = zip(combined.flattened, combined.limits or [], strict=False)
    limit = next((limit for one, limit in limits if getattr(one, "loader", one) is loader), math.inf)
    try:
        return bool(limit < len(loader))
    except TypeError:  # it has no length
        return limit < math.inf


def _withheld(loop: Any, loader: Any) -> dict[str, Any] | None:
    """The loader's state in a checkpoint from which Lightning loads none."""
    states = getattr(loop, "_combined_loader_states_to_load", None) or []
    loaders = [one for one in loop._combined_loader.flattened if hasattr(one, "load_state_dict")]
    pairs = zip(loaders, states, strict=False)
    return next((state for one, state in pairs if getattr(one, "loader", one) is loader), None)


def _counts(loop: Any) -> bool:
    """Whether the fit loop is about to count the epoch of its checkpoint as done: see its `reset`."""
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.total
    at_batch_end = batches.total.completed == batches.total.processed - 1
    in_epoch = epochs.started == epochs.ready == epochs.processed + 1
    return bool(batches.is_last_batch and at_batch_end and in_epoch)


def keeps_rank_0_alone() -> bool:
    """Whether Accelerate is saving the state: it asks all ranks for theirs, and writes that of its main process."""
    return any(True for _ in _callers("checkpointing", "save_custom_state", ("accelerate",)))


def _callers(module: str, method: str, packages: tuple[str, ...] = _LIGHTNING) -> Iterator[Any]:
    """The objects of a framework's `module` whose `method` is being called, beginning with the innermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == method:
            package, _, name = str(frame.f_globals.get("__name__")).partition(".")
            if package in packages and name.endswith(module):
                yield frame.f_locals.get("self")
        frame = frame.f_back
