"""What came to nothing: why a pod that should be there is not, or does not begin. Only events tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_operator.controller.message_patterns import claim_problem, creation_problem, mount_problem
from scalerl_operator.controller.observe import Observed, Problem, label, seconds
from scalerl_operator.controller.owned import CLAIM, Place, leaving
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Desired, Object
from scalerl_operator.names import COMPONENT, Names
from scalerl_operator.policy.decision import JobState
from scalerl_operator.workloads import Role

SILENT_SECONDS: Final = 10.0
"""An object of ours that has come to nothing for so long has its events looked at for the reason."""
ASK_SECONDS: Final = 15.0
"""Between two questions of why something has come to nothing."""
RECENT_SECONDS: Final = 300.0
"""What an event says that is older may be mended: those who cannot make or start a pod say so again and again."""
_MAKING: Final = ("FailedCreate",)
_BEGINNING: Final = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
_BINDING: Final = ("ProvisioningFailed", "FailedBinding")
_PROBLEM: Final = {_MAKING: creation_problem, _BEGINNING: mount_problem, _BINDING: claim_problem}
"""By the reasons of the events that were asked for: what their message comes to."""


class Stuck:
    """Asks for events now and then. doubt: told of a run whose Secret a pod did not find."""

    def __init__(self, api: KubeApi, doubt: Callable[[str], None]) -> None:
        self._api = api
        self._doubt = doubt
        self._asked: dict[str, tuple[float, Problem | None]] = {}

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self._asked.pop(uid, None)

    async def why(self, place: Place, observed: Observed, desired: Desired) -> Problem | None:
        """Why a pod that should be there is not, or does not begin: only events tell. Asked now and then, of one object:
        of many pods that wait, the others wait for the same."""
        asked, problem = self._asked.get(place.uid, (0.0, None))
        silent = self._silent(place, observed, desired)
        if silent is None:
            self._asked.pop(place.uid, None)
            return None
        if 0 <= place.unix_seconds - asked < ASK_SECONDS:
            return problem
        what, uid, reasons = silent
        message = await self._last_event(place, uid, reasons)
        problem = None
        if message:
            problem = Problem(_PROBLEM[reasons](message), f"{what}: {message}")
            if Names(place.name).token in message:
                self._doubt(place.uid)
        self._asked[place.uid] = (place.unix_seconds, problem)
        return problem

    def _silent(
        self, place: Place, observed: Observed, desired: Desired
    ) -> tuple[str, str, tuple[str, ...]] | None:
        """The first object that has come to nothing: its name, its uid, and which events of it would say why."""
        for (kind, name), obj in place.objects.items():
            role = label(obj, COMPONENT)
            old = place.unix_seconds - seconds(obj["metadata"].get("creationTimestamp")) > SILENT_SECONDS
            if not old or leaving(obj) or any(p.role == role for p in observed.pods):
                continue
            job = observed.trainer if role == Role.TRAINER else observed.prepare
            wanted = kind == "StatefulSet" and desired.coordinator
            if wanted or (kind == "Job" and job.state is JobState.ACTIVE and not job.held):
                return f"{kind} {name}", obj["metadata"]["uid"], _MAKING
        for pod in observed.pods:
            if pod.creating and not pod.leaving and place.unix_seconds - pod.created > SILENT_SECONDS:
                return pod.name, pod.uid, _BEGINNING
        claim = place.objects.get((CLAIM, Names(place.name).claim))
        waits = any(
            p.problem is not None and p.problem.reason is Reason.VOLUME_NOT_READY for p in observed.pods
        )
        if waits and claim is not None and (claim.get("status") or {}).get("phase") == "Pending":
            return f"{CLAIM} {claim['metadata']['name']}", claim["metadata"]["uid"], _BINDING
        return None

    async def _last_event(self, place: Place, uid: str, reasons: Sequence[str]) -> str:
        try:
            events = await self._api.list(
                "Event", place.namespace, field_selector=f"involvedObject.uid={uid}"
            )
        except errors.Forbidden:
            return ""
        told = [e for e in events if e.get("reason") in reasons and _is_recent(e, place.unix_seconds)]
        told.sort(key=lambda e: seconds(e.get("lastTimestamp") or e.get("eventTime")))
        return str(told[-1].get("message", "")) if told else ""


def _is_recent(event: Object, now: float) -> bool:
    return now - seconds(event.get("lastTimestamp") or event.get("eventTime")) < RECENT_SECONDS
