"""The command line: `main(argv)` runs one of the `commands`, and returns its exit code.

Exit codes: 0 success; 1 a command found a problem (a broken rule, a mistake, a hole in the protocol); 2 wrong
arguments or unreadable input (one line on stderr: object, problem, remedy); 130 Ctrl-C; 143 SIGTERM. `run` ends like
the script: with its exit code, or by SIGINT. Results go to stdout, everything else to stderr.

Rule of use: this module imports neither torch nor NumPy, so that help and argument errors are fast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import minidl
from minidl import commands, terminal
from minidl.commands import COMMANDS, FOUND, GROUPS, OK, CommandError

USAGE, INTERRUPTED = 2, 130

__all__ = ["COMMANDS", "FOUND", "GROUPS", "INTERRUPTED", "OK", "USAGE", "CommandError", "main", "parser"]


SCRIPTS = (commands.run, commands.demo)
"""What runs a training: signals do to it what they do without minidl."""


# --- Parsing ----------------------------------------------------------------------------------------------------------
class _Command(argparse.ArgumentParser):
    """A command's parser: what is no option may stand before, between or after the options, unless a script is last."""

    within = False
    """Whether it parses: before Python 3.12, the standard library's intermixed parsing comes here again."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.within or any(action.nargs == argparse.REMAINDER for action in self._get_positional_actions()):
            return super().parse_known_args(args, namespace)
        self.within = True
        found = self.parse_known_intermixed_args(args, namespace)
        self.within = False
        return found


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
    subparsers = whole.add_subparsers(prog="minidl", metavar="COMMAND", help=argparse.SUPPRESS, parser_class=_Command)
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
