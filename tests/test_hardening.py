"""`minidl.harden()`: torch's loader gives the same batches, and the programs of the findings end well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as TorchIterator

import minidl
from minidl import cli, hardening
from minidl.prove.lab import faulty

FINDINGS = Path(__file__).parents[1] / "docs" / "findings"
sys.path.insert(0, str(FINDINGS))
import run_all  # noqa: E402  # a script of that folder

USUAL = {"interrupted-epoch", "unreadable-batch", "done-event-lock"}
"""Guards that are tried each time: their programs end soonest."""


@pytest.fixture
def hardened() -> Iterator[hardening.Hardened]:
    found = minidl.harden()
    yield found
    found.undo()


def test_each_finding_has_a_guard_or_is_named_as_out_of_reach() -> None:
    findings = set(run_all.NAMES)
    assert findings - set(hardening.GUARDS) == {"lost-result"}
    assert set(hardening.GUARDS) < findings
    assert "lost-result" in str(hardening.UNREACHABLE)


@pytest.mark.live
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in sorted(hardening.GUARDS)],
)
def test_a_guarded_program_ends_well(name: str) -> None:
    assert run_all.hardened(name)[0].startswith("healed")


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(hardening.GUARDS) - {"spawn-import"}))
def test_a_guard_can_be_left_out(name: str) -> None:
    others = {
        "unpicklable-batch": "unreadable-batch",
        "orphan-full-pipe": "orphan-in-sample",
        "torn-task": "orphan-in-sample",
    }
    assert run_all.hardened(name, f"{name},{others.get(name, '')}")[0].startswith("hole: ")


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="no guard is called nothing: the names are unpicklable-batch, "):
        minidl.harden(without=["nothing"])


def test_another_torch_is_refused_and_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TorchIterator._reset
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with pytest.raises(RuntimeError, match=r"does not fit torch 2\.99\.0\+cpu: it knows torch 2\.11 to 2\.15"):
        minidl.harden()
    assert TorchIterator._reset is before


def test_undo_gives_torchs_methods_back() -> None:
    before = dict(vars(TorchIterator))
    first = minidl.harden()
    second = minidl.harden(without="torn-result")  # in place of the first
    assert set(first.guards) - set(second.guards) == {"torn-result"}
    assert "16 more guards" in str(first)
    first.undo()  # they are the second's now
    assert dict(vars(TorchIterator)) != before
    second.undo()
    assert dict(vars(TorchIterator)) == before


SAME: dict[str, dict[str, Any]] = {
    "map": {},
    "no batches": {"batch_size": None},
    "persistent": {"persistent_workers": True},
    "out of order": {"in_order": False},
    "shuffled": {"shuffle": True},
}


@pytest.mark.live
@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_torchs_loader_gives_the_same_batches(options: dict[str, Any], method: str) -> None:
    def batches() -> list[Any]:
        torch.manual_seed(7)
        given = {"batch_size": 3, "num_workers": 2, "multiprocessing_context": method, **options}
        loader: Any = torch.utils.data.DataLoader(faulty.Numbers(20), **given)
        found = [torch.as_tensor(batch).tolist() for _ in range(2) for batch in loader]
        loader._iterator = None
        return sorted(found, key=str) if options.get("in_order") is False else found

    plain = batches()
    guarded = minidl.harden()
    try:
        assert batches() == plain
    finally:
        guarded.undo()


@pytest.mark.live
def test_an_iterable_dataset_and_an_error_come_as_before(hardened: hardening.Hardened) -> None:
    loader: Any = torch.utils.data.DataLoader(faulty.SharedStream(7), num_workers=2, batch_size=None)
    assert sorted(index for index, *_ in loader) == list(range(7))
    iterator: Any = iter(torch.utils.data.DataLoader(Divided(range(2)), num_workers=2))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError, match="Caught ZeroDivisionError in DataLoader worker process"):
        next(iterator)
    iterator._shutdown_workers()


LEFT_AT_EXIT = """
import minidl
from torch.utils.data import DataLoader

class Raises(list):
    def __getitem__(self, index):
        class Own(Exception): ...
        raise Own("the dataset's words")

minidl.harden()
loader = DataLoader(range(2), num_workers=1, persistent_workers=True)
list(loader)
try:
    list(DataLoader(Raises(range(2)), num_workers=1))
except RuntimeError as error:
    print("the dataset's words" in str(error), "in DataLoader worker process 0" in str(error))
"""


@pytest.mark.live
def test_an_error_keeps_its_words_and_an_exit_is_silent() -> None:
    """An exception class that pickle refuses; and an iterator that ends when Python has cleared the modules."""
    done = subprocess.run([sys.executable, "-c", LEFT_AT_EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("True True\n", "")


class Divided(list):  # type: ignore[type-arg]
    def __getitem__(self, index: Any) -> float:
        return 1 / super().__getitem__(index)


@pytest.mark.live
def test_a_run_hardens_the_loader_that_it_observes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = str(FINDINGS / "unpicklable-batch" / "program.py")
    command = [sys.executable, "-m", "minidl", "run", "--observe", "--harden", "--trace", "trace", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.startswith("healed"), done.stderr
    assert "minidl: torch's DataLoader has 16 more guards: minidl help holes\n" in done.stderr
    assert cli.main(["check", "trace"]) == cli.OK


def test_a_run_refuses_another_torch_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert cli.main(["run", "--observe", "--harden", "train.py"]) == cli.USAGE
    assert "run: minidl.harden() does not fit torch 2.99.0+cpu" in capsys.readouterr().err
    assert not list(tmp_path.glob("minidl-traces/*"))


def test_harden_needs_torchs_own_loader(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--harden", "train.py"]) == cli.USAGE
    assert "--harden guards torch's own loader, and minidl's replaces it: add --observe" in capsys.readouterr().err
