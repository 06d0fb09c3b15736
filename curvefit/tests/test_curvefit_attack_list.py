"""An attacker without the token at the sidecar's port."""

from __future__ import annotations

from aiohttp import web
from attack_list import admitted

from scalerl_api import endpoints, forecast
from scalerl_curvefit.sidecar.app import Sidecar, runner

OPEN = (endpoints.HEALTH, endpoints.METRICS, forecast.OPENAPI)


async def test_only_probes_and_the_schema_answer_without_the_token() -> None:
    serving = runner(Sidecar(token="secret").application())
    await serving.setup()
    await web.TCPSite(serving, "127.0.0.1", 0).start()
    host, port = serving.addresses[0][:2]
    try:
        served = (forecast.FIT, forecast.FORECAST)
        assert await admitted(f"http://{host}:{port}", "secret", of_server=served, open_paths=OPEN) == []
    finally:
        await serving.cleanup()
