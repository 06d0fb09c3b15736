"""``curve.csv``: the points of a run's curve as a table, one row an evaluation, in its directory and in a ConfigMap alike."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Final

from scalerl_api.wire import EvaluationPoint

CURVE_COLUMNS: Final = (
    "compute",
    "reward",
    "samples",
    "standard_error",
    "version",
    "wall_seconds",
    "device_seconds",
    "mean_tokens",
    "truncated_fraction",
    "mixed_versions",
    "eval_version",
)
"""``compute`` is in completion tokens of trained steps; ``docs/local-run.md`` has the rest."""


def curve_csv(points: Iterable[EvaluationPoint]) -> str:
    """The table, its header first; rewards with all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CURVE_COLUMNS)
    for p in points:
        writer.writerow(
            (
                p.work_tokens,
                repr(p.reward),
                p.samples,
                repr(p.standard_error),
                p.version,
                f"{p.wall_seconds:.3f}",
                f"{p.device_seconds:.3f}",
                f"{p.mean_tokens:.3f}",
                f"{p.truncated_fraction:.6f}",
                str(p.mixed_versions).lower(),
                p.set_digest,
            )
        )
    return text.getvalue()
