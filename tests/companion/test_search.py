"""The companion's search: twice fifty searches of readers, and what the ranking takes for the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from minidl.companion import search
from minidl.companion.rows import anchor_of, entries
from minidl.companion.search import clauses, keywords, parts, passages, ranked, standing, whole, words
from minidl.companion.text import select

SEARCHES = [
    line.rsplit(" = ", 1)
    for line in (Path(__file__).parent / "searches.txt").read_text(encoding="utf-8").splitlines()
    if " = " in line
]


def first(asked: str) -> set[str]:
    """The keys of the rows that come first: on the page, and in the terminal."""
    best = ranked(asked)[:1]
    on_page = [key for key in entries() if best == [anchor_of(key)]]
    return {*on_page, *(entry.key for entry in select(asked)[0][:1])}


@pytest.mark.heavy
def test_searches_lead_to_their_rows_first() -> None:
    wrong = [
        each for each, (asked, keys) in enumerate(SEARCHES) if not first(asked) or first(asked) - {*keys.split(" or ")}
    ]
    told = [SEARCHES[each] for each in wrong]
    assert len(SEARCHES) == 195
    assert sum(each < 50 for each in wrong) <= 1, told
    assert sum(each >= 90 for each in wrong) <= 1, told
    assert len(wrong) <= 2, told


def test_each_list_of_the_articles_words_is_of_a_row() -> None:
    assert not keywords().keys() - entries().keys()


@pytest.mark.parametrize(
    "same",
    [
        ("_task_info", "task_info", "taskInfo", "self._task_info"),
        ("закреплённая память", "ЗАКРЕПЛЕННАЯ ПАМЯТЬ"),
        ("锁页内存", "鎖頁記憶體", "锁页内存\uff01"),
        ("worker", "Worker", "\uff57\uff4f\uff52\uff4b\uff45\uff52"),
        ("head-of-line", "head_of_line"),
    ],
)
def test_what_is_the_same_finds_the_same(same: tuple[str, ...]) -> None:
    assert len({tuple(ranked(each)) for each in same if "self" not in each}) == 1
    assert {ranked(each)[0] for each in same} == {ranked(same[0])[0]}


def test_terms_of_words() -> None:
    asked = "Ещё 1 §2.4.4\uff1a_MapDatasetFetcher\uff0c線程池"
    assert words(asked) == ["Еще", "1", "2.4.4", "_MapDatasetFetcher", "线程池"]
    assert parts("_MapDatasetFetcher") == ["map", "dataset", "fetcher", "datas*", "fetch*"]
    assert parts("线程池") == ["线程", "程池"]
    assert whole(["_try_get", "data"]) == "=trygetdata"


def test_a_pasted_passage_finds_the_section_that_it_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "A clause that stands in ours alone, and one that two sections have; qqqq wwww zzzz; 第三个分句属于这里。"
    shared = "and one that two sections have"
    of = {"4-collate": own, "1-2.4.4": shared}
    table = {mark: [row for row in of if mark in clauses(of[row])] for mark in clauses(own) | clauses(shared)}
    assert [*map(len, table.values())].count(1) >= 2
    monkeypatch.setattr(search, "passages", lambda: table)
    assert standing(own) == standing(own.upper().replace(" ", "\u00a0")) == {"4-collate"}
    assert ranked(own)[0] == "4-collate"
    assert standing(shared) == {"4-collate", "1-2.4.4"}
    assert ranked("qqqq wwww zzzz; 第三个分句属于这里")[0] == "4-collate", "also by words that no row has"
    assert standing("A clause that stands in ours alone, with a few words more") == {"4-collate"}, "half of it"
    assert not standing("A clause that stands in ours alone, with a great many words of its reader beside"), "a part"
    assert not standing("第三个分句"), "too short"
    assert not standing("ours_alone.and_one_word_without_any_space")


def test_clauses_have_marks_of_their_words_alone() -> None:
    assert clauses("self._data_queue = queue.Queue()") == clauses("  self._data_queue=queue.Queue( ) # ")
    assert list(clauses("два коротких").values()) == [len("двакоротких")]
    assert list(clauses("三个汉字").values()) == [12]
    assert clauses("one; two, identifier_alone") == {}
    assert clauses("ab cd efgh") != clauses("ab cd efgi")


def test_every_section_that_has_marks_has_a_row() -> None:
    assert {row for found in passages().values() for row in found} <= {anchor_of(key) for key in entries()}
    assert len(passages()) > 1500


def test_a_beginning_finds_what_it_begins() -> None:
    assert ranked("dispa")[0] in ranked("dispatcher")
    assert ranked("qqqq") == ranked("!") == ranked("") == ranked("no_such_thing") == []
