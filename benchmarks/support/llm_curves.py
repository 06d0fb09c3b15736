"""The validation curves of language models in `curvefit/data/llm_curves.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalerl_curvefit import Curve

FILE = Path(__file__).parents[2] / "curvefit" / "data" / "llm_curves.json"
COLLAPSE = 0.1
"""A run collapsed if the mean reward of two consecutive evaluations is this far below the highest such mean before."""


@dataclass(frozen=True, eq=False)
class LLMCurve:
    """The validation curve of one run.

    name: name of the run.
    source: repository that published the run.
    licence: licence of that repository.
    metric: evaluated metric.
    curve: the points, with compute in training steps and the number of completions of each.
    """

    name: str
    source: str
    licence: str
    metric: str
    curve: Curve

    @property
    def collapsed(self) -> bool:
        """Whether the reward fell by more than `COLLAPSE` for more than one evaluation."""
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
