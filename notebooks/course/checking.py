"""Build it yourself: checks of what the reader has written, each of which says which step of the protocol went wrong.

A check is a function that takes the reader's object, decorated with `@exercise`. It returns what was right, in words, or
raises `Wrong`. A stub raises NotImplementedError: it is "not written yet". Each check runs in a process of its own, for a
bounded time: a loop without end, `sys.exit()` or a crash in the reader's code leaves the notebook as it is. `explored` runs
a dispatcher or a driver of the reader through all interleavings of a small loader, and shows the shortest run that goes
wrong.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import multiprocessing
import numbers
import os
import signal
import sysconfig
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import minidl
from course import opened
from course.asking import boxed, folded, marked
from course.data import PATIENCE, until
from minidl.check import examine
from minidl.explore.configurations import Configuration
from minidl.explore.decisions import Driving
from minidl.explore.guards import OURS, Protocol
from minidl.explore.model import Model
from minidl.explore.search import Bad, Run, shortest
from minidl.explore.trace import write
from minidl.loader.dispatcher import Dispatcher
from minidl.loader.driver import Driver
from minidl.process_stat import every_process, is_alive, remove_segments_of
from minidl.record.decisions import TracedDispatcher


class Wrong(Exception):
    """The reader's object is wrong. step: the step of the protocol that went wrong, and what it is for.

    trace: a run that shows it, with options for `timeline`.
    """

    def __init__(
        self, words: str, step: str, trace: minidl.Trace | None = None, evidence: str = "", **drawn: Any
    ) -> None:
        super().__init__(words)
        self.step, self.trace, self.evidence, self.drawn = step, trace, evidence, drawn


@dataclass(frozen=True)
class Outcome:
    """What a check says. passed: None if there is nothing to check yet."""

    passed: bool | None
    words: str
    step: str = ""
    evidence: str = ""
    trace: minidl.Trace | None = None
    """The run that shows what is wrong, to be stepped through: minidl.replay(outcome.trace)."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """What `timeline` is asked to draw of it."""

    @property
    def picture(self) -> bytes:
        """The run as a PNG; nothing if there is none."""
        return b"" if self.trace is None else drawn(self.trace, **self.shown)

    def __repr__(self) -> str:
        return "\n".join(part for part in (self.words, self.step, self.evidence) if part).replace("`", "")

    def _repr_html_(self) -> str:
        inside = f"<p><b>Check.</b> {marked(self.words)}</p>"
        inside += f"<p>{marked(self.step)}</p>" if self.step else ""
        if picture := self.picture:
            data = base64.b64encode(picture).decode()
            inside += (
                f'<img style="max-width:100%" alt="timeline of the failed run" src="data:image/png;base64,{data}">'
            )
        if self.evidence:
            lines = f'<pre style="white-space:pre-wrap;font-family:monospace;font-size:12px">{html.escape(self.evidence)}</pre>'
            inside += folded("the run, step by step", lines)
        return boxed(self.passed, inside)


def exercise(check: Callable[..., str]) -> Callable[..., Outcome]:
    """Make a function that checks the reader's object, and comes back whatever that does."""

    @functools.wraps(check)
    def judge(*given: Any, **more: Any) -> Outcome:
        return apart(functools.partial(judged, check, *given, **more))

    judge.is_exercise = True  # type: ignore[attr-defined]
    return judge


def judged(check: Callable[..., str], *given: Any, **more: Any) -> Outcome:
    """What the check says, in this process. Raises only what is no Exception, such as SystemExit."""
    try:
        return Outcome(True, f"Right. {check(*given, **more)}")
    except NotImplementedError as error:
        return Outcome(None, f"Not written yet{f': {error}' if error.args else ''}. Write it, and run this cell again.")
    except Wrong as wrong:
        return Outcome(False, str(wrong), wrong.step, wrong.evidence, wrong.trace, wrong.drawn)
    except Exception as error:
        tracebacks = (one.__traceback__ for one in (error.__cause__, error) if one is not None)
        last = _own(
            traceback.StackSummary.from_list([frame for one in tracebacks for frame in traceback.extract_tb(one)])
        )
        words = f"Your code has raised {type(error).__name__}: {error}"
        return Outcome(False, words, f"In `{last.name}`, line {last.lineno}: `{last.line}`")


def apart(job: Callable[[], Outcome], seconds: float = PATIENCE) -> Outcome:
    """What the job says in a forked process, which is killed after so many seconds, with all that it has started."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_alone, args=(job, writer))
    child.start()
    writer.close()
    try:
        until(lambda: reader.poll(0.05) or not child.is_alive(), seconds, 0)
        return reader.recv() if reader.poll(0) else _nothing_came(child, seconds)
    except EOFError:
        return _nothing_came(child, seconds)
    finally:
        reader.close()
        _kill(child)


def _kill(child: Any) -> None:
    """Kill a process and its group, and remove the shared memory that killed workers leave."""
    members = {pid for pid, fields in every_process() if int(fields[2]) == child.pid} | {child.pid}
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()  # if it was not yet the leader of its group
    child.join()
    until(lambda: not any(map(is_alive, members)), 1, 0.005)
    remove_segments_of(members)


def _alone(job: Callable[[], Outcome], answer: Connection) -> None:
    os.setpgrp()  # so that a kill reaches workers, too
    torch.set_num_threads(1)  # the threads of torch's pool were not forked
    answer.send(job())
    time.sleep(5)  # until it is killed, with its group: workers that Python's exit terminates would leave shared memory


def _nothing_came(child: Any, seconds: float) -> Outcome:
    child.join(0.1)
    if child.is_alive():
        said = f"Your code has not come to its end within {seconds:g} s. It was stopped."
        return Outcome(
            False, said, "Is there a loop, or a generator, that never ends? Or a wait for something that never comes?"
        )
    return Outcome(
        False, f"Your code has ended its process (exit code {child.exitcode}): the check did not come to its end.",
        "`sys.exit()` and `os._exit()` end a process, and so does a crash in C code. In a worker, they would end the worker.",
    )  # fmt: skip


def _own(frames: traceback.StackSummary) -> traceback.FrameSummary:
    """The reader's own last frame: none of the package's, of the course's, or of an installed library's."""
    others = [str(Path(minidl.__file__).parent), str(Path(__file__).parent), *sysconfig.get_paths().values()]
    return next(
        (frame for frame in reversed(frames) if not frame.filename.startswith((*others, "<frozen"))), frames[-1]
    )


def whole(said: object, about: str, step: str) -> int:
    """What the reader's function has returned, as a number. Raises Wrong if it is no whole number."""
    given = number(said, about, step)
    if given != int(given):
        raise Wrong(f"{about}, your function returns {said!r}, not a whole number.", step)
    return int(given)


def number(said: object, about: str, step: str) -> float:
    """What the reader's function has returned. Raises Wrong if it is not one finite number: for an array, nan, inf."""
    item = getattr(said, "item", None) if getattr(said, "shape", None) == () else None  # an array of one number
    given = item() if item else said
    if not isinstance(given, numbers.Real) or not -1e300 < given < 1e300:
        shown = textwrap.shorten(repr(said), 80, placeholder=" ...")
        raise Wrong(f"{about}, your function returns {shown} ({type(said).__name__}), not one finite number.", step)
    return given  # type: ignore[return-value]


def runs(*names: str) -> Iterator[tuple[str, minidl.Trace]]:
    """Each recorded run, under its name in quotes, and a made one: its last third, of which the answer is another."""
    for name in names:
        trace = opened(name)
        yield repr(name), trace
        tasks = trace.events["task"]
        first = 2 * (int(tasks.max()) + 1) // 3
        yield f"the part of {name!r} from task {first} on", trace.cut((tasks >= first) | (tasks < 0))


def drawn(trace: minidl.Trace, batches: Iterable[int] = (), **options: Any) -> bytes:
    """The picture of a trace, as PNG, with the way of these batches, as far as they are in it."""
    out = io.BytesIO()
    known = set(trace.events["task"].tolist())
    minidl.timeline(trace, batches=[task for task in batches if task in known], **options).savefig(
        out, format="png", dpi=100
    )
    return out.getvalue()


# --- The explorer -----------------------------------------------------------------------------------------------------
def explored(
    configuration: Configuration, *, dispatcher: type[Dispatcher] | None = None, driver: type[Driver] = Driver,
    protocol: Protocol = OURS,
) -> tuple[Bad, minidl.Trace] | None:  # fmt: skip
    """The shortest run that goes wrong of a loader with these parts, as a trace; None if there is none."""
    traced = TracedDispatcher
    if dispatcher is not None:
        traced = type("Traced", (TracedDispatcher, dispatcher), {"decides": dispatcher})
    driving = Driving(configuration, protocol, dispatcher=traced, driver=driver)
    model = Model(configuration, protocol, reduced=True, driving=driving)
    run = shortest(model)
    return None if run is None or run.bad is None else (run.bad, as_trace(model, run))


def as_trace(model: Model, run: Run) -> minidl.Trace:
    """A run of a model, read back from the files that a recorder would have written."""
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        trace = minidl.read_trace(write(Path(folder) / "explored", model, run))
    trace.path = Path("the failed run")
    return trace


def fails(bad: Bad, trace: minidl.Trace, step: str, **drawn: Any) -> Wrong:
    """What is said of a run that the explorer has found."""
    steps = [line for line in trace.lines if line.get("kind") == "step"]
    which = [f"{line['number']:>3}  {line['who']:<18} {line['what']}" for line in steps]
    report = examine(trace)
    rule = f" The checker's rule `{report.first.rule}`: {report.first.message}." if report.first else ""
    return Wrong(
        f"A run of {len(steps)} steps goes wrong ({bad.kind}): {bad.what}.{rule}",
        step,
        trace,
        "\n".join(which),
        title=textwrap.shorten(bad.what, 100, placeholder=" ..."),
        **drawn,
    )
