"""The machinery of the course: forms of answers, what is shown before and after one, and what a check says."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import torch

pytest.importorskip("pandas", reason="the notebooks need pandas: pip install -e '.[notebooks]'")

from solutions import device as solutions
from torch._utils import ExceptionWrapper

import minidl
from course import device, hang_lab, recording, shutdown
from course.asking import Asked, Choice, Count, Listed, Prediction, Share, Unreadable, Worker, question, rows, yes_no
from course.checking import Wrong, apart, exercise, judged, number, whole
from minidl import mini
from minidl.companion.drift import find
from minidl.tracefile import events as ev

YES = yes_no(False, "Slip.")
LANES = Choice("the feeder thread", {"the feeder thread": ("", "feeder"), "the loader": ("It only reads.", "loop")})


@pytest.mark.parametrize(("form", "given", "value"), [
    (Count(4), 4, 4), (Count(4), "4", 4), (Count(4), " four tasks", 4), (Count(4), 4.0, 4), (Count(4), "4.0", 4),
    (Count(0), "none", 0), (Count(0), "no tasks", 0), (Count(1024), "1,024 bytes", 1024), (Count(4), np.int64(4), 4),
    (Worker(0), "worker 0", 0), (Worker(0), "w0", 0), (Worker(1), 1, 1), (Worker(1), "Worker one", 1),
    (LANES, "The feeder", "the feeder thread"), (LANES, "feeder thread", "the feeder thread"),
    (LANES, "a", "the feeder thread"), (LANES, "(B)", "the loader"), (LANES, "b) ", "the loader"),
    (YES, False, "no"), (YES, "Yes.", "yes"), (Count(4), "4 batches.", 4), (Count(4), "batch 4", 4),
    (Worker(1), "the worker 1", 1), (Count(1), "single task", 1), (Count(2), "couple", 2),
    (Count(4), "by a factor of 4", 4), (Count(4), "4x", 4), (Count(4), "exactly 4 times", 4), (Count(4), "4。", 4),
    (YES, "it can", "yes"), (YES, "It does not.", "no"), (Count(1024), "1 024 bytes", 1024), (Worker(0), "0th", 0),
    (Share(1, 1000), "0,5", "about half"), (Share(1, 6000), "6,000 bytes", "nearly all"),
    (Share(1, 1000), "hardly any", "hardly any"), (Share(1, 1000), 0, "hardly any"),
    (Share(1, 1000), "0.1 %", "hardly any"),
    (Share(1, 1000), 1, "nearly all"), (Share(1, 1000), 2, "hardly any"), (Share(1, 1000), "1000 bytes", "nearly all"),
    (Share(1, 600_000), "600 KB", "nearly all"), (Share(1, 1000), "zero", "hardly any"),
    (Share(1, 1000), "half of them", "about half"), (Share(1, 1000), 0.5, "about half"),
    (Share(1, 1000), "All", "nearly all"),
    (Share(1, 3, "about a third"), "a third", "about a third"), (Share(1, 3, "about a third"), 0.4, "about a third"),
    (Listed((1, 0)), [1, 0], (1, 0)), (Listed((1, 0)), "1, 0", (1, 0)), (Listed((1, 0)), "batch 1, then 0", (1, 0)),
])  # fmt: skip
def test_an_answer_is_read_in_any_sensible_form(form: Any, given: object, value: object) -> None:
    assert form.read(given) == value


@pytest.mark.parametrize(("form", "given"), [
    (Count(4), "many"), (Count(4), "2 or 3"), (Count(4), 2.5), (Count(4), True), (Count(4), [4]), (Count(4), "2 * 2"),
    (Count(4), "4,5"), (Count(4), "1,2,3"), (Count(4), "4xy"), (YES, "it can not be"),
    (Count(4), "not 4"), (Count(4), "more than 4"), (Count(4), "at least 4"), (Count(4), "-4"), (Count(4), -4),
    (Count(4), "minus four"), (Count(4), math.nan), (Count(4), math.inf), (Count(4), "nan"),
    (Count(4), np.array([4, 4])), (Count(4), torch.tensor(4)), (Worker(0), "the slow one"), (Worker(0), "none"),
    (Worker(2), "both"), (Worker(2), "pair"), (Worker(1), "another worker"),
    (Worker(0), "not worker 0"), (LANES, "somebody"), (LANES, 3), (LANES, math.nan), (LANES, np.array([1, 2])),
    (LANES, "not the feeder thread"), (LANES, "neither the feeder"), (LANES, "feeder or loader"),
    (LANES, "fedeer thread"), (YES, "perhaps"), (YES, "not yes"), (YES, "no, it does"), (YES, "b"),
    (Share(1, 2), "ten"), (Share(1, 2), True), (Share(1, 2), math.nan), (Share(1, 2), math.inf), (Share(1, 2), -1),
    (Share(1, 2), "not all"), (Share(1, 2), "150 %"), (Share(1, 2), "1.2.3"), (Share(1, 2), "2 apples"),
    (Share(1, 2), np.array([1, 2])), (Listed((1,)), "none"), (Listed((1,)), 3.5), (Listed((1,)), "not 1"),
    (Listed((1,)), [math.nan]), (Listed((1,)), np.zeros((2, 2))), (Listed((1,)), "-1"),
    pytest.param(Count(4), 10**400, id="huge"), pytest.param(Listed((1,)), "1" * 5000, id="long"),
])  # fmt: skip
def test_what_makes_no_sense_is_not_wrong(form: Any, given: object) -> None:
    with pytest.raises(Unreadable):
        form.read(given)
    said = Prediction(Asked("Text?", form, "Hint.", "Why."), given, None)
    assert said.right is None
    assert "cannot be read here: give " in said.verdict


ASKED = Asked(
    "How many of `task`s <are> out?", Count(16), "Think of <queues>.", "Four <each>.", None, {2: "That is one."}
)


@pytest.mark.parametrize(("given", "verdict"), [
    (..., "Write your answer"), (None, "Write your answer"), (3, "Not 3. Think of <queues>."),
    ("I don't know", "Guess: "), ("no idea", "Guess: "), ("?", "Guess: "), ("", "Guess: "),
    ("two", "Not two. That is one."),
])  # fmt: skip
def test_the_answer_is_folded_until_the_reader_has_it(given: object, verdict: str) -> None:
    said = Prediction(ASKED, given, None)
    assert said.verdict.startswith(verdict)
    shown, *folds = said._repr_html_().split("<details")
    assert "16" not in repr(said) + shown
    assert "Four" not in repr(said) + shown
    assert "16. Four &lt;each&gt;." in folds[-1]
    assert "<queues>" not in said._repr_html_()  # text is escaped
    assert "<code>task</code>s &lt;are&gt; out?" in shown


def test_a_right_answer_gets_the_reason_at_once() -> None:
    said = Prediction(ASKED, " 16", None)
    assert repr(said) == "How many of tasks <are> out?\nRight: 16. Four <each>."
    assert "<details" not in said._repr_html_()


def test_a_choice_is_listed_with_its_letters_and_each_wrong_one_has_its_hint() -> None:
    said = Prediction(Asked("Who?", LANES, "Hint.", "Why."), "b", None)
    assert repr(said) == "Who?\na) the feeder thread\nb) the loader\nNot the loader. It only reads."
    assert "b) the loader" in said._repr_html_().split("<details")[0]
    assert Prediction(Asked("Who?", LANES, "Hint.", "Why."), "a", None).right
    with pytest.raises(ValueError, match="say what these answers miss, if they are wrong: the loader"):
        Choice("the feeder thread", {"the feeder thread": (), "the loader": ("",)})
    assert "a) " not in repr(Prediction(Asked("Is it?", YES, "Hint.", "Why."), ..., None))


def test_the_reason_points_at_the_moment_in_the_replay(tmp_path: Path) -> None:
    trace = made_trace.made(tmp_path / "trace", **made_trace.HEALTHY)

    @question
    def asks(trace: minidl.Trace, task: int) -> Asked:
        return Asked("Which?", Count(task), "", "It is.", rows(trace, "yield", task=task)[0])

    said = asks(trace, 1, answer=1)
    run = said.replay()
    assert run.event["code"] == trace.events["code"][said.asked.at]
    assert int(run.event["task"]) == 1
    assert f"event {run.position} of {len(run)} in the replay" in said._repr_html_()
    assert "rcvd_idx" in said._repr_html_()
    assert asks(trace, 1)._repr_html_().split("<details")[0].count("replay") == 0


def test_a_question_about_two_traces_says_whose_moment_it_is(tmp_path: Path) -> None:
    one = made_trace.made(tmp_path / "one", **made_trace.HEALTHY)
    other = made_trace.made(tmp_path / "other", batches=4)

    @question
    def asks(first: minidl.Trace, second: minidl.Trace) -> Asked:
        return Asked("Which?", Count(3), "", "It is.", rows(second, "yield", task=3)[0], trace=second)

    event = asks(one, other, answer=3).replay().event
    assert (ev.EVENTS[int(event["code"])].name, int(event["task"])) == ("yield", 3)


@pytest.mark.parametrize("said", [math.nan, -math.inf, [4], np.array([4, 4]), torch.zeros(2), "4", None, 10**400])
def test_what_is_no_number_is_told_so_and_no_error_of_the_check(said: object) -> None:
    for read in (whole, number):
        with pytest.raises(Wrong, match=r"^Here, your function returns .*, not one finite number"):
            read(said, "Here", "The step.")


def test_a_whole_number_may_come_in_any_type() -> None:
    assert [whole(one, "", "") for one in (4, 4.0, np.int64(4), np.array(4), torch.tensor(4))] == [4] * 5
    with pytest.raises(Wrong, match="not a whole number"):
        whole(4.5, "Here", "")


def checked(function: Callable[[], Any]) -> str:
    function()
    return "It came back."


@pytest.mark.live
@pytest.mark.parametrize(("function", "said"), [
    (functools.partial(list, itertools.repeat(1, 3)), "Right. It came back."),
    (functools.partial(max, itertools.count()), "not come to its end within 1 s"),
    (functools.partial(time.sleep, 60), "not come to its end within 1 s"),
    (functools.partial(sys.exit, 3), "ended its process (exit code 3)"),
    (functools.partial(os._exit, 4), "ended its process (exit code 4)"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended its process (exit code -9)"),
], ids=["ends", "counts for ever", "sleeps", "sys.exit", "os._exit", "killed"])  # fmt: skip
def test_code_that_never_ends_or_ends_its_process_leaves_the_notebook_alone(
    function: Callable[[], Any], said: str
) -> None:
    begun = time.monotonic()
    outcome = apart(functools.partial(judged, checked, function), seconds=1 if "1 s" in said else 60)
    assert said in repr(outcome)
    assert time.monotonic() - begun < 30


@pytest.mark.live
def test_a_check_never_raises_for_what_the_reader_has_written(tmp_path: Path) -> None:
    trace = made_trace.made(tmp_path / "trace", **made_trace.HEALTHY)

    @exercise
    def check(function: Any) -> str:
        if function() == 1:
            raise Wrong("It says <1>.", "The step `yield`.", trace, "step by <step>", batches=[0, 999])
        return "It is 2."

    def stub() -> int:
        raise NotImplementedError

    assert [check(one).passed for one in (stub, lambda: 1, lambda: 2, lambda: 1 / 0)] == [None, False, True, False]
    assert repr(check(stub)) == "Not written yet. Write it, and run this cell again."
    assert repr(check(lambda: 2)) == "Right. It is 2."
    assert "ZeroDivisionError: division by zero" in repr(check(lambda: 1 / 0))

    def mine() -> Any:
        return minidl.read_trace(tmp_path / "no trace")

    assert "In mine, line " in repr(check(mine))  # and no frame of the package
    wrong = check(lambda: 1)
    assert repr(wrong) == "It says <1>.\nThe step yield.\nstep by <step>"
    assert wrong.picture.startswith(b"\x89PNG")
    assert "<step>" not in wrong._repr_html_()
    assert "data:image/png;base64," in wrong._repr_html_()


# --- What the notebooks say of torch, of CUDA and of the package ------------------------------------------------------
FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize(("name", "says", "claim"), [
    ("04_one_page", "`SystemExit`\nis none", "_utils.worker:_worker_loop has except Exception"),
    ("04_one_page", "signal SIGCHLD", "_utils.signal_handling:_set_SIGCHLD_handler has _error_if_any_worker_fails()"),
    ("08_shutdown", "kernel sends SIGCHLD", "_utils.signal_handling:_set_SIGCHLD_handler has threading._MainThread"),
    ("08_shutdown", "asks *before each read*", "_utils.worker:_worker_loop has while watchdog.is_alive():"),
    ("05_many_workers", "Pull request 141833 added", "dataloader:DataLoader.__init__ has in_order"),
])  # fmt: skip
def test_a_notebook_says_what_torch_does(name: str, says: str, claim: str) -> None:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert any(says in "".join(cell["source"]) for cell in notebook["cells"])
    assert find(claim).holds


def test_a_worker_sends_no_error_that_is_no_exception() -> None:
    assert isinstance(mini._attempt("here", lambda: 1 / 0), ExceptionWrapper)
    with pytest.raises(SystemExit):
        mini._attempt("here", sys.exit)


def test_hidden_and_beside_computation_are_two_figures() -> None:
    said = repr(judged(device.overlap.__wrapped__, solutions.overlapped))  # type: ignore[attr-defined]
    for beside in ("'healthy-8-pinned': 63.2%", "'healthy-8-pageable': 94.6%"):
        assert f"{beside} of the copies' time ran beside computation; 100% was hidden" in said
    assert "'workers-2': 16.1% of the copies' time ran beside computation; 100% was hidden" in said


def test_an_error_in_a_generator_is_told_by_the_readers_line() -> None:
    """Python raises another error for a StopIteration, outside of the reader's function."""

    def ahead(batches: Any, to_device: Any) -> Any:
        batches = iter(batches)
        held = to_device(next(batches))
        for batch in batches:
            following = to_device(batch)
            yield held
            held = following
        yield held

    said = repr(judged(device.ahead.__wrapped__, ahead))  # type: ignore[attr-defined]
    assert "generator raised StopIteration" in said
    assert "In ahead, line" in said
    assert "held = to_device(next(batches))" in said


def test_a_call_that_copies_from_pageable_memory_is_told_as_long_as_its_copy() -> None:
    pageable = device.returns_early(recording("healthy-8-pageable"), answer=False)
    assert "returns once all data is staged there" in repr(pageable)
    assert "the call takes 2.8 ms, the copy 2.8 ms: they end together" in repr(pageable)
    pinned = device.returns_early(recording("healthy-8-pinned"), answer=True)
    assert "it takes 0.24 ms, the copy 0.40 ms" in repr(pinned)


@pytest.mark.parametrize(("ask", "trace", "answer"), [
    (device.who_waits, "healthy-8-pinned", "neither stream waits"),
    (device.pinner, "healthy-8-pinned", "another worker"),
    (shutdown.first_told, "shutdown-exhausted", "not the pin thread"), (hang_lab.what, "one", "file lock"),
    (shutdown.sentinels, "shutdown-exhausted", "not 5"), (shutdown.sentinels, "shutdown-exhausted", "more than 5"),
    (shutdown.sentinels, "shutdown-exhausted", "-5"), (shutdown.sentinels, "shutdown-exhausted", [5, 5]),
])  # fmt: skip
def test_a_wrong_answer_that_names_the_right_one_is_not_right(ask: Any, trace: str, answer: object) -> None:
    asked = ask(hang_lab.mystery(trace) if trace == "one" else recording(trace), answer=answer)
    assert not asked.right


def test_each_mystery_has_its_answer_among_ten() -> None:
    assert len(hang_lab.WORDS) == 10
    assert hang_lab.WORDS.keys() >= set(hang_lab.KINDS.values())
    assert {hang_lab.verdict(hang_lab.mystery(name)).cause.value for name in hang_lab.NAMES} == hang_lab.KINDS.keys()
