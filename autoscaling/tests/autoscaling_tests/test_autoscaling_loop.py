"""The autoscaler's loop: a reconcile never waits for it, and its report follows from the decision log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from coordinator_statuses import evaluations, flat_curve, status
from decision_service import DOWN, LOST, DecisionService
from free_port import free_port
from minimal_run import run_spec

from scalerl_api import forecast as wire
from scalerl_api.reasons import Reason
from scalerl_api.wire import BROKEN, FORECAST, Counts, EvaluationPoint
from scalerl_autoscaling import decision_log
from scalerl_autoscaling.autoscaler import FIRST_RETRY_SECONDS, Autoscaler
from scalerl_autoscaling.decision_log import as_recorded
from scalerl_autoscaling.forecast_client import Sidecar
from scalerl_autoscaling.models import Generators
from scalerl_autoscaling.replay import verify
from scalerl_autoscaling.report import AutoscalerReport

ONE = Generators(wanted=1, ready=1)


class Stepped:
    """A loop whose decision log, clock and wakes the test controls."""

    def __init__(self, url: str, api: DecisionService | None = None, **autoscaling: Any) -> None:
        self.api = api or DecisionService()
        self.run = self.as_run(**autoscaling)
        self.now = 0.0
        self.woken = asyncio.Event()
        sidecar = Sidecar(lambda: url, timeout_seconds=60.0, attempts=2, backoff_seconds=0.01)
        self.loop = Autoscaler(
            "ml/math",
            self.run.spec,
            self.api.record(),
            sidecar,
            wake=self.woken.set,
            unix=lambda: 1.7e9 + self.now,
            monotonic=lambda: self.now,
        )

    @staticmethod
    def as_run(*, budget: Any = None, recipe: Any = None, **autoscaling: Any) -> Any:
        return run_spec(
            autoscaling={"mode": "Auto", "stopAfter": 2} | autoscaling,
            budget=budget or {"maxSeconds": 1_000_000},
            recipe=recipe or {},
        )

    def report(
        self,
        points: list[EvaluationPoint],
        generators: Generators = ONE,
        *,
        resumed: bool = False,
        **changes: Any,
    ) -> AutoscalerReport:
        return self.loop.report(self.run.spec, status(points, **changes), generators, resumed=resumed)

    async def settled(
        self, points: list[EvaluationPoint], generators: Generators = ONE, **changes: Any
    ) -> AutoscalerReport:
        """Reports until no step starts or none has news; the report that carries the event, else the last."""
        found: AutoscalerReport | None = None
        if self.loop._task is not None:
            await asyncio.wait_for(asyncio.shield(self.loop._task), 120)
        for _ in range(10):
            self.woken.clear()
            report = self.report(points, generators, **changes)
            found = report if report.event or found is None or not found.event else found
            task = self.loop._task
            if task is not None:
                await asyncio.wait_for(asyncio.shield(task), 120)
            if task is None or not self.woken.is_set():
                return found
        raise AssertionError("steps never end")


async def test_flat_run_is_stopped_with_reason(url: str) -> None:
    stepped, curve = Stepped(url), flat_curve()
    first = stepped.report(curve[:39])
    assert (first.known, first.stop, first.decisions) == (False, "", ())
    early = await stepped.settled(curve[:5])
    assert (early.ready, early.reason, early.state) == (False, Reason.NO_FORECAST, "INSUFFICIENT")
    assert (early.outlook is None) == (early.forecast is None)
    await stepped.settled(curve[:40])
    assert not stepped.report(curve[:40]).stop
    report = await stepped.settled(curve)
    assert report.event.startswith("STOP: P(gain at 2× the compute > 0.04)")
    report = stepped.report(curve)
    assert (report.stop, report.state, report.event) == (FORECAST, "STOP", "")
    assert (report.ready, report.reason) == (True, Reason.READY)
    assert report.forecast is not None
    assert report.forecast.startswith("0.6")
    assert report.forecast.count("-") == 1
    outlook = report.outlook
    assert outlook is not None
    assert (
        report.forecast == f"{float(outlook.median):.2f} ({float(outlook.low):.2f}-{float(outlook.high):.2f})"
    )
    assert float(outlook.asymptote_low) <= float(outlook.asymptote) <= float(outlook.asymptote_high)
    assert float(outlook.gain_low) <= float(outlook.gain) <= float(outlook.gain_high)
    assert float(outlook.gain) < 0.02
    assert float(outlook.gain_probability) < 0.10, "as of a stop"
    assert outlook.tokens == 2 * curve[-1].work_tokens, "the horizon"
    assert report.votes == 2
    assert [d.sequence for d in report.decisions] == [0, 1, 2]
    assert (report.decisions[-1].action, report.decisions[-1].time) == ("stop", "2023-11-14T22:13:20Z")
    assert verify(stepped.api.content())[1] == []


async def test_no_scaling_while_a_stop_is_pending(url: str) -> None:
    """A later evaluation without a forecast would cancel the stop."""
    stepped, curve = Stepped(url), flat_curve()
    for count in (39, 40):
        await stepped.settled(curve[:count])
    stopped = stepped.report(curve[:40])
    assert stopped.stop == FORECAST
    later = await stepped.settled(curve)
    assert (later.stop, later.decisions) == (FORECAST, stopped.decisions)
    assert stepped.loop._task is None


async def test_restarted_operator_has_the_same_state(url: str) -> None:
    stepped, curve = Stepped(url), flat_curve()
    for count in (40, 41):
        await stepped.settled(curve[:count])
    before = stepped.report(curve)
    assert before.stop
    stepped.loop.close()
    again = Stepped(url, stepped.api)
    again.report(curve, stop_reason=FORECAST)
    await asyncio.wait_for(again.woken.wait(), 120)
    assert again.report(curve, stop_reason=FORECAST) == before
    assert again.loop._task is None, "a run that ends needs no decision"


async def test_stop_recorded_without_a_newer_field_stands(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, curve = Stepped(url), flat_curve()
    with monkeypatch.context() as before:
        old = {
            name: value
            for name, value in as_recorded(stepped.run.spec.autoscaling).items()
            if name != "prior"
        }
        before.setattr(decision_log, "as_recorded", lambda spec: old)
        for count in (40, 41):
            await stepped.settled(curve[:count])
    stepped.loop.close()
    again = Stepped(url, stepped.api)
    again.report(curve, stop_reason=FORECAST)
    await asyncio.wait_for(again.woken.wait(), 120)
    assert again.report(curve, stop_reason=FORECAST).stop
    other = Stepped(url, stepped.api, prior="None")
    other.report(curve, stop_reason=FORECAST)
    await asyncio.wait_for(other.woken.wait(), 120)
    assert not other.report(curve, stop_reason=FORECAST).stop, "made with another prior"


@pytest.mark.parametrize(
    "changed",
    [{"budget": {"maxSeconds": 2_000_000}}, {"recipe": {"promptsPerStep": 7}}],
    ids=["budget", "recipe"],
)
async def test_stop_made_under_another_spec_is_not_acted_on(url: str, changed: dict[str, Any]) -> None:
    """Neither by the operator that made it nor by one that starts later."""
    stepped, curve = Stepped(url), flat_curve()
    for count in (40, 41):
        await stepped.settled(curve[:count])
    assert stepped.report(curve).stop == FORECAST
    stepped.loop.close()
    again = Stepped(url, stepped.api)
    stepped.run = again.run = Stepped.as_run(**changed)
    assert not stepped.report(curve, stop_reason=FORECAST).stop
    again.report(curve)
    await asyncio.wait_for(again.woken.wait(), 120)
    assert not again.report(curve, stop_reason=FORECAST).stop
    await again.settled(curve)
    assert again.report(curve).stop == FORECAST, "the next decision is made under the new spec"


async def test_cancelled_stop_stays_cancelled(url: str) -> None:
    stepped, curve = Stepped(url), flat_curve()
    for count in (40, 41):
        await stepped.settled(curve[:count])
    # Also by an operator that had nothing to do with the stop.
    for one in (stepped, Stepped(url, stepped.api)):
        assert one.report(curve, resumed=True, stop_reason=FORECAST).stop == ""
        await one.settled(curve, resumed=True, stop_reason=FORECAST)
        assert one.report(curve, resumed=True, stop_reason=FORECAST).stop == ""
    stepped.loop.close()
    assert not (await one.settled(curve)).stop, "the coordinator knows"
    lines, _ = verify(stepped.api.content())
    assert (lines[-1].observation.resumed, lines[-1].decision.history.consecutive_votes) == (True, 0)
    longer = evaluations([p.reward for p in curve] + [0.61, 0.61])
    assert not (await one.settled(longer[:42])).stop
    await one.settled(longer)
    assert one.report(longer).stop


async def test_broken_run_is_held(url: str) -> None:
    stepped = Stepped(url)
    curve = flat_curve()[:30]
    await stepped.settled(curve)
    cut = evaluations([p.reward for p in curve] + [0.6] * 3)
    cut = [
        *curve,
        *(
            type(p)(**{f: getattr(p, f) for f in p.__struct_fields__} | {"truncated_fraction": 0.3})
            for p in cut[30:]
        ),
    ]
    report = await stepped.settled(cut[:31])
    assert (report.reason, report.alarming, report.event[:7]) == (Reason.BROKEN, True, "BROKEN:")
    await stepped.settled(cut[:32])
    report = stepped.report(cut[:32])
    assert (report.stop, report.decisions[-1].action) == (BROKEN, "hold")


async def test_another_spec_is_another_question(url: str) -> None:
    """What was decided under the old one is not acted on under the new, nor by whom may not act."""
    stepped, curve = Stepped(url), flat_curve()
    for count in (40, 41):
        await stepped.settled(curve[:count])
    assert stepped.report(curve).stop
    for rules in ({"minGain": "0.001"}, {"mode": "Advisory"}, {"mode": "Off"}):
        stepped.run = Stepped.as_run(**rules)
        assert not stepped.report(curve).stop
    stepped.run = Stepped.as_run(mode="Off")
    assert stepped.report(curve) == AutoscalerReport()


@pytest.mark.parametrize("mode", ["Auto", "Advisory"])
async def test_chosen_number_is_reported_until_the_next_decision(url: str, mode: str) -> None:
    stepped = Stepped(url, mode=mode, generators={"max": 2}, cooldownSeconds=60)
    curve, generators = flat_curve()[:12], ONE
    seen: list[tuple[int, int | None]] = []
    for second in range(0, 140, 5):
        wall = 2000.0 + second
        report = await stepped.settled(
            curve,
            generators,
            wall_seconds=wall,
            device_seconds=2 * wall,
            step=120 + second,
            trainer_busy_fraction=(0.9 * 2000 + 0.4 * second) / wall,
            generator_busy_fraction=(0.9 * 2000 + 0.95 * second) / wall,
            counts=Counts(**dict.fromkeys(Counts.__struct_fields__, 0)),
        )
        if report.scale_to not in (None, generators.wanted):
            seen.append((second, report.scale_to))
            assert report.event.startswith("1 → 2 generators: the trainer waits")
            # Before anything else is decided: the one who has to act on it may die first.
            again = Stepped(url, stepped.api, mode=mode, generators={"max": 2}, cooldownSeconds=60)
            again.report(curve)
            await asyncio.wait_for(again.woken.wait(), 120)
            assert again.report(curve).scale_to == 2
            assert again.loop._task is None, "the number comes first"
            again.loop.close()
            generators = Generators(wanted=2, ready=2)
    assert seen == ([(60, 2)] if mode == "Auto" else [])
    lines, _ = verify(stepped.api.content())
    assert [line.decision.action.kind for line in lines].count("scale") >= 1
    assert lines[-1].observation.generators == generators


async def test_slow_sidecar_holds_nothing_up(serve: Any) -> None:
    asked = 0
    came, gate = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        came.set()
        await gate.wait()
        return web.Response(status=500)

    application = web.Application(client_max_size=wire.MAX_BODY_BYTES)
    application.router.add_post(wire.FORECAST, answer)
    stepped = Stepped(await serve(application))
    stepped.report([])
    await stepped.woken.wait()
    stepped.report(flat_curve())
    await asyncio.wait_for(came.wait(), 120)
    for _ in range(20):
        report = stepped.report(flat_curve())
        assert not report.stop
        await asyncio.sleep(0.005)
    assert asked == 1
    gate.set()
    report = await stepped.settled(flat_curve())
    assert (report.ready, report.reason) == (False, Reason.SIDECAR_UNREACHABLE)
    assert "after 2 attempts" in report.message
    stepped.loop.close()


async def test_without_sidecar_nothing_stops_and_reason_is_reported(url: str) -> None:
    stepped = Stepped(f"http://127.0.0.1:{free_port()}")
    report = await stepped.settled(flat_curve())
    assert (report.stop, report.ready, report.reason, report.forecast) == (
        "",
        False,
        Reason.SIDECAR_UNREACHABLE,
        None,
    )


async def test_unreadable_record_is_reported_and_read_later(url: str) -> None:
    api = DecisionService([DOWN, DOWN])
    stepped = Stepped(url, api)
    for _ in range(2):
        stepped.report(flat_curve())
        await stepped.woken.wait()
        report = stepped.report(flat_curve())
        assert (report.known, report.reason) == (False, Reason.AUTOSCALER_FAILED)
        assert "decisions.jsonl cannot be read" in report.message
        assert stepped.loop._task is None, "not before its time"
        stepped.woken.clear()
        stepped.now += 2 * FIRST_RETRY_SECONDS
    assert (await stepped.settled(flat_curve())).known


@pytest.mark.parametrize("fate", [DOWN, LOST])
async def test_unrecorded_decision_is_not_acted_on(url: str, fate: str) -> None:
    """Or rather: only what is in the record is, whatever the answer was."""
    stepped, curve = Stepped(url), flat_curve()
    await stepped.settled(curve[:40])
    stepped.api.fate = [fate]
    report = await stepped.settled(curve)
    report = stepped.report(curve)
    assert (report.ready, report.reason) == (False, Reason.AUTOSCALER_FAILED)
    assert bool(report.stop) == (fate == LOST)
    stepped.now += FIRST_RETRY_SECONDS
    await stepped.settled(curve)
    report = stepped.report(curve)
    assert (report.stop, report.ready) == (FORECAST, True)
    assert verify(stepped.api.content())[1] == []


async def test_own_fault_is_reported_and_run_continues(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stepped, curve = Stepped(url), flat_curve()

    async def fail(*_: object) -> None:
        raise ZeroDivisionError("so")

    with monkeypatch.context() as patched:
        patched.setattr(Autoscaler, "step", fail)
        report = await stepped.settled(curve[:12])
        report = stepped.report(curve[:12])
    assert (report.stop, report.reason, report.message) == (
        "",
        Reason.AUTOSCALER_FAILED,
        "ZeroDivisionError: so",
    )
    assert "ml/math: the autoscaler failed" in caplog.text
    stepped.now += FIRST_RETRY_SECONDS
    assert (await stepped.settled(curve[:12])).state is not None


async def test_closing_ends_what_is_under_way(url: str) -> None:
    stepped = Stepped(url)
    stepped.report(flat_curve())
    task = stepped.loop._task
    assert task is not None
    stepped.loop.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not stepped.woken.is_set()


async def test_decision_is_counted_by_the_operator_that_made_it(url: str) -> None:
    counted: list[str] = []
    stepped, curve = Stepped(url), flat_curve()
    stepped.loop._on_decision = counted.append
    await stepped.settled(curve[:5])
    await stepped.settled(curve[:40])
    assert counted == ["INSUFFICIENT", stepped.report(curve[:40]).state]
    again = Stepped(url, stepped.api)
    again.loop._on_decision = counted.append
    again.report(curve[:40])
    await asyncio.wait_for(again.woken.wait(), 120)
    assert again.report([]).known
    assert len(counted) == 2, "what it reads in the log was counted before"
