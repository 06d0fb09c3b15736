"""Autoscaling in the terms of a look at a run: numbers, pins, stops, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from operator_tests.scaling import run as local_run
from operator_tests.scaling import status as coordinator_report
from scalerl_api.conditions import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import DecisionStatus, RunStatus
from scalerl_api.wire import BROKEN, FORECAST
from scalerl_operator.controller.autoscaler import Word
from scalerl_operator.controller.scaling import RunScaling


class Steersman:
    """Says what the test has put into it."""

    def __init__(self) -> None:
        self.word = Word()
        self.seen: list[Any] = []
        self.closed = False

    def look(self, run: Any, status: Any, generators: Any, *, resumed: bool = False) -> Word:
        self.seen.append((generators, resumed))
        return self.word

    def close(self) -> None:
        self.closed = True


def decisions(*states: str, first: int = 0) -> tuple[DecisionStatus, ...]:
    return tuple(
        DecisionStatus(sequence=first + i, time="2026-01-01T00:00:00Z", state=s) for i, s in enumerate(states)
    )


@pytest.fixture
def auto() -> ScaleRLRun:
    spec = local_run({"mode": "Auto", "generators": {"min": 1, "max": 4}})
    manifest = {
        "metadata": {"name": "a", "namespace": "n"},
        "spec": spec.model_dump(by_alias=True, exclude_none=True, mode="json"),
    }
    return ScaleRLRun.model_validate(manifest)


def test_report_has_the_number_of_the_last_decision(auto: ScaleRLRun) -> None:
    steersman = Steersman()
    scaling = RunScaling("u", lambda: steersman)
    steersman.word = Word(known=True, generators=3, decision=7)
    report = scaling.steer(auto, coordinator_report([]), 1, resumed=True)
    assert (report.generators, report.decision) == (3, 7)
    assert (steersman.seen[-1][0].wanted, steersman.seen[-1][1]) == (1, True)


@pytest.mark.parametrize(
    ("word", "reason"),
    [(Word(), ""), (Word(stop=True), FORECAST), (Word(hold=True), BROKEN)],
)
def test_why_a_run_is_to_end(auto: ScaleRLRun, word: Word, reason: str) -> None:
    steersman = Steersman()
    steersman.word = word
    scaling = RunScaling("u", lambda: steersman)
    scaling.steer(auto, coordinator_report([]), 1, resumed=False)
    assert scaling.stop == reason
    off = auto.model_copy(update={"spec": local_run({"mode": "Off"})})
    scaling.steer(off, coordinator_report([]), 1, resumed=False)
    assert scaling.stop == "", "nobody may act any more"


def test_each_decision_is_counted_once_and_no_earlier_operators(auto: ScaleRLRun) -> None:
    steersman, counted = Steersman(), list[str]()
    scaling = RunScaling("u", lambda: steersman, counted.append)

    def look(word: Word) -> None:
        steersman.word = word
        scaling.steer(auto, coordinator_report([]), 1, resumed=False)

    look(Word())
    look(Word(known=True, decisions=decisions("INSUFFICIENT", "CONTINUE")))
    assert counted == []
    look(Word(known=True, decisions=decisions("INSUFFICIENT", "CONTINUE", "STOP")))
    look(Word(known=True, decisions=decisions("INSUFFICIENT", "CONTINUE", "STOP")))
    assert counted == ["STOP"]


def test_the_status_stays_as_it_was_until_the_record_is_read(auto: ScaleRLRun) -> None:
    steersman = Steersman()
    scaling = RunScaling("u", lambda: steersman)
    before = RunStatus(
        forecast="0.50 (0.40-0.60)", decision="CONTINUE", decisions=list(decisions("CONTINUE"))
    )
    scaling.steer(auto, coordinator_report([]), 1, resumed=False)
    assert scaling.decorate(before) == before
    steersman.word = Word(known=True, state="STOP", forecast=None, ready=True, reason=Reason.FORECASTING)
    scaling.steer(auto, coordinator_report([]), 1, resumed=False)
    assert (scaling.decorate(before).decision, scaling.decorate(before).forecast) == ("STOP", None)
    scaling.close()
    assert steersman.closed
