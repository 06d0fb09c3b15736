"""A record of decisions and a status, written when attributes in Python still had the names that these keys have."""

from __future__ import annotations

import gzip
from pathlib import Path

from scalerl_api.forecast import Collapse
from scalerl_api.reasons import Reason
from scalerl_api.status import RunStatus
from scalerl_autoscaling.models import State
from scalerl_autoscaling.replay import verify
from scalerl_lifecycle import restarts
from scalerl_lifecycle.lifecycle_types import OutcomeKind, PersistedState, RunOutcome, Suspension
from scalerl_lifecycle.status_fields import persisted_fields, persisted_state

RECORD = gzip.decompress((Path(__file__).parent / "golden/decisions-earlier-names.jsonl.gz").read_bytes())
STATUS = {
    "phase": "Finishing",
    "conditions": [
        {
            "type": "Failed",
            "status": "True",
            "observedGeneration": 0,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "reason": "ClaimLost",
            "message": "because",
        }
    ],
    "drainStartTime": "2023-11-14T22:13:24Z",
    "coordinatorUnreachableTime": "2023-11-14T22:13:25Z",
    "coordinatorAttempt": 2,
    "rest": "Asked",
    "resumed": True,
    "hasTrained": True,
    "unprovenSince": 7,
    "holding": {"reason": "PublishRefused", "message": "two in a row"},
    "trainer": {
        "attempt": 3,
        "lastRecordedAttempt": 3,
        "restarts": 5,
        "consecutiveFailures": 2,
        "failedStarts": 1,
        "disruptions": 4,
        "diverged": True,
        "publishRefused": True,
        "hasBeenReady": True,
        "readyTime": "2023-11-14T22:13:21Z",
        "heldTime": "2023-11-14T22:13:23Z",
        "awaitedTime": "2023-11-14T22:13:26Z",
        "nextAttemptTime": "2023-11-14T22:13:22Z",
    },
}


def test_record_of_decisions_is_read_and_repeated() -> None:
    for key in ("streak", "forgiven", "was_healthy", "settled", "reach", "pays", "doubts", "guard", "fall"):
        assert f'"{key}":'.encode() in RECORD
    lines, found = verify(RECORD)
    assert (len(lines), found) == (4, [])
    assert [line.decision.history.consecutive_votes for line in lines][-2:] == [1, 1]
    assert lines[-1].decision.state is State.BROKEN
    answer = lines[-1].observation.forecast
    assert answer is not None
    assert isinstance(answer.collapse_check.collapse, Collapse)


def test_status_is_read_and_written_with_the_same_keys() -> None:
    status = RunStatus.model_validate(STATUS)
    expected = PersistedState(
        attempt=3,
        last_recorded_attempt=3,
        record=restarts.Record(
            consecutive_failures=2,
            failed_starts=1,
            diverged=True,
            publish_refused=True,
            has_been_ready=True,
            disruptions=4,
        ),
        restarts=5,
        ready_since=1700000001.0,
        next_at=1700000002.0,
        gated_since=1700000003.0,
        drain_since=1700000004.0,
        unreachable_since=1700000005.0,
        coordinator_attempt=2,
        suspension=Suspension.ASKED,
        resumed=True,
        has_trained=True,
        unproven_since=7,
        suspending_for=RunOutcome(OutcomeKind.SUSPENDED, Reason.PUBLISH_REFUSED, "two in a row"),
        awaited_since=1700000006.0,
        outcome=RunOutcome(OutcomeKind.FAILED, Reason.CLAIM_LOST, "because"),
    )
    assert persisted_state(status) == expected
    written = RunStatus(**persisted_fields(expected)).to_object()
    assert {name: written[name] for name in STATUS.keys() - {"phase", "conditions"}} == {
        name: value for name, value in STATUS.items() if name not in ("phase", "conditions")
    }
