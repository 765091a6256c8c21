"""The tour of `minidl demo --tour`: a recorded training, then a program that hangs, with what minidl says about each.

Interface: `in_terminal(tour)` prints the stops, and waits for Enter after each if there is a person; `in_browser(tour)`
serves one page with all of them. Every output is made by the command that stands above it. The folder of the tour and
the program that hangs exist only inside `with Tour() as tour`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minidl import demo, terminal
from minidl.companion.serve import serve
from minidl.doctor import examine
from minidl.hang.evidence.stacks import py_spy
from minidl.playback.stepper import Replay
from minidl.prove.lab.case import LabOptions
from minidl.prove.lab.runner import LabRun, Mode, running
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import page, replay_page, replay_terminal
from minidl.views.frame import Page, filled
from minidl.views.summary import summary
from minidl.views.text import render

CASE = "sample_stuck"
SHOWN_BATCHES = 12  # in the timeline
BATCH = 5  # of the replay: the workers are far ahead of the loop by then


class Tour(contextlib.ExitStack):
    """What the stops share: a folder, the recorded training, the program that hangs. Nothing of it outlives `with`."""

    trace: Trace
    program: LabRun

    def __enter__(self) -> Tour:
        self.enter_context(terminal.cleaning_up())
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="minidl-tour-")))
        return self

    def names(self) -> dict[str, object]:
        """The values in the stops' commands."""
        known: dict[str, object] = {"folder": self.folder, "trace": self.folder / "trace-1"}
        if hasattr(self, "trace"):
            known["until"] = f"{self.until():.2f}"
        if hasattr(self, "program"):
            known |= {"pid": self.program.process.pid, "hung": self.program.trace}
        return known

    # The stops' outputs
    def record(self) -> str:
        with terminal.busy("training"), contextlib.redirect_stdout(io.StringIO()) as said:
            recorded = demo.train(demo.Options(workers=2, epochs=1, work_dir=self.folder)).trace
        self.trace = read_trace(recorded)
        return f"{said.getvalue()}recorded in {recorded}"

    def summary(self) -> str:
        return summary(self.trace).text()

    def timeline(self) -> str:
        return render(self.trace, width=terminal.columns(), until=self.until())

    def until(self) -> float:
        """Where the timeline ends, seconds from its begin."""
        yields = self.trace.select("yield")["time"][:SHOWN_BATCHES]
        return float(yields[-1] - self.trace.start) / 1e9

    def replay(self) -> str:
        return "\n".join(replay_terminal.render(self.moment(), terminal.columns()))

    def moment(self) -> Replay:
        at = Replay(self.trace)
        at.to_batch(BATCH)
        return at

    def hang(self) -> str:
        self.program = self.enter_context(running(CASE, LabOptions(), Mode.OBSERVED))
        with terminal.busy("waiting until the program stands still"):
            self.program.wait()
        return f"{self.program.said()}(no further batch; process {self.program.process.pid} is still running)"

    def diagnosis(self) -> str:
        with terminal.busy("looking at the processes"):
            text = examine(str(self.program.process.pid)).text()
        missing = "\n(py-spy is not installed: with it, the doctor shows each thread's line, too)"
        return text if py_spy() else text + missing

    def afterwards(self) -> str:
        self.program.kill()
        return examine(str(self.program.trace)).text()

    def hung_page(self) -> Page:
        return page.html(read_trace(self.program.trace), title="the program that hung")


@dataclass(frozen=True)
class Stop:
    """One stop. command: what prints `text`; page: the same for a browser; play: for a person at a terminal."""

    title: str
    words: str
    command: str
    text: Callable[[Tour], str]
    page: Callable[[Tour], object] | None = None
    play: Callable[[Tour], None] | None = None


def _step_through(tour: Tour) -> None:
    replay_terminal.interact(tour.moment(), sys.stdin.fileno(), sys.stdout)


STOPS = (
    Stop("Record a training",
         "A small network learns from 480 image files, which two worker processes decode. The line\n"
         "`with minidl.trace(...)` in the program records what each process does.",
         "minidl demo --workers 2 --epochs 1 --work-dir {folder}", Tour.record),
    Stop("What limited it",
         "The first line says what the training loop waited for. The table says where the time went.",
         "minidl summary {trace}", Tour.summary),
    Stop("What each process did",
         "Each row is a process or a thread. Time goes from left to right; a legend explains the signs.",
         "minidl timeline {trace} --until {until}", Tour.timeline,
         lambda tour: page.html(tour.trace, title="the training")),
    Stop("One moment of it",
         "The replay rebuilds the loader's state at each event: what is in which queue, and which batches\n"
         f"wait for their turn. This is the moment at which the training loop gets batch {BATCH}.",
         f"minidl replay {{trace}} --batch {BATCH}", Tour.replay, lambda tour: replay_page.html(tour.moment()),
         _step_through),
    Stop("A program that hangs",
         "This is a real program on torch's own DataLoader. One of its 64 files is a named pipe that no process\n"
         "writes to, so one read does not return. Nothing is simulated. Starting it takes about ten seconds.",
         "minidl run --observe train.py", Tour.hang),
    Stop("Why it hangs",
         "The doctor reads the recorded events, and looks at the processes through the kernel. It changes\n"
         "nothing in them. It also examines jobs that were started without minidl.",
         "minidl doctor {pid}", Tour.diagnosis),
    Stop("After kill -9",
         "All processes of the program have been killed. Its trace still says why it hung, and for how long: from\n"
         "the begin of the wait to the kill, so for longer than in the stop before.",
         "minidl doctor {hung}", Tour.afterwards, Tour.hung_page),
)  # fmt: skip

NEXT = """Your own job:
  minidl run train.py    record a script as it is, and say at its end what limited it
  minidl doctor PID      ask a job that hangs, recorded or not
  minidl help hang       what to do then; `minidl help` lists all pages"""


def in_terminal(tour: Tour) -> None:
    """Print the stops, one after the other. With a person at the terminal: wait after each."""
    person = sys.stdin.isatty() and sys.stdout.isatty()
    for number, stop in enumerate(STOPS, 1):
        print(f"\n--- {number} of {len(STOPS)}: {stop.title} ---\n{stop.words}\n", flush=True)
        text = stop.text(tour)
        print(f"$ {stop.command.format(**tour.names())}\n{text}", flush=True)
        if person and number < len(STOPS) and not _goes_on(tour, stop):
            break
    print(f"\n{NEXT}\nThe tour's files are deleted.")


def _goes_on(tour: Tour, stop: Stop) -> bool:
    """Wait for Enter; tell whether the tour goes on."""
    keys = "Enter: next stop" + ", s: step through it" * (stop.play is not None) + ", q: end"
    with contextlib.suppress(termios.error, OSError):  # not a terminal
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # keys that were pressed during the stop
    while (answer := input(f"\n[{keys}] ").strip().lower()) == "s" and stop.play is not None:
        stop.play(tour)
    return answer != "q"


def in_browser(tour: Tour) -> None:
    """Run all stops, then show them in the browser until Ctrl-C."""
    shown = []
    for number, stop in enumerate(STOPS, 1):
        print(f"{number} of {len(STOPS)}: {stop.title}", flush=True)
        text = stop.text(tour)
        frame = stop.page(tour)._repr_html_() if stop.page is not None else ""  # type: ignore[attr-defined]
        shown.append((stop, stop.command.format(**tour.names()), text, frame))
    serve(filled("tour.html", "minidl", shown=shown, next=NEXT), what="tour")
