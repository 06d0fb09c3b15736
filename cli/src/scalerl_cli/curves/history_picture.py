"""The picture of epochs in ``scalerl report``: what recurs, and how the prompts' lengths change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalerl_cli.curves import plotting
from scalerl_cli.curves.history_report import MOVED, EpochRow
from scalerl_cli.curves.recipes_picture import COLOURS, MARKERS


def draw_epochs(rows: Sequence[EpochRow], path: Path) -> None:
    """Draw shares on the left and mean lengths on the right, by epoch, into ``path``.

    Raises:
        CurveProblem: it cannot be written, or matplotlib is not installed.
    """
    plotting.check_target(path)
    with plotting.style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        names = list(dict.fromkeys(row.run for row in rows))
        figure = Figure(figsize=(10.4, 3.8 + 0.33 * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, name in enumerate(names):
            own = [row for row in rows if row.run == name]
            epochs = [row.epoch for row in own]
            look = {
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
                    left.plot(*zip(*measured, strict=True), **look, ls=line, lw=1.4, label=f"{of}{label}")
            right.plot(epochs, [row.mean_tokens for row in own], **look, lw=1.4, label=name)
        left.set_ylim(min(-0.03, *left.get_ylim()), 1.03)
        left.set_ylabel("share, correlation")
        right.set_ylabel("mean length in tokens")
        right.set_ylim(0, 1.08 * max(row.mean_tokens for row in rows))
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plotting.legend(figure, left)
        plotting.save(figure, path)
