"""A loader under the course's scheduler: what goes wrong in one order of its steps only is found, and shown."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from course import labs, schedules
from course.checking import Wrong

SERVED = """
import multiprocessing, queue
from time import sleep

def serve(tasks, answers, stop):
    while True:
        task = tasks.get()
        if task is None:
            break
        answers.put(task * 2)

def ask(count, timeout=None):
    tasks = multiprocessing.Queue()
    answers = multiprocessing.Queue()
    stop = multiprocessing.Event()
    worker = multiprocessing.Process(target=serve, args=(tasks, answers, stop))
    worker.start()
    for task in range(count):
        tasks.put(task)
    got = [answers.get(timeout=timeout) for _ in range(count)]
    tasks.put(None)
    worker.join()
    return got
"""


@pytest.fixture(autouse=True)
def real() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multiprocessing", torch.multiprocessing)
        patch.setitem(sys.modules, "torch.multiprocessing", torch.multiprocessing)
        yield
        schedules.HERE = schedules.World()


Change = tuple[str, str]
"""What the program says, and what it says then."""


def changed(*changes: Change) -> ModuleType:
    source = SERVED
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return schedules.executed(source, "asked.py")


def goes_wrong(program: Callable[[], object], **options: int) -> Wrong:
    with pytest.raises(Wrong) as caught:
        schedules.explored(program, "this", random.Random(0), **options)  # type: ignore[arg-type]
    return caught.value


PROCESS = "multiprocessing.Process"
SERVER = f"class Server({PROCESS}):\n    def run(self): serve(*self.given)\n"
ONE_ANSWER = ("for _ in range(count)]", "for _ in range(1)]")
NO_SENTINEL = ("tasks.put(None)", "pass")
RIGHT: list[tuple[list[Change], list[int]]] = [
    ([], [0, 2, 4]),
    ([("import multi", "from torch.multiprocessing import Process\nimport multi"), (f"= {PROCESS}", "= Process")],
     [0, 2, 4]),
    ([(f"{PROCESS}(target=serve, args=(", "Server(); worker.given = (("), ("def ask", f"{SERVER}\ndef ask")],
     [0, 2, 4]),
    ([("tasks.get()", "tasks.empty() or tasks.get()"), ("if task", "if task is True: continue\n        if task")],
     [0, 2, 4]),
    ([("    while", "    import threading\n    threading.Thread(target=list).start()\n    while")], [0, 2, 4]),
    ([ONE_ANSWER, ("            break\n", "            answers.cancel_join_thread()\n            break\n")], [0]),
]  # fmt: skip
"""Ways to write a right program, and what it gets of three tasks."""


@pytest.mark.heavy
@pytest.mark.parametrize(("changes", "got"), RIGHT)
def test_a_right_program_is_right_in_each_order(changes: list[Change], got: list[int]) -> None:
    module, said = changed(*changes), []
    schedules.explored(lambda: said.append(module.ask(3)), "this", random.Random(0))
    assert said == [got] * schedules.RUNS


WRONG: dict[str, tuple[list[Change], int, str]] = {
    "a full queue holds who puts": (
        [("tasks = multiprocessing.Queue()", "tasks = multiprocessing.Queue(2)"), ("while True:", "while False:")],
        3, "the loop: puts 2 into tasks"),
    # The worker looks at the event before it waits for a task; the loop sets it, and sends no sentinel.
    "what is right by chance": (
        [("while True:", "while not stop.is_set():"), ("tasks.put(None)", "stop.set()")],
        1, "the loop: joins worker 0. worker 0: takes from tasks"),
    "a full pipe holds a worker": ([ONE_ANSWER], 3, "leaves once its feeder threads have written"),
    "a loop looks for ever": (
        [("worker.join()", "while worker.is_alive(): sleep(1)"), NO_SENTINEL], 1, "There is no end after 3,000 steps"),
    "a worker is left": (
        [("    worker.join()\n", ""), NO_SENTINEL], 1, "Expected: nobody is left. Got: worker 0: takes from tasks"),
}  # fmt: skip
"""What goes wrong -> the changes, how many tasks there are, and what is said."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_told_what_waits(name: str) -> None:
    changes, tasks, said = WRONG[name]
    module = changed(*changes)
    wrong = goes_wrong(lambda: module.ask(tasks))
    assert said in str(wrong)
    assert len(wrong.evidence.splitlines()) < (20 if "for ever" in name else schedules.SHOWN)


def test_a_killed_worker_is_waited_for_without_an_end() -> None:
    module = changed()
    wrong = goes_wrong(lambda: module.ask(2), kills=1)
    assert "Expected: an end. Got: Nobody can go on. the loop: takes from answers." in str(wrong)
    assert "worker 0 is killed" in wrong.evidence.splitlines()


def test_a_wait_with_a_timeout_ends() -> None:
    module = changed()

    def program() -> None:
        try:
            module.ask(2, timeout=5)
        except module.queue.Empty:
            assert schedules.HERE.now >= 5

    schedules.explored(program, "this", random.Random(0), kills=1)


@pytest.mark.heavy
def test_the_same_dice_try_the_same_orders() -> None:
    trails = []
    for _ in range(2):
        module, seen = changed(), []

        def program() -> None:
            module.ask(5)  # noqa: B023
            seen.append(list(schedules.HERE.trail))  # noqa: B023

        schedules.explored(program, "this", random.Random(5))
        trails.append(seen)
    assert trails[0] == trails[1]
    assert len({tuple(trail) for trail in trails[0]}) > schedules.RUNS / 3


@pytest.mark.parametrize("line", ["from os import fork", "import signal; signal.signal(15, None)", "answers.full()"])
def test_what_is_not_simulated_is_refused_in_a_worker_too(line: str) -> None:
    module = changed(("    while", f"    {line}\n    while"))
    with pytest.raises(schedules.Unknown):
        schedules.explored(lambda: module.ask(1), "this", random.Random(0))


@pytest.mark.live
def test_a_file_that_uses_more_than_is_simulated_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(f"{labs.solved()}\nimport multiprocessing.pool\n")
    outcome = labs.check(3, tmp_path / "loader.py", rounds=1)
    assert outcome.passed
    assert "`any_order` has tried nothing: `multiprocessing.pool` of your file is not simulated" in outcome.words
