"""The labs of a loader of one's own: right loaders pass, and wrong ones are told what differs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import minidl
from course import labs, schedules
from course.checking import Outcome
from course.texts import FOLDER
from minidl import mini

Change = tuple[str, str]

NAIVE: list[Change] = [
    (r"        while True:\n            try:\n                return self._data_queue.get\(.*?(?=\n    # ---)",
     "        return self._data_queue.get()\n"),
    (r"        if self._shutdown or os.getpid.*?(?=\n    def __del__)",
     "        for index_queue in self._index_queues:\n            index_queue.put((None, None))\n"
     "        for worker in self._workers:\n            worker.join()\n"),
    (r"        self._shutdown_workers\(\)\n\n\n", "        pass\n\n\n"),
    (r"while os.getppid\(\) == parent", "while True"),
]  # fmt: skip
"""What the skeleton has in the place of labs 4 and 5: it is right until then."""

OTHERWISE: list[Change] = [
    (r"worker\.kill\(\)", "worker.terminate()"),
    (r"        self\._workers_done_event\.set\(\)\n(.*?put\(\(None, None\)\)\n)",
     r"\1        self._workers_done_event.set()\n"),
    (r"itertools\.cycle\(range\(self\._num_workers\)\)", "itertools.cycle([*range(self._num_workers)])"),
    (r"os\.getppid\(\) == parent", "multiprocessing.parent_process().is_alive()"),
]  # fmt: skip

PRIMED = r"range\(self\._prefetch_factor \* self\._num_workers\)"
TURNS = r"itertools\.cycle\(range\(self\._num_workers\)\)"
UNBOUNDED: list[Change] = [
    (r"            if worker\.is_alive\(\):\n.*?worker\.join\(\)\n", ""),
    (r"worker\.join\(MP_STATUS_CHECK_INTERVAL\)", "worker.join()"),
]  # fmt: skip
WRONG: list[tuple[str, list[Change], str]] = [
    ("batches", [(r"if len\(batch\) == batch_size or not drop_last", "if len(batch) == batch_size")], "batches"),
    ("collates", [(r", dtype=torch\.float64", "")], "float64"),
    ("lazily", [(r"    indices = iter\(indices\)\n", "    indices = iter(list(indices))\n")], "more than 10,000"),
    ("asks_once", [(r'hasattr\(self\.dataset, "__getitems__"\)', "False")], "with __getitems__"),
    ("streams", [(r"or \(self\.ended and self\.drop_last\)", "")], "streams of"),
    ("streams", [(r"\[\] if self\.ended else list", "list")], "goes on if it is asked again"),
    ("ahead", [(PRIMED, "range(1)")], ""),
    ("ahead", [(PRIMED, "range(90)")], "samples fetched after 1 batches"),
    ("batches_of_a_worker", [(r"attempt\(worker_id, fetcher\.fetch, index\)", "fetcher.fetch(index)")], ""),
    ("elsewhere", [(r"    begin_worker\(.*?\n", "")], ""),
    ("elsewhere", [(r"attempt\(worker_id, create_fetcher, \*fetching\), False", "fetching[-1], False"),
         (r"args = self\._fetching", "args = (*self._fetching, create_fetcher(*self._fetching))")], "not the loop's"),
    ("seeds", [(r"base_seed, fetching", "0, fetching")], ""),
    ("errors_of_a_worker", [(r"attempt\(worker_id, create_fetcher, \*fetching\)", "create_fetcher(*fetching)")],
     "iter() raises"),
    ("errors_of_a_worker", [(r"(self\._try_put_index\(\))(\n +)(if .*?reraise\(\))", r"\3\2\1")], "next() five times"),
    ("in_order", [(r"self\._task_info\[idx\] \+= \(data,\)", "return data")], ""),
    ("turns", [(TURNS, "itertools.cycle([0])")], ""),
    ("turns", [(TURNS, "iter(lambda: random.randrange(self._num_workers), None)")], ""),
    ("streams_of_workers", [(r"self\._active\[data\.worker_id\] = False", "pass")], ""),
    ("held", [(PRIMED, "range(1)")], ""),
    ("broken_off", [(r"        self\._shutdown_workers\(\)\n\n\n", "        pass\n\n\n")], ""),
    ("full_pipe", [(r"        data_queue\.cancel_join_thread\(\)", "        pass")], ""),
    ("full_pipe", [(TURNS, "iter(lambda: self._send_idx % self._num_workers, None)")], "a circle of references holds"),
    ("tasks_left", [(r"if done_event\.is_set\(\) or ended:", "if ended:")], "that are fetched after the break"),
    ("long_sample", [(r"            if worker\.is_alive\(\):\n.*?worker\.join\(\)\n", "            worker.join()\n"),
         (r"worker\.join\(MP_STATUS_CHECK_INTERVAL\)", "worker.join()")], ""),
    ("pinned", [(r"if self\._pin_thread is not None", "if False")], "threads run"),
    ("pin_raises", [(r'attempt\("pin", pin_memory, data\)', "pin_memory(data)")], ""),
    ("pinned", [(r"        if self\._pin_memory:\n            self", "        if False:\n            self"),
         (r"                return data\n", "                return pin_memory(data) if self._pin_memory else data\n")],
     "calls of pin_memory in the main thread"),
    ("two_at_once", [(r" or os\.getpid\(\) != self\._owner", "")], "its copy of the first iterator"),
    ("killed", [(r"if dead:", "if False:")], ""),
    ("exits", [(r"not worker\.is_alive\(\)\]", "worker.exitcode]")], ""),
    ("orphans", [(r"while os\.getppid\(\) == parent", "while True")], "workers live"),
    ("too_slow", [(r"if self\._timeout:", "if False:")], ""),
    ("too_slow", [(r"if dead:", "if True:")], "a slow sample, no timeout"),
]  # fmt: skip
"""The trial that finds it, what is changed in the solution, and what is said of it besides the trial's name."""

WORKERS_FIRST = (r"( +if self\._pin_thread is not.*?)( +self\._workers_done_event\.set.*?\.join\(\)\n)", r"\2\1")
IN_ANOTHER_ORDER: list[tuple[str, list[Change], str]] = [
    ("any_order", [(r"self\._task_info\[idx\] \+= \(data,\)", "return data")], "Expected: an end"),
    ("any_order", [(r"(?<=for index_queue in self\._index_queues:\n            )index_queue\.put.*?\n", "pass\n"),
                   (r"worker\.kill\(\)", "return")], "nobody is left. Got: worker 0: takes from index_queue"),
    ("broken_off_in_any_order", [(r"        data_queue\.cancel_join_thread\(\)", "        pass"), *UNBOUNDED],
     "leaves once its feeder threads have written"),
    ("broken_off_in_any_order", [OTHERWISE[1], *UNBOUNDED], "leaves once its feeder threads have written"),
    ("pin_broken_off", [WORKERS_FIRST], "pin_memory_loop: reads the rest of a message in"),
    ("killed_before_any_step", [(r"if dead:", "if False:")], "There is no end"),
    ("killed_before_any_step", [(r"self\._data_queue\.get\(timeout=.*?\)\n", "self._data_queue.get()\n")],
     "There is no end"),
]  # fmt: skip
"""Trial, what is changed in the solution, and what is said of it: in all but the first two, not in each order."""

LAB_OF = {one.__name__: lab for lab, those in labs.TRIALS.items() for one in those}
ENDLESS = {"ahead", "in_order", "streams_of_workers", "long_sample", "pin_raises", "killed", "exits"}
"""Trials whose bound tells what has no more words, which takes so long."""


def changed(place: Path, changes: list[Change]) -> Path:
    source = labs.solved()
    for old, new in changes:
        source, times = re.subn(old, new, source, flags=re.DOTALL)
        assert times, old
    (place / "loader.py").write_text(source)
    return place / "loader.py"


RIGHT: list[tuple[str, Any, tuple[int, ...]]] = [
    ("mini", Path(mini.__file__), (1, 2, 3, 4, 5)),
    ("solution", [], (4, 5)),
    ("otherwise", OTHERWISE, (4, 5)),
    ("naive", NAIVE, (1, 2, 3)),
    ("minidl", minidl, (2, 3)),
    ("torch", torch.utils.data, (1,)),
]  # fmt: skip


@pytest.mark.live
@pytest.mark.parametrize(
    ("lab", "loader"),
    [pytest.param(lab, loader, id=f"{lab}-{name}") for name, loader, those in RIGHT for lab in those],
)
def test_a_right_loader_passes(lab: int, loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(loader, Path):
        monkeypatch.setattr(schedules, "RUNS", 100)  # mini is tried in all 400 orders
    outcome = labs.check(lab, changed(tmp_path, loader) if isinstance(loader, list) else loader, rounds=1)
    assert outcome.passed, repr(outcome)


def refused(name: str, loader: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """What the trial says of a wrong loader, tried alone: those before it take their time with right loaders."""
    monkeypatch.setitem(labs.TRIALS, LAB_OF[name], [one for one in labs.TRIALS[LAB_OF[name]] if one.__name__ == name])
    outcome = labs.check(LAB_OF[name], loader, rounds=1)
    assert outcome.passed is False
    assert outcome.words.startswith(f"Lab {LAB_OF[name]}, trial `{name}`")
    return outcome


@pytest.mark.live
@pytest.mark.parametrize(("name", "changes", "said"), IN_ANOTHER_ORDER)
def test_a_loader_that_is_wrong_in_one_order_is_told_its_steps(
    name: str, changes: list[Change], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = refused(name, changed(tmp_path, changes), monkeypatch)
    assert said in outcome.words
    first, *steps = outcome.evidence.splitlines()
    assert re.fullmatch(r"Run \d+, its steps in their order:", first)
    assert len(steps) > 10


@pytest.mark.live
@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [pytest.param(*case, id=f"{case[0]}-{at}", marks=pytest.mark.slow if not case[2] and case[0] in ENDLESS else ())
     for at, case in enumerate(WRONG)],
)  # fmt: skip
def test_a_wrong_loader_is_told_what_differs(
    name: str, changes: list[Change], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labs, "BOUND", 12.0)  # but for a loop without end, it is told after SOON
    monkeypatch.setattr(labs, "SOON", 4.0)
    outcome = refused(name, changed(tmp_path, changes), monkeypatch)
    assert said in repr(outcome), repr(outcome)
    assert re.search("Given: .* Expected: .* Got: |has not come to its end|has raised", outcome.words)
    assert len(outcome.step) > 40  # the hint


def test_each_lab_has_three_right_loaders_and_four_wrong_ones() -> None:
    for lab in labs.TRIALS:
        assert sum(lab in those for _, _, those in RIGHT) >= 3
        assert sum(lab == LAB_OF[name] for name, _, _ in WRONG) >= 4


@pytest.mark.live
@pytest.mark.parametrize("lab", labs.TRIALS)
def test_the_skeleton_is_not_written_yet(lab: int) -> None:
    outcome = labs.check(lab, labs.SKELETON, rounds=1)
    assert outcome.passed is None
    assert "Not written yet: lab 1: batches_of" in repr(outcome)


def test_the_solution_has_what_is_the_students_and_takes_the_same_arguments() -> None:
    skeleton, solution = (labs.functions(path.read_text()) for path in (labs.SKELETON, labs.SOLUTION))
    many = "_MultiProcessingDataLoaderIter."
    mine = ("__init__", "_try_put_index", "__next__", "_get_data", "_shutdown_workers", "__del__")
    assert solution.keys() == {
        "batches_of", "_MapDatasetFetcher.fetch", "_IterableDatasetFetcher.fetch", "default_collate", "worker_loop",
        "pin_memory_loop", *(many + name for name in mine),
    }  # fmt: skip
    assert [name for name, node in solution.items() if ast.dump(node.args) != ast.dump(skeleton[name].args)] == []
    assert labs.functions(labs.solved()).keys() == skeleton.keys()


@pytest.mark.live
def test_a_file_that_is_not_there_or_does_not_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no file" in repr(labs.check(1, tmp_path / "none.py"))
    monkeypatch.setattr(labs, "BOUND", 0.5)
    (tmp_path / "endless.py").write_text("while True: pass")
    assert "has not come to its end within 0.5 s" in repr(labs.check(1, tmp_path / "endless.py"))


@pytest.mark.parametrize("path", sorted((FOLDER / "labs").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_of_a_lab_asks_for_its_check(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert f"labs.check({path.stem[3]})" in ["".join(cell["source"]) for cell in cells]


@pytest.mark.live
@pytest.mark.slow
def test_the_solution_trains_the_demo() -> None:
    assert "the loss fell" in repr(labs.train(labs.SOLUTION))
