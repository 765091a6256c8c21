"""What the notebooks share: recordings, datasets for their workers, questions, and checks of exercises.

`record` runs a loader and returns its batches and its trace; `place` gives a new folder for a recording; `say`, `show`
and `table` print. `asking` has predictions, `checking` exercises; each notebook's own are in the module of its name
(`first_look`, `many_workers`, ...).
Importing it silences two warnings that depend on the reader's machine: of more workers than cores, and (Python 3.12 and
later) of fork in a process with threads.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import re
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minidl
from course import handout
from course.data import PATIENCE, STEP, Canonical, Held, Stream, Uneven, Walk, numbers
from minidl.tracefile.format import TraceError

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

__all__ = [
    "PATIENCE", "STEP", "Canonical", "Held", "Stream", "Uneven", "Walk",
    "numbers", "opened", "place", "record", "recorded", "recording", "say", "show", "table",
]  # fmt: skip

warnings.filterwarnings("ignore", "This DataLoader will create")
warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)

CHINESE = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
)  # fmt: skip
"""Fonts with Chinese letters, of which the font of matplotlib has none."""


def _letters(language: str) -> None:
    """Let pictures of the Chinese course take their letters from the fonts that the reader's machine has."""
    if language == "zh":
        import matplotlib as mpl
        from matplotlib import font_manager

        # Not every font has the weight asked for; the reader need not know that another one is taken.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        for path in font_manager.findSystemFonts():  # matplotlib's own list may be older than a font
            if re.search("cjk|wqy|pingfang|hiragino|msyh|simhei|hansans", path, re.IGNORECASE):
                font_manager.fontManager.addfont(path)
        fonts = [font for font in CHINESE if font in font_manager.get_font_names()]
        mpl.rcParams["font.family"] = ["DejaVu Sans", *fonts]
        if not fonts:
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            print("这台机器没有中文字体，所以图里的汉字显示为方框。请安装一种（例如 apt install fonts-noto-cjk），再重启内核。")  # noqa: RUF001


_letters(handout.read(Path(__file__).parents[1]).language)

WIDTH = 120
"""Characters of a line that a saved page shows whole."""

_folder = tempfile.TemporaryDirectory(prefix="minidl-course-")  # removed when the kernel ends
_number = itertools.count(1)


def place(name: str) -> Path:
    """A new path for a recording: a cell that records may be run again, and a check counts in a process of its own."""
    return Path(_folder.name) / f"{os.getpid()}-{next(_number)}" / name


def recorded(path: Path | str) -> minidl.Trace:
    """The trace at a path, which must be whole, without the names of the reader's folders: notebooks are handed on."""
    trace = minidl.read_trace(path)
    if trace.problems:
        raise TraceError(f"the recording {Path(path).name} is not whole: {'; '.join(trace.problems)}")
    trace.path = Path(Path(path).name)
    for fact in ("command", "cwd", "host"):
        trace.manifest.pop(fact, None)
    for loader in trace.loaders.values():
        file, _, line = str(loader.get("made_at", "")).rpartition(":")
        loader["made_at"] = f"{'notebook' if 'ipykernel' in file else Path(file).name}:{line}"
    return trace


def opened(name: str) -> minidl.Trace:
    """A recorded run of the folder traces/ beside the notebooks."""
    beside = Path(__file__).parents[1]  # notebooks/, or a copy of it that has the recorded runs in itself
    folder = next(place / "traces" for place in (beside, beside.parent) if (place / "traces").is_dir())
    return recorded(folder / f"{name}.minidl")


def recording(name: str) -> minidl.Trace:
    """The same; a line says where it was recorded, and whether its device is simulated."""
    trace = opened(name)
    facts = trace.manifest
    versions = facts.get("versions", {})
    simulated = bool(trace.described("simulated accelerator"))
    on = "".join(f"{about['accelerator']}, " for about in trace.described("recording") if about.get("accelerator"))
    say(
        f"The recorded run {name!r}: {on * (not simulated)}{facts.get('cpus_allowed')} cores, Python {versions.get('python')}, "
        f"torch {versions.get('torch')}" + ("; pinned memory and device are simulated." if simulated else ".")
    )
    return trace


def _as_list(batch: Any) -> Any:
    return batch.tolist() if hasattr(batch, "tolist") else batch


def record(
    name: str, dataset: Any, *, batches: int | None = None, step: float = 0, keep: Callable[[Any], Any] = _as_list, **options: Any
) -> tuple[list[Any], minidl.Trace]:  # fmt: skip
    """Run a loader of batches of 4 over a dataset; return what is kept of its batches, and its trace.

    batches: how many the loop takes; None = all. step: seconds that the loop works on each. keep: what is kept of a batch;
    unless it is given, the batch as a list. options: of the loader.
    """
    options = {"batch_size": 4, "multiprocessing_context": "fork" if options.get("num_workers") else None} | options
    kept = []
    directory = place(name)
    with minidl.trace(directory), minidl.DataLoader(dataset, **options) as loader:
        for batch in itertools.islice(loader, batches):
            kept.append(keep(batch))
            del batch  # so that nothing holds what `keep` lets go
            time.sleep(step)
    return kept, recorded(directory)


def say(*texts: str) -> None:
    """Print what commands say. A long line is broken between words: a saved page would break it inside one."""
    for line in itertools.chain.from_iterable((text.splitlines() or [""]) for text in texts):
        hanging = " " * (len(line) - len(line.lstrip()) + 4)
        print(textwrap.fill(line, WIDTH, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False))


def show(*functions: Any) -> None:
    """Print functions of the package as they stand there, with the name of their file."""
    for function in functions:
        source, _ = inspect.getsourcelines(function)
        margin = len(source[0]) - len(source[0].lstrip())
        print(f"# {inspect.getmodule(function).__name__.replace('.', '/')}.py")
        print("".join(line[margin:] if line.strip() else line for line in source))


def table(rows: Iterable[tuple[object, ...]], columns: list[str]) -> Styler:
    """Show rows as a table."""
    import pandas as pd

    left = [{"selector": "th, td", "props": "text-align: left"}]
    styled = pd.DataFrame(list(rows), columns=columns).style.set_uuid(f"table{next(_number)}")  # not a random one
    return styled.hide(axis="index").set_table_styles(left)
