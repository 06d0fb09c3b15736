"""Epochs in ``scalerl report``: differences between the responses of consecutive epochs, from ``history.jsonl``.

The share of reused tokens shows whether speculative decoding from history pays, and the rank correlation whether lengths can
be predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from scalerl_api.history import HistoryLine
from scalerl_api.paths import RunPaths
from scalerl_cli.curves import formatting
from scalerl_cli.curves.problem import CurveProblem

POSITIONS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Positions in a draft for which the table has the acceptance."""
MOVED: Final = 0.1
"""Change of rank, as a share of all ranks, above which RhymeRL calls it material."""


@dataclass(frozen=True)
class EpochRow:
    """The prompts of a run that were sampled for the n-th time (n ≥ 2), or those with one value of the difficulty.

    difficulty: empty in the row of all prompts.
    reuse: share of the tokens in sequences of eight or more that also occur in a response of the previous epoch; None if none
        were compared.
    mean_tokens, previous_tokens: mean tokens of a response in this and in the previous epoch.
    rank_correlation: Spearman's, between the prompts' mean lengths in the two epochs; None if all lengths are equal.
    moved: share of the prompts whose rank by length changed by more than ``MOVED`` of the ranks.
    accepted: share of the drafted tokens that were accepted; None if none were drafted.
    acceptance_length: tokens that a decoding step yields for a response; None without reported drafts.
    draft_length: tokens that are drafted for a response in a decoding step; None without reported drafts.
    drafted_by_position, accepted_by_position: tokens at each position in a draft.
    """

    run: str
    epoch: int
    difficulty: str
    prompts: int
    reuse: float | None
    mean_tokens: float
    previous_tokens: float
    rank_correlation: float | None
    moved: float
    accepted: float | None
    acceptance_length: float | None
    draft_length: float | None
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]

    @property
    def accepted_at(self) -> list[float]:
        """Share of the drafted tokens at each position that were accepted, together with all before them in their draft."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs if drafted]


def epoch_rows(runs: Sequence[tuple[str, Path]]) -> list[EpochRow]:
    """The rows of each run with a history, by run and epoch: one for all prompts, then one per difficulty if there are at
    least two.

    Raises:
        CurveProblem: a ``history.jsonl`` cannot be read.
    """
    rows = []
    for name, directory in runs:
        by_visit = _by_visit(RunPaths(directory).history_lines)
        value_of = _difficulties([line for lines in by_visit.values() for line in lines])
        for visit, lines in sorted(by_visit.items()):
            rows.append(_row(name, visit + 1, "", lines))
            parts: dict[str, list[HistoryLine]] = {value: [] for value in value_of.values()}
            for line in lines:
                if line.difficulty is not None:
                    parts[value_of[line.difficulty]].append(line)
            if len(parts) > 1:
                rows += [_row(name, visit + 1, value, own) for value, own in parts.items() if own]
    return rows


def _difficulties(lines: Sequence[HistoryLine]) -> dict[float, str]:
    """Reported value of each difficulty, in order; many difficulties are grouped into ranges, like labels."""
    from scalerl_coordinator.evaluation import fold_labels

    known = sorted(line.difficulty for line in lines if line.difficulty is not None)
    folded = fold_labels([{"difficulty": f"{one:g}"} for one in known])
    return {value: one["difficulty"] for value, one in zip(known, folded, strict=True)}


def _by_visit(path: Path) -> dict[int, list[HistoryLine]]:
    """The newest line of each prompt, by visit. Partial lines, which a kill leaves, are skipped."""
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


def _row(run: str, epoch: int, difficulty: str, lines: list[HistoryLine]) -> EpochRow:
    compared = sum(line.compared_tokens for line in lines)
    drafts = [line for line in lines if line.drafted_tokens is not None]
    drafted = sum(line.drafted_tokens or 0 for line in drafts)
    accepted = sum(line.accepted_tokens or 0 for line in lines)
    steps = sum(line.tokens for line in drafts) - accepted
    new = _ranks([line.tokens / line.responses for line in lines])
    old = _ranks([line.previous_tokens / line.previous_responses for line in lines])
    varies = new.std() > 0 and old.std() > 0
    return EpochRow(
        run=run,
        epoch=epoch,
        difficulty=difficulty,
        prompts=len(lines),
        reuse=sum(line.reused_tokens for line in lines) / compared if compared else None,
        mean_tokens=sum(line.tokens for line in lines) / sum(line.responses for line in lines),
        previous_tokens=sum(line.previous_tokens for line in lines)
        / sum(line.previous_responses for line in lines),
        rank_correlation=float(np.corrcoef(new, old)[0, 1]) if varies else None,
        moved=float(np.mean(np.abs(new - old) > MOVED * len(lines))),
        accepted=accepted / drafted if drafted else None,
        acceptance_length=(steps + accepted) / steps if steps > 0 else None,
        draft_length=drafted / steps if steps > 0 else None,
        drafted_by_position=_sums(line.drafted_by_position for line in lines),
        accepted_by_position=_sums(line.accepted_by_position for line in lines),
    )


def _sums(columns: Iterable[list[int]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*columns, fillvalue=0)))


def _ranks(values: list[float]) -> np.ndarray:
    """(n,) ranks from 1; equal values have their mean rank."""
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values)
    return ranks


def epoch_table(rows: Sequence[EpochRow]) -> list[list[str]]:
    """The header and a line per row, without columns that were not measured, and without the run if there is only one."""
    drafts = any(row.acceptance_length is not None for row in rows)
    positions = [at for at in POSITIONS if any(len(row.accepted_at) >= at for row in rows)]
    return formatting.tabulated(
        rows,
        [
            ("run", lambda row: row.run) if len({row.run for row in rows}) > 1 else None,
            ("epoch", lambda row: str(row.epoch)),
            ("difficulty", lambda row: row.difficulty) if any(row.difficulty for row in rows) else None,
            ("prompts", lambda row: str(row.prompts)),
            ("tokens reused", lambda row: _percent(row.reuse)),
            ("mean length", lambda row: f"{row.mean_tokens:.1f}"),
            ("before", lambda row: f"{row.previous_tokens:.1f}"),
            ("rank correlation", lambda row: formatting.known(row.rank_correlation)),
            (f"moved > {MOVED:.0%}", lambda row: _percent(row.moved)),
            ("acceptance length", lambda row: _decimals(row.acceptance_length)) if drafts else None,
            ("draft length", lambda row: _decimals(row.draft_length)) if drafts else None,
            ("drafts accepted", lambda row: _percent(row.accepted)) if drafts else None,
            *((f"at {at}", partial(_accepted_at, at)) for at in positions),
        ],
    )


def _accepted_at(at: int, row: EpochRow) -> str:
    return _percent(row.accepted_at[at - 1] if len(row.accepted_at) >= at else None)


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def epoch_csv(row: EpochRow) -> dict[str, object]:
    """A row by column; counts by position are separated by spaces."""
    return {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in vars(row).items()
    }
