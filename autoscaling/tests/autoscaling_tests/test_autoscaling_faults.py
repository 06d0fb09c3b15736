"""Every way in which sidecar, points, clocks and disk can fail the autoscaler.

Whatever goes wrong: never a stop, a reason is given, and the next step is as good as ever.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from coordinator_statuses import evaluations, flat_curve
from free_port import free_port
from msgspec.structs import replace

from autoscaling_tests.watched import Watched, no_stop
from scalerl_api import forecast as wire
from scalerl_api.wire import EvaluationPoint
from scalerl_autoscaling.autoscaler import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS
from scalerl_autoscaling.models import State
from scalerl_autoscaling.replay import verify
from scalerl_curvefit.sidecar.app import Sidecar as Application


@pytest.mark.parametrize("trouble", ["down", "slow", "error", "garbage", "nan", "other", "impossible"])
async def test_sidecar_that_fails(tmp_path: Path, serve: Any, trouble: str) -> None:
    """No stop on a run that a good answer would stop; and with a good one it is."""
    curve, good = flat_curve(), Application()
    well = False

    async def answer(request: web.Request) -> web.StreamResponse:
        if well:
            return await good._forecast(request)
        if trouble == "slow":
            await asyncio.sleep(3)
        if trouble == "error":
            return web.Response(status=500)
        content = (await good._forecast(request)).body
        assert isinstance(content, bytes)
        body = json.loads(content)
        if trouble == "nan":
            body["outlook"]["p_gain_above_min"] = float("nan")
        if trouble == "impossible":
            body["outlook"]["p_gain_above_min"] = -0.5
        if trouble == "other":
            body["fit"]["now"] *= 2
        return web.Response(text="<html>" if trouble == "garbage" else json.dumps(body))

    application = web.Application(client_max_size=wire.MAX_BODY_BYTES)
    application.router.add_post(wire.FORECAST, answer)
    url = await serve(application)
    bad = f"http://127.0.0.1:{free_port()}" if trouble == "down" else url
    watched = Watched(tmp_path / "d", bad, timeout_seconds=0.5 if trouble == "slow" else 60.0)
    says = {"impossible": "p_gain_above_min is -0.5", "other": "the last point is at"}
    no_stop(await watched.must(curve[:40]), State.INSUFFICIENT, says.get(trouble, "after 2 attempts"))
    no_stop(await watched.must(curve[:41]), State.INSUFFICIENT, says.get(trouble, "after 2 attempts"))
    # Asked again for the same evaluation, ever more seldom.
    assert await watched.step(curve[:41]) is None
    watched.clock.monotonic += LAST_RETRY_SECONDS
    no_stop(await watched.must(curve[:41]), State.INSUFFICIENT, "")
    if trouble == "down":
        return
    well = True
    watched.scaler._sidecar._timeout_seconds = 60.0
    watched.clock.monotonic += LAST_RETRY_SECONDS
    assert (await watched.must(curve[:41])).decision.history.consecutive_votes == 1
    longer = evaluations([p.reward for p in curve] + [0.61])
    assert (await watched.must(longer)).action.kind == "stop"


def gone_back(curve: list[EvaluationPoint]) -> list[EvaluationPoint]:
    return [*curve[:30], replace(curve[30], work_tokens=curve[20].work_tokens - 1), *curve[31:]]


def twice(curve: list[EvaluationPoint]) -> list[EvaluationPoint]:
    return [*curve[:30], replace(curve[30], work_tokens=curve[29].work_tokens), *curve[31:]]


def other_set(curve: list[EvaluationPoint]) -> list[EvaluationPoint]:
    return [*curve[:35], *(replace(p, set_digest="other") for p in curve[35:])]


def outside(curve: list[EvaluationPoint]) -> list[EvaluationPoint]:
    return [*curve[:30], replace(curve[30], reward=1.5), *curve[31:]]


def all_mixed(curve: list[EvaluationPoint]) -> list[EvaluationPoint]:
    return [replace(p, mixed_versions=True) for p in curve]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (gone_back, "unsorted_compute: compute goes back at point 30"),
        (twice, "duplicate_compute"),
        (outside, "reward_range"),
        (other_set, "6 evaluations that can be used since the recipe or the evaluation set last changed"),
        (all_mixed, "none of 41 evaluations can be used (41 of several weight versions"),
    ],
)
async def test_points_that_cannot_be_fitted(tmp_path: Path, url: str, spoil: Any, says: str) -> None:
    watched, curve = Watched(tmp_path / "d", url), flat_curve()
    no_stop(await watched.must(spoil(curve)[:40]), State.INSUFFICIENT, "")
    no_stop(await watched.must(spoil(curve)), State.INSUFFICIENT, says)
    # Once the points are as they should be, the count begins.
    fixed = evaluations([*[p.reward for p in curve], 0.61])
    assert (await watched.must(fixed)).decision.history.consecutive_votes == 1


@pytest.mark.parametrize("count", [1, 2, 3, 9])
async def test_few_points(tmp_path: Path, url: str, count: int) -> None:
    watched = Watched(tmp_path / "d", url)
    no_stop(
        await watched.must(flat_curve()[:count]), State.INSUFFICIENT, "points" if count < 5 else "evaluations"
    )


async def test_no_points_are_nothing_to_decide_on(tmp_path: Path, url: str) -> None:
    assert await Watched(tmp_path / "d", url).step([]) is None


async def test_thirty_thousand_points(tmp_path: Path, url: str) -> None:
    watched = Watched(tmp_path / "d", url)
    step = await watched.must(flat_curve(30_000))
    assert step.decision.state is State.CONTINUE
    assert step.decision.history.consecutive_votes == 1
    assert step.decision.history.version == 300_000


async def test_mixed_and_non_finite_points_are_excluded(tmp_path: Path, url: str) -> None:
    curve = flat_curve()
    curve[10] = replace(curve[10], mixed_versions=True, reward=0.0)
    curve[20] = replace(curve[20], reward=float("nan"))
    watched = Watched(tmp_path / "d", url)
    step = await watched.must(curve)
    (line,), _ = verify(watched.path.read_bytes())
    assert (
        line.observation.points.mixed,
        line.observation.points.not_finite,
        line.observation.points.used,
    ) == (1, 1, 39)
    assert step.decision.history.consecutive_votes == 1


async def test_nan_reward_is_an_alarm(tmp_path: Path, url: str) -> None:
    watched, curve = Watched(tmp_path / "d", url), flat_curve()
    damaged = [*curve[:40], replace(curve[40], reward=float("nan"))]
    no_stop(await watched.must(damaged), State.BROKEN, "not a finite number")
    no_stop(
        await watched.must([*curve[:40], replace(curve[40], truncated_fraction=float("inf"))]),
        State.BROKEN,
        "not a finite number",
    )
    assert (
        await watched.must(evaluations([*[p.reward for p in curve], 0.61]))
    ).decision.state is State.CONTINUE


@pytest.mark.parametrize("jump", [-1e6, 1e6, 1e9])
async def test_machines_clock_jumps(tmp_path: Path, url: str, jump: float) -> None:
    """It is held against the deadline only, and that never stops a run."""
    watched = Watched(tmp_path / "d", url, {"deadline": "2033-01-01T00:00:00Z", "generators": {"max": 2}})
    curve = evaluations([0.2 + 0.4 / (1 + (12 / max(i, 1e-3)) ** 1.5) for i in range(30)])
    await watched.must(curve[:28])
    watched.clock.unix += jump
    for count in (29, 30):
        step = await watched.must(curve[:count])
        assert step.decision.action.kind != "stop"
        assert step.decision.reasons


@pytest.mark.parametrize("jump", [-1000.0, 1e6])
async def test_runs_clock_jumps(tmp_path: Path, url: str, jump: float) -> None:
    """One interval of many: the pace is a median, so prices and reach stay what they were."""
    curve = flat_curve()
    jumped = [
        replace(p, wall_seconds=p.wall_seconds + jump, device_seconds=p.device_seconds + 4 * jump)
        if i > 35
        else p
        for i, p in enumerate(curve)
    ]
    watched = Watched(tmp_path / "d", url, {"pricePerDeviceHour": "1", "valuePerPoint": "1000000"})
    step = await watched.must(jumped, wall_seconds=4000.0, device_seconds=16000.0)
    plain = await Watched(tmp_path / "e", url, {"pricePerDeviceHour": "1", "valuePerPoint": "1000000"}).must(
        curve
    )
    assert step.decision.reasons == plain.decision.reasons
    assert step.decision.action.kind != "stop"


async def test_full_disk_sets_a_condition_without_action(tmp_path: Path, url: str) -> None:
    watched, curve = Watched(tmp_path / "d", url), flat_curve()
    await watched.must(curve[:40])
    size = watched.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        step = await watched.must(curve[:41])
        assert (step.decision.action.kind, step.action.kind, step.changed) == ("stop", "none", False)
        assert "could not be recorded" in step.problem
        assert "File too large" in step.problem
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert await watched.step(curve[:41]) is None
    watched.clock.monotonic += LAST_RETRY_SECONDS
    step = await watched.must(curve[:41])
    assert (step.action.kind, step.problem) == ("stop", "")


async def test_full_disk_does_not_make_balance_hot(tmp_path: Path, url: str) -> None:
    """What cannot be recorded is tried again, ever more seldom, and acted upon once it can."""
    watched = Watched(tmp_path / "d", url, {"generators": {"max": 2}, "cooldownSeconds": 1})
    await watched.must(flat_curve()[:12])
    size = watched.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    taken: list[tuple[int, str]] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        for second in range(1, 300):
            if second == 100:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            watched.clock.monotonic += 1
            step = await watched.step(
                flat_curve()[:12],
                wall_seconds=5000.0 + second,
                device_seconds=10_000.0 + 2 * second,
                step=500 + 5 * second,
                trainer_busy_fraction=0.4,
                generator_busy_fraction=0.95,
            )
            if step is not None and step.policy == "balance":
                taken.append((second, step.action.kind))
                if step.action.kind == "scale":
                    break
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(taken)]
    assert len(gaps) in (3, 4)
    for failures, gap in enumerate(gaps):
        longest = FIRST_RETRY_SECONDS * 2**failures
        assert longest / 2 <= gap <= longest + 1
    *refused, last = (kind for _, kind in taken)
    assert (set(refused), last) == ({"none"}, "scale")
