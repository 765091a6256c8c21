"""The course's texts in other languages: none is missing or older than its original, and the code stays what it is."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import course
from course import texts
from course.command import LANGUAGES, of_file
from course.handout import originals

NAMES = [*(path.stem for path in originals()), *texts.SHARED]
BEGUN = set(NAMES)
"""What is translated into all languages: all there is. Leave out a new notebook that both languages do not have yet."""

MODULES = sorted(path for path in (texts.FOLDER / "course").glob("*.py") if path.stem != "texts")


def codes(source: str) -> str:
    """What a source does, apart from its strings."""

    class Blank(ast.NodeTransformer):
        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
            return ast.Constant("")

        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            return ast.Constant("" if isinstance(node.value, str) else node.value)

    return ast.dump(Blank().visit(ast.parse(source)))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
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
    chosen = isinstance(node, CHOICES) and not getattr(node, "format_spec", None)
    return blank(node) in known or (chosen and all(computes(part, known) for part in inside))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
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
        chosen = {key: said for key, said in texts.read(texts.file_of(language, path.stem)).items() if said != "="}
        notebook = json.loads(path.read_text())
        for before, after in zip(notebook["cells"], texts.translated(notebook, chosen)["cells"], strict=True):
            if before["cell_type"] == "code":
                assert codes("".join(before["source"])) == codes("".join(after["source"])), before["id"]
        module = texts.FOLDER / "course" / f"{texts.module_of(path.stem)}.py"
        if module.exists():
            assert codes(texts.replaced(module.read_text(), module.stem, chosen)) == codes(module.read_text())


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
@trial(1)
def ends(module):
    """Its hint is shown."""
'''


def test_what_is_wanted_are_sentences_and_answers() -> None:
    found = {text.original: text.place for text, _ in texts.strings(SOURCE, "m") if text.wanted}
    prose = "no text of a reader at all", "Which worker gets task {task!r}?", "Yes, it is.", 'One "more" {thing}.'
    assert found == dict.fromkeys([*prose, "it", "none"], "m.asks") | {"Its hint is shown.": "m.ends"}


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
