"""The picture of epochs in ``scalerl report``: reused tokens, changes of the prompts' lengths, and accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scalerl_api.curve import label_order
from scalerl_cli.curves import plotting
from scalerl_cli.curves.history_report import MOVED, EpochRow
from scalerl_cli.curves.recipes_picture import COLOURS, MARKERS


def draw_epochs(rows: Sequence[EpochRow], path: Path) -> None:
    """Draw shares and mean lengths by epoch, and by difficulty and position in a draft where these are known, into ``path``.

    Raises:
        CurveProblem: it cannot be written, or matplotlib is not installed.
    """
    plotting.check_target(path)
    with plotting.style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        every, rows = rows, [row for row in rows if not row.difficulty]
        names = list(dict.fromkeys(row.run for row in rows))
        lines = 1 + any(row.difficulty or row.accepted_at for row in every)
        figure = Figure(figsize=(10.4, 3.8 * lines + 0.33 * len(names)), layout="constrained")
        (left, right), *below = figure.subplots(lines, 2, squeeze=False)
        for by_position, by_difficulty in below:
            _draw_parts(by_position, by_difficulty, every, names)
        for i, name in enumerate(names):
            own = [row for row in rows if row.run == name]
            epochs = [row.epoch for row in own]
            mark = {
                "color": COLOURS[i % len(COLOURS)],
                "marker": MARKERS[i // len(COLOURS) % len(MARKERS)],
                "ms": 4.5,
            }
            of = f"{name}: " if len(names) > 1 else ""
            for label, values, line in (
                ("tokens reused", [row.reuse for row in own], "-"),
                ("drafts accepted", [row.accepted for row in own], "--"),
                ("rank correlation of lengths", [row.rank_correlation for row in own], "-."),
                (f"prompts moved > {MOVED:.0%} of ranks", [row.moved for row in own], ":"),
            ):
                measured = [(x, y) for x, y in zip(epochs, values, strict=True) if y is not None]
                if measured:
                    left.plot(*zip(*measured, strict=True), **mark, ls=line, lw=1.4, label=f"{of}{label}")
            right.plot(epochs, [row.mean_tokens for row in own], **mark, lw=1.4, label=name)
        left.set_ylim(min(-0.03, *left.get_ylim()), 1.03)
        left.set_ylabel("share, correlation")
        right.set_ylabel("mean length in tokens")
        right.set_ylim(0, 1.08 * max(row.mean_tokens for row in rows))
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        plotting.legend(figure, left)
        plotting.save(figure, path)


def _draw_parts(left: Any, right: Any, rows: Sequence[EpochRow], names: list[str]) -> None:
    """Draw acceptance by position and shares by difficulty; a line per epoch, later epochs darker."""
    last = max(row.epoch for row in rows)
    # Sorted, because the first epoch may lack some difficulties.
    values = sorted({row.difficulty for row in rows if row.difficulty}, key=partial(label_order, ""))
    for name, epoch in dict.fromkeys((row.run, row.epoch) for row in rows):
        every, *parts = [row for row in rows if (row.run, row.epoch) == (name, epoch)]
        mark = {
            "color": COLOURS[names.index(name) % len(COLOURS)],
            "alpha": 0.3 + 0.7 * (epoch - 1) / (last - 1),
            "marker": "o",
            "ms": 3.5,
            "lw": 1.4,
        }
        if every.accepted_at:
            left.plot(range(1, 1 + len(every.accepted_at)), every.accepted_at, **mark)
        for line, of in (("-", [row.reuse for row in parts]), ("--", [row.accepted for row in parts])):
            measured = [
                (values.index(row.difficulty), y) for row, y in zip(parts, of, strict=True) if y is not None
            ]
            if measured:
                right.plot(*zip(*measured, strict=True), **mark, ls=line)
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
