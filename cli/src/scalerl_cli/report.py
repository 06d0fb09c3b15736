"""``scalerl report``: rewards by label of the prompts and by task of a mix, turns of episodes, changes of responses between epochs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from scalerl_analysis.history_table import epoch_table
from scalerl_analysis.label_results import label_table
from scalerl_analysis.task_tables import task_table, turn_table
from scalerl_api.paths import RunPaths
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo, replace_text
from scalerl_cli.results import read_metrics


def run_report(arguments: argparse.Namespace) -> int:
    """Print the tables, and write ``report.md`` and the files of each part; returns the exit code.

    By label: ``report.csv`` and ``.png``. Tasks of a mix: ``report-tasks.csv``. Turns of episodes: ``report-turns.csv``.
    Epochs: ``report-history.csv``.
    """
    from scalerl_analysis.pictures import draw_labels

    runs = named_runs(arguments.runs)
    steps = [(name, read_metrics(RunPaths(directory).metrics).dicts()) for name, directory in runs]
    tables = {"tasks": task_table(steps), "turns": turn_table(steps), "history": epoch_table(runs)}
    parts = {f"report-{name}": table for name, table in tables.items() if table.rows}
    # These are reported even if the prompts have no labels.
    if not parts or any(RunPaths(directory).labels.exists() for _, directory in runs):
        parts = {"report": label_table(runs, arguments.set, arguments.label), **parts}
    folder: Path = arguments.to or (runs[0][1] if len(runs) == 1 else Path("report"))
    texts = {"report.md": "\n".join("\n".join(table.markdown()) + "\n" for table in parts.values())}
    texts |= {f"{name}.csv": table.csv() for name, table in parts.items()}
    for name, text in texts.items():
        replace_text(folder / name, text)
    written = [folder / name for name in texts]
    if "report" in parts:
        written.append(folder / "report.png")
        draw_labels(parts["report"].rows, written[-1])
    for table in parts.values():
        for line in (*table.lines(), ""):
            echo(line)
    echo(f"written: {', '.join(map(str, written))}")
    return DONE


def named_runs(words: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and run directories of arguments ``DIR`` and ``NAME=DIR``.

    >>> named_runs(["runs/a", "blend=runs/b"])
    [('a', PosixPath('runs/a')), ('blend', PosixPath('runs/b'))]
    """
    pairs = [
        word.partition("=")
        if "=" in word and not Path(word).is_dir()
        else (Path(word).resolve().name, "=", word)
        for word in words
    ]
    return [(name, Path(directory)) for name, _, directory in pairs]
