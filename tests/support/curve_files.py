"""Curve files for the tests of their analysis and of the commands, and a look at the pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalerl_curvefit.simulate import Truth, simulated

EXAMPLES = Path(__file__).parents[2] / "curvefit/data/examples"
HEADER = (
    "compute,reward,samples,standard_error,version,wall_seconds,device_seconds,mean_tokens,"
    "truncated_fraction,mixed_versions\n"
)
RATE = 2_000_000.0
"""Completion tokens that a device-hour of the runs below does with two devices."""


def write_plain(path: Path, *, reach: float = 5.0, n: int = 40, seed: int = 1, cmid: float = 2542.0) -> Path:
    curve = simulated(Truth(0.61, 1.92, cmid), reach=reach, n=n, seed=seed)
    rows = "".join(f"{c},{r}\n" for c, r in zip(curve.compute, curve.reward, strict=True))
    path.write_text("compute,reward\n" + rows)
    return path


def write_run(
    path: Path,
    *,
    reach: float = 4.0,
    n: int = 40,
    collapse: float = 0.0,
    truncated: float = 0.01,
    elasticity: float | None = None,
) -> Path:
    """A run's own file: two devices, and four from the middle on where an elasticity is given."""
    curve = simulated(Truth(0.61, 1.92, 2.5e6), reach=reach, n=n, seed=2)
    devices, wall, used, before = 2.0, 0.0, 0.0, 0.0
    text = HEADER + "0,0.2,1000,0.01,0,0.000,0.000,5.0,0.0,false\n"
    for i, (compute, reward) in enumerate(zip(curve.compute, curve.reward, strict=True)):
        speed = 2.0 * RATE / 3600.0
        if elasticity is not None and i >= n // 2:
            devices, speed = 4.0, speed * 2.0**elasticity
        wall += (compute - before) / speed
        used += (compute - before) / speed * devices
        before = float(compute)
        fallen = max(reward - collapse * max(i - n + 4, 0), 0.0)
        text += f"{compute},{fallen},1000,0.01,{i + 1},{wall},{used},5.0,{truncated},false\n"
    path.write_text(text)
    return path


def pixels(path: Path) -> NDArray[np.float64]:
    """(height, width, 3) of a PNG, 0 to 1."""
    from matplotlib import image

    return np.asarray(image.imread(path), dtype=np.float64)[..., :3]


def ink(path: Path) -> float:
    """Share of a picture that is not white."""
    return float(np.mean(pixels(path).min(axis=2) < 0.95))


def has_colour(path: Path, hex_colour: str) -> bool:
    """Whether at least 30 pixels are of a colour."""
    wanted = np.array([int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int(np.sum(np.abs(pixels(path) - wanted).max(axis=2) < 0.02)) >= 30
