"""How much of the loader's core its tests hold fast: the code is changed in small ways, and a test should notice.

    pip install mutmut psutil
    python tests/support/mutants.py 'minidl.loader.driver.*' tests/loader/test_driver.py -m 'not live'
    python tests/support/mutants.py 'minidl.loader.driver.*' tests/loader/test_driver.py -m live    # what survives
    python tests/support/mutants.py          # each module's score, and survivors without a reason: then exit code 1

The first arguments choose mutants, and the rest are pytest's. `mutmut` makes the mutants, in the folder `mutants`; what
is changed stands in pyproject.toml. Its own runs start no processes and have no live tests, so this file tries them: a
child is forked for each mutant once the tests are collected, and runs those that reach the changed function. What has
survived without a reason, or was changed since, is tried by the next call. `data/mutants.json` has the reasons:
function -> the line as it was changed -> why no test can notice, or why none needs to. The wording of a message needs
no reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import functools
import itertools
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REASONS = Path(__file__).parent / "data" / "mutants.json"
KILLED, SURVIVED, UNTESTED, HUNG = 1, 0, 33, 36  # in mutmut's results
WORDING = re.compile('f?"[^"]* [^"]*",?')
"""A line that is a piece of a message, and nothing else."""

HARMLESS = {"property", "contextlib.contextmanager", "contextmanager", "functools.cache"}
"""Decorators of functions that are changed, too; mutmut leaves them out."""

CHOSEN = "MUTANTS_CHOSEN"
SURVEY = Path("survey.json")
MOST = float(os.environ.get("MUTANTS_MOST", "inf"))
"""Seconds that the tests of a mutant take together: the shortest ones are run."""

LONGEST = float(os.environ.get("MUTANTS_LONGEST", "inf"))
"""Seconds of the longest test that is run."""


# --- Making mutants ---------------------------------------------------------------------------------------------------
def generate() -> None:
    """Write the changed modules into `mutants`; the results for functions that are as they were stay."""
    import libcst
    from mutmut import __main__ as mutmut
    from mutmut.mutation import file_mutation

    skips = file_mutation.MutationVisitor._skip_node_and_children
    arrange = file_mutation.function_trampoline_arrangement

    def skip(visitor: Any, node: Any) -> bool:
        """mutmut leaves out all decorated functions."""
        if isinstance(node, libcst.FunctionDef) and HARMLESS.issuperset(map(_decorator, node.decorators)):
            node = node.with_changes(decorators=())
        return skips(visitor, node)

    def arranged(function: Any, mutants: Any, class_name: str | None) -> Any:
        """The choice among the mutants is decorated, the mutants are not."""
        before, nodes, *rest = arrange(function, mutants, class_name)
        if HARMLESS.issuperset(map(_decorator, function.decorators)):
            nodes = [nodes[0], *(node.with_changes(decorators=()) for node in nodes[1:])]
        return before, nodes, *rest

    file_mutation.MutationVisitor._skip_node_and_children = skip
    file_mutation.function_trampoline_arrangement = arranged
    Path("mutants").mkdir(exist_ok=True)
    mutmut.copy_src_dir()
    mutmut.copy_also_copy_files()
    mutmut.create_mutants(1)


def _decorator(decorator: Any) -> str:
    import libcst

    return libcst.Module([]).code_for_node(decorator.decorator)


# --- Trying them: what follows is a plugin of the pytest that runs in `mutants` ---------------------------------------
def pytest_collection() -> None:
    """Let hypothesis stop at the first example that fails, and warnings and frames be the same as without mutmut."""
    import hypothesis

    warnings.warn = functools.partial(_warn, warnings.warn)
    sys._getframe = functools.partial(_getframe, sys._getframe)

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")


def _warn(warn: Any, message: Any, category: Any = None, stacklevel: int = 1, source: Any = None) -> None:
    """Like `warnings.warn`, which would count mutmut's own frames, too: one for each changed function."""
    frame, level, left = sys._getframe(1), 1, int(stacklevel)
    while frame is not None and left:
        level += 1
        left -= not _is_mutmuts(frame)
        frame = frame.f_back
    warn(message, category, level, source)


def _getframe(getframe: Any, depth: int = 0) -> Any:
    """Like `sys._getframe`; a function of minidl sees no frame of mutmut's."""
    frame = getframe(1)
    if not frame.f_globals.get("__name__", "").startswith("minidl."):
        return getframe(1 + depth)
    seen = Frame(frame)
    for _ in range(depth):
        seen = seen.f_back
    return seen


def _is_mutmuts(frame: Any) -> bool:
    return bool(frame.f_code.co_filename.endswith("mutmut/mutation/trampoline.py"))


class Frame:
    """A frame whose callers are those that it has without mutmut."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)

    @property
    def f_back(self) -> Any:
        frame = self._frame.f_back
        while frame is not None and _is_mutmuts(frame):
            frame = frame.f_back
        return frame and Frame(frame)


def pytest_runtest_logreport(report: Any) -> None:
    """End a child with the first test that fails."""
    if report.failed and os.environ.get("MUTANT_UNDER_TEST") not in (None, "stats"):
        os._exit(KILLED)


def pytest_runtestloop(session: Any) -> bool:
    """Try the chosen mutants."""
    session.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    session.config.pluginmanager.unregister(name="terminalreporter")
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a mutant leaves running is found
    trial = Trial(session)
    trial.survey()
    for meta in sorted(Path("minidl").rglob("*.meta")):
        about = json.loads(meta.read_text())
        codes = about["exit_code_by_key"]
        path = str(meta).removesuffix(".meta")
        for name, code in codes.items():
            chosen = any(fnmatch.fnmatch(name, one) for one in trial.chosen)
            if chosen and (code is None or (code in (SURVIVED, UNTESTED) and not trial.is_accepted(name, path))):
                codes[name] = trial.code(name, path)
                meta.write_text(json.dumps(about, indent=4))
    return True


class Trial:
    """Runs the collected tests with mutants."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.chosen = os.environ[CHOSEN].split()
        self.reasons = json.loads(REASONS.read_text())
        self.durations: dict[int, float] = {}  # of tests that pass without a mutant
        self.reached: dict[str, list[int]] = {}  # function -> tests that call it, also in processes that they fork
        self.killers: dict[str, list[int]] = {}  # function -> tests that have killed its mutants, the last one first

    def survey(self) -> None:
        """Which tests reach which function, and how long each takes; kept in a file, which may be deleted."""
        from mutmut.mutation import trampoline

        log, seen = os.open("survey", os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND), set()

        def record(name: str, caller: str | None) -> None:
            if (os.getpid(), name) not in seen:
                seen.add((os.getpid(), name))
                os.write(log, f"{name}\n".encode())

        trampoline.record_trampoline_hit = record
        known = json.loads(SURVEY.read_text()) if SURVEY.exists() else {}
        for number, item in enumerate(self.session.items):
            if item.nodeid not in known:
                os.ftruncate(log, 0)
                begun = time.monotonic()
                passed = self._forked("stats", [number])[0] == SURVIVED
                took = time.monotonic() - begun if passed else math.inf
                known[item.nodeid] = took, sorted(set(os.pread(log, 1 << 20, 0).decode().split()))
            took, functions = known[item.nodeid]
            if took < math.inf and took <= LONGEST:
                self.durations[number] = took
                for name in functions:
                    self.reached.setdefault(name, []).append(number)
            else:
                print(f"left out: {item.nodeid}", flush=True)
        SURVEY.write_text(json.dumps(known))

    def is_accepted(self, name: str, path: str) -> bool:
        """Whether a mutant that has survived may do so."""
        return accepted(name, self.changed(name, path), self.reasons)

    def changed(self, name: str, path: str) -> str:
        """The lines as the mutant has them."""
        os.chdir("..")
        lines = changed(name, path)
        os.chdir("mutants")
        return lines

    def code(self, name: str, path: str) -> int:
        """What becomes of a mutant."""
        function = name.partition("__mutmut_")[0]
        if function not in self.reached:
            return UNTESTED
        killers = self.killers.setdefault(function, [])
        others = sorted(set(self.reached[function]) - set(killers), key=self.durations.__getitem__)
        spent = itertools.accumulate(map(self.durations.__getitem__, others))
        within = itertools.takewhile(lambda seconds: seconds <= MOST, spent)
        code, last = self._forked(name, [*killers, *others[: len(list(within))]])
        if code == SURVIVED:
            print(f"{name}: {self.changed(name, path)}", flush=True)
        else:
            self.killers[function] = [last, *(each for each in killers if each != last)]
        return code

    def _forked(self, name: str, tests: list[int]) -> tuple[int, int]:
        """Run tests with a mutant in a child; all is killed when one takes far too long. Also returns the last one."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            _run(self.session, name, tests, writer)
        os.close(writer)
        code, last, limit = SURVIVED, tests[0], 60.0
        while select.select([reader], [], [], limit)[0]:
            if not (number := os.read(reader, 4)):
                break
            last = int.from_bytes(number, "big")
            limit = 10 + 10 * self.durations.get(last, 5.0)
        else:
            code = HUNG
            _kill_children()
        os.close(reader)
        with contextlib.suppress(ChildProcessError):
            code = code or int(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0)
        _kill_children()
        for left in Path("/dev/shm").glob("*") if os.environ.get("MUTANTS_OWN_SHM") else ():
            left.unlink()
        return code, last


def _run(session: Any, name: str, tests: list[int], writer: int) -> None:
    os.setsid()
    os.environ["MUTANT_UNDER_TEST"] = name
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    items = [session.items[number] for number in tests]
    try:
        for number, item, following in zip(tests, items, [*items[1:], None], strict=True):
            os.write(writer, number.to_bytes(4, "big"))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        os._exit(session.testsfailed > 0)
    finally:
        os._exit(KILLED)


def _kill_children() -> None:
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


# --- Reading the results ----------------------------------------------------------------------------------------------
def results() -> Iterator[tuple[str, str, str]]:
    """Each mutant that was tried: its file, its name, and what became of it."""
    from mutmut.__main__ import status_by_exit_code

    for meta in sorted(Path("mutants", "minidl").rglob("*.meta")):
        path = str(meta.relative_to("mutants")).removesuffix(".meta")
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            if code is not None:
                yield path, name, status_by_exit_code[code]


def function_of(name: str) -> str:
    """`minidl.loader.driver.xǁDriverǁclose__mutmut_3` is one of `driver:Driver.close`."""
    module, _, function = name.partition("__mutmut_")[0].removeprefix("minidl.").rpartition(".")
    return f"{module}:{function.replace('xǁ', '').replace('ǁ', '.') if 'ǁ' in function else function[2:]}"


def changed(name: str, path: str) -> str:
    """The lines as the mutant has them."""
    from mutmut.__main__ import get_diff_for_mutant

    lines = get_diff_for_mutant(name, path=path).splitlines()
    return " ".join(line[1:].strip() for line in lines if line[:1] == "+" and line[:3] != "+++")


def accepted(name: str, lines: str, reasons: dict[str, dict[str, str]]) -> bool:
    """Whether a mutant with these lines may survive."""
    return lines in reasons.get(function_of(name), {}) or bool(WORDING.fullmatch(lines))


def report() -> int:
    """Print the score of each module, and each survivor that has no reason; whether there are any is the exit code."""
    reasons, scores, left = json.loads(REASONS.read_text()), {}, 0
    for path, name, status in results():
        score = scores.setdefault(path, {"killed": 0, "accepted": 0, "survived": 0})
        if status not in ("survived", "no tests"):
            score["killed"] += 1
        elif accepted(name, lines := changed(name, path), reasons):
            score["accepted"] += 1
        else:
            score["survived"] += 1
            print(f"{name}: {function_of(name)}: {lines}", flush=True)
    for path, score in scores.items():
        left += score["survived"]
        print(f"{path:<34} {', '.join(f'{number} {what}' for what, number in score.items())}")
    return min(left, 1)


def main(chosen: str, tests: Iterable[str]) -> int:
    """Try mutants with these tests; exit code of pytest."""
    generate()
    shutil.rmtree("mutants/.hypothesis", ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", "-p", "no:cacheprovider", "--tb=native", *tests]
    environment = os.environ | {CHOSEN: chosen, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(command, cwd="mutants", env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else report())
