"""The reading companion as one HTML page that needs nothing else: no network, no server, no other file.

Interface: `html()` -> Page; `html(path)` writes it. `companion.html` beside this file styles and moves it, within the
frame that all pages share; `content.html` is the markup of its parts, of which this module gives the data. All texts
stand in the page in every language; the root's attribute `data-lang` shows one. The source lines are those of this
package and of the torch that is installed when the page is made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

import minidl
from minidl.articles import ARTICLES, sections
from minidl.check.joint_rules import JOINT_RULES, JointRule
from minidl.companion import coverage, moments, pictures, search, shares
from minidl.companion.drift import drifts, drifts_of
from minidl.companion.phrases import told
from minidl.companion.reading import note, stops
from minidl.companion.rows import LANGUAGES, Entry, Translated, anchor_of, entries, read
from minidl.explore import diagrams
from minidl.explore.guards import GUARDS
from minidl.references import SourcePlace, places, source_line
from minidl.tracefile.events import EVENTS, Phase
from minidl.views.frame import Page, filled

if TYPE_CHECKING:
    from markupsafe import Markup

PARTS: Final = (*(f"a{number}" for number in ARTICLES), "path", "note", "drift", "files", "functions", "events")
"""Parts of the page, one of which is shown at a time."""


class CompanionPage(Page):
    """The companion as text."""

    height = 780
    shows = "reading companion of minidl"

    def __repr__(self) -> str:
        return f"<CompanionPage of {len(self):,} characters; html(path) writes it to a file>"


@overload
def html(path: None = None) -> CompanionPage: ...
@overload
def html(path: str | os.PathLike[str]) -> Path: ...
def html(path: str | os.PathLike[str] | None = None) -> CompanionPage | Path:
    """Return the page, or write it to `path` and return that. Raises RowError, MomentError, OSError."""
    import torch

    sources: dict[str, list[object]] = {}
    words = {key: Translated.of(fields).titles for key, fields in read("words.ini").items()}
    called: tuple[Callable[..., Any], ...] = (
        *(inline, address, release, told, rules_of, rows_of, by_module, moments.find, moments.heading_of),
        *(pictures.picture, diagram, shares.figure, shares.caption, places, source_line, drifts_of),
        *(coverage.events_of, coverage.purposes, coverage.meanings, coverage.without_row),
    )
    looked_up: dict[str, Any] = {function.__name__: function for function in called}
    page = filled(
        "companion.html",
        "minidl.companion",
        title="minidl: reading companion",
        versions=f"minidl {minidl.__version__}, torch {torch.__version__}",
        languages=LANGUAGES,
        codes={"Russian": "ru", "Chinese": "zh"},
        words=words,
        data={"sources": sources, "words": words, "search": search.for_page()},
        source=functools.partial(_source, sources),
        parts=PARTS,
        articles=ARTICLES,
        entries=list(entries().values()),
        stops=stops(),
        note=note(),
        drifts=drifts(),
        guards=GUARDS,
        events=[event for event in EVENTS.values() if event.phase is not Phase.END],
        compiled=coverage.COMPILED,
        events_without_row=coverage.EVENTS_WITHOUT_ROW,
        recorded=moments.TRACES.is_dir(),
        counterexample=counterexample,
        **looked_up,
    )
    return CompanionPage(page).written(path)


# --- What the templates call ------------------------------------------------------------------------------------------
def inline(text: str) -> Markup:
    """Return a text as HTML: `code` between backticks, and citations of sections as links."""
    from markupsafe import Markup, escape

    def link(citation: re.Match[str]) -> str:
        key = citation[0]
        return f'<a href="#{anchor_of(key)}">{key}</a>' if key in entries() else key

    made = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\b[1-4] §[0-9a-z_.x]*[0-9a-zA-Z_]", link, made))


@functools.cache
def release() -> str:
    """Return where this release's files are, by the "Source" address of the package's metadata; "" if it has none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        given = importlib.metadata.metadata("minidl")
        for name, _, url in (one.partition(", ") for one in given.get_all("Project-URL") or ()):
            if name == "Source":
                return f"{url.rstrip('/')}/blob/v{given['Version']}"
    return ""


def address(place: SourcePlace) -> str:
    """Return where the lines are, at the tag of the installed torch, this Python or this release; "" if not known."""
    import torch

    version = torch.__version__.partition("+")[0]
    tag = f"v{version}" if version.replace(".", "").isdigit() else torch.version.git_version
    at = {
        "torch": f"https://github.com/pytorch/pytorch/blob/{tag}",
        "multiprocessing": f"https://github.com/python/cpython/blob/v{platform.python_version()}/Lib",
        "minidl": release(),
    }
    base, file = at.get(place.file.partition("/")[0]), place.file.replace("torch/include/", "")
    return f"{base}/{file}#L{place.first}-L{place.last}" if base else ""


def _source(sources: dict[str, list[object]], place: SourcePlace) -> str:
    """Add the lines to those that the page holds, each once; return their key."""
    key = f"{place.file}:{place.first}"
    if key not in sources:
        sources[key] = [place.first, textwrap.dedent(place.text)]
    return key


@functools.cache
def counterexample(guard: str) -> tuple[tuple[str, ...], str]:
    """Return the steps of the shortest run of the model that goes wrong without the guard, and what goes wrong."""
    from minidl.explore import search

    _, run = search.counterexample(GUARDS[guard], GUARDS[guard].where[0])
    return ((), "") if run is None or run.bad is None else (tuple(search.in_words(run)), run.bad.what)


def rules_of(entry: Entry) -> list[JointRule]:
    """Return the joint rules that are about the row's section."""
    return [] if entry.topic else [rule for rule in JOINT_RULES if entry.section in sections(rule.article)]


def rows_of(event: str) -> list[Entry]:
    """Return the rows that the event shows."""
    return [entry for entry in entries().values() if event in coverage.events_of(entry)]


def by_module(package: str) -> dict[str, dict[str, list[Entry]]]:
    """Return module -> function -> the rows that name it, functions in the order of their file."""
    out: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries().values():
        for reference in entry.ours if package == "minidl" else entry.upstream:
            out[reference.partition(":")[0]][reference].append(entry)

    def first_line(reference: str) -> int:
        return min((place.first for place in places(reference, package)), default=0)

    return {module: {one: out[module][one] for one in sorted(out[module], key=first_line)} for module in sorted(out)}


def diagram(name: str, language: str) -> str:
    """Return a generated diagram without its own style: the page's policy allows only the page's."""
    draw = diagrams.PICTURES.get(name.replace(".", f".{language}."), diagrams.PICTURES[name])
    drawn = re.sub(r"<style>.*?</style>", "", draw(), flags=re.DOTALL)
    return re.sub(r"(?<=>)[\w ]+: (?=\w+_TABLE<)", lambda title: told(title[0])[language], drawn)
