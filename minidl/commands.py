"""The commands of `minidl`: each a row (group, line of help, example, arguments) on its function, or on a module's.

Interface: `COMMANDS` by name, `GROUPS` by group. A command is called with its parsed arguments and returns an exit
code: 0, or 1 if it found a problem (a broken rule, a mistake, a hole in the protocol). Errors: CommandError,
TraceError, OSError; `cli.main` prints them in one line. Results go to stdout.

Rule of use: this module imports neither torch nor NumPy, so that help and argument errors are fast. Each command
imports what it needs when it runs, so that a module that fails to import disables no other command.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minidl import terminal
from minidl.guides import PAGE_OF, more

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minidl.job.digests import JobRecord
    from minidl.speed.diff import Diff
    from minidl.speed.gate import GateResult, Limit
    from minidl.tracefile.reader import Trace

OK, FOUND = 0, 1

PACKED: Final = ".minidl"
"""The suffix of a packed trace."""

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


def _read(arguments: Namespace, *paths: Path, or_alone: bool = False) -> Trace:
    """Read the trace of a command, or that at `paths`: of --rank alone in a job, of --dataloader alone.

    or_alone: a trace of one rank is read whatever its number is.
    """
    from minidl.job.digests import trace_of
    from minidl.tracefile.loaders import only

    given = vars(arguments)
    chosen = [path for path in paths or given.get("traces") or [given.get("trace")] if path is not None]
    if not chosen:
        raise CommandError("no trace given: `minidl demo` and `minidl run train.py` record one and print its path")
    with terminal.busy(f"reading {chosen[0]}"):
        trace = trace_of(chosen, given.get("rank"), or_alone=or_alone)
    return only(trace, given.get("dataloader"))


def _read_job(arguments: Namespace, *paths: Path) -> JobRecord | None:
    """Read the job of a command, or that at `paths`, if it is one and the command is about all of its ranks."""
    from minidl.job.digests import read_job

    chosen = paths or arguments.traces
    if vars(arguments).get("engine") is not None or any(isinstance(one, str) for one in chosen):
        return _read_remote(arguments)
    if arguments.rank is not None:
        return None
    job = read_job(chosen, terminal.counting("ranks read"))
    if job is not None and arguments.dataloader is not None:
        raise CommandError(f"{job.name} has {len(job.ranks)} ranks: --dataloader needs one of them, by --rank N")
    return job


def _read_remote(arguments: Namespace) -> JobRecord:
    """Read the job at a URL, or by an engine."""
    from minidl.job.remote import read_remote

    if len(arguments.traces) > 1 or arguments.rank is not None or arguments.dataloader is not None:
        raise CommandError("a URL, and --engine, stand for one whole job: omit other traces, --rank and --dataloader")
    with _prefixed(str(arguments.traces[0]), ImportError, ValueError), terminal.busy(f"reading {arguments.traces[0]}"):
        return read_remote(str(arguments.traces[0]), arguments.engine or "processes")


def _beside(trace: Path, suffix: str) -> Path:
    """Return the default path of a file made from a trace: beside it, under its name; relative if the trace's is."""
    whole = trace.resolve()
    named = whole.is_file() or trace.name == whole.name  # not "." or "..", nor a link to a directory elsewhere
    return (trace.parent if named else whole.parent) / (whole.stem + suffix)


# --- Types of arguments -----------------------------------------------------------------------------------------------
def _path_or_url(text: str) -> Path | str:
    return text if "://" in text else Path(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    number = _count(text)
    if number == 0:
        raise argparse.ArgumentTypeError("'0' is not a whole number of at least 1")
    return number


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return seconds


def _seconds_or_off(text: str) -> float:
    from minidl.record.watchdog import seconds  # imports NumPy: only if the option is given

    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    number = _count(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: choose from 1 to 65535, or 0 for any free one")
    return number


BENCHMARKS = ("events", "loader", "transport", "state", "files", "samplers", "auto", "plan")


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return the type of an argument that lists values with commas."""

    def read(text: str) -> list[Any]:
        try:
            return [kind(word) for word in text.split(",")]
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of values with commas between them") from None

    return read


def _limit(text: str) -> Limit:
    from minidl.speed.gate import KINDS, limit  # imports NumPy: only if the option is given

    try:
        return limit(text)
    except ValueError:
        kinds = ", ".join(KINDS)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no limit: give one of {kinds}, and a share, as slower:5%"
        ) from None


def _yes(word: str) -> bool:
    return {"yes": True, "no": False}[word]


def _benchmark(name: str) -> str:
    if name not in BENCHMARKS:
        raise argparse.ArgumentTypeError(f"{name!r} is not a benchmark: choose from {', '.join(BENCHMARKS)}")
    return name


# --- Rows -------------------------------------------------------------------------------------------------------------
_Argument = tuple[tuple[str, ...], dict[str, Any]]
_Act = Callable[[Namespace], int]


@dataclass(frozen=True)
class Command:
    """One command. act: runs it; about: its line of help; example: without `minidl`; note: printed below its help."""

    name: str
    act: _Act
    about: str
    example: str
    arguments: tuple[_Argument, ...]
    note: str


GROUPS: Final[dict[str, list[Command]]] = {}
COMMANDS: Final[dict[str, Command]] = {}


def command(group: str, about: str, example: str, *arguments: _Argument, note: str = "") -> Callable[[_Act], _Act]:
    """Add a command, whose name is that of its function."""

    def add(act: _Act) -> _Act:
        made = Command(act.__name__, act, about, example, arguments, note)
        COMMANDS[made.name] = made
        GROUPS.setdefault(group, []).append(made)
        return act

    return add


def elsewhere(name: str, module: str, *errors: type[Exception]) -> _Act:
    """Return the command that a module of minidl has as its `run`. errors: which ones are the user's."""

    def act(arguments: Namespace) -> int:
        with _prefixed(name, *errors):
            code: int = importlib.import_module(f"minidl.{module}").run(arguments)
            return code

    act.__name__ = name
    return act


def _arg(*names: str, **options: Any) -> _Argument:
    return names, options


def _flag(name: str, help: str, **options: Any) -> _Argument:
    return (name,), {"action": "store_true", "help": help, **options}


_RUN = "minidl-demo/trace-1"
_TRACE = _arg("trace", type=Path, metavar="TRACE", help="a trace: its directory or its packed file")
_TRACE_OR_JOB = _arg("traces", type=Path, nargs="+", metavar="TRACE",
                     help="a trace; or a job: a directory of its ranks' traces, or these traces")  # fmt: skip
_URL_OR_JOB = _arg("traces", type=_path_or_url, nargs="+", metavar="TRACE",
                  help="a trace; or a job: its ranks' directory, its URL (s3://...), or these traces")  # fmt: skip
_ENGINE = _arg("--engine", choices=("processes", "dask"),
               help="what reads the ranks of a job (default: processes of this machine)")  # fmt: skip
_TRACE_UNLESS_LIST = _arg("trace", type=Path, nargs="?", metavar="TRACE", help=_TRACE[1]["help"])
_DATALOADER = _arg(
    "--dataloader",
    metavar="NAME",
    help="only one DataLoader, by its dataset, its sampler or its line of code, e.g. train.py:12",
)
_RANK = _arg("--rank", type=_count, metavar="N", help="of a job: only this rank")
_LOG_TO = _arg("--log-to", choices=("tensorboard", "wandb", "mlflow"),
               help="also write the headline and figures there, offline")  # fmt: skip
_OUTPUT = _arg("-o", "--output", type=Path, metavar="FILE", help="default: beside the trace, under its name")


# --- Record -----------------------------------------------------------------------------------------------------------
@command(
    "record", "train on real image files, record it, check the trace and show it", "demo --workers 2",
    _arg("--workers", type=_count, default=4, metavar="N", help="worker processes (default: %(default)s)"),
    _arg("--epochs", type=_positive, default=2, metavar="N", help="default: %(default)s"),
    _arg("--batch-size", type=_positive, default=16, metavar="N", help="default: %(default)s"),
    _arg("--images", type=Path, metavar="DIR", help="your own images, in one folder per class"),
    _arg("--work-dir", type=Path, default=Path("minidl-demo"), metavar="DIR",
         help="for the demo's images and traces (default: %(default)s)"),
    _arg("--trace", type=Path, metavar="DIR", help="where to record (default: WORK_DIR/trace-N)"),
    _arg("--device", choices=("cpu", "cuda", "sim"),
         help="where to train; 'sim' is a simulated accelerator (default: a real one if there is one)"),
    _arg("--pin", action=argparse.BooleanOptionalAction,
         help="pin memory (default: only for an accelerator)"),
    _arg("--side-stream", action=argparse.BooleanOptionalAction, default=True,
         help="copy to an accelerator during the step (default), or as a part of it"),
    _arg("--tour", nargs="?", const="terminal", choices=("terminal", "browser"),
         help="show in seven stops what minidl does, also with a program that hangs; keeps no file"),
)  # fmt: skip
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
    from minidl.hang.headline import headline
    from minidl.views.text import render

    if len(losses) > 1:
        fell = "fell" if losses[-1] < losses[0] else "did not fall"
        print(f"the loss {fell}: {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
    trace = _read(Namespace(), path)
    report = examine(trace)
    yields = trace.select("yield")["time"][:SHOWN_BATCHES]
    until = float(yields[-1] - trace.start) / 1e9
    print(f"check: {report.text()}")
    print(f"\ntimeline of the first {len(yields)} batches:\n{render(trace, until=until)}\n")
    print(*headline(trace).lines(), sep="\n")
    print(f"\nrecorded in {path}")
    print(f"see where its time went: minidl summary {path}")
    print(f"view it in the browser:  minidl view {path}")
    print(f"print its timeline:      minidl timeline {path}")
    print("list all commands:       minidl --help")
    return FOUND if report.violations else OK


@command(
    "record", "run a training script unmodified and record its loaders", "run train.py --epochs 2",
    _arg("--trace", type=Path, metavar="DIR", help="where to record (default: minidl-traces/run-N)"),
    _arg("--detail", choices=("sample", "batch"), default="sample",
         help="record every sample (default), or only batches"),
    _arg("--cpu-time", choices=("auto", "on", "off"), default="auto",
         help="record the CPU time of spans (default: a slow clock only while that costs up to 1%%)"),
    _flag("--full", "keep all events (default: the newest million of each process, 64 MiB)"),
    _flag("--observe", "record torch's own DataLoader (default: minidl's replaces it)"),
    _flag("--harden", "with --observe: put minidl's guards around torch's loader (see: minidl help holes)"),
    _arg("--transport", choices=("upstream", "arena"),
         help="how batches travel: as in torch (default), or in reused memory"),
    _flag("--auto", "let the loaders of map datasets choose their number of workers (see: minidl help plan)"),
    _flag("--view", "follow the run in the browser (with several ranks: the first one)"),
    _arg("--hang-after", type=_seconds_or_off, metavar="S",
         help="if no batch arrives for S seconds, record evidence and report it; or 'off' (default: 120)"),
    _arg("--on-hang", choices=("report", "raise", "kill"),
         help="after that, only report the hang (default), raise LoaderHangError, or kill the run"),
    _LOG_TO,
    _flag("--align-clocks", "with several ranks: compare their clocks at start and end"),
    _flag("--functions", "also record the functions that workers call (needs viztracer)"),
    _flag("--functions-main", "also record the functions that the script's own process calls"),
    _arg("--functions-min-us", type=_count, default=10, metavar="N",
         help="leave out function calls shorter than N microseconds (default: %(default)s)"),
    _flag("-m", "run a module, as python -m does", dest="module"),
    _arg("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS…",
         help="the script or module, then its own arguments"),
    note="With several ranks (of torchrun, srun, mpirun, accelerate), each rank records into DIR/rank-N; after an\n"
    "elastic restart into DIR/rank-N.2; without --trace, DIR is minidl-traces/job-ID. The exit code is the\n"
    "script's; 2 if there is no such script. A program that uses minidl itself does not need this command:\n"
    "MINIDL_TRACE=DIR records it. MINIDL_TRACE_DETAIL=batch, MINIDL_TRACE_RING=full (or MiB per process),\n"
    "MINIDL_TRACE_CPU=on|off, MINIDL_HANG_AFTER=S and MINIDL_ON_HANG stand for the options above.",
)  # fmt: skip
def run(arguments: Namespace) -> int:
    from minidl import run
    from minidl.record.group import job_directory, rank_directory, rank_name
    from minidl.tracefile.members import rank_in_name

    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        what = "module" if arguments.module else "script"
        raise CommandError(f"run: no {what} given; example: minidl run train.py --epochs 2")
    if arguments.harden and not arguments.observe:
        raise CommandError("run: --harden guards torch's own loader, and minidl's replaces it: add --observe")
    if arguments.auto and arguments.observe:
        raise CommandError("run: --auto needs minidl's loader, and --observe keeps torch's: leave one of them out")
    rank = rank_name()
    is_first = rank_in_name(Path(rank)) in (-1, 0)
    _check_log_to(arguments)
    if arguments.trace is None:
        directory = job_directory() or run.free_directory(Path("minidl-traces"), rank or "run")
    else:
        directory = rank_directory(arguments.trace)  # the ranks of a job share one command line
    taken = (directory / "manifest.json").exists()
    try:
        with _prefixed("run", run.RunError), _viewed(directory, arguments.view and is_first):
            code = run.run_script(
                arguments.command,
                module=arguments.module,
                trace=directory,
                observe=arguments.observe,
                transport=arguments.transport,
                align_clocks=arguments.align_clocks,
                harden=arguments.harden,
                auto=arguments.auto,
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
            command = _say_headline(directory)
            terminal.say(f"minidl: recorded in {directory}; next: minidl {command} {_job_or_trace(directory)}")
            if arguments.log_to and is_first:
                _log_run(directory, arguments.log_to)
        elif arguments.trace is None and directory.exists():
            directory.rmdir()
    return code


def _check_log_to(arguments: Namespace) -> None:
    from minidl.job.log_to import check

    if arguments.log_to:
        with _prefixed(arguments.act.__name__, ImportError):
            check(arguments.log_to)


def _log_run(directory: Path, tool: str) -> None:
    """Log a run, or the job that it is a rank of, as far as its ranks have recorded. An error changes no exit code."""
    from minidl.job.digests import make, read_job, record_of
    from minidl.job.live_job import BEHIND
    from minidl.job.log_to import log
    from minidl.job.report import JobReport

    try:
        if (place := _job_or_trace(directory)) != directory:
            make(directory)  # of the other ranks, digests that are a little behind will do
        log(JobReport(read_job([place], behind=BEHIND) or record_of(directory)), tool, _name_of_run(place))
    except Exception as error:
        first, *_ = (str(error).strip() or repr(error)).splitlines()
        terminal.say(f"minidl: nothing was logged to {tool}: {first}")


def _job_or_trace(directory: Path) -> Path:
    """The job whose rank was recorded in a directory; the directory itself if it is none's."""
    from minidl.tracefile.members import members_at, rank_in_name

    is_rank = rank_in_name(directory) >= 0 and members_at([directory.parent]) is not None
    return directory.parent if is_rank else directory


def _name_of_run(place: Path) -> str:
    """The name under which a trace or a job is logged."""
    return f"minidl-{place.resolve().name.removesuffix(PACKED)}"


@contextlib.contextmanager
def _viewed(directory: Path, wanted: bool) -> Iterator[None]:
    """While this is open, another process shows the trace that is being recorded in the browser.

    It ends with its stdin: also if this process is killed. Ctrl-C in the terminal does not reach it.
    """
    if not wanted:
        yield
        return
    import subprocess

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


def _say_headline(directory: Path) -> str:
    """Print the headline of the run on stderr; return the command that says more about it.

    Of a large trace it reads only the end, which shows a hang or a death but not what bounded the run. An error here
    does not change the run's exit code.
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
            return "doctor" if headline(trace).outcome.stopped else "summary"
    except (OSError, TraceError):
        pass
    except Exception as error:
        terminal.say(f"minidl: no headline ({error!r}): this is a bug in minidl, please report it")
    return "summary"


command(
    "record", "show what the workers of a running job are doing now", "top 4711",
    _arg("target", metavar="DIR|PID",
         help="a trace's directory, that of a job's ranks, or the id of a process that records"),
    _arg("--interval", type=_interval, default=1.0, metavar="S",
         help="seconds between two updates (default: %(default)s)"),
    _DATALOADER,
    _RANK,
    _flag("--once", "print the state once and exit"),
    note="Another example: minidl top --once minidl-traces/run-1. Ctrl-C ends the display, not the job.",
)(elsewhere("top", "views.top"))  # fmt: skip


def _say_more(outcome: str) -> None:
    """Print which page explains the outcome of a run, if one does."""
    if outcome in PAGE_OF:
        print(f"  {more(outcome)}")


@command(
    "record", "say why a job hangs: a running one (recorded or not), or an ended one", "doctor 4711",
    _arg("target", nargs="?", metavar="TRACE|DIR|PID",
         help="a trace, a directory of ranks' traces, or the id of a job's process: its launcher, a rank, a worker"),
    _flag("--check", "say what this machine lets the doctor see, and how to let it see the rest"),
    _flag("--json", "print the diagnosis as JSON"),
    _flag("--no-py-spy", "read no Python stacks, even if py-spy is installed"),
    _arg("--seconds", type=_interval, default=3.5, metavar="S",
         help="seconds between two looks at a process that may only be slow (default: %(default)s)"),
    note="It changes nothing in the processes that it examines. With py-spy (pip install py-spy) it also\n"
    "reads their Python stacks. Exit code 1: it found a hang that is certain or likely, a death or an error;\n"
    "a run that may only be slow has exit code 0.",
)  # fmt: skip
def doctor(arguments: Namespace) -> int:
    from minidl.doctor import examine

    if arguments.check:
        return _check_doctor()
    if arguments.target is None:
        raise CommandError("give the id of a process, a trace, or --check")
    with terminal.busy(f"looking at {arguments.target}"):
        found = examine(arguments.target, py_spy=not arguments.no_py_spy, seconds=arguments.seconds)
    print(found.to_json() if arguments.json else found.text())
    if not arguments.json:
        _say_more(found.outcome.value)
        if found.not_seen:
            print(f"  of what was not seen, {more('not seen')}; how to let it be seen: minidl doctor --check")
    return FOUND if found.outcome.wrong else OK


def _check_doctor() -> int:
    """Print what the doctor can see on this machine; FOUND if that is not all."""
    from minidl.hang.allowed import allowed

    kinds = allowed()
    print("\n".join(kind.line() for kind in kinds))
    return OK if all(kind.there for kind in kinds if kind.own) else FOUND


# --- Understand -------------------------------------------------------------------------------------------------------
@command(
    "understand", "print where time and bytes went, and what limits the loader or the job", f"summary {_RUN}",
    _URL_OR_JOB,
    _DATALOADER,
    _RANK,
    _ENGINE,
    _LOG_TO,
)  # fmt: skip
def summary(arguments: Namespace) -> int:
    from minidl.hang.headline import headline
    from minidl.job.digests import job_of, record_of
    from minidl.job.log_to import log
    from minidl.job.report import JobReport
    from minidl.views.summary import summary

    _check_log_to(arguments)
    name = _name_of_run(Path(arguments.traces[0]))
    if (job := _read_job(arguments)) is not None:
        report = JobReport(job)
        print(report.text())
        if arguments.log_to:
            log(report, arguments.log_to, name)
        _say_more("ranks" if report.straggler is not None else report.finding.outcome.value)
        return OK
    trace = _read(arguments)
    with terminal.busy("summing up"):
        text = summary(trace).text()
        outcome = headline(trace).outcome
        alone = outcome.stopped or arguments.dataloader is not None or arguments.rank is not None
        ranks = None if alone else job_of(trace)
    if ranks is not None:
        print(f"{JobReport(ranks).text()}\n")
    print(text)
    if arguments.log_to:
        log(JobReport(record_of(trace)), arguments.log_to, name)
    _say_more(outcome.value)
    return OK


@command(
    "understand", "draw what each process did: as text, picture or HTML page", f"timeline {_RUN} --until 0.5",
    _URL_OR_JOB,
    _DATALOADER,
    _RANK,
    _ENGINE,
    _flag("--ranks", "of a trace with several ranks: draw ranks by steps, as of a job"),
    _arg("--width", type=_positive, metavar="N", help="characters per line (default: terminal width)"),
    _arg("--since", type=float, metavar="S", help="begin S seconds after the first event"),
    _arg("--until", type=float, metavar="S", help="end S seconds after the first event"),
    _arg("--worker", type=_count, metavar="N", help="draw only this worker"),
    _arg("--batch", type=_count, metavar="N", help="text: only this task; picture: also its path"),
    _arg("-o", "--output", type=Path, metavar="FILE", help="a picture (.png, .svg) or a page (.html)"),
)  # fmt: skip
def timeline(arguments: Namespace) -> int:
    from minidl.job.digests import job_of
    from minidl.views.text import render

    if arguments.output is not None and not arguments.output.suffix:
        raise CommandError(
            f"timeline: {arguments.output}: the name has no suffix: add .png or .svg (picture) or .html (page)"
        )
    job = _read_job(arguments)
    if job is None and arguments.ranks:
        job = job_of(_read(arguments))
        if job is None:
            raise CommandError(f"timeline: {arguments.traces[0]} has one rank: omit --ranks")
    if job is not None:
        return _timeline_of_job(arguments, job)
    if arguments.output is not None:
        return _page(arguments) if arguments.output.suffix == ".html" else _picture(arguments)
    trace = _read(arguments)
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


def _timeline_of_job(arguments: Namespace, job: JobRecord) -> int:
    from minidl.job.report import JobReport
    from minidl.views.heat_map import heat_map, in_text

    if {arguments.since, arguments.until, arguments.worker, arguments.batch} != {None}:
        raise CommandError(f"timeline: {job.name} is a job: --since, --until, --worker and --batch need --rank N")
    report = JobReport(job)
    if arguments.output is None:
        print(in_text(report, arguments.width or terminal.columns()))
    elif arguments.output.suffix == ".html":
        raise CommandError(f"timeline: {job.name} is a job: give .png or .svg, or choose a rank with --rank N")
    else:
        _save("timeline", arguments.output, lambda: heat_map(report))
        print(arguments.output)
    return OK


def _page(arguments: Namespace) -> int:
    from minidl.views.page import html

    workers = None if arguments.worker is None else [arguments.worker]
    trace = _read(arguments)
    with _prefixed("timeline", ValueError), terminal.busy("drawing"):
        html(trace, arguments.output, since=arguments.since, until=arguments.until, workers=workers)
    print(arguments.output)
    return OK


def _picture(arguments: Namespace) -> int:
    from minidl.views.picture import timeline

    trace = _read(arguments)
    workers = None if arguments.worker is None else [arguments.worker]
    batches = None if arguments.batch is None else [arguments.batch]
    window = {"since": arguments.since, "until": arguments.until}
    _save("timeline", arguments.output, lambda: timeline(trace, **window, workers=workers, batches=batches))
    print(arguments.output)
    return OK


def _save(command: str, path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a figure and write it, whole or not at all."""
    from minidl.tracefile.packs import whole

    if not path.suffix:
        raise CommandError(f"{command}: {path}: the name has no suffix: add .png or .svg")
    with _prefixed(command, ValueError, ImportError), terminal.busy("drawing"):
        figure = draw()
        with whole(path) as draft:
            figure.savefig(draft)


@command(
    "understand", "open a trace or a job in the browser, served by this machine", f"view {_RUN}",
    _TRACE_UNLESS_LIST,
    _DATALOADER,
    _RANK,
    _flag("--perfetto", "open Perfetto instead of the page (the page has a link to it)"),
    _flag("--live", "follow a running job; TRACE is its directory, also of all ranks, or the id of its process"),
    _arg("--along", action="store_true", help=argparse.SUPPRESS),
    _arg("--port", type=_port, default=0, metavar="N", help="listen on this port (default: any free one)"),
    _arg("--query", dest="queries", action="append", metavar="NAME",
         help="open Perfetto with the result of this query; may be repeated"),
    _flag("--queries", "list the queries and exit", dest="list_queries"),
    _arg("--no-browser", dest="browser", action="store_false", help="print the address only"),
)  # fmt: skip
def view(arguments: Namespace) -> int:
    from minidl.views.queries import QUERIES
    from minidl.views.viewer import ViewerError, serve, serve_job

    if arguments.list_queries:
        print("\n".join(f"{name:<8} {query.about}" for name, query in QUERIES.items()))
        return OK
    if _is_job(arguments):
        if arguments.dataloader is not None or arguments.perfetto or arguments.queries:
            raise CommandError(f"view: {arguments.trace} is a job: --dataloader, --perfetto and --query need --rank N")
        with _prefixed("view", ViewerError):
            serve_job([arguments.trace], arguments.browser, arguments.port, live=arguments.live)
        return OK
    if arguments.live:
        return _view_live(arguments)
    progress = terminal.counting("events written")
    with _prefixed("view", ViewerError):
        serve(
            _read(arguments),
            arguments.browser,
            arguments.port,
            perfetto=arguments.perfetto or bool(arguments.queries),
            queries=arguments.queries,
            progress=progress,
        )
    return OK


def _is_job(arguments: Namespace) -> bool:
    """Whether a command with one path is about all ranks of a job."""
    from minidl.tracefile.members import members_at

    there = arguments.trace is not None and arguments.trace.exists() and arguments.rank is None
    return there and members_at([arguments.trace]) is not None


def _view_live(arguments: Namespace) -> int:
    from minidl.job.digests import trace_of
    from minidl.views.viewer import ViewerError, serve_along, serve_live

    if arguments.dataloader is not None:
        raise CommandError("view: --live shows all DataLoaders: omit --dataloader, and choose one in the page")
    if arguments.trace is None:
        raise CommandError("view: --live needs a trace's directory, or the id of a process that records one")
    if arguments.rank is not None:
        arguments.trace = trace_of([arguments.trace], arguments.rank).path
    with _prefixed("view", ViewerError):
        if arguments.along:
            serve_along(arguments.trace, arguments.browser, arguments.port, sys.stdin)
        else:
            serve_live(arguments.trace, arguments.browser, arguments.port)
    return OK


command(
    "understand", "step through a trace, forwards and backwards", f"replay {_RUN} --batch 9",
    _TRACE,
    _DATALOADER,
    _RANK,
    _arg("--batch", type=int, metavar="N", help="begin when the training loop receives batch N (from 0)"),
    _arg("--at", type=float, metavar="S", help="begin S seconds after the trace's first event"),
    _arg("--event", type=int, metavar="N", help="begin after the iterator's first N events"),
    _arg("--iterator", "--loader", dest="iterator", type=int, metavar="N",
         help="number of an iterator (default: the headline's)"),
    _arg("--html", type=Path, metavar="FILE", help="write a page with a slider instead"),
    note="Without a terminal it prints one state: the given one, or the last.",
)(elsewhere("replay", "views.replay_terminal", ValueError, IndexError))  # fmt: skip


@command(
    "understand", "print the steps that led to a batch, in causal order", f"before {_RUN} --batch 9",
    _TRACE,
    _DATALOADER,
    _RANK,
    _arg("--batch", type=_count, required=True, metavar="N", help="its task, from 0 in each epoch"),
    _arg("--iterator", "--loader", dest="iterator", type=_count, metavar="N",
         help="number of an iterator (default: the last one with the task)"),
    _arg("--epoch", type=_count, metavar="N", help="its epoch (default: the last one with the task)"),
    _arg("--lines", type=_count, default=40, metavar="N",
         help="print at most N steps; 0 = all (default: %(default)s)"),
)  # fmt: skip
def before(arguments: Namespace) -> int:
    from minidl.speed.critical_path import critical_path
    from minidl.tracefile.words import lacking

    trace = _read(arguments)
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


@command(
    "understand", "predict what other settings would give, from one recording", f"plan {_RUN} --workers 0,2,4,8",
    _TRACE,
    _arg("other", type=Path, nargs="?", metavar="OTHER",
         help="a recording of the same program with another number of workers: it tells how workers hinder each other"),
    _DATALOADER,
    _RANK,
    _arg("--workers", dest="num_workers", type=_listed(_count), metavar="N,...",
         help="numbers of workers (default: from 0 to twice the CPUs)"),
    _arg("--prefetch", dest="prefetch_factor", type=_listed(_count), metavar="N,...", help="prefetch factors"),
    _arg("--transport", type=_listed(str), metavar="NAME,...", help="upstream, arena (default: both)"),
    _arg("--worker-method", type=_listed(str), metavar="NAME,...",
         help="multiprocessing, thread: workers that are threads of the loop's process"),
    _arg("--in-order", type=_listed(_yes), metavar="yes,no", help="in_order"),
    _arg("--persistent", dest="persistent_workers", type=_listed(_yes), nargs="?", const=[True],
         metavar="yes,no", help="persistent_workers"),
    _arg("--pin", dest="pin_memory", type=_listed(_yes), nargs="?", const=[True], metavar="yes,no",
         help="pin_memory"),
    _arg("--batch-size", type=_listed(_positive), metavar="N,...", help="samples of a batch"),
    _arg("--cpus", type=_listed(float), metavar="X,...", help="CPUs of another machine"),
    _arg("--samples", type=float, metavar="X", help="if each sample took X times as long: 0.5 is twice as fast"),
    _arg("--consumer", type=float, metavar="X",
         help="if each step of the training loop took X times as long: 0.25 is a GPU four times as fast"),
    _flag("--json", "print the predictions as JSON"),
    _arg("-o", "--output", type=Path, metavar="FILE",
         help="also draw batches/s against workers (.png, .svg), or write the recommended setting's simulated run as a "
              "trace (.minidl)"),
)  # fmt: skip
def plan(arguments: Namespace) -> int:
    import json

    from minidl.prediction import plan as predict

    names = ("num_workers", "prefetch_factor", "transport", "worker_method", "in_order", "persistent_workers",
             "pin_memory", "batch_size", "cpus", "samples", "consumer")  # fmt: skip
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    of_rank = Namespace(rank=arguments.rank)
    places = [path for path in (arguments.trace, arguments.other) if path is not None]
    if arguments.output is not None and arguments.output.resolve() in {path.resolve() for path in places}:
        raise CommandError(f"plan: {arguments.output} is the recording itself: choose another name for -o")
    traces = [_read(of_rank, path) for path in places]
    with terminal.busy("simulating"):
        found = predict(*traces, dataloader=arguments.dataloader, **values)
    if arguments.output is not None:
        if arguments.output.suffix == PACKED:
            from minidl.speed.plan.written import write

            write(found.recorded, found.recommended.setting, arguments.output)
        else:
            from minidl.views.plan_picture import draw

            _save("plan", arguments.output, lambda: draw(found))
    print(json.dumps(found.facts(), indent=1) if arguments.json else found.text())
    return OK


@command(
    "understand", "try on the real program the settings that a plan recommends", "tune train.py --epochs 2",
    _arg("--batches", type=_positive, default=100, metavar="N",
         help="end each run after so many batches of a loader (default: %(default)s)"),
    _arg("--settings", type=_positive, default=3, metavar="N", help="try so many (default: %(default)s)"),
    _flag("--yes", "the program may write again what it writes"),
    _flag("--json", "print what was predicted and measured as JSON"),
    _flag("-m", "run a module, as python -m does", dest="module"),
    _arg("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS…",
         help="the script or module, then its own arguments"),
    note="Each run begins the unmodified program anew, and ends it early. If the first run is seen to write anything\n"
    "(by Python code, not by C code), nothing is tried without --yes. Exit codes: 0 tried; 1 nothing was tried;\n"
    "2 the program cannot be recorded.",
)  # fmt: skip
def tune(arguments: Namespace) -> int:
    import json

    from minidl import tune

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise CommandError("tune: no script given; example: minidl tune train.py --epochs 2")
    options = {"module": arguments.module, "batches": arguments.batches, "settings": arguments.settings}
    with _prefixed("tune", tune.TuneError):
        *_, found = map(_told, tune.tune(command, **options, again=arguments.yes))
    print(json.dumps(found.facts(), indent=1) if arguments.json else found.text())
    return OK if found.tried else FOUND


def _told(step: Any) -> Any:
    """Say on stderr what is done; what is found is passed on."""
    if isinstance(step, str):
        terminal.say(f"minidl: {step}")
    return step


@command(
    "understand", "print every copy of every batch, and whether it is needed", f"ledger {_RUN}",
    _TRACE,
    _DATALOADER,
    _RANK,
)  # fmt: skip
def ledger(arguments: Namespace) -> int:
    from minidl.speed.ledger import ledger
    from minidl.tracefile.words import lacking

    trace = _read(arguments)
    with terminal.busy("following the copies"):
        text = ledger(trace).text()
    print("\n".join([text, *lacking(trace.problems)]))
    return OK


# --- Compare ----------------------------------------------------------------------------------------------------------
@command(
    "compare", "check that a trace obeys the protocol (exit code 1 if not)", f"check {_RUN}",
    _arg("traces", type=Path, nargs="*", metavar="TRACE", help=_TRACE_OR_JOB[1]["help"]),
    _DATALOADER,
    _RANK,
    _flag("--rules", "list the rules and exit"),
    _flag("--json", "print the report as JSON"),
)  # fmt: skip
def check(arguments: Namespace) -> int:
    from minidl.check import rules_text, run
    from minidl.check.ranks import check_ranks
    from minidl.tracefile.members import members_at

    if arguments.rules:
        print(rules_text())
        return OK
    members = members_at(arguments.traces) if arguments.rank is None and arguments.dataloader is None else None
    if members is not None:
        with terminal.busy(f"checking {members.name}"):
            return check_ranks(members, as_json=arguments.json)
    return run(_read(arguments), as_json=arguments.json)


command(
    "compare", "check that the ranks of a job share the data correctly (exit code 1 if not)",
    "audit minidl-traces/run-1",
    _arg("traces", type=Path, nargs="+", metavar="TRACE",
         help="a joined trace, or the traces of the ranks, or their directory"),
    _DATALOADER,
    _arg("--allow", action="append", default=[], metavar="NAME",
         help="accept findings with this name, for instance in CI; may be repeated"),
    _flag("--json", "print the report as JSON"),
)(elsewhere("audit", "speed.audit"))  # fmt: skip


@command(
    "compare", "compare two runs: how much faster B is, and what changed", f"diff {_RUN} minidl-demo/trace-2",
    _arg("a", type=Path, metavar="A", help="the earlier trace, or the directory of a job's ranks"),
    _arg("b", type=Path, metavar="B", help="the later one"),
    _DATALOADER,
    _RANK,
    _flag("--workers", "also compare the stages of each worker"),
    _flag("--force", "compare even if the datasets differ"),
    _arg("--fail-if", action="append", type=_limit, default=[], metavar="WHAT:LIMIT",
         help="exit code 1 if B is worse by more than LIMIT, beyond the noise: slower:5%%, waiting:10%% (points of the "
              "loop's time), first-batch:50%%, memory:20%%; may be repeated"),
    _flag("--json", "print the comparison as JSON"),
    _arg("-o", "--output", type=Path, metavar="FILE",
         help="also draw both timelines on one axis, as a picture (.png, .svg) or a page (.html)"),
)  # fmt: skip
def diff(arguments: Namespace) -> int:
    import json

    from minidl.speed.diff import diff as compare

    jobs = [_read_job(arguments, path) for path in (arguments.a, arguments.b)]
    if jobs[0] is not None and jobs[1] is not None:
        return _diff_of_jobs(arguments, jobs[0], jobs[1])
    traces = [_read(arguments, path, or_alone=True) for path in (arguments.a, arguments.b)]
    with terminal.busy("comparing"):
        found = compare(*traces, force=arguments.force)
    if arguments.output is not None:
        loaders = found.a.loaders, found.b.loaders
        if arguments.output.suffix == ".html":
            from minidl.views import page

            told = found.text().partition("\n\n")[0].splitlines()  # without the tables
            page.before_and_after(traces, loaders, found.headline, told[1:], arguments.output)
        else:
            from minidl.views.picture import before_and_after

            _save("diff", arguments.output, lambda: before_and_after(traces, loaders, found.headline))
    limits = _judged(found, traces, arguments.fail_if)
    if arguments.json:
        print(json.dumps(found.facts() | {"limits": [one.facts() for one in limits]}, indent=1))
    else:
        print(*(one.reason for one in limits), found.text(workers=arguments.workers), sep="\n")
    return FOUND if any(one.exceeded for one in limits) else OK


def _judged(found: Diff, traces: Sequence[Trace], limits: Sequence[Limit]) -> list[GateResult]:
    """Judge a comparison. Raises CommandError if one of the limits cannot be judged."""
    from minidl.speed.gate import judged

    if limits and (made := [trace for trace in traces if "planned" in trace.manifest]):
        raise CommandError(f"diff: {made[0].path} is simulated by minidl plan: --fail-if needs two recorded runs")
    judgements = judged(found, traces, limits)
    for one in judgements:
        if one.exceeded is None:
            raise CommandError(f"diff: --fail-if {one.reason}")
    return judgements


def _diff_of_jobs(arguments: Namespace, a: JobRecord, b: JobRecord) -> int:
    import json

    from minidl.job.compare import JobDiff
    from minidl.job.report import JobReport

    if arguments.fail_if:
        raise CommandError(f"diff: {a.name} and {b.name} are jobs: --fail-if needs one rank of each, by --rank N")
    if arguments.workers:
        raise CommandError(f"diff: {a.name} and {b.name} are jobs: --workers needs one rank of each, by --rank N")
    if arguments.output is not None:
        raise CommandError("diff: no picture of two jobs: draw each with minidl timeline, or choose --rank N")
    found = JobDiff(JobReport(a), JobReport(b))
    print(json.dumps(found.facts(), indent=1) if arguments.json else found.text())
    return OK


command(
    "compare", "measure what minidl costs, compared with torch", "bench --quick samplers",
    _arg("what", nargs="*", type=_benchmark, metavar="WHAT",
         help=f"{', '.join(BENCHMARKS)} (default: all)"),
    _arg("--device", nargs="?", const="real", choices=("real", "sim"), metavar="sim",
         help="measure copies to an accelerator instead; 'sim' is a simulated one"),
    _flag("--quick", "make fewer and shorter measurements, for a first impression"),
    _flag("--calibrate", "transport: measure what minidl plan needs to know of this machine, and keep it"),
    _arg("--json", type=Path, metavar="FILE", help="also write every single measurement to FILE"),
)(elsewhere("bench", "prove.bench"))  # fmt: skip


# --- Keep and convert -------------------------------------------------------------------------------------------------
@command(
    "keep and convert", "write a trace as JSON (chrome://tracing) or .pftrace (Perfetto)", f"export {_RUN}",
    _TRACE,
    _DATALOADER,
    _RANK,
    _arg("-o", "--output", type=Path, metavar="FILE",
         help="FILE.json or FILE.pftrace (default: the .json beside the trace, under its name)"),
)  # fmt: skip
def export(arguments: Namespace) -> int:
    from minidl.views.chrome import write_chrome
    from minidl.views.perfetto import write_perfetto

    target = arguments.output or _beside(arguments.trace, ".json")
    write = {".json": write_chrome, ".pftrace": write_perfetto}.get(target.suffix)
    if write is None:
        raise CommandError(f"export: {target}: the name must end in .json (chrome://tracing) or .pftrace (Perfetto)")
    write(_read(arguments), target, terminal.counting("events written"))
    print(target)
    return OK


@command(
    "keep and convert", "pack a trace into one compressed file", f"pack {_RUN}",
    _TRACE,
    _RANK,
    _OUTPUT,
)  # fmt: skip
def pack(arguments: Namespace) -> int:
    from minidl.tracefile.attachments import too_large

    trace = _read(arguments)
    print(trace.pack(arguments.output or _beside(arguments.trace, ".minidl")))
    for attachment in too_large(trace.attachments):
        terminal.say(f"minidl: attachment {attachment!r} is too large to pack: it is left out")
    return OK


command(
    "keep and convert", "add a torch.profiler profile to a trace, or join the traces of ranks",
    f"merge {_RUN} profile.json",
    _arg("trace", type=Path, metavar="TRACE", help="a trace, or a directory with one trace per rank"),
    _arg("others", type=Path, nargs="*", metavar="OTHER",
         help="profiles that torch.profiler exported, or traces of other ranks"),
    _arg("-o", "--output", type=Path, metavar="PATH",
         help="a .minidl file; for joined ranks, also a directory"),
)(elsewhere("merge", "merge"))  # fmt: skip


# --- Teach ------------------------------------------------------------------------------------------------------------
command(
    "teach", "read the articles beside the code: a page, or one section in the terminal",
    "companion 1 §2.4.4 --language ru",
    _arg("what", nargs="*", metavar="WHAT",
         help="print a section (1 §2.4.4, shutdown), the rows of a file, function or event, drift, or the row that a "
              "heading, a name or a passage of an article is about"),
    _arg("--language", choices=("en", "ru", "zh"), default="en",
         help="language of printed text (default: %(default)s); the page has all three"),
    _arg("-o", "--output", type=Path, default=Path("minidl-companion.html"), metavar="FILE",
         help="where to write the page (default: %(default)s)"),
    _flag("--serve", "serve the page on this machine instead, and open it in the browser"),
    _arg("--port", type=_port, default=0, metavar="N", help="listen on this port (default: any free one)"),
    _arg("--compare", type=Path, metavar="DIR",
         help="print what has moved in another torch version; DIR is its package folder"),
    note="Also: minidl companion reorder_store, minidl companion dispatcher.py, minidl companion drift.",
)(elsewhere("companion", "companion", ValueError))  # fmt: skip


@command(
    "teach", "hand out, translate and grade the course of notebooks",
    "course build --student anna --language ru",
    _arg("action", choices=("build", "grade", "progress", "reset", "slides", "texts"),
         help="build: write copies; grade: run what students hand in (their code is executed) and count points; "
              "progress: count what is answered; reset: write a notebook anew; slides: write slides; texts: what a "
              "language lacks"),
    _arg("paths", nargs="*", type=Path, metavar="DIR", help="folders to write, or of students"),
    _arg("--student", nargs="+", type=Path, default=[], metavar="DIR",
         help="build: folders for students, without solutions and folded answers; a folder's name is the student's"),
    _arg("--language", choices=("en", "ru", "zh"), default="en", help="default: %(default)s"),
    _arg("--only", action="append", default=[], metavar="NAME", help="only this notebook (00, lab1); may be repeated"),
    _arg("--seed", type=_count, default=0, metavar="N",
         help="build: chooses each student's numbers and hung runs (default: %(default)s)"),
    _flag("--same-mysteries", "build: hand out the course's hung runs of 09, and record none for each student"),
    _flag("--csv", "grade, progress: print a row for each student as CSV"),
    _flag("--json", "grade, progress: print each mark, with what was said, as JSON"),
    _arg("--course", type=Path, metavar="DIR",
         help="the folder notebooks/ of a checkout, which an installed package does not contain"),
    note="All DIR after --student are its. Another example: minidl course texts --language zh --only 05.",
)  # fmt: skip
def course(arguments: Namespace) -> int:
    folder = arguments.course or Path(__file__).parents[1] / "notebooks"
    if not (folder / "course" / "command.py").is_file():
        raise CommandError(
            f"course: {folder} holds no notebooks of the course, which an installed package does not contain: "
            "give --course CHECKOUT/notebooks"
        )
    sys.path.insert(0, str(folder))
    with _prefixed("course", ValueError):
        code: int = importlib.import_module("course.command").run(arguments)
    return code


@command(
    "teach", "list all events: meaning, fields, code here and in torch", "events",
)  # fmt: skip
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


command(
    "teach", "explore all interleavings of the protocol, and what each guard prevents", "explore --quick -o explored",
    _flag("--quick", "only the smallest configuration of each kind, with merged steps (takes seconds)"),
    _flag("--full", "merge no steps (takes about ten minutes and 2 GB of memory)"),
    _arg("--only", action="append", metavar="NAME", help="only this configuration; may be repeated"),
    _arg("--guard", action="append", metavar="NAME",
         help="only the shortest failing run without this guard; may be repeated"),
    _flag("--upstream", "explore torch's protocol instead"),
    _arg("--with-guard", action="append", metavar="NAME",
         help="with --upstream: give torch's protocol this guard, and explore where it is needed; may be repeated; "
         "all: each guard that torch lacks, in all configurations"),
    _flag("--slabs", "explore the slabs of transport='arena' instead, with and without each guard"),
    _arg("--follow", type=Path, metavar="TRACE", help="check that the model can repeat a recorded run"),
    _flag("--list", "list configurations and guards and exit"),
    _arg("-o", "--output", type=Path, metavar="DIR", help="write each failing run as a trace: DIR/NAME"),
    note="A run has at most one crash, and two Ctrl-C in the main thread. Configurations named 'threads, ...' have\n"
    "worker threads, which die of an exception or stay in a sample. Not explored: a Ctrl-C that reaches the\n"
    "workers or comes while Python exits, next() after a Ctrl-C, and errors in the user's code. --slabs has\n"
    "two slabs with one batch each, and one Ctrl-C, one lack of descriptors or one lent slab per run.",
)(elsewhere("explore", "explore", ValueError))  # fmt: skip


command(
    "teach", "inject faults at every step of the protocol (exit code 1 if the loader fails one)",
    "faults 'in write, SIGKILL' 'spawn, pin'",
    _arg("patterns", nargs="*", metavar="PATTERN",
         help="only cells whose name contains this; it may have * (default: all, about ten minutes)"),
    _flag("--list", "list the cells with their expected results, and exit"),
    _arg("--jobs", type=_positive, default=2, metavar="N",
         help="run N cells at a time (default: %(default)s)"),
    _arg("--transport", choices=("upstream", "arena", "file_system", "mini", "thread"), default="upstream",
         help="how batches travel; file_system is torch's other strategy, mini is the loader on one page; "
              "thread: workers are threads, which have steps and faults of their own (default: %(default)s)"),
    _arg("--json", type=Path, metavar="FILE", help="also write every result to FILE"),
    _arg("--keep", type=Path, metavar="FILE",
         help="keep each result in FILE; an interrupted run continues from it"),
)(elsewhere("faults", "prove.faults", ValueError))  # fmt: skip


command(
    "teach", "run programs with real-world failures, and score the doctor on them", "lab sample_stuck",
    _arg("case", nargs="?", metavar="CASE", help="run this case and the doctor on it (default: list all)"),
    _arg("--seed", type=_count, default=0, metavar="N",
         help="workers, sizes and timing of the run (default: %(default)s)"),
    _flag("--fixed", "run the fixed program instead"),
    _arg("--loader", choices=("torch", "observed", "ours"),
         help="torch's loader, torch's observed by minidl, or minidl's own"),
    _flag("--score", "run all cases and score the doctor, on the live run and after kill -9"),
    _arg("--runs", type=_positive, default=3, metavar="N", help="--score: runs of each case (default: 3)"),
    _arg("--cases", default="*", metavar="PATTERN", help="--score: only cases whose names match PATTERN"),
    _arg("--jobs", type=_positive, default=2, metavar="N", help="--score: runs at a time (default: 2)"),
    _arg("--keep", type=Path, metavar="FILE",
         help="--score: keep each answer in FILE; an interrupted score continues from it"),
    _flag("--json", "--score: print every answer as JSON"),
    _arg("--without", metavar="GUARD", help="run minidl's loader without this guard"),
    _flag("--guards", "list the guards of the protocol, and exit"),
)(elsewhere("lab", "prove.lab", ValueError))  # fmt: skip


@command(
    "teach", "print a page of the documentation: a guide, an explanation, a table", "help hang",
    _arg("page", nargs="?", metavar="NAME", help="the page (default: list all)"),
)  # fmt: skip
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
