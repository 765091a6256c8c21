"""The package's own sentences, such as the state in a recorded run, in the other languages of the page.

Interface: `told(text)` -> the text in each language; `labels(kind, at, words)` writes one into a picture. A sentence is
told phrase by phrase, the longest phrase first; `phrases.ini` beside this file has the phrases, in which # is a number.
Names stay as they are.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterator, Mapping
from typing import Final

from minidl.companion.rows import LANGUAGES, read

NUMBER: Final = r"-?[0-9]+(?:[.,][0-9]+)*"


HAN: Final = "[\u4e00-\u9fff]"
"""A Chinese character, as a regular expression."""
WIDE: Final = dict(zip(",;:", "，；：", strict=True))  # noqa: RUF001
"""Marks between English words -> between Chinese characters."""


@functools.cache
def told(text: str) -> Mapping[str, str]:
    """Return the text by language; what no phrase covers stays in English."""
    return {code: text if code == "en" else _translated(text, code) for code in LANGUAGES}


def _translated(text: str, language: str) -> str:
    def phrase(found: re.Match[str]) -> str:
        numbers = iter(re.findall(NUMBER, found[0]))
        words = read_phrases()[re.sub(NUMBER, "#", found[0])][language]
        return re.sub("#", lambda _: next(numbers), words)

    tidied = re.sub(r" +([,\uff0c])|([\uff0c\uff1a]) +", r"\1\2", _any_phrase().sub(phrase, text))
    tidied = re.sub(f"(?<={HAN}) (?={HAN})", "", tidied)  # Chinese has no spaces between words
    tidied = re.sub(rf" ?\(([^()]*{HAN}[^()]*)\) ?", r"（\1）", tidied)  # noqa: RUF001
    return re.sub(rf"(?<={HAN}|[）\d])[,;:] ?(?={HAN})|(?<={HAN}|）)[,;:] ?", lambda mark: WIDE[mark[0][0]], tidied)  # noqa: RUF001


@functools.cache
def read_phrases() -> Mapping[str, Mapping[str, str]]:
    """Return the phrases by their English words."""
    return read("phrases.ini")


@functools.cache
def _any_phrase() -> re.Pattern[str]:
    longest = sorted(read_phrases(), key=len, reverse=True)
    return re.compile(r"(?<!\w)(?:" + "|".join(re.escape(each).replace(r"\#", NUMBER) for each in longest) + r")(?!\w)")


def labels(kind: str, at: str, words: Mapping[str, str]) -> Iterator[str]:
    """Yield the text in each language that has one: once if they are all the same. kind: its class."""
    for code, text in words.items() if len(set(words.values())) > 1 else [("", words["en"])]:
        shown = f'class="{kind} l {code}" lang="{code}"' if code else f'class="{kind}"'
        if text:
            yield f"<text {shown} {at}>{html.escape(text)}</text>"
