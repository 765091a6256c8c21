"""Build the documentation site: `python docs/build.py [DIR]` writes it to DIR, `build/site` by default.

`pip install -e '.[docs]'` installs what it needs. Pages are the Markdown files of this folder and of the
project; the reference is made from the tables of the package. A link to code leads to a page that shows the file.
Warnings are errors. The site loads nothing from another host.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import minidl
from minidl import cli
from minidl.check import RULES
from minidl.check.joint_rules import JOINT_RULES
from minidl.companion.page import html
from minidl.explore.guards import GUARDS, OF_THREADS
from minidl.hang.rules import table
from minidl.prove.lab.table import cases
from minidl.tracefile.events import EVENTS, Field, Phase

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changes.md",
    "SECURITY.md": "project/security.md",
    "notebooks/README.md": "tutorials/course.md",
    "traces/README.md": "reference/recordings.md",
    "minidl/photos/README.md": "project/photographs.md",
} | {
    str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))
}  # fmt: skip
"""Files of the project that are pages, and where they stand in the site."""

LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


class Site:
    """The sources of the site in a folder, from which it is built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.linked: dict[Path, str] = {}  # files and folders that are no pages, and their places in the site

    def write(self, place: str, text: str) -> None:
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def page(self, source: str) -> None:
        """A Markdown file of the project, whose links lead to places of the site."""
        place, around = PAGES[source], (ROOT / source).parent

        def moved(link: re.Match[str]) -> str:
            if "://" in link[1]:
                return link[0]
            target = self.place_of((around / link[1]).resolve())
            return f"]({os.path.relpath(target, Path(place).parent)}{link[2] or ''})"

        self.write(place, LINK.sub(moved, (ROOT / source).read_text()))

    def place_of(self, target: Path) -> str:
        """Where a file of the project is in the site: a page, a picture, a notebook's page, or a page of code."""
        name = str(target.relative_to(ROOT))
        if name in PAGES:
            return PAGES[name]
        if target.suffix in (".png", ".svg"):
            place = f"pictures/{target.name}"
        elif target.suffix == ".ipynb":
            place = f"tutorials/{target.stem}.html"
        else:
            place = f"source/{name.removesuffix('.py')}.md"
        self.linked[target] = place
        return place

    def add_linked(self) -> None:
        """What the pages link to."""
        done: set[Path] = set()
        while left := sorted(self.linked.keys() - done):  # a notebook links to further ones
            for target in left:
                self.add(target, self.linked[target])
            done.update(left)

    def add(self, target: Path, place: str) -> None:
        """A file or a folder that is no page of its own."""
        if target.suffix in (".png", ".svg"):
            (self.folder / place).parent.mkdir(exist_ok=True)
            shutil.copy(target, self.folder / place)
        elif target.suffix == ".ipynb":
            self.notebook(target, place)
        elif target.is_dir():
            files = sorted(path.name for path in target.iterdir() if path.suffix in (".py", ".md", ".ini"))
            self.write(place, f"# {target.relative_to(ROOT)}/\n\n" + "".join(f"- `{name}`\n" for name in files))
        else:
            self.write(place, f"# {target.relative_to(ROOT)}\n\n````python\n{target.read_text()}````\n")

    def notebook(self, path: Path, place: str) -> None:
        """A page of a notebook with the outputs that it was saved with."""
        from nbconvert import HTMLExporter

        def moved(link: re.Match[str]) -> str:
            target = (path.parent / link[1]).resolve()
            if not target.is_relative_to(ROOT) or not target.exists():
                return link[0]
            found = re.sub(r"\.md$", ".html", self.place_of(target))
            return f'href="{os.path.relpath(found, Path(place).parent)}{link[2] or ""}"'

        body, _ = HTMLExporter(embed_images=True).from_filename(path)  # type: ignore[no-untyped-call]
        body = re.sub(r'<script[^>]*\bsrc="https?:[^>]*>\s*</script>|<link[^>]*href="https?:[^>]*>', "", body)
        self.write(place, re.sub(r'href="([\w./-]+\.(?:py|ipynb|md|svg))(#[^"]*)?"', moved, body))


# --- The reference, from the package's tables -------------------------------------------------------------------------
def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def help_of(command: str) -> str:
    said = subprocess.run(
        [sys.executable, "-m", "minidl", command, "--help"], capture_output=True, text=True, check=True
    )
    return said.stdout


def rows(head: Iterable[str], body: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in body:
        yield f"| {' | '.join(cell(text) for text in row)} |"


def commands() -> Iterator[str]:
    """Each command with its help, as the terminal prints it."""
    yield "# The command line\n"
    os.environ["COLUMNS"] = "100"
    for group, members in cli.GROUPS.items():
        yield f"## {group.capitalize()}\n"
        for command in members:
            name = command.name
            yield f"### minidl {name}\n\n{sentence(command.about)}\n"
            yield f"````text\n{help_of(command.name)}````\n"


def field(one: Field) -> str:
    return f"`{one.name}`" + (f" ({one.enum.__name__ if one.enum else one.unit})" if one.enum or one.unit else "")


def events() -> Iterator[str]:
    """Each event with its fields, its meaning, and where it is emitted."""
    yield "# Events\n\nA span has two events: its begin, and its end.\n"
    ends = {event.name: event for event in EVENTS.values() if event.phase is Phase.END}
    for event in EVENTS.values():
        if event.phase is Phase.END:
            continue
        yield f"## {event.name}\n\n{sentence(event.meaning)}\n"
        own = [("kind", f"{'instant' if event.phase is Phase.INSTANT else 'span'} in lane {event.track.value}")]
        own += [("code", ", ".join(str(e.code) for e in (event, ends.get(event.name)) if e is not None))]
        own += [("of", " and ".join(["a task"] * event.has_task + ["a worker"] * event.has_worker) or "the loader")]
        own += [("fields", ", ".join(map(field, event.fields)))] * bool(event.fields)
        if (end := ends.get(event.name)) is not None and end.fields:
            own += [("fields of the end", ", ".join(map(field, end.fields)))]
        own += [("here", f"`{event.ours}`")]
        own += [("in torch", f"`{event.upstream}`" if event.upstream else "no such step")]
        own += [("article", event.article)] * bool(event.article)
        yield from rows(own[0], own[1:])
        yield ""


def rules() -> Iterator[str]:
    """The checker's rules, the joint rules, the guards, the doctor's rules."""
    yield "# Rules\n\n## Of the checker\n\n`minidl check` demands of every trace:\n"
    yield from rows(("rule", "demand"), ((f"`{name}`", demand) for name, demand in RULES.items()))
    yield "\n## Between the actors\n\nAn actor may do an act only if one of these facts holds:\n"
    yield from rows(
        ("rule", "demand", "otherwise", "article"),
        ((f"`{rule.name}`", rule.demand, rule.why, rule.article) for rule in JOINT_RULES),
    )
    yield "\n## Guards\n\n`minidl explore` removes each, and finds a run that fails without it:\n"
    guards = (GUARDS | OF_THREADS).items()
    yield from rows(("guard", "what it does"), ((f"`{name}`", guard.purpose) for name, guard in guards))
    yield "\n## Of the doctor\n\nThe first that applies to the chain of waits names the cause:\n"
    yield from rows(("cause", "it is not, if"), ((rule.about, rule.counter) for rule in table.RULES))


def lab() -> Iterator[str]:
    """The failures that the lab has as programs."""
    yield "# Failures of the field\n\n`minidl lab NAME` runs one and asks the doctor.\n"
    for name, case in sorted(cases().items()):
        yield f"## {name}\n\n{sentence(case.title)}\n"
        yield from rows(("users see", case.users_see), [("fix", case.fix), ("reported in", f"<{case.thread}>")])
        yield ""


def api() -> Iterator[str]:
    """Every public name, from its docstring."""
    yield "# Python\n"
    for name in minidl.__all__:
        if name.startswith("_"):
            continue
        home = getattr(minidl, name).__module__
        yield f"::: {home}.{name}\n    options: {{heading: minidl.{name}, toc_label: {name}}}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "build" / "site", metavar="DIR")
    out = parser.parse_args().out
    site = Site(ROOT / "build" / "pages")
    shutil.rmtree(site.folder, ignore_errors=True)
    for source in PAGES:
        site.page(source)
    for made in (commands, events, rules, lab, api):
        site.write(f"reference/{made.__name__}.md", "\n".join(made()) + "\n")
    site.add_linked()
    html(site.folder / "companion.html")
    shutil.copy(ROOT / "docs" / "mkdocs.yml", site.folder.parent / "mkdocs.yml")
    tool = Path(sys.executable).with_name("zensical")
    done = subprocess.run([str(tool), "build", "--clean", "--strict"], cwd=site.folder.parent, check=False)
    if done.returncode == 0 and out != site.folder.parent / "site":
        shutil.copytree(site.folder.parent / "site", out, dirs_exist_ok=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
