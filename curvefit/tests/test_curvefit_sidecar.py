"""The service on a real socket: its limits, its errors, and the client."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from free_port import free_port

import scalerl_curvefit as cf
from scalerl_api import endpoints
from scalerl_api import forecast as wire
from scalerl_autoscaling import forecast_client
from scalerl_autoscaling.forecast_client import SidecarError
from scalerl_curvefit.sidecar import app, forecast_answers
from scalerl_curvefit.sidecar.app import Limits, Sidecar, runner
from scalerl_curvefit.sidecar.malloc import keep_freed_memory
from scalerl_curvefit.simulate import SCALERL, simulated

LONG_LIMITS = Limits(read_seconds=120.0, compute_seconds=120.0)


def client(url: str, **options: float) -> forecast_client.Sidecar:
    return forecast_client.Sidecar(lambda: url, **{"timeout_seconds": 120.0, **options})


def points(curve: cf.Curve, **more: object) -> wire.Points:
    return wire.Points(compute=curve.compute.tolist(), reward=curve.reward.tolist(), **more)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    runners = []

    async def starter(application: web.Application) -> str:
        runners.append(served := runner(application, 0.1))
        await served.setup()
        await web.TCPSite(served, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{served.addresses[0][1]}"

    yield starter
    for served in runners:
        await served.cleanup()


async def post(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, object]]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, data=io.BytesIO(body), headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


async def test_forecast_matches_library(start) -> None:
    curve = simulated(n=50, seed=1)
    request = wire.ForecastRequest(
        points=points(curve), at=[2 * curve.now], target=0.58, max_compute=50_000.0, value=1.0, price=1e-6
    )
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))
    answer = await sidecar.forecast(request)
    again = await sidecar.forecast(request)
    fitted = cf.fit(curve)
    (ahead,) = cf.forecast(fitted, [2 * curve.now])
    got = answer.forecasts[0]
    assert (got.median, got.low, got.high) == (ahead.median, ahead.low, ahead.high)
    assert (answer.fit.A.median, answer.fit.identifiable) == (fitted.A.median, fitted.identifiable)
    assert answer == again
    assert abs(got.median - float(SCALERL.reward(2 * curve.now))) < 0.03
    assert answer.outlook is not None
    assert answer.outlook.p_asymptote_above_target > 0.5
    assert answer.outlook.to_target is not None
    assert answer.outlook.best_block is not None
    assert not answer.collapse_check.broken


async def test_forecast_unreachable_target_is_null(start) -> None:
    request = wire.ForecastRequest(points=points(simulated(n=50, seed=1)), target=0.95)
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))
    answer = await sidecar.forecast(request)
    assert answer.outlook.to_target.median is None
    assert answer.outlook.to_target.probability < 0.05


async def test_forecast_broken_run_has_no_outlook(start) -> None:
    request = wire.ForecastRequest(points=points(simulated(n=40, seed=1)), truncation=[0.3])
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))
    answer = await sidecar.forecast(request)
    assert answer.collapse_check.broken
    assert (answer.forecasts, answer.outlook) == ([], None)


async def test_forecast_equal_rewards_with_budget(start) -> None:
    """A model that passes nothing: no curve is fitted to it otherwise, and it would never be stopped."""
    silent = wire.Points(compute=[float(i) for i in range(1, 21)], reward=[0.0] * 20, samples=1000.0)
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))
    answer = await sidecar.forecast(wire.ForecastRequest(points=silent, budget=30.0))
    with pytest.raises(SidecarError, match="constant_reward"):
        await sidecar.forecast(wire.ForecastRequest(points=silent))
    with pytest.raises(SidecarError, match="budget is -1; it is the total compute that may be used"):
        await sidecar.forecast(wire.ForecastRequest(points=silent, budget=-1.0))
    assert isinstance(answer.flat, wire.Flat)
    assert (answer.flat.share, answer.flat.gained) == (pytest.approx(2 / 3), 0.0)
    assert answer.flat.p_gain < 0.1


async def test_forecast_includes_late_rises(start) -> None:
    curve = points(simulated(n=50, seed=1))
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))
    answer = await sidecar.forecast(wire.ForecastRequest(points=curve, horizon=4.0))
    games = await sidecar.forecast(wire.ForecastRequest(points=curve, horizon=4.0, late_rises="games"))
    for of, rate, largest in ((answer, 0.016, 0.151), (games, 0.062, 0.267)):
        assert 0.8 * rate < of.outlook.p_late_rise < 2 * rate
        assert of.outlook.p_gain_above_min > of.outlook.p_late_rise
        assert of.outlook.late_rise.high == pytest.approx(largest)
    assert games.outlook.expected_gain > answer.outlook.expected_gain


async def test_forecast_says_which_gain_is_decidable(start) -> None:
    """Three standard deviations of an evaluation, and the samples that would do for the gain asked for."""
    random = np.random.default_rng(0)
    compute = np.arange(1.0, 31.0)
    rewards = random.binomial(100, 0.2 + 0.4 / (1 + (5 / compute) ** 2)) / 100
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))

    def request(least: float, samples: float | None = 100.0) -> wire.ForecastRequest:
        seen = wire.Points(compute=compute.tolist(), reward=rewards.tolist(), samples=samples)
        return wire.ForecastRequest(points=seen, min_gain=least)

    few = (await sidecar.forecast(request(0.04))).outlook
    assert few.decidable_gain > 0.06
    assert 200 < few.samples_needed < 3000
    assert (await sidecar.forecast(request(0.2))).outlook.samples_needed is msgspec.UNSET
    assert (await sidecar.forecast(request(0.01))).outlook.samples_needed is msgspec.UNSET, "below the floor"
    assert (await sidecar.forecast(request(0.04, None))).outlook.samples_needed is msgspec.UNSET


async def test_forecast_new_recipe_uses_axis_of_request(start) -> None:
    before, after = simulated(n=20, seed=1), simulated(n=40, seed=2)
    curve = wire.Points(
        compute=[*before.compute.tolist(), *(after.compute + before.now).tolist()],
        reward=[*before.reward.tolist(), *after.reward.tolist()],
        recipe=["a"] * 20 + ["b"] * 40,
    )
    at = before.now + 2 * after.now
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))
    answer = await sidecar.forecast(wire.ForecastRequest(points=curve, at=[at]))
    assert answer.fit.segment_start == before.now
    assert answer.fit.points_used == 40
    assert answer.forecasts[0].compute == pytest.approx(at)
    assert answer.forecasts[0].median == pytest.approx(float(SCALERL.reward(2 * after.now)), abs=0.03)


GOOD = json.dumps({"points": {"compute": [1, 2, 3, 4, 5], "reward": [0.1, 0.2, 0.3, 0.35, 0.4]}})


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("not json", 400, "json"),
        ('{"points": {"compute": [1, NaN], "reward": [0.1, 0.2]}}', 400, "json"),
        ('{"points": {"compute": [1, 2]}}', 400, "request_type"),
        ('{"points": {"compute": "a", "reward": [1]}}', 400, "request_type"),
        (GOOD.replace("points", "poits", 1), 400, "request_type"),
        ('{"points": {"compute": [1, 2], "reward": [0.1, 0.2]}}', 422, "too_few_points"),
        (GOOD.replace("[1, 2", "[2, 1"), 422, "unsorted_compute"),
        (GOOD.replace("[1, 2", "[1, 1"), 422, "duplicate_compute"),
        (GOOD.replace("[1, 2", "[-1, 2"), 422, "negative_compute"),
        (GOOD.replace("0.4]", "1.4]"), 422, "reward_range"),
        (GOOD.replace("0.4]", "1e999]"), 400, "request_type"),
        (GOOD.replace("[0.1, 0.2, 0.3, 0.35, 0.4]", "[0.2, 0.2, 0.2, 0.2, 0.2]"), 422, "constant_reward"),
        (GOOD.replace("0.35, ", ""), 422, "shape"),
    ],
)
async def test_invalid_requests_have_error_codes(start, body: str, status: int, code: str) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    for path in (wire.FIT, wire.FORECAST):
        got, answer = await post(url + path, body.encode())
        assert (got, answer["code"]) == (status, code), answer
        assert answer["message"]


async def test_forecast_earlier_runs_have_weights_and_reasons(start) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    points = json.loads(GOOD)["points"]
    whole = simulated(n=40, reach=8)
    head = {"compute": whole.compute[:12].tolist(), "reward": whole.reward[:12].tolist()}
    like = {"compute": whole.compute.tolist(), "reward": whole.reward.tolist()}
    runs = [
        {"name": "broken", "points": {**points, "reward": [0.1, -7.0, 0.3, 0.35, 0.4]}},
        {"name": "like", "points": like},
        {"name": "empty", "points": {"compute": [], "reward": []}},
    ]
    _, alone = await post(url + wire.FORECAST, json.dumps({"points": head}).encode())
    status, answer = await post(url + wire.FORECAST, json.dumps({"points": head, "earlier": runs}).encode())
    assert status == 200
    assert "earlier" not in alone
    assert [use["name"] for use in answer["earlier"]] == ["broken", "like", "empty"]
    assert [round(use["weight"], 1) for use in answer["earlier"]] == [0.0, 1.0, 0.0]
    assert "outside [0, 1]" in answer["earlier"][0]["reason"]
    assert "non-empty" in answer["earlier"][2]["reason"]
    _, again = await post(url + wire.FORECAST, json.dumps({"points": head, "earlier": runs}).encode())
    assert again == answer, "known runs are not read again, and count the same"
    assert answer["forecasts"] != alone["forecasts"]


def forecast_with_earlier_runs() -> wire.ForecastRequest:
    whole = simulated(n=40, reach=8)
    changed = points(whole, recipe=["a"] * 20 + ["b"] * 20)
    runs = {
        "like": points(whole),
        "same": points(whole),
        "other": points(simulated(n=40, reach=8, seed=2), eval_version="old"),
        "flat": wire.Points(compute=[1.0, 2.0, 3.0, 4.0], reward=[0.1] * 4),
        "changed": changed,
        "broken": wire.Points(compute=[1.0, 2.0], reward=[0.1, -7.0]),
    }
    return wire.ForecastRequest(
        points=points(whole.head(20), eval_version="new"),
        earlier=[wire.EarlierRun(name=name, points=run) for name, run in runs.items()],
    )


def test_forecast_cached_earlier_runs_give_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    request = forecast_with_earlier_runs()
    forecast_answers._earlier_segment.cache_clear()
    first = forecast_answers.answer_forecast(request)
    monkeypatch.setattr(forecast_answers, "_earlier_segment", forecast_answers._earlier_segment.__wrapped__)
    uncached = forecast_answers.answer_forecast(request)
    monkeypatch.undo()
    read: list[wire.Points] = []
    curve_of = forecast_answers._last_segment
    monkeypatch.setattr(
        forecast_answers, "_last_segment", lambda points: (read.append(points), curve_of(points))[1]
    )
    known = forecast_answers.answer_forecast(request)
    assert first == uncached == known
    assert read == [request.points], "a known earlier run is checked again"
    assert [use.weight > 0 for use in known.earlier] == [True, True, False, False, False, False]
    assert "change of recipe in only one" in known.earlier[4].reason


def test_forecast_steps_once_per_new_earlier_run() -> None:
    request = forecast_with_earlier_runs()
    forecast_answers._earlier_segment.cache_clear()
    *steps, answer = forecast_answers.forecast_steps(request)
    assert steps == [None] * 5, "two of six have the same points"
    assert list(forecast_answers.forecast_steps(request)) == [answer]


async def test_requests_interleave_between_steps(start, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, answered = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def steps(request: wire.ForecastRequest) -> Iterator[wire.ForecastAnswer | None]:
        loop.call_soon_threadsafe(waits.set)
        while not answered.is_set():
            time.sleep(0.001)
            yield None
        yield forecast_answers.answer_forecast(request)

    monkeypatch.setattr(app, "forecast_steps", steps)
    url = await start(Sidecar(LONG_LIMITS).application())
    slow = asyncio.create_task(post(url + wire.FORECAST, GOOD.encode()))
    try:
        await asyncio.wait_for(waits.wait(), 120)
        assert (await post(url + wire.FIT, GOOD.encode()))[0] == 200
        assert not slow.done()
    finally:
        answered.set()  # else a failure leaves the thread running
    assert (await slow)[0] == 200


@pytest.mark.parametrize(
    "runs", [["same", "same"], [str(i) for i in range(wire.MAX_EARLIER_RUNS + 1)]], ids=["names", "runs"]
)
async def test_forecast_limits_on_earlier_runs(start, runs: list[str]) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    request = json.loads(GOOD)
    request["earlier"] = [{"name": name, "points": request["points"]} for name in runs]
    status, answer = await post(url + wire.FORECAST, json.dumps(request).encode())
    assert (status, answer["code"]) == (422, "request")


async def test_forecast_points_limit_includes_earlier_runs(start) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    many = list(range(1, wire.MAX_POINTS))
    earlier = [{"name": "long", "points": {"compute": many, "reward": [0.1] * len(many)}}]
    status, answer = await post(
        url + wire.FORECAST, json.dumps({**json.loads(GOOD), "earlier": earlier}).encode()
    )
    assert (status, answer["code"]) == (422, "request")
    assert "those of earlier runs included" in answer["message"]


async def test_forecast_plateau_uses_earlier_runs(start) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    compute = list(range(1, 41))
    rises = [0.1 if c <= 24 else 0.5 for c in compute]
    head = {"points": {"compute": compute[:20], "reward": [*rises[:19], 0.101]}, "budget": 40.0}
    runs = [
        {"name": str(i), "points": {"compute": compute, "reward": [r + 1e-3 * i for r in rises]}}
        for i in range(5)
    ]
    _, alone = await post(url + wire.FORECAST, json.dumps(head).encode())
    _, answer = await post(url + wire.FORECAST, json.dumps({**head, "earlier": runs}).encode())
    assert alone["flat"]["p_gain"] < 0.18
    assert answer["flat"]["p_late"] > 0.6


@pytest.mark.parametrize("change", [{"draws": 0}, {"horizon": 1.0}, {"at": [1.0] * 201}, {"at": [-1.0]}])
async def test_forecast_limits(start, change: dict[str, object]) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    status, answer = await post(url + wire.FORECAST, json.dumps({**json.loads(GOOD), **change}).encode())
    assert (status, answer["code"]) == (422, "request")


async def test_limits_on_body_points_token_and_queue(start) -> None:
    url = await start(Sidecar(replace(LONG_LIMITS, body_bytes=1000), token="secret").application())
    authorised = {"authorization": "Bearer secret"}
    assert (await post(url + wire.FIT, GOOD.encode()))[0] == 401
    assert (await post(url + wire.FIT, GOOD.encode(), authorization="Bearer wrong"))[0] == 401
    assert (await post(url + wire.FIT, GOOD.encode(), **authorised))[0] == 200
    assert (await post(url + wire.FIT, b" " * 2000 + GOOD.encode(), **authorised))[0] == 413
    idle = await start(Sidecar(replace(LONG_LIMITS, queue=0)).application())
    status, answer = await post(idle + wire.FIT, GOOD.encode())
    assert (status, answer["code"]) == (503, "busy")
    many = list(range(1, wire.MAX_POINTS + 2))
    body = json.dumps({"points": {"compute": many, "reward": [0.1] * len(many)}}).encode()
    roomy = await start(Sidecar(LONG_LIMITS).application())
    status, answer = await post(roomy + wire.FIT, body)
    assert (status, answer["code"]) == (422, "request")


async def test_out_of_time_is_503_and_service_continues(start) -> None:
    url = await start(Sidecar(replace(LONG_LIMITS, compute_seconds=0.0005)).application())
    curve = simulated(n=20_000, reach=4)
    body = json.dumps(
        {"points": {"compute": curve.compute.tolist(), "reward": curve.reward.tolist()}}
    ).encode()
    status, answer = await post(url + wire.FIT, body)
    assert (status, answer["code"]) == (503, "out_of_time")
    async with aiohttp.ClientSession() as session, session.get(url + endpoints.HEALTH) as response:
        assert response.status == 200


async def test_slow_body_is_503(start) -> None:
    url = await start(Sidecar(replace(LONG_LIMITS, read_seconds=0.1)).application())
    host, port = re.search(r"//(.*):(\d+)", url).groups()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {wire.FIT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode())
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 120)  # to the end: it is closed
    assert b"503" in answer.split(b"\r\n")[0]
    assert b"slow_body" in answer
    writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate"])
async def test_compressed_body_is_415(start, encoding: str) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    for body in (b"garbage", gzip.compress(b" " * 1_000_000)):
        status, answer = await post(url + wire.FIT, body, **{"content-encoding": encoding})
        assert (status, answer["code"]) == (415, "content_encoding")
    async with aiohttp.ClientSession() as session, session.get(url + endpoints.METRICS) as response:
        assert f'{wire.REQUESTS_METRIC}_total{{path="{wire.FIT}",status="415"}} 2.0' in await response.text()


async def test_runner_does_not_decompress_bodies(start) -> None:
    async def sent(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    application = web.Application()
    application.router.add_post("/", sent)
    packed = gzip.compress(b" " * 1_000_000)
    async with aiohttp.ClientSession() as session:
        url, headers = await start(application), {"content-encoding": "gzip"}
        async with session.post(url, data=io.BytesIO(packed), headers=headers) as answer:
            assert await answer.read() == packed


async def test_forecast_hundred_thousand_points(start) -> None:
    curve = simulated(n=100_000, reach=4)
    sidecar = client(await start(Sidecar(LONG_LIMITS).application()))
    answer = await sidecar.forecast(wire.ForecastRequest(points=points(curve)))
    assert abs(answer.fit.A.median - 0.61) < 0.01


async def test_metrics_and_openapi_match_wire_types(start) -> None:
    url = await start(Sidecar(LONG_LIMITS).application())
    await post(url + wire.FIT, GOOD.encode())
    await post(url + wire.FIT, b"no")
    async with aiohttp.ClientSession() as session:
        async with session.get(url + endpoints.METRICS) as response:
            text = await response.text()
        async with session.get(url + wire.OPENAPI) as response:
            document = await response.json()
    assert f'{wire.REQUESTS_METRIC}_total{{path="{wire.FIT}",status="200"}} 1.0' in text
    assert f'{wire.REFUSED_METRIC}_total{{code="json"}} 1.0' in text
    assert set(document["paths"]) == {wire.FIT, wire.FORECAST}
    schemas = document["components"]["schemas"]
    assert set(schemas["ForecastAnswer"]["properties"]) == set(wire.ForecastAnswer.__struct_encode_fields__)


async def test_client_does_not_retry_refusals(start) -> None:
    calls = 0

    async def refuse(_: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.json_response({"code": "too_few_points", "message": "2 points"}, status=422)

    application = web.Application()
    application.router.add_post(wire.FORECAST, refuse)
    sidecar = client(await start(application), backoff_seconds=0.01)
    with pytest.raises(SidecarError, match="the forecast was refused: too_few_points: 2 points"):
        await sidecar.forecast(wire.ForecastRequest(points=points(simulated())))
    assert calls == 1


@pytest.mark.parametrize("trouble", ["down", "slow", "error", "garbage", "nan", "half", "endless"])
async def test_client_invalid_answers_are_unavailable_after_retries(start, trouble: str) -> None:
    calls = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if trouble == "slow":
            await asyncio.sleep(5)
        if trouble == "error":
            return web.Response(status=500)
        if trouble == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * 100_000)
            return response
        body = {"garbage": "<html>", "nan": '{"A": NaN}', "half": '{"A": {"median": 0.6}}', "slow": ""}
        return web.Response(text=body[trouble])

    application = web.Application()
    application.router.add_post(wire.FORECAST, answer)
    url = f"http://127.0.0.1:{free_port()}" if trouble == "down" else await start(application)
    sidecar = client(
        url, timeout_seconds=0.3 if trouble == "slow" else 120.0, attempts=2, backoff_seconds=0.01
    )
    with pytest.raises(SidecarError, match="after 2 attempts"):
        await asyncio.wait_for(sidecar.forecast(wire.ForecastRequest(points=points(simulated()))), 120)
    assert calls == (0 if trouble == "down" else 2)


def test_sidecar_imports_only_scipy_special() -> None:
    """The operator's image has no more of it."""
    code = "import scalerl_curvefit.sidecar.__main__, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    packages = {name.split(".")[1] for name in done.stdout.split() if name.startswith("scipy.")}
    public = {name for name in packages if not name.startswith("_")}
    assert public == {"special", "version"}


async def test_command_serves_until_sigterm() -> None:
    command = [sys.executable, "-m", "scalerl_curvefit.sidecar", "--port", "0", "--metrics-port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        url, metrics_application = [
            re.search(r"http://\S+", (await asyncio.wait_for(process.stderr.readline(), 120)).decode())[0]
            for _ in range(2)
        ]
        sidecar = client(url)
        fitted = (await sidecar.forecast(wire.ForecastRequest(points=points(simulated(seed=1))))).fit
        assert abs(fitted.A.median - 0.61) < 0.05
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            async with session.get(metrics_application + endpoints.METRICS) as answer:
                assert (
                    f'{wire.REQUESTS_METRIC}_total{{path="{wire.FORECAST}",status="200"}} 1.0'
                    in await answer.text()
                )
            async with session.get(metrics_application + endpoints.HEALTH) as answer:
                assert answer.status == 200
            for path in (wire.FIT, wire.FORECAST):
                async with session.post(metrics_application + path, data=b"{}") as answer:
                    assert answer.status == 404, "the port for metrics computes nothing"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 120) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_command_port_in_use_is_named() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    command = [sys.executable, "-m", "scalerl_curvefit.sidecar", "--port", "0", "--metrics-port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        _, said = await asyncio.wait_for(process.communicate(), 120)
    finally:
        server.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}".encode() in said


def test_keep_freed_memory_on_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
