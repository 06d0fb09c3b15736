"""``curve.csv``: the points of a run's curve as a table, one row per evaluation; the same in its directory and in a
ConfigMap."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from scalerl_api.wire import EvaluationPoint, PassAt

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
"""Columns of every curve. ``compute`` is in completion tokens of trained steps; ``docs/local-run.md`` explains the others."""

PART_COLUMN: Final = "reward_part_"
"""Prefix of the columns for the parts of verdicts, after the others; empty for points without the part."""
PASS_AT: Final = re.compile(r"pass_at_(\d+)")
"""Columns after the parts: pass@k for each k, and the limits of its interval with the suffixes ``_low`` and ``_high``."""
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
MAX_LABEL_VALUES: Final = 16
"""Maximum number of values of a label that the breakdown of an evaluation set lists: ranges of numbers, or the most frequent
of other values."""
OTHER_VALUES: Final = "other"
"""Value in place of those that the breakdown does not list."""


def curve_csv(points: Iterable[EvaluationPoint]) -> str:
    """The table with a header; rewards have all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    points = list(points)
    parts = sorted({name for p in points for name in p.parts})
    further = [PART_COLUMN + name for name in parts]
    further += _pass_columns(at for p in points for at in p.pass_at)
    writer.writerow((*CURVE_COLUMNS, *further))
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
                *(map(_further(p).get, further)),
            )
        )
    return text.getvalue()


LABEL_COLUMNS: Final = ("set", "version", "compute", "label", "value", "reward", "prompts")


def labels_csv(points: Iterable[EvaluationPoint]) -> str:
    """The breakdown of ``points`` by label, with a header. It is a separate table, because label values come from the data
    and would change the header of ``curve.csv``. pass@k has the same columns as in :func:`curve_csv`."""
    text = io.StringIO()
    points = list(points)
    further = _pass_columns(at for p in points for one in p.by_label for at in one.pass_at)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*LABEL_COLUMNS, *further))
    for p in points:
        for one in p.by_label:
            known = (
                p.set_name,
                p.version,
                p.work_tokens,
                one.label,
                one.value,
                repr(one.reward),
                one.prompts,
            )
            writer.writerow((*known, *map(_pass_cells(one.pass_at).get, further)))
    return text.getvalue()


def is_number(value: str) -> bool:
    """Whether a label's value is a decimal number.

    >>> is_number("12"), is_number("-0.5"), is_number("nan"), is_number("2 to 5")
    (True, True, False, False)
    """
    return _NUMBER.fullmatch(value) is not None


def label_order(label: str, value: str) -> tuple[str, bool, bool, float, str]:
    """Sort key of label values: numbers and ranges by their (lower) bound, then other text, :data:`OTHER_VALUES` last.

    >>> sorted([("operations", v) for v in ("10", "other", "9", "zoo")], key=lambda pair: label_order(*pair))
    [('operations', '9'), ('operations', '10'), ('operations', 'zoo'), ('operations', 'other')]
    """
    low = value.partition(" to ")[0]
    number = float(low) if is_number(low) else None
    return label, value == OTHER_VALUES, number is None, number or 0.0, value


def fold_labels(labels: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The prompts' labels, with the values of each label folded to at most :data:`MAX_LABEL_VALUES`.

    Numbers are folded into ranges with about equally many prompts; of other values, the rarest are folded into one.

    >>> [one["operations"] for one in fold_labels([{"operations": str(n)} for n in range(2, 52)])[:5]]
    ['2 to 4', '2 to 4', '2 to 4', '5 to 7', '5 to 7']
    """
    counts: dict[str, Counter[str]] = {}
    for prompt_labels in labels:
        for label, value in prompt_labels.items():
            counts.setdefault(label, Counter())[value] += 1
    folded = {label: _fold_values(label, value_counts) for label, value_counts in counts.items()}
    return [
        {label: folded[label][value] for label, value in prompt_labels.items()} for prompt_labels in labels
    ]


def _fold_values(label: str, counts: Counter[str]) -> dict[str, str]:
    """The folded value of each value of a label. ``counts``: the number of prompts with it."""
    if len(counts) <= MAX_LABEL_VALUES:
        return {value: value for value in counts}
    if not all(is_number(value) for value in counts):
        frequent = sorted(counts, key=lambda value: (-counts[value], label_order(label, value)))
        kept = set(frequent[:MAX_LABEL_VALUES])
        return {value: value if value in kept else OTHER_VALUES for value in counts}
    ranges: dict[int, list[str]] = {}
    before = 0
    for value in sorted(counts, key=float):
        middle = 2 * before + counts[value]
        ranges.setdefault(middle * MAX_LABEL_VALUES // (2 * counts.total()), []).append(value)
        before += counts[value]
    return {
        value: values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"
        for values in ranges.values()
        for value in values
    }


def curve_points(text: str) -> list[EvaluationPoint]:
    """The evaluations in the text of a ``curve.csv``; 0 for columns that it does not have.

    Raises:
        ValueError: the text is no such table, or a row is no evaluation.
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
                    parts={
                        name.removeprefix(PART_COLUMN): float(text)
                        for name, text in value.items()
                        if name.startswith(PART_COLUMN) and text
                    },
                    pass_at=[
                        PassAt(
                            int(at[1]), float(text), float(value[f"{name}_low"]), float(value[f"{name}_high"])
                        )
                        for name, text in value.items()
                        if (at := PASS_AT.fullmatch(name)) and text
                    ],
                )
            )
        except KeyError as error:
            raise ValueError(f"the curve has no column {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {len(points) + 1} of the curve is no evaluation: {error}") from error
    return points


def _further(point: EvaluationPoint) -> dict[str, str]:
    return {PART_COLUMN + name: repr(value) for name, value in point.parts.items()} | _pass_cells(
        point.pass_at
    )


def _pass_columns(all_estimates: Iterable[PassAt]) -> list[str]:
    ks = sorted({at.k for at in all_estimates})
    return [f"pass_at_{k}{limit}" for k in ks for limit in ("", "_low", "_high")]


def _pass_cells(pass_at: Iterable[PassAt]) -> dict[str, str]:
    cells: dict[str, str] = {}
    for at in pass_at:
        name = f"pass_at_{at.k}"
        cells |= {name: repr(at.mean), f"{name}_low": repr(at.low), f"{name}_high": repr(at.high)}
    return cells


def curve_figures(text: str) -> list[dict[str, int | float]]:
    """The numbers of each row of a ``curve.csv``, by column: ``mixed_versions`` as 0 or 1, without ``eval_version``.

    Empty cells are omitted.

    Raises:
        ValueError: the text is no such table.

    >>> curve_figures("reward,version,mixed_versions,eval_version\\n0.25,40,true,12\\n")
    [{'reward': 0.25, 'version': 40, 'mixed_versions': 1}]
    """
    return [
        {name: _figure(value) for name, value in row.items() if name != "eval_version" and value != ""}
        for row in _rows(text)
    ]


def _rows(text: str) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ValueError(f"this is no curve: {error}") from error


def _figure(value: str | None) -> int | float:
    # csv returns None for a missing field, and a list of the fields beyond the header.
    if not isinstance(value, str):
        raise ValueError("a row of the curve is shorter or longer than its header")
    if value in ("true", "false"):
        return int(value == "true")
    return int(value) if value.isdecimal() else float(value)
