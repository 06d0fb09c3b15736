"""How often real curves rise late: the counts behind ``scalerl_curvefit.plateau``. A second.

Of each public curve in ``curvefit/data``, by means of three evaluations over the shares of its record:

- first rise: the share at which it first stands .02 above its first evaluation;
- late rise: over the doubling up to a share of 1/4 or 1/2 it gained under .02 and stood within .02 of its best, and then,
  within the next doubling, it rose .02 or more above that.

    python benchmarks/late_rises.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_curvefit import Curve
from scalerl_curvefit.plateau import LEAST, late_rises, record_means

DATA = Path(__file__).parents[1] / "curvefit" / "data"
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def main() -> None:
    both = counted()
    for file, found in both.items():
        late = ", ".join(f"{name} +{gain:.3f}" for name, gain in found["rises"].items())
        print(
            f"{file}: {found['curves']} curves, {found['doublings']} doublings, {len(found['sizes'])} late rises: {late}"
        )
        print(f"    not risen by {SHARES} of their record: {found['not_risen']}")
    print(json.dumps({"benchmark": "late_rises", "figures": both}))


def counted() -> dict[str, dict[str, Any]]:
    """The counts of each file."""
    found: dict[str, dict[str, Any]] = {}
    for file in ("llm_curves", "procgen_curves"):
        curves = json.loads((DATA / f"{file}.json").read_text())["curves"]
        doublings, first = 0, []
        rises: dict[str, float] = {}
        for name, curve in curves.items():
            record = Curve(curve["compute"], curve["reward"])
            share, mean = record_means(record)
            risen = np.flatnonzero(mean >= mean[0] + LEAST)
            first.append(share[risen[0]] if risen.size else 1.0)
            count, gains = late_rises(record)
            doublings += count
            rises.update({f"{name} {i}": round(gain, 3) for i, gain in enumerate(gains, 1)})
        found[file] = {
            "curves": len(curves),
            "doublings": doublings,
            "rises": rises,
            "sizes": sorted(rises.values()),
            "not_risen": [sum(bool(f > s) for f in first) for s in SHARES],
        }
    return found


if __name__ == "__main__":
    main()
