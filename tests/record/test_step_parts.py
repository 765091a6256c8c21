"""The parts of a training step: which calls of torch's become spans, whose, and that the program notices nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
import workloads as wl
from recorded import descent
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidl
from minidl.check import check
from minidl.record import step_parts
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS
from minidl.tracefile.members import traces_in
from minidl.tracefile.reader import Trace, read_trace

CODES = [span[0] for span in ev.PARTS]


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of each step are recorded, however short it is."""
    monkeypatch.setattr(step_parts, "PAUSE_NS", 0)


class Net(nn.Module):
    """A module in which others are called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < 0:
            raise ValueError("negative")
        return self.body(x).sum()


class Discriminator(Net):
    """Another."""


def batches(n: int = 2) -> Any:
    return minidl.DataLoader(wl.Tensors(2 * n), 2)


def trained(net: nn.Module, batch: torch.Tensor) -> None:
    net(batch).backward()


def record(folder: Path, program: Callable[[], object]) -> Trace:
    with minidl.trace(folder / "trace"), step_parts.step_parts_recorded():
        program()
    trace = read_trace(folder / "trace")
    assert [str(violation) for violation in check(trace)] == []
    return trace


def spans_of(trace: Trace) -> Any:
    spans = trace.spans()
    return spans[[code in CODES for code in spans["code"]]]


def parts(trace: Trace) -> list[str]:
    """Each part in its order: "forward Net 0" of task 0; none lies in another."""
    found = spans_of(trace)
    assert (found["end"] > 0).all()
    assert (found["end"][:-1] <= found["begin"][1:]).all()
    texts = [trace.strings.get((row["process"], row["bx"]), "") if _has_text(row) else "" for row in found]
    return [
        " ".join(filter(None, (EVENTS[int(row["code"])].name, text, str(row["task"]))))
        for row, text in zip(found, texts, strict=True)
    ]


def _has_text(row: Any) -> bool:
    return any(field.unit == "string" for field in EVENTS[int(row["code"])].fields)


# --- Programs ---------------------------------------------------------------------------------------------------------
def predicted(net: nn.Module, count: int) -> None:
    with torch.no_grad():
        for other in batches(count):
            net(other)


Loop = tuple[int, str]
"""Of a training: the number of batches, and what is done with each."""


def training(*parts: Loop | str) -> Callable[[], None]:
    """A program that trains one model. parts: loops over a loader, and what is done outside of them.

    fit: forward and backward. fit wrapped: as with DistributedDataParallel, whose wrapper keeps its mode. evaluate 3:
    in a loop over three batches, which belongs to no training. set: each module's mode, as Lightning does it.
    """

    def program() -> None:
        net = Net()
        optimizer, loaders = descent(net), {count: batches(count) for count, _ in filter(of_a_loop, parts)}
        actions: dict[str, Callable[..., object]] = {
            "fit": lambda batch: trained(net, batch),
            "fit wrapped": lambda batch: trained(nn.Sequential(net), batch),
            "step": lambda _: optimizer.step(),
            "zero_grad": lambda _: optimizer.zero_grad(),
            "train": lambda _: net.train(),
            "eval": lambda _: net.eval(),
            "set": lambda _: [setattr(module, "training", True) for module in net.modules()],
            "save": lambda _: torch.save(net.state_dict(), "/dev/null"),
            **{f"evaluate {count}": lambda _, count=count: predicted(net, count) for count in (1, 2, 3)},
        }
        for part in parts:
            looped = of_a_loop(part)
            for batch in loaders[part[0]] if looped else [None]:
                for action in (part[1] if looped else part).split(", "):
                    actions[action](batch)

    return program


def of_a_loop(part: Loop | str) -> bool:
    return isinstance(part, tuple)


def two_models() -> None:
    nets = Net(), Discriminator()
    optimizers = [descent(net) for net in nets]
    for batch in batches(1):
        for net, optimizer in zip(nets, optimizers, strict=True):
            trained(net, batch)
            optimizer.step()


def accumulated() -> None:
    net = Net()
    optimizer = descent(net)
    for number, batch in enumerate(batches(4)):
        trained(net, batch)
        if number % 2:
            optimizer.step()


def failing() -> None:
    net = Net()
    for batch in batches():
        with pytest.raises(ValueError, match="negative"):
            net(batch - 100)
        trained(net, batch)


def with_a_closure() -> None:
    net = Net()
    optimizer = descent(net)
    for batch in batches(2):
        optimizer.step(lambda batch=batch: trained(net, batch))
    for batch in batches(1):
        with pytest.raises(ValueError, match="negative"):
            optimizer.step(closure=lambda batch=batch: trained(net, batch - 100))


def repeated() -> None:
    """backward calls the module again."""
    net = Net()
    for batch in batches(1):
        checkpoint(net, batch.requires_grad_(), use_reentrant=False).backward()


def gradients_alone() -> None:
    for batch in batches(1):
        torch.autograd.grad(Net()(batch.requires_grad_()), batch)


def copied() -> None:
    for batch in batches(1):
        for copy in (batch.to("meta"), batch.to(device=torch.device("meta")), batch.to(torch.empty(0, device="meta"))):
            assert copy.device.type == "meta"
        copy.to("meta")
        assert batch.to(torch.float64).to("cpu", torch.float32).to(batch) is not None


def outside() -> None:
    """Before any loop, in another thread, and after the loop."""
    net = Net()
    net(torch.zeros(2, 4))
    for batch in batches(1):
        thread = threading.Thread(target=net, args=(batch,))
        thread.start()
        thread.join()
    net(torch.zeros(2, 4))


class Transformed(wl.Tensors):
    """Its samples are made by a module."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return nn.Identity()(super().__getitem__(index))


def in_next() -> None:
    for batch in minidl.DataLoader(Transformed(2), 2):
        Net()(batch)


STEP = "forward Net {0}", "backward {0}", "optimizer Descent {0}"
VALIDATED = training((2, "fit, eval, evaluate 3, train, save"))
"""In a step of the training loop; its last batch is not the training loop's."""

CASES: dict[str, tuple[Callable[[], None], list[str]]] = {
    "plain": (
        training((2, "zero_grad, fit, step")), [part.format(task) for task in (0, 1) for part in STEP]
    ),
    "two models": (two_models, [
        "forward Net 0", "backward 0", "optimizer Descent 0",
        "forward Discriminator 0", "backward 0", "optimizer Descent 0",
    ]),
    "accumulated": (accumulated, [part.format(task) for task in range(4) for part in STEP[: 2 + task % 2]]),
    "failing": (
        failing, ["forward Net 0", "forward Net 0", "backward 0", "forward Net 1", "forward Net 1", "backward 1"]
    ),
    "validated": (VALIDATED, [
        part
        for task in (0, 1)
        for part in (
            f"forward Net {task}", f"backward {task}", *(f"evaluate Net {other}" for other in range(3)),
            f"save torch.save {task}",
        )
    ]),
    "with a closure": (with_a_closure, [
        *(part.format(task) for task in (0, 1) for part in (STEP[2], *STEP)),
        "optimizer Descent 0", "forward Net 0", "optimizer Descent 0",
    ]),
    "repeated": (repeated, ["forward Net 0", "backward 0"]),
    "gradients alone": (gradients_alone, ["forward Net 0", "backward 0"]),
    "copied": (copied, ["to_device 0"] * 3),
    "outside": (outside, ["forward Net -1"]),
    "in next": (in_next, ["forward Net 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_a_program(name: str, tmp_path: Path) -> None:
    program, expected = CASES[name]
    assert parts(record(tmp_path, program)) == expected


def test_a_part_belongs_to_the_loop_that_runs(tmp_path: Path) -> None:
    trace = record(tmp_path, VALIDATED)
    found = spans_of(trace)
    of_training = found["loader"] == found["loader"][0]
    assert [name.split()[0] for name, mine in zip(parts(trace), of_training, strict=True) if not mine] == [
        "evaluate"
    ] * 6
    consumer = trace.spans()[trace.spans()["code"] == ev.CONSUMER[0]]
    around = consumer[consumer["loader"] == found["loader"][0]]
    assert all(((around["begin"] <= row["begin"]) & (row["end"] <= around["end"])).any() for row in found)


def one_part_is_frozen() -> None:
    """And of two models that are trained, one predicts; a third one is not trained."""
    frozen, nets = nn.Sequential(Net(), nn.ReLU()), (Net(), Discriminator())
    for batch in batches():
        for net in (frozen, *nets):
            trained(net, batch)
        frozen[0].eval()
        for net in (nets[0], nn.Linear(2, 2)):
            net.eval()
        predicted(nets[0], 1)
        nets[0].train()


def a_child_is_frozen() -> None:
    """As a prompt or a scale around a backbone: the module has parameters of its own."""
    net = nn.Sequential(Net())
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    for batch in batches():
        net.train()
        net[0].eval()
        trained(net, batch)


def only_a_loss() -> None:
    """It is called as a module; the model is not, and has a mode of its own."""
    weight, loss = torch.ones(4, requires_grad=True), nn.L1Loss()
    for batch in batches():
        loss(batch @ weight, batch[:, 0]).backward()
        loss.eval()
        loss.train()


VALIDATIONS: dict[str, tuple[Callable[[], None], list[tuple[int, int]]]] = {
    "none": (training((2, "fit")), []),
    "in each step": (VALIDATED, [(0, 3), (1, 3)]),
    "after each epoch; the last one ends with the recording": (
        training("train", (2, "fit"), "eval, evaluate 1, train", (2, "fit"), "eval, evaluate 3"),
        [(-1, 1), (-1, 3)],
    ),
    "the mode is set when the next step begins, as by Transformers' Trainer": (
        training((2, "train, fit, eval, evaluate 2")),
        [(0, 2), (1, 2)],
    ),
    "the mode is set without train, as by Lightning": (
        training((1, "fit"), "eval, evaluate 1, set", (1, "fit"), "eval, evaluate 1, set"),
        [(-1, 1), (-1, 1)],
    ),
    "trained again in the next epoch, and a checkpoint is written before": (
        training((2, "train, fit"), "eval, evaluate 2", (2, "train, fit"), "eval, evaluate 2, save, evaluate 1"),
        [(-1, 2), (-1, 2)],
    ),
    "wrapped": (training((1, "fit wrapped, fit, eval, evaluate 1, train")), [(0, 1)]),
    "one part is frozen": (one_part_is_frozen, []),
    "trained in evaluation mode": (training((1, "fit, eval, evaluate 1, fit, evaluate 1")), [(0, 1)]),
    "a child is frozen": (a_child_is_frozen, []),
    "only a loss": (only_a_loss, []),
    "saved before it evaluates": (training((1, "fit"), "eval, save, evaluate 2"), [(-1, 2)]),
}
"""A program, and of each of its validations the task and the number of evaluated batches."""


@pytest.mark.heavy
@pytest.mark.parametrize("name", VALIDATIONS)
def test_a_validation_lies_around_what_is_evaluated(name: str, tmp_path: Path) -> None:
    program, expected = VALIDATIONS[name]
    trace = record(tmp_path, program)
    spans = trace.spans()
    found, inner = (spans[spans["code"] == code[0]] for code in (ev.VALIDATION, ev.EVALUATE))
    around = []
    for row in found:
        inside = (row["begin"] < inner["begin"]) & (inner["end"] < row["end"])
        around.append((row["task"], int(inside.sum())))
    assert around == expected
    steps = spans[spans["code"] == ev.CONSUMER[0]]
    assert all(
        ((steps["begin"] < row["begin"]) & (row["end"] < steps["end"])).any() == (row["task"] >= 0) for row in found
    )
    forward = spans[spans["code"] == ev.FORWARD[0]]
    assert all(forward["loader"][forward["end"] < row["begin"]][-1] == row["loader"] for row in found)
    epochs = spans[np.isin(spans["code"], [ev.EPOCH[0]]) & np.isin(spans["loader"], found["loader"])]
    assert not any(((row["begin"] < epochs["begin"]) & (epochs["begin"] < row["end"])).any() for row in found)


SAVED = training((4, "fit, save"))


def test_of_short_steps_some_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "PAUSE_NS", 10**18)
    trace = record(tmp_path, SAVED)
    save = [f"save torch.save {task}" for task in range(4)]
    assert parts(trace) == ["forward Net 0", "backward 0", *save]
    steps = trace.spans()[trace.spans()["code"] == ev.CONSUMER[0]]
    assert steps["by"].tolist() == [0, 1, 0, 0, 0]


def test_no_step_is_sampled_if_no_parts_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts.here.thread, "due", 0)
    with minidl.trace(tmp_path / "trace"):
        SAVED()
    spans = read_trace(tmp_path / "trace").spans()
    assert not spans[spans["code"] == ev.CONSUMER[0]]["by"].any()


def test_what_few_steps_have_is_always_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop in a step is sampled as the step is."""
    monkeypatch.setattr(step_parts, "PAUSE_NS", 10**18)
    trace = record(tmp_path, VALIDATED)
    assert parts(trace) == [part for part in CASES["validated"][1] if part not in ("forward Net 1", "backward 1")]


class WithTeacher(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x + super().forward(x)
        return super().forward(x)


def test_a_module_in_another_one_looks_at_no_variable_of_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in steps that are not recorded, and without gradients."""
    monkeypatch.setattr(step_parts, "PAUSE_NS", 10**18)
    looks: list[bool] = []
    ident = threading.get_ident()

    def taught() -> None:
        net = WithTeacher()
        net.body.register_forward_pre_hook(lambda *_: looks.append(ident in step_parts._outside))
        for batch in batches(3):
            trained(net, batch)
            looks.append(ident in step_parts._outside)

    assert parts(record(tmp_path, taught)) == ["forward WithTeacher 0", "backward 0"]
    assert looks == [False, False, True] * 3


@pytest.mark.heavy
def test_a_compiled_function_that_calls_a_module_is_traced_whole(tmp_path: Path) -> None:
    net, graphs = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: net(x).sum(), backend=backend, fullgraph=True)

    def program() -> None:
        for batch in batches(3):
            compiled(batch).backward()

    try:
        assert parts(record(tmp_path, program)) == ["backward 0", "backward 1", "backward 2"]
    finally:
        torch.compiler.reset()
    assert len(graphs) == 1


def test_a_copy_has_its_bytes(tmp_path: Path) -> None:
    assert spans_of(record(tmp_path, copied))[["bx", "by"]].tolist() == [(2 * 4 * 4, 0)] * 3  # bytes, pinned


def test_torch_is_left_as_it_was() -> None:
    owners: list[tuple[Any, str]] = [(owner, name) for owner, name, _ in step_parts._changes()]
    assert len(owners) > 30
    before = [getattr(owner, name) for owner, name in owners]
    with step_parts.step_parts_recorded():
        changed = [getattr(owner, name) for owner, name in owners]
    assert not any(one is other for one, other in zip(before, changed, strict=True))
    assert before == [getattr(owner, name) for owner, name in owners]
    assert "to" not in vars(torch.Tensor)


def test_a_module_call_as_torch_does_not_know_it_yet() -> None:
    """A later torch, or a program, has another `__call__`: it is called, not imitated."""
    called = []

    def new_call(self: Any, *args: Any) -> Any:
        called.append(args)
        return args

    call = step_parts._module_call(new_call)
    assert call(nn.Identity(), 3) == (3,) == called[0]
    assert step_parts._module_call(nn.Module.__call__)(nn.Identity(), 3) == 3


def test_what_only_describes_a_call_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is made, and is no part."""
    monkeypatch.setattr(step_parts, "_copied", lambda tensor: 1 // 0)
    assert parts(record(tmp_path, copied)) == []


# --- Programs of their own --------------------------------------------------------------------------------------------
SCRIPT = """
import sys
import minidl.record.step_parts; minidl.record.step_parts.PAUSE_NS = 0
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_num_threads(1)

class Predicting(TensorDataset):
    model = nn.Linear(8, 8)
    def __getitem__(self, index):
        with torch.no_grad():
            x, y = super().__getitem__(index)
            return self.model(x), y

class Net(nn.Sequential):
    def forward(self, x):
        if len(x) == 1:
            raise ValueError("a batch of one")
        return super().forward(x)

if __name__ == "__main__":
    data = Predicting(torch.randn(25, 8), torch.randint(0, 3, (25,)))
    net, loss = Net(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), nn.CrossEntropyLoss()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    optimizer = torch.optim.AdamW(net.parameters())
    for epoch in range(2):
        for number, (x, y) in enumerate(DataLoader(data, 4, shuffle=True, num_workers=int(sys.argv[1]))):
            try:
                error = loss((compiled if number % 2 else net)(x), y)
            except ValueError:
                print("no step")
                continue
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            print(error.item())
    print(torch._dynamo.utils.counters["frames"], {name: value.sum().item() for name, value in net.named_parameters()})
    net(torch.zeros(1, 8))
"""


@pytest.fixture(scope="module")
def alone() -> str:
    """What the program prints by itself."""
    return wl.run(SCRIPT, 0).stdout


@pytest.mark.live
@pytest.mark.parametrize("options", [(), ("--observe",)])
def test_a_program_prints_the_same_and_has_its_parts(options: tuple[str, ...], tmp_path: Path, alone: str) -> None:
    """Its workers run a model, too; the last call raises, and its traceback has no line of minidl's."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    traced = wl.run(
        "from minidl.cli import main; raise SystemExit(main())",
        *("run", *options, "--trace", tmp_path / "trace", script, 2),
    )
    assert (traced.stdout, traced.returncode) == (alone, 1)
    assert "ValueError: a batch of one" in traced.stderr
    assert "step_parts" not in traced.stderr
    trace = read_trace(tmp_path / "trace")
    assert [str(violation) for violation in check(trace)] == []
    found = spans_of(trace)
    names = [EVENTS[int(code)].name for code in found["code"]]
    assert {name: names.count(name) for name in names} == {"forward": 2 * 13 + 1, "backward": 12, "optimizer": 12}
    assert {trace.processes[index].role for index in found["process"]} == {"loader"}


RANKS = """
import sys, torch, torch.distributed as dist
import workloads as wl
from recorded import descent
from torch.multiprocessing.spawn import start_processes
from minidl.record.step_parts import step_parts_recorded
import minidl

def rank(number, folder):
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=number, world_size=2)
    with minidl.trace(f"{folder}/rank-{number}"), step_parts_recorded():
        for batch in minidl.DataLoader(wl.Tensors(4), 2):
            dist.all_reduce(batch)
            dist.distributed_c10d.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    start_processes(rank, (sys.argv[1],), 2, start_method="fork")
"""


@pytest.mark.live
def test_two_ranks_number_their_collectives_alike(tmp_path: Path) -> None:
    done = wl.run(RANKS, tmp_path)
    assert done.returncode == 0, done.stderr
    for trace in map(read_trace, traces_in([tmp_path])):
        said = ["collective all_reduce 0", "collective barrier 0", "collective all_reduce 1", "collective barrier 1"]
        assert parts(trace) == said
        found = spans_of(trace)
        assert found["by"].tolist() == [0, 1, 2, 3]
        assert found["bz"].tolist() == [32, 0, 32, 0]


def test_steps_of_loops_that_run_in_turn_are_not_timed_by_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins while the other's code runs, so none decides: what the loop before them has decided ends."""
    thread, other = step_parts.LoopThread(), step_parts.ConsumerLoop(2, lambda *event: None)
    thread.device = torch.device("cuda")
    thread.begin_next()
    assert (thread.timed, thread.sampled) == (2, True)
    other.runs = True
    thread.loops.append(other)
    timed = []
    for _ in range(3):
        thread.begin_next()
        timed.append(thread.timed)
    assert timed == [1, 0, 0]
