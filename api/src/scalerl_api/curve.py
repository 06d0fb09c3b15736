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
    "prompts",
    "given_up_prompts",
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
                p.prompts,
                p.given_up_prompts,
            )
        )
    return text.getvalue()


def curve_points(text: str) -> list[EvaluationPoint]:
    """The evaluations of such a table. Columns that an earlier release did not write are 0.

    Raises:
        ValueError: it is no such table, or a row of it is none.
    """
    points = []
    for row in _rows(text):
        value = {name: text for name, text in row.items() if isinstance(name, str)}
        try:
            points.append(
                EvaluationPoint(
                    version=int(value["version"]),
                    work_tokens=int(value["compute"]),
                    reward=float(value["reward"]),
                    standard_error=float(value.get("standard_error", 0.0)),
                    samples=int(value["samples"]),
                    prompts=int(value.get("prompts", 0)),
                    set_digest=value["eval_version"],
                    mixed_versions=_figure(value["mixed_versions"]) == 1,
                    truncated_fraction=float(value.get("truncated_fraction", 0.0)),
                    mean_tokens=float(value.get("mean_tokens", 0.0)),
                    wall_seconds=float(value.get("wall_seconds", 0.0)),
                    device_seconds=float(value.get("device_seconds", 0.0)),
                    given_up_prompts=int(value.get("given_up_prompts", 0)),
                )
            )
        except KeyError as error:
            raise ValueError(f"the curve has no column {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {len(points) + 1} of the curve is no evaluation: {error}") from error
    return points


def curve_figures(text: str) -> list[dict[str, int | float]]:
    """The numbers of each row of such a table, by column; ``mixed_versions`` as 0 or 1, ``eval_version`` is none.

    Columns that an earlier release did not write are left out.

    Raises:
        ValueError: it is no such table.

    >>> curve_figures("reward,version,mixed_versions,eval_version\\n0.25,40,true,12\\n")
    [{'reward': 0.25, 'version': 40, 'mixed_versions': 1}]
    """
    return [
        {name: _figure(value) for name, value in row.items() if name != "eval_version"} for row in _rows(text)
    ]


def _rows(text: str) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ValueError(f"this is no curve: {error}") from error


def _figure(value: str | None) -> int | float:
    # csv gives None for a missing field, and a list of those beyond the header.
    if not isinstance(value, str):
        raise ValueError("a row of the curve is shorter or longer than its header")
    if value in ("true", "false"):
        return int(value == "true")
    return int(value) if value.isdecimal() else float(value)
