"""Parts of the training step: forward, backward, optimizer, copies to a device, collectives, checkpoints, validation.

Interface: while `step_parts_recorded()` is open, the functions of torch that do these parts are wrapped. A call in a
thread that iterates over a loader, outside of its `next`, becomes a span. `LoaderSpans` says when such a thread is in
`next`, and which batch it has.

Rules of use: only the outermost call counts, so that parts never lie in each other: a module in a module, the forward
pass that a checkpoint repeats in backward and an all_reduce in backward belong to the call around them. An optimizer's
step begins after the closure that it calls. All spans are the host's time: a device may work later.

A module call in another one pays one look at a global set (30 ns): `nn.Module.__call__` is replaced by a
function that does what torch's does, so tracebacks and recursion are as deep as without it.

The parts of a small step cost 30 to 50 µs. So the steps whose parts are recorded begin at least PAUSE_NS apart, but for
the second of two that are timed, which keeps the parts' cost at about 0.5%; CONSUMER's begin says which they are. Two
in a row, at most each 0.2 s, are timed: they have module calls, backward and optimizer also by the clock of the device
that computes them. What few steps have is always recorded: evaluations, collectives, checkpoints.

A validation is no part, but lies around other loops: while all modules that the loop trains are in evaluation mode.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
import torch.serialization

from minidl.record import recorder
from minidl.record.consumer_stream import mark_consumer
from minidl.record.group import HOMES
from minidl.record.harmless import harmless, substituted, without_a_place
from minidl.tracefile import events as ev

PAUSE_NS = 10_000_000
"""From the begin of one step whose parts are recorded to the next one's, at least."""

TIMING_PAUSE_NS = 200_000_000
"""From the first of two steps whose parts are also timed by the device's clock to the next such pair, at least: their
twelve marks in the stream cost 0.6 ms on the simulated device, and up to 1.4 ms on an H100 in a virtual machine."""

Span = tuple[int, int]
Function = Callable[..., Any]
_F = TypeVar("_F", bound=Callable[..., Any])


# --- The threads that iterate -----------------------------------------------------------------------------------------
class BatchInUse:
    """The consumer's batch: its loader's number in the trace, and its task; -1 = none yet."""

    loader = 0
    task = -1


batch_in_use: Final = BatchInUse()
"""The batch of this process's consumer; set when a batch is handed out, by a loader or by a device stage behind it."""


class ConsumerLoop:
    """One iterator's loop, in whose code the parts lie. runs: its own code runs, with the batch `task`.

    dataloader: the number of the iterator's DataLoader, None = unknown.
    """

    __slots__ = ("_task", "dataloader", "emit", "number", "runs")

    def __init__(self, number: int, emit: recorder.Emit) -> None:
        self.number, self.emit, self._task, self.runs = number, emit, -1, False
        self.dataloader: object = None

    def begin(self, task: int) -> None:
        self._task, self.runs = task, True
        batch_in_use.loader, batch_in_use.task = self.number, task
        here.thread.enter(self)

    def end(self) -> None:
        """Its own code ends, and with it a validation in it."""
        if here.thread.validation is self and here.thread.in_step:
            end_validation()
        self.runs = False

    @property
    def task(self) -> int:
        """The task of its batch; -1 = it has none."""
        if not self.runs:
            return -1
        return batch_in_use.task if batch_in_use.loader == self.number else self._task


_outside: Final[set[int]] = set()
"""The threads that are not `inside`: one look at it costs a tenth of one at a thread's own variables. One that has
ended may stay in it: others then look at their own variables in vain."""


class LoopThread:
    """What a thread is at. inside: its calls are no parts of a step: it has not iterated, or is in `next` or in a part.
    passes: they are not recorded, also because this step is `sampled` not.

    in_part: a part is open. loops: whose own code runs, the inner loop last; last: that which began last. recorded: of
    all threads, whether parts are recorded at all. trained: the modules that the loop `trainer` has called in training
    mode, in a part that is recorded, and their `device`. validation: the loop to which an open validation belongs;
    in_step: it began in that loop's own code. device: where the module is that the loop has called, None = on no
    accelerator; timed: in so many steps, this one included, the device's clock is recorded; marked: in the open part.
    evaluated: the loop has called a module without gradients since.
    """

    recorded = False

    def __init__(self) -> None:
        self.inside = self.passes = self.sampled = True
        self.in_part = self.in_step = self.evaluated = self.marked = False
        self.due = self.timing_due = self.timed = 0
        self.trainer: ConsumerLoop | None = None
        self.validation: ConsumerLoop | None = None
        self.device: torch.device | None = None
        self.loops: list[ConsumerLoop] = []
        self.last: ConsumerLoop | None = None
        self.trained: weakref.WeakKeyDictionary[torch.nn.Module, torch.device | None] = weakref.WeakKeyDictionary()
        self.ident = threading.get_ident()

    def begin_next(self) -> None:
        """The next step comes: are its parts recorded? What a loop in a step does is, if that step's parts are."""
        self.enter_next()
        if self.validation is not None:
            look_for_validation()  # the mode may have been set without train()
        self.timed = max(0, self.timed - 1)  # also of two loops that run in turn, which are not timed
        if not any(loop.runs for loop in self.loops):
            now = time.monotonic_ns()
            if self.device is not None and now >= self.timing_due:
                self.timed, self.timing_due = 2, now + TIMING_PAUSE_NS
            self.sampled = now >= self.due or self.timed > 0
            if self.sampled:
                self.due = now + PAUSE_NS

    def enter_next(self) -> None:
        self.inside = self.passes = True
        _outside.discard(self.ident)

    def leave_next(self) -> None:
        self.inside = self.in_part or self.last is None
        self.passes = self.inside or not self.sampled
        if not self.inside:
            _outside.add(self.ident)

    def enter_part(self) -> None:
        self.in_part = True
        self.enter_next()

    def leave_part(self) -> None:
        self.in_part = False
        self.leave_next()

    def begin_epoch(self, loop: ConsumerLoop) -> None:
        """An epoch of the loop begins in this thread: if its DataLoader is the one that trains, a validation ends."""
        trains = self.validation
        if trains is loop or (trains and loop.dataloader is not None and trains.dataloader == loop.dataloader):
            end_validation()
        elif trains:
            look_for_validation()
        self.iterate(loop)

    def iterate(self, loop: ConsumerLoop) -> None:
        self.last = loop
        self.leave_next()

    def enter(self, loop: ConsumerLoop) -> None:
        """The loop's own code runs, until its `runs` is false."""
        self.iterate(loop)
        if loop not in self.loops:
            self.current()  # drops loops that have ended
            self.loops.append(loop)

    def current(self) -> ConsumerLoop:
        """The innermost loop whose own code runs; else the last one, which has no batch then."""
        loops = self.loops
        while loops and not loops[-1].runs:
            loops.pop()
        assert self.last is not None  # `passes` is true before
        return loops[-1] if loops else self.last


class _Here(threading.local):
    """This thread's own; a variable of a thread takes ten times as long to reach as one of an object."""

    def __init__(self) -> None:
        self.thread = LoopThread()


here: Final = _Here()


def _forget() -> None:
    """This thread is at nothing: a recording begins, or a worker, which may run a model, but is no loop."""
    here.thread.enter_next()
    here.thread = LoopThread()


os.register_at_fork(after_in_child=_forget)


_ON_A_DEVICE: Final = {
    ev.FORWARD: "forward", ev.BACKWARD: "backward", ev.OPTIMIZER: "optimizer", ev.EVALUATE: "evaluation",
}  # fmt: skip
"""The parts that are also recorded by the clock of the device that computes them, but for those of a validation."""


# --- A part -----------------------------------------------------------------------------------------------------------
def _unnoticed(function: _F) -> _F:
    """The function, in the place of one of torch's: neither warnings nor torch.compile stop at it."""
    without_a_place(function)
    with contextlib.suppress(AttributeError):  # another torch may call it otherwise
        compiler: Any = torch._C._dynamo.eval_frame
        skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT)
        compiler.set_code_exec_strategy(function.__code__, skip)
    return function


@_unnoticed
def _part(span: Span, about: tuple[int, ...], function: Function, *args: Any, **kwargs: Any) -> Any:
    """Return what the function returns; its call is a part of the step."""
    thread = here.thread
    thread.enter_part()
    loop = thread.current()
    task = loop.task
    _begin(loop, span, task, about)
    try:
        return function(*args, **kwargs)
    finally:
        _end(loop, span, task)
        thread.leave_part()


def _begin(loop: ConsumerLoop, span: Span, task: int, about: tuple[int, ...]) -> None:
    loop.emit(span[0], task, -1, *about)
    at = here.thread
    at.marked = at.timed > 0 and at.validation is None and at.device is not None and span in _ON_A_DEVICE
    _mark_device(loop, span, 0, task)


def _end(loop: ConsumerLoop, span: Span, task: int) -> None:
    _mark_device(loop, span, 1, task)
    loop.emit(span[1], task, -1)


def _mark_device(loop: ConsumerLoop, span: Span, side: int, task: int) -> None:
    """Mark where the part begins, or ends, in the stream of the device that computes it, if that is `marked`."""
    device = here.thread.device
    if here.thread.marked and device is not None:
        mark_consumer(device, ev.DEVICE_PART[side], loop.number, task, _text(_ON_A_DEVICE[span]), behind=True)


def _text(text: str) -> int:
    """The number of a text in this process's events."""
    recording = recorder.active()
    return 0 if recording is None else recording.string(text)


def _wrapped(function: Function, span: Span, about: Callable[..., tuple[int, ...] | None]) -> Function:
    """The function; a call is a part. about: the begin's own fields by the call's arguments, None = it is no part."""
    about = harmless(None)(about)
    always = span in ev.ALWAYS_PARTS
    trains = span is ev.BACKWARD

    @_unnoticed
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        thread = here.thread
        compiling = torch.compiler.is_compiling()  # the compiler shall not trace what only records
        if trains and not compiling and not thread.inside and thread.validation is not None:
            end_validation()  # the loop trains in evaluation mode
        passes = compiling or (thread.inside if always else thread.passes)
        if passes or (known := about(*args, **kwargs)) is None:
            return function(*args, **kwargs)
        return _part(span, known, function, *args, **kwargs)

    return call


# --- Validation -------------------------------------------------------------------------------------------------------
@harmless(None)
def _note_trained(module: torch.nn.Module) -> None:
    """The loop calls a module with gradients: if that is in training mode, the loop trains it."""
    thread = here.thread
    loop = thread.current()
    if thread.trainer is loop and module.training and module in thread.trained:  # to ask for a parameter takes 5 µs
        thread.device = thread.trained[module]
        return
    if (parameter := next(module.parameters(), None)) is not None:
        thread.device = None if parameter.device.type in ("cpu", "meta") else parameter.device
    if module.training and parameter is not None:
        if thread.trainer is not loop:
            thread.trainer = loop
            thread.trained.clear()
        thread.trained[module] = thread.device


def _trains(module: torch.nn.Module) -> bool:
    """Whether a module is in training mode; of one that only wraps another, whether that is."""
    while len(inner := list(module.children())) == 1 and not module._parameters:
        module = inner[0]
    return module.training and next(module.parameters(), None) is not None


@harmless(None)
def look_for_validation() -> None:
    """Begin or end a validation, by the mode of what the loop trains."""
    validates = len(here.thread.trained) > 0 and not any(map(_trains, here.thread.trained))
    if not validates:
        end_validation()
    elif here.thread.validation is None:
        _begin_validation()


def _begin_validation() -> None:
    loop = here.thread.validation = here.thread.trainer
    assert loop is not None  # it has called the modules
    here.thread.in_step, here.thread.evaluated = loop.runs, False
    loop.emit(ev.VALIDATION[0], loop.task)


def end_validation() -> None:
    """End the validation, if there is one."""
    loop, here.thread.validation = here.thread.validation, None
    if loop is not None:
        loop.emit(ev.VALIDATION[1], loop.task)


def _train(plain: Function) -> Function:
    """`Module.train`, which `eval` calls, too; the outermost call may begin or end a validation."""

    @_unnoticed
    @functools.wraps(plain)
    def train(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or here.thread.inside:
            return plain(*args, **kwargs)
        here.thread.enter_part()
        try:
            return plain(*args, **kwargs)
        finally:
            here.thread.leave_part()
            look_for_validation()

    return train


# --- Forward ----------------------------------------------------------------------------------------------------------
_KNOWN_CALL: Final = ("_compiled_call_impl", "_call_impl")
"""What torch's own `__call__` of a module names: it calls the first, if there is one, or the second."""


def _module_call(plain: Function) -> Function:
    """A `Module.__call__` that does what `plain`, torch's own, does, and makes an outermost call a part."""

    @_unnoticed
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # as torch names it
        if not _outside or torch.compiler.is_compiling() or (thread := here.thread).inside:
            return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
        span = ev.FORWARD if torch.is_grad_enabled() else ev.EVALUATE
        if thread.passes and span is ev.FORWARD:
            thread.enter_part()  # for the modules in this one
            try:
                return plain(self, *args, **kwargs)
            finally:
                thread.leave_part()
        if span is ev.FORWARD:
            _note_trained(self)
        else:
            thread.evaluated = True
        return _part(span, (_text(type(self).__name__),), plain, self, *args, **kwargs)

    @_unnoticed
    def call_around(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The same around a `__call__` that is not as it is known."""
        return plain(self, *args, **kwargs) if here.thread.inside else __call__(self, *args, **kwargs)

    return __call__ if getattr(plain, "__code__", None) and plain.__code__.co_names == _KNOWN_CALL else call_around


# --- The optimizer ----------------------------------------------------------------------------------------------------
def _optimizer_step(hooking: Function) -> Function:
    """`Optimizer.profile_hook_step`, with which each optimizer's class wraps its `step`; ours wraps it once more."""

    @functools.wraps(hooking)
    def profile_hook_step(step: Function) -> Function:
        hooked = hooking(step)

        @_unnoticed
        @functools.wraps(hooked)
        def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or here.thread.passes:
                return hooked(self, *args, **kwargs)
            about = (_text(type(self).__name__),)
            if args and callable(args[0]):
                args = (_apart(args[0], about), *args[1:])
            elif callable(kwargs.get("closure")):
                kwargs["closure"] = _apart(kwargs["closure"], about)
            return _part(ev.OPTIMIZER, about, hooked, self, *args, **kwargs)

        return stepping

    return profile_hook_step


def _apart(closure: Function, about: tuple[int, ...]) -> Function:
    """The closure that an optimizer's step calls, without the step: what it does are parts of their own."""

    @_unnoticed
    @functools.wraps(closure)
    def alone(*args: Any, **kwargs: Any) -> Any:
        loop = here.thread.current()
        task = loop.task
        _end(loop, ev.OPTIMIZER, task)
        here.thread.leave_part()
        try:
            return closure(*args, **kwargs)
        finally:
            here.thread.enter_part()
            _begin(loop, ev.OPTIMIZER, task, about)

    return alone


# --- Arguments --------------------------------------------------------------------------------------------------------
def _to_device(tensor: Any, *args: Any, **kwargs: Any) -> tuple[int, ...] | None:
    """Of `tensor.to(...)`: None if it copies nothing from the host to a device."""
    if not tensor.is_cpu:
        return None
    target = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(target, torch.Tensor):
        target = target.device
    elif isinstance(target, torch.dtype) or target is None:
        return None
    return _copied(tensor) if isinstance(target, int) or torch.device(target).type != "cpu" else None


def _checkpoint(writer: str) -> Callable[..., tuple[int, ...]]:
    def about(*_: Any, **__: Any) -> tuple[int, ...]:
        if here.thread.evaluated:
            end_validation()  # what is validated is saved, before the mode is set again
        return (_text(writer),)

    return about


def _copied(tensor: Any, *_: Any, **__: Any) -> tuple[int, ...] | None:
    return (tensor.nbytes, int(tensor.is_pinned())) if tensor.is_cpu else None


_calls: Final = itertools.count()
"""Numbers of this process's collectives, by which those of several ranks are matched."""


def _collective(name: str) -> Callable[..., tuple[int, ...]]:
    def about(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        given = (*args, *kwargs.values())
        tensors = [one for each in given for one in (each if isinstance(each, list) else [each])]
        return _text(name), next(_calls), sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))

    return about


_COLLECTIVES: Final = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send", "recv"),
)


# --- All of them ------------------------------------------------------------------------------------------------------
def _changes() -> Iterator[tuple[Any, str, Any]]:
    """What is put in the place of torch's own: owner, name, value."""
    yield torch.nn.Module, "__call__", _module_call(torch.nn.Module.__call__)
    yield torch.nn.Module, "train", _train(torch.nn.Module.train)
    optimizer = torch.optim.Optimizer
    yield optimizer, "profile_hook_step", staticmethod(_optimizer_step(optimizer.profile_hook_step))
    for name in ("backward", "grad"):
        yield torch.autograd, name, _wrapped(getattr(torch.autograd, name), ev.BACKWARD, lambda *_, **__: ())
    yield torch.Tensor, "to", _wrapped(torch.Tensor.to, ev.TO_DEVICE, _to_device)
    yield torch.Tensor, "cuda", _wrapped(torch.Tensor.cuda, ev.TO_DEVICE, _copied)
    save = _wrapped(torch.save, ev.SAVE, _checkpoint("torch.save"))
    yield from ((home, "save", save) for home in (torch, torch.serialization))
    with contextlib.suppress(ImportError):  # before Transformers and Accelerate take its function
        home = importlib.import_module("safetensors.torch")
        yield home, "save_file", _wrapped(home.save_file, ev.SAVE, _checkpoint("safetensors"))
    for name in _COLLECTIVES:
        for home in HOMES:
            if (plain := getattr(home, name, None)) is not None:
                yield home, name, _wrapped(plain, ev.COLLECTIVE, _collective(name))


@contextlib.contextmanager
def step_parts_recorded() -> Iterator[None]:
    """While this is open, the parts of training steps are recorded, in this process's loops."""
    _forget()
    outer, LoopThread.recorded = LoopThread.recorded, True
    with substituted(*_changes()):
        try:
            yield
        finally:
            end_validation()
            LoopThread.recorded = outer
