"""The log of decisions of a run on a cluster: ``decisions.jsonl`` on the run's volume, written by its coordinator.

Two operators may write at once, when one has lost its lease and does not know yet. Every line therefore names the offset
that it follows: of two lines at one offset the coordinator refuses the second, and its sender reads the log again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from scalerl_api.spec import KIND, ScaleRLRun
from scalerl_api.status import RECENT_DECISIONS, DecisionStatus
from scalerl_api.wire import DecisionLines
from scalerl_operator.autoscaling.decision_log import Line, decision_status
from scalerl_operator.autoscaling.log_storage import RecordError, RecordLost
from scalerl_operator.coordinator_client import (
    CoordinatorRefused,
    CoordinatorUnreachable,
    EndpointMissing,
    OffsetSuperseded,
)
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Object

log = logging.getLogger(__name__)


class Coordinators(Protocol):
    """What is needed of :class:`~.coordinator_poller.Coordinators`."""

    async def decisions(self, uid: str, offset: int) -> DecisionLines: ...

    async def record_decision(self, uid: str, offset: int, line: bytes) -> None: ...


class StatusWriter(Protocol):
    """What is needed of :class:`scalerl_operator.kube.client.KubeApi`."""

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        patch: dict[str, Any],
        subresource: str | None = None,
    ) -> Object: ...


class CoordinatorStorage:
    """The decisions of one run; see :class:`scalerl_operator.autoscaling.log_storage.Storage`.

    The coordinator of a run that an earlier release started has no log of decisions: then ``status.decisions`` alone
    keeps the last ones, and an operator that starts later knows none of them.
    """

    def __init__(self, run: ScaleRLRun, uid: str, coordinators: Coordinators, api: StatusWriter) -> None:
        self._namespace, self._run = run.metadata.namespace, run.metadata.name
        self._uid = uid
        self._coordinators = coordinators
        self._api = api
        self._status_only = False
        self._recent: list[DecisionStatus] = []
        self._kept = bytearray()
        """Lines of a run whose coordinator keeps none."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"decisions.jsonl of {self._namespace}/{self._run}"

    async def pages(self) -> AsyncGenerator[bytes, None]:
        """All whole lines."""
        offset, size = 0, 1
        while offset < size:
            try:
                page = await self._coordinators.decisions(self._uid, offset)
            except EndpointMissing:
                if not self._status_only:
                    log.warning(
                        "%s/%s: its coordinator, of an earlier release, keeps no log of decisions; the last %d are in the status",
                        *(self._namespace, self._run, RECENT_DECISIONS),
                    )
                self._status_only = True
                yield bytes(self._kept)
                return
            except (CoordinatorUnreachable, CoordinatorRefused) as error:
                raise RecordError(f"{self.name} cannot be read: {error}") from error
            self._status_only = False
            if not page.content and page.size > offset:
                raise RecordError(
                    f"{self.name} ends at byte {offset} of {page.size}: it was cut while it was read"
                )
            yield page.content
            offset += len(page.content)
            size = page.size if page.size >= 0 else offset

    async def append(self, content: bytes, at: int) -> None:
        """One line, acknowledged when this returns."""
        if not content:
            return  # the coordinator has cut a torn line itself
        try:
            # Asked each time: a resumed run has another coordinator, which may keep a log.
            await self._coordinators.record_decision(self._uid, at, content)
        except EndpointMissing as error:
            if not self._status_only:
                raise RecordLost(f"{self.name}: {error}") from error
            await self._append_to_status(content)
        except (CoordinatorUnreachable, OffsetSuperseded) as error:
            # Another operator wrote, or it is unknown whether this line was written.
            raise RecordLost(f"{self.name} could not be written: {error}") from error
        except (CoordinatorRefused, errors.ApiError) as error:
            raise RecordError(f"{self.name} cannot be written: {error}") from error

    async def set_aside(self, problem: str) -> str:
        """Refused: the file was edited on the volume, and is to be repaired there."""
        raise RecordError(
            f"{self.name}: {problem}; repair it, or move it away on the run's volume to start an empty one"
        )

    def close(self) -> None:
        """Nothing is held."""

    async def _append_to_status(self, content: bytes) -> None:
        decided = decision_status(msgspec.json.decode(content, type=Line))
        recent = [*self._recent, decided][-RECENT_DECISIONS:]
        status = {"decisions": [one.model_dump(mode="json", by_alias=True) for one in recent]}
        patch = {"status": status, "metadata": {"uid": self._uid}}
        try:
            await self._api.patch(KIND, self._namespace, self._run, patch, "status")
        except errors.ApiError as error:
            raise RecordError(f"{self.name} cannot be written: {error}") from error
        self._recent = recent
        self._kept += content
