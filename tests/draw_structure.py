"""Draw which module of the package imports which, from the code itself; print its figures.

    python tests/draw_structure.py -o structure.svg                 # this working tree
    python tests/draw_structure.py -o before.png --before b0d5244   # a git revision
    python tests/draw_structure.py --figures                        # lines by folder, largest functions

Each folder is a band of boxes. A module imports from bands above its own (arcs at the right) and from the left of its
own band (arcs above the boxes). Red: imports in the wrong direction, and modules that import each other in a circle.
Dashed: imports for type checkers only. The order is ORDER of `test_architecture.py`, or computed if there is none.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import structure  # noqa: E402  (a script adds its helpers' folder itself)

Band = tuple[str, list[str]]
"""A folder's name ("" for modules of the package itself) and its modules, each after those that it imports."""
Edges = dict[str, frozenset[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Drawing needs matplotlib, --figures needs ruff."
    )
    parser.add_argument("-o", "--output", type=Path, help="the picture to write: .svg, .png or .pdf")
    parser.add_argument("--before", metavar="REV", help="draw this git revision instead of the working tree")
    parser.add_argument("--figures", action="store_true", help="print lines by folder and the ten largest functions")
    options = parser.parse_args(arguments)
    if not (options.output or options.figures):
        parser.error("nothing to do: give -o PICTURE, --figures, or both")
    with tempfile.TemporaryDirectory() as place:
        root = extract(options.before, Path(place)) if options.before else ROOT
        package = root / structure.NAME
        if options.output:
            draw(package, root / "tests" / "test_architecture.py", options.output, options.before or "")
        if options.figures:
            print(figures(package))
    return 0


def extract(revision: str, place: Path) -> Path:
    """Write the files of a git revision into `place`."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision, structure.NAME, "tests"], stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(place, filter="data")
    return place


# --- The order --------------------------------------------------------------------------------------------------------
def bands_of(order: Iterable[tuple[str, str]], modules: Iterable[str]) -> list[Band]:
    """Turn ORDER into bands, less the modules that don't exist; modules that ORDER lacks are at the end."""
    left = set(modules)
    bands: list[Band] = []
    for folder, names in order:
        full = [f"{folder}.{name}" if folder else name for name in names.split()]
        bands.append((folder, [module for module in full if module in left]))
        left -= set(full)
    rest = [("", sorted(left))] if left else []
    return [band for band in bands + rest if band[1]]


def read_order(path: Path) -> list[tuple[str, str]]:
    """Read ORDER from the architecture test without running it; empty if it has none."""
    for node in ast.parse(path.read_text()).body if path.is_file() else []:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ORDER":
            return list(ast.literal_eval(node.value))
    return []


def sorted_by_imports(names: Iterable[str], edges: Edges) -> list[str]:
    """Sort each name after those that it imports; break a circle where the fewest imports point forwards."""
    left = set(names)
    taken: list[str] = []
    while left:
        inner = {name: edges[name] & left - {name} for name in left}
        groups = [[name] for name in left if not inner[name]] or structure.circles(inner)
        last = min(group for group in groups if all(inner[name] <= set(group) for name in group))
        taken.append(min(last, key=lambda name: (len(inner[name]), name)))
        left.remove(taken[-1])
    return taken


def computed_bands(edges: Edges) -> list[Band]:
    """Order a tree that has no ORDER: folders as units among the root modules, then each folder's modules."""
    unit = {module: module.split(".")[0] for module in edges}
    units = {name: frozenset(unit[t] for m in edges if unit[m] == name for t in edges[m]) for name in unit.values()}
    folders = {name for module, name in unit.items() if module != name}
    bands: list[Band] = []
    depths: dict[str, int] = {}
    for name in sorted_by_imports(units, units):
        depths[name] = max((depths[target] + 1 for target in units[name] if target in depths), default=0)
    for name in sorted(units, key=lambda name: (depths[name], name in folders, name)):
        if name in folders:
            bands.append((name, sorted_by_imports([m for m in edges if unit[m] == name], edges)))
        elif bands and not bands[-1][0]:
            bands[-1][1].append(name)
        else:
            bands.append(("", [name]))
    return bands


# --- The picture ------------------------------------------------------------------------------------------------------
WIDTH, HEIGHT, GAP, BETWEEN, LABEL = 1.42, 0.5, 0.14, 0.3, 1.5
"""A box, the gaps between boxes and between bands, and the column of the folders' names, in inches."""
MOST = 15
"""Boxes side by side."""
RIGHT = LABEL + MOST * (WIDTH + GAP) + 0.1
GREY, RED, INK = "#7d8791", "#d62728", "#1c2733"
TINTS = ("#eef3fa", "#f3f7ee", "#fbf4ea", "#f6eff8", "#edf7f6", "#fbf0ef")


@dataclass
class Layout:
    """Where each box (its lower left corner) and each band (top, bottom) is, in inches; y grows upwards."""

    boxes: dict[str, tuple[float, float]]
    bands: list[tuple[str, float, float]]
    height: float

    @classmethod
    def of(cls, bands: list[Band], edges: Edges) -> Layout:
        boxes: dict[str, tuple[float, float]] = {}
        extents = []
        y = 0.0
        for folder, modules in bands:
            top = y
            for row in (modules[begin : begin + MOST] for begin in range(0, len(modules), MOST)):
                spans = [abs(row.index(a) - row.index(b)) for a in row for b in edges[a] if b in row]
                y -= 0.14 + arc_height(max(spans, default=0)) + HEIGHT
                boxes |= {module: (LABEL + n * (WIDTH + GAP), y) for n, module in enumerate(row)}
            y -= 0.12
            extents.append((folder, top, y))
            y -= BETWEEN
        height = -y - BETWEEN
        return cls(
            {module: (x, y + height) for module, (x, y) in boxes.items()},
            [(folder, top + height, bottom + height) for folder, top, bottom in extents],
            height,
        )


def arc_height(span: int) -> float:
    """How far above its boxes an arc over `span` boxes rises, in inches."""
    return 0.22 * span**0.6 if span else 0.0


def draw(package: Path, architecture: Path, output: Path, revision: str) -> None:
    """Draw the package's imports into `output`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    imports = structure.read_imports(package)
    edges = {module: found.at_run_time | found.for_types for module, found in imports.items()}
    order = read_order(architecture)
    bands = bands_of(order, edges) if order else computed_bands(edges)
    layout = Layout.of(bands, edges)
    circles = structure.circles(edges)
    place = {module: n for n, module in enumerate(module for _, modules in bands for module in modules)}
    wrong = [(a, b) for a in place for b in sorted(edges[a]) if place[b] > place[a]]

    notes = list(in_words(wrong, imports, circles))
    width, footer = RIGHT + 3.6, 0.23 * len(notes) + 0.5
    figure = plt.figure(figsize=(width, layout.height + footer + 1.1))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.6, width - 0.6), ylim=(-footer - 0.2, layout.height + 0.9))
    axes.axis("off")
    python, html = (sum(map(line_count, package.rglob(f"*.{kind}"))) for kind in ("py", "html"))
    axes.text(
        -0.3, layout.height + 0.55,
        f"{structure.NAME}{f' at {revision}' if revision else ''}: {len(place)} modules, "
        f"{python:,} lines of Python, {html:,} of HTML, {sum(map(len, edges.values()))} imports, "
        f"{len(wrong)} in the wrong direction, {len(circles)} circles",
        fontsize=17, fontweight="bold", color=INK,
    )  # fmt: skip
    axes.text(
        -0.3, layout.height + 0.2,
        "A module imports from the bands above its own (arcs at the right; the wider, the more imports) "
        "and from the left of its own band (arcs above the boxes)."
        + ("" if order else " This revision enforces no order: drawn in the order with the least red."),
        fontsize=11, color=INK,
    )  # fmt: skip
    draw_bands(axes, layout, bands)
    draw_arcs(axes, layout, bands, edges, set(wrong))
    draw_arrows(axes, layout, imports, set(wrong))
    draw_boxes(axes, layout, structure.modules(package), {module for circle in circles for module in circle})
    for number, note in enumerate(notes):
        axes.text(-0.3, -0.35 - 0.23 * number, note, fontsize=11, color=RED if "→" in note else INK, va="top")
    metadata = {"Date": None} if output.suffix == ".svg" else {}
    figure.savefig(output, dpi=90, metadata=metadata)
    plt.close(figure)


def in_words(
    wrong: list[tuple[str, str]], imports: dict[str, structure.Imports], circles: list[list[str]]
) -> Iterator[str]:
    """Write the wrong imports and the circles as lines of text."""
    yield "No import in the wrong direction." if not wrong else "Wrong direction:"
    words = [f"{a} → {b}{' (types)' if b in imports[a].for_types else ''}" for a, b in wrong]
    yield from ("    " + ",   ".join(words[n : n + 6]) for n in range(0, len(words), 6))
    yield "No circle." if not circles else "Circles:"
    yield from (
        f"    {' → '.join([*circle, circle[0]]) if len(circle) == 2 else ', '.join(circle) + ' →'}"
        for circle in circles
    )


def draw_bands(axes: Any, layout: Layout, bands: list[Band]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for number, (folder, top, bottom) in enumerate(layout.bands):
        axes.add_patch(
            FancyBboxPatch(
                (-0.25, bottom), RIGHT + 0.2, top - bottom, boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=TINTS[number % len(TINTS)], edgecolor="#d5dae0", linewidth=1, zorder=0,
            )
        )  # fmt: skip
        name, weight = (f"{folder}/", "bold") if folder else (f"{structure.NAME}/", "normal")
        axes.text(-0.1, (top + bottom) / 2, name, fontsize=14, fontweight=weight, color=INK, va="center", zorder=5)


def draw_boxes(axes: Any, layout: Layout, files: dict[str, Path], in_circle: set[str]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for module, (x, y) in layout.boxes.items():
        colour = RED if module in in_circle else "#5b6875"
        axes.add_patch(
            FancyBboxPatch(
                (x, y), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08",
                facecolor="white", edgecolor=colour, linewidth=1.8 if module in in_circle else 1, zorder=4,
            )
        )  # fmt: skip
        name = module.rpartition(".")[2]
        size = min(11, 160 / len(name))  # a long name fits its box
        axes.text(x + WIDTH / 2, y + HEIGHT * 0.62, name, fontsize=size, color=INK, ha="center", va="center", zorder=5)
        lines = f"{line_count(files[module]):,} lines"
        axes.text(x + WIDTH / 2, y + HEIGHT * 0.22, lines, fontsize=8.5, color=GREY, ha="center", va="center", zorder=5)


def draw_arrows(axes: Any, layout: Layout, imports: dict[str, structure.Imports], wrong: set[tuple[str, str]]) -> None:
    """Draw the arrows from box to box: those inside a band, and all that are wrong."""
    from matplotlib.patches import FancyArrowPatch

    band = {
        module: n
        for module, (_, y) in layout.boxes.items()
        for n, (_, top, bottom) in enumerate(layout.bands)
        if bottom <= y <= top
    }
    for module, found in imports.items():
        for target in sorted(found.at_run_time | found.for_types):
            bad = (module, target) in wrong
            if not (bad or band[module] == band[target]):
                continue
            (x1, y1), (x2, y2) = layout.boxes[module], layout.boxes[target]
            style: dict[str, Any] = {
                "linestyle": "--" if target in found.for_types else "-", "color": RED if bad else GREY,
                "linewidth": 1.6 if bad else 0.9, "alpha": 0.85, "zorder": 3.5 if bad else 3,
            }  # fmt: skip
            if y1 == y2:
                draw_arc(axes, (x1, y1 + HEIGHT), (x2, y2 + HEIGHT), style)
            else:
                begin, end = (0, HEIGHT) if y2 < y1 else (HEIGHT, 0)
                axes.add_patch(
                    FancyArrowPatch(
                        (x1 + WIDTH / 2, y1 + begin), (x2 + WIDTH / 2, y2 + end), arrowstyle="-|>",
                        connectionstyle=f"arc3,rad={0.12 if bad else 0.04}", mutation_scale=10, shrinkA=0, shrinkB=1,
                        **style,
                    )
                )  # fmt: skip


def draw_arc(axes: Any, begin: tuple[float, float], end: tuple[float, float], style: dict[str, Any]) -> None:
    """Draw an arc above a row, from one box to another; it leaves from the side that it leads to."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    side = 1 if end[0] > begin[0] else -1
    x1, x2 = begin[0] + WIDTH * (0.5 + 0.2 * side), end[0] + WIDTH * (0.5 - 0.2 * side)
    span = round(abs(end[0] - begin[0]) / (WIDTH + GAP))
    y = begin[1]
    top = y + arc_height(span) * 4 / 3 * 0.97  # a cubic curve reaches three quarters of its control points' height
    curve = Curve([(x1, y), (x1, top), (x2, top), (x2, y)], [Curve.MOVETO, *[Curve.CURVE4] * 3])
    axes.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=8, shrinkA=0, shrinkB=0, **style))


def draw_arcs(axes: Any, layout: Layout, bands: list[Band], edges: Edges, wrong: set[tuple[str, str]]) -> None:
    """Draw one arc for all right imports of one band from another, at the right margin."""
    from matplotlib.patches import FancyArrowPatch, PathPatch
    from matplotlib.path import Path as Curve

    band = {module: n for n, (_, modules) in enumerate(bands) for module in modules}
    counts = Counter((band[a], band[b]) for a in edges for b in edges[a] if band[a] != band[b] and (a, b) not in wrong)
    sources, targets = Counter(a for a, _ in counts), Counter(b for _, b in counts)
    used: Counter[tuple[str, int]] = Counter()

    def port(kind: str, number: int, most: int) -> float:
        """Spread the arcs of a band: those that leave it over its lower half, those that arrive over its upper half."""
        _, top, bottom = layout.bands[number]
        used[kind, number] += 1
        share = used[kind, number] / (most + 1) / 2
        return top - (top - bottom) * (share if kind == "to" else 0.5 + share)

    for (a, b), count in sorted(counts.items(), key=lambda item: (item[0][0] - item[0][1], item[0])):
        y1, y2 = port("from", a, sources[a]), port("to", b, targets[b])
        out = RIGHT + 0.25 + 3.6 * ((a - b) / len(bands)) ** 0.75
        width = 0.6 + 0.45 * count**0.5
        curve = Curve(
            [(RIGHT, y1), (out, y1), (out, y1 + 0.3 * (y2 - y1)), (out, (y1 + y2) / 2), (out, y2 - 0.3 * (y2 - y1)),
             (out, y2), (RIGHT + 0.1, y2)],
            [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
        )  # fmt: skip
        axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=GREY, linewidth=width, alpha=0.55, zorder=1))
        axes.add_patch(
            FancyArrowPatch(
                (RIGHT + 0.2, y2), (RIGHT - 0.05, y2), arrowstyle="-|>", mutation_scale=9, color=GREY, linewidth=0,
                shrinkA=0, shrinkB=0, zorder=2,
            )
        )  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Function:
    """A function or method; `body` counts its lines without signature, decorators and docstring."""

    where: str
    name: str
    body: int


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(package: Path) -> list[Function]:
    """List all functions and methods of the package, the longest body first."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1:] if ast.get_docstring(node) is not None else node.body
                body = (node.end_lineno or 0) - first[0].lineno + 1 if first else 0
                found.append(Function(f"{path.relative_to(package.parent)}:{node.lineno}", node.name, body))
    return sorted(found, key=lambda function: (-function.body, function.where))


def complexities(package: Path) -> list[tuple[int, str, str]]:
    """Measure every function's cyclomatic complexity with ruff (C901): complexity, name, place; the highest first."""
    command = [
        sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "C901",
        "--config", "lint.mccabe.max-complexity=0", "--output-format", "json", "--exit-zero", str(package),
    ]  # fmt: skip
    found = []
    for row in json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout):
        match = re.fullmatch(r"`(.*)` is too complex \((\d+) > 0\)", row["message"])
        if match is None:
            raise ValueError(f'ruff\'s C901 said {row["message"]!r}; expected "`NAME` is too complex (N > 0)"')
        where = f"{Path(row['filename']).relative_to(package.resolve().parent)}:{row['location']['row']}"
        found.append((int(match[2]), match[1], where))
    return sorted(found, key=lambda row: (-row[0], row[2]))


def figures(package: Path) -> str:
    """Lines by folder, the spread of function lengths, the ten longest and the ten most complex functions."""
    package = package.resolve()
    lines: dict[str, Counter[str]] = {}
    for path in sorted(package.rglob("*.*")):
        if path.suffix in (".py", ".html"):
            folder = str(path.parent.relative_to(package.parent)) + "/"
            lines.setdefault(folder, Counter())[path.suffix] += line_count(path)
            lines[folder]["files"] += 1
    out = [f"{'folder':24}{'files':>7}{'Python':>9}{'HTML':>7}"]
    total: Counter[str] = Counter()
    for folder, counts in lines.items():
        out.append(f"{folder:24}{counts['files']:7}{counts['.py']:9,}{counts['.html']:7,}")
        total += counts
    out.append(f"{'all':24}{total['files']:7}{total['.py']:9,}{total['.html']:7,}")
    found = functions(package)
    bodies = sorted(function.body for function in found)
    out.append(
        f"\n{len(bodies):,} functions; lines of a body: median {statistics.median(bodies):.0f}, "
        f"90th percentile {bodies[int(len(bodies) * 0.9)]}, longest {bodies[-1]}"
    )
    out.append("\nlongest bodies")
    out += [f"{function.body:5}  {function.name:32} {function.where}" for function in found[:10]]
    out.append("\nmost complex (cyclomatic complexity, ruff C901)")
    out += [f"{complexity:5}  {name:32} {where}" for complexity, name, where in complexities(package)[:10]]
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
