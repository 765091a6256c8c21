"""torch.profiler's trace under the loader's lanes: on the same clock, of the same run, and nothing of it believed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import torch
from made_trace import START
from torch.profiler import ProfilerActivity, profile, record_function

import minidl
from minidl import cli
from minidl.merge import merge
from minidl.tracefile import events as ev
from minidl.tracefile import profile as profiles
from minidl.tracefile.attachments import Name, Slices, SliceTrack
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.chrome import to_chrome

Json = dict[str, Any]
LOADER = 1000  # the loader's pid in a made trace
BASE = 1_790_857_026_000_000_000
WALL = BASE + 12_400_073_383_001_003  # CLOCK_REALTIME where the made trace's CLOCK_MONOTONIC is 0
HOST = "here"


# --- A real training ------------------------------------------------------------------------------------------------
class Rows:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of a training, and the profile of the process that it is of."""
    place = tmp_path_factory.mktemp("trained")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with minidl.trace(place / "trace"):
        loader = minidl.DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:  # else torch 2.11 warns
            for batch in loader:
                with record_function("train_step"):
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
    profiler.export_chrome_trace(str(place / "profile.json"))
    return read_trace(merge([place / "trace", place / "profile.json"], place / "merged"))


def found(slices: Slices, name: str) -> list[tuple[int, int]]:
    """Begin and end of each slice of that name, in time order."""
    rows = slices.rows[[slices.names[n].name == name for n in slices.rows["name"]]]
    return sorted(zip(rows["begin"].tolist(), rows["end"].tolist(), strict=True))


def consumers(trace: Trace) -> list[tuple[int, int]]:
    """The training steps: the consumer's spans after a yield."""
    spans = trace.spans()
    mine = spans[(spans["code"] == ev.CONSUMER[0]) & (spans["bx"] > 0)]
    return sorted(zip(mine["begin"].tolist(), mine["end"].tolist(), strict=True))


@pytest.mark.live
def test_each_training_step_lies_within_the_consumers_time(trained: Trace) -> None:
    """Six steps, each in its own consumer span: the clocks agree to less than a step."""
    (one,) = trained.attachments
    assert (one.kind, one.problems, trained.problems) == ("profiler", [], [])
    steps, spans = found(one.slices, "train_step"), consumers(trained)
    assert len(steps) == len(spans) == 6
    assert all(a <= begin and end <= b for (begin, end), (a, b) in zip(steps, spans, strict=True))
    operators = found(one.slices, "aten::linear")
    assert len(operators) == 6
    assert all(a <= begin and end <= b for (begin, end), (a, b) in zip(operators, steps, strict=True))


@pytest.mark.live
def test_the_profiled_operators_stand_in_the_loaders_process(trained: Trace) -> None:
    events = to_chrome(trained)["traceEvents"]
    (loader,) = [p.pid for p in trained.processes if p.role == "loader"]
    operators = [e for e in events if e.get("cat") == "profiler" and e["ph"] == "X"]
    assert {e["pid"] for e in operators} == {loader}
    assert len([e for e in operators if e["name"] == "aten::linear"]) == 6
    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert all(titles[e["tid"]].startswith("operators: thread ") for e in operators)


# --- Made profiles ----------------------------------------------------------------------------------------------------
class Raw(float):
    """A number that is written into JSON digit by digit."""

    def __new__(cls, text: str) -> Raw:
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str

    def __repr__(self) -> str:
        return self.text


def us(ns: int) -> Raw:
    """Microseconds with three decimals."""
    return Raw(f"{ns // 1000}.{ns % 1000:03d}")


def slice_of(
    name: str, begin: int, ns: int, cat: str = "cpu_op", pid: Any = LOADER, tid: Any = LOADER, **args: Any
) -> Json:
    """begin: ns after the made trace's first event. A profile counts from BASE."""
    times = {"ts": us(START + begin + WALL - BASE), "dur": us(ns)}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def document(*events: Json, **changes: Any) -> Json:
    head = {"schemaVersion": 1, "trace_id": "ABC", "host_name": HOST, "baseTimeNanoseconds": BASE}
    named = {"ph": "M", "name": "thread_name", "pid": LOADER, "tid": LOADER, "args": {"name": "thread 1000 (python)"}}
    return {**head, "traceEvents": [named, *events]} | changes


def text(made: Any) -> str:
    """As JSON, with the digits of Raw numbers as they are."""
    numbers: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Raw):
            numbers.append(value.text)
            return f"\0{len(numbers) - 1}\0"
        if isinstance(value, dict):
            return {k: mark(v) for k, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    out = json.dumps(mark(made))
    for n, digits in enumerate(numbers):
        out = out.replace(f'"\\u0000{n}\\u0000"', digits)
    return out


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A made trace that knows how its clock is related to the wall clock; of six notes, two are far off."""
    path = made_trace.write(tmp_path / "trace", made_trace.Run(**made_trace.HEALTHY))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest |= {"monotonic_ns": START, "realtime_ns": START + WALL, "host": HOST}
    (path / "manifest.json").write_text(json.dumps(manifest))
    side = next(path.glob(f"{LOADER}-*.meta.jsonl"))
    starts = {"kind": "process", "pid": LOADER}
    notes = [
        starts | {"start_monotonic_ns": START + n, "start_realtime_ns": START + n + WALL + late}
        for n, late in enumerate((-900, -7, 3, 10**6))
    ]
    end = {"kind": "trace_end", "monotonic_ns": START + 10**6, "realtime_ns": START + 10**6 + WALL}
    with side.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*notes, end])
    return path


def put(folder: Path, made: Any, name: str = "profile.json") -> Path:
    path = folder / name
    data = made if isinstance(made, bytes) else text(made).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["profile.json", "profile.json.gz"])
def test_times_are_exact_to_the_nanosecond(trace: Path, tmp_path: Path, name: str) -> None:
    """Microseconds since 1970 have more digits than a float: a profile's are read without one."""
    times = [(1, 999), (1_000_001, 7), (2_000_002, 123_456)]
    given = put(tmp_path, document(*(slice_of(f"op{b}", b, d) for b, d in times)), name)
    assert merge([trace, given]) == trace
    (one,) = read_trace(trace).attachments
    assert [(b - START, e - b) for b, e in zip(one.slices.rows["begin"], one.slices.rows["end"], strict=True)] == times
    assert one.slices.tracks == [SliceTrack(LOADER, LOADER, "thread 1000 (python)")]
    assert (one.about["error_ns"], one.about["offset_ns"], one.about["file"]) == (7, WALL, name)
    assert one.line.startswith("profiler of pid 1000 (torch.profiler 1): 3 slices")


GPU = [
    slice_of("cudaLaunchKernel", 100, 50, "cuda_runtime", correlation=7, cbid=211),
    slice_of("cudaMemcpyAsync", 200, 50, "cuda_runtime", correlation=8),
    slice_of("Memcpy HtoD", 400, 90, "gpu_memcpy", 0, 20, device=0, stream=20, correlation=8, bytes=64),
    slice_of("sgemm<float, \"x\">", 300, 80, "kernel", 0, 7, device=0, stream=7, correlation=7),
    slice_of("sgemm", 350, 80, "kernel", 0, 7, device=0, stream=7, correlation=99),
    slice_of("step", 250, 300, "gpu_user_annotation", 0, 7, device=0, stream=7),
    slice_of("aten::mm", 90, 70),
]  # fmt: skip


def test_kernels_and_copies_are_joined_to_what_launched_them(trace: Path, tmp_path: Path) -> None:
    merge([trace, put(tmp_path, document(*GPU))])
    slices = read_trace(trace).attachments[0].slices
    named = [slices.names[n].name for n in slices.rows["name"]]
    assert sorted((named[a], named[b]) for a, b in slices.arrows) == [
        ("cudaLaunchKernel", 'sgemm<float, "x">'),
        ("cudaMemcpyAsync", "Memcpy HtoD"),
    ]
    assert Name("sgemm", "kernel") in slices.names
    assert set(slices.tracks) == {
        SliceTrack(LOADER, LOADER, "thread 1000 (python)"),
        SliceTrack(0, 20, "stream 20", "GPU 0"),
        SliceTrack(0, 7, "stream 7", "GPU 0"),
        SliceTrack(0, 7, "stream 7: annotations", "GPU 0"),
    }
    assert slices.args[2] == {"correlation": 8, "bytes": 64}


def test_many_slices_are_cut_into_chunks(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_CHUNK", 2)
    merge([trace, put(tmp_path, document(*GPU))])
    cut = read_trace(trace).attachments[0].slices
    monkeypatch.undo()
    merge([trace, put(tmp_path, document(*GPU, trace_id="other"))])
    whole = read_trace(trace).attachments[1].slices
    assert [cut.names[n] for n in cut.rows["name"]] == [whole.names[n] for n in whole.rows["name"]]
    assert (cut.args, cut.arrows, cut.tracks) == (whole.args, whole.arrows, whole.tracks)
    assert np.array_equal(cut.rows["begin"], whole.rows["begin"])


ODD_EVENTS: list[Any] = [
    None, 5, "x", [], {}, {"ph": "X"},
    slice_of("negative", 5, 5) | {"dur": -1}, slice_of("no time", 5, 5) | {"ts": None},
    slice_of("true", 5, 5) | {"ts": True}, slice_of("text", 5, 5) | {"ts": "12"},
    slice_of("far", 5, 5) | {"ts": 10**30},
    slice_of("far", 5, 5) | {"dur": Raw("1e999999")}, slice_of("before the beginning", 5, 5) | {"ts": -(10**17)},
    slice_of("spans", 5, 5, pid="Spans"), slice_of("args", 5, 5) | {"args": 7, "name": ["n"], "cat": None},
    slice_of("nan", 5, 5) | {"ts": float("nan")},
    {"ph": "M", "name": "thread_name", "pid": LOADER, "tid": LOADER, "args": None},
    {"ph": "M", "name": "thread_name", "pid": LOADER, "tid": LOADER, "args": {"name": ["</script>"]}},
]  # fmt: skip


DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]


def test_events_that_make_no_sense_are_left_out(trace: Path, tmp_path: Path) -> None:
    good = slice_of("good", 10, 20, stack="</script>", f=0.5, n=[[1, 0.5]], deep=DEEP)
    merge([trace, put(tmp_path, document(*ODD_EVENTS, good))])
    slices = read_trace(trace).attachments[0].slices
    assert [slices.names[n].name for n in slices.rows["name"]] == ["['n']", "good"]
    assert slices.args == {1: {"stack": "</script>", "f": 0.5, "n": "[[1, 0.5]]", "deep": "[" * 201 + "]" * 201}}
    assert slices.tracks[0].title == "['</script>']"


# --- What is refused --------------------------------------------------------------------------------------------------
SOME = [slice_of("op", 10, 20)]
CUT = text(document(*SOME))[:-40].encode()
REFUSED = {
    "not JSON": (b"\x89PNG", "is not a profile of torch.profiler: it is not JSON"),
    "empty": (b"", "is not a profile of torch.profiler: it is not JSON"),
    "deep": (b"[" * 10**6, "is not a profile of torch.profiler: it is not JSON"),
    "another program's": ({"traceEvents": []}, "does not say its clock's baseTimeNanoseconds"),
    "a list": ([], "has no list of traceEvents"),
    "no list": (document(traceEvents={}), "has no list of traceEvents"),
    "no base": (document(baseTimeNanoseconds="now"), "does not say its clock's baseTimeNanoseconds"),
    "cut short": (CUT, "is cut short or damaged .*: export or copy the profile again"),
    "cut gzip": (gzip.compress(text(document(*SOME)).encode())[:-30], "is cut short or damaged"),
    "nothing in it": (document(), "holds nothing that took time"),
    "another host's": (document(*SOME, host_name="there"), "was recorded on 'there', and .* on 'here'"),
    "later": (document(slice_of("op", 10**12, 5)), "begins 16.7 min after .* ends: they are of different runs"),
    "earlier": (document(slice_of("op", -(10**6), 5)), "ends 1.00 ms before .* begins"),
    "of another process": (document(slice_of("op", 10, 20, pid=77)), "is of process 77, and .* of 1000, 1100, 1101"),
    "of GPUs alone": (document(GPU[2]), "is of process none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_profile_that_cannot_be_of_this_run_is_refused(trace: Path, tmp_path: Path, what: str) -> None:
    made, message = REFUSED[what]
    before = sorted(trace.iterdir())
    with pytest.raises(TraceError, match=message):
        merge([trace, put(tmp_path, made)])
    assert sorted(trace.iterdir()) == before


def test_the_same_profile_is_taken_once(trace: Path, tmp_path: Path) -> None:
    one = put(tmp_path, document(*SOME))
    merge([trace, one])
    with pytest.raises(TraceError, match="is in this trace already"):
        merge([trace, one])
    other = put(tmp_path, document(*SOME, trace_id="D"), "other.json")
    with pytest.raises(TraceError, match="is in this trace already"):
        merge([trace, other, other])
    assert len(read_trace(trace).attachments) == 1, "all or nothing"
    merge([trace, other])
    assert [a.name.split(".")[0] for a in read_trace(trace).attachments] == ["profiler-1", "profiler-2"]


def test_a_trace_that_knows_no_wall_clock(tmp_path: Path) -> None:
    path = made_trace.write(tmp_path / "trace", made_trace.Run(**made_trace.HEALTHY))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({"format": manifest["format"]}))
    with pytest.raises(TraceError, match="does not say how its clock is related to the wall clock"):
        merge([path, put(tmp_path, document(*SOME))])


def test_what_is_merged_is_looked_at_first(trace: Path, tmp_path: Path) -> None:
    one = put(tmp_path, document(*SOME))
    packed = read_trace(trace).pack(tmp_path / "packed")
    unnamed = packed.rename(tmp_path / "unnamed")
    for paths in ([trace], [one, one], [trace, unnamed, one]):
        with pytest.raises(TraceError, match="merge takes one trace and profiles of its run, and was given"):
            merge(paths)
    with pytest.raises(TraceError, match="is packed: say with -o where"):
        merge([unnamed, one])
    for order in ([unnamed, one], [one, trace]):
        assert len(read_trace(merge(order, tmp_path / "out")).attachments) == 1
    assert len(read_trace(unnamed).attachments) == len(read_trace(trace).attachments) == 0


@pytest.mark.live
def test_the_command(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = put(tmp_path, document(*SOME)), put(tmp_path, document(*SOME, trace_id="2"), "two.json.gz")
    assert cli.main(["merge", str(trace), str(one), str(two), "-o", str(tmp_path / "out.minidl")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.minidl'}\n"
    assert cli.main(["summary", str(tmp_path / "out.minidl")]) == 0
    assert capsys.readouterr().out.count("profiler of pid 1000 (torch.profiler 1): 1 slices") == 2
    assert cli.main(["merge", str(trace), str(tmp_path / "none.json")]) == 2
    assert "none.json: there is no such file or directory: give a trace, then" in capsys.readouterr().err


def test_the_offset_is_the_median_of_what_the_processes_noted(trace: Path) -> None:
    assert profiles._wall_offset(read_trace(trace)) == (WALL, 7, 10**6)


def test_a_wall_clock_that_was_set_is_said(trace: Path, tmp_path: Path) -> None:
    with next(trace.glob(f"{LOADER}-*.meta.jsonl")).open("a") as file:
        later = {"kind": "process", "start_monotonic_ns": START, "start_realtime_ns": START + WALL + 2 * 10**9}
        file.write(json.dumps(later) + "\n")
    merge([trace, put(tmp_path, document(*SOME))])
    (problem,) = read_trace(trace).attachments[0].problems
    assert "the wall clock seems to have been set during the run: its times may be off by 2.00 s" in problem
