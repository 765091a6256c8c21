"""The commands of `minidl`: one function each, called with its parsed arguments.

Each returns an exit code: 0, or 1 if it found a problem (a broken rule, a mistake, a hole in the protocol).
Each imports what it needs when it runs, so that a module that fails to import disables no other command.
Errors: CommandError, TraceError, OSError; `cli.main` prints them in one line. Results go to stdout.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from minidl import terminal

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

OK, FOUND = 0, 1

VIEW_ENDS_IN = 20.0
"""Seconds for the view of a run to show its end."""

SHOWN_BATCHES = 12  # in the demo's timeline: enough for the start of the workers and for the reorder buffer in use


class CommandError(Exception):
    """A command cannot do what its arguments request; the user sees only the message."""


@contextlib.contextmanager
def _prefixed(command: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn `errors` into a CommandError whose message begins with the command."""
    try:
        yield
    except errors as error:
        raise CommandError(f"{command}: {error}") from error


def _read(path: Path | None, dataloader: str | None = None) -> Trace:
    """Read a trace; of one DataLoader alone, if one is named."""
    from minidl.tracefile.loaders import only
    from minidl.tracefile.reader import read_trace

    if path is None:
        raise CommandError("no trace given: `minidl demo` and `minidl run train.py` record one and print its path")
    with terminal.busy(f"reading {path}"):
        trace = read_trace(path)
    return only(trace, dataloader)


def _beside(trace: Path, suffix: str) -> Path:
    """Return the default path of a file made from a trace: beside it, under its name; relative if the trace's is."""
    whole = trace.resolve()
    named = whole.is_file() or trace.name == whole.name  # not "." or "..", nor a link to a directory elsewhere
    return (trace.parent if named else whole.parent) / (whole.stem + suffix)


# --- Record -----------------------------------------------------------------------------------------------------------
def demo(arguments: Namespace) -> int:
    from minidl import demo

    if arguments.tour:
        return _tour(arguments.tour)
    options = demo.Options(**{field.name: getattr(arguments, field.name) for field in fields(demo.Options)})
    with _prefixed("demo", demo.DemoError):
        training = demo.train(options)
    return _after_demo(training.trace, training.losses)


def _tour(place: str) -> int:
    from minidl import demo, tour

    with _prefixed("demo --tour", demo.DemoError, ValueError), tour.Tour() as shown:
        {"terminal": tour.in_terminal, "browser": tour.in_browser}[place](shown)
    return OK


def _after_demo(path: Path, losses: Sequence[float]) -> int:
    from minidl.check import examine
    from minidl.speed.summary import summary
    from minidl.views.text import render

    if len(losses) > 1:
        fell = "fell" if losses[-1] < losses[0] else "did not fall"
        print(f"the loss {fell}: {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
    trace = _read(path)
    report = examine(trace)
    yields = trace.select("yield")["time"][:SHOWN_BATCHES]
    until = float(yields[-1] - trace.start) / 1e9
    print(f"\n{summary(trace).text()}\n\ncheck: {report.text()}")
    print(f"\ntimeline of the first {len(yields)} batches:\n{render(trace, until=until)}")
    print(f"\nrecorded in {path}")
    print(f"view it in the browser:  minidl view {path}")
    print(f"print its timeline:      minidl timeline {path}")
    print("list all commands:       minidl --help")
    return FOUND if report.violations else OK


def run(arguments: Namespace) -> int:
    from minidl import run

    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        what = "module" if arguments.module else "script"
        raise CommandError(f"run: no {what} given; example: minidl run train.py --epochs 2")
    rank = os.environ.get("RANK")
    if arguments.trace is None:
        directory = run.free_directory(Path("minidl-traces"), "run" if rank is None else f"rank-{rank}")
    else:
        # The ranks of a job share one command line, and each needs a trace of its own.
        directory = arguments.trace if rank is None else arguments.trace / f"rank-{rank}"
    taken = (directory / "manifest.json").exists()
    try:
        with _prefixed("run", run.RunError), _viewed(directory, arguments.view and rank in (None, "0")):
            code = run.run_script(
                arguments.command,
                module=arguments.module,
                trace=directory,
                observe=arguments.observe,
                transport=arguments.transport,
                align_clocks=arguments.align_clocks,
                exits=arguments.exits,
                detail=arguments.detail,
                hang_after=_hang_after(arguments.hang_after),
                on_hang=arguments.on_hang,
                cpu_time={"auto": None, "on": True, "off": False}[arguments.cpu_time],
                functions=arguments.functions,
                functions_main=arguments.functions_main,
                functions_min_us=arguments.functions_min_us,
                **({"ring_bytes": None} if arguments.full else {}),
            )
    finally:
        if not taken and (directory / "manifest.json").exists():
            _say_headline(directory)
            terminal.say(f"minidl: recorded in {directory}; next: minidl summary {directory}")
        elif arguments.trace is None:
            directory.rmdir()
    return code


@contextlib.contextmanager
def _viewed(directory: Path, wanted: bool) -> Iterator[None]:
    """While this is open, another process shows the trace that is being recorded in the browser.

    It ends with its stdin: also if this process is killed. Ctrl-C in the terminal does not reach it.
    """
    if not wanted:
        yield
        return
    import subprocess
    import sys

    command = [sys.executable, "-m", "minidl", "view", "--live", "--along", "--", str(directory)]
    viewer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert viewer.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it has ended before
            viewer.stdin.write(b"over\n")  # a worker that is left behind keeps the pipe open
            viewer.stdin.close()
        try:
            viewer.wait(VIEW_ENDS_IN)
        except subprocess.TimeoutExpired:
            viewer.kill()
            viewer.wait()


def _hang_after(asked: float | None) -> float | None:
    """Return the wait that `run` calls a hang: as given, else by MINIDL_HANG_AFTER (None), else a generous time."""
    from minidl.record.watchdog import RUN_SECONDS

    return RUN_SECONDS if asked is None and not os.environ.get("MINIDL_HANG_AFTER") else asked


def _say_headline(directory: Path) -> None:
    """Print the headline of the run on stderr. An error here does not change the run's exit code.

    Of a large trace it reads only the end, which shows a hang or a death but not what bounded the run.
    """
    from minidl.hang.headline import headline
    from minidl.hang.live import LiveTrace, is_small
    from minidl.tracefile.format import TraceError
    from minidl.tracefile.reader import read_trace

    try:
        whole = is_small(directory)
        trace = read_trace(directory) if whole else LiveTrace(directory).read()[0]
        if len(trace) and (whole or headline(trace).outcome.wrong):
            terminal.say(f"minidl: {headline(trace).title}")
    except (OSError, TraceError):
        return
    except Exception as error:
        terminal.say(f"minidl: no headline ({error!r}): this is a bug in minidl, please report it")


def top(arguments: Namespace) -> int:
    from minidl.hang.top import run

    return run(arguments)


def doctor(arguments: Namespace) -> int:
    from minidl.hang.examine import examine

    with terminal.busy(f"looking at {arguments.target}"):
        found = examine(arguments.target, py_spy=not arguments.no_py_spy, seconds=arguments.seconds)
    print(found.to_json() if arguments.json else found.text())
    if found.outcome.wrong and not arguments.json:
        print("more about this: minidl help hang")
    return FOUND if found.outcome.wrong else OK


# --- Understand -------------------------------------------------------------------------------------------------------
def summary(arguments: Namespace) -> int:
    from minidl.speed.summary import summary

    trace = _read(arguments.trace, arguments.dataloader)
    with terminal.busy("summing up"):
        text = summary(trace).text()
    print(text)
    return OK


def ledger(arguments: Namespace) -> int:
    from minidl.speed.ledger import ledger
    from minidl.tracefile.words import lacking

    trace = _read(arguments.trace, arguments.dataloader)
    with terminal.busy("following the copies"):
        text = ledger(trace).text()
    print("\n".join([text, *lacking(trace.problems)]))
    return OK


def timeline(arguments: Namespace) -> int:
    from minidl.views.text import render

    if arguments.output is not None:
        if not arguments.output.suffix:
            raise CommandError(
                f"timeline: {arguments.output}: the name has no suffix: add .png or .svg (picture) or .html (page)"
            )
        return _page(arguments) if arguments.output.suffix == ".html" else _picture(arguments)
    trace = _read(arguments.trace, arguments.dataloader)
    with _prefixed("timeline", ValueError), terminal.busy("drawing"):
        text = render(
            trace,
            width=arguments.width or terminal.columns(),
            since=arguments.since,
            until=arguments.until,
            worker=arguments.worker,
            batch=arguments.batch,
        )
    print(text)
    return OK


def _page(arguments: Namespace) -> int:
    from minidl.views.page import html

    workers = None if arguments.worker is None else [arguments.worker]
    trace = _read(arguments.trace, arguments.dataloader)
    with _prefixed("timeline", ValueError), terminal.busy("drawing"):
        html(trace, arguments.output, since=arguments.since, until=arguments.until, workers=workers)
    print(arguments.output)
    return OK


def _picture(arguments: Namespace) -> int:
    from minidl.tracefile.packs import whole
    from minidl.views.picture import timeline

    trace = _read(arguments.trace, arguments.dataloader)
    with _prefixed("timeline", ValueError, ImportError), terminal.busy("drawing"):
        figure = timeline(
            trace,
            since=arguments.since,
            until=arguments.until,
            workers=None if arguments.worker is None else [arguments.worker],
            batches=None if arguments.batch is None else [arguments.batch],
        )
        with whole(arguments.output) as draft:
            figure.savefig(draft)
    print(arguments.output)
    return OK


def view(arguments: Namespace) -> int:
    from minidl.views.queries import QUERIES
    from minidl.views.viewer import ViewerError, serve

    if arguments.list_queries:
        print("\n".join(f"{name:<8} {query.about}" for name, query in QUERIES.items()))
        return OK
    if arguments.live:
        return _view_live(arguments)
    progress = terminal.counting("events written")
    with _prefixed("view", ViewerError):
        serve(
            _read(arguments.trace, arguments.dataloader),
            arguments.browser,
            arguments.port,
            perfetto=arguments.perfetto or bool(arguments.queries),
            queries=arguments.queries,
            progress=progress,
        )
    return OK


def _view_live(arguments: Namespace) -> int:
    import sys

    from minidl.views.viewer import ViewerError, serve_along, serve_live

    if arguments.dataloader is not None:
        raise CommandError("view: --live shows all DataLoaders: omit --dataloader, and choose one in the page")
    if arguments.trace is None:
        raise CommandError("view: --live needs a trace's directory, or the id of a process that records one")
    with _prefixed("view", ViewerError):
        if arguments.along:
            serve_along(arguments.trace, arguments.browser, arguments.port, sys.stdin)
        else:
            serve_live(arguments.trace, arguments.browser, arguments.port)
    return OK


def replay(arguments: Namespace) -> int:
    from minidl.views.replay_terminal import run

    with _prefixed("replay", ValueError, IndexError):
        return run(arguments)


def before(arguments: Namespace) -> int:
    from minidl.speed.critical_path import critical_path
    from minidl.tracefile.words import lacking

    trace = _read(arguments.trace, arguments.dataloader)
    with _prefixed(f"before: {arguments.trace}", ValueError), terminal.busy("following the causes"):
        text = critical_path(
            trace,
            arguments.batch,
            loader=arguments.iterator,
            epoch=arguments.epoch,
            lines=arguments.lines,
        )
    print("\n".join([text, *lacking(trace.problems)]))
    return OK


# --- Compare ------------------------------------------------------------------------------------------------
def check(arguments: Namespace) -> int:
    from minidl.check import rules_text, run

    if arguments.rules:
        print(rules_text())
        return OK
    return run(_read(arguments.trace, arguments.dataloader), as_json=arguments.json)


def diff(arguments: Namespace) -> int:
    from minidl.speed.diff import run

    return run(arguments)


def audit(arguments: Namespace) -> int:
    from minidl.speed.audit import run

    return run(arguments)


# --- Keep and convert -------------------------------------------------------------------------------------------------
def export(arguments: Namespace) -> int:
    from minidl.views.chrome import write_chrome
    from minidl.views.perfetto import write_perfetto

    target = arguments.output or _beside(arguments.trace, ".json")
    write = {".json": write_chrome, ".pftrace": write_perfetto}.get(target.suffix)
    if write is None:
        raise CommandError(f"export: {target}: the name must end in .json (chrome://tracing) or .pftrace (Perfetto)")
    write(_read(arguments.trace, arguments.dataloader), target, terminal.counting("events written"))
    print(target)
    return OK


def pack(arguments: Namespace) -> int:
    from minidl.tracefile.attachments import too_large

    trace = _read(arguments.trace)
    print(trace.pack(arguments.output or _beside(arguments.trace, ".minidl")))
    for attachment in too_large(trace.attachments):
        terminal.say(f"minidl: attachment {attachment!r} is too large to pack: it is left out")
    return OK


def merge(arguments: Namespace) -> int:
    from minidl.merge import run

    return run(arguments)


# --- Teach ------------------------------------------------------------------------------------------------
def companion(arguments: Namespace) -> int:
    from minidl.companion import run

    with _prefixed("companion", ValueError):
        return run(arguments)


def events(arguments: Namespace) -> int:
    from minidl.tracefile.events import EVENTS

    for event in EVENTS.values():
        if event.phase.value == "E":
            continue  # printed with its begin
        end = EVENTS.get(event.code + 1)
        spans = event.phase.value == "B" and end is not None
        codes = f"{event.code}-{event.code + 1}" if spans else str(event.code)
        both = [e for e in (event, end if spans else None) if e is not None]
        fields = [field.name for e in both for field in e.fields]
        ours = "; at its end ".join(dict.fromkeys(e.ours for e in both))
        print(f"{codes:>7}  {event.name:<18} {event.track.value:<10} {event.meaning}")
        print(f"{'':9}fields: {', '.join(dict.fromkeys(fields)) or 'none'}; ours {ours}"
              + (f"; torch {event.upstream}" if event.upstream else "")
              + (f"; article {event.article}" if event.article else ""))  # fmt: skip
    return OK


def explore(arguments: Namespace) -> int:
    from minidl.explore import run

    with _prefixed("explore", ValueError):
        return run(arguments)


def faults(arguments: Namespace) -> int:
    from minidl.prove.faults import run

    with _prefixed("faults", ValueError):
        return run(arguments)


def lab(arguments: Namespace) -> int:
    from minidl.prove.lab import run

    with _prefixed("lab", ValueError):
        return run(arguments)


def bench(arguments: Namespace) -> int:
    from minidl.prove.bench import run

    return run(arguments)


def help(arguments: Namespace) -> int:
    from minidl.guides import pages, title

    found = pages()
    if arguments.page is None:
        width = max(map(len, found), default=0)
        print("\n".join(f"{name:<{width}}  {title(page)}" for name, page in found.items()))
    elif arguments.page in found:
        print(found[arguments.page].read_text(encoding="utf-8").rstrip())
    else:
        raise CommandError(f"help: there is no page {arguments.page!r}: choose from {', '.join(found)}")
    return OK
