"""Make the marks by which a pasted passage finds its section: a mark for each clause of the articles' sections.

    python tests/companion/passages.py ARTICLES/[1-4]*.txt >minidl/companion/passages.ini

The articles are read as text, their headings on lines of their own. What is written tells nothing of their words.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from minidl.articles import ARTICLES
from minidl.companion.rows import entries
from minidl.companion.search import clauses

HEADING = 4
"""Lines that a heading may be broken into."""


def letters(text: str) -> str:
    return "".join(re.findall(r"\w+", text)).lower()


def parts(number: int, lines: list[str]) -> dict[str, str]:
    """Return the sections' texts by their anchors; what stands before the first heading is of none."""
    heads = {}
    for section in ARTICLES[number].sections:
        heading = section.heading or section.name
        heads |= {letters(f"{section.anchor} {heading}"): section.anchor}
        heads |= {letters(section.heading): section.anchor} if section.heading else {}
        if re.fullmatch(r"[0-9.]+", section.anchor):
            heads |= {letters(line): section.anchor for line in lines if line.startswith(f"{section.anchor} ")}
    out: dict[str, list[str]] = {}
    at, begun = "", 0
    for place, line in enumerate(lines):
        for upto in range(place + 1, place + HEADING + 1):
            found = heads.get(letters("".join(lines[place:upto])))
            if found and re.match(r"\w", line) and place >= begun:
                at, begun = found, upto
        out.setdefault(at, []).append(line)
    return {anchor: "\n".join(text) for anchor, text in out.items()}


if __name__ == "__main__":
    print("# Marks of the articles' clauses by section, made by tests/companion/passages.py.")
    for number, path in enumerate(sys.argv[1:], 1):
        for anchor, text in parts(number, Path(path).read_text(encoding="utf-8").splitlines()).items():
            if (key := f"{number} §{anchor}") in entries():
                marks = " ".join(f"{mark:06x}" for mark in clauses(text))
                print(f"\n[{key}]\nmarks = " + "\n    ".join(re.findall(r"(?:\w+ ?){1,16}", marks)))
