"""The machinery of the course: forms of answers, what is shown before and after one, and what a check says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest

pytest.importorskip("pandas", reason="the notebooks need pandas: pip install -e '.[notebooks]'")

import minidl
from course.asking import Asked, Choice, Count, Form, Listed, Prediction, Share, Unreadable, Worker, question, rows
from course.checking import Wrong, exercise
from minidl.tracefile import events as ev

YES = Choice("no", {"yes": (), "no": ()})
LANES = Choice("the feeder thread", {"the feeder thread": ("feeder",), "the loader": ("loop",)})


@pytest.mark.parametrize(("form", "given", "value"), [
    (Count(4), 4, 4), (Count(4), "4", 4), (Count(4), " four tasks", 4), (Count(4), 4.0, 4), (Count(4), "4.0", 4),
    (Count(0), "none", 0), (Count(0), "no tasks", 0), (Count(1024), "1,024 bytes", 1024), (Count(4), np.int64(4), 4),
    (Worker(0), "worker 0", 0), (Worker(0), "w0", 0), (Worker(1), 1, 1), (Worker(1), "Worker one", 1),
    (LANES, "The feeder", "the feeder thread"), (LANES, "feeder thread", "the feeder thread"),
    (LANES, "the worker's feeder thread", "the feeder thread"), (LANES, "fedeer thread", "the feeder thread"),
    (YES, False, "no"), (YES, "Yes.", "yes"), (YES, "no, it does not", "no"),
    (Share(1, 1000), "hardly any", "hardly any"), (Share(1, 1000), 0, "hardly any"),
    (Share(1, 1000), "0.1 %", "hardly any"),
    (Share(1, 1000), 1, "nearly all"), (Share(1, 1000), 2, "hardly any"), (Share(1, 1000), "1000 bytes", "nearly all"),
    (Share(1, 600_000), "600 KB", "nearly all"), (Share(1, 1000), "zero", "hardly any"),
    (Share(1, 1000), "half of them", "about half"), (Share(1, 1000), 0.5, "about half"),
    (Share(1, 1000), "All", "nearly all"),
    (Share(1, 3, "about a third"), "a third", "about a third"), (Share(1, 3, "about a third"), 0.4, "about a third"),
    (Listed((1, 0)), [1, 0], (1, 0)), (Listed((1, 0)), "1, 0", (1, 0)), (Listed((1, 0)), "batch 1, then 0", (1, 0)),
])  # fmt: skip
def test_an_answer_is_read_in_any_sensible_form(form: Form, given: object, value: object) -> None:
    assert form.read(given) == value


@pytest.mark.parametrize(("form", "given"), [
    (Count(4), "many"), (Count(4), "2 or 3"), (Count(4), 2.5), (Count(4), True), (Count(4), [4]), (Count(4), "2 * 2"),
    (Worker(0), "the slow one"), (Worker(0), "none"), (LANES, "somebody"), (LANES, 3), (YES, "perhaps"),
    (Share(1, 2), "ten"), (Share(1, 2), True), (Listed((1,)), "none"), (Listed((1,)), 3.5),
])  # fmt: skip
def test_what_makes_no_sense_is_not_wrong(form: Form, given: object) -> None:
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
