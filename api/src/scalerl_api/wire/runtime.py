"""Runtime → coordinator: requests to stop the run, and the log of the autoscaler's decisions."""

from __future__ import annotations

from scalerl_api.wire.base import Struct

INTERRUPTED = "interrupted"
"""Reason of a stop by a user who waits for the end: the last version is saved, but not evaluated."""

FORECAST = "forecast"
"""Reason of a stop by the autoscaler because of the forecast; also the stop reason in the run's summary."""

BROKEN = "broken"
"""Reason of a stop by the autoscaler because the run is broken: its curve fell, or a value is not finite."""


class Stop(Struct, frozen=True, kw_only=True):
    """``POST /v1/stop``: end the run in order. The trainer finishes its step, its last version is evaluated (unless the
    reason is :data:`INTERRUPTED`), and the trainer writes a checkpoint and exits.

    The stop is journaled, so it persists over restarts; a client that resumes a stopped run cancels the stop first.
    """

    reason: str
    """Reason of the stop; an empty one cancels an earlier stop."""


class DecisionLine(Struct, frozen=True, kw_only=True):
    """``POST /v1/decisions``: one line of ``decisions.jsonl``, with its newline. It is on disk when it is acknowledged.

    Idempotent: the same line at the same offset is acknowledged, but not written twice. A different line at that offset is
    rejected with 409.
    """

    offset: int
    """Bytes of the log before the line."""
    line: bytes


class DecisionLines(Struct, frozen=True, kw_only=True):
    """Response to ``GET /v1/decisions?offset=N``: a page of the log without an incomplete last line. A page may end within a
    line."""

    content: bytes
    """Bytes of the log from ``offset`` on."""
    size: int = -1
    """Bytes of all complete lines; -1 from a coordinator that sends them all at once."""
