"""`minidl course`: what teachers and translators do with the notebooks. `run` gets the command's parsed arguments."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable

from course import texts
from course.handout import Handout, build, originals

LANGUAGES = ("ru", "zh")


def run(arguments: Namespace) -> int:
    """Do what the command's arguments say; return the exit code. Raises ValueError for what cannot be done."""
    return ACTIONS[arguments.action](arguments)


def _build(arguments: Namespace) -> int:
    if not arguments.paths + arguments.student:
        raise ValueError("build: give a folder")
    for folder in arguments.paths + arguments.student:
        handout = Handout(folder.resolve().name if folder in arguments.student else "", arguments.language)
        written = build(folder, handout, arguments.only)
        print(f"{folder}: {len(written)} notebooks" + (f", for {handout.student}" if handout.student else ""))
    return 0


# --- Texts ------------------------------------------------------------------------------------------------------------
def of_file(name: str) -> list[texts.Text]:
    """The texts whose translations are in the file of this name."""
    if name in texts.SHARED:
        return texts.of_modules(*texts.SHARED[name])
    (path,) = (path for path in originals() if path.stem == name)
    return texts.of_cells(json.loads(path.read_text(encoding="utf-8"))) + texts.of_modules(texts.module_of(name))


def _texts(arguments: Namespace) -> int:
    """Print what a language lacks: of all files in numbers, or of those that are named as entries to be translated."""
    only = [name for name in arguments.only if name not in texts.SHARED]
    names = [path.stem for path in originals(only)] if only else []
    names += [name for name in texts.SHARED if name in arguments.only]
    lacks = 0
    for language in (arguments.language,) if arguments.language != "en" else LANGUAGES:
        for name in names or [*(path.stem for path in originals()), *texts.SHARED]:
            all_of_it = of_file(name)
            faults = texts.faults(all_of_it, texts.read(texts.file_of(language, name)))
            lacks += len(faults)
            if names:
                print(texts.skeleton(all_of_it, faults), end="")
                told = {key: fault for key, fault in faults.items() if fault != "missing"}
                print("".join(f"<!-- {place} {mark}: {fault} -->\n" for (place, mark), fault in told.items()), end="")
            else:
                wanted = sum(text.wanted for text in all_of_it)
                print(f"{language} {name}: {len(faults)} of {wanted} texts are missing or older than their original")
    return int(lacks > 0)


ACTIONS: dict[str, Callable[[Namespace], int]] = {"build": _build, "texts": _texts}
