"""The health of a run in its status: across restarts, returns to a checkpoint, and from step to step."""

from __future__ import annotations

import json

import aiohttp
import pytest
from coordinator_client import Client, make_group

from scalerl_api import health, wire


async def test_health_is_read_at_the_start_and_again_when_the_trainer_returns(tmp_path, serving_on):
    rows = [{"step": step, "rollouts": 8, "truncated_fraction": 0.5} for step in range(health.LAST + 2)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 12, "trunc')
    async with serving_on(tmp_path) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        said = (await client.status()).health_problem
        assert said == "50% of the completions are cut off at their maximum length (at step 12)"
        await client.hello("t")  # at version 0
        assert (await client.status()).health_problem == ""


async def test_each_step_is_judged(tmp_path, serving_on, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "LAST", 1)
    monkeypatch.setattr(health, "RAISED", 1)
    async with serving_on(tmp_path) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        await client.hello("t")
        member = await client.register("g", local.digest)
        await client.publish("t", 0)
        while leases := (await client.lease(member, 0, 40)).leases:
            reply = await client.push(member, [make_group(lease, version=0) for lease in leases])
            assert set(reply.results) == {wire.PushResult.ACCEPTED}
        await client.report("t", 0, {"ratio_kl": 0.5})
        said = (await client.status()).health_problem
        assert said == "the policy differs by 0.5 nats (KL) between sampling and training (at step 1)"
