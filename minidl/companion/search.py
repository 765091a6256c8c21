"""The search of the companion: the rows that a reader's words are about, best first, in any of the three languages.

Interface: `ranked(asked)` -> addresses of rows; `index()` is what it scores with. `asked` is a heading, an identifier,
a few words or a pasted passage. `companion.html` does the same with what `for_page()` gives it.

A row has texts of several kinds, of which a heading counts most and the source of its functions least. The points of a
term in a row are computed once (after BM25): many if few rows have the term, and if it stands in a heading or in a
short text. A row's score is the sum of the points of the terms asked for. `folds.ini` beside this file says which
characters and words are the same: the two Russian letters for e, traditional and simplified Chinese. `keywords.ini` has
the words by which an article's section is told from the others. `passages.ini` knows the articles' clauses by a mark of
each, so that a pasted passage finds the section that it stands in; `tests/companion/passages.py` makes it.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from minidl.companion import coverage
from minidl.companion.drift import drifts, drifts_of
from minidl.companion.reading import note, stops
from minidl.companion.rows import Entry, Translated, anchor_of, entries, read
from minidl.references import places
from minidl.tracefile.events import EVENTS, Phase

WORD: Final = r"[0-9]+(?:[.][0-9]+)+|[A-Za-z0-9_-]+|[\u0410-\u044f]+|[\u4e00-\u9fff]+"
"""A word after folding: a section's number, an identifier, a word; in Chinese, what stands between two marks."""

PART: Final = r"[0-9]+(?:[.][0-9]+)+|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+|[\u0410-\u044f]+"
"""A part of a word: `_MapDatasetFetcher` and `map_dataset_fetcher` have three, other words one."""

END: Final = r"[\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|[.,:;!?](?=\s)"
"""Where a clause of a passage ends."""

CLAUSE: Final = 8
"""Letters of a clause that tells something of its place; a Chinese character counts as three."""

PASSAGE: Final = 16
"""Letters of a passage; what is shorter is a search for these words."""

STEM: Final = 5
"""Letters by which longer words are alike: "завершение" and "завершить", "worker" and "workers"."""

KINDS: Final = {"heading": (4.0, 0.3), "name": (2.5, 0.1), "also": (2.5, 0.1), "text": (1.5, 0.6), "source": (0.7, 0.7)}
"""Kind of text -> what a term in it counts, and how much less it counts in a long one: 0 = no less, 1 = by length."""

OTHER: Final = 0.5
"""What a row beside those of the articles counts: their reader looks for the articles' rows."""

LEAST: Final = 4
"""Points that are worth keeping."""

ENOUGH: Final = 20
"""Points a term, for up to three terms, from which a row is found."""

FAR: Final = 6
"""How many times fewer points than the best a row may have."""


@functools.cache
def folds() -> dict[str, str]:
    """Return the characters and words that stand for others, longest first."""
    fields = read("folds.ini")
    one, other = ("".join(fields["characters"][side].split()) for side in ("from", "to"))
    out = {**fields["words"], **dict(zip(one, other, strict=True))}
    return {key: out[key] for key in sorted(out, key=len, reverse=True)}


@functools.cache
def _folded() -> re.Pattern[str]:
    return re.compile("|".join(folds()))


def words(text: str) -> list[str]:
    """Return the words of a text, folded."""
    return re.findall(WORD, _folded().sub(lambda match: folds()[match[0]], unicodedata.normalize("NFKC", text)))


def whole(found: Sequence[str]) -> str:
    """Return the term that stands for several words, or for an identifier, as a whole."""
    return "=" + re.sub("[_-]", "", "".join(found)).lower()


def parts(word: str) -> list[str]:
    """Return the terms of a word: its parts and their stems, or pairs of Chinese characters."""
    if word[0] >= "一":
        return [word[at : at + 2] for at in range(len(word) - 1)] or [word]
    low = [part.lower() for part in re.findall(PART, word)]
    return [*low, *(f"{part[:STEM]}*" for part in low if len(part) > STEM)]


def _terms(kind: str, text: str) -> Iterator[str]:
    for word in words(text):
        yield from parts(word)
        if len(re.findall(PART, word)) > 1:
            yield whole([word])
    if kind == "heading":
        yield from (whole(found) for found in map(words, text.splitlines()) if found)


def _texts(entry: Entry) -> dict[str, str]:
    """Return the texts of an article's row by kind."""
    section, own = entry.section, _told(entry.words)
    original = entry.topic or f"{section.heading}\n{section.anchor} {section.heading}"
    names = [each.partition(":")[2] for each in (*entry.ours, *entry.upstream)]
    return {
        "heading": f"{own['heading']}\n{original}",
        "name": " ".join([*names, *coverage.events_of(entry)]),
        "also": f"{entry.also}\n{keywords().get(entry.key, '')}",
        "text": "\n".join([own["text"], *(each for drift in drifts_of(entry) for each in _told(drift.words).values())]),
        "source": "\n".join(place.text for each in entry.upstream for place in places(each, "torch")),
    }


@functools.cache
def keywords() -> Mapping[str, str]:
    """Return the articles' own words for each row that has any."""
    return {key: fields["words"] for key, fields in read("keywords.ini").items()}


def _told(told: Translated) -> dict[str, str]:
    return {"heading": "\n".join(told.titles.values()), "text": "\n".join(told.texts.values())}


def _others() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address and the texts of each other row of the page."""
    yield from ((f"path-{number}", _told(stop.words)) for number, stop in enumerate(stops(), 1))
    yield from ((f"note-{name}", _told(part.words)) for name, part in note().items())
    yield from ((f"drift-{drift.name}", _told(drift.words)) for drift in drifts())
    told = [event for event in EVENTS.values() if event.phase is not Phase.END]
    yield from ((f"event-{event.name}", {"heading": event.name, "text": event.meaning}) for event in told)
    modules: dict[str, list[str]] = defaultdict(list)
    for entry in entries().values():
        for folder, references in (("file", entry.ours), ("torch", entry.upstream)):
            for module, _, name in (each.partition(":") for each in references):
                modules[f"{folder}-{module.replace('/', '.')}"].append(name)
    yield from ((row, {"heading": row.partition("-")[2], "name": " ".join(names)}) for row, names in modules.items())
    yield "torch-unlisted", {"name": " ".join(name for name, _ in coverage.without_row())}


@functools.cache
def index() -> Mapping[str, Mapping[str, int]]:
    """Return term -> address of a row -> points."""
    articles, others = {entry.anchor: _texts(entry) for entry in entries().values()}, dict(_others())
    counted = {
        row: {k: Counter(_terms(k, text)) for k, text in own.items()} for row, own in (articles | others).items()
    }
    mean = {kind: sum(own[kind].total() for own in counted.values() if kind in own) / len(counted) for kind in KINDS}
    points: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row, own in counted.items():
        for kind, times in own.items():
            weight, shorter = KINDS[kind]
            half = 1 + shorter * (times.total() / mean[kind] - 1)
            for term, n in times.items():
                points[term][row] += weight * n / (n + half) * (OTHER if row in others else 1)
    out = {}
    for term, found in points.items():
        rare = math.log(1 + len(counted) / len(found)) ** 1.5
        out[term] = {row: round(10 * rare * n) for row, n in found.items() if 10 * rare * n >= LEAST}
    return {term: found for term, found in out.items() if found}


def ranked(asked: str) -> list[str]:
    """Return the addresses of the rows that the words are about, best first; none if no row has enough of them."""
    found = words(asked)
    score: dict[str, int] = Counter()
    terms = dict.fromkeys([term for word in found for term in _known(word)])
    for term in (whole(found), *terms):
        score.update(_points(term))
    enough = max(ENOUGH * min(3, len(terms)), max(score.values(), default=0) / FAR)
    near = standing(asked)
    found = [*(row for row in score if score[row] >= enough or rows_of().get(row) in near), *(near - score.keys())]
    return sorted(found, key=lambda row: (rows_of().get(row) not in near, -score[row]))


@functools.cache
def rows_of() -> Mapping[str, str]:
    """Return the address of each row of an article -> that of its section."""
    return {entry.anchor: anchor_of(entry.key.partition(": ")[0]) for entry in entries().values()}


def clauses(text: str) -> dict[int, int]:
    """Return the mark of each clause of a text -> its size in letters, of those that tell something of their place."""
    out = {}
    for clause in re.split(END, text):
        found = words(clause)
        joined = "".join(found).lower()
        chinese = len(re.findall("[\u4e00-\u9fff]", joined))
        if len(joined) + 2 * chinese >= CLAUSE and (chinese or len(found) > 1):
            out[_mark(joined)] = len(joined) + 2 * chinese
    return out


def _mark(letters: str) -> int:
    """Return 24 bits of the letters (FNV-1a, a character at a time, as the page's script can)."""
    mark = 0x811C9DC5
    for letter in letters:
        mark = (mark ^ ord(letter)) * 0x01000193 & 0xFFFFFFFF
    return mark & 0xFFFFFF


@functools.cache
def passages() -> Mapping[int, list[str]]:
    """Return the mark of each clause of the articles -> the addresses of the sections that have it."""
    out: dict[int, list[str]] = defaultdict(list)
    for key, fields in read("passages.ini").items():
        for mark in fields["marks"].split():
            out[int(mark, 16)].append(anchor_of(key))
    return out


def standing(asked: str) -> set[str]:
    """Return the addresses of the sections that have the most of a text, if that is half of it; else none."""
    found = clauses(asked)
    size: Counter[str] = Counter()
    for mark, letters in found.items():
        size.update(dict.fromkeys(passages().get(mark, ()), letters))
    most = max(size.values(), default=0)
    least = max(PASSAGE, sum(found.values()) / 2)
    return {section for section, letters in size.items() if letters == most >= least}


def _known(word: str) -> list[str]:
    """Return the word as a whole if a row has it so, else its parts."""
    return [whole([word])] if whole([word]) in index() else parts(word)


def _points(term: str) -> Mapping[str, int]:
    """Return the points of a term; of a beginning, the most that a term with it has."""
    if term in index() or len(term) < 3 or term[0] == "=" or term[-1] == "*":
        return index().get(term, {})
    out: Counter[str] = Counter()
    for each, found in index().items():
        if each.startswith(term):
            out |= Counter(found)
    return out


def for_page() -> dict[str, object]:
    """Return what the page's script needs to rank as `ranked` does. A term has row, points, row, points, ..."""
    rows = list(dict.fromkeys(row for found in index().values() for row in found))
    number = {row: at for at, row in enumerate(rows)}
    terms = {
        term: [n for row, points in found.items() for n in (number[row], points)] for term, found in index().items()
    }
    limits = {"stem": STEM, "enough": ENOUGH, "far": FAR, "clause": CLAUSE, "passage": PASSAGE}
    placed = {"end": END, "passages": passages(), "sections": [rows_of().get(row, "") for row in rows]}
    return {"terms": terms, "rows": rows, "folds": folds(), "word": WORD, "part": PART, **limits, **placed}
