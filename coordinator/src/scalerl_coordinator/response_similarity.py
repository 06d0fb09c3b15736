"""Measures how much of a prompt's new responses occurs in those of the previous epoch: ``history.jsonl``, for ``scalerl report``.

This runs in the store's thread. Comparing 16 responses of 512 tokens takes a few milliseconds. If comparisons take more than
a tenth of the time, groups are recorded without a comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from scalerl_api.history import HistoryLine
from scalerl_api.wire import PastResponse
from scalerl_coordinator.disk import Disk, LineFile

RUN_TOKENS: Final = 8
"""Minimum length of a common run; shorter ones recur by chance."""
_MAX_TOKENS: Final = 2**16
"""Maximum number of tokens of a group that are compared."""
_TIME_SHARE: Final = 0.1
_PENDING_LINES: Final = 64
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


def reused_tokens(new: Sequence[bytes], old: Sequence[bytes]) -> int:
    """Number of tokens of ``new`` in a run of at least ``RUN_TOKENS`` tokens that also occurs in a response of ``old``.

    Token ids are little-endian int32. Runs are compared by 64-bit hashes.
    """
    windows, known = _hashes(new, 1 << 40), _hashes(old, 1 << 41)
    found = np.isin(windows, known).astype(np.int64)
    # Token i is covered by the windows that start at i - 7 … i.
    before = np.concatenate(
        (np.zeros(RUN_TOKENS, np.int64), np.cumsum(found), np.full(RUN_TOKENS - 1, found.sum()))
    )
    return int(np.count_nonzero(before[RUN_TOKENS:] > before[:-RUN_TOKENS]))


def _hashes(responses: Sequence[bytes], separator: int) -> NDArray[np.uint64]:
    """Hashes of all windows of ``RUN_TOKENS`` tokens. A unique separator after each response keeps windows from matching across
    two responses."""
    ids: list[NDArray[Any]] = []
    for i, response in enumerate(responses):
        ids += [np.frombuffer(response, "<i4"), np.array([separator + i])]
    tokens = np.concatenate(ids).astype(np.uint64)
    count = max(0, len(tokens) - RUN_TOKENS + 1)
    hashes = np.zeros(count, np.uint64)
    for offset in range(RUN_TOKENS):
        hashes = (hashes ^ tokens[offset : offset + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes


class SimilarityFile:
    """Appends lines to ``path``. All methods belong to one thread.

    ``report`` is called with the problem if lines could not be written; they are lost.

    Args:
        slack_seconds: that comparisons may take beyond their share of the time.
    """

    def __init__(
        self, path: Path, report: Callable[[str], None], disk: Disk, slack_seconds: float = 0.5
    ) -> None:
        self._slack_seconds = slack_seconds
        self._report = report
        self._file = LineFile(path, disk)
        self._pending: list[bytes] = []
        self._begin = time.monotonic()
        self._spent = 0.0

    def add(
        self,
        key: tuple[int, int],
        visit: int,
        new: Sequence[PastResponse],
        old: Sequence[PastResponse],
        drafts: tuple[list[int], list[int]] | None,
        difficulty: float | None,
    ) -> None:
        """Compare the ``new`` group of a prompt with the ``old`` one, and add a line.

        Args:
            key: task and prompt.
            visit: number of earlier groups of the prompt.
            drafts: drafted and accepted tokens by position in a draft.
        """
        compared = _first(new) if self._has_time() else []
        begin = time.thread_time()
        reused = reused_tokens(compared, [one.token_ids for one in old]) if compared else 0
        self._spent += time.thread_time() - begin
        line = HistoryLine(
            task=key[0],
            prompt=key[1],
            visit=visit,
            version=max(one.version for one in new),
            previous_version=max(one.version for one in old),
            responses=len(new),
            tokens=_tokens(new),
            previous_responses=len(old),
            previous_tokens=_tokens(old),
            compared_tokens=sum(map(len, compared)) // 4,
            reused_tokens=reused,
            drafted_tokens=drafts and sum(drafts[0]),
            accepted_tokens=drafts and sum(drafts[1]),
            drafted_by_position=drafts[0] if drafts else [],
            accepted_by_position=drafts[1] if drafts else [],
            difficulty=difficulty,
        )
        self._pending.append(msgspec.json.encode(line) + b"\n")
        if len(self._pending) >= _PENDING_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the pending lines, unless that would use the volume's reserve."""
        if not self._pending:
            return
        lines, self._pending = b"".join(self._pending), []
        try:
            self._file.append(lines)
        except OSError as error:
            self._report(f"{self._file.path} cannot be written: {error.strerror}")

    def _has_time(self) -> bool:
        return self._spent <= self._slack_seconds + _TIME_SHARE * (time.monotonic() - self._begin)


def _first(responses: Sequence[PastResponse]) -> list[bytes]:
    """The first responses, at least one, up to ``_MAX_TOKENS`` tokens in total."""
    taken: list[bytes] = []
    for response in responses:
        if taken and sum(map(len, taken)) + len(response.token_ids) > 4 * _MAX_TOKENS:
            break
        taken.append(response.token_ids)
    return taken


def _tokens(responses: Sequence[PastResponse]) -> int:
    return sum(len(response.token_ids) for response in responses) // 4
