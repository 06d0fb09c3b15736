"""Epochs in ``scalerl report``: how the responses to a prompt differ from those of the epoch before, of ``history.jsonl``.

Whether speculation from history pays follows from the first figure, and whether lengths can be predicted from the third.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from scalerl_api.history import HistoryLine
from scalerl_api.paths import RunPaths
from scalerl_cli.curves import formatting
from scalerl_cli.curves.problem import CurveProblem

MOVED: Final = 0.1
"""Of the ranks: RhymeRL calls a larger change of rank material."""


@dataclass(frozen=True)
class EpochRow:
    """The prompts of a run that were sampled for the n-th time, n from 2 on.

    reuse: share of the tokens in a run of eight or more that also occurs in a response of the epoch before; None where none
        was compared. mean_tokens, previous_tokens: per response. rank_correlation: of the prompts' mean lengths in the two
        epochs (Spearman); None where all are equal. moved: share of the prompts whose rank by length changed by more than
        ``MOVED`` of the ranks. accepted: share of the drafted tokens; None where generators reported none.
    """

    run: str
    epoch: int
    prompts: int
    reuse: float | None
    mean_tokens: float
    previous_tokens: float
    rank_correlation: float | None
    moved: float
    accepted: float | None


def epoch_rows(runs: Sequence[tuple[str, Path]]) -> list[EpochRow]:
    """The rows of each run with a history, by run and epoch.

    Raises:
        CurveProblem: a ``history.jsonl`` is not readable.
    """
    return [
        _row(name, visit + 1, lines)
        for name, directory in runs
        for visit, lines in sorted(_by_visit(RunPaths(directory).history_lines).items())
    ]


def _by_visit(path: Path) -> dict[int, list[HistoryLine]]:
    """The newest line of each prompt and visit. Partial lines are skipped: a kill leaves some."""
    found: dict[int, dict[tuple[int, int], HistoryLine]] = {}
    decode = msgspec.json.Decoder(HistoryLine).decode
    try:
        with path.open("rb") as file:
            for text in file:
                try:
                    line = decode(text)
                except msgspec.DecodeError:
                    continue
                found.setdefault(line.visit, {})[line.task, line.prompt] = line
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CurveProblem(f"{path}: {error.strerror}") from error
    return {visit: list(lines.values()) for visit, lines in found.items()}


def _row(run: str, epoch: int, lines: list[HistoryLine]) -> EpochRow:
    compared = sum(line.compared_tokens for line in lines)
    drafted = sum(line.drafted_tokens or 0 for line in lines)
    new = _ranks([line.tokens / line.responses for line in lines])
    old = _ranks([line.previous_tokens / line.previous_responses for line in lines])
    varies = new.std() > 0 and old.std() > 0
    return EpochRow(
        run=run,
        epoch=epoch,
        prompts=len(lines),
        reuse=sum(line.reused_tokens for line in lines) / compared if compared else None,
        mean_tokens=sum(line.tokens for line in lines) / sum(line.responses for line in lines),
        previous_tokens=sum(line.previous_tokens for line in lines)
        / sum(line.previous_responses for line in lines),
        rank_correlation=float(np.corrcoef(new, old)[0, 1]) if varies else None,
        moved=float(np.mean(np.abs(new - old) > MOVED * len(lines))),
        accepted=sum(line.accepted_tokens or 0 for line in lines) / drafted if drafted else None,
    )


def _ranks(values: list[float]) -> np.ndarray:
    """Ranks from 1 on; equal values have their mean rank. Shape (n,)."""
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values)
    return ranks


def epoch_table(rows: Sequence[EpochRow]) -> list[list[str]]:
    """The header and a line a row; the run, and what was not measured, are left out."""
    runs, drafts = len({row.run for row in rows}) > 1, any(row.accepted is not None for row in rows)
    head = [*(["run"] if runs else []), "epoch", "prompts", "tokens reused", "mean length", "before"]
    head += ["rank correlation", f"moved > {MOVED:.0%}", *(["drafts accepted"] if drafts else [])]
    return [
        head,
        *(
            [
                *([row.run] if runs else []),
                *(str(row.epoch), str(row.prompts), _percent(row.reuse)),
                *(f"{row.mean_tokens:.1f}", f"{row.previous_tokens:.1f}"),
                "" if row.rank_correlation is None else formatting.reward(row.rank_correlation, 3),
                _percent(row.moved),
                *([_percent(row.accepted)] if drafts else []),
            ]
            for row in rows
        ),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def epoch_csv(rows: Sequence[EpochRow]) -> str:
    """The rows with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    fields = list(EpochRow.__dataclass_fields__)
    writer.writerow(fields)
    writer.writerows(
        ["" if (value := getattr(row, name)) is None else value for name in fields] for row in rows
    )
    return text.getvalue()
