"""`minidl run`: an unmodified script behaves as under plain Python, with our loader in torch's place, recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.utils.data
import torch.utils.data.dataloader
from programs import ROOT, python, write
from sizes import slow
from workloads import kill_group
from workloads import run as run_python

from minidl import cli, run
from minidl.check import check
from minidl.dataloader import LoaderWithoutState
from minidl.tracefile.events import Phase
from minidl.tracefile.reader import read_trace

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}

TRAIN = """
    import os
    import sys
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

    class Squares(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return index * index

    class Shards(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            return iter(range(info.id, 8, info.num_workers))

    def doubled(samples):
        return 2 * torch.tensor(samples)

    if __name__ == "__main__":
        method = sys.argv[1]
        torch.manual_seed(3)
        loader = DataLoader(Squares(), batch_size=3, shuffle=True, num_workers=2, collate_fn=doubled,
                            multiprocessing_context=method, persistent_workers=True)
        for epoch in range(2):
            print(epoch, [batch.tolist() for batch in loader])
        shards = DataLoader(Shards(), batch_size=2, num_workers=2, multiprocessing_context=method)
        print([batch.tolist() for batch in shards])
        print(__name__, os.path.isabs(__file__), os.path.basename(__file__), sys.argv, torch.rand(1).item())
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints under plain Python with torch's own loader."""
    place = tmp_path_factory.mktemp("plain")
    write(place / "train.py", TRAIN)
    done = python("train.py", "fork", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.live
@pytest.mark.parametrize("method", ["fork", *slow("spawn", "forkserver")])
def test_a_script_does_what_it_does_under_plain_python(tmp_path: Path, plain: str, method: str) -> None:
    write(tmp_path / "train.py", TRAIN)
    ours = python("-m", "minidl", "run", "--trace", "trace", "train.py", method, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, plain.replace("'fork'", f"'{method}'"))
    assert "minidl summary trace" in ours.stderr
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("yield")) == 4 + 4 + 4
    assert check(trace) == []


@pytest.mark.live
@pytest.mark.parametrize("observe", [[], *slow(["--observe"])])
def test_a_run_may_choose_the_transport(tmp_path: Path, plain: str, observe: list[str]) -> None:
    write(tmp_path / "train.py", TRAIN)
    options = "run", "--transport", "arena", *observe, "--trace", "trace", "train.py", "fork"
    ours = python("-m", "minidl", *options, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, plain)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    put, written = ({int(row["tid"]) for row in trace.select(name)} for name in ("result_put", "result_write"))
    assert put == written, "a worker's own thread writes its results"


@pytest.mark.live
def test_a_run_may_choose_the_numbers_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of map datasets; also after the program has patched torch's internals, which leaves its loader to torch."""
    (tmp_path / "train.py").write_text("""
import torch
import torch.utils.data.dataloader as loaders
import time

class Waits(torch.utils.data.Dataset):
    __len__ = lambda self: 60
    def __getitem__(self, index):
        time.sleep(0.04)
        return index

class Stream(torch.utils.data.IterableDataset):
    __iter__ = lambda self: iter(range(4))

if __name__ == "__main__":
    waits, stream = loaders.DataLoader(Waits()), loaders.DataLoader(Stream(), num_workers=1)
    late = loaders.DataLoader(Waits(), num_workers=0)
    assert [int(batch) for batch in waits] == list(range(60))
    print("workers", type(waits.num_workers).__name__, waits.num_workers > 1, stream.num_workers, len(list(stream)))
    loaders._utils.worker._worker_loop = lambda *args: None
    print("late", type(late.num_workers).__name__, len(list(late)), late.num_workers, late.prefetch_factor)
""")
    done = python("-m", "minidl", "run", "--auto", "--trace", "trace", "train.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["workers ChosenWorkers True 1 4", "late ChosenWorkers 60 0 None"]
    assert 'num_workers="auto" (made at train.py:' in done.stderr
    (chosen,) = read_trace(tmp_path / "trace").select("workers_chosen")
    assert chosen["x"] > chosen["y"] == 1
    assert cli.main(["run", "--auto", "--observe", "train.py"]) == cli.USAGE
    assert "--observe keeps torch's: leave one of them out" in capsys.readouterr().err


@pytest.mark.live
def test_functions_are_recorded_when_asked_for(tmp_path: Path, plain: str) -> None:
    write(tmp_path / "train.py", TRAIN)
    options = ("--functions", "--functions-main", "--functions-min-us", "0", "--trace", "trace")
    ours = python("-m", "minidl", "run", *options, "train.py", "fork", cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, plain)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    assert sorted(one.about["loader"] for one in trace.attachments) == [0, 1, 1, 2, 2]
    own = {0: {"RandomSampler.__iter__"}, 1: {"Squares.__getitem__", "doubled"}, 2: {"Shards.__iter__"}}
    if sys.version_info < (3, 11):  # code knows no class
        own = {loader: {name.rpartition(".")[2] for name in names} for loader, names in own.items()}
    for one in trace.attachments:
        assert own[one.about["loader"]] <= {name.name for name in one.slices.names}
        assert {track.pid for track in one.slices.tracks} == {one.about["pid"]}
        assert one.problems == []


@pytest.mark.live
def test_a_module_and_its_relative_imports(tmp_path: Path) -> None:
    write(tmp_path / "job" / "__init__.py", "")
    write(tmp_path / "job" / "data.py", "numbers = list(range(6))\n")
    write(
        tmp_path / "job" / "__main__.py",
        """
        import sys
        from torch.utils.data import DataLoader
        from .data import numbers
        print(__name__, __package__, __spec__.name, sys.argv[1:], DataLoader.__module__)
        print([batch.tolist() for batch in DataLoader(numbers, batch_size=4)])
        """,
    )
    done = python("-m", "minidl", "run", "-m", "job", "--lr", "3", cwd=tmp_path)
    assert done.stdout == "__main__ job job.__main__ ['--lr', '3'] minidl.stand_in\n[[0, 1, 2, 3], [4, 5]]\n"
    assert done.returncode == 0
    assert len(read_trace(tmp_path / "minidl-traces" / "run-1").select("yield")) == 2


STUCK = """
    import os
    import signal
    import sys
    from torch.utils.data import DataLoader, Dataset

    class Stuck(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index == 17:
                os.write(1, b"stuck")
                signal.pause()
            return index

    def interrupt(*_):
        raise KeyboardInterrupt

    if __name__ == "__main__":
        signal.signal(signal.SIGALRM, interrupt)
        for number, _ in enumerate(DataLoader(Stuck(), batch_size=4, num_workers=2)):
            if number == 3 and sys.argv[1:]:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
"""
"""With an argument it is interrupted while it waits."""


@pytest.mark.live
def test_a_run_that_is_interrupted_says_what_it_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "train.py", STUCK)
    done = python("-m", "minidl", "run", "--trace", "trace", "train.py", "interrupted", cwd=tmp_path)
    *_, sentence, where = done.stderr.splitlines()
    assert done.returncode == -signal.SIGINT
    assert sentence.startswith("minidl: ")
    assert "waiting for worker 0" in sentence
    assert "in sample 17 (task 4)" in sentence
    assert where == "minidl: recorded in trace; next: minidl doctor trace"


@pytest.mark.live
def test_a_script_that_hangs_and_is_killed_leaves_its_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minidl", "run", "--trace", "trace", str(write(tmp_path / "hangs.py", STUCK))]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, start_new_session=True
    ) as running:
        assert running.stdout.read(5) == b"stuck"
        kill_group(running)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    begun, ended = (trace.select("sample", phase)["y"].tolist() for phase in (Phase.BEGIN, Phase.END))
    assert 17 in begun
    assert 17 not in ended


LEAVES: dict[str, tuple[str, dict[str, bool], dict[str, int]]] = {
    "its arguments and paths": ("import sys; sys.argv.append(1); sys.path.append('/nowhere')", {}, {}),
    "persistent workers": ("""
        from torch.utils.data import DataLoader
        loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True)
        assert len(list(loader)) == 4
        def keeps_the_globals_alive(): ...
    """, {}, {"worker_exit": 2}),
    "torch's persistent workers": ("""
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):  # its methods hold the globals in a cycle
            def __len__(self): return 8
            def __getitem__(self, index): return index
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        next(iterator)
    """, {"observe": True}, {"worker_gone": 2, "terminate": 0}),
    "a thread": ("""
        import threading
        from torch.utils.data import DataLoader
        go_on = threading.Event()
        def train():
            go_on.wait(30)
            assert len(list(DataLoader(range(8), batch_size=2))) == 4
        threading.Thread(target=train).start()
        threading.Timer(0.05, go_on.set).start()
    """, {}, {"yield": 4}),
}  # fmt: skip
"""What a script leaves behind -> the script, how it is run, and how many events of a kind its trace holds."""


@pytest.mark.live
@pytest.mark.parametrize("what", LEAVES)
def test_what_a_script_leaves_is_ended_recorded_and_put_back(tmp_path: Path, what: str) -> None:
    program, options, counts = LEAVES[what]
    script = write(tmp_path / "leaves.py", program)
    before = sys.argv, sys.path[:], sys.modules["__main__"], torch.utils.data.DataLoader
    assert run.run_script([str(script), "a"], module=False, trace=tmp_path / "trace", **options) == 0
    assert before == (sys.argv, sys.path[:], sys.modules["__main__"], torch.utils.data.DataLoader)
    trace = read_trace(tmp_path / "trace")
    assert {name: len(trace.select(name)) for name in counts} == counts
    assert set(trace.select("worker_gone")["y"].tolist()) <= {0}
    assert check(trace) == []


def test_both_names_of_torchs_loader_are_replaced_and_put_back() -> None:
    from torch.distributed.checkpoint.stateful import Stateful  # takes seconds

    torchs = torch.utils.data.DataLoader
    with run.replaced():
        ours = torch.utils.data.DataLoader
        assert issubclass(ours, LoaderWithoutState)
        assert torch.utils.data.dataloader.DataLoader is ours
        assert not isinstance(ours([1]), Stateful), "frameworks would save and load states that torch's loader has not"
    assert torch.utils.data.DataLoader is torchs
    assert torch.utils.data.dataloader.DataLoader is torchs


@pytest.mark.live
def test_a_script_trains_on_the_simulated_accelerator_if_the_environment_asks_for_it(
    tmp_path: Path, simulate: None
) -> None:
    """Although its first backward pass is on the CPU: autograd would not know an accelerator that came after it."""
    program = """
        import torch
        torch.ones(1, requires_grad=True).sum().backward()
        device = torch.accelerator.current_accelerator()
        weight = torch.ones(2, device=device, requires_grad=True)
        (weight * 2).sum().backward()
        print(device, weight.grad.tolist())
    """
    starts = "import sys; from minidl import cli; sys.exit(cli.main(['run', '--trace', *sys.argv[1:]]))"
    done = run_python(starts, tmp_path / "trace", write(tmp_path / "trains.py", program), MINIDL_SIMULATE_DEVICE="1")
    assert done.stdout == "sim [2.0, 2.0]\n", done.stderr


@pytest.mark.parametrize(("name", "module", "environment", "message"), [
    ("no/such.py", False, {}, "cannot read the script no/such.py: No such file or directory"),
    ("empty", False, {}, "empty holds no __main__.py to run"),
    *((name, True, {}, name) for name in ("no_such_module", "no_such.module", "json", "sys")),
    ("train.py", False, {"MINIDL_TRANSPORT": "shm"},
     "transport='shm' (from MINIDL_TRANSPORT): give one of 'upstream', 'arena'"),
    ("train.py", False, {"MINIDL_ARENA_BYTES": "much"}, "MINIDL_ARENA_BYTES='much': give the bytes of slabs"),
])  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: bool, environment: dict[str, str], message: str
) -> None:
    write(tmp_path / "train.py", "open('begun', 'w')")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(run.RunError, match=re.escape(message)):
        run.run_script([name], module=module, trace=tmp_path / "trace")
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "empty"}


def test_a_second_run_takes_the_next_directory(tmp_path: Path) -> None:
    assert [run.free_directory(tmp_path, "trace").name for _ in range(3)] == ["trace-1", "trace-2", "trace-3"]


# --- The same script under Python and under `minidl run` --------------------------------------------------------------
ALIKE = {
    "its module": """
        '''Words.'''
        import sys
        import __main__
        names = {name: value for name, value in globals().items() if name not in ("sys", "__main__", "names")}
        print({name: value for name, value in sorted(names.items()) if name not in ("__loader__", "__builtins__")})
        print(type(__loader__).__name__, __loader__.name, __loader__.path, type(__builtins__).__name__)
        print(vars(__main__) is globals(), sys.argv, sys.path[0], sys.flags, sys.stdout.errors, sys.stderr.errors)
    """,
    "its source": """
        import inspect, pickle, warnings
        class Point:
            '''A class of the script.'''
        def f():
            return 1
        print(inspect.getsource(f), pickle.dumps(Point()), type(pickle.loads(pickle.dumps(Point()))) is Point)
        warnings.warn("here")
        print(sorted(inspect.signature(f).parameters), f.__module__, Point.__module__)
    """,
    "a spawned process": """
        import multiprocessing, sys
        class Point:
            def __repr__(self):
                return "a point of " + type(self).__module__
        def tell(point):
            print(point, __name__)
            sys.exit(3)
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=tell, args=(Point(),))
            child.start()
            child.join()
            print(child.exitcode)
    """,
    "threads and exit handlers": """
        import atexit, threading, time
        atexit.register(print, "handler 1")
        atexit.register(print, "handler 2")
        after = threading.Event()
        def late():
            after.wait()
            print("thread")
        threading.Thread(target=late).start()
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        threading.Thread(target=lambda: 1 / 0).start()
        threading.main_thread().name = "still here"
        after.set()
    """,
    "an error": "def inner():\n    raise ValueError('lost')\n\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    inner()",
    "a group of errors": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "its own BaseException": "class Own(BaseException):\n    pass\ndef f():\n    raise Own('stop')\nf()",
    "GeneratorExit": "raise GeneratorExit('end')",
    "KeyboardInterrupt": "def f():\n    raise KeyboardInterrupt\nf()",
    "SIGINT": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('not reached')",
    "SIGTERM": "import os, signal\nprint('lost', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)",
    "no Python": "print('not reached')\ndef f(:\n    pass",
    "no Python in a module": "import wrong",
    "no text": "x = '\\x00'",
    "its own hook": "import sys\nsys.excepthook = lambda kind, *_: print('mine', kind.__name__)\n1 / 0",
    "a hook that fails": "import sys\ndef hook(*_):\n    raise KeyError('hook')\nsys.excepthook = hook\n1 / 0",
    "stdout closed": "import sys\nprint('said')\nsys.stdout.close()",
    "stdout gone": "import sys\nsys.stdout = None\nprint('nothing')",
    "descriptor closed": "import os\nprint('lost')\nos.close(1)",
    "stderr closed": "import sys\nsys.stderr.close()\nprint('said')",
    "stderr gone": "import sys\nsys.stderr = None\nsys.exit('nothing')",
    "stdout replaced": "import io, sys\nsys.stdout = io.StringIO()\nprint('kept')",
    **{
        f"exit {code}": f"import sys\nprint('said')\nsys.exit({code})"
        for code in ("", "None", "0", "3", "259", "-1", "True", "'why'", "''", "(1, 2)", "1.5", "1 << 100", "-1 << 100")
    },
}  # fmt: skip
"""Scripts by what they are about. What they print, say and end with is the same."""

if sys.version_info < (3, 11):
    del ALIKE["a group of errors"]


OF_THE_INTERPRETER = ("Exception ignored on threading shutdown:", "OverflowError: Python int too large to convert")
"""From 3.12 on Python does not clear the error of an exit code that fits no C long, and some later step prints it."""


def alike(text: str) -> str:
    """What a program has said, without our own lines, without the interpreter's slip and without addresses."""
    lines = [line for line in text.splitlines() if not line.startswith(("minidl: ", *OF_THE_INTERPRETER))]
    return re.sub(r"0x[0-9a-f]+", "0x", "\n".join(lines))


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(ROOT / "tests" / "support" / "run_forks.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as forks:
        yield forks


def both(forks: subprocess.Popen[str], place: Path, *script: str) -> list[tuple[int, str, str]]:
    """How a script ends under Python and under `minidl run`, and what it prints and says."""
    with (place / "out").open("w") as out, (place / "err").open("w") as err:
        command = [sys.executable, *script]
        done = subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=ENVIRONMENT)
    forks.stdin.write(json.dumps([list(script), str(place), str(place / "out2"), str(place / "err2")]) + "\n")
    forks.stdin.flush()
    ends = ("", done.returncode), ("2", int(forks.stdout.readline()))
    return [(code, *(alike((place / f"{name}{which}").read_text()) for name in ("out", "err"))) for which, code in ends]


USUAL = {
    "its own BaseException", "KeyboardInterrupt", "SIGINT", "SIGTERM", "no Python", "a hook that fails",
    "stdout closed", "descriptor closed", "stdout replaced", "exit ", "exit 3", "exit 'why'", "an error",
    "threads and exit handlers", "a spawned process",
}  # fmt: skip


@pytest.mark.live
@pytest.mark.parametrize(
    "about", [pytest.param(about, marks=() if about in USUAL else pytest.mark.slow) for about in ALIKE]
)
def test_a_script_ends_as_under_python(tmp_path: Path, forks: subprocess.Popen[str], about: str) -> None:
    write(tmp_path / "program.py", ALIKE[about])
    write(tmp_path / "wrong.py", "def f(:\n")
    python, ours = both(forks, tmp_path, "program.py", "a", "-b")
    assert ours == python


@pytest.mark.live
@pytest.mark.parametrize("kind", ["a zip file", "a package", *slow("a directory", "a link", "a module")])
def test_a_program_of_another_kind_is_run_as_by_python(tmp_path: Path, forks: subprocess.Popen[str], kind: str) -> None:
    text = "import sys\nprint(__name__, __package__, __file__, __spec__, sys.argv, sys.path[0])\nsys.exit(4)"
    write(tmp_path / "job" / "__main__.py", text)
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as zipped:
        zipped.write(tmp_path / "job" / "__main__.py", "__main__.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "job" / "__main__.py")
    write(tmp_path / "single.py", text)
    script = {"a directory": ["job"], "a zip file": ["job.zip"], "a link": ["link.py"], "a module": ["-m", "single"]}
    python, ours = both(forks, tmp_path, *script.get(kind, ["-m", "job"]), "a")
    assert ours == python
    assert ours[0] == 4
