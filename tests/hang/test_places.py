"""Tests of `minidl.hang.places`: the steps in which both loaders call the user's code, by stacks of real calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import minidl
from minidl.hang.evidence.model import SeenThread
from minidl.hang.evidence.stacks import frame_at
from minidl.hang.places import LoaderStep, ThreadPlace, place_of
from minidl.loader import crew


def here() -> ThreadPlace:
    """The place of the calling thread, as the doctor would see it."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        code = frame.f_code
        found.append(frame_at(getattr(code, "co_qualname", code.co_name), code.co_filename, frame.f_lineno, {}))
        frame = frame.f_back
    stack, rests = tuple(found), (0, 0)
    return place_of(SeenThread(1, "python", ("S", "S"), rests, rests, stack=stack, python_name="MainThread"))


class Sampler:
    """A sampler that says where its second item was drawn."""

    def __init__(self, places: list[ThreadPlace], *items: Any) -> None:
        self.places, self.items = places, items

    def __iter__(self) -> Iterator[Any]:
        yield self.items[0]
        self.places.append(here())
        yield self.items[1]

    def __len__(self) -> int:
        return 2


class Dataset(torch.utils.data.Dataset[int]):
    def __init__(self, places: list[ThreadPlace]) -> None:
        self.places = places

    def __getitem__(self, index: int) -> int:
        self.places.append(here())
        return index


class Stream(torch.utils.data.IterableDataset[int]):
    def __init__(self, places: list[ThreadPlace]) -> None:
        self.places = places

    def __iter__(self) -> Iterator[int]:
        self.places.append(here())
        yield 0


def collate(places: list[ThreadPlace]) -> Callable[[list[int]], int]:
    def collated(samples: list[int]) -> int:
        places.append(here())
        return len(samples)

    return collated


CASES: dict[str, tuple[LoaderStep, Callable[[list[ThreadPlace]], dict[str, Any]]]] = {
    "sampler": (LoaderStep.SAMPLER, lambda places: {"dataset": range(2), "sampler": Sampler(places, 0, 1)}),
    "batch sampler": (
        LoaderStep.SAMPLER,
        lambda places: {"dataset": range(2), "batch_sampler": Sampler(places, [0], [1])},
    ),
    "sample": (LoaderStep.SAMPLE, lambda places: {"dataset": Dataset(places), "sampler": [0]}),
    "iterator": (LoaderStep.ITERATE, lambda places: {"dataset": Stream(places)}),
    "collate": (LoaderStep.COLLATE, lambda places: {"dataset": range(2), "collate_fn": collate(places)}),
}


@pytest.mark.parametrize(("step", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("loader", [minidl.DataLoader, torch.utils.data.DataLoader], ids=["minidl", "torch"])
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_the_step_that_calls_the_users_code(
    step: LoaderStep,
    options: Callable[[list[ThreadPlace]], dict[str, Any]],
    loader: Any,
    recorded: bool,
    tmp_path: Path,
) -> None:
    places: list[ThreadPlace] = []
    made = loader(**options(places))
    if recorded:
        with minidl.trace(tmp_path / "trace"):
            list(made)
    else:
        list(made)
    assert {place.step for place in places} == {step}


@pytest.mark.live
@pytest.mark.parametrize("loader", [minidl.DataLoader, torch.utils.data.DataLoader], ids=["minidl", "torch"])
def test_the_sampler_is_asked_while_workers_are_served(loader: Any) -> None:
    places: list[ThreadPlace] = []
    list(loader(range(2), batch_sampler=Sampler(places, [0], [1]), num_workers=1, prefetch_factor=1))
    assert [place.step for place in places] == [LoaderStep.SAMPLER]


@pytest.mark.live
@pytest.mark.parametrize("at_exit", [False, True])
def test_a_shutdown_is_one_whoever_begins_it(at_exit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At Python's exit there is no frame of the iterator's."""
    places: list[ThreadPlace] = []
    join = crew.Crew._join_workers

    def joins(self: Any, timeout: float | None) -> None:
        places.append(here())
        join(self, timeout)

    monkeypatch.setattr(crew.Crew, "_join_workers", joins)
    iterator = iter(minidl.DataLoader(range(4), num_workers=1))
    if at_exit:
        iterator._crew.close_at_exit()
        crew._close_all()
    else:
        iterator.close()
    assert [place.step for place in places] == [LoaderStep.SHUTDOWN]
