"""Programs that hold batches in every way see no byte change, and leave no slab in use (see `arena_soak`)."""

from __future__ import annotations

import warnings

import arena_soak
import pytest


@pytest.mark.live
@pytest.mark.parametrize(("seed", "way"), list(enumerate(arena_soak.WAYS)))
def test_what_a_program_holds_never_changes(seed: int, way: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "More than 40 batches", RuntimeWarning)
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        volume = arena_soak.soak(60, seed, way)
    assert volume.batches == 60
    assert volume.bytes > 20_000_000
    assert volume.slabs > 0
