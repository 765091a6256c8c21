"""Try on the real program the settings that a plan recommends: what was predicted, and what is measured.

Interface: `tune(command, ...)` yields what it does, and at last a `Tuned`. `python -m minidl.tune` is the process of a
run: the script as it is, under `minidl run`, up to a number of batches of one loader, which has the run's setting.

Rules of use: each run begins the program anew, so whatever it writes, it writes again. The first run notes what Python
code opens for writing, removes, saves or connects to; unless the caller allows it, nothing is tried after that. What a
library opens in C is not seen. A run ends by SystemExit in the loop's `next`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from minidl.prediction import SpeedPlan, plan, read
from minidl.speed.plan.predicted import Predicted
from minidl.speed.plan.recorded import FEWEST
from minidl.speed.plan.settings import LoaderSetting
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import read_trace
from minidl.tracefile.words import and_joined, table

MOST_WRITES: Final = 3
"""So many of the things that were written are named."""

SLOWER: Final = 20
"""A try that takes this many times as long as the recorded run, and a minute, is ended."""


NOISE: Final = 0.1
"""Two runs of one setting may differ by as much."""


class TuneError(Exception):
    """The program cannot be tried. The message says why."""


@dataclass(frozen=True)
class Trial:
    """One run. batches: of one loader, after which it ends; made_at, setting: of the loader to change, None = none.

    notes: the file that takes what the program writes, "" = it is not noted.
    """

    trace: str
    batches: int
    module: bool = False
    made_at: str = ""
    setting: LoaderSetting | None = None
    notes: str = ""


@dataclass(frozen=True)
class Tried:
    """What one setting gave. by_s: batches/s, 0 = none was measured, and `problem` says why."""

    predicted: Predicted
    by_s: float
    problem: str = ""


@dataclass(frozen=True)
class Tuned:
    """The plan of the first run, and what was tried. writes: what the program wrote in its first run."""

    plan: SpeedPlan
    tried: list[Tried] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """The fastest setting that was measured, or why nothing was tried."""
        now, base = self.plan.recorded.rate, self.plan.recorded.base.name
        measured = [one for one in self.tried if one.by_s]
        if not self.tried and self.writes:
            writes = and_joined(self.writes, MOST_WRITES)
            return f"nothing was tried, because the program writes: {writes}. --yes tries it all the same"
        best = max(measured, key=lambda one: one.by_s, default=None)
        if best is None or best.by_s <= (1 + NOISE) * now:
            return f"keep {base}: {now:.3g} batches/s; nothing that was tried is faster by {NOISE:.0%}"
        told = f"{best.predicted.setting.name}: {best.by_s:.3g} batches/s measured, {best.by_s / now:.3g} times today's"
        return f"{told} ({base}: {now:.3g})"

    def text(self) -> str:
        """The sentence, and a line for each setting: predicted beside measured."""
        rows = [("setting", "predicted", "measured", "off")]
        rows += [(self.plan.recorded.base.name, "", f"{self.plan.recorded.rate:.3g}", "")]
        for one in self.tried:
            said = f"{one.predicted.by_s:.3g} ({one.predicted.low:.3g} to {one.predicted.high:.3g})"
            off = f"{one.by_s / one.predicted.by_s - 1:+.0%}" if one.by_s else one.problem
            rows.append((one.predicted.setting.name, said, f"{one.by_s:.3g}" if one.by_s else "-", off))
        return "\n".join([self.sentence, *(["", *table(rows)] if self.tried else [self.plan.sentence])])

    def facts(self) -> dict[str, Any]:
        """The figures, for JSON."""
        tried = [
            {**one.predicted.facts(), "measured_batches_per_s": one.by_s or None, "problem": one.problem or None}
            for one in self.tried
        ]
        return {"sentence": self.sentence, "batches_per_s": self.plan.recorded.rate,
                "num_workers": self.plan.recorded.base.num_workers, "tried": tried, "writes": self.writes}  # fmt: skip


# --- The runs ---------------------------------------------------------------------------------------------------------
def tune(
    command: Sequence[str], *, module: bool = False, batches: int = 100, settings: int = 3, again: bool = False
) -> Iterator[str | Tuned]:
    """Record the program, plan, and try the best `settings`; yield what is done, in words, and at last the result.

    batches: of the loader that yields most, in each run; at least 20. again: the program may write again what it wrote.
    Raises TuneError if the program fails or records nothing; PlanError if that is not enough to predict.
    """
    if batches < FEWEST:
        raise TuneError(f"{batches} batches: at least {FEWEST} are needed to predict anything")
    with tempfile.TemporaryDirectory(prefix="minidl-tune-") as place:
        notes = Path(place) / "writes"
        yield f"recording up to {batches} batches of {' '.join(command)}"
        began = time.monotonic()
        first = Trial(str(Path(place) / "first"), batches, module, notes=str(notes))
        _run(first, command, None)
        limit = 60 + SLOWER * (time.monotonic() - began)
        found = plan(_recorded(first))
        writes = list(dict.fromkeys(notes.read_text().splitlines())) if notes.exists() else []
        tried: list[Tried] = []
        for number, predicted in enumerate(_best(found, settings) if again or not writes else []):
            yield f"trying {predicted.setting.name}: {predicted.by_s:.3g} batches/s predicted"
            trial = Trial(str(Path(place) / f"try-{number}"), batches, module, _made_at(found), predicted.setting)
            try:
                _run(trial, command, limit)
                tried.append(Tried(predicted, read(read_trace(_recorded(trial))).rate))
            except (TuneError, TraceError) as error:
                tried.append(Tried(predicted, 0.0, str(error)))
        yield Tuned(found, tried, writes)


def _best(found: SpeedPlan, count: int) -> list[Predicted]:
    """The recommended setting, then those with the shortest epochs; not the recorded one."""
    ranked = sorted(found.predicted, key=lambda one: (one is not found.recommended, one.epoch))
    return [one for one in ranked if one.setting != found.recorded.base][:count]


def _made_at(found: SpeedPlan) -> str:
    return str(found.recorded.params.get("made_at", ""))


def _recorded(trial: Trial) -> Path:
    """Where the run recorded. Raises TuneError if it did not, or as several ranks."""
    place = Path(trial.trace)
    if not (place / "manifest.json").exists():
        raise TuneError("the program has recorded nothing" if not place.exists() else
                        "the program has several ranks: record it with minidl run, and use minidl plan")  # fmt: skip
    return place


def _run(trial: Trial, command: Sequence[str], limit: float | None) -> None:
    """Run the program in a process group of its own. Raises TuneError if it fails, or takes longer than `limit` s."""
    facts = json.dumps(asdict(trial))
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would wait for all that inherit it
        child = subprocess.Popen(
            [sys.executable, "-m", "minidl.tune", facts, *command], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            raise TuneError(f"ended after {limit:.0f} s, {SLOWER} times what the recorded run took") from None
        finally:
            _end(child)
        output.seek(0)
        said = output.read()
    if child.returncode:
        last = next((line for line in reversed(said.splitlines()) if line.strip() and line[:8] != "minidl: "), "")
        raise TuneError(f"the program ended with exit code {child.returncode}: {last}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and its group. SIGINT comes first, so that it ends its workers, which remove their segments."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if child.poll() is None or number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)


# --- In the process of a run ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def tried(trial: Trial) -> Iterator[None]:
    """While this is open, loaders that `minidl run` puts in torch's place have the setting, and end the program."""
    from minidl.stand_in import StandIn

    made, iterate = StandIn._make_minidls, StandIn._make_iterator
    counts: Counter[str] = Counter()

    def make(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:  # self: see `users_line`
        refused: str = made(self, args, kwargs)
        if trial.setting is None or not self.__dict__.get("_made_at", "").endswith(trial.made_at or "?"):
            return refused
        given = inspect.signature(StandIn.__init__).bind(self, *args, **kwargs).arguments
        del given["self"]
        self.__dict__.pop("_DataLoader__initialized", None)
        changed: str = made(self, (), given | _options(trial.setting, given))
        return changed

    def iterator(self: Any) -> Any:
        made_one = iterate(self)
        made_one.__class__ = _counting(type(made_one), counts, str(self._made_at), trial.batches)
        return made_one

    StandIn._make_minidls, StandIn._make_iterator = make, iterator
    try:
        yield
    finally:
        StandIn._make_minidls, StandIn._make_iterator = made, iterate


def _options(setting: LoaderSetting, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loader with this setting; without workers, those that need workers go."""
    options: dict[str, Any] = {"num_workers": setting.num_workers, "pin_memory": setting.pin_memory}
    if not setting.num_workers:
        away = {"prefetch_factor": None, "timeout": 0, "persistent_workers": False, "multiprocessing_context": None}
        return options | {name: value for name, value in away.items() if name in given}
    return options | {"prefetch_factor": setting.prefetch_factor, "transport": setting.transport,
                      "in_order": setting.in_order, "persistent_workers": setting.persistent_workers}  # fmt: skip


def _counting(kind: type[Any], counts: Counter[str], made_at: str, most: int) -> type[Any]:
    """The iterator's type, whose `next` ends the program once loaders made there have yielded so many batches."""

    def next_or_end(self: Any) -> Any:
        if counts[made_at] > most:  # one more, since the step with the last one does not end
            sys.exit(0)
        batch = kind.__next__(self)
        counts[made_at] += 1
        return batch

    return type(kind.__name__, (kind,), {"__next__": next_or_end, "__module__": kind.__module__})


_CHANGES: Final = {
    *("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "sqlite3.connect"),
    *("shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree", "shutil.make_archive"),
}
"""Audit events of which the first argument is a path that changes, or is copied."""

_WRITES: Final = os.O_WRONLY | os.O_RDWR

_PROGRAMS: Final = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}
"""Audit events of another program, whose files are not seen."""


def note_writes(notes: str, trace: str) -> None:
    """From here on, note what Python code writes: in this process, and in those that it forks."""
    import torch

    target = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    apart = (trace, "/dev/", "/proc/", "/sys/", str(Path(tempfile.gettempdir()) / "pymp-"))
    passing: set[str] = set()  # what `tempfile` has named in this process

    def note(what: object) -> None:
        name = os.path.abspath(os.fsdecode(what)) if isinstance(what, (str, bytes, os.PathLike)) else ""
        if name and name not in passing and not name.startswith(apart) and "__pycache__" not in name:
            os.write(target, (os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name).encode(
                "utf-8", "backslashreplace") + b"\n")  # fmt: skip

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("tempfile.mkstemp", "tempfile.mkdtemp"):
            passing.add(os.path.abspath(os.fsdecode(args[0])))
        elif event in _PROGRAMS:
            os.write(target, b"what a program writes that it starts\n")
        elif event == "os.mkdir" and os.path.isdir(args[0]):
            pass  # `exist_ok` asks for a folder that is there: it changes nothing
        elif event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES):
            note(args[0])
        elif event == "socket.connect" and isinstance(args[1], tuple):
            os.write(target, f"a connection to {args[1][0]}\n".encode("utf-8", "backslashreplace"))

    save = torch.save

    @functools.wraps(save)
    def saved(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
        note(f)  # torch opens the file in C++
        return save(obj, f, *args, **kwargs)

    torch.save = saved
    sys.addaudithook(hook)


def main(argv: Sequence[str]) -> int:
    """Run one trial in this process: its facts as JSON, then the program's command; return the exit code."""
    from minidl import run

    facts = json.loads(argv[0])
    setting = facts.pop("setting")
    trial = Trial(**facts, setting=LoaderSetting(**setting) if setting else None)
    if trial.notes:
        note_writes(trial.notes, trial.trace)
    try:
        with tried(trial):
            return run.run_script(
                argv[1:], module=trial.module, trace=Path(trial.trace), cpu_time=True, ring_bytes=None
            )
    except run.RunError as error:
        print(error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
