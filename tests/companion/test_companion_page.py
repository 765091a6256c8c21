"""The companion's page: complete, closed to the outside, and working in a browser without a network."""

from __future__ import annotations

import importlib.metadata
import json
import re
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
from pages import Parsed, needs_chromium, opened

from minidl.articles import ARTICLES
from minidl.check.joint_rules import JOINT_RULES
from minidl.companion import page
from minidl.companion.phrases import told
from minidl.companion.rows import entries
from minidl.companion.search import ranked, standing
from minidl.tracefile.events import EVENTS


@pytest.fixture(scope="module")
def made() -> str:
    """Without the explorer's search for each guard's counterexample, which takes most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "counterexample", lambda guard: (("loader begins",), f"without {guard}"))
        return page.html()


def test_a_guard_has_the_explorers_shortest_run_without_it() -> None:
    steps, wrong = page.counterexample("watchdog")
    assert (steps, wrong.partition(",")[0]) == (("loader is killed",), "the loader's process is gone")


@pytest.mark.heavy
def test_each_row_is_there_and_each_link_leads_to_one(made: str) -> None:
    tags = Parsed(made).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {entry.anchor for entry in entries().values()} <= set(ids)
    links = {str(attributes["href"]) for tag, attributes in tags if tag == "a"}
    out = {link for link in links if "://" in link} - {article.address for article in ARTICLES.values()}
    assert [link for link in links - out if link[1:] not in ids] == [ARTICLES[4].address]
    lines = re.compile(r"https://github\.com/(pytorch/pytorch/blob/\w|python/cpython/blob/v3).*\.(py|h)#L\d+-L\d+")
    assert all(lines.fullmatch(link) for link in out)
    assert len(out) > 100
    assert all(f"without {guard}<" in made for entry in entries().values() for guard in entry.guards)


@pytest.mark.heavy
def test_a_release_that_names_its_source_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Message()
    for name, value in (("Version", "9.8"), ("Project-URL", "Docs, https://d"), ("Project-URL", "Source, https://s/m/")):
        told[name] = value
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: told)
    monkeypatch.setattr(page, "counterexample", lambda guard: (("loader begins",), ""))
    page.release.cache_clear()
    try:
        links = {str(attributes.get("href")) for tag, attributes in Parsed(page.html()).tags if tag == "a"}
    finally:
        page.release.cache_clear()
    own = {link for link in links if link.startswith("https://s/m/blob/v9.8/")}
    assert "https://s/m/blob/v9.8/notebooks/04_one_page.ipynb" in own
    assert len([link for link in own if re.search(r"/minidl/[\w/]+\.py#L\d+-L\d+$", link)]) > 100
    assert len(own) < len(links)


@pytest.mark.heavy
def test_it_refers_to_nothing_outside_and_holds_no_style_of_its_own(made: str) -> None:
    parsed = Parsed(made)
    for tag, attributes in parsed.tags:
        assert not {"src", "action", "srcset", "style"} & attributes.keys(), f"<{tag} {attributes}>"
        assert not [name for name in attributes if name.startswith("on")]
    assert [tag for tag, _ in parsed.tags].count("style") == 1
    code = parsed.inside["script"] + parsed.inside["style"]
    assert not re.findall(r"\beval\b|fetch\(|XMLHttpRequest|WebSocket|import\(|@import|url\(|https?:|innerHTML", code)


def test_it_names_no_folder_of_this_machine(made: str) -> None:
    assert f"{Path(page.__file__).parents[2]}/minidl" not in made
    assert f"{Path(np.__file__).parents[1]}/torch" not in made


def test_what_the_package_says_is_in_each_language(made: str) -> None:
    """Rules, states and the labels of pictures: what is left in another language are names."""
    names = "pid|next|prefetch|join|fetcher|pin|state|task|workers|activity|making|joining|sampling|break|cuda|sim"
    said = re.findall(r'<text(?! class="nowt)[^>]* lang="ru"[^>]*>([^<]*)</text>', made)
    moments = re.findall(r'<text class="nowt[^>]* lang="ru"[^>]*>(\S+) ([^<]*)</text>', made)
    assert moments
    assert {name for name, _ in moments} <= {event.name for event in EVENTS.values()}
    said += [time for _, time in moments]
    line = "<tr><th>[^< ]+(?: [^< ]+)*</th><td>[^<]+</td></tr>"
    states = re.findall(f'<table class="state l ru" lang="ru">(?:{line})+</table>', made)
    assert len(states) == made.count('class="state l ru"') > 50  # a column of names, whatever their widths
    said += [re.sub("<[^>]*>", " ", state) for state in states]
    assert all(title in made for title in (">Завершение: таблица JOINT_RULES.", ">Загрузчик: LOADER_TABLE<"))
    for rule in JOINT_RULES:
        said += [told(rule.demand)["ru"], told(rule.why)["ru"]]
    for text in said:
        words = re.findall(r"(?<![\w&])[a-z]{3,}(?![\w;])", text)
        assert [word for word in words if not re.fullmatch(names, word)] == [], text


def test_chinese_text_that_is_put_together_has_chinese_punctuation(made: str) -> None:
    told = re.sub("<code.*?</code>|<script.*?</script>|<[^>]*>", "\n", made, flags=re.DOTALL).splitlines()
    mixed = {line.strip() for line in told if re.search("[\u4e00-\u9fff][,;:?!()]|[,;:?!()][\u4e00-\u9fff]", line)}
    assert mixed == {"Tensor(CPU Tensor)在multiprocessing.Queue中的序列化和反序列化"}  # the article's own title


def test_it_stays_small(made: str) -> None:
    assert len(made.encode()) < 6_000_000


DRIVER = """
const root = document.documentElement, log = [];
const key = (k, on) => (on || document.body).dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true}));
const visible = id => { const e = document.getElementById(id); return Boolean(e && e.getClientRects().length); };
addEventListener("error", e => root.dataset.broken = e.message);
addEventListener("securitypolicyviolation", e => root.dataset.violation = e.violatedDirective);
function run() {
  if (!("rows" in root.dataset)) return setTimeout(run, 20);
  root.dataset.start = [root.dataset.lang, root.dataset.here, visible("1-2.4.4"), visible("4-shutdown")].join();
  const box = document.getElementById("search");
  box.value = "_next_worker assign"; box.dispatchEvent(new Event("input"));
  root.dataset.found = [visible("1-2.4.4"), visible("4-shutdown"), root.dataset.shown > 0].join();
  key("Escape"); key("4"); key("j");
  root.dataset.keyed = [root.dataset.part, root.dataset.here, location.hash].join();
  key("l"); root.dataset.language = [root.dataset.lang, root.lang].join();
  const theme = root.dataset.theme; key("t"); root.dataset.themed = theme !== root.dataset.theme;
  const before = document.querySelectorAll(".code").length;
  key("o"); root.dataset.opened = document.querySelectorAll(".code").length - before;
  root.dataset.requests = performance.getEntriesByType("resource").length;
  const jump = document.getElementById("jump");
  const seek = words => { box.value = words; box.dispatchEvent(new Event("input")); key("Enter", box); };
  key("1"); seek("4-sampler.weightedrandomsampler"); const hit = root.dataset.here;
  const opened = document.querySelectorAll(".code").length;
  key("p"); key("o");
  root.dataset.left = [hit, document.querySelectorAll(".row.here").length, jump.value,
    document.querySelectorAll(".code").length - opened].join();
  seek("4-sampler.weightedrandomsampler"); key("Escape");
  root.dataset.back = [root.dataset.part, root.dataset.here, visible(hit), jump.value === hit].join();
  root.dataset.ranked = JSON.stringify(SEARCHES.map(each => {
    seek(each);
    return [...document.querySelectorAll(".part.shown .row")].map(row => row.id);
  }));
  const pasted = new DataTransfer(); pasted.setData("text", "one line\\n  and a second"); box.value = "";
  box.dispatchEvent(new ClipboardEvent("paste", {clipboardData: pasted, cancelable: true}));
  root.dataset.pasted = box.value;
  key("Escape"); key("e"); root.dataset.order = [...document.querySelectorAll(".row")].map(row => row.id);
  box.value = "qqqq"; box.dispatchEvent(new Event("input")); root.dataset.nothing = visible("nothing");
}
setTimeout(run, 20);
"""


@pytest.mark.live
@needs_chromium
def test_a_browser_searches_follows_links_and_switches(made: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    opening = '<script>history.replaceState(null, "", "#ru:1-2.4.4")</script>'
    lines = (Path(__file__).parent / "searches.txt").read_text(encoding="utf-8").splitlines()
    asked = [line.rpartition(" = ")[0] for line in lines if " = " in line] + ["dispa", "qqqq", "!"]
    driver = f"const SEARCHES = {json.dumps(asked)};{DRIVER}"
    path.write_text(made.replace("<head>", f"<head>{opening}<script>{driver}</script>"), encoding="utf-8")
    _, root = opened(path, tmp_path / "profile")
    assert root.get("data-broken") is None
    assert root.get("data-violation") is None
    assert root["data-start"] == "ru,1-2.4.4,true,false"
    assert root["data-found"] == "true,false,true"
    first = next(entry.anchor for entry in entries().values() if entry.section.article == 4)
    assert root["data-keyed"] == f"a4,{first},#{first}"
    assert root["data-language"] == "zh,zh"
    assert root["data-themed"] == "true"
    assert int(str(root["data-opened"])) > 0
    hit = "4-sampler.WeightedRandomSampler"
    assert root["data-left"] == f"{hit},0,path-1,0"
    assert root["data-back"] == f"a4,{hit},true,true"
    assert root["data-nothing"] == "true"
    assert root["data-pasted"] == "one line; and a second"
    assert sum(map(bool, map(standing, asked))) > 10, "the page has to find the passages' sections, too"
    assert json.loads(str(root["data-ranked"])) == [ranked(each)[:40] for each in asked]
    found = re.findall('<section class="row[^>]* id="([^"]+)"', made)
    assert root["data-order"] == ",".join(found), "each row is back at its place"
    assert root["data-requests"] == "0"
