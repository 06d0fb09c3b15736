"""Scaling: what the autoscaler says of a run, in the terms of a look at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_operator.autoscaling.models import Generators
from scalerl_operator.build.curve import curve_config_map
from scalerl_operator.controller.autoscaler import Word
from scalerl_operator.controller.status import AutoscalerReport
from scalerl_operator.kube.types import Object


class Steersman(Protocol):
    """:class:`~.autoscaler.ClusterAutoscaler`, or what stands for it."""

    def look(
        self, run: ScaleRLRun, status: Status, generators: Generators, *, resumed: bool = False
    ) -> Word: ...

    def close(self) -> None: ...


NOTHING: Final = Word()


class RunScaling:
    """The autoscaling of one run with that uid. steersman: None while no forecast is wanted; the curve is shown all
    the same.

    stop: why the run is to end, for the coordinator; empty while it is not. on_decision: told of the state of each
    decision made here; those of an earlier operator are not counted again.
    """

    def __init__(
        self,
        uid: str,
        steersman: Callable[[], Steersman] | None,
        on_decision: Callable[[str], None] = lambda state: None,
    ) -> None:
        self.stop = ""
        self._on_decision = on_decision
        self._counted: int | None = None
        self._uid = uid
        self._make_steersman = steersman
        self._steersman: Steersman | None = None
        self._word = NOTHING

    def steer(
        self, run: ScaleRLRun, coordinator_report: Status, ready: int, *, resumed: bool
    ) -> AutoscalerReport:
        """The autoscaler's report; returns at once. ready: generators' pods that are."""
        spec = run.spec
        if self._make_steersman is None or spec.autoscaling.mode == "Off":
            self._word, self.stop = NOTHING, ""
            return AutoscalerReport()
        if self._steersman is None:
            self._steersman = self._make_steersman()
        wanted = spec.generator.replicas
        facts = Generators(wanted=wanted, ready=ready, devices_each=max(1, spec.generator.devices))
        word = self._word = self._steersman.look(run, coordinator_report, facts, resumed=resumed)
        self.stop = BROKEN if word.hold else FORECAST if word.stop else ""
        self._count(word)
        return AutoscalerReport(word.generators, word.decision, word.ready, word.reason, word.message)

    def _count(self, word: Word) -> None:
        if not word.known:
            return
        for decision in word.decisions:
            if self._counted is not None and decision.sequence > self._counted:
                self._on_decision(decision.state)
        self._counted = word.decisions[-1].sequence if word.decisions else -1

    def event(self) -> tuple[str, bool]:
        """What a person should hear of, once, and whether it is an alarm."""
        text, alarming = self._word.event, self._word.alarming
        self._word = replace(self._word, event="", alarming=False)
        return text, alarming

    def decorate(self, status: RunStatus) -> RunStatus:
        """The status with forecast and decisions; as it was while the record is still being read."""
        word = self._word
        if not word.known:
            return status
        return status.model_copy(
            update={"forecast": word.forecast, "decision": word.state, "decisions": list(word.decisions)}
        )

    def objects(self, run: ScaleRLRun, coordinator_report: Status) -> Sequence[Object]:
        """The curve."""
        return (
            [curve_config_map(run, self._uid, coordinator_report.points)] if coordinator_report.points else []
        )

    def close(self) -> None:
        """Stop what is under way."""
        if self._steersman is not None:
            self._steersman.close()
