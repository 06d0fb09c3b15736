"""Rows of a data set that overlap with held-out prompts: as many consecutive words of both are the same (``filter.overlap``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from scalerl_tasks.dataset.table_source import DatasetSource, open_dataset
from scalerl_tasks.prompts import Prompt, PromptSource

if TYPE_CHECKING:
    from scalerl_api.spec import RunSpec
    from scalerl_tasks.sources import RunTasks

_COMMON_SHARE = 0.01
"""Words that more than this share of the held-out prompts have in common, and more than one, are an instruction."""
_WORD = re.compile(r"\w+")


def leave_out_overlap(
    spec: RunSpec, tasks: RunTasks, directory: Path, progress: Callable[[str], None]
) -> bool:
    """Determine the overlap of the training data sets with ``filter.overlap`` that have none yet, and record it beside their tables
    in the run's directory. Returns whether there is any.

    Raises:
        SourceError: a record cannot be written.
    """
    held_out = [*(task.held_out for task in tasks.tasks), *(one.prompts for one in tasks.sets)]
    found = False
    for one, task in zip(spec.task.tasks, tasks.tasks, strict=True):
        given = one.section.dataset
        if given is None or given.filter.overlap is None:
            continue
        source = open_dataset(given, directory)
        if source.left_out is not None and source.left_out.overlap is None:
            own = set(task.held_out.indices)
            rows = [row for row in overlapping(source, held_out, given.filter.overlap) if row not in own]
            msgspec.structs.replace(source.left_out, overlap=rows).write(source.table.path)
            progress(
                f"{one.field}.dataset: {len(rows):,} of {len(source):,} rows share {given.filter.overlap} consecutive words with a "
                "held-out prompt, and are not trained on"
                + (f"; the first: {source.place(rows[0])}" if rows else "")
            )
            found = found or bool(rows)
        source.close()
    return found


def overlapping(source: DatasetSource, held_out: Iterable[PromptSource], words: int) -> list[int]:
    """Indices of the prompts that have as many consecutive words in common with a held-out prompt, ascending. Words are compared
    without case and punctuation. Held-out prompts themselves are among them."""
    prompts = [_runs(one[index], words) for one in held_out for index in range(len(one))]
    counts = Counter(key for runs in prompts for key in set(runs))
    most = max(1, _COMMON_SHARE * len(prompts))
    known = set[int]()
    for runs in prompts:
        # An instruction that prompts have in common is no overlap, also not with the first words of the problem after it.
        common = {at + i for at, key in enumerate(runs) if counts[key] > most for i in range(words)}
        known.update(key for at, key in enumerate(runs) if common.isdisjoint(range(at, at + words)))
    return [index for index in range(len(source)) if not known.isdisjoint(_runs(source[index], words))]


def _runs(prompt: Prompt, words: int) -> list[int]:
    """Hashes of all runs of so many words."""
    text = " ".join([*(turn for _, turn in prompt.turns), prompt.text])
    found: Sequence[str] = _WORD.findall(text.lower())
    return [hash(tuple(found[at : at + words])) for at in range(len(found) - words + 1)]
