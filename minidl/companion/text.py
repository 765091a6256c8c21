"""The companion in a terminal: the rows of a section, or those that name a file, a function of torch or an event.

Interface: `render(what, language)`. `what` is a section ("1 §2.4.4", "2.4.4", "shutdown"), a file ("dispatcher.py",
"minidl/loader/worker.py"), a function here or in torch ("_try_put_index"), an event ("reorder_store"), or "drift". Any
other text is searched for (see `search`): the best row is shown, and those near to it are named.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator
from typing import Final

from minidl.companion import coverage
from minidl.companion.drift import drifts, drifts_of
from minidl.companion.moments import TRACES, find, heading_of
from minidl.companion.phrases import told
from minidl.companion.rows import Entry, Translated, entries
from minidl.companion.search import ranked
from minidl.companion.shares import caption
from minidl.explore.guards import GUARDS
from minidl.references import SourcePlace, places

NEAR: Final = 6
"""Rows that a search names, with the one that it shows."""

_CLOSING: Final = "\u3001\u3002\uff0c\uff1b\uff1a\uff1f\uff01\uff09\u201d"


def render(what: str, language: str = "en", width: int = 100) -> str:
    """Return the rows in words. Raises ValueError if nothing of that name has a row."""
    if what == "drift":
        return "\n\n".join(_drifts(language, width))
    found, near = select(what)
    if not found:
        raise ValueError(
            f"no row has {what!r}: give a section (1 §2.4.4, shutdown), a file of minidl (dispatcher.py), a function "
            "(_try_put_index), an event (reorder_store), drift, or a heading, a name or a passage of an article"
        )
    shown = ["\n".join(_row(entry, language, width)) for entry in found]
    also = "\n".join(f"near: {entry.key}  {entry.words.titles[language]}" for entry in near)
    return "\n\n".join([*shown, also] if near else shown)


def select(what: str) -> tuple[list[Entry], list[Entry]]:
    """Return the rows of what has this name; else the row that these words are about, and those near to it."""
    if named := _named(what):
        return named, []
    rows = {entry.anchor: entry for entry in entries().values()}
    best = [rows[row] for row in ranked(what) if row in rows]
    return best[:1], best[1:NEAR]


def _named(what: str) -> list[Entry]:
    """Return the rows that a section, event, file or function leads to: the first way that has any."""
    known = list(entries().values())
    asked = re.sub(r"\s+§?\s*|§", " ", what).strip()
    article, _, anchor = asked.rpartition(" ")
    ways = (
        [e for e in known if e.section.anchor == anchor and article in ("", str(e.section.article))],
        [e for e in known if what in (e.key, e.topic)],
        _by_rank(what, [e for e in known if what in coverage.events_of(e)]),
        [e for e in known if what.endswith(".py") and _names_file(e, what)],
        _by_rank(what, [e for e in known if _names_function(e, what)]),
    )
    return next((way for way in ways if way), [])


def _by_rank(what: str, found: list[Entry]) -> list[Entry]:
    """Sort rows that all have a name: those that are about it come first."""
    order = {row: at for at, row in enumerate(ranked(what))} if found else {}
    return sorted(found, key=lambda entry: order.get(entry.anchor, len(order)))


def _names_file(entry: Entry, what: str) -> bool:
    files = [f"minidl/{r.partition(':')[0].replace('.', '/')}.py" for r in entry.ours]
    files += [place.file for reference in entry.upstream for place in places(reference, "torch")[:1]]
    return any(file == what or file.endswith(f"/{what}") for file in files)


def _names_function(entry: Entry, what: str) -> bool:
    names = [each.partition(":")[2] for each in (*entry.ours, *entry.upstream)]
    return any(name == what or name.endswith(f".{what}") for name in names) or what in (*entry.ours, *entry.upstream)


def _words(words: Translated, language: str, width: int, indent: str = "  ") -> Iterator[str]:
    for paragraph in words.paragraphs(language):
        flat = paragraph.replace("`", "")
        if language == "zh":
            yield from (indent + line for line in _wide_lines(flat, width - len(indent)))
        else:
            yield textwrap.fill(flat, width, initial_indent=indent, subsequent_indent=indent)


def _wide_lines(text: str, width: int) -> Iterator[str]:
    """Yield a Chinese text in lines of at most `width` columns: a character takes two, and a line may end after any."""
    line, used = "", 0
    for piece in re.findall(r"[!-~]+|.", text):
        columns = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in piece)
        closes = piece in _CLOSING  # such a character never begins a line
        if used + columns > width and line and not closes:
            yield line
            line, used, piece = "", 0, piece.lstrip()
        line, used = line + piece, used + columns
    if line:
        yield line


def _row(entry: Entry, language: str, width: int) -> Iterator[str]:
    yield f"{entry.key}  {entry.words.titles[language]}"
    yield from _words(entry.words, language, width)
    for title, references, package in (("here ", entry.ours, "minidl"), ("torch", entry.upstream, "torch")):
        for reference in references:
            found = places(reference, package)
            lacks = "in compiled code" if reference in coverage.COMPILED else "gone from the installed torch"
            yield from (f"  {title}  {place}{_decides(entry, reference, place)}" for place in found)
            if not found:
                yield f"  {title}  {reference}: {lacks}"
    if names := coverage.events_of(entry):
        yield textwrap.fill(", ".join(names), width, initial_indent="  events ", subsequent_indent="         ")
    for name in entry.guards:
        yield f"  guard  {name}: {coverage.purposes(GUARDS[name])[language]} (minidl explore --guard {name})"
    for text in entry.moments if TRACES.is_dir() else ():
        moment = find(text)
        yield f"  run    {moment.name}: {told(moment.state()[0])[language]} ({moment.command})"
    yield from (f"  shares {told(caption(text))[language]}" for text in entry.figures)
    if entry.notebook:
        yield f"  notebook notebooks/{entry.notebook.partition('#')[0]}: {heading_of(entry.notebook, language)}"
    yield from (f"  differs: {drift.words.titles[language]}" for drift in drifts_of(entry))


def _decides(entry: Entry, reference: str, place: SourcePlace) -> str:
    """Return the line that does what the row says, in brackets, if the row names one."""
    line = place.line_with(entry.decides[reference]) if reference in entry.decides else None
    return f" (line {line})" if line else ""


def _drifts(language: str, width: int) -> Iterator[str]:
    for drift in drifts():
        lines = [
            f"{drift.source}  [{' '.join([drift.kind, drift.since]).strip()}] {drift.words.titles[language]}",
            *_words(drift.words, language, width),
        ]
        lines += [f"  {'holds' if f.holds else 'FAILS'}  {f.claim}  {f.where}" for f in drift.findings()]
        yield "\n".join(lines)
