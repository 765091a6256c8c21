"""Frameworks save and load the state of `minidl.DataLoader`; torchdata's loader keeps the same in its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import client_runs
import pytest
import torch
from client_runs import Client
from kill_resume import Dicey, Epochs

import minidl

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

LIGHTNING = Client("Lightning", "lightning", "lightning", "lightning_resume.py", modes=("direct",))


def test_lightning_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Also with a stream without a length, of which it takes one batch ahead."""
    client_runs.require(LIGHTNING)
    done = client_runs.run(LIGHTNING, "direct", tmp_path)
    assert done.code == 0, done.output[-3000:]
    resumed = done.ranks[0]["facts"]["resumed"]
    for name, (left, seen) in resumed.items():
        assert seen == left, name
        assert len(left) == 20 - 7 + 20


@pytest.mark.slow
def test_two_ranks_of_lightning_go_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Rank 0's checkpoint holds the states of both, and the sampler is in the checkpoint's epoch before it is asked."""
    client_runs.require(LIGHTNING)
    done = client_runs.run(replace(LIGHTNING, program="lightning_ddp_resume.py"), "direct", tmp_path)
    assert done.code == 0, done.output[-3000:]
    assert sorted(done.ranks) == [0, 1]
    for rank in done.ranks.values():
        for name, (left, seen) in rank["facts"]["resumed"].items():
            assert seen == left, name
            assert len(left) in {12 - 2, 12 - 4, 12 - 6}


@pytest.mark.slow
def test_lightning_is_killed_and_resumed_and_each_step_counts_once() -> None:
    """At the moments at which it has lost an epoch, or repeated one: 6 steps an epoch, a checkpoint at the last."""
    client_runs.require(LIGHTNING)
    code = (
        "import lightning; from kill_frameworks import Case, Reaper, train\n"
        "moments = {'map': [[15], [4, 18, 27]], 'stream': [[17, 0, 12]]}\n"
        "for kind, plans in moments.items():\n"
        "    for plan in plans:\n"
        "        done = train(Case('lightning', kind), [Reaper(at) for at in plan])\n"
        "        assert (done.lost, done.repeated, done.error) == (0, 0, ''), (kind, plan, done)\n"
        "        assert done.kills\n"
    )
    support = Path(client_runs.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=support, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(("dataset", "persistent"), [(Dicey, True), (Epochs, False), (Epochs, True)])
def test_the_state_holds_of_a_dataset_what_torchdatas_holds(dataset: type[Any], persistent: bool) -> None:
    """A resumed loader, of either kind, gives what the one that was saved gives: minidl's without state_every, too."""
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
    given = []
    for make in (stateful_dataloader.StatefulDataLoader, minidl.DataLoader):
        torch.manual_seed(3)
        options = {"num_workers": 2, "persistent_workers": persistent, "collate_fn": list}
        first = make(dataset(), 2, **options)
        epochs, states = [list(first)], [first.state_dict()]
        iterator = iter(first)
        epochs.append([next(iterator) for _ in range(3)])
        states.append(first.state_dict())
        epochs[1] += list(iterator)
        for state, left in zip(states, (epochs[1], epochs[1][3:]), strict=True):
            other = make(dataset(), 2, **options)
            other.load_state_dict(state)
            assert list(other) == left, make
        given.append(epochs)
    assert dataset is Dicey or given[0] == given[1]
    assert [[len(batch) for batch in epoch] for epoch in given[0]] == [[len(b) for b in epoch] for epoch in given[1]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("make", ["torchdata", "minidl"])
def test_another_number_of_workers_is_an_assertion_error(make: str) -> None:
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
    loader_class: Any = stateful_dataloader.StatefulDataLoader if make == "torchdata" else minidl.DataLoader
    for before, after in ((2, 0), (0, 2)):
        loader = loader_class(Dicey(), num_workers=before)
        iterator = iter(loader)
        state = loader.state_dict()
        del iterator
        other = loader_class(Dicey(), num_workers=after)
        other.load_state_dict(state)
        with pytest.raises(AssertionError):
            iter(other)
