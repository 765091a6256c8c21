"""All runs of the loader's protocol on a model: `minidl explore`.

Interface: `add_arguments(parser)` and `run(arguments)` are the command. `model` has the steps that are possible; the
live loader's own classes decide them (`driver`, `protocol`). `threads` has what differs if workers are threads.
`search` goes through all runs; `configurations` and `guards` are what is gone through; `trace` writes a run as a trace.
Rules of use: what is found here is found of a model. `tests/explore` ties it to the live loader: the model's runs obey
the checker, the model follows recorded runs, and `ablations` takes each guard out of the running code. A run has one
crash at most, and two Ctrl-C, before or after any effect of the main thread. Not here: a Ctrl-C that reaches the
workers or comes while Python exits, `next()` after a Ctrl-C, errors in the user's code, and time.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidl.explore.configurations import Configuration
    from minidl.explore.guards import Guard, Protocol
    from minidl.explore.model import Model
    from minidl.explore.search import Found, Run

OK, FOUND = 0, 1
ALL = "all"
"""In place of the name of a guard: each that torch's protocol lacks."""


def run(arguments: argparse.Namespace) -> int:
    """Explore what is asked for; 1 if the protocol has a hole, or if a guard is not needed.

    Raises TraceError if a trace can't be written; ValueError for an unknown name, or for guards added to minidl's own.
    """
    from minidl.explore import slab_life
    from minidl.explore.configurations import CONFIGURATIONS, OF_PROCESSES, QUICK
    from minidl.explore.guards import GUARDS, OF_THREADS, OURS, UPSTREAM

    if arguments.list:
        _list()
        return OK
    if arguments.follow is not None:
        return _follow(arguments.follow)
    if arguments.slabs:
        return slab_life.run()
    protocol = UPSTREAM if arguments.upstream else OURS
    known = {c.name: c for c in (OF_PROCESSES if arguments.upstream else CONFIGURATIONS)}  # torch has no threads
    all_guards = GUARDS if arguments.upstream else GUARDS | OF_THREADS
    chosen = [_named(name, known) for name in arguments.only or [c for c in known if not arguments.quick or c in QUICK]]
    guards = [_named(name, all_guards) for name in arguments.guard or ()]
    if added := _added(arguments.with_guard or [], upstream=arguments.upstream):
        protocol = protocol.having(*(guard.field for guard in added))
        if ALL not in arguments.with_guard and not arguments.only:
            chosen = list(dict.fromkeys(configuration for guard in added for configuration in guard.where))
    full = {c.name for c in chosen if arguments.full or (c.name in QUICK and not arguments.quick)}
    bad = 0 if guards else _explore(chosen, full, protocol, arguments.output)
    if not guards and not arguments.only and not added:
        guards = [guard for guard in all_guards.values() if not arguments.upstream or not guard.upstream]
    title = "torch has no such guard" if arguments.upstream else "without the guard"
    lost = _without(guards, arguments.quick, arguments.output, title)
    return FOUND if bad or lost else OK


def _added(names: list[str], *, upstream: bool) -> list[Guard]:
    """The guards that torch's protocol shall have, too; they are of those that it lacks."""
    from minidl.explore.guards import GUARDS

    if names and not upstream:
        raise ValueError("--with-guard adds a guard to torch's protocol: add --upstream")
    lacks = {guard.name: guard for guard in GUARDS.values() if not guard.upstream}
    for name in set(names) - {ALL, *lacks}:
        raise ValueError(f"{name!r} is none of {', '.join(map(repr, [*lacks, ALL]))}")
    return list(lacks.values()) if ALL in names else [lacks[name] for name in names]


def _named(name: str, table: dict[str, Configuration] | dict[str, Guard]) -> Any:
    if name not in table:
        raise ValueError(f"{name!r} is none of {', '.join(map(repr, table))}")
    return table[name]


def _list() -> None:
    from minidl.explore.configurations import CONFIGURATIONS
    from minidl.explore.guards import GUARDS, OF_THREADS

    for configuration in CONFIGURATIONS:
        print(f"{configuration.name:<26} {configuration.describe()}")
    for guard in (GUARDS | OF_THREADS).values():
        print(f"{guard.name:<34} {guard.purpose}; ours {guard.ours}; torch {guard.upstream or 'has none'}")


def _follow(path: Path) -> int:
    """Whether each recorded loader's run is a run of the model; 1 if one is not."""
    from minidl.explore.configurations import Crash
    from minidl.explore.follow import configuration_of, follow
    from minidl.tracefile.format import TraceError
    from minidl.tracefile.reader import read_trace

    trace, lost = read_trace(path), 0
    if "planned" in trace.manifest:
        raise TraceError(f"{path} is simulated by minidl plan: give a recorded run")
    for loader, facts in trace.loaders.items():
        if not facts.get("num_workers"):
            print(f"loader {loader}: has no workers, and so nothing to explore")
            continue
        crash = Crash.WORKER_DIES if facts.get("transport") == "thread" else Crash.WORKER_KILLED
        crashes = (crash,) if len(trace.select("found_dead")) else ()
        followed = follow(trace, loader, crashes)
        lost += not followed
        how = f"not followed; {followed.lost}" if followed.lost else "followed"
        about = configuration_of(trace, loader, crashes).describe()
        print(f"loader {loader} ({about}): {followed.events} events {how}")
    return FOUND if lost else OK


def _explore(chosen: list[Configuration], full: set[str], protocol: Protocol, output: Path | None) -> int:
    """Go through all runs of each configuration, those in `full` step by step; how many have a violation."""
    from minidl.explore.guards import OUR_THREADS
    from minidl.explore.search import explore, shortest
    from minidl.explore.threads import model_of

    print(f"{'configuration':<26} {'steps are':<9} {'states':>9} {'steps':>10} {'ends':>7} {'time':>7}  violations")
    bad, states, seconds = 0, 0, 0.0
    for configuration in chosen:
        held = OUR_THREADS if configuration.threads else protocol
        model = model_of(configuration, held, reduced=configuration.name not in full)
        found = explore(model, _progress(configuration.name))
        states, seconds = states + found.states, seconds + found.seconds
        print(_row(model, found), flush=True)
        if found.bad:
            bad += 1
            shown = shortest(model, progress=_progress(f"{configuration.name}, shortest run"))
            if shown is not None:
                _show(shown, model, output, configuration.name)
    total = f"{bad or 'no'} configuration(s) with a violation"
    print(f"{'together':<26} {'':<9} {states:>9,} {'':>10} {'':>7} {seconds:>6.1f}s  {total}")
    return bad


def _row(model: Model, found: Found) -> str:
    verdict = "; ".join(f"{bad.kind}: {bad.what}" for bad in found.bad) or "none"
    how = "merged" if model.reduced else "all there"
    counts = f"{how:<9} {found.states:>9,} {found.steps:>10,} {found.ends:>7,} {found.seconds:>6.1f}s"
    about = textwrap.fill(model.configuration.describe(), 110, initial_indent="    ", subsequent_indent="    ")
    return f"{model.configuration.name:<26} {counts}  {verdict}\n{about}"


def _without(guards: Iterable[Guard], reduced: bool, output: Path | None, title: str) -> int:
    """The shortest run that goes wrong without each guard; how many guards can be missed."""
    from minidl.explore.search import counterexample

    lost = 0
    for place, guard in enumerate(guards):
        if not place:
            print(f"\n{title:<34} {'steps':>5}  what goes wrong, in the shortest run")
        for configuration in guard.where:
            model, shown = counterexample(guard, configuration, reduced=reduced, progress=_progress(guard.name))
            if shown is None or shown.bad is None:
                lost += 1
                print(f"{guard.name:<34} {'-':>5}  nothing, in: {configuration.describe()}")
                continue
            print(f"{guard.name:<34} {len(shown):>5}  {shown.bad.kind}: {shown.bad.what}")
            print(f"    it {guard.purpose} ({guard.ours}); in: {configuration.describe()}", flush=True)
            several = f" {configuration.name}" if len(guard.where) > 1 else ""
            _show(shown, model, output, guard.name + several)
    return lost


def _show(shown: Run, model: Model, output: Path | None, name: str) -> None:
    """Write a run as a trace, or print its steps if none is asked for."""
    from minidl.explore.search import in_words
    from minidl.explore.trace import write

    if output is None:
        print(textwrap.fill("; ".join(in_words(shown)), 110, initial_indent="    ", subsequent_indent="    "))
        return
    path = write(output / re.sub(r"[^a-z0-9]+", "-", name), model, shown)
    print(f"    {path}")


def _progress(what: str) -> Callable[[int], None]:
    """A function that says on stderr how far a long search has come."""
    return lambda states: print(f"{what}: {states:,} states", file=sys.stderr)
