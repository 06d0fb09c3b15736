"""Decides when a coordinator is sent a stop request, or its cancellation. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from scalerl_api.wire import INTERRUPTED
from scalerl_operator.policy import budget

REVOCABLE: Final = (INTERRUPTED, *budget.REASONS)
"""Reasons that are cancelled when the operator no longer wants them."""


def must_notify(wanted: str, given: str, revocable: Collection[str] = REVOCABLE) -> bool:
    """Whether the coordinator, which stops for the reason ``given``, is to be sent the reason ``wanted``.

    A stop outlives the command that asked for it: what no longer holds (resumed, more budget) is taken back, but not
    what the coordinator found by itself. A person's interrupt goes before any other reason: it ends the run without a
    last evaluation.

    revocable: reasons that can be cancelled.

    >>> must_notify("maxSeconds", ""), must_notify("", "maxSeconds"), must_notify("", "maxSteps")
    (True, True, False)
    >>> must_notify(INTERRUPTED, "maxSteps"), must_notify("maxSeconds", "maxSteps")
    (True, False)
    >>> must_notify("", "forecast"), must_notify("", "forecast", ("forecast",))  # completed, suspended
    (False, True)
    """
    if wanted == given:
        return False
    return wanted == INTERRUPTED or not given or (not wanted and given in revocable)
