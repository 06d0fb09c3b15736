"""Completions that finish on their own adapters, with versions that come through files: more of them than the server has slots, and a
server that is killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from free_port import free_port
from test_generator_adapters_vllm import SCALE, adapters, merged
from transformers import LlamaForCausalLM
from vllm_with_updates import TOKEN, Server, build_model, score, start_server, weight_writer, write

from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import Part, Sampled, ServerDown
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_trainer.publish.weight_writer import WeightWriter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7]
EOS = {"eos_token", "eos_token_id"}
MAX_STALENESS = 1
SLOTS = MAX_STALENESS + 2
TOLERANCE = 1e-5
"""Of log-probabilities, in nats: the server adds x A B to x W, the reference has the sum in W."""


def build_endless(where: Path, **given: Any) -> None:
    """Without an end token: all completions have their full length."""
    build_model(where, **given)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        fields = json.loads((where / name).read_text())
        (where / name).write_text(json.dumps(fields | dict.fromkeys(fields.keys() & EOS)))


def start(root: Path, port: int) -> Iterator[Server]:
    options = ["--lora-versions", str(SLOTS), "--lora-rank", "2"]
    yield from start_server(
        root, tied=True, dtype="float32", fp32_head=True, options=options, build=build_endless, port=port
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start(tmp_path_factory.mktemp("vllm"), free_port())


async def publish(client: VllmClient, writer: WeightWriter, model: Path, version: int) -> None:
    request = write(writer, adapters(model, version, torch.float32), version)
    request = msgspec.structs.replace(request, adapter_scale=SCALE)
    fetched = await WeightUpdateClient(client).fetch(request)
    await WeightUpdateClient(client).install(request, fetched)


async def sample(
    client: VllmClient,
    completion: PartialCompletion,
    version: int,
    started: asyncio.Event,
    *,
    tokens: int = 900,
    started_at: int = 1,
) -> None:
    """Extend a completion to ``tokens``, as the actor does: a part has the version of its request until the answer is whole."""
    since = completion.tokens

    def on_part(_: int, part: Part) -> None:
        completion.append(part, version)
        if completion.tokens >= started_at:
            started.set()
        if isinstance(part, Sampled):
            completion.settle(since, part.weight_versions)
            completion.finish_reason = part.finish_reason

    await client.stream(
        [*PROMPT, *completion.token_ids.tolist()],
        n=1,
        max_tokens=tokens - since,
        cache_salt=f"{version}",
        on_part=on_part,
    )


def check(
    completion: PartialCompletion, spans: Sequence[tuple[int, int]], of: dict[int, LlamaForCausalLM]
) -> None:
    """Each token has the version that sampled it, by its log-probability, which no other version gives.

    Args:
        spans: version and first token of each.
    """
    assert [(span.version, span.start) for span in completion.weight_versions] == list(spans)
    tokens = [*PROMPT, *completion.token_ids.tolist()]
    scores = {version: score(policy, tokens)[len(PROMPT) - 1 :] for version, policy in of.items()}
    for span in completion.weight_versions:
        differences = {
            version: float(np.abs(completion.logprobs - scored)[span.start : span.end].max())
            for version, scored in scores.items()
        }
        print(f"tokens {span.start} to {span.end} of version {span.version}: {differences}")
        assert differences.pop(span.version) <= TOLERANCE
        assert min(differences.values()) > 0.1


def policies(model: Path, versions: Sequence[int]) -> dict[int, LlamaForCausalLM]:
    return {v: merged(model, adapters(model, v, torch.float32), torch.float32) for v in versions}


async def loaded(client: VllmClient) -> set[str]:
    listed = json.loads(await client.call("GET", "/v1/models", None, 30.0))["data"]
    return {one["id"] for one in listed[1:]}


async def test_more_versions_than_slots_while_the_first_is_sampled_with(server: Server) -> None:
    """The last one waits for a slot; each completion is of its own version alone, and what no request uses is dropped."""
    versions = range(SLOTS + 1)
    completions = {version: [PartialCompletion() for _ in range(2)] for version in versions}
    running: dict[int, asyncio.Future[list[None]]] = {}
    async with VllmClient(server.url, TOKEN, own_adapters=True) as client:
        writer = weight_writer(server)
        for version in versions:
            await publish(client, writer, server.model, version)
            started = asyncio.Event()
            of_version = [sample(client, one, version, started) for one in completions[version]]
            running[version] = asyncio.gather(*of_version)
            if version < SLOTS:
                await started.wait()
            assert not running[0].done(), "in flight"
        assert client.adapters is not None
        assert [one.version for one in client.adapters._held] == list(versions)
        await asyncio.gather(*running.values())
        of = policies(server.model, versions)
        for version in versions:
            for one in completions[version]:
                check(one, [(version, 0)], of)
        for version in (4, 5, 6):
            await publish(client, writer, server.model, version)
        assert [one.version for one in client.adapters._held] == [5, 6]
        assert await loaded(client) == {one.name for one in client.adapters._held}


async def test_completions_of_a_killed_server_go_on_with_the_newest_version(server: Server) -> None:
    """The server of this file. The next one has no adapters: it reads the base and all later versions."""
    writer = weight_writer(server)
    completions = {version: [PartialCompletion() for _ in range(2)] for version in (10, 11)}
    async with VllmClient(server.url, TOKEN, own_adapters=True) as client:
        running = []
        for version, of_version in completions.items():
            await publish(client, writer, server.model, version)
            for one in of_version:
                started = asyncio.Event()
                running.append(asyncio.create_task(sample(client, one, version, started, started_at=50)))
                await started.wait()
        server.process.send_signal(signal.SIGKILL)
        lost = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(one, ServerDown) for one in lost), "in flight"
        kept = {version: [one.tokens for one in of_version] for version, of_version in completions.items()}
        await asyncio.to_thread(server.process.wait, 120)

        servers = start(server.model.parent, int(server.url.rpartition(":")[2]))
        second = await asyncio.to_thread(next, servers)
        try:
            await publish(client, writer, second.model, 12)
            ends = [
                sample(client, one, 12, asyncio.Event(), tokens=one.tokens + 40)
                for of_version in completions.values()
                for one in of_version
            ]
            await asyncio.gather(*ends)
            of = policies(second.model, (10, 11, 12))
            for version, of_version in completions.items():
                for one, tokens in zip(of_version, kept[version], strict=True):
                    check(one, [(version, 0), (12, tokens)], of)
            for version in (13, 14):
                await publish(client, writer, second.model, version)
            assert client.adapters is not None
            assert await loaded(client) == {one.name for one in client.adapters._held}
            assert [one.version for one in client.adapters._held] == [13, 14]
        finally:
            await asyncio.to_thread(servers.close)  # type: ignore[attr-defined]
