"""The rows of the reading companion, as data: what each section explains, where it is here and in torch, who shows it.

Interface: `entries()` (key -> Entry), in the order of the articles; `read(name)` reads another file of the same form.

The rows are in `article-1.ini` to `article-4.ini`, in our own words. A row's key is a section of `minidl.articles`
("1 §2.4.4"), or a section and a topic within it ("4 §dataset: Subset"). Its fields:

en, ru, zh     first line: the heading; the lines below: the statement. `code` stands between backticks.
ours           functions here, one a line, "module:name", that of the one-page loader first
upstream       functions in torch, as `minidl.references` names them
               (the first of each decides what the row says; "module:name > TEXT" is its line that has TEXT)
events         events beside those that the event table itself assigns to the section
guards         guards of `explore.guards`
moments        moments of recorded runs, see `moments`
figures        runs of samplers, see `shares`
notebook       "file.ipynb#3": the section whose heading begins with "3. "
also           words that the articles and their readers use for it, which the search takes for the row's own

A row without `ours` and `upstream` has no counterpart; its statement says why. Lines are looked up, never written.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from minidl.articles import ARTICLES, Section, sections, table

LANGUAGES: Final = {"en": "English", "ru": "Русский", "zh": "中文"}
"""Languages of the page: code -> the language's own name for itself."""

_CHINESE: Final = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
_WITHIN_CHINESE: Final = re.compile(rf"(?<={_CHINESE})\n *(?={_CHINESE})|(?<=[\u3000-\u303f\uff00-\uffef])\n *")


@dataclass(frozen=True, slots=True)
class Translated:
    """A heading and a text in each language, by its code."""

    titles: Mapping[str, str]
    texts: Mapping[str, str]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Translated:
        """Read the fields "en", "ru" and "zh": the first line is the heading."""
        parts = {code: fields.get(code, "").strip().partition("\n") for code in LANGUAGES}
        return cls({c: p[0].strip() for c, p in parts.items()}, {c: p[2].strip() for c, p in parts.items()})

    def paragraphs(self, language: str) -> list[str]:
        """The text's paragraphs, each on one line. Between two Chinese characters, a line's end is no space."""
        text = _WITHIN_CHINESE.sub("", self.texts[language])
        return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]

    @property
    def missing(self) -> list[str]:
        """What lacks in which language."""
        both = (("heading", self.titles), ("text", self.texts))
        return [f"{what} in {LANGUAGES[code]}" for what, values in both for code, value in values.items() if not value]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row. topic: "" for the section as a whole."""

    section: Section
    topic: str
    words: Translated
    ours: tuple[str, ...]
    upstream: tuple[str, ...]
    events: tuple[str, ...]
    guards: tuple[str, ...]
    moments: tuple[str, ...]
    figures: tuple[str, ...]
    notebook: str
    also: str
    decides: Mapping[str, str]

    @property
    def key(self) -> str:
        """How the row is cited."""
        return f"{self.section.article} §{self.section.anchor}" + (f": {self.topic}" if self.topic else "")

    @property
    def anchor(self) -> str:
        """The row's address on the page."""
        return anchor_of(self.key)

    @property
    def has_counterpart(self) -> bool:
        return bool(self.ours or self.upstream)


class RowError(ValueError):
    """A row that cannot be read; the message names it."""


def anchor_of(key: str) -> str:
    """Return the address of a row: "1-2.4.4", "4-dataset.Subset"."""
    return key.replace(" §", "-").replace(": ", ".").replace(" ", "_")


def read(name: str) -> dict[str, Mapping[str, str]]:
    """Return the sections of a data file beside this module, each as its fields."""
    return table("minidl.companion", name)


def listed(fields: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the lines of a field."""
    return tuple(line.strip() for line in fields.get(name, "").splitlines() if line.strip())


def _entry(key: str, fields: Mapping[str, str]) -> Entry:
    where, _, topic = key.partition(": ")
    try:
        (section,) = sections(where)
    except (LookupError, ValueError) as error:
        raise RowError(f"row {key!r}: {error}") from error
    known = {"en", "ru", "zh", "ours", "upstream", "events", "guards", "moments", "figures", "notebook", "also"}
    if fields.keys() - known:
        raise RowError(f"row {key!r}: unknown fields {sorted(fields.keys() - known)}; known are {sorted(known)}")
    lists = {name: listed(fields, name) for name in ("ours", "upstream", "guards", "moments", "figures")}
    decides = dict(each.split(" > ", 1) for each in (*lists["ours"], *lists["upstream"]) if " > " in each)
    lists |= {name: tuple(each.partition(" > ")[0] for each in lists[name]) for name in ("ours", "upstream")}
    events = tuple(fields.get("events", "").split())
    notebook, also = fields.get("notebook", ""), fields.get("also", "")
    words = Translated.of(fields)
    return Entry(section, topic, words, events=events, notebook=notebook, also=also, decides=decides, **lists)


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Return all rows by key, in the order of the articles. Raises RowError for one that cannot be read."""
    out = {}
    for number, article in ARTICLES.items():
        found = [_entry(key, fields) for key, fields in read(f"article-{number}.ini").items()]
        place = {section.anchor: at for at, section in enumerate(article.sections)}
        for entry in found:
            if entry.section.article != number:
                raise RowError(f"row {entry.key!r} stands in article-{number}.ini")
        for entry in sorted(found, key=lambda entry: (place[entry.section.anchor], bool(entry.topic))):
            out[entry.key] = entry
    return out
