"""The state of a loader: what `state_dict` holds, and the objects that are asked for states of their own.

The protocol is torch's: an object with `state_dict()` and `load_state_dict(state)`. It is honoured for the dataset, its
iterator, the sampler and its iterator (of a batch sampler: of the sampler in it). What has no state is fast-forwarded:
`position` says how far.

A state is plain data: it can be written as JSON if the states of these objects can. It holds torch's global random
state twice: as it was when the epoch began, so that the same order is drawn again, and as it is now. The iterator of
a resumed loader restores both, one before and one after its draws, so later epochs are those of the run that was saved.
The generators of `random`, NumPy and the workers are not in it, as upstream: workers have drawn for batches that were
not yielded, and another worker may fetch the next one. A map dataset may have them in its own state, and then the
number of workers must be the same. docs/guides/resume.md shows how to augment a sample by epoch and index instead.
Upstream: torchdata's StatefulDataLoader.
"""

from __future__ import annotations

import base64
import copy
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed
import torch.utils.data
from torch import Tensor

from minidl.data.fetch import Progress, _BaseDatasetFetcher, _DatasetKind
from minidl.data.sampler import BatchSampler
from minidl.loader.ports import EpochRecord, Fetching, Ports
from minidl.resume import frameworks
from minidl.resume.position import EpochPosition, Position, fast_forward
from minidl.wire.errors import ExceptionWrapper, StateMismatchError
from minidl.wire.messages import ResumeIteration, WorkerExhausted

VERSION: Final = 1

Loader = Any
"""A `dataloader.DataLoader`, whose module imports this one."""

State = dict[str, Any]


def has_state(thing: Any) -> bool:
    """Whether the object has a state of its own."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def pack(state: Any) -> bytes:
    """Freeze a state as it is now."""
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes | None) -> Any:
    return None if packed is None else pickle.loads(packed)


# --- Random states ----------------------------------------------------------------------------------------------------
def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _of_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _generators(loader: Loader) -> list[torch.Generator]:
    sampler = loader._index_sampler
    holders = (loader, sampler, getattr(sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _random_states(generators: list[torch.Generator]) -> list[Tensor]:
    """The global state, then those of the loader's and its samplers' generators."""
    return [torch.get_rng_state(), *(generator.get_state() for generator in generators)]


def _restore(loader: Loader, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for generator, state in zip(_generators(loader), states[1:], strict=False):
        generator.set_state(state)


# --- Datasets ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FetchStart:
    """Where a fetcher begins. again: batches to fetch once more and drop, by `index`; number: batches before."""

    state: bytes | None = None
    over: bool = False
    number: int = 0
    again: int = 0
    index: Any = None


def fetcher_has_state(fetcher: _BaseDatasetFetcher) -> bool:
    """Whether the dataset or its iterator has a state."""
    return has_state(fetcher.dataset) or has_state(getattr(fetcher, "dataset_iter", None))


def fetcher_state(fetcher: Any, ended: bool = False) -> State:
    """The states of dataset and iterator; only the iterator's if they are one object."""
    dataset: Any = fetcher.dataset
    iterator: Any = getattr(fetcher, "dataset_iter", None)
    return {
        "dataset": dataset.state_dict() if has_state(dataset) and iterator is not dataset else None,
        "iterator": iterator.state_dict() if has_state(iterator) else None,
        "ended": ended or getattr(fetcher, "ended", False),
    }


def opened(start: FetchStart, dataset: Any, make: Callable[[], Any]) -> Any:
    """A fetcher that goes on from `start`. make: creates one, which asks the dataset for its iterator.

    A dataset's state is loaded before that, its iterator's after it. If the epoch of the state is over, the iterator's
    state matters only for what loading it does besides (to a random state, say), and a new iterator follows.
    """
    state = unpack(start.state) or {"dataset": None, "iterator": None, "ended": False}
    if state["dataset"] is not None:
        _load("dataset", dataset, state["dataset"])
    fetcher = make()
    if state["iterator"] is not None and not (start.over and state["dataset"] is not None):
        _load("dataset's iterator", fetcher.dataset_iter, state["iterator"])
        fetcher = make() if start.over else fetcher
    if state["ended"] and not start.over:
        fetcher.ended = True
    progress, fetcher.progress = fetcher.progress, Progress()  # it belongs to no task
    for _ in range(start.again):
        try:
            fetcher.fetch(start.index)
        except StopIteration:
            break
        except Exception:  # the consumer has had it before
            continue
    fetcher.progress = progress
    return fetcher


def _load(what: str, thing: Any, state: Any) -> None:
    if not has_state(thing):
        raise TypeError(
            f"the state to resume from holds a state of the {what}, and {type(thing).__name__} has no load_state_dict: "
            f"resume with the {what} that was saved"
        )
    thing.load_state_dict(state)


class Keeper:
    """Takes a fetcher's state after each `every`-th batch, beginning with the first, and at the epoch's end.

    every: 0 = at the end alone; of a map dataset after each batch, because its samples are not fetched again, which
    would bring the state about. number: batches before.
    """

    def __init__(self, fetcher: Any, every: int, number: int) -> None:
        self.fetcher = fetcher
        self.every = every if hasattr(fetcher, "dataset_iter") else 1
        self.number = number

    def after(self, *, exhausted: bool) -> tuple[int, bytes] | None:
        """The number of the batch just fetched and the state after it; None if this one is left out."""
        self.number += not exhausted
        if exhausted or (self.every and (self.number - 1) % self.every == 0):
            return self.number, pack(fetcher_state(self.fetcher, exhausted))
        return None


def at_the_begin(fetcher: Any) -> bytes:
    """The state with which an epoch begins in this process, for who fetches its batches again."""
    try:
        return pack(fetcher_state(fetcher))
    except Exception as error:
        return no_state(error)


def no_state(error: Exception) -> bytes:
    """In place of a state that the dataset failed to give, and that the program has not asked for yet."""
    return pack({"failed": f"{type(error).__name__}: {error}"})


def keeper_of(fetcher: Any, every: int | None, number: int) -> Keeper | None:
    """What takes the fetcher's states; None if none are wanted or there is none."""
    return Keeper(fetcher, every, number) if every is not None and fetcher_has_state(fetcher) else None


class StatefulFetching(Fetching):
    """Begins where a state says, and sends states along. every: as a Keeper's."""

    def __init__(self, start: FetchStart, every: int) -> None:
        self.start, self.every = start, every
        self.keeper: Keeper | None = None

    def open(self, dataset: Any, make: Callable[[], Any]) -> Any:
        start, self.start = self.start, FetchStart()
        self.keeper = None
        fetcher = opened(start, dataset, make)
        self.keeper = keeper_of(fetcher, self.every, start.number)
        return fetcher

    def after(self, data: Any, task: int, where: str) -> tuple[Any, Any]:
        if self.keeper is None:
            return data, None
        try:
            return data, self.keeper.after(exhausted=isinstance(data, WorkerExhausted))
        except Exception as error:
            if not self.every:
                return data, (self.keeper.number, no_state(error))
            self.keeper = None  # else the end of the dataset would never be told
            if not isinstance(data, ExceptionWrapper):
                data = ExceptionWrapper(error, where, f"Task {task}: taking the state after it.")
            return data, None

    def between(self, epoch: int, where: str) -> tuple[Any, Any]:
        if self.keeper is None:
            return None, None
        try:
            return pack(fetcher_state(self.keeper.fetcher)), None
        except Exception as error:
            place = f"Epoch {epoch}: taking the state before it."
            return no_state(error), ExceptionWrapper(error, where, place) if self.every else None


# --- Samplers ---------------------------------------------------------------------------------------------------------
_WITHOUT_STATE: Final = ("torch.utils.data.sampler", "minidl.data.sampler", "minidl.loader.dataloader")
"""Modules of samplers that have no state, nor do their iterators."""


class _Held:
    """Stands for the sampler in a batch sampler, and keeps the iterator that this takes, because its state matters."""

    def __init__(self, sampler: Any, state: Any) -> None:
        self.sampler, self.state = sampler, state
        self.iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.sampler)
        if self.state is not None:
            _load("sampler's iterator", self.iterator, self.state)
        return self.iterator  # type: ignore[no-any-return]


class Drawing(Iterator[Any]):
    """The draws of one epoch: goes on from a state of the sampler, and tells the position its states.

    every: as a Keeper's; None: after the first draw alone.
    """

    def __init__(self, index_sampler: Any, position: EpochPosition, every: int | None) -> None:
        batches = type(index_sampler) in (BatchSampler, torch.utils.data.BatchSampler)
        self.sampler = index_sampler.sampler if batches else index_sampler
        self.position, self.every = position, every
        self.number, packed = position.sampler_state() or (0, None)
        state = unpack(packed) or {"sampler": None, "iterator": None}
        if state["sampler"] is not None:
            _load("sampler", self.sampler, state["sampler"])
        self.held = _Held(self.sampler, state["iterator"])
        if batches:
            index_sampler = copy.copy(index_sampler)
            index_sampler.sampler = self.held
            self.indices = iter(index_sampler)
        else:
            self.indices = iter(self.held)

    def __next__(self) -> Any:
        index = next(self.indices)
        self.number += 1
        if self.number == 1 or (self.every and (self.number - 1) % self.every == 0):
            self._tell()
        return index

    def _tell(self) -> None:
        iterator: Any = self.held.iterator if self.held.iterator is not self.sampler else None
        state = {
            "sampler": self.sampler.state_dict() if has_state(self.sampler) else None,
            "iterator": iterator.state_dict() if has_state(iterator) else None,
        }
        if any(value is not None for value in state.values()):
            self.position.drew(self.number, pack(state))

    def skip(self, low: int, ahead: set[int]) -> None:
        """Draw and drop what was yielded."""
        self.indices = fast_forward(self.indices, self.number, low, ahead)
        self.number = max(self.number, low)

    def finish(self) -> None:
        """Draw to the end of an epoch of which everything was yielded."""
        for _ in self.indices:
            pass


# --- A loader ---------------------------------------------------------------------------------------------------------
@dataclass
class Record(EpochRecord):
    """What a loader keeps of its present epoch, or of its last one.

    given: the state that the epoch was resumed from. begin: random states at its first draw. base_seed: the workers',
    None if it is drawn after that. fetcher: that of this process, if it can be asked for its state, and `keeper` what
    takes it (every: the loader's `state_every`; first: its batches before). asked: how many batches it was asked for:
    some of their samples may be in no batch that was handed out.
    """

    position: EpochPosition
    given: State | None = None
    begin: list[Tensor] = field(default_factory=list)
    base_seed: int | None = None
    fetcher: Any = None
    every: int | None = None
    keeper: Keeper | None = None
    first: int = 0
    asked: int = 0
    drawing: Drawing | None = None
    generators: list[torch.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("hand_out", "fail", "end"):
            setattr(self, name, getattr(self.position, name))

    @property
    def resumed(self) -> bool:
        """Whether the epoch goes on where another loader's ended."""
        return self.given is not None and not self.given["ended"]

    @property
    def batches(self) -> int:
        return self.position.batches

    @property
    def turn(self) -> int:
        return self.position.turn

    @property
    def counted(self) -> int:
        return self.position.counted

    # --- Its begin
    @property
    def _at_once(self) -> bool:
        """Whether the saved epoch began before its base seed was drawn, which is drawn again then."""
        return self.given is not None and self.given["base_seed"] is None

    def before_seed(self, loader: Loader) -> None:
        if self._at_once:
            self._restore_begin(loader)

    def before_draws(self, loader: Loader) -> None:
        if not self._at_once:
            self._restore_begin(loader)
        self.generators = _generators(loader)
        self.begin = _random_states(self.generators)

    def _restore_begin(self, loader: Loader) -> None:
        """Restore the random states of the epoch's begin."""
        if self.given is not None and self.given["random"] is not None:
            _restore(loader, [_of_text(text) for text in self.given["random"]["begin"]])

    def draws(self, index_sampler: Any) -> Iterator[Any]:
        """The index sampler's iterator, from where the epoch goes on."""
        of = getattr(index_sampler, "sampler", index_sampler)
        if not self.resumed and type(of).__module__ in _WITHOUT_STATE:
            return iter(index_sampler)
        self.drawing = Drawing(index_sampler, self.position, self.every)
        return self.drawing

    def skip(self) -> None:
        """Draw and drop what was yielded of a resumed epoch."""
        if self.drawing is not None and self.position.indexed:
            self.drawing.skip(self.position.low, self.position.ahead)

    def seeded(self, base_seed: int) -> None:
        self.base_seed = base_seed

    def fetching(self, worker: int, loader: Loader) -> Fetching:
        return StatefulFetching(self._start_of(worker, loader), self.every or 0)

    def _start_of(self, worker: int, loader: Loader) -> FetchStart:
        """Where a worker's fetcher begins; a map dataset fetches nothing again."""
        place = self.position.places[worker]
        again = () if self.position.indexed else (place.behind, next(iter(loader._index_sampler)))
        return FetchStart(place.state, place.over, place.yielded, *again)

    def opened(self, loader: Loader, make: Callable[[], Any]) -> Any:
        start = self._start_of(0, loader)
        fetcher = opened(start, loader.dataset, make)
        self.first, self.keeper = start.number, keeper_of(fetcher, self.every, start.number)
        self.fetcher = fetcher if fetcher_has_state(fetcher) else None
        if self.fetcher is not None and self.position.lag and not self.resumed:
            self.position.places[0].state = at_the_begin(fetcher)
        return fetcher

    def begun(self, loader: Loader) -> None:
        """The epoch is where the loader's state says, which is used up; `state_dict` is about this epoch from here.

        The global random state is that of the moment when the state was taken: the draws before it are made.
        """
        if self.resumed and self.given is not None and self.given["random"] is not None:
            torch.set_rng_state(_of_text(self.given["random"]["now"]))
        loader._given, loader._record = None, self

    # --- Its course
    def first_draw(self, base_seed: int) -> None:
        """Note the random states again: the program may have drawn since iter()."""
        if not self.resumed:
            self.begin, self.base_seed = _random_states(self.generators), base_seed

    def fetch(self, fetcher: Any, index: Any) -> Any:
        task = self.counted
        self.asked = task + 1
        data = fetcher.fetch(index)
        if self.keeper is not None:
            self.keeper.number = self.first + task
            if (state := self.keeper.after(exhausted=False)) is not None:
                self.position.received(task, 0, state)
        return data

    def goes_on(self, ports: Ports, num_workers: int) -> None:
        self.position.settle()
        self.position.places += [Position() for _ in range(num_workers - len(self.position.places))]
        ports.follow_epoch(self.position)

    def state_came(self, message: Any, *, stale: bool) -> None:
        if type(message) is ResumeIteration:
            self.position.epoch_begun(message.worker_id, message.state)
        elif not stale:
            self.position.received(message.idx, message.worker_id, message.state)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # it belongs to one process: a loader's pickle or deep copy has none


def begin(loader: Loader, make_position: Callable[..., EpochPosition]) -> Record:
    """Begin an epoch where the state that the loader was given says.

    make_position: an `EpochPosition` of such arguments. Raises StateMismatchError if that state is of another loader.
    """
    record = _begin(loader, make_position, loader._given)
    record.every, record.position.lag = loader.state_every, frameworks.takes_ahead()
    return record


def _begin(loader: Loader, make_position: Callable[..., EpochPosition], given: State | None) -> Record:
    indexed = loader._dataset_kind == _DatasetKind.Map
    places = [Position() for _ in range(max(1, loader.num_workers))]
    if given is None:
        return Record(make_position(places, indexed))
    given = _fitting(_of_this_rank(given, loader), loader)
    _go_back(loader, given)
    for place, saved in zip(places, given["workers"], strict=False):
        place.yielded, place.at, place.over = saved["yielded"], saved["at"], saved["over"]
        place.state = pack(saved["state"])
    low, ahead, batches, turn = (given[name] for name in ("yielded", "ahead", "batches", "turn"))
    drawn = deque([(saved["at"], pack(saved["state"]))] if (saved := given["sampler"]) is not None else [])
    if not given["ended"]:
        turn %= len(places)
        position = make_position(places, indexed, low, set(ahead), batches, turn, drawn)
        return Record(position, given, base_seed=given["base_seed"])
    own = unpack(places[0].state) if loader.num_workers == 0 else None
    if own is not None and own["dataset"] is not None:
        _load("dataset", loader.dataset, own["dataset"])  # now, since it may set the random state, which comes next
        places[0].state = None
    if drawn:  # an epoch over: the sampler ends it, and begins the next one by itself
        Drawing(loader._index_sampler, EpochPosition(places, indexed, low, drawn=drawn), None).finish()
    return Record(make_position(places, indexed), given, base_seed=given["base_seed"])


def saved(loader: Loader) -> State:
    """The state of a loader: what its consumer was given."""
    places = [Position() for _ in range(max(1, loader.num_workers))]
    record: Record = loader._record or Record(EpochPosition(places, True))
    saving = frameworks.saving()
    record.position.settle_but(None if saving is None else saving.ahead)
    record.position.taken()
    position, now = record.position, list(map(_to_text, _random_states(_generators(loader))))
    ended = position.ended or loader._record is None
    stays = ended and loader._iterator is not None  # the same workers go on
    rank, ranks = _place_of(loader)
    # At an epoch's end, the program tells such a sampler the next one; a state that is loaded later would undo that.
    sampler = None if ended and callable(getattr(_told(loader), "set_epoch", None)) else position.sampler_state()
    state = {
        "minidl": VERSION,
        **_traits(loader),
        "rank": rank,
        "ranks": ranks,
        "ended": ended,
        "epoch": None if saving is None else saving.epoch,
        "finished": saving is not None and saving.finished,
        "batches": position.batches,
        "yielded": position.low,
        "ahead": sorted(position.ahead),
        "turn": position.turn,
        "base_seed": record.base_seed if stays or not ended else None,
        "random": {"begin": now if ended else list(map(_to_text, record.begin)), "now": now[0]},
        "sampler_epoch": told_epoch(loader),
        "sampler": None if sampler is None else {"at": sampler[0], "state": unpack(sampler[1])},
        "workers": [_saved_place(place, loader, record, ended, stays) for place in position.places],
    }
    if saving is not None:
        return state | {"others": _of_all_ranks(state, loader)}
    if rank > 0 and frameworks.keeps_rank_0_alone() and not _any_ranks_will_do(state, loader):
        warnings.warn(
            f"DataLoader.state_dict: Accelerate saves only rank 0's state, and rank {rank}'s differs: save it in a "
            "file of its own",
            stacklevel=3,
        )
    return state


def _any_ranks_will_do(state: State, loader: Loader) -> bool:
    """Whether a rank can go on from another one's state."""
    return state["kind"] == "map" and not has_state(loader.dataset)


def _of_all_ranks(state: State, loader: Loader) -> list[State]:
    """The states of all ranks, if another one's will not do; for Lightning, which keeps only that of rank 0."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or _any_ranks_will_do(state, loader):
        return []
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def _saved_place(place: Position, loader: Loader, record: Record, ended: bool, stays: bool) -> State:
    state, number, at, over = unpack(place.state), place.yielded, place.at, place.over
    if loader.num_workers == 0 and not record.position.log:
        if record.fetcher is not None and record.position.counted >= record.asked:
            state, at, over = copy.deepcopy(fetcher_state(record.fetcher)), number, False
        elif loader._record is None and has_state(loader.dataset):
            state = {"dataset": copy.deepcopy(loader.dataset.state_dict()), "iterator": None, "ended": False}
    elif ended and not stays:  # the next epoch's workers begin anew
        state = None
    if state is not None and "failed" in state:
        raise RuntimeError(f"DataLoader.state_dict: a worker's dataset has failed to give its state: {state['failed']}")
    if ended:
        number, at, over = 0, 0, state is not None
    return {"yielded": number, "at": at, "over": over, "state": state}


def _traits(loader: Loader) -> State:
    """What a state can be resumed with only if it is the same. A DistributedSampler's order is made by its seed."""
    told = _told(loader)
    return {
        "kind": "map" if loader._dataset_kind == _DatasetKind.Map else "iterable",
        "num_workers": int(loader.num_workers),  # which may be a subclass, and a state is plain data
        "batch_size": getattr(loader._index_sampler, "batch_size", None),
        "sampler_seed": told.seed if isinstance(told, torch.utils.data.DistributedSampler) else None,
    }


def _told(loader: Loader) -> Any:
    """The sampler that a program tells its epoch: that in a batch sampler."""
    return getattr(loader._index_sampler, "sampler", loader._index_sampler)


def told_epoch(loader: Loader) -> int | None:
    """The epoch that the loader's sampler was told last, None if it can be told none."""
    epoch = getattr(_told(loader), "epoch", None)
    return epoch if isinstance(epoch, int) and callable(getattr(_told(loader), "set_epoch", None)) else None


def tell_next(loader: Loader, given: State) -> None:
    """Tell the loader's sampler, if it can be told one, the epoch that follows the state's."""
    if given.get("sampler_epoch") is not None and told_epoch(loader) is not None:
        _told(loader).set_epoch(given["sampler_epoch"] + 1)


def _go_back(loader: Loader, given: State) -> None:
    """Tell the sampler the epoch that the state is in the middle of: a framework may do so after iter(), or never.

    Raises StateMismatchError if the program has told it another one since it loaded the state: it has come through the
    state's epoch without it.
    """
    saved, now = given.get("sampler_epoch"), told_epoch(loader)
    if saved is None or now is None or given["ended"] or _is_at_the_end(loader, given):
        return
    if now not in (saved, loader._told_at_load):
        raise StateMismatchError(
            f"DataLoader: the state to resume from is in the middle of epoch {saved} of the sampler, and "
            f"set_epoch({now}) was called after load_state_dict. If the program has finished that epoch otherwise, as "
            f"by skip_first_batches, it should load no state; if not, it should call set_epoch({saved})"
        )
    _told(loader).set_epoch(saved)


def _is_at_the_end(loader: Loader, given: State) -> bool:
    """Whether no batch is left in the state's epoch."""
    try:
        return bool(given["yielded"] >= len(loader._index_sampler))
    except TypeError:  # the sampler has no length
        return False


def _place_of(loader: Loader) -> tuple[int, int]:
    """This process's rank and the number of ranks: of the process group, or of the sampler."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    sampler = _told(loader)
    rank, ranks = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    return (rank, ranks) if isinstance(rank, int) and isinstance(ranks, int) else (0, 1)


def checked(state: Any) -> State:
    """A copy of a state to resume from; raises TypeError for what is none, ValueError for one of another version."""
    if not isinstance(state, Mapping) or "minidl" not in state:
        keys = f"a {type(state).__name__}" + (
            f" with {sorted(map(str, state))[:4]}" if isinstance(state, Mapping) else ""
        )
        raise TypeError(f"DataLoader.load_state_dict: expected what minidl.DataLoader.state_dict returned, got {keys}")
    if state["minidl"] != VERSION:
        raise ValueError(
            f"DataLoader.load_state_dict: the state has version {state['minidl']}, this minidl reads {VERSION}: resume "
            "with the minidl that saved it"
        )
    return copy.deepcopy(dict(state))


def _of_this_rank(state: State, loader: Loader) -> State:
    rank, ranks = _place_of(loader)
    others = state.get("others") or []
    return others[rank] if rank != state["rank"] and ranks == len(others) else state


def _fitting(state: State, loader: Loader) -> State:
    """The state, if it can be resumed with this loader; that of another rank without what only that rank has."""
    rank, ranks = _place_of(loader)
    mine = _traits(loader) | {"ranks": ranks}
    # Whether nothing in it belongs to one worker. States of a map dataset may still be on their way from the workers.
    spread = state["ended"] or (state["kind"] == "map" and not has_state(loader.dataset))
    spread = spread and all(worker["state"] is None for worker in state["workers"])
    free = {"num_workers"} if spread else set()
    free |= {"sampler_seed"} if state["ended"] else set()
    wrong = [name for name, value in mine.items() if state.get(name, value) != value and name not in free]
    if mine["kind"] == "iterable" and not wrong and state["rank"] != rank:
        mine["rank"], wrong = rank, ["rank"]
    if wrong:
        saved_as, now = (", ".join(f"{name} {having[name]!r}" for name in wrong) for having in (state, mine))
        raise StateMismatchError(
            f"DataLoader: the state to resume from was saved with {saved_as}, and this loader has {now}: "
            "use the same, or begin a new epoch with load_state_dict({})"
        )
    return state if state["rank"] == rank else state | {"base_seed": None, "random": None}
