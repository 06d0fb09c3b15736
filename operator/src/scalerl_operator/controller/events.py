"""Writes Kubernetes Events for what changes in a run's status."""

from __future__ import annotations

from typing import Final, Literal

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_api.status import RunStatus
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object

_LOUD: Final[dict[tuple[str, str], Literal["Normal", "Warning"]]] = {
    (ConditionType.ACCEPTED, "False"): "Warning",
    (ConditionType.FAILED, "True"): "Warning",
    (ConditionType.DEGRADED, "True"): "Warning",
    (ConditionType.ACCEPTED, "True"): "Normal",
    (ConditionType.ADMITTED, "False"): "Normal",
    (ConditionType.PREPARED, "True"): "Normal",
    (ConditionType.COMPLETED, "True"): "Normal",
    (ConditionType.SUSPENDED, "True"): "Normal",
}
"""Transitions that are worth an event; the others show in the conditions."""
_TROUBLE: Final = frozenset(
    {
        *(Reason.UNSCHEDULABLE, Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CONFIG_INVALID),
        *(Reason.VOLUME_NOT_READY, Reason.OUT_OF_MEMORY, Reason.EVICTED, Reason.REFUSED_BY_NODE),
        *(Reason.SANDBOX_FAILED, Reason.COORDINATOR_REFUSED, Reason.CONTAINER_START_FAILED),
        *(Reason.CLAIM_NOT_FOUND, Reason.STORAGE_CLASS_NOT_FOUND, Reason.VOLUME_NOT_WRITABLE),
    }
)
"""Problems that a person has to solve, of whichever role: these get an Event too."""


async def write_events(api: KubeApi, run: Object, was: RunStatus, status: RunStatus) -> None:
    """One event a transition, from what was said to what is."""
    if status.phase is not was.phase:
        await api.event(run, "Normal", status.phase, Phase(status.phase).text)
    for condition in status.conditions:
        before = was.condition(condition.type)
        loudness = _LOUD.get((condition.type, condition.status))
        if condition.status == "False" and condition.reason in _TROUBLE:
            loudness = "Warning"
        if condition.reason == Reason.ACCEPTED_WITH_WARNINGS:
            loudness = "Warning"
        if loudness is None or (
            before is not None and (before.status, before.reason) == (condition.status, condition.reason)
        ):
            continue
        await api.event(run, loudness, condition.reason, f"{condition.type}: {condition.message}")
