"""Rates for a view, from successive statuses."""

from __future__ import annotations

import pytest
from coordinator_statuses import status as status_of

from scalerl_api.wire import Status
from scalerl_lifecycle.budget import Rates
from scalerl_local.rate_meter import RateMeter


def status(**changes: float) -> Status:
    return status_of([], **changes)


def test_rates_are_differences_and_restart_after_a_replay() -> None:
    meter = RateMeter()
    assert meter.add(status(step=10, tokens_generated=100, tokens_trained=50), 0.0) == Rates()
    rates = meter.add(status(step=14, tokens_generated=500, tokens_trained=90), 8.0)
    assert rates == Rates(50.0, 5.0, 2.0)
    assert meter.add(status(step=5, tokens_generated=600, tokens_trained=90), 9.0) == Rates()


def test_rate_of_compute() -> None:
    meter = RateMeter()
    meter.add(status(step=1, compute_tokens=32.0), 0.0)
    assert meter.add(status(step=2, compute_tokens=72.0), 4.0).compute_tokens_per_second == 10.0


def test_rate_window_covers_a_slow_step() -> None:
    meter = RateMeter()
    for second in range(200):
        rates = meter.add(status(step=second // 60, tokens_generated=second), float(second))
    assert rates.generated_tokens_per_second == 1.0
    assert rates.seconds_per_step is not None
    for second in range(200, 400):
        rates = meter.add(status(step=second // 2, tokens_generated=10 * second), float(second))
    assert rates.seconds_per_step == pytest.approx(2.0, rel=0.1)
