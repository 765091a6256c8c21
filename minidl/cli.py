"""The command line: a table of all commands with their arguments. `main(argv)` runs one and returns its exit code.

Exit codes: 0 success; 1 a command found a problem (a broken rule, a mistake, a hole in the protocol); 2 wrong
arguments or unreadable input (one line on stderr: object, problem, remedy); 130 Ctrl-C; 143 SIGTERM. `run` ends like
the script: with its exit code, or by SIGINT. Results go to stdout, everything else to stderr. `commands` contains the
commands themselves.

Rule of use: this module and `commands` import neither torch nor NumPy, so that help and argument errors are fast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minidl
from minidl import commands, terminal
from minidl.commands import FOUND, OK, CommandError

USAGE, INTERRUPTED = 2, 130

__all__ = ["COMMANDS", "FOUND", "INTERRUPTED", "OK", "USAGE", "CommandError", "main", "parser"]


# --- Types of arguments -----------------------------------------------------------------------------------------------
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


BENCHMARKS = ("events", "loader", "transport", "state", "files", "samplers")


def _benchmark(name: str) -> str:
    if name not in BENCHMARKS:
        raise argparse.ArgumentTypeError(f"{name!r} is not a benchmark: choose from {', '.join(BENCHMARKS)}")
    return name


# --- The table --------------------------------------------------------------------------------------------------------
_Argument = tuple[tuple[str, ...], dict[str, Any]]


def _arg(*names: str, **options: Any) -> _Argument:
    return names, options


def _flag(name: str, help: str, **options: Any) -> _Argument:
    return (name,), {"action": "store_true", "help": help, **options}


@dataclass(frozen=True)
class Command:
    """One command. act: runs it; about: its line of help; example: without `minidl`; note: printed below its help."""

    act: Callable[[argparse.Namespace], int]
    about: str
    example: str
    arguments: tuple[_Argument, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        return self.act.__name__


_RUN = "minidl-demo/trace-1"
_TRACE = _arg("trace", type=Path, metavar="TRACE", help="a trace: its directory or its packed file")
_TRACE_UNLESS_LIST = _arg("trace", type=Path, nargs="?", metavar="TRACE", help=_TRACE[1]["help"])
_DATALOADER = _arg(
    "--dataloader",
    metavar="NAME",
    help="only one DataLoader, by its dataset, its sampler or its line of code, e.g. train.py:12",
)
_OUTPUT = _arg("-o", "--output", type=Path, metavar="FILE", help="default: beside the trace, under its name")

GROUPS: dict[str, tuple[Command, ...]] = {
    "record": (
        Command(
            commands.demo, "train on real image files, record it, check the trace and show it", "demo --workers 2",
            (
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
            ),
        ),
        Command(
            commands.run, "run a training script unmodified and record its loaders", "run train.py --epochs 2",
            (
                _arg("--trace", type=Path, metavar="DIR", help="where to record (default: minidl-traces/run-N)"),
                _arg("--detail", choices=("sample", "batch"), default="sample",
                     help="record every sample (default), or only batches"),
                _arg("--cpu-time", choices=("auto", "on", "off"), default="auto",
                     help="record the CPU time of spans (default: if reading the clock takes up to 100 ns per event)"),
                _flag("--full", "keep all events (default: the newest million of each process, 64 MiB)"),
                _flag("--observe", "record torch's own DataLoader (default: minidl's replaces it)"),
                _arg("--transport", choices=("upstream", "arena"),
                     help="how batches travel: as in torch (default), or in reused memory"),
                _flag("--view", "follow the run in the browser (with several ranks: the first one)"),
                _arg("--hang-after", type=_seconds_or_off, metavar="S",
                     help="if no batch arrives for S seconds, record evidence and report it; or 'off' (default: 120)"),
                _arg("--on-hang", choices=("report", "raise", "kill"),
                     help="after that, only report the hang (default), raise LoaderHangError, or kill the run"),
                _flag("--align-clocks", "with several ranks: compare their clocks at start and end"),
                _flag("--functions", "also record the functions that workers call (needs viztracer)"),
                _flag("--functions-main", "also record the functions that the script's own process calls"),
                _arg("--functions-min-us", type=_count, default=10, metavar="N",
                     help="leave out function calls shorter than N microseconds (default: %(default)s)"),
                _flag("-m", "run a module, as python -m does", dest="module"),
                _arg("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS…",
                     help="the script or module, then its own arguments"),
            ),
            "With several ranks (torchrun sets RANK), each rank records into DIR/rank-N. The exit code is the\n"
            "script's; 2 if there is no such script. A program that uses minidl itself does not need this command:\n"
            "MINIDL_TRACE=DIR records it. MINIDL_TRACE_DETAIL=batch, MINIDL_TRACE_RING=full (or MiB per process),\n"
            "MINIDL_TRACE_CPU=on|off, MINIDL_HANG_AFTER=S and MINIDL_ON_HANG stand for the options above.",
        ),
        Command(
            commands.top, "show what the workers of a running job are doing now", "top 4711",
            (
                _arg("target", metavar="DIR|PID", help="a trace's directory, or the id of a process that records one"),
                _arg("--interval", type=_interval, default=1.0, metavar="S",
                     help="seconds between two updates (default: %(default)s)"),
                _DATALOADER,
                _flag("--once", "print the state once and exit"),
            ),
            "Another example: minidl top --once minidl-traces/run-1. Ctrl-C ends the display, not the job.",
        ),
        Command(
            commands.doctor, "say why a job hangs: a running one (recorded or not), or an ended one", "doctor 4711",
            (
                _arg("target", metavar="TRACE|DIR|PID", help="a trace, or the id of a process that runs a DataLoader"),
                _flag("--json", "print the diagnosis as JSON"),
                _flag("--no-py-spy", "read no Python stacks, even if py-spy is installed"),
                _arg("--seconds", type=_interval, default=3.5, metavar="S",
                     help="seconds between two looks at a process that may only be slow (default: %(default)s)"),
            ),
            "It changes nothing in the processes that it examines. With py-spy (pip install py-spy) it also\n"
            "reads their Python stacks. Exit code 1: it found a hang, a death or an error.",
        ),
    ),
    "understand": (
        Command(commands.summary, "print where time and bytes went, and what limits the loader", f"summary {_RUN}",
                (_TRACE, _DATALOADER)),
        Command(
            commands.timeline, "draw what each process did: as text, picture or HTML page",
            f"timeline {_RUN} --until 0.5",
            (
                _TRACE,
                _DATALOADER,
                _arg("--width", type=_positive, metavar="N", help="characters per line (default: terminal width)"),
                _arg("--since", type=float, metavar="S", help="begin S seconds after the first event"),
                _arg("--until", type=float, metavar="S", help="end S seconds after the first event"),
                _arg("--worker", type=_count, metavar="N", help="draw only this worker"),
                _arg("--batch", type=_count, metavar="N", help="text: only this task; picture: also its path"),
                _arg("-o", "--output", type=Path, metavar="FILE", help="a picture (.png, .svg) or a page (.html)"),
            ),
        ),
        Command(
            commands.view, "open a trace in the browser, served by this machine", f"view {_RUN}",
            (
                _TRACE_UNLESS_LIST,
                _DATALOADER,
                _flag("--perfetto", "open Perfetto instead of the page (the page has a link to it)"),
                _flag("--live", "follow a running job; TRACE is its directory, or the id of its process"),
                _arg("--along", action="store_true", help=argparse.SUPPRESS),  # until stdin ends: for run --view
                _arg("--port", type=_port, default=0, metavar="N", help="listen on this port (default: any free one)"),
                _arg("--query", dest="queries", action="append", metavar="NAME",
                     help="open Perfetto with the result of this query; may be repeated"),
                _flag("--queries", "list the queries and exit", dest="list_queries"),
                _arg("--no-browser", dest="browser", action="store_false", help="print the address only"),
            ),
        ),
        Command(
            commands.replay, "step through a trace, forwards and backwards", f"replay {_RUN} --batch 9",
            (
                _TRACE,
                _DATALOADER,
                _arg("--batch", type=int, metavar="N", help="begin when the training loop receives batch N (from 0)"),
                _arg("--at", type=float, metavar="S", help="begin S seconds after the trace's first event"),
                _arg("--event", type=int, metavar="N", help="begin after the iterator's first N events"),
                _arg("--iterator", "--loader", dest="iterator", type=int, metavar="N",
                     help="number of an iterator (default: the headline's)"),
                _arg("--html", type=Path, metavar="FILE", help="write a page with a slider instead"),
            ),
            "Without a terminal it prints one state: the given one, or the last.",
        ),
        Command(
            commands.before, "print the steps that led to a batch, in causal order", f"before {_RUN} --batch 9",
            (
                _TRACE,
                _DATALOADER,
                _arg("--batch", type=_count, required=True, metavar="N", help="its task, from 0 in each epoch"),
                _arg("--iterator", "--loader", dest="iterator", type=_count, metavar="N",
                     help="number of an iterator (default: the last one with the task)"),
                _arg("--epoch", type=_count, metavar="N", help="its epoch (default: the last one with the task)"),
                _arg("--lines", type=_count, default=40, metavar="N",
                     help="print at most N steps; 0 = all (default: %(default)s)"),
            ),
        ),
        Command(commands.ledger, "print every copy of every batch, and whether it is needed", f"ledger {_RUN}",
                (_TRACE, _DATALOADER)),
    ),
    "compare": (
        Command(
            commands.check, "check that a trace obeys the protocol (exit code 1 if not)", f"check {_RUN}",
            (
                _TRACE_UNLESS_LIST,
                _DATALOADER,
                _flag("--rules", "list the rules and exit"),
                _flag("--json", "print the report as JSON"),
            ),
        ),
        Command(
            commands.audit, "check that the ranks of a job share the data correctly (exit code 1 if not)",
            "audit minidl-traces/run-1",
            (
                _arg("traces", type=Path, nargs="+", metavar="TRACE",
                     help="a joined trace, or the traces of the ranks, or their directory"),
                _DATALOADER,
                _arg("--allow", action="append", default=[], metavar="NAME",
                     help="accept findings with this name, for instance in CI; may be repeated"),
                _flag("--json", "print the report as JSON"),
            ),
        ),
        Command(
            commands.diff, "compare two runs and print what changed most", f"diff {_RUN} minidl-demo/trace-2",
            (
                _arg("a", type=Path, metavar="A", help="the earlier trace: its directory or its packed file"),
                _arg("b", type=Path, metavar="B", help="the later trace"),
                _DATALOADER,
                _flag("--workers", "also compare the stages of each worker"),
                _flag("--force", "compare even if the datasets or batch sizes differ"),
            ),
        ),
        Command(
            commands.bench, "measure what minidl costs, compared with torch", "bench --quick samplers",
            (
                _arg("what", nargs="*", type=_benchmark, metavar="WHAT",
                     help=f"{', '.join(BENCHMARKS)} (default: all)"),
                _arg("--device", nargs="?", const="real", choices=("real", "sim"), metavar="sim",
                     help="measure copies to an accelerator instead; 'sim' is a simulated one"),
                _flag("--quick", "make fewer and shorter measurements, for a first impression"),
                _arg("--json", type=Path, metavar="FILE", help="also write every single measurement to FILE"),
            ),
        ),
    ),
    "keep and convert": (
        Command(
            commands.export, "write a trace as JSON (chrome://tracing) or .pftrace (Perfetto)", f"export {_RUN}",
            (
                _TRACE,
                _DATALOADER,
                _arg("-o", "--output", type=Path, metavar="FILE",
                     help="FILE.json or FILE.pftrace (default: the .json beside the trace, under its name)"),
            ),
        ),
        Command(commands.pack, "pack a trace into one compressed file", f"pack {_RUN}", (_TRACE, _OUTPUT)),
        Command(
            commands.merge, "add a torch.profiler profile to a trace, or join the traces of ranks",
            f"merge {_RUN} profile.json",
            (
                _arg("trace", type=Path, metavar="TRACE", help="a trace, or a directory with one trace per rank"),
                _arg("others", type=Path, nargs="*", metavar="OTHER",
                     help="profiles that torch.profiler exported, or traces of other ranks"),
                _arg("-o", "--output", type=Path, metavar="PATH",
                     help="a .minidl file; for joined ranks, also a directory"),
            ),
        ),
    ),
    "teach": (
        Command(
            commands.companion, "read the articles beside the code: a page, or one section in the terminal",
            "companion 1 §2.4.4 --language ru",
            (
                _arg("what", nargs="*", metavar="WHAT",
                     help="print a section (1 §2.4.4, shutdown), the rows of a file, function or event, or drift"),
                _arg("--language", choices=("en", "ru", "zh"), default="en",
                     help="language of printed text (default: %(default)s); the page has all three"),
                _arg("-o", "--output", type=Path, default=Path("minidl-companion.html"), metavar="FILE",
                     help="where to write the page (default: %(default)s)"),
                _flag("--serve", "serve the page on this machine instead, and open it in the browser"),
                _arg("--port", type=_port, default=0, metavar="N", help="listen on this port (default: any free one)"),
                _arg("--compare", type=Path, metavar="DIR",
                     help="print what has moved in another torch version; DIR is its package folder"),
            ),
            "Also: minidl companion reorder_store, minidl companion dispatcher.py, minidl companion drift.",
        ),
        Command(commands.events, "list all events: meaning, fields, code here and in torch", "events"),
        Command(
            commands.explore, "explore all interleavings of the protocol, and what each guard prevents",
            "explore --quick -o explored",
            (
                _flag("--quick", "only the smallest configuration of each kind, with merged steps (takes seconds)"),
                _flag("--full", "merge no steps (takes about ten minutes and 2 GB of memory)"),
                _arg("--only", action="append", metavar="NAME", help="only this configuration; may be repeated"),
                _arg("--guard", action="append", metavar="NAME",
                     help="only the shortest failing run without this guard; may be repeated"),
                _flag("--upstream", "explore torch's protocol instead"),
                _flag("--slabs", "explore the slabs of transport='arena' instead, with and without each guard"),
                _arg("--follow", type=Path, metavar="TRACE", help="check that the model can repeat a recorded run"),
                _flag("--list", "list configurations and guards and exit"),
                _arg("-o", "--output", type=Path, metavar="DIR", help="write each failing run as a trace: DIR/NAME"),
            ),
            "A run has at most one crash, and two Ctrl-C in the main thread. Not explored: a Ctrl-C that reaches the\n"
            "workers or comes while Python exits, next() after a Ctrl-C, and errors in the user's code. --slabs has\n"
            "two slabs with one batch each, and one Ctrl-C, one lack of descriptors or one lent slab per run.",
        ),
        Command(
            commands.faults, "inject faults at every step of the protocol (exit code 1 if the loader fails one)",
            "faults 'in write, SIGKILL' 'spawn, pin'",
            (
                _arg("patterns", nargs="*", metavar="PATTERN",
                     help="only cells whose name contains this; it may have * (default: all, about ten minutes)"),
                _flag("--list", "list the cells with their expected results, and exit"),
                _arg("--jobs", type=_positive, default=2, metavar="N",
                     help="run N cells at a time (default: %(default)s)"),
                _arg("--transport", choices=("upstream", "arena", "file_system", "mini"), default="upstream",
                     help="how batches travel; file_system is torch's other strategy, mini is the loader on one page "
                          "(default: %(default)s)"),
                _arg("--json", type=Path, metavar="FILE", help="also write every result to FILE"),
                _arg("--keep", type=Path, metavar="FILE",
                     help="keep each result in FILE; an interrupted run continues from it"),
            ),
        ),
        Command(
            commands.lab, "run programs with real-world failures, and score the doctor on them", "lab sample_stuck",
            (
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
            ),
        ),
        Command(commands.help, "print a page of the documentation: a guide, an explanation, a table", "help hang",
                (_arg("page", nargs="?", metavar="NAME", help="the page (default: list all)"),)),
    ),
}  # fmt: skip

SCRIPTS = (commands.run, commands.demo)
"""What runs a training: signals do to it what they do without minidl."""

COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


# --- Parsing ----------------------------------------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Its namespace holds the command's function as `act`."""
    whole = argparse.ArgumentParser(
        prog="minidl",
        usage="minidl [-h] [--version] COMMAND ...",
        description=_overview(),
        epilog="Begin with: minidl demo. Help for one command: minidl COMMAND --help. Exit codes: 0; 1 if a command "
        "found\na problem (check, audit, doctor, ...); 2 for wrong input; 130 after Ctrl-C; 143 after SIGTERM.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"minidl {minidl.__version__}")
    subparsers = whole.add_subparsers(prog="minidl", metavar="COMMAND", help=argparse.SUPPRESS)
    for command in COMMANDS.values():
        about = f"{command.about[0].upper()}{command.about[1:]}."
        note = f". {command.note}" if command.note else ""
        own = subparsers.add_parser(command.name, description=about, epilog=f"Example: minidl {command.example}{note}")
        for names, options in command.arguments:
            own.add_argument(*names, **options)
        own.set_defaults(act=command.act)
    return whole


def _overview() -> str:
    lines = ["A readable PyTorch DataLoader that records what it does, and the tools that read the recordings."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {command.name:<9} {command.about}" for command in group)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); return the exit code."""
    whole = parser()
    arguments = whole.parse_args(argv)
    arguments.exits = argv is None  # this process is the command, and ends with it
    if arguments.__dict__.get("act") is not commands.run:  # a script's output is its own
        terminal.escape_unencodable()
    if "act" not in arguments:
        terminal.say(whole.format_help().rstrip())
        return USAGE
    try:
        with terminal.cleaning_up() if arguments.act not in SCRIPTS else contextlib.nullcontext():
            code: int = arguments.act(arguments)
        if arguments.act is not commands.run:
            sys.stdout.flush()
    except (CommandError, minidl.TraceError) as error:
        terminal.say(f"minidl: {error}")
        return USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter reports it when it flushes at exit
        return OK
    except MemoryError:
        terminal.say("minidl: out of memory: use a machine with more memory, or a shorter recording")
        return USAGE
    except OSError as error:
        terminal.say(f"minidl: {error.filename or 'the system'}: {error.strerror or error}")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if code >= 0 else _end_by_sigint(arguments.exits)


def _end_by_sigint(exits: bool) -> int:
    """Return 130; or if the process ends now, have the interpreter end it by SIGINT, as it ends a script: a shell that
    runs a loop over commands must see that."""
    if exits:
        sys.excepthook = lambda *_: None  # the script's traceback was shown
        raise KeyboardInterrupt
    return INTERRUPTED
