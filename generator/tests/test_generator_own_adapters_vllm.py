"""Completions that finish on the adapters they began with, on a real vLLM server that holds several versions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from test_generator_adapters_vllm import PROBE, SCALE, adapters, merged, publish_adapters
from vllm_with_updates import TOKEN, Server, TensorSource, connect, receive, score, start_server

from scalerl_api.weight_sync import DEFAULT_PROBE_LIMITS
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import UNVERSIONED, Part, Sampled
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_generator.weights.update_reports import UpdateFailed

PROMPT = [5, 6, 7]
TOLERANCE = 1e-5
"""Of log-probabilities, in nats: the server adds x A B to x W, the reference has the sum in W."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--lora-versions", "3", "--lora-rank", "2"]
    where = tmp_path_factory.mktemp("vllm")
    yield from start_server(where, tied=True, dtype="float32", fp32_head=True, options=options)


async def sample(client: VllmClient, started: asyncio.Event, tokens: int = 900) -> PartialCompletion:
    completion = PartialCompletion()

    def on_part(_: int, part: Part) -> None:
        started.set()
        completion.append(part, UNVERSIONED)
        if isinstance(part, Sampled):
            completion.settle(0, part.weight_versions)
            completion.finish_reason = part.finish_reason

    await client.stream(PROMPT, n=1, max_tokens=tokens, cache_salt=str(client), on_part=on_part)
    return completion


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_completions_finish_on_their_own_version(server: Server) -> None:
    """Through two updates in flight, of which the second brings as many versions as the server has slots."""
    async with VllmClient(server.url, TOKEN, own_adapters=True) as client:
        sender = await connect(client, 1)
        running: dict[int, list[asyncio.Task[PartialCompletion]]] = {}
        for version in (1, 2, 3):
            await publish_adapters(client, sender, adapters(server.model, version, torch.float32), version)
            assert all(any(not one.done() for one in tasks) for tasks in running.values()), "in flight"
            started = asyncio.Event()
            running[version] = [asyncio.create_task(sample(client, started)) for _ in range(8)]
            await started.wait()
        short = await client.generate(PROMPT, n=4, max_tokens=8, cache_salt="3")
        policies = {
            v: merged(server.model, adapters(server.model, v, torch.float32), torch.float32) for v in running
        }
        for version, tasks in running.items():
            difference = dict.fromkeys(running, 0.0)
            for completion in [await one for one in tasks]:
                assert [(s.version, s.start) for s in completion.weight_versions] == [(version, 0)]
                tokens = [*PROMPT, *completion.token_ids.tolist()]
                for v, policy in policies.items():
                    own = score(policy, tokens)[len(PROMPT) - 1 :]
                    difference[v] = max(difference[v], float(np.abs(completion.logprobs - own).max()))
            print(f"version {version}: {difference}")
            assert difference.pop(version) <= TOLERANCE
            assert min(difference.values()) > 0.1, "of no other version"
        assert {s.version for one in short for s in one.weight_versions} == {3}
        # What no request uses is dropped at the second update without one.
        for version in (4, 5, 6):
            await publish_adapters(client, sender, adapters(server.model, version, torch.float32), version)
        assert client.adapters is not None
        assert [one.version for one in client.adapters._held] == [5, 6]
        listed = json.loads(await client.call("GET", "/v1/models", None, 30.0))["data"]
        assert {one["id"] for one in listed[1:]} == {one.name for one in client.adapters._held}
        policy = merged(server.model, adapters(server.model, 6, torch.float32), torch.float32)
        probes = [PROBE[i:] for i in range(8)]
        for probe, found in zip(probes, await gather_all(map(client.prompt_logprobs, probes)), strict=True):
            assert np.abs(found - score(policy, probe)).max() <= TOLERANCE


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_refused_adapters_leave_the_version_before(server: Server) -> None:
    good = adapters(server.model, 1, torch.float32)
    policy = merged(server.model, good, torch.float32)

    async def serves_good(client: VllmClient) -> None:
        assert np.abs(await client.prompt_logprobs(PROBE) - score(policy, PROBE)).max() <= TOLERANCE

    async with VllmClient(server.url, TOKEN, own_adapters=True) as client:
        sender = await connect(client, 2)
        await publish_adapters(client, sender, good, 20)
        other = TensorSource({name.replace("layers.0", "layers.9"): t for name, t in good.tensors.items()})
        with pytest.raises(
            UpdateFailed, match=r"has no layer model\.layers\.9\..*trainer\.lora\.targetModules"
        ):
            await publish_adapters(client, sender, other, 21)
        await serves_good(client)
        wide = TensorSource(
            {n: torch.cat([t] * 5, 0 if n.endswith("A") else 1) for n, t in good.tensors.items()}
        )
        sender = await connect(client, 3)
        with pytest.raises(UpdateFailed, match="old weights"):
            await publish_adapters(client, sender, wide, 22)
        await serves_good(client)
        sender = await connect(client, 4)
        damaged = asyncio.create_task(asyncio.to_thread(sender.send, good, 23, 0))
        message = msgspec.structs.replace(receive(good, 4, 23), adapter_scale=SCALE)
        with pytest.raises(UpdateFailed, match="checksum mismatch"):
            await WeightUpdateClient(client).install(message)
        await damaged
        await serves_good(client)
        sender = await connect(client, 5)
        await publish_adapters(client, sender, good, 24)
        await serves_good(client)
    async with VllmClient(server.url, TOKEN) as client:
        sender = await connect(client, 6)
        with pytest.raises(UpdateFailed, match=r"contradict each other"):
            await publish_adapters(client, sender, good, 25)


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_adapters_of_some_layers_in_bfloat16(tmp_path: Path) -> None:
    """The difference is that of other roundings, far below the default of ``weightSync.probeLimit``."""
    options = ["--lora-versions", "3", "--lora-rank", "2", "--lora-targets", "self_attn.q_proj,up_proj"]
    servers = start_server(tmp_path, tied=False, dtype="bfloat16", fp32_head=True, options=options)
    server = await asyncio.to_thread(next, servers)
    try:
        every = adapters(server.model, 1, torch.bfloat16)
        some = TensorSource({n: t for n, t in every.tensors.items() if "q_proj" in n or "up_proj" in n})
        async with VllmClient(server.url, TOKEN, own_adapters=True) as client:
            sender = await connect(client, 1)
            before = await client.prompt_logprobs(PROBE)
            await publish_adapters(client, sender, some, 1)
            found = await client.prompt_logprobs(PROBE)
            policy = merged(server.model, some, torch.bfloat16)
            ratio, change = score(policy, PROBE) - found, before - found
            divergence, of_change = (float((np.exp(x) - 1 - x).mean()) for x in (ratio, change))
            print(f"divergence {divergence:.2g}, of the versions {of_change:.2g}")
            assert divergence < DEFAULT_PROBE_LIMITS["bfloat16"] / 10
            assert of_change > 10 * divergence
            with pytest.raises(
                UpdateFailed, match=r"has no layer model\.layers\.0\..*trainer\.lora\.targetModules"
            ):
                await publish_adapters(client, sender, every, 2)
    finally:
        await asyncio.to_thread(servers.close)  # type: ignore[attr-defined]
