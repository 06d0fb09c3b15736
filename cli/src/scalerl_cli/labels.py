"""Numbers and states of a run as text. Pure."""

from __future__ import annotations

from scalerl_api.wire import EvaluationPoint, Phase
from scalerl_lifecycle.workloads import Role
from scalerl_local.run_view import Snapshot, UnitState

UNKNOWN = "–"


def seconds(value: float | None) -> str:
    """A duration as text.

    >>> seconds(7.4), seconds(65), seconds(3725), seconds(None)
    ('7 s', '1 min 5 s', '1 h 2 min', '–')
    """
    if value is None:
        return UNKNOWN
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def reward(point: EvaluationPoint) -> str:
    """Reward with the half-width of its 95 % confidence interval, and the version of the weights.

    >>> from types import SimpleNamespace as N
    >>> reward(N(reward=.4123, standard_error=.0111, version=20, mixed_versions=False))
    '0.412 ± 0.022 at v20'
    """
    mixed = " (mixed)" if point.mixed_versions else ""
    return f"{point.reward:.3f} ± {1.96 * point.standard_error:.3f} at v{point.version}{mixed}"


def rate(value: float | None) -> str:
    """Tokens per second as text.

    >>> rate(12345.6), rate(None)
    ('12,346', '–')
    """
    return UNKNOWN if value is None else f"{value:,.0f}"


def divergence(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2g}"


def progress(snapshot: Snapshot, max_steps: int | None) -> str:
    """Completed steps, and the limit on steps if there is one."""
    done = UNKNOWN if snapshot.status is None else str(snapshot.status.step)
    return f"{done}/{max_steps}" if max_steps is not None else done


def waiting(snapshot: Snapshot) -> str:
    """Phase of the run, and what it waits for."""
    status = snapshot.status
    if snapshot.stopping and (status is None or not status.stop_reason):
        return f"stopping ({snapshot.stopping})"
    failing = next((u.last_error for u in snapshot.units if u.last_error), "")
    failing = f" ({failing})" if failing else ""
    if status is None:
        preparing = any(u.role is Role.PREPARE and u.state is not UnitState.DONE for u in snapshot.units)
        return ("preparing the model" if preparing else "waiting for the coordinator") + failing
    if status.phase is Phase.WAITING and status.waiting_for and not status.stop_reason:
        return f"waiting for {status.waiting_for}{failing}"
    text = str(status.phase)
    if status.stop_reason:
        text += f" ({status.stop_reason})"
    return f"{text}: waiting for {status.waiting_for}{failing}" if status.waiting_for else text
