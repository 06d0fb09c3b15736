"""Queues: whether the LocalQueue that a run waits in exists."""

from __future__ import annotations

from typing import Final

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_operator.controller.observe import label
from scalerl_operator.controller.run_context import Seen
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.names import QUEUE

ASK_SECONDS: Final = 30.0
"""Between two questions for the queue of one run."""
_BEFORE_THE_END: Final = (Phase.PENDING, Phase.PREPARING, Phase.RUNNING)


class Queues:
    """Asks now and then, and remembers the last answer of each run."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._asked: dict[str, tuple[float, str]] = {}

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self._asked.pop(uid, None)

    async def missing(self, seen: Seen, phase: Phase) -> str:
        """Why no queue holds the run; empty where one has admitted it, where it exists, and where the operator may not know.

        Raises:
            ApiError: the API server did not answer.
        """
        queue, admitted = label(seen.run, QUEUE), seen.before.condition(ConditionType.ADMITTED)
        known = admitted is not None and admitted.status == "True" and admitted.reason != Reason.NO_QUEUE
        if not queue or known or phase not in _BEFORE_THE_END:
            return ""
        asked, said = self._asked.get(seen.uid, (0.0, ""))
        if 0 <= seen.unix_seconds - asked < ASK_SECONDS:
            return said
        try:
            found = await self._api.get("LocalQueue", seen.namespace, queue)
        except errors.Forbidden:
            found = {}  # by a role that is not the chart's
        said = "" if found is not None else f"no LocalQueue {queue} in the namespace {seen.namespace}"
        self._asked[seen.uid] = (seen.unix_seconds, said)
        return said
