"""`import minidl`: what it loads, that every public name is found, and what the environment starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import loaded_after

import minidl

PACKAGE = Path(minidl.__file__).parent


@pytest.mark.parametrize("name", minidl.__all__)
def test_each_public_name_is_its_modules_own(name: str) -> None:
    value = getattr(minidl, name)
    assert value.__module__ == minidl._modules()[name]
    assert vars(minidl)[name] is value
    assert name in dir(minidl)


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """`import minidl.trace` would make `minidl.trace` a module; it is a function."""
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert not modules & set(minidl.__all__)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'minidl' has no attribute 'Dataloader'"):
        minidl.Dataloader  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Dataloader'"):
        exec("from minidl import Dataloader")


@pytest.mark.live
def test_a_module_is_an_attribute_without_an_import_of_its_own() -> None:
    assert "minidl.mini" in loaded_after("import minidl; minidl.mini.RandomSampler")


def test_a_star_import_gives_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from minidl import *", names)
    assert set(minidl.__all__) <= set(names)


@pytest.mark.live
def test_the_bare_import_loads_neither_torch_nor_numpy() -> None:
    assert not {"torch", "numpy"} & loaded_after("import minidl")


@pytest.mark.live
def test_minidl_trace_in_the_environment_starts_a_recording(tmp_path: Path) -> None:
    program = "import minidl; list(minidl.DataLoader(range(3)))"
    loaded_after(program, MINIDL_TRACE=str(tmp_path / "trace"))
    assert len(minidl.read_trace(tmp_path / "trace").select("yield")) == 3
