"""The sizes of the suite: what of a parameter's values only `-m slow` tries."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """These values, as `parametrize` takes them; a tuple is a value for each of several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]
