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


def number(value: float | None, form: str) -> str:
    """A number in a format, if it is known."""
    return UNKNOWN if value is None else format(value, form)


def waiting(snapshot: Snapshot) -> str:
    """Phase of the run, and what it waits for."""
    status = snapshot.status
    if snapshot.stopping and (status is None or not status.stop_reason):
        return f"stopping ({snapshot.stopping})"
    failing = next((f" ({unit.last_error})" for unit in snapshot.units if unit.last_error), "")
    if status is None:
        preparing = any(u.role is Role.PREPARE and u.state is not UnitState.DONE for u in snapshot.units)
        return ("preparing the model" if preparing else "waiting for the coordinator") + failing
    if status.phase is Phase.WAITING and status.waiting_for:
        return f"waiting for {status.waiting_for}{failing}"
    text = str(status.phase)
    if status.stop_reason:
        text += f" ({status.stop_reason})"
    return f"{text}: waiting for {status.waiting_for}{failing}" if status.waiting_for else text
