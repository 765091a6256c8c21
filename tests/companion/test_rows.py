"""Each reference of the companion resolves: sections, functions, events, guards, moments, notebooks."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Collection

import pytest
import torch

from minidl.articles import ARTICLES
from minidl.companion import coverage, moments, reading, rows
from minidl.companion.drift import READ_WITH
from minidl.companion.rows import LANGUAGES, Entry, RowError, Translated, entries
from minidl.explore import diagrams
from minidl.explore.guards import GUARDS
from minidl.references import places
from minidl.tracefile.events import EVENTS
from minidl.tracefile.words import and_joined

AS_READ = torch.__version__.startswith(f"{READ_WITH}.")
"""Whether the installed torch is the one that the rows were written for; of another, the page says what is gone."""
EVENT_NAMES = {event.name for event in EVENTS.values()}


def unresolved(entry: Entry) -> list[str]:
    """What a row names and is not there."""
    out = [f"ours: {each}" for each in entry.ours if not places(each, "minidl")]
    if AS_READ:
        out += [f"upstream: {e}" for e in entry.upstream if not places(e, "torch") and e not in coverage.COMPILED]
    for each, text in entry.decides.items():
        package = "minidl" if each in entry.ours else "torch"
        if (AS_READ or package == "minidl") and not any(place.line_with(text) for place in places(each, package)):
            out.append(f"line: {each} > {text}")
    out += [f"event: {name}" for name in entry.events if name not in EVENT_NAMES]
    out += [f"guard: {name}" for name in entry.guards if name not in GUARDS]
    if entry.notebook:
        lacks = [code for code in LANGUAGES if not moments.heading_of(entry.notebook, code)]
        out += [f"notebook: {entry.notebook} in {and_joined(lacks)}"] * bool(lacks)
    return out


@pytest.mark.heavy
@pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: entry.key)
def test_each_row_resolves(entry: Entry) -> None:
    assert not unresolved(entry), f"row {entry.key}"
    assert not entry.words.missing, f"row {entry.key}"
    for text in entry.moments:
        moments.find(text)


def test_the_line_that_decides_is_shown_and_the_one_page_loaders_comes_first() -> None:
    known = entries().values()
    assert sum(bool(entry.decides) for entry in known) > 40
    for entry in known:
        in_mini = [each.startswith("mini:") for each in entry.ours]
        assert in_mini == sorted(in_mini, reverse=True), entry.key


def test_a_renamed_function_names_the_row() -> None:
    entry = entries()["1 §2.4.4"]
    names = {"ours": "dispatcher:Dispatcher.assigned", "upstream": "dataloader:gone", "events": "nope"}
    renamed = rows._entry(entry.key, names | {"notebook": "00.ipynb#1"})
    wrong = ["ours: dispatcher:Dispatcher.assigned", "upstream: dataloader:gone", "event: nope"]
    wrong.append("notebook: 00.ipynb#1 in en, ru and zh")
    assert unresolved(renamed) == [each for each in wrong if AS_READ or not each.startswith("upstream")]
    assert "heading in Русский" in renamed.words.missing


def test_a_notebooks_heading_is_in_the_readers_language() -> None:
    heads = [moments.heading_of("05_many_workers.ipynb#3", language) for language in LANGUAGES]
    assert heads == ["3. One slow sample", "3. Один медленный образец", "3. 一个慢样本"]


def test_each_section_has_a_row() -> None:
    for number, (covered, there) in coverage.sections_covered().items():
        missing = [s.anchor for s in ARTICLES[number].sections if f"{number} §{s.anchor}" not in entries()]
        assert covered == there, f"article {number}: no row for {missing}"


def test_each_event_and_function_of_torch_has_a_row_or_a_reason() -> None:
    assert coverage.missing_events() == []
    assert coverage.missing_functions() == [] or not AS_READ
    names = {name for name, _ in coverage.without_row()}
    assert names
    assert not coverage.EVENTS_WITHOUT_ROW.keys() - EVENT_NAMES


def test_each_guard_is_in_a_row() -> None:
    assert GUARDS.keys() == {guard for entry in entries().values() for guard in entry.guards}


@pytest.mark.parametrize(("file", "names"), [("guards.ini", GUARDS.keys()), ("events.ini", EVENT_NAMES)])
def test_each_guard_and_event_is_told_of_in_each_language(file: str, names: Collection[str]) -> None:
    told = rows.read(file)
    assert told.keys() == set(names)
    assert all(fields["ru"] and fields["zh"] for fields in told.values())


@pytest.mark.heavy
def test_lines_are_those_that_inspect_finds() -> None:
    """Parsing finds what importing would, for what can be imported."""
    compared = 0
    for entry in entries().values():
        for reference in entry.ours:
            thing = pkgutil.resolve_name(f"minidl.{reference}")
            thing = inspect.unwrap(getattr(thing, "fget", thing))
            if inspect.isfunction(thing) or inspect.isclass(thing):
                lines, first = inspect.getsourcelines(thing)
                place = places(reference, "minidl")[-1]
                assert place.last == first + len(lines) - 1, reference
                compared += 1
    assert compared > 100


def test_the_path_and_the_note_resolve() -> None:
    for stop in reading.stops():
        name = stop.words.titles["en"]
        assert not stop.words.missing, name
        for package, references in (("minidl", stop.ours), ("torch", stop.upstream)):
            gone = [each for each in references if not places(each, package)]
            assert not gone or (package == "torch" and not AS_READ), name
        for text in stop.moments:
            moments.find(text)
    for name, part in reading.note().items():
        assert not part.words.missing, name
        assert set(part.guards) <= GUARDS.keys()
        assert set(part.diagrams) <= diagrams.PICTURES.keys()
        for text in part.moments:
            moments.find(text)


TEXTS = [*(f"article-{number}.ini" for number in ARTICLES), "drift.ini", "note.ini", "path.ini"]


@pytest.mark.parametrize("name", [*TEXTS, "events.ini", "guards.ini", "phrases.ini", "words.ini"])
def test_chinese_text_has_chinese_punctuation(name: str) -> None:
    wrong = re.compile("[\u4e00-\u9fff][,;:?!()]|[,;:?!()][\u4e00-\u9fff]")
    for key, fields in rows.read(name).items():
        assert not wrong.findall(re.sub("`[^`]*`", "", fields["zh"])), key


@pytest.mark.parametrize("name", TEXTS)
def test_one_word_for_one_thing(name: str) -> None:
    """The other word for a fetcher and a collate function, for raise, and for yield in Chinese."""
    for key, fields in rows.read(name).items():
        told = f"{fields['ru']} {fields['zh']}"
        assert not re.findall(r"борщик|функци\w+ сборки|подним\w+ (?:ошибку|исключение)|交出", told), key


def test_a_line_end_within_chinese_is_no_space() -> None:
    words = Translated.of({"zh": "标题\n一行\n二行 a\nb\n\n又一段", "en": "x\na\nb"})
    assert words.paragraphs("zh") == ["一行二行 a b", "又一段"]
    assert words.paragraphs("en") == ["a b"]


def test_no_words_of_the_page_lack_a_language() -> None:
    for key, fields in rows.read("words.ini").items():
        assert all(Translated.of(fields).titles.values()), key


@pytest.mark.parametrize(
    ("key", "fields", "message"),
    [
        ("1 §9.9", {}, "no such section"),
        ("1 §2.4.4", {"our": "x"}, r"unknown fields \['our'\]"),
        ("nothing", {}, "row 'nothing'"),
    ],
)
def test_a_wrong_row_is_named(key: str, fields: dict[str, str], message: str) -> None:
    with pytest.raises(RowError, match=message):
        rows._entry(key, fields)
