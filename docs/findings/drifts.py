"""Print drifts.md: where the articles, and torch's own note, differ from torch's code; from the companion's table."""

from __future__ import annotations

from collections.abc import Iterator

from minidl.articles import ARTICLES
from minidl.companion.drift import READ_WITH, Drift, drifts

KINDS = {
    "gone": "gone",
    "moved": "moved",
    "changed": "changed",
    "added": "added",
    "design": "true of another design",
    "never": "was never so",
}


INTRO = """# Where descriptions of the loader have drifted from it

For the authors of the four articles that this package is read beside, and for those who keep the note in torch's
`dataloader.py`. Of {every} passages, {wrong} are outdated or were never right; the others lack what came later, or are
true of another design. Each has its section, what torch does, and the line of torch's code that shows it, in version
{version}. The companion checks the same evidence in the installed version: `minidl companion --serve`. What is gone,
moved, changed or added has the version of torch that brought it: the first whose published wheel has it, of 1.0 to 2.13
without 1.3. `python docs/findings/drifts.py` prints this page.
"""


def page() -> Iterator[str]:
    """The lines of the page."""
    every = drifts()
    wrong = sum(each.kind not in ("added", "design") for each in every)
    yield INTRO.format(every=len(every), wrong=wrong, version=READ_WITH)
    for number, article in ARTICLES.items():
        yield f"## {number}. {article.title}\n"
        yield f"By {article.author}, in {article.language}.\n" if article.author else f"In {article.language}.\n"
        yield from entries([each for each in every if each.section is not None and each.section.article == number])
    yield "## The note in torch's own source\n"
    yield "NOTE [ Data Loader Multiprocessing Shutdown Logic ], in `torch/utils/data/dataloader.py`.\n"
    yield from entries([each for each in every if each.section is None])


def entries(found: list[Drift]) -> Iterator[str]:
    """The drifts of one text, those that were never so first."""
    for drift in sorted(found, key=lambda each: list(KINDS).index(each.kind), reverse=True):
        where = "" if drift.section is None else f"{drift.source.removeprefix(f'{drift.section.article} ')}: "
        became = " in torch ".join([KINDS[drift.kind], drift.since]) if drift.since else KINDS[drift.kind]
        text = " ".join(drift.words.paragraphs("en"))
        yield f"- **{where}{drift.words.titles['en']}** ({became}). {text}"
        for claim in drift.findings():
            yield f"    - `{claim.claim}`" + (f" ({claim.where})" if claim.where else "")
    yield ""


if __name__ == "__main__":
    print("\n".join(page()).rstrip())
