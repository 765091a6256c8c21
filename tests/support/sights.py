"""How colours are seen without one kind of cones, and in grey; how different two colours then are.

Dichromats: Viénot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of displays by
dichromats", Color Research and Application 24 (1999), for protanopia and deuteranopia; for tritanopia, which that
paper leaves out, Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
deficiency", IEEE TVCG 15 (2009), severity 1. All matrices are applied to linear RGB. Grey: the luminance Y of CIE 1931,
as a black-and-white printer or an achromat has it. A difference is CIEDE2000 (CIE 142:2001).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LUMINANCE = (0.2126, 0.7152, 0.0722)
SIGHTS: dict[str, Floats] = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
    "deuteranopia": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    "tritanopia": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ]),
    "grey": np.array([LUMINANCE, LUMINANCE, LUMINANCE]),
}  # fmt: skip


def linear(rgb: npt.ArrayLike) -> Floats:
    """Return linear RGB, 0 to 1, of sRGB values, 0 to 255."""
    share = np.asarray(rgb, np.float64) / 255
    out: Floats = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return out


def seen(rgb: npt.ArrayLike, sight: str) -> npt.NDArray[np.uint8]:
    """Return sRGB values (0 to 255, the last axis has three) as somebody with the sight sees them."""
    light = np.clip(linear(rgb) @ SIGHTS[sight].T, 0, 1)
    share = np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.round(share * 255).astype(np.uint8)


def lab(rgb: Sequence[int], sight: str = "all cones") -> Floats:
    """Return CIE L*a*b* (D65) of an sRGB colour as it is seen."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], LUMINANCE, [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ np.clip(linear(rgb) @ SIGHTS[sight].T, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def lightness(rgb: Sequence[int]) -> float:
    """Return L*, 0 (black) to 100 (white)."""
    return float(lab(rgb)[0])


def difference(one: Sequence[int], other: Sequence[int], sight: str = "all cones") -> float:
    """Return the CIEDE2000 difference of two sRGB colours as they are seen; about 2 can just be noticed."""
    return ciede2000(lab(one, sight), lab(other, sight))


def ciede2000(one: Floats, other: Floats) -> float:
    """Return the CIEDE2000 difference of two L*a*b* colours (Sharma, Wu and Dalal 2005 give the steps)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    stretch = 1 + (1 - np.sqrt(mean / (mean + 25.0**7))) / 2
    a1, a2 = a1 * stretch, a2 * stretch
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    dl, dc, dh = l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    c = (c1 + c2) / 2
    h = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    t = 1 + sum(
        part * np.cos(np.radians(times * h + shift))
        for part, times, shift in ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    )
    middle = ((l1 + l2) / 2 - 50) ** 2
    sl, sc, sh = 1 + 0.015 * middle / np.sqrt(20 + middle), 1 + 0.045 * c, 1 + 0.015 * c * t
    rotation = -2 * np.sqrt(c**7 / (c**7 + 25.0**7)) * np.sin(np.radians(60 * np.exp(-(((h - 275) / 25) ** 2))))
    return float(np.sqrt((dl / sl) ** 2 + (dc / sc) ** 2 + (dh / sh) ** 2 + rotation * (dc / sc) * (dh / sh)))
