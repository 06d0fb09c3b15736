"""Problems of a run or of one of its processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason


@dataclass(frozen=True)
class Problem:
    """Why a condition does not have its healthy value.

    Attributes:
        reason: the phase, if the phase itself is the reason.
        message: of the cluster.
    """

    reason: Reason | Phase
    message: str


def last_log_line(text: str) -> str:
    """The last line of a role's log, without the time and the name of the logger; empty without one.

    >>> last_log_line("...\\n2026-01-01 00:00:00,000 ERROR scalerl_trainer.prepare model.path: not found\\n")
    'model.path: not found'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    parts = lines[-1].split(" ", 4)
    logged = len(parts) == 5 and parts[2] in ("ERROR", "CRITICAL", "WARNING", "INFO")
    return (parts[4] if logged else lines[-1])[:1000]
