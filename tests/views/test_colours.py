"""Colours and patterns: what has to be told apart differs by a measured amount, however one sees."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from importlib.resources import files

import numpy as np
import pytest
from sights import SIGHTS, ciede2000, difference, lab

from minidl.companion.pictures import FADED
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Phase, Track
from minidl.views.colours import (
    ACTORS,
    BATCHES,
    DARKEST,
    LIGHTEST,
    NEAR,
    RED,
    SOFT,
    THEMES,
    Paint,
    _perfettos_hash,
    hue_and_lightness,
    is_light,
    legend,
    paint,
    perfettos_name,
    rgb,
    rgb_256,
)
from minidl.views.layout import LaneKind
from minidl.views.scene import ALARMS

CSS = (files("minidl.views") / "timeline" / "timeline.css").read_text()
KINDS = [code for code, event in EVENTS.items() if event.phase is Phase.BEGIN]
WORK = {paint(code) for code in KINDS if not paint(code).soft}
LEAST = {"all cones": 20, "protanopia": 15, "deuteranopia": 15, "tritanopia": 15, "grey": 9}
"""CIEDE2000 between kinds of work in one lane."""


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((50, 2.5, 0), (50, 0, -2.5), 4.3065),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_measure_is_the_published_one(one: tuple[float, ...], other: tuple[float, ...], expected: float) -> None:
    """Pairs of Sharma, Wu and Dalal, table 1."""
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sight", SIGHTS)
def test_the_work_of_a_lane_is_told_apart(sight: str) -> None:
    near = {}
    for one, other in itertools.combinations(KINDS, 2):
        a, b = paint(one), paint(other)
        if lanes_of(one) & lanes_of(other) and not a.soft and not b.soft and a.label != b.label:
            near[a.label, b.label] = difference(rgb(a.colour), rgb(b.colour), sight)
    assert len(near) > 20
    assert min(near.values()) > LEAST[sight], sorted(near.items(), key=lambda item: item[1])[:4]


def lanes_of(code: int) -> set[object]:
    """Whose lanes a step lies in: a pin thread reads what else the loader reads; the loader has its own feeders."""
    if code == ev.INDEX_WRITE[0]:
        return {LaneKind.QUEUE_FEEDERS}
    if code in (ev.RESULT_GET[0], ev.RESULT_REBUILD[0]):
        return {Track.LOADER, Track.PIN}
    if code == ev.SAMPLER_NEXT[0]:  # without workers, the loader fetches
        return {Track.LOADER, "fetches"}
    if code in (ev.FETCH[0], ev.SAMPLE[0], ev.COLLATE[0], ev.MAKE_FETCHER[0]):
        return {Track.WORKER, "fetches"}
    if code == ev.GC[0]:
        return {Track.LOADER, Track.PIN, Track.WORKER, Track.FEEDER, "fetches"}
    return {EVENTS[code].track}


@pytest.mark.parametrize("sight", [sight for sight in SIGHTS if sight != "grey"])
def test_the_way_of_a_batch_has_a_colour_of_its_own(sight: str) -> None:
    """In grey it is told from a step by its arrow and its white edge."""
    assert nearest(BATCHES[0], (look.colour for look in WORK), sight) > 15
    assert min(nearest(one, (other,), sight) for one, other in itertools.combinations(BATCHES, 2)) > 12


@pytest.mark.parametrize(("sight", "least"), [(sight, 5 if sight == "grey" else 12) for sight in SIGHTS])
def test_the_first_four_ranks_or_workers_are_told_apart(sight: str, least: float) -> None:
    """Their number stands beside the colour, so that a fifth may be nearer."""
    assert min(nearest(one, (other,), sight) for one, other in itertools.combinations(ACTORS[:4], 2)) > least


def nearest(colour: str, others: Iterable[str], sight: str = "all cones") -> float:
    return min(difference(rgb(colour), rgb(other), sight) for other in others)


def test_only_what_is_wrong_is_red() -> None:
    """In each table of colours; red is a hue from 0 to 50 degrees with a chroma over 35 in CIE L*a*b*."""
    reds = {event.name for event in EVENTS.values() if is_red(event.colour)}
    assert reds == {EVENTS[code].name for code in ALARMS}
    assert {EVENTS[code].colour for code in ALARMS} == {RED}
    assert not [colour for colour in (*BATCHES, *ACTORS) if is_red(colour)]
    for theme in THEMES.values():
        assert [role for role, colour in theme.items() if is_red(colour)] == ["alarm"]


def is_red(colour: str) -> bool:
    _, a, b = lab(rgb(colour))
    return float(np.hypot(a, b)) > 35 and 0 <= np.degrees(np.arctan2(b, a)) <= 50


def test_each_kind_of_work_has_a_colour_of_its_own() -> None:
    """All waits have one: the words in a bar tell which it is. Nothing else that is drawn has theirs."""
    assert len({look.colour for look in WORK}) == len({look.label for look in WORK}) == len(WORK)
    (wait,) = {paint(code).colour for code in KINDS if paint(code).waits}
    assert wait not in {look.colour for look in WORK}
    assert all(paint(code).colour == EVENTS[code].colour == EVENTS[code + 1].colour for code in KINDS)
    assert paint(ev.RESULT_GET[0]) == paint(ev.READY_GET[0]) == Paint("wait", wait, soft=True, waits=True)


def test_a_legend_names_work_once_and_then_the_patterns() -> None:
    codes = [ev.EPOCH[0], ev.INDEX_WRITE[0], ev.INDEX_GET[0], ev.FETCH[0], ev.RESULT_WRITE[0], ev.RESULT_GET[0]]
    said = [(sign.label, sign.pattern) for sign in legend(codes, simulated=True, unended=True, letters="t task")]
    assert said == [
        ("write", "work"), ("fetch", "work"), ("epoch", "around"), ("waiting", "wait"), ("simulated", "simulated"),
        ("no end recorded", "open"), ("numbers: t task", ""),
    ]  # fmt: skip
    marks = [(sign.label, sign.pattern) for sign in legend([], cause=True, failed=True, states=[ev.RESUMED])]
    assert marks == [("cause of the wait", "cause"), ("failure", "failed"), ("resumed", "state")]


# --- In the Perfetto UI -----------------------------------------------------------------------------------------------
def test_perfetto_draws_each_step_in_nearly_its_colour_and_waits_as_light_as_it_can() -> None:
    """The UI's hash of "fetch" is 200 and of "данные" 64, as its own code says."""
    assert (_perfettos_hash("fetch", 360), _perfettos_hash("данные", 360)) == (200, 64)
    looks = {paint(code) for code, event in EVENTS.items() if event.phase is Phase.BEGIN}
    for look in looks:
        hue, lightness = hue_and_lightness(rgb(look.colour))
        word = perfettos_name(look.colour, lightest=look.waits)
        drawn = _perfettos_hash(word, 360), _perfettos_hash(word + "x", 40) + DARKEST
        expected = LIGHTEST if look.waits else min(LIGHTEST, max(DARKEST, lightness))
        assert min((drawn[0] - hue) % 360, (hue - drawn[0]) % 360) + abs(drawn[1] - expected) <= NEAR, look


@pytest.mark.parametrize(
    ("colour", "hue", "lightness"), [("#ff0000", 12.2, 53.2), ("#00ff00", 127.7, 87.7), ("#0000ff", 265.9, 32.3)]
)
def test_hue_and_lightness_are_those_of_cieluv(colour: str, hue: float, lightness: float) -> None:
    assert hue_and_lightness(rgb(colour)) == pytest.approx((hue, lightness), abs=0.1)
    assert hue_and_lightness((0, 0, 0)) == (0, 0)


# --- Words on what they stand on: WCAG 2, level AA --------------------------------------------------------------------
AA = 4.5


def luminance(colour: Iterable[float]) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Iterable[float], other: Iterable[float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def page_colours(theme: str) -> dict[str, str]:
    selector = re.escape({"light": ":root {", "dark": ':root[data-theme="dark"] {'}[theme])
    (block,) = re.findall(rf"^{selector}(.*?)}}", CSS, re.M | re.S)
    return THEMES[theme] | dict(re.findall(r"--(\w+): ([^;]+);", block))


@pytest.mark.parametrize("theme", THEMES)
def test_all_words_of_a_page_contrast_with_what_they_stand_on(theme: str) -> None:
    colours = page_colours(theme)
    for ink, back in itertools.product(
        ("ink", "faint", "accent", "alarm", "found"), ("paper", "panel", "band", "band2")
    ):
        assert contrast(rgb(colours[ink]), rgb(colours[back])) >= AA, f"{ink} on {back}"
    for back in ("ink", "accent", "alarm"):  # flags on the axis
        assert contrast(rgb(colours["paper"]), rgb(colours[back])) >= AA
    pale = (("band", float(colours["soft"])), ("panel", SOFT), ("panel", FADED))  # of the page, and of the companion
    for code, (back, share) in itertools.product(KINDS, pale):
        if paint(code).soft or share == FADED:
            mix = share * np.array(rgb(paint(code).colour)) + (1 - share) * np.array(rgb(colours[back]))
            assert contrast(rgb(colours["ink"]), mix) >= AA, (paint(code).label, share)


def test_black_or_white_contrasts_with_every_colour() -> None:
    """What is_light chooses, in pictures, the terminal and the companion; and inkOn of the page, at 0.179."""
    colours = {event.colour for event in EVENTS.values() if event.colour} | {*ACTORS, *BATCHES, RED}
    for colour in (*map(rgb, colours), *map(rgb_256, range(16, 256))):
        assert is_light(colour) == (luminance(colour) > 0.179), colour
        assert contrast(colour, (0, 0, 0) if is_light(colour) else (255, 255, 255)) >= AA, colour
    style = (files("minidl.companion") / "companion.html").read_text()
    assert ".k { fill: #000000; } svg .w { fill: #ffffff; }" in style
