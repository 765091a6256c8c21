"""The findings about torch: each page has its program, its patch applies to torch, and the program shows both."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidl import cli
from minidl.explore.decisions import Driving
from minidl.explore.guards import GUARDS, OURS, UPSTREAM
from minidl.explore.model import Model
from minidl.explore.search import explore
from minidl.loader.driver import Driver, Evidence

FOLDER = Path(__file__).parents[1] / "docs" / "findings"
sys.path.insert(0, str(FOLDER))
import cost  # noqa: E402
import drifts  # noqa: E402  # the scripts of that folder
import patched  # noqa: E402
import run_all  # noqa: E402

USUAL = {"interrupted-epoch", "joins-in-turn", "unpicklable-batch"}
"""The ones that are run each time: they take the least time."""

of_this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or sys.version_info[:2] != (3, 11),
    reason="the patches are against torch 2.13, and one against Python 3.11",
)


REFUSED = """
from torch.utils.data import DataLoader

class Raises(list):
    def __getitem__(self, index):
        class Own(Exception): ...
        raise Own("the dataset's words")

try:
    list(DataLoader(Raises(range(2)), num_workers=1, timeout=9))
except RuntimeError as error:
    print(error)
"""


PATCHES = sorted({run_all.patch_of(name) for name in run_all.NAMES} - {""})


@of_this_torch
def test_the_list_by_article_is_what_its_script_prints() -> None:
    assert (FOLDER / "drifts.md").read_text() == "\n".join(drifts.page()).rstrip() + "\n", "run drifts.py again"


def test_the_table_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| \[[\w-]+\]\(([\w-]+)/README\.md\) \|", (FOLDER / "holes.md").read_text(), re.M)
    assert sorted(rows) == run_all.NAMES


WAYS = {
    "explorer": "the explorer, in ",
    "faults": "the fault matrix: ",
    "reading": "reading the code|the question what",
}
"""Method, as the tables name it -> how a page's "found by" says it."""


def test_the_tables_and_the_pages_agree_on_who_found_what() -> None:
    table = (FOLDER / "holes.md").read_text()
    rows = re.findall(r"\(([\w-]+)/README\.md\) \|[^|]*\| ([^|]*) \|", table)
    found = {name: by.split(", ") for name, by in rows}
    for name in run_all.NAMES:
        page = (FOLDER / name / "README.md").read_text().partition("| found by |")[2].partition("\n")[0]
        assert found[name] == [way for way, words in WAYS.items() if re.search(words, page)], name
    method = (FOLDER / "method.md").read_text()
    for way in WAYS:
        of_it, alone = (sum(way in by and len(by) <= most for by in found.values()) for most in (9, 1))
        assert re.search(rf"^\| {way} \|.*\| {of_it} \| {alone} \|$", method, re.M), way


@pytest.mark.parametrize("name", run_all.NAMES)
def test_a_program_is_short_and_needs_torch_alone(name: str) -> None:
    text = (FOLDER / name / "program.py").read_text()
    assert len(text.splitlines()) <= 40
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"torch"}


def patched_in_the_explorer(name: str) -> tuple[list[str], list[str], str]:
    """Of a page: the guards that its command gives torch's protocol, those that are this patch's, and the states."""
    text = (FOLDER / name / "README.md").read_text().partition("**The patch in the explorer**")[2]
    prose, _, command = text.partition("```sh")
    mine = re.findall(r"`([\w-]+)`", prose)
    given = re.findall(r"--with-guard ([\w-]+)", command)
    found = re.search(r"([\d,]+) states", prose)
    return given, mine or given, found[1] if found else ""


EXPLORED = sorted(name for name in run_all.NAMES if patched_in_the_explorer(name)[0])


def test_each_hole_of_the_explorer_is_explored_with_its_patch() -> None:
    pages = {name: (FOLDER / name / "README.md").read_text() for name in run_all.NAMES}
    found = {name for name, page in pages.items() if "| found by | the explorer" in page}
    assert {run_all.patch_of(name) for name in found} == set(EXPLORED)
    needed = {guard for name in found for guard in re.findall(r"the explorer, in .* guard `([\w-]+)`", pages[name])}
    assert needed == {guard.name for guard in GUARDS.values() if not guard.upstream}
    assert needed == {guard for name in EXPLORED for guard in patched_in_the_explorer(name)[1]}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "full", [pytest.param([], id="merged"), pytest.param(["--full"], id="full", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", EXPLORED)
def test_the_patched_protocol_has_no_bad_run_where_the_hole_was(
    name: str, full: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given, mine, states = patched_in_the_explorer(name)

    def explored(guards: list[str]) -> int:
        named = [word for guard in guards for word in ("--with-guard", guard)]
        return cli.main(["explore", "--upstream", *full, *named])

    assert explored(given) == cli.OK
    together = capsys.readouterr().out.splitlines()[-1].split()
    assert together[1] == states or not full
    if rest := [guard for guard in given if guard not in mine]:
        configurations = {c for guard in mine for c in GUARDS[guard].where}
        protocol = UPSTREAM.having(*(GUARDS[guard].field for guard in rest))
        assert any(explore(Model(c, protocol, reduced=not full)).bad for c in configurations)


class FailsForEachDeadWorker(Driver):
    """As the patch of exhausted-worker decides: by the exit code of a worker whose data has ended, and by no lock."""

    def _failed(self, evidence: Evidence) -> list[int]:
        return super()._failed(dataclasses.replace(evidence, jammed=True))


def test_an_exit_code_alone_is_enough_to_find_an_exhausted_worker() -> None:
    (killed,) = GUARDS["leavers-checked"].where
    driving = Driving(killed, OURS, driver=FailsForEachDeadWorker)
    assert explore(Model(killed, OURS, reduced=True, driving=driving)).bad == []


def test_the_cost_is_that_of_pairs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = iter([100, 130, 150, 110, 100, 120])  # none, all; all, none; none, all
    monkeypatch.setattr(cost, "spent", lambda patch: next(runs))
    cost.main(["all"])
    assert capsys.readouterr().out.split() == ["all", "100", "us,", "+30", "(+20", "to", "+40)"]


@pytest.mark.live
@pytest.mark.slow
@of_this_torch
@pytest.mark.parametrize("patch", ["all", "hardened"])
def test_the_cost_is_measured_with_each_patch(patch: str) -> None:
    assert cost.spent(patch) > 0


PATCHED = {
    "usage: python patched.py PATCH": [],
    "no patch 'lost-result': choose from none, all, ": ["lost-result", "x.py"],
}


@pytest.mark.parametrize(("words", "arguments"), PATCHED.items())
@of_this_torch
def test_patched_says_what_it_needs(words: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["patched.py", *arguments])
    with pytest.raises(SystemExit, match=words):
        runpy.run_path(str(FOLDER / "patched.py"), run_name="__main__")


@pytest.mark.live
@of_this_torch
@pytest.mark.parametrize("name", [*PATCHES, "all"])
def test_a_patch_applies(name: str, tmp_path: Path) -> None:
    patched.overlay(tmp_path, patched.patches(name))
    changed = [path for path in tmp_path.rglob("*.py") if path.name != "sitecustomize.py"]
    assert changed
    for path in changed:
        compile(path.read_text(), path, "exec")


@pytest.mark.live
@of_this_torch
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in run_all.NAMES]
)
def test_a_program_shows_the_hole_and_is_healed_by_the_patch(name: str) -> None:
    assert run_all.patched(name, "none")[0].startswith("hole: ")
    if patch := run_all.patch_of(name):
        assert run_all.patched(name, patch)[0].startswith("healed")


@pytest.mark.live
@of_this_torch
@pytest.mark.parametrize("patches", ["unpicklable-batch", "all"])
def test_an_error_that_pickle_refuses_keeps_its_words(tmp_path: Path, patches: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(REFUSED)
    command = [sys.executable, str(FOLDER / "patched.py"), patches, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "the dataset's words" in done.stdout, done.stderr
