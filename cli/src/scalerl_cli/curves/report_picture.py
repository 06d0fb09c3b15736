"""The pictures of ``scalerl report``: rewards by label, and what changes between epochs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scalerl_api.curve import label_order
from scalerl_cli.curves import plotting
from scalerl_cli.curves.history_report import MOVED, EpochRow
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
        passed = [row.cell.pass_at.get(k) for row in own] if k is not None else []
        _draw_known(axes, x, passed, **mark, mfc="white", lw=1.0, ls="--", label=f"{name}: pass@{k}, last")
    axes.set_ylim(-0.03, 1.03)


def _draw_known(axes: Any, x: Iterable[float], y: Sequence[float | None], **pen: Any) -> None:
    """Draw a line through the points whose value is known."""
    measured = [(at, value) for at, value in zip(x, y, strict=False) if value is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), **pen)


def draw_epochs(rows: Sequence[EpochRow], path: Path) -> None:
    """Draw shares and mean lengths by epoch, and by difficulty and position in a draft where these are known.

    Raises:
        CurveProblem: it cannot be written, or matplotlib is not installed.
    """
    every, rows = rows, [row for row in rows if not row.difficulty]
    names = list(dict.fromkeys(row.run for row in rows))
    lines = 1 + any(row.difficulty or row.accepted_at for row in every)
    with plotting.picture(path, (10.4, 3.8 * lines + 0.33 * len(names)), (lines, 2)) as (_, grid):
        from matplotlib.ticker import MaxNLocator

        (left, right), *below = grid
        for by_position, by_difficulty in below:
            _draw_parts(by_position, by_difficulty, every, names)
        for number, name in enumerate(names):
            own = [row for row in rows if row.run == name]
            epochs = [row.epoch for row in own]
            colour, marker = plotting.pen(number)
            mark = {"color": colour, "marker": marker, "ms": 4.5, "lw": 1.4}
            of = f"{name}: " if len(names) > 1 else ""
            for label, values, line in (
                ("tokens reused", [row.reuse for row in own], "-"),
                ("drafts accepted", [row.accepted for row in own], "--"),
                ("rank correlation of lengths", [row.rank_correlation for row in own], "-."),
                (f"prompts moved > {MOVED:.0%} of ranks", [row.moved for row in own], ":"),
            ):
                _draw_known(left, epochs, values, **mark, ls=line, label=f"{of}{label}")
            right.plot(epochs, [row.mean_tokens for row in own], **mark, label=name)
        left.set(ylabel="share, correlation", ylim=(min(-0.03, *left.get_ylim()), 1.03))
        right.set(ylabel="mean length in tokens", ylim=(0, 1.08 * max(row.mean_tokens for row in rows)))
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_parts(left: Any, right: Any, rows: Sequence[EpochRow], names: list[str]) -> None:
    """Draw acceptance by position and shares by difficulty; a line per epoch, later epochs darker."""
    last = max(row.epoch for row in rows)
    # Sorted, because the first epoch may lack some difficulties.
    values = sorted({row.difficulty for row in rows if row.difficulty}, key=partial(label_order, ""))
    for name, epoch in dict.fromkeys((row.run, row.epoch) for row in rows):
        every, *parts = [row for row in rows if (row.run, row.epoch) == (name, epoch)]
        mark = {
            "color": plotting.pen(names.index(name))[0],
            "alpha": 0.3 + 0.7 * (epoch - 1) / (last - 1),
            "marker": "o",
            "ms": 3.5,
            "lw": 1.4,
        }
        if every.accepted_at:
            left.plot(range(1, 1 + len(every.accepted_at)), every.accepted_at, **mark)
        for line, of in (("-", [row.reuse for row in parts]), ("--", [row.accepted for row in parts])):
            _draw_known(right, [values.index(row.difficulty) for row in parts], of, **mark, ls=line)
    left.set(
        xlabel="position in the draft (later epochs darker)",
        ylabel="drafts accepted up to there",
        ylim=(-0.03, 1.03),
    )
    right.set_xticks(range(len(values)), values, rotation=45, ha="right")
    right.set(
        xlabel="difficulty of the prompts (later epochs darker)",
        ylabel="reused, accepted (dashed)",
        ylim=(-0.03, 1.03),
    )
    for axes in (left, right):
        axes.set_visible(axes.has_data())
