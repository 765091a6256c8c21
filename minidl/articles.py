"""The four articles that this package implements, and their sections; `articles.ini` beside this file is their table.

Interface: `ARTICLES` (number -> Article), `sections(text)` (what a text cites). A citation is "article 1 §2.4.3", or
"article 1 §2.4.3, §2.4.4", or "article 2 §3.1 to §3.3"; the event table leaves out the word "article". Articles 1 and 2
number their sections. The sections of articles 3 and 4 have headings only, and are cited by the names given here.
"""

from __future__ import annotations

import configparser
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final


@dataclass(frozen=True, slots=True)
class Section:
    """A section: how it is cited, what it is about, and its heading if that is all that identifies it."""

    article: int
    anchor: str
    name: str
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Article:
    """An article: title, author and address ("" = none is known), language, and its sections in order."""

    title: str
    author: str
    address: str
    language: str
    about: str
    sections: tuple[Section, ...]


def table(package: str, name: str) -> dict[str, Mapping[str, str]]:
    """Return the sections of a package's data file, each as its fields."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.read_string(files(package).joinpath(name).read_text(encoding="utf-8"), name)
    return {key: dict(parser[key]) for key in parser.sections()}


def _article(number: int, told: Mapping[str, str]) -> Article:
    """sections: lines of "anchor name" or "anchor name | heading"."""
    found = []
    for line in told["sections"].strip().splitlines():
        anchor, _, rest = line.partition(" ")
        name, _, heading = rest.partition(" | ")
        found.append(Section(number, anchor, name, heading))
    return Article(told["title"], told["author"], told["address"], told["language"], told["about"], tuple(found))


ARTICLES: Final = {int(key): _article(int(key), fields) for key, fields in table("minidl", "articles.ini").items()}

_ANCHOR = r"0x[0-9A-F]{2}|[0-9](?:\.[0-9]+)*|[a-z_]+"
_CITATION = re.compile(rf"\b(?<![.§])([0-9])((?:(?:,| to|) §(?:{_ANCHOR}))+)")


@functools.cache
def sections(text: str) -> tuple[Section, ...]:
    """The sections that `text` cites, in its order. Raises LookupError for a citation of a section that is not there.

    "§3.1 to §3.3" gives the two ends.
    """
    found = []
    for number, anchors in _CITATION.findall(" ".join(text.split())):
        article = ARTICLES.get(int(number))
        for anchor in re.findall(rf"§({_ANCHOR})", anchors):
            section = next((s for s in article.sections if s.anchor == anchor), None) if article else None
            if section is None:
                raise LookupError(f"article {number} §{anchor}: no such section; see minidl/articles.ini")
            found.append(section)
    return tuple(found)
