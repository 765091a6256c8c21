"""The reading companion as one HTML page that needs nothing else: no network, no server, no other file.

Interface: `html()` -> Page; `html(path)` writes it. `companion.html` beside this file styles and moves it, within the
frame that all pages share. All texts stand in the page in every language; the root's attribute `data-lang` shows one.
The source lines are those of this package and of the torch that is installed when the page is made.
"""

from __future__ import annotations

import functools
import html as markup
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, overload

import minidl
from minidl.articles import ARTICLES, sections
from minidl.check.joint_rules import JOINT_RULES
from minidl.companion import coverage, moments, pictures
from minidl.companion.drift import Drift, drifts
from minidl.companion.reading import NOTE_PARTS, note, stops
from minidl.companion.rows import LANGUAGES, Entry, Translated, anchor_of, entries, read
from minidl.explore import diagrams
from minidl.explore.guards import GUARDS, Guard
from minidl.references import SourcePlace, places, source_line
from minidl.tracefile.events import EVENTS, Event, Phase
from minidl.views.frame import Page, filled

PARTS: Final = ("a1", "a2", "a3", "a4", "path", "note", "drift", "files", "functions", "events")
"""Parts of the page, one of which is shown at a time."""


class CompanionPage(Page):
    """The companion as text."""

    height = 780
    shows = "reading companion of minidl"


@overload
def html(path: None = None) -> CompanionPage: ...
@overload
def html(path: str | os.PathLike[str]) -> Path: ...
def html(path: str | os.PathLike[str] | None = None) -> CompanionPage | Path:
    """Return the page, or write it to `path` and return that. Raises RowError, MomentError, OSError."""
    from markupsafe import Markup

    sources = _Sources()
    content = "".join(_part(name, sources) for name in PARTS)
    buttons = "".join(f'<button data-lang="{code}">{name}</button>' for code, name in LANGUAGES.items())
    tabs = "".join(f'<button data-part="{name}">{_word(name)}</button>' for name in PARTS)
    holes = {"heading": _word("title"), "languages": buttons, "tabs": tabs, "content": content, "foot": _foot()}
    data = {"sources": sources.texts, "words": {key: _words()[key].titles for key in _words()}}
    made = {name: Markup(text) for name, text in holes.items()}
    title = "minidl: reading companion"
    return CompanionPage(filled("companion.html", "minidl.companion", title=title, data=data, **made)).written(path)


# --- Words ------------------------------------------------------------------------------------------------------------
@functools.cache
def _words() -> Mapping[str, Translated]:
    return {key: Translated.of(fields) for key, fields in read("words.ini").items()}


def _word(key: str) -> str:
    return spans(_words()[key].titles)


def spans(texts: Mapping[str, str]) -> str:
    """Return a short text in all languages, of which the page shows one."""
    if len(set(texts.values())) == 1:
        return inline(next(iter(texts.values())))
    return "".join(f'<span class="l {code}" lang="{code}">{inline(text)}</span>' for code, text in texts.items())


def blocks(words: Translated) -> str:
    """Return a text of several paragraphs in all languages."""
    out = []
    for code in LANGUAGES:
        paragraphs = "".join(f"<p>{inline(paragraph)}</p>" for paragraph in words.paragraphs(code))
        out.append(f'<div class="l {code}" lang="{code}">{paragraphs}</div>')
    return "".join(out)


def inline(text: str) -> str:
    """Return a text as HTML: `code` between backticks, and citations of sections as links."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", markup.escape(text, quote=False))
    return re.sub(r"\b[1-4] §[0-9a-z_.x]*[0-9a-zA-Z_]", _link, text)


def _link(citation: re.Match[str]) -> str:
    key = citation[0]
    return f'<a href="#{anchor_of(key)}">{key}</a>' if key in entries() else key


# --- Sources ----------------------------------------------------------------------------------------------------------
class _Sources:
    """The source lines that the page holds, each once."""

    def __init__(self) -> None:
        self.texts: dict[str, list[object]] = {}

    def button(self, place: SourcePlace) -> str:
        """Return a button that shows the lines."""
        key = f"{place.file}:{place.first}"
        if key not in self.texts:
            self.texts[key] = [place.first, textwrap.dedent(place.text)]
        folder, _, file = place.file.rpartition("/")
        lines = f"{place.first}\N{EN DASH}{place.last}"
        name = markup.escape(place.name).replace(".", ".<wbr>")
        return (
            f'<button class="src" data-src="{key}" aria-expanded="false"><b>{name}</b> '
            f'<span class="at">{folder}/<wbr>{file}:{lines}</span></button>'
        )

    def list(self, references: Iterable[str], package: str) -> str:
        """Return a button for each definition that the references name, or what is known of one that is not there."""
        out = []
        for reference in references:
            found = places(reference, package)
            out += [f"<li>{self.button(place)}</li>" for place in found]
            if not found:
                what = "compiled" if reference in coverage.COMPILED else "gone"
                out.append(f'<li><code>{markup.escape(reference)}</code> <span class="gone">{_word(what)}</span></li>')
        return "".join(out)


# --- A row ------------------------------------------------------------------------------------------------------------
def _row(entry: Entry, sources: _Sources) -> str:
    number = f'<a class="key" href="#{entry.anchor}">{markup.escape(entry.key.partition(": ")[0])}</a>'
    level = "h3" if entry.topic else "h2"
    heading = entry.section.heading if not entry.topic else ""  # of a section that has no number: as the article has it
    theirs = f'<p class="at" lang="zh">{markup.escape(heading)}</p>' if heading else ""
    parts = [f"<{level}>{number} {spans(entry.words.titles)}</{level}>{theirs}", blocks(entry.words)]
    if entry.has_counterpart:
        parts.append(_references(entry, sources))
    else:
        parts.append(f'<p class="none">{_word("none")}</p>')
    parts += [_event_chips(coverage.events_of(entry)), *(_guard(GUARDS[name], sources) for name in entry.guards)]
    parts += [*_rules(entry), *_drifted(entry), *(_moment(text) for text in entry.moments), _notebook(entry)]
    kind = "row topic" if entry.topic else "row"
    return f'<section class="{kind}" id="{entry.anchor}">{"".join(parts)}</section>'


def _references(entry: Entry, sources: _Sources) -> str:
    ours, nothing = sources.list(entry.ours, "minidl"), f'<li class="none">{_word("none")}</li>'
    upstream = sources.list(entry.upstream, "torch") or f'<li class="none">{_word("nothere")}</li>'
    here = f"<div><h4>{_word('here')}</h4><ul>{ours or nothing}</ul></div>"
    return f'<div class="refs">{here}<div><h4>{_word("torch")}</h4><ul>{upstream}</ul></div></div>'


def _event_chips(names: Iterable[str]) -> str:
    chips = "".join(f'<a class="chip" href="#event-{name}">{name}</a> ' for name in names)
    return f'<p class="events"><b>{_word("emitted")}</b> {chips}</p>' if chips else ""


def _guard(guard: Guard, sources: _Sources) -> str:
    steps, wrong = counterexample(guard.name)
    known = guard.where[0]
    shown = "".join(f"<li>{markup.escape(step)}</li>" for step in steps)
    torch = sources.list([guard.upstream], "torch") if guard.upstream else f'<li class="none">{_word("nothere")}</li>'
    return (
        f'<details class="guard"><summary><span class="kind">{_word("guard")}</span> <b>{guard.name}</b>: '
        f"{spans(coverage.purposes(guard))}</summary>"
        f'<div class="refs"><div><h4>{_word("here")}</h4><ul>{sources.list([guard.ours], "minidl")}</ul></div>'
        f"<div><h4>{_word('torch')}</h4><ul>{torch}</ul></div></div>"
        f"<h4>{_word('without')}</h4><p class='at'>{known.name}: {markup.escape(known.describe())}</p>"
        f"<ol>{shown}</ol><p class='wrong'>{markup.escape(wrong)}</p>"
        f"<p><code>minidl explore --guard {guard.name} -o explored</code></p></details>"
    )


@functools.cache
def counterexample(guard: str) -> tuple[tuple[str, ...], str]:
    """Return the steps of the shortest run of the model that goes wrong without the guard, and what goes wrong."""
    from minidl.explore import search

    _, run = search.counterexample(GUARDS[guard], GUARDS[guard].where[0])
    return ((), "") if run is None or run.bad is None else (tuple(search.in_words(run)), run.bad.what)


def _rules(entry: Entry) -> Iterator[str]:
    mine = [] if entry.topic else [rule for rule in JOINT_RULES if entry.section in sections(rule.article)]
    if mine:
        rows = "".join(
            f"<li><b>{markup.escape(rule.demand)}</b>: <span>{markup.escape(rule.why)}</span></li>" for rule in mine
        )
        yield f'<details class="rules"><summary>{_word("rules")} ({len(mine)})</summary><ul>{rows}</ul></details>'


def _drifted(entry: Entry) -> Iterator[str]:
    mine = [drift for drift in drifts() if drift.section is entry.section]
    if mine and not entry.topic:
        links = "".join(f'<li><a href="#drift-{d.name}">{spans(d.words.titles)}</a></li>' for d in mine)
        yield f'<div class="drifted"><h4>{_word("differs")}</h4><ul>{links}</ul></div>'


def _moment(text: str) -> str:
    if not moments.TRACES.is_dir():
        return f'<p class="none">{_word("norun")}</p>'
    moment = moments.find(text)
    happened, changed, state = moment.state()
    changes = "".join(f"<li>{markup.escape(change)}</li>" for change in changed[:6])
    lines = markup.escape("\n".join(state))
    shown = f"<details><summary>{_word('state')}</summary><pre>{lines}</pre></details>" if state else ""
    step = f'<p class="faint">{_word("step")}: <code>{moment.command}</code></p>'
    return (
        f"<figure>{pictures.picture(moment)}<figcaption><b>{markup.escape(moment.name)}</b>: {markup.escape(happened)}"
        f"<ul>{changes}</ul>{shown}{step}</figcaption></figure>"
    )


def _notebook(entry: Entry) -> str:
    if not entry.notebook:
        return ""
    file, _, _ = entry.notebook.partition("#")
    heading = markup.escape(moments.heading_of(entry.notebook))
    return f'<p class="notebook"><b>{_word("notebook")}</b> <code>notebooks/{file}</code> {heading}</p>'


# --- The parts --------------------------------------------------------------------------------------------------------
def _part(name: str, sources: _Sources) -> str:
    if name[0] == "a" and name[1:].isdecimal():
        body = _article(int(name[1:]), sources)
    else:
        body = _OTHER_PARTS[name](sources)
    return f'<div class="part" id="part-{name}">{body}</div>'


def _article(number: int, sources: _Sources) -> str:
    article = ARTICLES[number]
    mine = [entry for entry in entries().values() if entry.section.article == number]
    about = ", ".join(filter(None, (article.title, article.author)))
    head = f'<p class="faint" lang="{"ru" if article.language == "Russian" else "zh"}">{markup.escape(about)}</p>'
    return head + "".join(_row(entry, sources) for entry in mine)


def _path(sources: _Sources) -> str:
    out = []
    for number, stop in enumerate(stops(), 1):
        shown = "".join(_moment(text) for text in stop.moments)
        out.append(
            f'<section class="row" id="path-{number}"><h2><a class="key" href="#path-{number}">{number}</a> '
            f"{spans(stop.words.titles)}</h2>"
            f"<p class='faint'>{stop.minutes} {_word('minutes')}, {stop.lines} {_word('lines')}</p>"
            f'{blocks(stop.words)}<div class="refs"><div><h4>{_word("here")}</h4>'
            f"<ul>{sources.list(stop.ours, 'minidl')}</ul></div><div><h4>{_word('torch')}</h4>"
            f"<ul>{sources.list(stop.upstream, 'torch')}</ul></div></div>{shown}</section>"
        )
    minutes, lines = sum(stop.minutes for stop in stops()), sum(stop.lines for stop in stops())
    return f"<p class='faint'>{minutes} {_word('minutes')}, {lines} {_word('lines')}</p>" + "".join(out)


def _note(sources: _Sources) -> str:
    out = []
    for name in NOTE_PARTS:
        part = note()[name]
        guards = "".join(_guard(GUARDS[guard], sources) for guard in part.guards)
        drawn = "".join(map(_diagram, part.diagrams))
        out.append(
            f'<section class="row" id="note-{name}"><h2>{spans(part.words.titles)}</h2>'
            f"{blocks(part.words)}{drawn}{guards}{''.join(map(_moment, part.moments))}</section>"
        )
    return "".join(out)


def _diagram(name: str) -> str:
    """Return a generated diagram, closed and without its own style: the page's policy allows only the page's."""
    drawn = re.sub(r"<style>.*?</style>", "", diagrams.PICTURES[name](), flags=re.DOTALL)
    title = f"{_word('diagram')}: {name.removesuffix('.svg')}"
    return f'<details><summary>{title}</summary><div class="diagram">{drawn}</div></details>'


def _drift(sources: _Sources) -> str:
    return "".join(_one_drift(drift) for drift in drifts())


def _one_drift(drift: Drift) -> str:
    claims = []
    for finding in drift.findings():
        holds = "holds" if finding.holds else "fails"
        verdict = f'<span class="{holds}">{_word(holds)}</span>'
        where = f' <span class="at">{finding.where}</span>' if finding.where else ""
        claims.append(f"<li><code>{markup.escape(finding.claim)}</code>{where} {verdict}</li>")
    about = inline(drift.source) if drift.section else "NOTE [ Data Loader Multiprocessing Shutdown Logic ]"
    return (
        f'<section class="row" id="drift-{drift.name}"><h2><span class="kind">{_word(f"kind-{drift.kind}")}</span> '
        f"{spans(drift.words.titles)}</h2><p class='faint'>{about}</p>{blocks(drift.words)}"
        f"<h4>{_word('evidence')}</h4><ul class='claims'>{''.join(claims)}</ul></section>"
    )


def _index(title: str, anchor: str, items: Mapping[str, list[Entry]], package: str, sources: _Sources) -> str:
    rows = []
    for reference, found in items.items():
        links = ", ".join(f'<a href="#{entry.anchor}">{markup.escape(entry.key)}</a>' for entry in found)
        rows.append(f"<tr><td><ul>{sources.list([reference], package)}</ul></td><td>{links}</td></tr>")
    return f'<section class="row" id="{anchor}"><h2>{title}</h2><table>{"".join(rows)}</table></section>'


def _by_module(package: str) -> Mapping[str, Mapping[str, list[Entry]]]:
    out: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries().values():
        for reference in entry.ours if package == "minidl" else entry.upstream:
            out[reference.partition(":")[0]][reference].append(entry)
    return {
        module: dict(sorted(out[module].items(), key=lambda i: _first_line(i[0], package))) for module in sorted(out)
    }


def _first_line(reference: str, package: str) -> int:
    return min((place.first for place in places(reference, package)), default=0)


def _files(sources: _Sources) -> str:
    return "".join(
        _index(f"minidl/{module.replace('.', '/')}.py", f"file-{module}", items, "minidl", sources)
        for module, items in _by_module("minidl").items()
    )


def _functions(sources: _Sources) -> str:
    listed = "".join(
        _index(markup.escape(module), f"torch-{module.replace('/', '.')}", items, "torch", sources)
        for module, items in _by_module("torch").items()
    )
    without = "".join(
        f"<li><code>{markup.escape(name)}</code>: {markup.escape(why)}</li>" for name, why in coverage.without_row()
    )
    return f'{listed}<section class="row" id="torch-unlisted"><h2>{_word("unlisted")}</h2><ul>{without}</ul></section>'


def _events(sources: _Sources) -> str:
    return "".join(_event(event) for event in EVENTS.values() if event.phase is not Phase.END)


def _event(event: Event) -> str:
    rows = [entry for entry in entries().values() if event.name in coverage.events_of(entry)]
    links = ", ".join(f'<a href="#{entry.anchor}">{markup.escape(entry.key)}</a>' for entry in rows)
    ours = "; ".join(source_line(reference, "minidl") for reference in event.ours.split(", "))
    torch = source_line(event.upstream, "torch") if event.upstream else ""
    why = coverage.EVENTS_WITHOUT_ROW.get(event.name, "")
    anchor = f"event-{event.name}"
    return (
        f'<section class="row" id="{anchor}"><h3><a class="key" href="#{anchor}">{event.name}</a></h3>'
        f"<p>{markup.escape(event.meaning)}</p><p class='at'>{_word('here')}: {markup.escape(ours)}<br>"
        f"{_word('torch')}: {markup.escape(torch) or _word('nothere')}</p>"
        f"<p>{links or markup.escape(why)}</p></section>"
    )


_OTHER_PARTS: Final = {
    "path": _path, "note": _note, "drift": _drift, "files": _files, "functions": _functions, "events": _events,
}  # fmt: skip


def _foot() -> str:
    import torch

    versions = f"minidl {minidl.__version__}, torch {torch.__version__}"
    return f"{_word('installed')} {markup.escape(versions)}. {_word('torchsource')}"
