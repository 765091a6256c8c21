"""The command `minidl`. `main(argv)` runs it and returns its exit code.

Exit codes: 0 well; 1 `check` found something; 2 a usage error, or input that can't be read (one line on stderr: who,
what, remedy); 130 Ctrl-C. `run` exits with the script's own code. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidl.tracing.reader import Trace

_Act = Callable[[argparse.Namespace], int]
_Declare = Callable[[argparse.ArgumentParser], None]

OK, FOUND, USAGE, INTERRUPTED = 0, 1, 2, 130

SHOWN_BATCHES = 12  # of the demo, as text: start-up, the first batches on their way, the reorder buffer at work


class CommandError(Exception):
    """The command can't do what it was asked; the message is all that the user sees."""


@contextlib.contextmanager
def _refused(command: str, *errors: type[Exception]) -> Iterator[None]:
    """Where one of `errors` is raised in here, the user is told what it says, and no more."""
    try:
        yield
    except errors as error:
        raise CommandError(f"{command}: {error}") from error


# --- Commands ---------------------------------------------------------------------------------------------------------
# Each imports what it needs when it runs, so that a part that fails to import takes no other command with it.
def _demo(arguments: argparse.Namespace) -> int:
    from minidl import demo

    options = demo.Options(
        workers=arguments.workers,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        work_dir=arguments.work_dir,
        images=arguments.images,
        trace=arguments.trace,
        pin=arguments.pin,
    )
    try:
        training = demo.train(options)
    except demo.DemoError as error:
        raise CommandError(str(error)) from error
    return _after_demo(training.trace, training.losses)


def _after_demo(path: Path, losses: Sequence[float]) -> int:
    from minidl.tracing.check import examine
    from minidl.tracing.summary import summary
    from minidl.tracing.timeline import render

    if len(losses) > 1:
        fell = "fell" if losses[-1] < losses[0] else "did not fall"
        print(f"the loss {fell}: {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
    trace = _read(path)
    report = examine(trace)
    yields = trace.select("yield")["time"][:SHOWN_BATCHES]
    until = float(yields[-1] - trace.events["time"][0]) / 1e9
    print(f"\n{summary(trace).text()}\n\ncheck: {report.text()}")
    print(f"\nuntil batch {len(yields)}:\n{render(trace, until=until)}")
    print(f"\nrecorded in {path}; look at it in the browser:  minidl view {path}")
    print(f"all of it as text:  minidl timeline {path};  what else there is:  minidl --help")
    return FOUND if report.violations else OK


def _run(arguments: argparse.Namespace) -> int:
    from minidl import run
    from minidl.demo import free_directory

    if not arguments.command:
        what = "a module" if arguments.module else "a script"
        raise CommandError(f"run: {what} to run is missing, e.g. minidl run train.py --epochs 2")
    rank = os.environ.get("RANK")
    if arguments.trace is None:
        directory = free_directory(Path("minidl-traces"), "run" if rank is None else f"rank-{rank}")
    else:
        # The ranks of one job get the same command line, and each needs a trace of its own.
        directory = arguments.trace if rank is None else arguments.trace / f"rank-{rank}"
    taken = (directory / "manifest.json").exists()
    try:
        with _refused("run", run.RunError):
            code = run.run_script(
                arguments.command,
                module=arguments.module,
                trace=directory,
                observe=arguments.observe,
                align_clocks=arguments.align_clocks,
                detail=arguments.detail,
                functions=arguments.functions,
                functions_main=arguments.functions_main,
                functions_min_us=arguments.functions_min_us,
                **({"ring_bytes": None} if arguments.full else {}),
            )
    finally:
        if not taken and (directory / "manifest.json").exists():
            print(f"minidl: recorded in {directory}; next: minidl summary {directory}", file=sys.stderr)
        elif arguments.trace is None:
            directory.rmdir()
    return code


def _summary(arguments: argparse.Namespace) -> int:
    from minidl.tracing.summary import summary

    print(summary(_read(arguments.trace)).text())
    return OK


def _ledger(arguments: argparse.Namespace) -> int:
    from minidl.tracing.ledger import ledger

    print(ledger(_read(arguments.trace)).text())
    return OK


def _before(arguments: argparse.Namespace) -> int:
    from minidl.tracing.causal import story

    with _refused(f"before: {arguments.trace}", ValueError):
        text = story(
            _read(arguments.trace),
            arguments.batch,
            loader=arguments.loader,
            epoch=arguments.epoch,
            lines=arguments.lines,
        )
    print(text)
    return OK


def _timeline(arguments: argparse.Namespace) -> int:
    from minidl.tracing.timeline import render

    if arguments.output is not None:
        return _picture(arguments)
    with _refused("timeline", ValueError):
        text = render(
            _read(arguments.trace),
            width=arguments.width or shutil.get_terminal_size((100, 24)).columns,
            since=arguments.since,
            until=arguments.until,
            worker=arguments.worker,
            batch=arguments.batch,
        )
    print(text)
    return OK


def _page(arguments: argparse.Namespace) -> int:
    from minidl.tracing.page import html

    workers = None if arguments.worker is None else [arguments.worker]
    with _refused("timeline", ValueError):
        html(_read(arguments.trace), arguments.output, since=arguments.since, until=arguments.until, workers=workers)
    print(arguments.output)
    return OK


def _picture(arguments: argparse.Namespace) -> int:
    from minidl.tracing.picture import timeline

    if arguments.output.suffix == ".html":
        return _page(arguments)
    with _refused("timeline", ValueError, ImportError):
        figure = timeline(
            _read(arguments.trace),
            since=arguments.since,
            until=arguments.until,
            workers=None if arguments.worker is None else [arguments.worker],
            batches=None if arguments.batch is None else [arguments.batch],
        )
        figure.savefig(arguments.output)
    print(arguments.output)
    return OK


def _check(arguments: argparse.Namespace) -> int:
    from minidl.tracing.check import rules_text, run

    if arguments.rules:
        print(rules_text())
        return OK
    if arguments.trace is None:
        raise CommandError("check: a trace is missing, e.g. minidl check minidl-demo/trace-1")
    return run(_read(arguments.trace), as_json=arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    from minidl.tracing.export import write_chrome

    target = arguments.output or _beside(arguments.trace, ".json")
    write_chrome(_read(arguments.trace), target, _written)
    print(target)
    return OK


def _written(done: int, of: int) -> None:
    from minidl.demo import progress

    progress(f"written: {done:,} of {of:,} events" if done < of else "")


def _view(arguments: argparse.Namespace) -> int:
    from minidl.tracing.queries import QUERIES
    from minidl.tracing.viewer import ViewerError, serve

    if arguments.list_queries:
        print("\n".join(f"{name:<8} {query.about}" for name, query in QUERIES.items()))
        return OK
    if arguments.trace is None:
        raise CommandError("view: a trace is missing, e.g. minidl view minidl-demo/trace-1")
    with _refused("view", ViewerError):
        serve(_read(arguments.trace), open_browser=arguments.browser, queries=arguments.queries, progress=_written)
    return OK


def _pack(arguments: argparse.Namespace) -> int:
    from minidl.tracing.attachments import too_large

    trace = _read(arguments.trace)
    print(trace.pack(arguments.output or _beside(arguments.trace, ".minidl")))
    for attachment in too_large(trace.attachments):
        print(f"minidl: left out, since it is too large: {attachment!r}", file=sys.stderr)
    return OK


def _events(arguments: argparse.Namespace) -> int:
    from minidl.tracing.events import EVENTS

    for event in EVENTS.values():
        if event.phase.value == "E":
            continue  # told with its begin
        end = EVENTS.get(event.code + 1)
        spans = event.phase.value == "B" and end is not None
        codes = f"{event.code}-{event.code + 1}" if spans else str(event.code)
        fields = [field.name for e in (event, end if spans else None) if e is not None for field in e.fields]
        print(f"{codes:>7}  {event.name:<18} {event.track.value:<10} {event.meaning}")
        print(f"{'':9}fields: {', '.join(dict.fromkeys(fields)) or 'none'}; ours {event.ours}"
              + (f"; torch {event.upstream}" if event.upstream else "") + f"; article {event.article}")  # fmt: skip
    return OK


def _read(path: Path) -> Trace:
    from minidl.tracing.reader import read_trace

    return read_trace(path)


def _beside(trace: Path, suffix: str) -> Path:
    """Where a file made from a trace goes by default: beside it, under its name."""
    whole = trace.resolve()
    return (trace.parent if whole.is_file() else whole.parent) / (whole.stem + suffix)


# --- Arguments --------------------------------------------------------------------------------------------------------
def _trace_argument(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("trace", type=Path, nargs=nargs, metavar="TRACE", help="a trace's directory, or a packed file")


def _trace_and_output(parser: argparse.ArgumentParser) -> None:
    _trace_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: beside the trace, under its name")


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=_count, default=4, metavar="N", help="worker processes (default: %(default)s)")
    add("--epochs", type=_positive, default=2, metavar="N", help="default: %(default)s")
    add("--batch-size", type=_positive, default=16, metavar="N", help="default: %(default)s")
    add("--images", type=Path, metavar="DIR", help="your own images, in one folder a class")
    work_dir = Path("minidl-demo")
    add(
        "--work-dir",
        type=Path,
        default=work_dir,
        metavar="DIR",
        help="for its images and traces (default: %(default)s)",
    )
    add("--trace", type=Path, metavar="DIR", help="where to record (default: the first free trace-N in --work-dir)")
    add("--pin", action=argparse.BooleanOptionalAction, help="pin memory (default: where there is an accelerator)")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, metavar="DIR", help="where to record (default: the first free minidl-traces/run-N)")
    add("--detail", choices=("sample", "batch"), default="sample", help="record every sample, or only batches")
    add("--full", action="store_true", help="keep every event (default: the newest million of each process, 64 MiB)")
    add("--observe", action="store_true", help="record torch's own loader, in place of running this one")
    add("--align-clocks", action="store_true", help="of several ranks: compare their clocks at start and end")
    add("--functions", action="store_true", help="also record the functions that workers call (needs viztracer)")
    add("--functions-main", action="store_true", help="also record those of the script's own process")
    add("--functions-min-us", type=_count, default=10, metavar="N", help="leave out shorter calls (default: 10)")
    add("-m", dest="module", action="store_true", help="what follows is a module, as for python -m")
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS…", help="what to run, with its arguments")


def _before_arguments(parser: argparse.ArgumentParser) -> None:
    _trace_argument(parser)
    parser.add_argument("--batch", type=_count, required=True, metavar="N", help="the batch's task number")
    parser.add_argument("--loader", type=_count, metavar="N", help="of which loader (default: the last that had it)")
    parser.add_argument("--epoch", type=_count, metavar="N", help="of which epoch (default: the last that had it)")
    parser.add_argument("--lines", type=_count, default=40, metavar="N", help="most steps; 0 = all (default: 40)")


def _timeline_arguments(parser: argparse.ArgumentParser) -> None:
    _trace_argument(parser)
    parser.add_argument("--width", type=_positive, metavar="N", help="characters (default: the terminal's)")
    parser.add_argument("--since", type=float, metavar="S", help="seconds after the first event")
    parser.add_argument("--until", type=float, metavar="S", help="seconds after the first event")
    parser.add_argument("--worker", type=_count, metavar="N", help="leave out the other workers")
    parser.add_argument("--batch", type=_count, metavar="N", help="only this task; in a picture, arrows along its way")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="a picture (.png, .svg) or a page (.html)")


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    _trace_argument(parser, nargs="?")
    parser.add_argument("--rules", action="store_true", help="list the rules instead")
    parser.add_argument("--json", action="store_true", help="the report for machines")


def _view_arguments(parser: argparse.ArgumentParser) -> None:
    _trace_argument(parser, nargs="?")
    parser.add_argument("--query", dest="queries", action="append", metavar="NAME", help="show this one's answer below")
    parser.add_argument("--queries", dest="list_queries", action="store_true", help="list the queries instead")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="print the address, open nothing")


@dataclass(frozen=True)
class _Command:
    about: str
    example: str
    act: _Act
    arguments: _Declare = lambda parser: None


def _of(module: str, name: str, *errors: type[Exception]) -> tuple[_Act, _Declare]:
    """A command that a module runs: its `run` and `add_arguments`. errors: what `run` raises for what it refuses."""

    def act(arguments: argparse.Namespace) -> int:
        with _refused(name, *errors):
            code: int = importlib.import_module(module).run(arguments)
        return code

    def declare(parser: argparse.ArgumentParser) -> None:
        importlib.import_module(module).add_arguments(parser)

    return act, declare


_TRACE = "minidl-demo/trace-1"
_COMMANDS = {
    "demo": _Command(
        "train on real image files; record, check and show what happened", "demo --workers 2", _demo, _demo_arguments
    ),
    "run": _Command(
        "run a training script with minidl's DataLoader in torch's place, recorded",
        "run train.py --epochs 2",
        _run,
        _run_arguments,
    ),
    "summary": _Command("say where a trace's time and bytes went", f"summary {_TRACE}", _summary, _trace_argument),
    "ledger": _Command("say what was copied, how often and why", f"ledger {_TRACE}", _ledger, _trace_argument),
    "timeline": _Command(
        "draw a trace, as text or as a picture", f"timeline {_TRACE} --until 0.5", _timeline, _timeline_arguments
    ),
    "before": _Command(
        "tell what led to a batch, whatever the clocks say", f"before {_TRACE} --batch 9", _before, _before_arguments
    ),
    "top": _Command("watch a running job, live", "top 4711", *_of("minidl.tracing.top", "top")),
    "replay": _Command(
        "step through a recorded run, forwards and backwards",
        f"replay {_TRACE} --batch 9",
        *_of("minidl.tracing.stepper_terminal", "replay", ValueError, IndexError),
    ),
    "check": _Command("was the protocol kept? exit code 1 if not", f"check {_TRACE}", _check, _check_arguments),
    "view": _Command("show a trace in this machine's browser", f"view {_TRACE}", _view, _view_arguments),
    "export": _Command("write a trace for Perfetto as JSON", f"export {_TRACE}", _export, _trace_and_output),
    "pack": _Command("pack a trace into one compressed file", f"pack {_TRACE}", _pack, _trace_and_output),
    "merge": _Command(
        "put torch.profiler's profile into a trace, or join ranks' traces",
        f"merge {_TRACE} profile.json",
        *_of("minidl.tracing.merge", "merge"),
    ),
    "audit": _Command(
        "did each rank see what it should? exit code 1 if not",
        "audit minidl-traces",
        *_of("minidl.tracing.audit", "audit"),
    ),
    "diff": _Command(
        "say what changed most between two runs",
        f"diff {_TRACE} minidl-demo/trace-2",
        *_of("minidl.tracing.diff", "diff"),
    ),
    "record-suite": _Command(
        "make every recording of traces/",
        "record-suite --device simulated -o traces",
        *_of("minidl.recordings", "record-suite"),
    ),
    "bench": _Command(
        "measure what minidl costs beside torch", "bench --quick samplers", *_of("minidl.bench", "bench")
    ),
    "explore": _Command(
        "try out all runs of the protocol, on a model; what each guard is for",
        "explore --quick -o explored",
        *_of("minidl.explore", "explore", ValueError),
    ),
    "events": _Command("print the table of events: what each means, where it comes from", "events", _events),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minidl",
        description="torch's DataLoader, rebuilt to be read, with a record of everything it does.",
        epilog="Begin with: minidl demo",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        about = f"{command.about[0].upper()}{command.about[1:]}."
        added = subparsers.add_parser(
            name, help=command.about, description=about, epilog=f"Example: minidl {command.example}"
        )
        command.arguments(added)
        added.set_defaults(act=command.act)
    return parser


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return number


def _positive(text: str) -> int:
    number = _count(text)
    if number == 0:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); the exit code."""
    from minidl.tracing.recorder import TraceError

    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.act(arguments)
        sys.stdout.flush()
        return code
    except (CommandError, TraceError) as error:
        print(f"minidl: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains when it flushes at its exit
        return OK
    except OSError as error:
        print(f"minidl: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
