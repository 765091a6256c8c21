"""The evidence of each drift holds in the installed torch, and another torch is told apart."""

from __future__ import annotations

import multiprocessing.queues
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data._utils import pin_memory

from minidl import loader
from minidl.articles import sections
from minidl.companion import drift, rows
from minidl.companion.drift import Drift, drifts, find
from minidl.companion.rows import RowError
from minidl.references import source_of

SOURCE = source_of("dataloader", "torch")
AS_READ = torch.__version__.startswith(f"{drift.READ_WITH}.")
"""Whether the installed torch is the one that the list was written for; for another one, the page says what differs."""


@pytest.mark.parametrize("each", drifts(), ids=lambda each: each.name)
def test_the_evidence_holds(each: Drift) -> None:
    assert not each.words.missing
    assert each.evidence
    for finding in each.findings():
        assert finding.holds or not AS_READ, f"drift {each.name}: {finding.claim}"


def test_evidence_can_fail() -> None:
    assert not find("dataloader:_MultiProcessingDataLoaderIter._reset has no_such_thing").holds
    assert not find("dataloader:_MultiProcessingDataLoaderIter._reset lacks self._send_idx = 0").holds
    assert not find("dataloader:DataLoader is gone").holds
    assert not find("dataloader:gone_function lacks anything").holds
    assert find("dataloader:DataLoader is there").where.startswith("torch/utils/data/dataloader.py:")
    assert find("no_such_module is gone").holds
    with pytest.raises(RowError, match="evidence 'x contains y'"):
        find("x contains y")


def test_what_moved_in_another_torch_is_reported(tmp_path: Path) -> None:
    """The installed dataloader with a line more at its head, one function less, and nothing else of torch."""
    folder = tmp_path / "torch" / "utils" / "data"
    folder.mkdir(parents=True)
    text = SOURCE.read_text(encoding="utf-8").replace("def _next_index(", "def _next_key(")
    (folder / "dataloader.py").write_text("\n" + text, encoding="utf-8")
    lines = list(drift.moved(tmp_path / "torch"))
    assert any(line.startswith("dataloader:_MultiProcessingDataLoaderIter._try_put_index: ") for line in lines)
    assert any(line.startswith("dataloader:_BaseDataLoaderIter._next_index: ") and "gone" in line for line in lines)
    assert not [line for line in lines if line.startswith("drift worker-cycle")]
    assert [line for line in lines if line.startswith("dataloader:DataLoader.__init__: ") and line.endswith("the same")]
    assert lines[-1].startswith("of ")


def test_nothing_moved_in_the_installed_torch() -> None:
    moved = list(drift.moved(SOURCE.parents[2]))
    assert moved == [] or not AS_READ


def test_each_article_and_the_note_have_drifts() -> None:
    counts = Counter(one.source.partition(" ")[0] for one in drift.drifts())
    assert counts.keys() == {"1", "2", "3", "4", "note"}
    assert min(counts.values()) > 3


def test_each_kind_has_a_word() -> None:
    assert all(rows.read("words.ini")[f"kind-{kind}"].keys() == rows.LANGUAGES.keys() for kind in drift.KINDS)


@pytest.mark.parametrize(("about", "evidence"), [
    ("1 §2.1", "Number of batches loaded"),  # the article: samples
    ("1 §2.3", "DataLoader.__iter__ has return self._get_iterator()"),  # the article: `for` calls enumerate
    ("1 §2.4.2", "lacks torch.cuda.current_device"), ("1 §2.4.6", "lacks torch.cuda.set_device"),
    ("1 §2.4.6", "(in_queue, out_queue, device_id, done_event, device)"), ("2 §3.2", "__next__ is gone"),
    ("3 §storage", 'elif storage.device.type == "meta":'),
    ("4 §shutdown", "multiprocessing.util:_exit_function has p.join()"),
    ("note", "multiprocessing.util:_exit_function has p.join()"),
    ("3 §storage", "multiprocessing.reductions:reduce_storage is there"),  # the article: reduction.py
    ("4 §dataset", "dataset:ChainDatasetSubset is gone"), ("4 §collate", "collate_str_fn has return batch"),
    ("4 §shutdown", "_next_data has if self._persistent_workers:"), ("note", "has if self._persistent_workers:"),
    ("1 §2.4.5", "_next_data has if self._persistent_workers:"),  # the note, as the article quotes it
    ("1 §2.1", "after seeding"), ("1 §2.1", "_IterableDatasetFetcher.fetch has return self.collate_fn(data)"),
    ("1 §2.3.4", "for _ in possibly_batched_index"), ("1 §2.4.8", "has data_queue.put((idx, data))"),
    ("2 §3.2", "indices += indices[:padding_size]"), ("2 §3.4.1", "(size_ + num_replicas_ - 1)"),
])  # fmt: skip
def test_a_passage_that_the_code_does_not_bear_out_is_flagged(about: str, evidence: str) -> None:
    flagged = [one for one in drifts() if one.sections == () == sections(about) or {*sections(about)} & {*one.sections}]
    assert any(evidence in claim for one in flagged for claim in one.evidence)


def test_the_pin_thread_neither_pins_nor_passes_on_its_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `note-none` says: the done event is set before `(None, None)` is put, which the thread may be waiting for."""
    put, done, ready, pinned = queue.SimpleQueue[Any](), threading.Event(), queue.SimpleQueue[Any](), []

    def get(timeout: float) -> Any:
        done.set()
        put.put((None, None))
        return put.get()

    monkeypatch.setattr(pin_memory, "pin_memory", lambda *data: pinned.append(data))
    monkeypatch.setattr("torch.accelerator.set_device_index", lambda index: None)
    monkeypatch.setattr("torch.multiprocessing._set_thread_name", lambda name: None)
    threads = torch.get_num_threads()
    pin_memory._pin_memory_loop(SimpleNamespace(get=get), ready, 0, done, None)
    torch.set_num_threads(threads)
    assert (pinned, ready.empty()) == ([], True)


@pytest.mark.parametrize(("fields", "message"), [
    ({"about": "1 §9.9", "kind": "never"}, "no such section"), ({"about": "1", "kind": "never"}, "write a section"),
    ({"about": "note", "kind": "wrong"}, "kind 'wrong' is none of"), ({"about": "note", "kind": "gone"}, "since ''"),
    ({"about": "note", "kind": "never", "since": "2.0"}, "since '2.0'"),
])  # fmt: skip
def test_a_wrong_drift_is_named(fields: dict[str, str], message: str) -> None:
    with pytest.raises(RowError, match=message):
        drift._drift("x", fields)


def test_a_drift_names_its_sections_and_is_shown_at_its_topics() -> None:
    for about in ("1 §2.4.1, §2.4.5, 2 §1.3", "note"):
        assert drift._drift("x", {"about": about, "kind": "never"}).source == about
    shown = sorted((d.name, e.topic) for e in rows.entries().values() if e.topic for d in drift.drifts_of(e))
    assert shown == sorted((d.name, topic) for d in drifts() for topic in d.topics) != []


def test_the_queue_is_that_of_python() -> None:
    """As `queue-of-python` says."""
    assert type(torch.multiprocessing.Queue()) is multiprocessing.queues.Queue


def test_strings_stay_a_list_and_containers_keep_their_type() -> None:
    """As `strings-stay` says."""
    batch = torch.utils.data.default_collate([{"name": "a", "x": 1}, {"name": "b", "x": 2}])
    assert batch["name"] == ["a", "b"]
    assert batch["x"].tolist() == [1, 2]
    with pytest.raises(TypeError, match="default_collate"):
        torch.utils.data.default_collate([object()])


def test_a_distributed_sampler_is_iterable_and_no_iterator() -> None:
    sampler = torch.utils.data.DistributedSampler(range(4), 2, 0)
    assert not isinstance(sampler, Iterator)
    assert iter(sampler) is not iter(sampler)


@pytest.mark.live
def test_a_daemonic_child_that_ignores_sigterm_keeps_its_parent_from_ending() -> None:
    """As `daemons-joined` says of `multiprocessing`, on which torch relies at exit."""
    program = (
        "import multiprocessing, signal, time\n"
        "ready = multiprocessing.get_context('fork').Event()\n"
        "def child():\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN); ready.set(); time.sleep(1)\n"
        "multiprocessing.get_context('fork').Process(target=child, daemon=True).start(); ready.wait()\n"
    )
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert time.monotonic() - begun > 0.9


def test_the_live_loader_does_not_use_the_joint_rules() -> None:
    """As the row about rules for one's own processes says; it does use the tables of `protocol.py`."""
    sources = {path: path.read_text() for path in Path(loader.__path__[0]).glob("*.py")}
    assert [
        path.name for path, text in sources.items() if re.search("import.*joint_rules|from minidl.check", text)
    ] == []
    assert any("from minidl.loader.protocol import" in text for text in sources.values())
