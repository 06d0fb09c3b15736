"""The step as a run makes it, with the real sidecar."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from coordinator_statuses import evaluations, flat_curve
from free_port import free_port

from autoscaling_tests.watched import ONE, Watched, no_stop
from scalerl_api.forecast import ForecastAnswer, ForecastRequest
from scalerl_api.wire import Counts
from scalerl_autoscaling.autoscaler import Step
from scalerl_autoscaling.models import Action, Generators, State
from scalerl_autoscaling.replay import verify


async def test_real_sidecar_stops_a_flat_run_and_records_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scalerl_curvefit.sidecar", "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), 120)).decode()
        found = re.search(r"http://\S+", line)
        assert found is not None
        watched, curve = Watched(tmp_path / "d", found[0]), flat_curve()
        steps = [await watched.must(curve[:count]) for count in (5, 12, 20, 30, 39, 40, 41)]
        assert steps[0].decision.state is State.INSUFFICIENT
        assert steps[-1].action == Action(kind="stop", on_stop="Suspend")
        first = next(step for step in steps if step.decision.state is State.STOP)
        assert first.changed
        assert "P(gain at 2× the compute > 0.04)" in first.decision.reasons[0]
        assert await watched.step(curve) is None  # nothing new
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 120) == 0
        # A new evaluation, and no sidecar: the stop is not given again, and comes back with the sidecar.
        longer = evaluations([p.reward for p in curve] + [0.61])
        no_stop(await watched.must(longer), State.INSUFFICIENT, "after 2 attempts")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("mode", ["Off", "Advisory"])
async def test_off_requests_nothing_and_advisory_acts_on_nothing(tmp_path: Path, url: str, mode: str) -> None:
    watched, curve = Watched(tmp_path / "d", url, {"mode": mode}), flat_curve()
    steps = [await watched.step(curve[:count]) for count in (39, 40, 41)]
    if mode == "Off":
        assert steps == [None] * 3
        assert not watched.path.exists()
        return
    last = steps[-1]
    assert last is not None
    assert (last.decision.state, last.decision.action.kind, last.action) == (State.STOP, "stop", Action())


async def test_restart_resumes_state_and_repeats_stop(tmp_path: Path, url: str) -> None:
    curve = flat_curve()
    before = Watched(tmp_path / "d", url)
    await before.must(curve[:40])
    again = Watched(tmp_path / "d", url)
    assert (await again.must(curve[:40])).action == Action()  # seen before, so it does not count again
    assert (await again.must(curve[:41])).action.kind == "stop"
    third = Watched(tmp_path / "d", url)
    assert (await third.must(curve[:41])).action.kind == "stop"
    resumed = Watched(tmp_path / "d", url, resumed=True)
    step = await resumed.must(curve[:41])
    assert (step.decision.state, step.changed) == (State.CONTINUE, True)
    longer = evaluations([p.reward for p in curve] + [0.61, 0.61])
    assert (await resumed.must(longer[:42])).action == Action()
    assert (await resumed.must(longer[:43])).action.kind == "stop"


async def test_load_is_read_once_per_cooldown(tmp_path: Path, url: str) -> None:
    """A trainer that waits gets a second generator; nothing is recorded in between."""
    watched = Watched(tmp_path / "d", url, {"generators": {"max": 2}, "cooldownSeconds": 60})
    curve = flat_curve()[:12]
    taken: list[tuple[int, Step]] = []
    generators = ONE
    for second in range(0, 200, 5):
        trainers, wall = 1, 2000.0 + second
        step = await watched.step(
            curve,
            generators,
            wall_seconds=wall,
            device_seconds=trainers * wall + wall,
            step=120 + second,
            trainer_busy_fraction=(0.9 * 2000 + 0.4 * second) / wall,
            generator_busy_fraction=(0.9 * 2000 + 0.95 * second) / wall,
            counts=Counts(**dict.fromkeys(Counts.__struct_fields__, 0)),
        )
        if step is not None:
            taken.append((second, step))
            if step.action.scale_to:
                generators = Generators(wanted=step.action.scale_to, ready=step.action.scale_to)
    assert [(second, step.policy, step.action.scale_to) for second, step in taken] == [
        (0, "autoscale", None),
        (60, "balance", 2),
        (125, "balance", None),
        (190, "balance", None),
    ]
    assert "trainer busy 40%, generators 95%" in taken[1][1].decision.reasons[0]
    assert verify(watched.path.read_bytes())[1] == []


@pytest.mark.parametrize(("step_seconds", "grows_at"), [(5, 20), (7, 25), (60, 180)])
async def test_steps_longer_than_a_cooldown_are_waited_for(
    tmp_path: Path, url: str, step_seconds: int, grows_at: int
) -> None:
    """Balance needs three steps, and the window stays open until it has them."""
    watched = Watched(tmp_path / "d", url, {"generators": {"max": 2}, "cooldownSeconds": 20})
    taken: list[tuple[int, int | None]] = []
    for second in range(0, 200, 5):
        step = await watched.step(
            [],
            ONE,
            wall_seconds=1000.0 + second,
            device_seconds=2000.0 + 2 * second,
            step=200 + second // step_seconds,
            trainer_busy_fraction=0.4,
            generator_busy_fraction=0.95,
        )
        if step is not None:
            taken.append((second, step.action.scale_to))
    assert taken[0] == (grows_at, 2)


async def test_number_outside_its_limits_is_corrected_at_once(tmp_path: Path, url: str) -> None:
    watched = Watched(tmp_path / "d", url, {"generators": {"max": 2}, "cooldownSeconds": 20})
    three = Generators(wanted=3, ready=3)
    steps = [
        await watched.step(
            [], three, wall_seconds=1000.0 + second, device_seconds=4000.0 + 4 * second, step=200
        )
        for second in range(0, 30, 5)
    ]
    assert [step.action.scale_to for step in steps if step is not None] == [2]


async def test_balance_does_not_wait_for_a_forecast(tmp_path: Path) -> None:
    """Without a sidecar, the trainer is fed all the same; and what went well there asks no question less."""
    absent = f"http://127.0.0.1:{free_port()}"
    watched = Watched(tmp_path / "d", absent, {"generators": {"max": 4}, "cooldownSeconds": 60})
    generators, taken = Generators(wanted=1, ready=1), []
    for second in range(0, 200, 5):
        watched.clock.monotonic = second
        step = await watched.step(
            flat_curve(3),
            generators,
            wall_seconds=1000.0 + second,
            device_seconds=2000.0 + 2 * second,
            step=200 + second,
            trainer_busy_fraction=0.4,
            generator_busy_fraction=0.95,
        )
        if step is not None:
            taken.append((second, step.policy))
    # Asked again after 15, 30, 60 seconds, each shortened by up to half; the load was measured each minute meanwhile.
    asked = [second for second, policy in taken if policy == "autoscale"]
    assert asked[0] == 0
    for longest, gap in zip((15, 30, 60, 120), np.diff(asked), strict=False):
        assert longest / 2 <= gap <= longest + 2 * 5  # a step may be the balance's
    balanced = [second for second, policy in taken if policy == "balance"]
    assert len(balanced) >= 2
    assert all(60 <= gap <= 75 for gap in np.diff([0, *balanced]))


async def test_forecast_is_not_decided_by_rules_edited_meanwhile(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked whether double the compute pays; by then the spec asks about four times as much."""
    watched, curve = Watched(tmp_path / "d", url), flat_curve()
    await watched.must(curve[:39])
    spec, forecast = watched.scaler.spec, watched.scaler._sidecar.forecast
    changed = spec.model_copy(
        update={"autoscaling": spec.autoscaling.model_copy(update={"horizon": "4", "min_gain": "0.5"})}
    )

    async def slow(asked: ForecastRequest) -> ForecastAnswer:
        answer = await forecast(asked)
        watched.scaler.spec = changed
        return answer

    monkeypatch.setattr(watched.scaler._sidecar, "forecast", slow)
    before = watched.path.read_bytes()
    assert await watched.step(curve[:40]) is None
    assert watched.path.read_bytes() == before, "nothing is decided, nothing recorded"
    step = await watched.must(curve[:40])
    assert "4× the compute > 0.5" in " ".join(step.decision.reasons), step.decision.reasons
