"""The README files and the guides: each link leads to a file, each command and option exists, each import works."""

from __future__ import annotations

import itertools
import pkgutil
import re
import shlex
from pathlib import Path

import minidl
from minidl import cli
from minidl.hang.headline import headline
from minidl.tracefile.reader import read_trace

ROOT = Path(__file__).parents[1]
GUIDES = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))
READMES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("traces/README.md", "notebooks/README.md", "minidl/photos/README.md", *GUIDES),
)
TEXT = "\n".join((ROOT / name).read_text() for name in READMES)


def links() -> list[tuple[str, str]]:
    return [
        (name, target)
        for name in READMES
        for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text())
        if "://" not in target
    ]


def test_each_link_leads_somewhere() -> None:
    for readme, target in sorted(set(links())):
        path, _, anchor = target.partition("#")
        place = (ROOT / readme).parent / path if path else ROOT / readme
        assert place.exists(), f"{readme}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def command_lines() -> list[str]:
    """Each `minidl ...` in code, without its comment."""
    spans = re.findall(r"`([^`\n]+)`", TEXT)
    blocks = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
    found = [re.search(r"(?:^|&& |-m )minidl (?!COMMAND)(.*)", text.split(" #")[0]) for text in spans + blocks]
    return sorted({match.group(1).strip() for match in found if match})


def test_command_lines_are_found() -> None:
    assert {"demo", "summary traces/first", "run --observe train.py"} <= set(command_lines())


def test_each_command_line_parses() -> None:
    parser = cli.parser()
    for line in command_lines():
        words = shlex.split(line)
        if line in ("--help", "--version"):
            continue
        if words[1:] or words[0] in ("demo", "events"):
            assert parser.parse_args(words).act is cli.COMMANDS[words[0]].act, line
        assert words[0] in cli.COMMANDS


def test_each_option_that_is_named_alone_exists() -> None:
    options = {name for command in cli.COMMANDS.values() for names, _ in command.arguments for name in names}
    options |= {"--help", "--version", "--list", "--only", "--device"}  # the last three also of minidl.prove.recordings
    for option in re.findall(r"`(--[a-z-]+)[ `]", TEXT):
        assert option in options, option


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def runs_of_eight_words(page: str) -> set[str]:
    """Each eight words in a row within a sentence or a cell, without code, links' targets and marks."""
    text = re.sub(r"```.*?```|<!--.*?-->|`[^`]*`|\]\([^)]*\)", " ", page, flags=re.DOTALL)
    parts = (re.findall(r"\w[\w'-]*", part) for part in re.split(r"[.!?:;|]\s|\n\s*\n", text.lower()))
    return {" ".join(words[at : at + 8]) for words in parts for at in range(len(words) - 7)}


def test_no_sentence_stands_in_two_pages() -> None:
    pages = {name: runs_of_eight_words((ROOT / name).read_text()) for name in READMES}
    assert sum(map(len, pages.values())) > 2000
    twice = {(a, b): sorted(pages[a] & pages[b]) for a, b in itertools.combinations(pages, 2) if pages[a] & pages[b]}
    assert twice == {}


def test_the_citation_has_the_packages_version() -> None:
    assert f"version: {minidl.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_each_command_is_named_in_a_guide() -> None:
    assert [name for name in cli.COMMANDS if f"minidl {name}" not in TEXT] == []


def test_each_variable_of_the_environment_is_in_its_page() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "minidl").rglob("*.py"))
    named = set(re.findall(r"\bMINIDL_[A-Z_]*[A-Z]", code)) - {"MINIDL_RUN"}
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    assert set(re.findall(r"^\| `(MINIDL_\w+)`", page, re.M)) == named


def test_each_python_name_exists() -> None:
    for path in set(re.findall(r"\b(minidl(?:\.[A-Za-z_]+)+)\(", TEXT)):
        assert callable(pkgutil.resolve_name(path)), path


def test_each_file_that_a_command_runs_exists() -> None:
    for path in set(re.findall(r"\bpython (?:-m pytest )?(tests/[\w/.]+)", TEXT)):
        assert (ROOT / path).is_file(), path


def test_the_headline_that_is_shown_is_the_recordings() -> None:
    shown = re.findall(r"<!-- headline -->\n```\n(.*?)\n```", TEXT, re.S)
    lines = headline(read_trace(ROOT / "traces" / "worker-sigkilled.minidl")).lines()
    assert [text.split("\n") for text in shown] == [lines]
