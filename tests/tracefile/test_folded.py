"""Files of workers that have ended are folded into packs: nothing is lost, at whatever moment that stops."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl.tracefile import files, folded
from minidl.tracefile.files import read_files
from minidl.tracefile.folded import KEPT, due, fold, left_out, packs_of
from minidl.tracefile.format import EVENTS_SUFFIX, RECORD, SIDE_SUFFIX, Header, events_file, side_line, stem_of


def leave(directory: Path, number: int, noise: int = 0) -> str:
    """What a worker leaves: some events, and a line about itself. noise: bytes that no compression makes less."""
    rows = np.zeros(3 + noise // 64, RECORD)
    rows["seq"], rows["time"] = np.arange(1, len(rows) + 1), number
    rows["x"] = np.frombuffer(random.Random(number).randbytes(8 * len(rows)), "<i8")
    stem = stem_of(1000 + number % 7, number)  # ids of processes come again
    (directory / (stem + EVENTS_SUFFIX)).write_bytes(events_file(Header(1000 + number % 7, number), rows))
    (directory / (stem + SIDE_SUFFIX)).write_bytes(side_line("process", role="worker", worker=number))
    (directory / "manifest.json").write_text('{"format": 1}')
    return stem


def kept(directory: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    found = read_files(directory)
    assert found.problems == []
    return found.side, found.events


def test_the_newest_workers_keep_their_files_and_others_until_they_are_as_many_again() -> None:
    stems = [stem_of(99 - number, 10**9 + number) for number in range(2 * KEPT)]
    assert due(stems[1:], 1) == due(stems, KEPT + 1) == []
    assert due(stems[::-1], 1) == stems[:KEPT]


def test_a_long_run_has_few_files_and_loses_nothing(tmp_path: Path) -> None:
    stems, most = [], 0
    for number in range(1, 1 + 16 * KEPT):
        stems.append(leave(tmp_path, number))
        if old := due([path.name.removesuffix(SIDE_SUFFIX) for path in tmp_path.glob(f"*{SIDE_SUFFIX}")], 1):
            fold(tmp_path, old, None)
        most = max(most, len(os.listdir(tmp_path)))
    assert most <= 1 + 4 * KEPT + 6, "and a pack for each doubling of their number"
    side, events = kept(tmp_path)
    assert sorted(side) == sorted(events) == sorted(stems)
    for number, stem in enumerate(stems, 1):
        assert (Header.read(events[stem]).start_ns, b'"worker": %d' % number in side[stem]) == (number, True)


def test_the_oldest_packs_are_deleted_beyond_a_limit_and_that_is_said(tmp_path: Path) -> None:
    for begin in range(1, 81, 8):
        fold(tmp_path, [leave(tmp_path, number, noise=8192) for number in range(begin, begin + 8)], 40_000)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 40_000 + max(sizes)
    gone = left_out(packs_of(os.listdir(tmp_path)))
    assert 0 < gone < 80
    found = read_files(tmp_path)
    assert len(found.side) == len(found.events) == 80 - gone
    assert found.problems == [f"the files of the {gone} workers that ended first (--full keeps all)"]


def test_a_pack_does_not_grow_beyond_its_bound_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded, "MERGED", 5000)  # bytes: a pack of one has 2000
    for number in range(1, 9):
        fold(tmp_path, [leave(tmp_path, number, noise=8192)], None)
    assert [pack[:2] for pack in packs_of(os.listdir(tmp_path))] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    (tmp_path / "ended-1-1.minidl").write_bytes(b"what a fold that was killed has left: 1-2 holds it")
    fold(tmp_path, [leave(tmp_path, 9, noise=8192)], 1)
    assert list(tmp_path.glob("ended-*")) == [tmp_path / "ended-9-9.minidl"]


class Killed(BaseException):
    """In place of a kill."""


@pytest.mark.parametrize("moment", range(20))
def test_a_fold_that_is_killed_at_any_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    first, second = [leave(tmp_path, n) for n in range(1, 5)], [leave(tmp_path, n) for n in range(5, 9)]
    before, acts = kept(tmp_path), itertools.count()
    fold(tmp_path, first, None)

    def dies_at_last(act: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **options: Any) -> Any:
            if next(acts) >= moment:
                raise Killed
            return act(*args, **options)

        return done

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        for name in ("unlink", "replace"):
            patch.setattr(Path, name, dies_at_last(getattr(Path, name)))
        fold(tmp_path, second, None)
    assert kept(tmp_path) == before
    again = [stem for stem in second if (tmp_path / (stem + EVENTS_SUFFIX)).exists()]
    fold(tmp_path, again or [leave(tmp_path, 9)], None)
    assert before[0].items() <= kept(tmp_path)[0].items(), "the next one goes on"


def test_a_trace_is_read_whole_while_it_is_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stems, read = [leave(tmp_path, number) for number in range(1, 9)], files.members_in
    before, folds = kept(tmp_path), [stems[:4], stems[4:6], stems[6:]]

    def folded_meanwhile(place: Path, problems: list[str]) -> object:
        names = read(place, problems)
        if folds:
            fold(tmp_path, folds.pop(0), None)
        return names

    monkeypatch.setattr(files, "members_in", folded_meanwhile)
    assert kept(tmp_path) == before
    assert folds == []


def test_empty_slots_are_not_kept_and_no_event_is_lost(tmp_path: Path) -> None:
    stem = leave(tmp_path, 1)
    path = tmp_path / (stem + EVENTS_SUFFIX)
    written, slots = path.read_bytes(), 1024
    header = Header.read(written)._replace(slots=slots)
    path.write_bytes(header.page() + written[4096:].ljust(64 * slots, b"\0"))
    fold(tmp_path, [stem], None)
    assert kept(tmp_path)[1] == {stem: written}


def test_of_packs_that_overlap_the_larger_one_counts() -> None:
    names = ["ended-1-4.minidl", "ended-1-8.minidl", "ended-5-8.minidl", "ended-9-9.minidl", "manifest.json"]
    assert [name for _, _, name in packs_of(names)] == ["ended-1-8.minidl", "ended-9-9.minidl"]


def test_one_process_folds_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stems = [leave(tmp_path, 1), leave(tmp_path, 2)]

    def meanwhile(*args: object) -> None:
        with pytest.raises(BlockingIOError):
            fold(tmp_path, stems[1:], None)

    monkeypatch.setattr(folded, "_merge", meanwhile)
    fold(tmp_path, stems[:1], None)
    assert (tmp_path / (stems[1] + EVENTS_SUFFIX)).exists()
