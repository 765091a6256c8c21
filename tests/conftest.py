"""What holds for every test: it leaves nothing behind, and only a test marked `live` starts processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from coverage import Coverage
from holdings import Holdings
from live import no_process

from minidl.device import sim
from minidl.record.observed_channels import joins_the_terminated

pytest_plugins = ["shared_fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    """Let `-n 2 --dist loadfile` take the files in their order, not those with most tests first.

    The files that take longest have few tests: one process would be left with them at the end.
    """
    config.option.loadscopereorder = False  # xdist's option, if it is installed
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it


TESTS = Path(__file__).parent
CORE = Coverage(config_file=str(TESTS.parent / "pyproject.toml")).get_option("run:include")
"""The files of the loader's core, as patterns."""
STARTED = pytest.StashKey[list[str]]()
GRACE = 10.0
"""Seconds that something may take to end after its test; an ending worker is not a leak."""

for name, examples in (("few", 30), ("many", 1000)):  # `--hypothesis-profile=many` tries more than a usual run
    hypothesis.settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )  # how long one example takes is the machine's affair: it may be busy
hypothesis.settings.load_profile("few")


def of_the_core(test: Path) -> bool:
    """Whether a file of tests mirrors a module of the core, as `transport/test_queues.py` does."""
    mirrored = Path("minidl", test.parent, test.name.removeprefix("test_"))
    return any(mirrored.match(pattern) for pattern in CORE)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the core's own tests, which coverage measures; it would double the time of the rest.

    Leave out the slow ones, unless `-m` says something about them, or a test is asked for by its name.
    """
    for item in items:
        if of_the_core(item.path.relative_to(TESTS)):
            item.add_marker(pytest.mark.core)
    named = any("::" in argument for argument in config.args)
    if "slow" not in config.option.markexpr and not named:
        slow = [item for item in items if item.get_closest_marker("slow") is not None]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_collection_finish() -> None:
    """Compile the simulated accelerator, once for all processes: a test that is not `live` starts no compiler.

    torch has room for one accelerator in a process: with MINIDL_TEST_GPU=1 it is the GPU, and a test that loads `sim`
    is skipped.
    """
    if os.environ.get("MINIDL_TEST_GPU") == "1":
        sim.load = functools.partial(pytest.skip, "MINIDL_TEST_GPU=1: the GPU is tested")
    with contextlib.suppress(sim.NoCompilerError):
        sim.built()


def pytest_sessionfinish() -> None:
    """Save what coverage has measured here: what an exiting test process writes last may be lost."""
    if (running := Coverage.current()) is not None:
        running.save()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that starts a process and is not marked `live`; its fixtures count as part of it."""
    with contextlib.ExitStack() as stack:
        if item.get_closest_marker("live") is None:
            item.stash[STARTED] = stack.enter_context(no_process(item.nodeid))
        return (yield)


@contextlib.contextmanager
def skipped_without_a_compiler() -> Iterator[None]:
    """Skip a test that needs the simulated accelerator where it cannot be compiled; a defect in it is an error."""
    try:
        yield
    except sim.NoCompilerError as error:
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """A fixture may need it."""
    with skipped_without_a_compiler():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """The test may need it."""
    with skipped_without_a_compiler():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_have_imported_is_not_collected() -> None:
    """A collection would look at all of it, for half a second after each test, once matplotlib is loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def starts_no_process_unless_live(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that has caught and passed over the error of `no_process`."""
    yield
    assert not request.node.stash.get(STARTED, []), "the test starts a process: mark it with pytest.mark.live"


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a shared-memory file or descriptors behind."""
    before = Holdings.now()
    yield
    # An iterator that only the collector can reach shuts its workers down when it is collected.
    if request.node.get_closest_marker("live") is None and not Holdings.now().beyond(before):
        return
    gc.collect()
    deadline = time.monotonic() + GRACE
    while (grown := Holdings.now().beyond(before)) and time.monotonic() < deadline:
        if not joins_the_terminated():  # torch 2.11 leaves its terminated workers to whoever asks next
            multiprocessing.active_children()
        time.sleep(0.01)
    assert not grown, f"the test left behind: {grown}"
