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


def module_of(source: str) -> ModuleType:
    return schedules.executed(source, "asked.py")


def goes_wrong(program: Callable[[], object], **options: int) -> Wrong:
    with pytest.raises(Wrong) as caught:
        schedules.explored(program, "this", random.Random(0), **options)  # type: ignore[arg-type]
    return caught.value


PROCESS = "multiprocessing.Process"
SERVER = f"class Server({PROCESS}):\n    def run(self): serve(*self.given)\n"
FORMS: list[list[tuple[str, str]]] = [
    [],
    [("import multi", "from torch.multiprocessing import Process\nimport multi"), (PROCESS, "Process")],
    [("def ask", f"{SERVER}\ndef ask"), (f"{PROCESS}(target=serve, args=(", "Server(); worker.given = ((")],
    [("tasks.get()", "tasks.empty() or tasks.get()"), ("if task", "if task is True: continue\n        if task")],
    [("    while", "    import threading\n    threading.Thread(target=list).start()\n    while")],
]
"""Ways to write the same, as (what it says, what it says then)."""


@pytest.mark.parametrize("changes", FORMS)
def test_a_right_program_is_right_in_each_order(changes: list[tuple[str, str]]) -> None:
    source, said = SERVED, []
    for old, new in changes:
        source = source.replace(old, new)
    module = module_of(source)
    schedules.explored(lambda: said.append(module.ask(3)), "this", random.Random(0))
    assert said == [[0, 2, 4]] * schedules.RUNS
    assert source != SERVED or not changes


def test_a_full_queue_holds_who_puts() -> None:
    module = module_of(SERVED.replace("tasks = multiprocessing.Queue()", "tasks = multiprocessing.Queue(2)"))
    module.serve = lambda *given: None
    assert "the loop: puts 2 into tasks" in str(goes_wrong(lambda: module.ask(3)))


def test_a_killed_worker_is_waited_for_without_an_end() -> None:
    module = module_of(SERVED)
    wrong = goes_wrong(lambda: module.ask(2), kills=1)
    assert "Expected: an end. Got: Nobody can go on. the loop: takes from answers." in str(wrong)
    assert "worker 0 is killed" in wrong.evidence.splitlines()


def test_a_wait_with_a_timeout_ends() -> None:
    module = module_of(SERVED)

    def program() -> None:
        try:
            module.ask(2, timeout=5)
        except module.queue.Empty:
            assert schedules.HERE.now >= 5

    schedules.explored(program, "this", random.Random(0), kills=1)


def test_what_is_right_by_chance_is_not() -> None:
    """The worker looks at the event before it waits for a task; the loop sets it, and sends no sentinel."""
    late = SERVED.replace("while True:", "while not stop.is_set():").replace("tasks.put(None)", "stop.set()")
    module = module_of(late)
    wrong = goes_wrong(lambda: module.ask(1))
    assert "the loop: joins worker 0. worker 0: takes from tasks" in str(wrong)


def test_a_full_pipe_holds_a_worker_that_waits_for_its_feeder_thread() -> None:
    module = module_of(SERVED.replace("for _ in range(count)]", "for _ in range(1)]"))
    assert "leaves once its feeder threads have written" in str(goes_wrong(lambda: module.ask(3)))
    left = SERVED.replace("for _ in range(count)]", "for _ in range(1)]").replace(
        "            break\n", "            answers.cancel_join_thread()\n            break\n"
    )
    module = module_of(left)
    schedules.explored(lambda: module.ask(3), "this", random.Random(0))


def test_a_loop_that_looks_for_ever_has_no_end() -> None:
    module = module_of(
        SERVED.replace("worker.join()", "while worker.is_alive(): sleep(1)").replace("tasks.put(None)", "pass")
    )
    wrong = goes_wrong(lambda: module.ask(1))
    assert "There is no end after 3,000 steps" in str(wrong)
    assert len(wrong.evidence.splitlines()) < 20


def test_who_is_left_is_named() -> None:
    module = module_of(SERVED.replace("    worker.join()\n", "").replace("tasks.put(None)", "pass"))
    wrong = goes_wrong(lambda: module.ask(1))
    assert "Expected: nobody is left. Got: worker 0: takes from tasks" in str(wrong)


def test_the_same_dice_try_the_same_orders() -> None:
    trails = []
    for _ in range(2):
        module, seen = module_of(SERVED), []

        def program() -> None:
            module.ask(5)  # noqa: B023
            seen.append(list(schedules.HERE.trail))  # noqa: B023

        schedules.explored(program, "this", random.Random(5))
        trails.append(seen)
    assert trails[0] == trails[1]
    assert len({tuple(trail) for trail in trails[0]}) > schedules.RUNS / 3


@pytest.mark.parametrize("line", ["from os import fork", "import signal; signal.signal(15, None)", "answers.full()"])
def test_what_is_not_simulated_is_refused_in_a_worker_too(line: str) -> None:
    module = module_of(SERVED.replace("    while", f"    {line}\n    while"))
    with pytest.raises(schedules.Unknown):
        schedules.explored(lambda: module.ask(1), "this", random.Random(0))


@pytest.mark.live
def test_a_file_that_uses_more_than_is_simulated_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(f"{labs.solved()}\nimport multiprocessing.pool\n")
    outcome = labs.check(3, tmp_path / "loader.py", rounds=1)
    assert outcome.passed
    assert "`any_order` has tried nothing: `multiprocessing.pool` of your file is not simulated" in outcome.words
