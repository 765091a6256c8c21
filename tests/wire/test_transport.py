"""How tensors cross: values, views and kinds as through torch's own queues; when bytes are copied, where, how often."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing import reduction, resource_sharer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import torch.utils.data
import workloads as wl
from oracle_twice import different
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

import minidl
from minidl.arena.pickling import packed, unpacked
from minidl.wire import tensors
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.message import Envelope, dumps, rebuild
from minidl.wire.messages import RebuildFailure, Result, Task
from minidl.wire.tensors import NotHandedOverError, TensorPickler, handover_timeout

SHM = Path("/dev/shm")


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(request.param)
    yield request.param
    mp.set_sharing_strategy(before)


@pytest.fixture(autouse=True)
def _no_sharer() -> Iterator[None]:
    """End the thread that hands out this process's descriptors, where a test shares from here."""
    yield
    resource_sharer.stop(timeout=10)


# --- What arrives -----------------------------------------------------------------------------------------------------
class Labelled(torch.Tensor):
    """A subclass."""


def two_views() -> Any:
    base = torch.arange(10)
    return [base, base[2:5], base.view(2, 5).t(), base[7]]


def parameter() -> Any:
    return torch.nn.Parameter(torch.arange(3.0))


def hooked() -> Any:
    tensor = torch.arange(3.0)
    tensor.label = "lost on the way"  # type: ignore[attr-defined]
    return tensor


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
THINGS: dict[str, Callable[[], Any]] = {
    **{str(dtype): lambda dtype=dtype: torch.arange(6).to(dtype) for dtype in DTYPES},  # type: ignore[misc]
    "views of one storage": two_views,
    "twice the same": lambda: [torch.arange(3)] * 2,
    "empty": lambda: torch.empty(0),
    "empty with a shape": lambda: torch.empty(3, 0, 2),
    "empty views": lambda: [torch.arange(4)[:0], torch.arange(4)[4:]],
    "no dimensions": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.arange(6).view(2, 3).t(),
    "strided": lambda: torch.arange(20)[3::4],
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "channels last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "another dtype's view": lambda: torch.arange(4.0).view(torch.int32),
    "leaf with gradient": lambda: torch.arange(3.0, requires_grad=True),
    "parameter": parameter,
    "parameter without gradient": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.arange(3.0)),
    "subclass": lambda: torch.arange(3.0).as_subclass(Labelled),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "attribute": hooked,
    "storage": lambda: torch.arange(3).untyped_storage(),
    "typed storage": lambda: torch.FloatStorage([1.0, 2.0]),
    "array": lambda: np.arange(6).reshape(2, 3),
    "scalar": lambda: np.float32(3.5),
    "nest": lambda: {"a": [torch.arange(2), (None, "b")], 3: wl.Point(1, torch.tensor(2))},
    "generator": lambda: torch.Generator().manual_seed(3),
    "device and dtype": lambda: [torch.device("cpu"), torch.int8, torch.Size([2]), torch.strided],
    "big": lambda: torch.arange(1_000_003),
}


class Things(wl.Numbers):
    """i -> thing i."""

    def __getitem__(self, index: int) -> Any:
        return list(THINGS.values())[index]()


def as_it_is(thing: Any) -> Any:
    return thing


def received(lib: Any, dataset: Any) -> list[Any]:
    """All of a dataset, unbatched, through a worker; errors as their type and last line."""
    loader = lib.DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=as_it_is)
    iterator = iter(loader)
    seen: list[Any] = []
    for _ in range(len(dataset)):
        try:
            seen.append(next(iterator))
        except Exception as error:
            seen.append((type(error), [line for line in str(error).splitlines() if line][-2]))
    return seen


def plain(thing: Any) -> Any:
    """What `different` can compare: sparse tensors and storages by their values."""
    if isinstance(thing, torch.Tensor) and thing.layout is not torch.strided:
        return [str(thing.layout), thing.to_dense()]
    if isinstance(thing, (torch.UntypedStorage, torch.TypedStorage)):
        return [type(thing), thing.tolist(), thing.is_shared()]
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    return thing


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_everything_arrives_as_through_torchs_queues(strategy: str) -> None:
    things = Things(len(THINGS))
    ours, theirs = received(minidl, things), received(torch.utils.data, things)
    for name, got, expected in zip(THINGS, ours, theirs, strict=True):
        difference = different(plain(expected), plain(got))
        assert difference is None, f"{name}: torch {expected!r}, minidl {got!r}: {difference}"
        if isinstance(got, torch.Tensor):
            assert type(got) is type(expected), name
            assert (got.is_leaf, got.requires_grad) == (expected.is_leaf, expected.requires_grad), name


@pytest.mark.live
def test_what_torchs_queues_get_wrong_or_refuse() -> None:
    """A lazy conjugate keeps its sign here; a tensor inside a graph is refused, in torch's words."""

    def conjugate() -> torch.Tensor:
        return torch.tensor([1 + 2j, 3 - 4j]).conj()

    def inside_a_graph() -> torch.Tensor:
        return torch.arange(3.0, requires_grad=True) * 2

    lost = [(wl.At(2, 0, conjugate)), (wl.At(2, 0, lambda: conjugate().imag))]
    assert [received(minidl, dataset)[0].tolist() for dataset in lost] == [[1 - 2j, 3 + 4j], [-2.0, 4.0]]
    (kind, words), after = received(minidl, wl.At(2, 0, inside_a_graph))
    assert (kind, after) == (RuntimeError, 1)
    assert "Cowardly refusing to serialize non-leaf tensor which requires_grad" in words


@pytest.mark.live
def test_views_of_one_storage_stay_views_of_one_storage(strategy: str) -> None:
    base, part, turned, one = received(minidl, wl.At(1, 0, two_views))[0]
    base[:] = -base
    assert part.tolist() == [-2, -3, -4]
    assert turned.tolist() == [[0, -5], [-1, -6], [-2, -7], [-3, -8], [-4, -9]]
    assert one.item() == -7
    assert len({tensor.untyped_storage().data_ptr() for tensor in (base, part, turned, one)}) == 1


class Echo(wl.Gate):
    """Sends its tensor, and then what is in it."""

    def __init__(self, path: Path) -> None:
        super().__init__(2, path, at=1)
        self.tensor = torch.zeros(2)

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return self.tensor if index == 0 else self.tensor.tolist()


@pytest.mark.live
def test_the_batch_is_the_workers_memory(tmp_path: Path) -> None:
    """What the consumer writes into a batch, the worker that still holds it reads: no byte was copied on the way."""
    loader = minidl.DataLoader(Echo(tmp_path / "go"), None, num_workers=1, prefetch_factor=1, collate_fn=as_it_is)
    iterator = iter(loader)
    batch = next(iterator)
    batch[1] = 5
    (tmp_path / "go").touch()
    assert next(iterator) == [0, 5]


# --- When it is copied, where, and how often --------------------------------------------------------------------------
class Watched(TensorPickler):
    """Notes each copy and its thread."""

    copies: list[tuple[int, str]] = []  # noqa: RUF012

    def copy_storage(self, storage: torch.UntypedStorage) -> Any:
        self.copies.append((storage.nbytes(), threading.current_thread().name))
        return super().copy_storage(storage)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    monkeypatch.setattr(Watched, "copies", [])
    monkeypatch.setattr(Envelope, "pickler", Watched)
    return Watched.copies


def through_a_queue(message: Any) -> Any:
    """Put it into a real queue of this process, and get it again."""
    queue = mp.get_context("fork").Queue()
    queue.put(Envelope(message) if isinstance(message, (Task, Result)) else message)
    got = queue.get(timeout=30)
    queue.close()
    queue.join_thread()
    return got


def test_private_memory_is_copied_by_the_feeder_thread_and_shared_memory_is_not(
    strategy: str, copies: list[tuple[int, str]]
) -> None:
    private, shared = torch.arange(1000), torch.arange(500).share_memory_()
    before = shared.data_ptr()
    got = through_a_queue(Result(7, 2, [private, shared, private[3:5], shared[0]]))
    assert (got.idx, got.worker_id) == (7, 2)
    assert copies == [(8000, "QueueFeederThread")]
    assert private.is_shared()  # sending moves the sender's own tensor
    assert shared.data_ptr() == before
    again = through_a_queue(Result(8, 2, [private, shared]))
    assert copies == [(8000, "QueueFeederThread")]
    assert [tensor.tolist() for tensor in again.data] == [list(range(1000)), list(range(500))]


@pytest.mark.parametrize(
    ("data", "tensors", "shared", "copied"),
    [
        (lambda: [torch.arange(1000)[2:4], torch.empty(0)], 2, 8000, 8000),
        (lambda: torch.arange(500).share_memory_(), 1, 4000, 0),
        (lambda: torch.nn.Parameter(torch.zeros(3)), 1, 12, 12),
        (lambda: torch.zeros(3, requires_grad=True), 1, 12, 12),
        (lambda: torch.zeros(3).as_subclass(Labelled), 1, 12, 12),
        (lambda: torch.eye(3).to_sparse(), 1, 60, 60),
        (lambda: torch.nn.Linear(2, 2), 2, 24, 24),
        (lambda: torch.zeros(3, device="meta"), 0, 0, 0),
    ],
    ids=["private", "shared", "parameter", "leaf", "subclass", "sparse", "module", "meta"],
)
def test_the_pickler_counts_tensors_and_bytes_of_whole_storages(
    data: Callable[[], Any], tensors: int, shared: int, copied: int
) -> None:
    _, counted = dumps([data()])
    assert (counted.tensors, counted.shared_bytes, counted.copied_bytes) == (tensors, shared, copied)


@pytest.mark.parametrize("index", [5, None, (1, 2), [1, 2], [1, "a"], []], ids=repr)
def test_a_task_is_packed_with_whatever_index(index: Any) -> None:
    assert unpacked(memoryview(packed(Envelope(Task(4, 1, index))))) == Task(4, 1, index)


@pytest.mark.parametrize("state", [None, (2, b"state")])
@pytest.mark.parametrize("data", [5, 0.5, [1, 0.5], "a", ["a"], [[1]], True, None], ids=repr)
def test_a_result_is_packed_with_its_state_by_the_number_of_its_function(data: Any, state: Any) -> None:
    result = Result(3, 1, data, state)
    assert unpacked(memoryview(packed(Envelope(result)))) == result
    assert b"esult" not in packed(Envelope(result))
    assert len(Envelope(result).__reduce__()[1]) == (3 if state is None else 4)


@pytest.mark.parametrize("data", [5, 0.5, [5, 7], [0.5], [], None, True, "a\ud800", ["a", None]], ids=repr)
def test_plain_values_are_not_pickled_apart(data: Any) -> None:
    assert Envelope(Task(3, 1, data)).__reduce__() == (Task, (3, 1, data))
    assert Envelope(Result(3, 1, data)).__reduce__() == (Result, (3, 1, data))


class Unsized:
    """Fails to be pickled as torch does where it can't size a segment."""

    def __init__(self, segment: str) -> None:
        self.segment = segment

    def __reduce__(self) -> Any:
        raise RuntimeError(f"unable to resize file </{self.segment}> to the right size")


@pytest.mark.parametrize("ours", [True, False])
def test_a_segment_that_could_not_be_sized_is_removed_by_who_has_made_it(ours: bool) -> None:
    segment = SHM / f"torch_{os.getpid() if ours else 1 << 30}_7_0"
    segment.touch()
    try:
        Envelope(Result(0, 0, Unsized(segment.name))).payload()
        assert segment.exists() is not ours
        Envelope(Result(0, 0, Unsized(segment.name))).payload()  # also where it is gone
    finally:
        segment.unlink(missing_ok=True)


def raising(error: BaseException) -> Any:
    """A thing that raises the error when it is pickled."""

    class Raises:
        def __reduce__(self) -> Any:
            raise error

    return Raises()


class MuteError(RuntimeError):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no words")


class LocalError(Exception):
    """Can't be found by its name."""

    __qualname__ = "nowhere.LocalError"


UNSENT: dict[str, tuple[Any, type[Exception], str]] = {
    "beside a tensor": ([torch.arange(3), wl.Unpicklable()], TypeError, "this object does not travel"),
    "an error": (ExceptionWrapper(LocalError("of a sample"), "in a test"), RuntimeError, "LocalError: of a sample"),
    "its error does not travel": (raising(LocalError("no way")), RuntimeError, "its batch can't be sent between"),
    "its error has no text": (raising(MuteError()), MuteError, "Caught MuteError in DataLoader worker process 1 while"),
    "an exit": (
        raising(SystemExit(3)),
        RuntimeError,
        "Caught SystemExit in DataLoader worker process 1 while",
    ),
}
"""What can't be pickled, the error that arrives in its place, and its words."""


@pytest.mark.parametrize("case", UNSENT)
def test_what_fails_to_be_pickled_becomes_the_error_of_its_task(case: str) -> None:
    """It ends neither the feeder thread nor the reader."""
    data, kind, words = UNSENT[case]
    got = pickle.loads(pickle.dumps(Envelope(Result(4, 1, data))))
    assert (got.idx, got.worker_id, type(got.data), got.data.exc_type) == (4, 1, ExceptionWrapper, kind)
    assert words in got.data.text
    with pytest.raises(kind):
        got.data.reraise()


@pytest.mark.parametrize("index", [[wl.Unpicklable()], wl.Unpicklable()], ids=["in a list", "alone"])
def test_an_index_that_does_not_pickle_is_its_tasks_error(index: Any) -> None:
    task = unpacked(memoryview(packed(Envelope(Task(4, 1, index)))))
    assert (task.idx, task.worker_id, type(task.index)) == (4, 1, ExceptionWrapper)
    assert task.index.where == "in the loader while it pickled a task's indices"
    assert task.index.place == "Task 4: its batch can't be sent between processes."


def test_what_fails_to_be_rebuilt_says_so_in_its_place() -> None:
    got = through_a_queue(Result(4, 1, wl.Unbuildable()))
    assert isinstance(got.data, RebuildFailure)
    assert str(got.data.error) == "this object does not arrive"
    assert isinstance(rebuild(b"no pickle"), RebuildFailure)


def test_reducers_that_users_register_later_are_used() -> None:
    class Foreign:
        pass

    reduction.ForkingPickler.register(Foreign, lambda _: (str, ("reduced",)))
    try:
        assert rebuild(dumps(Foreign())[0]) == "reduced"
    finally:
        del reduction.ForkingPickler._extra_reducers[Foreign]  # type: ignore[attr-defined]


# --- What is left -----------------------------------------------------------------------------------------------------
def segments_of(pid: int) -> list[str]:
    return [name for name in os.listdir(SHM) if name.startswith(f"torch_{pid}_")]


@pytest.mark.live
def test_segments_have_names_only_by_file_system_and_only_while_they_are_held(strategy: str) -> None:
    """A batch outlives its worker and its loader."""
    iterator: Any = iter(minidl.DataLoader(wl.Tensors(4), batch_size=2, num_workers=1))
    pid = iterator._workers[0].pid
    batches = list(iterator)
    del iterator
    assert all(batch.is_shared() for batch in batches)
    assert len(segments_of(pid)) == (2 if strategy == "file_system" else 0)
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3]]
    batches[0][0, 0] = 9
    batches.clear()
    assert segments_of(pid) == []


@pytest.mark.live
def test_descriptors_are_given_back() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    iterator = iter(minidl.DataLoader(wl.Tensors(64), num_workers=1))
    next(iterator)
    before = descriptors()
    kept = [next(iterator) for _ in range(20)]
    assert descriptors() == before + 20  # a batch is one segment, and holds one descriptor
    kept.clear()
    assert descriptors() == before


def test_what_workers_have_left_is_removed_unless_others_may_open_it(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(tensors, "remove_segments_of", removed.append)
    tensors.remove_left([5, 6])
    assert removed == ([[5, 6]] if strategy == "file_descriptor" else [])


def test_a_segment_that_this_process_has_not_mapped_is_mapped_and_remembered(strategy: str) -> None:
    tensor, before = torch.arange(3), set(shared_cache)
    sent, _ = dumps(tensor)
    (key,) = set(shared_cache) - before
    del shared_cache[key]
    arrived = rebuild(sent)
    assert set(shared_cache) - before == {key}
    assert tensors._mapped(key, pytest.fail).data_ptr() == arrived.data_ptr() != tensor.data_ptr()
    assert arrived.fill_(7).tolist() == tensor.tolist() == [7, 7, 7]


def test_a_descriptor_is_waited_for_no_longer_than_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: list[Any] = []

    class Socket(socket.socket):
        def setsockopt(self, *option: Any) -> None:
            if option[1] in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                limits.append(option)
            super().setsockopt(*option)

    monkeypatch.setattr(tensors.socket, "socket", Socket)
    sent, _ = dumps([torch.arange(3), torch.arange(4)])
    with handover_timeout(wl.BOUND + 0.25):
        assert [tensor.tolist() for tensor in rebuild(sent)] == [[0, 1, 2], [0, 1, 2, 3]]
    assert rebuild(dumps([torch.arange(2)])[0])[0].tolist() == [0, 1]  # after the block, without a limit
    limit = struct.pack("ll", int(wl.BOUND), 250_000)
    assert set(limits) == {(socket.SOL_SOCKET, option, limit) for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)}
    with Socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        asked = SimpleNamespace(_id=(str(tmp_path / "silent"), 1))
        for seconds in (0.01, 0.0):
            with (
                handover_timeout(seconds),
                pytest.raises(NotHandedOverError, match=rf"^no answer within {seconds:g} s$"),
            ):
                tensors.rebuild_storage_fd(asked, 1)


def test_torchs_cache_of_segments_is_the_one_that_is_used(strategy: str) -> None:
    """A tensor that came through torch's own queue and goes on through ours is mapped once, and the other way round."""
    tensor = torch.arange(3)
    first = through_a_queue(tensor)
    second = through_a_queue(Result(0, 0, tensor)).data
    assert first.data_ptr() == second.data_ptr() == tensor.data_ptr()
    assert any(isinstance(ref, StorageWeakRef) for ref in shared_cache.values())


@pytest.mark.parametrize(
    ("error", "named"), [(OSError("no socket"), True), (RuntimeError("no descriptor"), True), (ValueError("x"), False)]
)
def test_a_batch_that_cannot_be_sent_for_lack_of_descriptors_says_so(
    error: Exception, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minidl.wire.message.with_remedy", lambda error: RuntimeError(f"Too many open files: {error}"))
    sent = Envelope(Result(0, 1, None)).instead_of(None, error)
    with pytest.raises(RuntimeError if named else ValueError, match="Too many open files" if named else "x") as raised:
        sent.reraise()
    assert str(error) in str(raised.value)  # with the traceback of what failed first
