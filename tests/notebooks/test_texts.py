"""The course's texts in other languages: none is missing or older than its original, and the code stays what it is."""

# ruff: noqa: RUF001  (answers in Russian and Chinese)

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import course
from course import asking, texts
from course.command import LANGUAGES, of_file
from course.handout import originals

pytestmark = pytest.mark.heavy

NAMES = [*(path.stem for path in originals()), *texts.SHARED]
BEGUN = set(NAMES)
"""What is translated into all languages: all there is. Leave out a new notebook that both languages do not have yet."""


def each_text(test: Any) -> Any:
    return pytest.mark.parametrize("language", LANGUAGES)(pytest.mark.parametrize("name", NAMES)(test))


MODULES = sorted(path for path in (texts.FOLDER / "course").glob("*.py") if path.stem != "texts")


def chosen(language: str, name: str) -> dict[tuple[str, str], str]:
    """What takes the place of an original: "=" keeps it."""
    return {key: said for key, said in texts.read(texts.file_of(language, name)).items() if said != "="}


def codes(source: str) -> str:
    """What a source does, apart from its strings."""

    class Blank(ast.NodeTransformer):
        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
            return ast.Constant("")

        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            return ast.Constant("" if isinstance(node.value, str) else node.value)

    return ast.dump(Blank().visit(ast.parse(source)))


@each_text
def test_no_text_is_missing_or_older_than_its_original(name: str, language: str) -> None:
    path = texts.file_of(language, name)
    if path.exists() or name in BEGUN:
        assert texts.faults(of_file(name), texts.read(path)) == {}


def test_each_file_of_translations_belongs_to_a_notebook() -> None:
    found = {path.relative_to(texts.FOLDER / "texts") for path in (texts.FOLDER / "texts").rglob("*.md")}
    assert found <= {Path(language, f"{name}.md") for language in LANGUAGES for name in NAMES}


CHOICES = (ast.JoinedStr, ast.FormattedValue, ast.IfExp, ast.BoolOp, ast.Compare, ast.BinOp, ast.Constant)
"""What a translation may make of what the fields of its original compute: words are chosen by a number."""


def fields(text: str) -> ast.expr:
    return ast.parse(texts._written(text, True), mode="eval").body


def blank(node: ast.AST) -> str:
    """What a part of a field computes, apart from its strings."""
    return re.sub(r"""Constant\(value=('([^'\\]|\\.)*'|"([^"\\]|\\.)*")\)""", "Constant", ast.dump(node))


def computes(node: ast.expr, known: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(getattr(node.func, "value", None), ast.Dict):  # {...}.get(...)
        return all(computes(part, known) for part in node.args)
    inside = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    by_number = isinstance(node, CHOICES) and not getattr(node, "format_spec", None)
    return blank(node) in known or (by_number and all(computes(part, known) for part in inside))


@each_text
def test_a_field_computes_what_its_original_computes(name: str, language: str) -> None:
    """So that a text which few readers see, such as what a wrong solution is told, raises in no language."""
    translations = texts.read(texts.file_of(language, name))
    for text in of_file(name):
        said = translations.get(text.key, "")
        if "." in text.place and "{" in said:
            known = {blank(part) for part in ast.walk(fields(text.original))}
            assert computes(fields(said), known), (text.place, said)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_code_is_one_for_all_languages(language: str) -> None:
    for path in originals():
        own = chosen(language, path.stem)
        notebook = json.loads(path.read_text())
        for before, after in zip(notebook["cells"], texts.translated(notebook, own)["cells"], strict=True):
            if before["cell_type"] == "code":
                assert codes("".join(before["source"])) == codes("".join(after["source"])), before["id"]
        module = texts.FOLDER / "course" / f"{texts.module_of(path.stem)}.py"
        if module.exists():
            assert codes(texts.replaced(module.read_text(), module.stem, own)) == codes(module.read_text())


def forms(options: Any) -> dict[str, set[str]]:
    """Each form of an answer, as it is compared -> the options that have it."""
    found: dict[str, set[str]] = {}
    for option, others in zip(options.keys, options.values, strict=True):
        words = [option, *others.elts[1:]] if isinstance(others, ast.Tuple) else [option]
        for form in (form for word in words if isinstance(word, ast.Constant) for form in str(word.value).split("|")):
            found.setdefault(asking._plain(form), set()).add(ast.unparse(option))
    return found


def looked_up(tree: ast.AST) -> set[tuple[int, int]]:
    """Where strings stand that something is found by: a translation of one would find nothing."""
    found: list[Any] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and not hasattr(node, "of_choice"):
            found += node.keys
        elif isinstance(node, ast.Subscript | ast.Compare):
            found += [node.slice] if isinstance(node, ast.Subscript) else [node.left, *node.comparators]
    return {(node.lineno, node.col_offset) for node in found if isinstance(node, ast.Constant)}


@each_text
def test_other_words_for_an_answer_are_those_of_the_language_and_english_ones(name: str, language: str) -> None:
    """Each has an entry. None stands for two answers. None is a word, too, that the code looks something up by."""
    translations = texts.read(texts.file_of(language, name))
    own = chosen(language, name)
    for module in texts.SHARED.get(name, (texts.module_of(name),)):
        if not (path := texts.FOLDER / "course" / f"{module}.py").exists():
            continue
        source = path.read_text()
        strings = list(texts.strings(source, module))
        assert [text for text, node in strings if hasattr(node, "is_other") and text.key not in translations] == []
        keys = looked_up(texts.parsed(source))
        fixed = {text.key for text, node in strings if (node.lineno, node.col_offset) in keys}
        assert {text.key for text, node in strings if hasattr(node, "is_other")} & fixed & own.keys() == set()
        both = (texts.parsed(source), texts.parsed(texts.replaced(source, module, own)))
        before, after = ([node for node in ast.walk(tree) if hasattr(node, "of_choice")] for tree in both)
        for english, said in zip(before, after, strict=True):
            if isinstance(english, ast.Dict):
                assert all(len(options) == 1 for options in forms(said).values()), forms(said)
                lost = forms(english).keys() - forms(said).keys()
                assert lost <= {asking._plain(key.value) for key in english.keys if isinstance(key, ast.Constant)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_string_is_put_back_as_it_was(path: Path) -> None:
    """Positions, braces, quotes and fields, in all strings of the course."""
    source = path.read_text()
    same = {text.key: text.original.strip() for text, _ in texts.strings(source, path.stem)}
    assert ast.dump(ast.parse(texts.replaced(source, path.stem, same))) == ast.dump(ast.parse(source))


SOURCE = '''
@question
def asks(task):
    """Not shown."""
    rows("no text of a reader at all", query("a == 'b' and c == 'd'"))
    return Asked(f"Which worker gets task {task!r}?", Choice("it", {"it": ("",), "none": ("Yes, it is.", "no one")}),
                 "One" ' "more" {thing}.')
OPTIONS = {"this": ("", "that one")}
def other(): return Choice("this", OPTIONS)
@trial(1)
def ends(module):
    """Its hint is shown."""
'''


def test_what_is_wanted_are_sentences_and_answers() -> None:
    found = {text.original: text.place for text, _ in texts.strings(SOURCE, "m") if text.wanted}
    prose = "no text of a reader at all", "Which worker gets task {task!r}?", "Yes, it is.", 'One "more" {thing}.'
    named = {"this": "m", "that one": "m", "Its hint is shown.": "m.ends"}
    assert found == dict.fromkeys([*prose, "it", "none", "no one"], "m.asks") | named


def test_an_other_word_keeps_its_english_form() -> None:
    text = next(text for text, _ in texts.strings(SOURCE, "m") if text.original == "no one")
    assert "(\"Yes, it is.\", 'никто|ни один|no one')" in texts.replaced(SOURCE, "m", {text.key: "никто|ни один"})


def test_faults_are_named() -> None:
    wanted = [text for text, _ in texts.strings(SOURCE, "m") if text.wanted]
    said = {text.key: "=" for text in wanted[1:]}
    assert texts.faults(wanted, said) == {wanted[0].key: "missing"}
    fields = next(text for text in wanted if "{task" in text.original)
    wrong = [("{tusk}?", "its fields use tusk"), ("{task", "its fields cannot be read")]
    for translation, fault in (*wrong, (fields.original, "not translated"), ("{task}!", None)):
        found = texts.faults(wanted, {wanted[0].key: "="} | said | {fields.key: translation})
        assert [one[: len(fault or "")] for one in found.values()] == [fault] * (fault is not None)
    assert texts.faults([], {("m", "12345678"): "Old."}) == {("m", "12345678"): "older than its original"}


def test_how_lines_are_broken_makes_no_translation_old() -> None:
    one, other = (texts.Text("cell-1", original, wanted=True).mark for original in ("a b\nc", "a\nb c "))
    assert one == other != texts.Text("cell-1", "a b d", wanted=True).mark


def test_chinese_letters_come_from_fonts_that_are_installed() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context():
        course._letters("zh")
        first, *others = matplotlib.rcParams["font.family"]
        assert first == "DejaVu Sans"
        assert set(others) <= set(matplotlib.font_manager.get_font_names())


@functools.cache
def asking_in(language: str) -> Any:
    """The module `asking` as a student's course in this language has it."""
    module = ModuleType(f"asking_{language}")
    module.__file__ = asking.__file__
    sys.modules[module.__name__] = module  # dataclasses looks there
    exec(texts.replaced(Path(asking.__file__).read_text(), "asking", chosen(language, "course")), module.__dict__)
    return module


SAID: dict[tuple[str, str], dict[object, list[str]]] = {
    ("ru", "Count"): {
        4: ["в 4 раза", "в четыре раза", "вчетверо", "в 4 раза больше", "4", "4 файла", "ровно 4"],
        6: ["6 задач", "6 заданий", "шесть заданий", "6 пакетов", "6 готовых пакетов",
            "6 сэмплов", "6 процессов", "6 шагов."],
        0: ["ни одного", "ноль", "ни разу"], 2: ["два рабочих процесса", "дважды", "на 2 копии"], 1: ["одну задачу"],
        150528: ["150 528 байтов", "150,528"],
        None: ["не 4", "больше 4", "4 или 5", "-4", "2,5", "несколько", "4 кошки"],
    },
    ("ru", "Worker"): {
        0: ["рабочего процесса 0", "0-й", "0-го", "рабочий процесс 0", "нулевой", "0-й рабочий процесс",
            "воркера 0", "нулевого рабочего процесса"],
        1: ["рабочий процесс №1", "w1", "один"], None: ["медленного", "ни один", "дважды", "не 0"],
    },
    ("ru", "Share"): {"почти ничего": ["0,02", "2,5 %"], "около половины": ["0,5", "50 %!"], None: ["1,2,3"]},
    ("ru", "yes_no"): {
        "да": ["да", "Да!", "может", "да, может", "yes", "It does."],
        "нет": ["нет", "не может", "no", "it cannot"], None: ["не знаю точно", "может быть", "не да"],
    },
    ("zh", "Count"): {
        4: ["4倍", "四倍", "4 倍", "四倍。", "4！", "4个任务", "4 个 batch", "正好4个"], 2: ["两次。", "2 个工作进程"],
        0: ["没有", "零"], None: ["不是4", "超过4", "4或5"],
    },
    ("zh", "Worker"): {0: ["0号", "worker 0。", "0 号 worker", "进程 0", "0"], None: ["慢的那个"]},
    ("zh", "yes_no"): {
        "是": ["是", "可以", "是的。", "能", "会", "yes"], "否": ["否", "不可以", "不能", "不会", "不是", "不！", "No"],
        None: ["可能", "不知道吧"],
    },
}  # fmt: skip
"""Language and form of answer -> what is read -> answers that a student may give; None = it cannot be read."""


@pytest.mark.parametrize(("language", "form"), SAID)
def test_answers_are_read_as_the_language_says_them(language: str, form: str) -> None:
    module = asking_in(language)
    made = {"Count": (0,), "Worker": (0,), "Share": (1, 1000), "yes_no": (True, "Slip.")}
    reader = getattr(module, form)(*made[form])
    for value, answers in SAID[language, form].items():
        for answer in answers:
            try:
                assert reader.read(answer) == value, answer
            except module.Unreadable:
                assert value is None, answer


@pytest.mark.parametrize(("name", "language", "answers"), [
    ("device.pinner", "zh", {2: ["pin 线程", "pin线程。", "Pin 线程！", "pin thread"]}),
    ("device.pinner", "ru", {2: ["поток закрепления", "pin thread"], 3: ["никто"]}),
    ("hang_lab", "zh", {5: ["死锁", "环"], 8: ["屏障。"], 2: ["信号"], 4: ["丢失"]}),
    ("hang_lab", "ru", {5: ["взаимная блокировка", "deadlock"], 8: ["барьер"], 2: ["сигнал"], 4: ["потерян"]}),
])  # fmt: skip
def test_a_choice_is_answered_in_short(name: str, language: str, answers: dict[int, list[str]]) -> None:
    module, _, function = name.partition(".")
    path = next(path for path in originals() if texts.module_of(path.stem) == module)
    source = (texts.FOLDER / "course" / f"{module}.py").read_text()
    tree = texts.parsed(texts.replaced(source, module, chosen(language, path.stem)))
    inside = next((node for node in ast.walk(tree) if getattr(node, "name", "") == function), tree)
    (options,) = (node for node in ast.walk(inside) if isinstance(node, ast.Dict) and hasattr(node, "of_choice"))
    listed = [ast.unparse(key) for key in options.keys if key]
    known = forms(options)
    for number, said in answers.items():
        for answer in said:
            assert known.get(asking._plain(answer)) == {listed[number]}, answer
