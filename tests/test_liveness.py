"""Whether descriptors are left. Deaths and timeouts are tested through the loader, in test_errors."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest

from minidl import liveness


@pytest.mark.parametrize(("number", "raises"), [(errno.EMFILE, True), (errno.ENOSPC, False)])
def test_only_a_lack_of_descriptors_is_named_as_one(number: int, raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no file")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    if raises:
        with pytest.raises(RuntimeError, match=r"Too many open files.*ulimit -n"):
            liveness.raise_if_out_of_descriptors()
    else:
        liveness.raise_if_out_of_descriptors()


def test_with_descriptors_left_nothing_is_raised() -> None:
    liveness.raise_if_out_of_descriptors()
