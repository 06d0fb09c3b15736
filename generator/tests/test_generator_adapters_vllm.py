"""Publishes of adapters to a real vLLM server, beside publishes of the weights that they are merged into."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from vllm_with_updates import (
    TOKEN,
    Sender,
    Server,
    TensorSource,
    connect,
    manifest,
    publish,
    receive,
    score,
    start_server,
    weight_version,
)

from scalerl_api.weight_layout import lay_out
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_generator.weights.update_reports import UpdateFailed
from scalerl_generator.weights.vllm_weight_engine import merged_weights

RANK, SCALE = 2, 2.0
PROBE = [int(t) for t in np.random.default_rng(3).integers(2, 64, 60)]


def adapters(model: Path, seed: int, dtype: torch.dtype) -> TensorSource:
    """Of all linear layers but the output embedding, wide enough that versions differ visibly."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in LlamaForCausalLM.from_pretrained(model).named_parameters():
        if "_proj" in name:
            outputs, inputs = weight.shape
            found[f"{name}/lora_A"] = 0.05 * torch.randn(RANK, inputs, generator=generator)
            found[f"{name}/lora_B"] = 0.05 * torch.randn(outputs, RANK, generator=generator)
    return TensorSource({name: tensor.to(dtype) for name, tensor in found.items()})


def merged(model: Path, given: TensorSource, dtype: torch.dtype) -> LlamaForCausalLM:
    policy = LlamaForCausalLM.from_pretrained(model).to(dtype)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if f"{name}/lora_A" in given.tensors:
                a, b = (given.tensors[f"{name}/lora_{which}"].float() for which in "AB")
                weight.copy_(weight.float() + SCALE * (b @ a))
    return policy


async def publish_adapters(client: VllmClient, sender: Sender, given: TensorSource, version: int) -> None:
    message = msgspec.structs.replace(receive(given, sender.epoch, version), adapter_scale=SCALE)
    results = await asyncio.gather(
        WeightUpdateClient(client).install(message),
        asyncio.to_thread(sender.send, given, version),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


def payload(policy: Any) -> int:
    return sum(bucket.payload_bytes for bucket in lay_out(manifest(policy), 1 << 20))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    where = tmp_path_factory.mktemp("vllm")
    for one in start_server(where, tied=True, dtype=request.param, fp32_head=True):
        yield one, getattr(torch, request.param)


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_vllm_with_adapters_equals_merged_weights(server: tuple[Server, torch.dtype]) -> None:
    """Ten updates while completions are sampled; then the last version as merged weights."""
    one, dtype = server
    async with VllmClient(one.url, TOKEN) as client:
        sender = await connect(client, 1)

        async def generate() -> None:
            while True:
                await client.generate([5, 6, 7], n=1, max_tokens=900, cache_salt="0")

        generating = asyncio.gather(*(generate() for _ in range(4)))
        before = await client.prompt_logprobs(PROBE)
        for version in range(1, 11):
            given = adapters(one.model, version, dtype)
            await publish_adapters(client, sender, given, version)
        assert not generating.done()
        with_adapters = await client.prompt_logprobs(PROBE)
        assert await weight_version(client) == "10"
        report = await WeightUpdateClient(client).publish_report()
        assert (report.state, report.held, report.tensors) == ("whole", 10, len(given.tensors))
        policy = merged(one.model, given, dtype)
        await publish(client, sender, policy, 11)
        with_merged = await client.prompt_logprobs(PROBE)
        difference = float(np.abs(with_adapters - with_merged).max())
        share = payload(given) / payload(policy)
        print(f"{dtype}: difference {difference:.2g}, {share:.1%} of the bytes of merged weights")
        assert difference <= 1e-5
        assert np.abs(with_adapters - before).max() > 0.1
        if dtype == torch.float32:
            assert np.abs(with_adapters - score(policy, PROBE)).max() < 1e-4
        assert share < 0.05
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_vllm_refuses_adapters_of_another_model(server: tuple[Server, torch.dtype]) -> None:
    one, dtype = server
    async with VllmClient(one.url, TOKEN) as client:
        sender = await connect(client, 2)
        good = adapters(one.model, 1, dtype)
        other = TensorSource({name.replace("layers.0", "layers.9"): t for name, t in good.tensors.items()})
        with pytest.raises(UpdateFailed, match=r"has no tensor model\.layers\.9\.mlp\.down_proj\.weight"):
            await publish_adapters(client, sender, other, 20)
        sender = await connect(client, 3)
        await publish_adapters(client, sender, good, 21)
        await client.resume()
        expected = merged(one.model, good, dtype)
        await publish(client, sender, expected, 22)


def test_merged_weights_are_of_all_files(tmp_path: Path) -> None:
    """Sharded files; a tensor without an adapter stays as it is."""
    from vllm_with_updates import build_model

    build_model(tmp_path / "one", tied=False, dtype=torch.float32)
    LlamaForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    given = adapters(tmp_path, 5, torch.float32)
    expected = dict(merged(tmp_path, given, torch.float32).named_parameters())
    found = dict(merged_weights(tmp_path, given.tensors, SCALE, torch.float32, torch.device("cpu")))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-7)
