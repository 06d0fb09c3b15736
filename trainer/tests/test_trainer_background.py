"""Work beside a step."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from scalerl_trainer.background import Prefetch, in_background
from scalerl_trainer.coordinator_client import CoordinatorUnreachable, NotReady

CPU = torch.device("cpu")


class Steps:
    """Steps that are closed one by one."""

    def __init__(self) -> None:
        self.closed = -1
        self.fetched: list[int] = []
        self.failing: list[Exception] = []
        self.requested = threading.Semaphore(0)

    def fetch(self, step: int) -> str:
        self.requested.release()
        if self.failing:
            raise self.failing.pop()
        if step > self.closed:
            time.sleep(0.01)
            raise NotReady(f"step {step} is not closed")
        self.fetched.append(step)
        return f"step {step}"


def test_next_step_is_fetched_while_the_present_one_is_computed() -> None:
    steps = Steps()
    prefetch = Prefetch(steps.fetch, CPU)
    steps.closed = 0
    assert prefetch.take(0) == "step 0"
    for _ in range(3):  # it repeats its request for step 1, which is not closed
        assert steps.requested.acquire(timeout=120)
    steps.closed = 1
    deadline = time.monotonic() + 120
    while steps.fetched != [0, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert prefetch.take(1) == "step 1"
    assert steps.fetched[:2] == [0, 1], "and not fetched again"


def test_every_step_is_the_one_that_is_asked_for() -> None:
    """As after a return to an older version."""
    steps = Steps()
    steps.closed = 99
    prefetch = Prefetch(steps.fetch, CPU)
    assert [prefetch.take(step) for step in (3, 4, 2, 3, 7)] == [f"step {step}" for step in (3, 4, 2, 3, 7)]


def test_step_that_is_taken_and_not_closed_raises() -> None:
    """The coordinator has lost it: no rank waits for it."""
    with pytest.raises(NotReady, match="step 5 is not closed"):
        Prefetch(Steps().fetch, CPU).take(5)


def test_failure_ahead_is_tried_again_and_then_raised() -> None:
    steps = Steps()
    steps.closed = 2
    prefetch = Prefetch(steps.fetch, CPU)
    steps.failing = [CoordinatorUnreachable("no answer")]
    with pytest.raises(CoordinatorUnreachable):
        prefetch.take(0)
    assert prefetch.take(0) == "step 0"
    deadline = time.monotonic() + 120
    while steps.fetched != [0, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    steps.failing = [CoordinatorUnreachable("no answer")]
    assert prefetch.take(1) == "step 1"
    while steps.failing:  # the request for step 2 fails, and nothing needs it yet
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert prefetch.take(2) == "step 2"


def test_dead_thread_raises_where_its_result_is_used() -> None:
    def work() -> None:
        raise SystemExit("thread")

    with pytest.raises(SystemExit, match="thread"):
        in_background("dies", work, CPU).result(timeout=120)
