from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_lifecycle.restarts import (
    Cause,
    GiveUp,
    ProcessExit,
    Record,
    Restart,
    RestartPolicy,
    decide,
    disrupted,
)

POLICY = RestartPolicy()
CRASH = ProcessExit(Cause.EXIT, 1, ready_seconds=5.0)
EARLY = ProcessExit(Cause.EXIT, 1, ready_seconds=None)


@pytest.mark.parametrize(
    ("record", "end", "expected"),
    [
        (Record(), CRASH, 1.0),
        (Record(1), CRASH, 2.0),
        (Record(2), CRASH, 4.0),
        (Record(4), CRASH, 16.0),
        (Record(5), CRASH, 30.0),
        (Record(19), CRASH, 30.0),
        (Record(19), ProcessExit(Cause.EXIT, -9, 599.0), 30.0),
        (Record(19), ProcessExit(Cause.EXIT, -9, 600.0), 1.0),  # ten healthy minutes
        (Record(), ProcessExit(Cause.EXIT, 0, 5.0), 1.0),  # a service that leaves early
        (Record(), ProcessExit(Cause.STARTUP_PROBE, None, None), 1.0),
        (Record(), ProcessExit(Cause.LIVENESS_PROBE, None, 50.0), 1.0),
        (Record(3, failed_starts=4), EARLY, 8.0),
        (Record(5, failed_starts=5), EARLY, "6 times in a row before it was ready"),
        (Record(5, failed_starts=5), CRASH, 30.0),  # it was ready: not a failed start
        (
            Record(5, failed_starts=5, has_been_ready=True),
            EARLY,
            30.0,
        ),  # it can start: something is in its way
        (
            Record(20, failed_starts=20, has_been_ready=True),
            EARLY,
            "restarted 20 times without 10 minutes of quiet",
        ),
        (Record(20), CRASH, "restarted 20 times without 10 minutes of quiet"),
        (Record(), ProcessExit(Cause.EXIT, 3, 5.0), 1.0),
        (Record(1, diverged=True), CRASH, 2.0),
        (
            Record(1, diverged=True),
            ProcessExit(Cause.EXIT, 3, 5.0),
            "BROKEN: training diverged again",
        ),
        (
            Record(1, diverged=True),
            ProcessExit(Cause.EXIT, 3, 600.0),
            1.0,
        ),  # ten minutes on: not the same place
        (Record(), ProcessExit(Cause.EXIT, 5, 5.0), 1.0),
        (Record(1, publish_refused=True), CRASH, 2.0),
        (Record(1, diverged=True), ProcessExit(Cause.EXIT, 5, 5.0), 2.0),
        (Record(1, publish_refused=True), ProcessExit(Cause.EXIT, 5, 5.0), "PUBLISH REFUSED: again after"),
        (Record(1, publish_refused=True), ProcessExit(Cause.EXIT, 5, 600.0), 1.0),
        (Record(), ProcessExit(Cause.EXIT, 2, None), "input is wrong"),
        (Record(), ProcessExit(Cause.EXIT, 2, 1000.0), "input is wrong"),
    ],
)
def test_table(record: Record, end: ProcessExit, expected: float | str) -> None:
    outcome = decide(POLICY, record, end)
    if isinstance(expected, str):
        assert isinstance(outcome, GiveUp)
        assert expected in outcome.reason
        assert outcome.bad_input == (end.exit_code == 2)
    else:
        assert isinstance(outcome, Restart)
        assert outcome.delay_seconds == expected


@pytest.mark.parametrize(
    ("codes", "gives_up"),
    [
        ([3, 3], True),
        ([3, 1, 3], True),  # a crash in between does not make the update any better
        ([3, -9, -9, 3], True),
        ([1, 1, 3], False),
    ],
)
def test_refused_update_is_remembered_across_crashes(codes: list[int], gives_up: bool) -> None:
    record = Record()
    for code in codes[:-1]:
        outcome = decide(POLICY, record, ProcessExit(Cause.EXIT, code, 5.0))
        assert isinstance(outcome, Restart)
        record = outcome.record
    last = decide(POLICY, record, ProcessExit(Cause.EXIT, codes[-1], 5.0))
    assert isinstance(last, GiveUp) is gives_up


@given(
    st.builds(
        RestartPolicy,
        first_delay_seconds=st.floats(0.01, 10),
        max_delay_seconds=st.floats(10, 60),
        max_failed_starts=st.integers(0, 20),
        max_restarts=st.integers(0, 40),
        max_start_delay_seconds=st.floats(60, 300),
    ),
    st.lists(st.one_of(st.none(), st.floats(0, 599)), min_size=41, max_size=41),
)
def test_unit_without_quiet_time_is_given_up(policy: RestartPolicy, ends: list[float | None]) -> None:
    """But where it worked at last, after long waits for it to start."""
    record, delays = Record(), [0.0]
    for ready_seconds in ends:
        outcome = decide(policy, record, ProcessExit(Cause.EXIT, 1, ready_seconds))
        if isinstance(outcome, GiveUp):
            break
        record = outcome.record
        delays.append(outcome.delay_seconds)
        longest = policy.max_start_delay_seconds if ready_seconds is None else policy.max_delay_seconds
        assert min(delays[-2], longest) <= delays[-1] <= longest
    else:
        pytest.fail("never given up")
    assert len(delays) - 1 <= policy.max_restarts


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (CRASH, "exited with code 1 after 5 s of work"),
        (ProcessExit(Cause.EXIT, -9, None), "was killed by SIGKILL before it was ready"),
        (ProcessExit(Cause.EXIT, -99, None), "was killed by signal 99 before it was ready"),
        (
            ProcessExit(Cause.LIVENESS_PROBE, None, 61.0),
            "stopped answering its liveness probe after 61 s of work",
        ),
    ],
)
def test_end_reasons_have_descriptions(end: ProcessExit, text: str) -> None:
    assert end.describe() == text


def test_run_once_ready_has_an_hour_to_restart() -> None:
    policy = RestartPolicy(max_start_delay_seconds=300.0)
    outcome, delays = decide(policy, Record(), CRASH), list[float]()
    while isinstance(outcome, Restart):
        delays.append(outcome.delay_seconds)
        outcome = decide(policy, outcome.record, EARLY)
    assert len(delays) == 20
    assert delays == sorted(delays)
    assert delays[-1] == 300.0
    assert 3600 < sum(delays) < 4200
    assert "restarted 20 times" in outcome.reason


def test_disruption_is_retried_without_limit() -> None:
    policy, record, delays = RestartPolicy(max_start_delay_seconds=300.0), Record(3, 2), list[float]()
    for _ in range(100):
        again = disrupted(policy, record, None)
        record = again.record
        delays.append(again.delay_seconds)
    assert delays[:4] == [1, 2, 4, 8]
    assert delays[9:] == [300.0] * 91
    assert (record.consecutive_failures, record.failed_starts, record.disruptions) == (3, 2, 100)
    ready = disrupted(policy, record, 5.0)
    assert (ready.delay_seconds, ready.record.has_been_ready) == (30.0, True)
    assert disrupted(policy, record, 600.0).record == Record(has_been_ready=True, disruptions=1)
    failed = decide(policy, record, EARLY)
    assert isinstance(failed, Restart)
    assert disrupted(policy, failed.record, None).delay_seconds == 1.0, "no more in a row"
