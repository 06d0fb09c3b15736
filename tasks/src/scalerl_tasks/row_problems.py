"""The rows of a file that a run cannot use: the first ones in full, the others counted."""

from __future__ import annotations

import heapq
from collections import Counter
from pathlib import Path

from scalerl_tasks.errors import JsonlError, JsonlRowsError

MAX_LISTED = 20
"""Rows that are listed; the others are only counted."""
_MAX_KINDS = 8
_MAX_CHARACTERS = 500


class RowProblems:
    """Problems of the ``rows`` of a file or of the prompts of a source, in memory that does not grow with their number. ``note`` is
    further text for the summary."""

    def __init__(self, where: Path | str, rows: int = 0) -> None:
        self.where, self.rows = where, rows
        self.total, self.note = 0, ""
        self._kinds = Counter[str]()
        self._first: list[tuple[int, int, str]] = []  # a heap of -line, -number, message
        self._error: JsonlError | None = None

    def add(self, line: int, message: str, kind: str) -> None:
        """Count a problem of the row at ``line``, and keep it if it is one of the first. ``message`` names file and line."""
        self.total += 1
        # A file of another schema may have as many kinds as rows.
        self._kinds[kind if kind in self._kinds or len(self._kinds) < _MAX_KINDS else "others"] += 1
        cut = message if len(message) <= _MAX_CHARACTERS else message[:_MAX_CHARACTERS] + " …"
        entry = (-line, -self.total, cut)
        if len(self._first) < MAX_LISTED:
            heapq.heappush(self._first, entry)
        else:
            heapq.heappushpop(self._first, entry)

    def add_error(self, error: JsonlError) -> None:
        if self._error is None or (error.line or 0) < (self._error.line or 0):
            self._error = error
        self.add(error.line or 0, str(error), error.kind)

    @property
    def texts(self) -> tuple[str, ...]:
        """The first problems by line, and, if there are several, one line with their counts and the first: alone, if all of
        many rows have that problem."""
        listed = [message for _, _, message in sorted(self._first, reverse=True)]
        if self.total <= 1:
            return tuple(listed)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self._kinds.most_common())
        # A wrong name, for instance, which one row shows as well as 20.
        everywhere = MAX_LISTED < self.total == self.rows and len(self._kinds) == 1
        beyond = f"; the first {MAX_LISTED} are listed" if self.total > MAX_LISTED and not everywhere else ""
        note = f"; {self.note}" if self.note else ""
        first = listed[0].removeprefix(f"{self.where}, ")
        summary = f"{self.where}: {self.total:,} of {self.rows:,} rows cannot be used ({kinds}){beyond}{note}; the first: {first}"
        return (summary,) if everywhere else (*listed, summary)

    def check(self) -> None:
        """Raise ``JsonlError`` for the problems so far, which are those of lines."""
        if self._error is None:
            return
        if self.total == 1:
            raise self._error
        raise JsonlRowsError(self._error, self.texts)
