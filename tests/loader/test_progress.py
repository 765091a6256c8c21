"""The progress board: what a worker writes about itself is what its loader reads, in words."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from minidl.loader import progress
from minidl.loader.progress import Place, ProgressBoard, Stage, what_at


@pytest.mark.parametrize(
    ("stage", "position", "index", "words"),
    [
        (Stage.COLLATING, 0, [1], "collating"),
        (Stage.FETCHING, 0, 137, "sample index 137"),
        (Stage.FETCHING, 2, None, "sample 3 of its stream's batch"),
        (Stage.FETCHING, -1, None, "its whole batch (__getitems__)"),
        (Stage.FETCHING, -1, 5, "its whole batch (__getitems__)"),
        (Stage.FETCHING, -1, [4, 5], "its whole batch of 2 (__getitems__)"),
        (Stage.FETCHING, 2, (4, 5), "its whole batch of 2 (__getitems__)"),
        (Stage.FETCHING, 0, [4, 5], "sample index 4 (place 1 of 2)"),
        (Stage.FETCHING, 1, (4, "five"), "sample index 'five' (place 2 of 2)"),
        (Stage.FETCHING, 1, [None, None, None], "a sample (place 2 of 3)"),
    ],
)
def test_a_place_in_words(stage: Stage, position: int, index: object, words: str) -> None:
    assert what_at(stage, position, index) == words
    assert Place(7, stage, position, 0).describe(index) == f"in task 7, {words}"


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage not in (Stage.FETCHING, Stage.COLLATING)])
def test_outside_of_a_task_its_index_says_nothing(stage: Stage) -> None:
    assert Place(7, stage, 0, 0).describe([1]) == Place(8, stage, -1, 0).describe() == progress._IN_WORDS[stage]


def test_what_a_worker_writes_its_loader_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000_000]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic_ns=lambda: clock[0]))
    board = ProgressBoard(2)
    assert board.read(1) == Place(0, Stage.STARTING, 0, clock[0])
    writer = board.writer(1)
    for write, stage, position in (
        (writer.initialising, Stage.INITIALISING, -1),
        (writer.opening, Stage.OPENING, -1),
        (writer.waiting, Stage.WAITING, -1),
        (lambda: writer.begin(3, [8, 9]), Stage.FETCHING, -1),
        (lambda: writer.samples(2), Stage.FETCHING, -1),
        (lambda: writer.sample(1, 9), Stage.FETCHING, 1),
        (lambda: writer.collate(2), Stage.COLLATING, -1),
        (writer.ended, Stage.ENDED, -1),
    ):
        clock[0] += 250_000_000
        write()
        place = board.read(1)
        assert (place.stage, place.position, place.since) == (stage, position, clock[0])
        assert writer.position == position
        assert place.seconds == 0
    assert board.read(1).task == 3
    clock[0] += 500_000_000
    assert board.read(1).seconds == 0.5
    assert board.read(0) == Place(0, Stage.STARTING, 0, 1_000_000_000)


def test_an_error_names_its_task_worker_sample_and_place() -> None:
    writer = ProgressBoard(3).writer(2)
    writer.begin(3, [8, 9])
    assert writer.place() == "Task 3 of worker 2: its whole batch of 2 (__getitems__)."
    writer.sample(1, 9)
    assert writer.place() == "Task 3 of worker 2: sample index 9 (place 2 of 2)."
    writer.collate(2)
    assert writer.place() == "Task 3 of worker 2: collating."
    writer.sample(1, 9)
    writer.end(0)
    assert writer.place() == "Task 3 of worker 2: sample 2 of its stream's batch."


def test_its_repr_says_what_each_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    board = ProgressBoard(4)
    for worker_id in range(1, 4):
        board.writer(worker_id).begin(worker_id, None)
    board.writer(2).sample(0, None)
    board.writer(3).collate(1)
    now = time.monotonic_ns() + 10_000_000_000
    for worker_id in range(4):
        board.row(worker_id)[3] = now - 1_540_000_000
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic_ns=lambda: now))
    assert list(board._phrases()) == [
        "worker 0 STARTING for 1.5 s",
        "worker 1 FETCHING task 1 for 1.5 s",
        "worker 2 FETCHING task 2 sample 0 for 1.5 s",
        "worker 3 COLLATING task 3 for 1.5 s",
    ]


def test_a_board_is_in_shared_memory() -> None:
    board = ProgressBoard(1)
    assert board._cells.is_shared()
    assert board._cells.shape == (1, 4)
