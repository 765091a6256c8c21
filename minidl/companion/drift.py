"""Where an article, or torch's own note about the shutdown, says what the code no longer does: each with evidence.

Interface: `drifts()` -> the list; `Drift.findings(torch)` checks its evidence in the source of the installed torch, or
of the one in a folder; `moved(torch)` reports which references of the rows stand elsewhere there, or are gone.

The list is in `drift.ini`. A drift's fields, beside "en", "ru" and "zh" (see `rows`): `about`, the sections that say
it, the main one first, or "note" for torch's note; `topics`, one a line, those of these sections' topics that have rows
of their own and say it; `kind`, one of KINDS; `since`, for those of DATED, the version of torch that brought it
(several if it came in steps); `evidence`, lines of the form "module:name has TEXT", "module:name lacks TEXT",
"module:name is there" or "module:name is gone". Evidence that fails says that this torch differs from what was read.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minidl.articles import ARTICLES, Section, sections
from minidl.companion.rows import Entry, RowError, Translated, entries, listed, read
from minidl.references import places, source_of

KINDS: Final = ("gone", "moved", "changed", "added", "design", "never")
"""What became of what is said: it is gone; stands elsewhere; is done otherwise; something came; another design would do
it, this code does not; it was never so.
"""

DATED: Final = ("gone", "moved", "changed", "added")
"""The kinds of what was right once: each has the version that ended it."""

NOTE: Final = "note"

READ_WITH: Final = "2.13"
"""The version of torch that the rows and drifts were written for. Another one may lack a function or a claim."""

_CLAIM: Final = re.compile(r"(?P<reference>\S+) (?:(?P<verb>has|lacks) (?P<text>.+)|is (?P<state>there|gone))")


@dataclass(frozen=True, slots=True)
class Claim:
    """One piece of evidence: as it is claimed, whether it holds, and where."""

    claim: str
    holds: bool
    where: str


@dataclass(frozen=True, slots=True)
class Drift:
    """One drift. sections: those that say it, the main one first; none for torch's own note. since: "" if undated."""

    name: str
    sections: tuple[Section, ...]
    kind: str
    since: str
    words: Translated
    evidence: tuple[str, ...]
    topics: tuple[str, ...]

    @property
    def section(self) -> Section | None:
        """The main section; None for torch's own note."""
        return self.sections[0] if self.sections else None

    @property
    def source(self) -> str:
        """Who says it: "1 §2.4.2, §2.4.5", "1 §0x01, 2 §1.3" or "note"."""
        numbers = ["", *(f"{each.article} " for each in self.sections)]
        said = ("" if n == before else n for before, n in itertools.pairwise(numbers))
        return ", ".join(f"{n}§{each.anchor}" for n, each in zip(said, self.sections, strict=True)) or NOTE

    def findings(self, torch: Path | None = None) -> list[Claim]:
        """Check the evidence."""
        return [find(claim, torch) for claim in self.evidence]


def find(claim: str, torch: Path | None = None) -> Claim:
    """Check one claim. Raises RowError for one that is not of the form above."""
    match = _CLAIM.fullmatch(claim)
    if match is None:
        raise RowError(f"evidence {claim!r}: write 'module:name has TEXT', 'lacks TEXT', 'is there' or 'is gone'")
    found = places(match["reference"], "torch", torch)
    if match["state"] is not None:
        is_there = bool(found) or (":" not in match["reference"] and source_of(match["reference"], "torch", torch))
        where = f"{found[0].file}:{found[0].first}" if found else ""
        return Claim(claim, bool(is_there) == (match["state"] == "there"), where)
    for place in found:
        if number := place.line_with(match["text"]):
            return Claim(claim, match["verb"] == "has", f"{place.file}:{number}")
    where = f"{found[0].file}:{found[0].first}-{found[0].last}" if found else ""
    return Claim(claim, bool(found) and match["verb"] == "lacks", where)


def _drift(name: str, fields: Mapping[str, str]) -> Drift:
    about, kind, since = (fields.get(each, "") for each in ("about", "kind", "since"))
    if kind not in KINDS:
        raise RowError(f"drift {name!r}: kind {kind!r} is none of {', '.join(KINDS)}")
    if bool(since) != (kind in DATED):
        raise RowError(f"drift {name!r}: since {since!r}: only the kinds {', '.join(DATED)} have a version, and must")
    try:
        said = () if about == NOTE else sections(about)
    except LookupError as error:
        raise RowError(f"drift {name!r}: about {about!r}: {error}") from error
    if not said and about != NOTE:
        raise RowError(f"drift {name!r}: about {about!r}: write a section, as 1 §2.4.2, or {NOTE}")
    return Drift(name, said, kind, since, Translated.of(fields), listed(fields, "evidence"), listed(fields, "topics"))


@functools.cache
def drifts() -> tuple[Drift, ...]:
    """Return all drifts in the order of the articles, then those of torch's note."""
    order = [*(section for article in ARTICLES.values() for section in article.sections), None]
    return tuple(sorted(itertools.starmap(_drift, read("drift.ini").items()), key=lambda d: order.index(d.section)))


def drifts_of(entry: Entry) -> list[Drift]:
    """Return the drifts of what a row's section says; of a topic's row, those about the topic."""
    return [d for d in drifts() if (entry.topic in d.topics if entry.topic else True) and entry.section in d.sections]


def moved(torch: Path) -> Iterator[str]:
    """Yield a line for each function of the rows that another torch has elsewhere, otherwise, or not at all; then for
    each claim of a drift that does not hold there; last, how many. torch: the folder of an unpacked wheel.
    """
    counted = {"the same": 0, "changed": 0, "gone": 0}
    references = list(dict.fromkeys(each for entry in entries().values() for each in entry.upstream))
    for reference in references:
        here, there = places(reference, "torch"), places(reference, "torch", torch)
        if [(p.first, p.last, p.text) for p in here] == [(p.first, p.last, p.text) for p in there]:
            continue
        what = "gone" if not there else "the same" if [p.text for p in here] == [p.text for p in there] else "changed"
        counted[what] += 1
        lines, now = (", ".join(f"{p.first}-{p.last}" for p in found) or "nowhere" for found in (here, there))
        yield f"{reference}: lines {lines} in the installed torch, {now} there: {what}"
    broken = [(d.name, finding.claim) for d in drifts() for finding in d.findings(torch) if not finding.holds]
    yield from (f"drift {name}: does not hold there: {claim}" for name, claim in broken)
    if broken or any(counted.values()):
        parts = ", ".join(f"{number} {what}" for what, number in counted.items())
        yield f"of {len(references)} functions: {parts}; of {len(drifts())} drifts, {len(dict(broken))} fail"
