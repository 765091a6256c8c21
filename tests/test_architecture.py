"""The package's structure: import directions, pure modules, what an import loads, what the event table names."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import multiprocessing
import re
import sys
from collections import Counter
from pathlib import Path

import programs
import pytest
import structure

from minidl.tracefile.events import EVENTS

PACKAGE = Path(__file__).parent.parent / "minidl"

ORDER = (
    ("", "articles references guides live_repr process_stat usable"),
    ("", "mini"),
    ("", "_libstdcxx"),
    ("wire", "messages errors atomic signal_handling tensors message queues"),
    ("data", "worker_info dataset sampler distributed collate fetch"),
    (
        "loader",
        "dispatcher protocol driver progress ports pin_memory worker crew liveness iterators threads dataloader",
    ),
    ("arena", "farewell pickling packets arena arena_queue transport"),
    ("resume", "frameworks position stateful"),
    ("device", "sim nest"),
    ("record", "harmless cpu_time"),
    ("auto", "__init__ choice measuring loading"),
    ("", "dataloader"),
    ("device", "streams loader augment"),
    ("", "terminal"),
    (
        "tracefile",
        "events arrays format words stack_samples facts attachments watched packs folded files ranks process spans "
        "batches order reader loaders calls open_spans tail profile members join",
    ),
    (
        "record",
        "patches bracketing pauses recorder made_up stack_dumps stack_samples watchdog forks group "
        "functions "
        "indices datasets draws fetching shared device_clock consumer_stream step_parts loader_spans slabs sampling "
        "spans decisions channels device_stream ports session handover "
        "observed_loader observed_worker observed_single observed_channels observe clocks",
    ),
    ("", "hardening"),
    ("playback", "actors state missing inferred follower words stepper"),
    (
        "speed",
        "intervals stages device_use ledger cpu_use own_step wall_clock advice hot_spots reasons verdict "
        "transport_use transport_costs side",
    ),
    ("speed.plan", "machine settings loading recorded predicted fitting written"),
    ("speed", "more_workers critical_path diff gate findings passes audit_rules audit"),
    ("hang", "limits"),
    ("hang.evidence", "model syscalls proc descriptors machine processes stacks collect waits"),
    ("hang", "places finding remedies case chain"),
    ("hang.rules", "judgement activity processes motion parties threads semaphores kernel table"),
    ("hang", "outcomes sentence diagnose life job allowed live recent snapshot consult"),
    ("hang.headline", "run_context held_up bounds hangs ends uneven __init__"),
    ("job", "each step_table digests meetings lateness report compare log_to remote live_job"),
    (
        "check",
        "view actors joint_rules joint device dispatch recording replayed resumption slices report slabs spans tasks "
        "__init__ ranks",
    ),
    ("", "prediction"),
    (
        "views",
        "colours frame layout scene drawn attached export chrome perfetto text sampled page picture plan_picture "
        "queries live_page summary heat_map job_page viewer replay_page replay_terminal top",
    ),
    ("", "merge __init__ stand_in run tune doctor demo"),
    ("watch", "vitals dumps folding looks digest watcher"),
    ("startup", "sitecustomize"),
    (
        "explore",
        "configurations guards world ablated decisions steps loader pin_thread workers model threads search trace "
        "follow diagrams ablations slab_life __init__",
    ),
    ("prove", "kept sessions"),
    ("prove.lab", "faulty"),
    ("companion", "rows phrases shares coverage drift reading search moments pictures page text serve __init__"),
    (
        "prove.bench",
        "child machine memory own_thread pairs events files loader device samplers states transports planned chosen "
        "__init__",
    ),
    ("prove.recordings", "images training scenes table suite one __main__"),
    ("prove.faults", "cells program threads serve runner __init__"),
    ("prove.lab", "case"),
    (
        "prove.lab.cases",
        " ".join(sorted(path.stem for path in (PACKAGE / "prove" / "lab" / "cases").glob("[a-z]*.py"))),
    ),
    ("prove.lab", "guard_programs ablation table runner score __init__"),
    ("", "tour commands cli __main__"),
)
"""All modules, by folder. A module imports only from modules that stand before it, so no circle can exist.

Imports inside functions and imports for type checkers count too. To add or rename a module, edit its folder's line. If
the order is right and an import is not, move what is imported.
"""

KNOWN_DOUBLE = {
    "DataLoader": ["dataloader", "loader.dataloader"],  # the first adds to the second what torch's has not
    "Place": ["loader.progress", "tracefile.events"],
}
"""Class names that several modules still define. Never add one."""

NOT_LOADED = {
    "hang", "tracefile", "job", "record", "check", "speed", "views", "watch", "playback", "explore", "prove",
    "companion",
}  # fmt: skip
"""Folders that a program without a trace does not load."""

PURE = {"live_repr", "loader.dispatcher", "loader.driver", "loader.protocol", "resume.position", "wire.messages"}
PURE_STDLIB = {
    "__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools", "reprlib",
    "typing",
}  # fmt: skip
"""The parts of the standard library that have no clock, file, process or random state."""

POSITION = {
    f"{folder}.{name}" if folder else name: position
    for position, (folder, name) in enumerate((folder, name) for folder, names in ORDER for name in names.split())
}
FILES = structure.modules(PACKAGE)
MODULES = sorted(module for module in FILES if not module.endswith("__init__"))


def source_of(module: str) -> Path:
    return PACKAGE / Path(*module.split(".")).with_suffix(".py")


def line_of(module: str) -> str:
    """Name the line of ORDER that a module belongs to."""
    folder, _, name = module.rpartition(".")
    return f"{name!r} in ORDER's line of {f'folder {folder!r}' if folder else 'root modules'}"


def test_order_lists_each_module_once() -> None:
    listed = [(folder, name) for folder, names in ORDER for name in names.split()]
    assert len(listed) == len(set(listed)) == len(POSITION), "ORDER lists a module twice"
    missing, gone = sorted(FILES.keys() - POSITION.keys()), sorted(POSITION.keys() - FILES.keys())
    assert not missing, f"add {', '.join(map(line_of, missing))}, after all that it imports"
    assert not gone, f"delete {', '.join(map(line_of, gone))}: no such file, or it has no code"


@pytest.mark.heavy
def test_imports_run_one_way() -> None:
    last = len(POSITION)
    wrong = [
        f"minidl.{module} imports {target}, after it in ORDER"
        for module, targets in sorted(structure.read_imports(PACKAGE).items())
        for target in sorted(targets)
        if POSITION.get(target, -1) > POSITION.get(module, last)
    ]
    assert not wrong


@pytest.mark.heavy
def test_folders_import_one_way() -> None:
    """What a module of a folder imports of another folder that imports of the first is in the wrong one of them."""
    folders: dict[str, set[str]] = {}
    for module, targets in structure.read_imports(PACKAGE).items():
        mine, others = module.split(".")[:-1][:1], {target.split(".")[0] for target in targets if "." in target}
        for folder in mine:
            folders.setdefault(folder, set()).update(others - {folder})
    graphlib.TopologicalSorter(folders).prepare()  # raises CycleError, which lists the folders of a circle


@pytest.mark.heavy
def test_no_class_name_is_defined_twice() -> None:
    whole_by_themselves = ("mini", "prove.lab.cases.")
    shared = {
        name: sorted(module for module in where if not module.startswith(whole_by_themselves))
        for name, where in structure.classes(PACKAGE).items()
    }
    doubles = {name: where for name, where in shared.items() if len(where) > 1}
    new = {name: where for name, where in doubles.items() if not set(where) <= set(KNOWN_DOUBLE.get(name, []))}
    assert not new, f"class names with several definitions; rename or merge: {new}"
    stale = {name: where for name, where in KNOWN_DOUBLE.items() if doubles.get(name) != where}
    assert not stale, f"KNOWN_DOUBLE is longer than the truth; now { ({name: doubles.get(name) for name in stale}) }"


@pytest.mark.parametrize("module", sorted(PURE))
def test_decisions_are_pure(module: str) -> None:
    imported = structure.imported_names(source_of(module))
    pure = tuple(f"minidl.{name}." for name in (*PURE, "wire.atomic"))  # whose steps are the caller's own
    roots = {name.split(".")[0] for name in imported if not name.startswith(pure)}
    assert roots <= PURE_STDLIB, f"minidl.{module} only decides, but imports {sorted(roots - PURE_STDLIB)}"


@pytest.mark.live
def test_importing_needs_torch_and_numpy_alone() -> None:
    """A function that needs more imports it when it is called."""
    theirs = programs.loaded_after("import numpy.random, torch, torch.utils.data, torch.multiprocessing")
    ours = programs.loaded_after("\n".join(f"import minidl.{name}" for name in MODULES if name != "__main__"))
    roots, known = ({name.split(".")[0] for name in names} for names in (ours, theirs))
    assert roots - known - set(sys.stdlib_module_names) == {"minidl"}


@pytest.mark.live
def test_a_loader_loads_nothing_that_records_or_reads_traces() -> None:
    names = programs.loaded_after("import minidl; minidl.DataLoader")
    loaded = {name.split(".")[1] for name in names if name.startswith("minidl.")}
    assert not loaded & NOT_LOADED, f"minidl.DataLoader loads {sorted(loaded & NOT_LOADED)}: import it where it is used"


# --- The tests' own layout --------------------------------------------------------------------------------------------
TESTS = Path(__file__).parent
OTHER_TESTS = {
    "": "architecture budget core_coverage examples findings holdings limits live namesakes on_gpu package readme "
    "site subclasses",
    "companion": "companion_page companion_text",
    "clients": "clients correct planted state table tuned",
    "prove/bench": "bench_device",
    "data": "containers",
    "device": "pin_memory_differential",
    "prove/lab": "lab_runner lab_table",
    "notebooks": "course exercises grading labs notebooks pages schedules texts",
    "playback": "replay",
    "hang": "headline",
    "loader": "layers shutdown thread_peers",
    "speed": "slow_programs",
    "record": "interruptions observe_arena observe_differential pairs ring tracing",
    "views": "damaged instrument replay_page_of_five same_facts",
    "wire": "transport",
}
"""Test files that are named after no module: about the project, about several modules, or a module's second file."""


def test_each_test_file_is_named_after_what_it_tests() -> None:
    """Either a module (tests/record/test_ranks.py: minidl/record/ranks.py) or a folder as a whole."""
    misnamed, stale = [], []
    for path in sorted(TESTS.rglob("test_*.py")):
        folder, name = path.parent.relative_to(TESTS), path.stem.removeprefix("test_")
        module = (PACKAGE / folder / f"{name}.py").is_file() or (folder.name == name and (PACKAGE / folder).is_dir())
        other = name in OTHER_TESTS.get("" if folder == Path() else str(folder), "").split()
        misnamed += [str(path.relative_to(TESTS))] * (not module and not other)
        stale += [str(path.relative_to(TESTS))] * (module and other)
    assert not misnamed, f"no module has the name of {misnamed}: rename the files, or add them to OTHER_TESTS"
    assert not stale, f"delete from OTHER_TESTS: {stale}"


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest cannot collect two files of one name in folders that are no packages."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_import_nothing_from_each_other() -> None:
    """What they share is in tests/support."""
    modules = {path.stem for path in TESTS.rglob("test_*.py")} | {"conftest"}
    imported = re.compile(r"^ *(?:import|from) (\w+)", re.MULTILINE)
    wrong = {
        str(path.relative_to(TESTS)): sorted(found)
        for path in sorted(TESTS.rglob("*.py"))
        if (found := set(imported.findall(path.read_text())) & modules)
    }
    assert not wrong, f"move what they share to tests/support: {wrong}"


def test_tests_have_the_same_names_in_each_process(request: pytest.FixtureRequest) -> None:
    """A name with an object's address differs, and pytest-xdist refuses to run such tests."""
    named = {item.nodeid for item in request.session.items if " at 0x" in item.nodeid}
    assert not named, "give these cases ids without an address"


# --- The event table --------------------------------------------------------------------------------------------------
@functools.cache
def names_in(path: Path) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in structure.statements(structure.parsed(path)) if isinstance(node, kinds))


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def upstream_files(module: str) -> list[Path]:
    """Find the files of an event's upstream module in torch.utils.data, torch.multiprocessing or multiprocessing."""
    first, *rest = module.split(".")
    if first == "multiprocessing":
        homes = [folder_of("torch") / "multiprocessing", Path(multiprocessing.__file__).parent]
        found = [home.joinpath(*rest).with_suffix(".py") for home in homes]
    else:
        found = [folder_of("torch").joinpath("utils", "data", first, *rest).with_suffix(".py")]
    return [path for path in found if path.is_file()]


def test_each_event_stands_for_code_that_exists() -> None:
    for event in EVENTS.values():
        for reference in event.ours.split(", "):
            module, name = reference.split(":")
            files = upstream_files(module) if module.startswith("multiprocessing.") else [source_of(module)]
            assert any(name in names_in(path) for path in files), f"{reference}: no such function or class in minidl"
        if event.upstream:
            module, name = event.upstream.split(":")
            files = upstream_files(module)
            assert any(name in names_in(path) for path in files), f"{event.upstream}: not in {files or 'torch'}"
