"""Differences between the responses of consecutive epochs, from ``history.jsonl``.

The share of reused tokens shows whether speculative decoding from history pays, and the rank correlation whether lengths can
be predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from scalerl_analysis import formatting
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.table import Column, Table
from scalerl_api.curve import fold_labels
from scalerl_api.history import HistoryLine
from scalerl_api.paths import RunPaths

POSITIONS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Positions in a draft for which the table has the acceptance."""
MOVED: Final = 0.1
"""Change of rank, as a share of all ranks, above which RhymeRL calls it material."""


def epoch_table(runs: Sequence[tuple[str, str | Path]]) -> Table:
    """A row for each epoch n ≥ 2 of each run with a history, and one for each difficulty if there are at least two.

    Columns of drafts are shown if there were any; the CSV has all columns.

    Raises:
        AnalysisProblem: a ``history.jsonl`` cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for name, directory in runs:
        by_visit = _by_visit(RunPaths(Path(directory)).history_lines)
        value_of = _difficulties([line for lines in by_visit.values() for line in lines])
        for visit, lines in sorted(by_visit.items()):
            parts: dict[str, list[HistoryLine]] = {"": lines} | {value: [] for value in value_of.values()}
            for line in lines:
                if line.difficulty is not None:
                    parts[value_of[line.difficulty]].append(line)
            shown = parts if len(parts) > 2 else {"": lines}
            common = {"run": name, "epoch": visit + 1}
            rows += [common | {"difficulty": value} | _figures(own) for value, own in shown.items() if own]
    drafts = any(row["acceptance_length"] is not None for row in rows)
    positions = [at for at in POSITIONS if any(row[f"accepted_at_{at}"] is not None for row in rows)]
    columns = [
        Column("run", "run", varied=True),
        Column("epoch", "epoch"),
        Column("difficulty", "difficulty", varied=True),
        Column("prompts", "prompts"),
        Column("reuse", "tokens reused", formatting.percent),
        Column("mean_tokens", "mean length", "{:.1f}".format),
        Column("previous_tokens", "before", "{:.1f}".format),
        Column("rank_correlation", "rank correlation", formatting.known),
        Column("moved", f"moved > {MOVED:.0%}", formatting.percent),
        Column("acceptance_length", "acceptance length" if drafts else None, "{:.2f}".format),
        Column("draft_length", "draft length" if drafts else None, "{:.2f}".format),
        Column("accepted", "drafts accepted" if drafts else None, formatting.percent),
        Column("drafted_by_position"),
        Column("accepted_by_position"),
        *(Column(f"accepted_at_{at}", f"at {at}", formatting.percent) for at in positions),
    ]
    return Table(columns, rows)


def _difficulties(lines: Sequence[HistoryLine]) -> dict[float, str]:
    """Reported value of each difficulty, in order; many difficulties are grouped into ranges, like labels."""
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
        raise AnalysisProblem(f"{path}: {error.strerror}") from error
    return {visit: list(lines.values()) for visit, lines in found.items()}


def _figures(lines: list[HistoryLine]) -> dict[str, Any]:
    """Figures of the prompts of an epoch.

    Returns:
        values by column, None where there is nothing that they are of.
        reuse: share of the tokens in sequences of eight or more that also occur in a response of the previous epoch.
        mean_tokens, previous_tokens: mean tokens of a response in this and in the previous epoch.
        rank_correlation: Spearman's, between the prompts' mean lengths in the two epochs.
        moved: share of the prompts whose rank by length changed by more than ``MOVED`` of the ranks.
        accepted: share of the drafted tokens that were accepted.
        acceptance_length: tokens that a decoding step yields for a response.
        draft_length: tokens that are drafted for a response in a decoding step.
        drafted_by_position, accepted_by_position: tokens at each position in a draft.
        accepted_at_N: share of the drafted tokens at position N that were accepted, together with all before them in their draft.
    """
    compared = sum(line.compared_tokens for line in lines)
    drafts = [line for line in lines if line.drafted_tokens is not None]
    drafted = sum(line.drafted_tokens or 0 for line in drafts)
    accepted = sum(line.accepted_tokens or 0 for line in lines)
    steps = sum(line.tokens for line in drafts) - accepted
    new = _ranks([line.tokens / line.responses for line in lines])
    old = _ranks([line.previous_tokens / line.previous_responses for line in lines])
    varies = new.std() > 0 and old.std() > 0
    of_drafts = _sums(line.drafted_by_position for line in lines)
    of_accepted = _sums(line.accepted_by_position for line in lines)
    return {
        "prompts": len(lines),
        "reuse": _share(sum(line.reused_tokens for line in lines), compared),
        "mean_tokens": _share(sum(line.tokens for line in lines), sum(line.responses for line in lines)),
        "previous_tokens": _share(
            sum(line.previous_tokens for line in lines), sum(line.previous_responses for line in lines)
        ),
        "rank_correlation": float(np.corrcoef(new, old)[0, 1]) if varies else None,
        "moved": float(np.mean(np.abs(new - old) > MOVED * len(lines))),
        "accepted": _share(accepted, drafted),
        "acceptance_length": _share(steps + accepted, steps),
        "draft_length": _share(drafted, steps),
        "drafted_by_position": " ".join(map(str, of_drafts)),
        "accepted_by_position": " ".join(map(str, of_accepted)),
        **{
            f"accepted_at_{at}": _share(of_accepted[at - 1], of_drafts[at - 1])
            if at <= min(len(of_drafts), len(of_accepted))
            else None
            for at in POSITIONS
        },
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _sums(columns: Iterable[list[int]]) -> list[int]:
    return [*map(sum, itertools.zip_longest(*columns, fillvalue=0))]


def _ranks(values: list[float]) -> np.ndarray:
    """(n,) ranks from 1; equal values have their mean rank."""
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values)
    return ranks
