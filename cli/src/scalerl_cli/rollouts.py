"""``scalerl rollouts``: the recorded rollouts of a run, filtered and sorted, to read."""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

from scalerl_analysis.rollout_search import RolloutConditions, find_rollouts
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo, shown

_HEAD_CHARACTERS: Final = 3000
_TAIL_CHARACTERS: Final = 1000


def finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: None in their place.

    >>> finite({"a": [math.inf, 1.5]})
    {'a': [None, 1.5]}
    """
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def conditions(arguments: argparse.Namespace) -> RolloutConditions:
    """The conditions of a command or of a request of the page."""
    labels = [(name, value) for name, _, value in (label.partition("=") for label in arguments.label)]
    names = {field.name for field in fields(RolloutConditions)} - {"labels"}
    return RolloutConditions(**{name: getattr(arguments, name) for name in names}, labels=labels)


def prepare_search() -> None:
    """Give this process as many open files as it may have, and Arrow memory that it keeps from one row group to the next.

    Before pyarrow is imported, which reads it: else the kernel clears the memory each time.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_rollouts(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    prepare_search()
    found = find_rollouts(
        arguments.dir,
        conditions(arguments),
        limit=arguments.limit or None,
        tokens=arguments.json and arguments.full,
        report=lambda text: echo(text, error=True),
    )
    rows, matching, total = found.rows, found.matching, found.total
    if arguments.json:
        for row in rows:
            # A terminal also obeys characters that JSON does not escape, such as U+009B.
            echo(json.dumps(finite(row), ensure_ascii=sys.stdout.isatty()))
        return DONE
    text = f"{matching:,} of {total:,} recorded rollouts match"
    text += f"; the first {len(rows):,} (--limit)\n" if len(rows) < matching else "\n"
    text += "\n".join(_lines(rows, full=arguments.full))
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        echo(text)
    return DONE


def _lines(rows: Sequence[dict[str, Any]], *, full: bool) -> Iterator[str]:
    before = None
    for row in rows:
        yield ""
        yield _head(row)
        if row["prompt"] is not None and row["prompt"] != before:
            yield "[prompt]"
            yield _cut(row["prompt"], full)
        before = row["prompt"]
        if row["completion"] is not None:
            yield "[completion]"
            yield _cut(row["completion"], full)
        if row["reference"]:
            yield f"[reference] {_cut(row['reference'], full)}"
        if row["error"]:
            yield f"[error of the verifier] {_cut(row['error'], full)}"


def _head(row: dict[str, Any]) -> str:
    held_out = row["split"] == "held_out"
    parts = [
        f"{'version' if held_out else 'step'} {row['step']}",
        f"{row['split'].replace('_', '-')} {row['task']}",
        f"prompt {row['prompt_id'] or row['prompt_index']}",
        f"completion {row['sample']}",
    ]
    if row["reward"] is not None:
        parts.append(f"reward {row['reward']:g}")
    parts += [f"{name} {value:g}" for name, value in (row["parts"] or {}).items()]
    if row["advantage"] is not None:
        parts.append(f"advantage {row['advantage']:+.3f}")
    if (turns := row.get("turns") or 1) > 1:
        parts.append(f"{turns} turns")
    parts.append(f"{row['tokens']:,} tokens" + (", cut off" if row["finish_reason"] == "length" else ""))
    if row["oldest_version"] is not None and not held_out:
        parts.append(f"versions {row['oldest_version']} to {row['newest_version']}, age {row['age']}")
    if row["logprob_difference_mean"] is not None:
        mean, largest = row["logprob_difference_mean"], row["logprob_difference_max"]
        parts.append(f"log-probability difference {mean:.3g}, at most {largest:.3g}")
    parts += [f"{name} {value}" for name, value in (row["labels"] or {}).items()]
    if row["excluded"] is not None:
        parts.append(f"not trained on: {row['excluded']}")
    return shown("=== " + " · ".join(parts)).replace("\n", " ")


def _cut(text: str, full: bool) -> str:
    if full or len(text) <= _HEAD_CHARACTERS + _TAIL_CHARACTERS:
        return shown(text)
    left_out = len(text) - _HEAD_CHARACTERS - _TAIL_CHARACTERS
    head, tail = shown(text[:_HEAD_CHARACTERS]), shown(text[-_TAIL_CHARACTERS:])
    return f"{head}\n… {left_out:,} characters (--full) …\n{tail}"
