"""Augmentation: what it cuts, flips and normalises, and what it takes."""

from __future__ import annotations

import itertools

import pytest
import torch

from minidl.device.augment import Augment


def test_augmentation_crops_flips_and_normalises_as_it_says() -> None:
    image = torch.randint(0, 256, (8, 10, 12, 3), dtype=torch.uint8)
    out = Augment(7, mean=(0.5, 0.25, 0.0), std=(1.0, 2.0, 4.0), seed=0)(image)
    assert out.shape == (8, 3, 7, 7)
    whole = (image.float() / 255 - torch.tensor([0.5, 0.25, 0.0])) / torch.tensor([1.0, 2.0, 4.0])
    kinds = set()
    for number in range(8):
        cuts = {}
        for top, left in itertools.product(range(4), range(6)):
            cut = whole[number, top : top + 7, left : left + 7]
            cuts |= {(top, left, 0): cut, (top, left, 1): cut.flip(1)}
        same = [key for key, cut in cuts.items() if torch.allclose(cut.permute(2, 0, 1), out[number], atol=1e-6)]
        assert len(same) == 1, "it is one cut of the image, flipped or not"
        kinds.add(same[0])
    assert {flip for *_, flip in kinds} == {0, 1}
    assert len(kinds) > 4


@pytest.mark.parametrize("images", [torch.ones(2, 8, 8, 3), torch.ones(8, 8, 3).byte(), torch.ones(2, 8, 3, 3).byte()])
def test_augmentation_says_what_it_wants(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"uint8 images \(N, H, W, C\) of at least 5 pixels"):
        Augment(5)(images)
