"""The picture of ``scalerl report``: rewards by label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl_cli.curves import plotting
from scalerl_cli.curves.label_report import Row


def draw_labels(rows: Sequence[Row], path: Path) -> None:
    """Draw the newest rewards, the first ones and pass@k of the largest k, a panel per evaluation set and label.

    Raises:
        CurveProblem: the picture cannot be written, or matplotlib is not installed.
    """
    panels = list(dict.fromkeys(row.key[:2] for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    k = max((k for row in rows for k in row.cell.pass_at), default=None)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    size = (5.2 * columns, 3.4 * lines + 0.4 + 0.11 * len(names))
    with plotting.picture(path, size, (lines, columns)) as (_, grid):
        several_sets = len({of for of, _ in panels}) > 1
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw_label(axes, [row for row in rows if row.key[:2] == panel], names, k)
            axes.set_xlabel(f"{panel[1]} ({panel[0]})" if several_sets else panel[1])
            axes.set_ylabel("reward")
        for axes in grid.flat:
            axes.set_visible(axes.has_data())


def _draw_label(axes: Any, rows: Sequence[Row], names: Sequence[str], k: int | None) -> None:
    values = list(dict.fromkeys(row.key[2] for row in rows))
    axes.set_xticks(range(len(values)), values, rotation=30 if max(map(len, values)) > 6 else 0)
    for number, name in enumerate(names):
        own = [row for row in rows if row.name == name]
        x = [values.index(row.key[2]) for row in own]
        colour, marker = plotting.pen(number)
        mark = {"color": colour, "marker": marker, "ms": 4.5}
        axes.plot(x, [row.cell.last for row in own], **mark, lw=1.6, label=f"{name}: reward, last")
        axes.plot(x, [row.cell.first for row in own], color=colour, lw=0.8, ls=":", label=f"{name}: first")
        passed = [(at, row.cell.pass_at[k]) for at, row in zip(x, own, strict=True) if k in row.cell.pass_at]
        if passed:
            dashed = {"mfc": "white", "lw": 1.0, "ls": "--", "label": f"{name}: pass@{k}, last"}
            axes.plot(*zip(*passed, strict=True), **mark, **dashed)
    axes.set_ylim(-0.03, 1.03)
