"""Under `minidl run`, loaders give what torch's loader gives; where minidl's would not, torch's is used."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import honoured
import patched_internals
import pytest
import torch.utils.data
from programs import ROOT, python
from sizes import slow
from torch.utils.data import dataloader

from minidl.check import check
from minidl.loader.iterators import _BaseDataLoaderIter
from minidl.record.observe import observed_iterators
from minidl.run import replaced
from minidl.tracefile.reader import read_trace

SOME = (
    "dataloader._BaseDataLoaderIter.__next__", "dataloader._MultiProcessingDataLoaderIter",
    "dataloader._DatasetKind.create_fetcher", "dataloader.BatchSampler", "_utils.collate.collate_tensor_fn",
    "_utils.fetch._MapDatasetFetcher.fetch", "_utils.worker._worker_loop", "_utils.worker._generate_state",
    "sampler.RandomSampler.__iter__", "IterableDataset",
)  # fmt: skip
"""Of torch.utils.data, patches of the default run; the slow one has all."""


def both(folder: Path, program: Any, *arguments: str, options: tuple[str, ...] = ()) -> tuple[str, str, str]:
    """What a program prints under plain Python, what under `minidl run`, and what that says on stderr."""
    plain = python(program.__file__, *arguments, cwd=folder)
    run = ("-m", "minidl", "run", "--hang-after", "off", "--trace", "trace", *options)
    ours = python(*run, program.__file__, *arguments, cwd=folder)
    assert (plain.returncode, ours.returncode) == (0, 0), plain.stderr + ours.stderr
    return plain.stdout, ours.stdout, ours.stderr


@pytest.mark.live
def test_a_program_that_patches_an_internal_gets_what_it_gets_from_torchs_loader(tmp_path: Path) -> None:
    names = [f"torch.utils.data.{name}" for name in SOME]
    plain, ours, said = both(tmp_path, patched_internals, *names)
    assert plain.count("\n") == len(SOME)
    assert ours == plain
    for name in SOME[:8]:
        assert said.count(f"minidl: torch.utils.data.{name} is patched: torch's own loader is used") == 1, said


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_so_does_one_that_patches_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted({name for name, _, _ in patched_internals.places()})
    for number in range(0, len(names), 25):
        (tmp_path / str(number)).mkdir()
        plain, ours, _ = both(tmp_path / str(number), patched_internals, *names[number : number + 25])
        assert ours.splitlines() == plain.splitlines()


WAYS = {
    "run": (),
    "observe": ("--observe",),
    "run arena": ("--transport", "arena"),
    "observe arena": ("--observe", "--transport", "arena"),
}


@pytest.mark.live
@pytest.mark.parametrize("way", ["run", *slow(*list(WAYS)[1:])])
def test_what_a_program_may_do_to_a_loader_is_honoured(tmp_path: Path, way: str) -> None:
    plain, ours, said = (text for text in both(tmp_path, honoured, options=WAYS[way]))
    found = json.loads(ours)
    for row, (epochs, _) in json.loads(plain).items():
        assert found[row][0] == epochs, row
        whose, _ = honoured.ROWS[row]
        if found[row][1]:
            assert found[row][1] == [whose.partition(",")[0] if way.startswith("run") else "torch's"], row
    assert "iterates with workers that Threads starts: they may be threads" in said
    assert not check(read_trace(tmp_path / "trace"))


def test_the_guide_says_what_is_honoured() -> None:
    _, _, rest = (ROOT / "docs" / "guides" / "record.md").read_text().partition("<!-- honoured -->\n")
    lines = rest.partition("<!-- /honoured -->")[0].strip().splitlines()
    rows = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines[2:]]
    assert rows == [(row, whose) for row, (whose, _) in honoured.ROWS.items()]


def test_a_loader_that_minidls_refuses_is_torchs(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """And where torch refuses it, too, the error is torch's, without a trace of minidl's."""
    monkeypatch.setattr("minidl.record.harmless._said", set())

    def refuse(*_: object) -> None:
        raise TypeError("a defect of minidl's")

    with replaced(), observed_iterators():
        monkeypatch.setattr("minidl.loader.dataloader._check_batching", refuse)
        assert [batch.tolist() for batch in torch.utils.data.DataLoader(range(4), batch_size=2)] == [[0, 1], [2, 3]]
        with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive") as caught:
            torch.utils.data.DataLoader(range(4), batch_size=2, batch_sampler=[[1]])
    # Tests that raise at any instruction may leave this thread in the middle of an `except`.
    assert caught.value.__context__ is sys.exc_info()[1]
    said = capfd.readouterr().err
    assert said.count("minidl's refuses it (TypeError: a defect of minidl's): torch's own loader is used") == 1
    assert "(more: minidl help record)" in said


@pytest.mark.live
def test_persistent_workers_that_live_go_on_without_a_later_patch(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """torch's would not hear of it either, in the workers; a new iterator would begin the dataset's state anew."""
    monkeypatch.setattr("minidl.record.harmless._said", set())
    with replaced(), observed_iterators():
        loader = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
        assert len(list(loader)) == 4
        monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", lambda self: next(iter(())))
        assert len(list(loader)) == 4
        assert isinstance(loader._iterator, _BaseDataLoaderIter)
        loader.close()  # type: ignore[attr-defined]
    assert "whose persistent workers live already goes on as minidl's" in capfd.readouterr().err


def test_the_arguments_have_torchs_names() -> None:
    """Frameworks look for them, to make a loader again."""
    torchs = inspect.signature(torch.utils.data.DataLoader.__init__)
    with replaced():
        assert inspect.signature(torch.utils.data.DataLoader.__init__) == torchs


def test_it_has_torchs_name_and_can_be_pickled() -> None:
    with replaced():
        made = torch.utils.data.DataLoader(range(3))
        assert type(made).__name__ == type(made).__qualname__ == "DataLoader"
        assert pickle.loads(pickle.dumps(type(made))) is type(made)
