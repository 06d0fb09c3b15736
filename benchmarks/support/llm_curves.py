"""The validation curves of language models in `curvefit/data/llm_curves.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalerl_curvefit import Curve

FILE = Path(__file__).parents[2] / "curvefit" / "data" / "llm_curves.json"
COLLAPSE = 0.1
"""A run collapsed if two evaluations in a row have a mean this far below the best such mean before them."""


@dataclass(frozen=True, eq=False)
class LLMCurve:
    """One run.

    source: the repository that published it. licence: of that repository. metric: what was evaluated.
    curve: the points, compute in training steps, with the completions behind each.
    """

    name: str
    source: str
    licence: str
    metric: str
    curve: Curve

    @property
    def collapsed(self) -> bool:
        """Whether the rewards fell by more than `COLLAPSE` and not for one evaluation only."""
        pairs = (self.curve.reward[1:] + self.curve.reward[:-1]) / 2
        return bool(np.max(np.maximum.accumulate(pairs) - pairs) > COLLAPSE)


def llm_curves(file: Path = FILE) -> list[LLMCurve]:
    """All curves of the file, in its order."""
    return [
        LLMCurve(
            name=name,
            source=entry["source"],
            licence=entry["licence"],
            metric=entry["metric"],
            curve=Curve(entry["compute"], entry["reward"], samples=entry["samples"]),
        )
        for name, entry in json.loads(file.read_text())["curves"].items()
    ]
