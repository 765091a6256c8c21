"""What torch's C++ distributed samplers answer, as data and by asking them.

`RECORDED` maps scripts to the answers of libtorch; `ours(script)` answers by minidl; `libtorch(program, scripts)` asks
the C++ program that `compiled(folder)` builds from tests/cpp/distributed_samplers.cpp, where the steps of a script are
explained. Run this file to write the recorded answers afresh: it takes a C++ compiler and some ten seconds.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from minidl.data.distributed import DistributedRandomSampler, DistributedSequentialSampler

_HERE = Path(__file__).parent
_DATA = _HERE / "data" / "cpp_samplers.json"
RECORDED: dict[str, str] = json.loads(_DATA.read_text()) if _DATA.exists() else {}


def scripts() -> Iterator[str]:
    """The grid that is recorded: small sizes listed in full, the edges of the shuffle's two regimes by their hash."""
    epoch_by_epoch = "i n3 i n0 n4 n1000 n1 e1 i r n5 s n2 e7 n1 l n1000 n1 r0 n1 r11 i n2 r n2"
    epoch_by_epoch += " e4294967295 r n3 e4294967299 r n3"  # only 32 bits of an epoch seed the shuffle
    for size, replicas, duplicates in itertools.product((0, 1, 2, 3, 7, 16, 33), (1, 2, 3, 5), (0, 1)):
        for rank in sorted({0, replicas - 1}):
            for kind in ("random", "sequential"):
                yield f"{kind} {size} {replicas} {rank} {duplicates} {epoch_by_epoch}"
    for size in (1000, 46341, 65534, 65535, 65536, 65537, 1_000_003):
        yield f"random {size} 3 1 1 n5 h{size} e1 r h{size} r{size - 1} h7 h{size}"


def ours(script: str) -> str:
    """minidl's answers to one script."""
    kind, *arguments = script.split()
    size, replicas, rank, duplicates = map(int, arguments[:4])
    cls = DistributedRandomSampler if kind == "random" else DistributedSequentialSampler
    sampler = cls(size, replicas, rank, allow_duplicates=bool(duplicates))
    archive: dict[str, torch.Tensor] = {}
    return " ".join(_answer(sampler, step, archive) for step in arguments[4:])


def _answer(sampler: Any, step: str, archive: dict[str, torch.Tensor]) -> str:
    name, number = step[0], int(step[1:]) if step[1:] else None
    if name == "n":
        return _listed(sampler.next(number))
    if name == "h":
        return _hashed(sampler.next(number))
    if name == "e":
        sampler.set_epoch(number)
    elif name == "r":
        sampler.reset(number)
    elif name == "s":
        sampler.save(archive)
    elif name == "l":
        sampler.load(archive)
    return f"{sampler.index()}@{sampler.epoch()}"


def _listed(batch: list[int] | None) -> str:
    return "none" if batch is None else f"[{','.join(map(str, batch))}]"


def _hashed(batch: list[int] | None) -> str:
    if batch is None:
        return "none"
    value = 0
    for index in batch:
        value = (value * 31 + index) % 2**64
    return f"{len(batch)}:{value}"


def why_not_compiled() -> str | None:
    """The reason why the C++ program cannot be built here, or None."""
    if sys.platform != "linux":
        return "the recorded answers are those of libstdc++, which torch uses on Linux"
    if shutil.which("g++") is None:
        return "no g++ to compile the C++ samplers with"
    if not (_torch() / "include" / "torch" / "csrc" / "api").exists():
        return "this torch comes without its C++ headers"
    return None


def compiled(folder: Path) -> Path:
    """Build the C++ program against the installed torch; about ten seconds."""
    program = folder / "distributed_samplers"
    include, lib = _torch() / "include", _torch() / "lib"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
            *("-I", include, "-I", include / "torch" / "csrc" / "api" / "include"),
            *(_HERE / "cpp" / "distributed_samplers.cpp", "-o", program),
            *(f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch", "-ltorch_cpu", "-lc10"),
        ],
        check=True,
    )
    return program


def _torch() -> Path:
    return Path(torch.__file__).parent


def libtorch(program: Path, scripts: Iterable[str]) -> list[str]:
    """libtorch's answers, one string for each script."""
    done = subprocess.run([program], input="\n".join(scripts), text=True, capture_output=True, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asked = list(scripts())
        answers = libtorch(compiled(Path(folder)), asked)
    _DATA.write_text(json.dumps(dict(zip(asked, answers, strict=True)), indent=0) + "\n")
