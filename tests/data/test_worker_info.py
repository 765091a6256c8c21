"""Worker information outside of a worker."""

from __future__ import annotations

import pytest
import torch.utils.data

import minidl


def test_ours_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", minidl.get_worker_info)
    assert minidl.get_worker_info() is None
