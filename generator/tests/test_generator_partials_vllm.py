"""Actors that are killed in the middle of long completions of a real vLLM server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from actor_stand_ins import (
    CHARACTERS,
    END,
    CoordinatorStandIn,
    GeneratorProcesses,
    TrainerSide,
    role_environment,
    until,
    write_run,
)
from test_generator_actor_vllm import START_SECONDS, Sender, ids, score
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_api import endpoints
from scalerl_api.load import load_run
from scalerl_tasks.sources import open_task

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

COMPLETIONS, MAX_TOKENS = 4, 1500


def endless_policy(seed: int) -> LlamaForCausalLM:
    """Its end token has a probability of some 1e-8: the last layer's bias outweighs the rest along one dimension."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        mlp_bias=True,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.bias[0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END, 0] = -3.0
    return model


@dataclass
class VllmProcesses(GeneratorProcesses):
    """An actor's process beside a real server."""

    async def start_server(self) -> None:
        argv = [sys.executable, "-m", "scalerl_generator.vllm_server"]
        argv += ["--model", str(self.directory / "model")]
        argv += ["--port", str(self.server_port), "--dtype", "float32", "--max-model-len", "2048"]
        argv += ["--max-num-seqs", "8", "--kv-cache-bytes", str(64 << 20)]
        env = os.environ | role_environment(self.directory, "server-0", self.coordinator_url)
        with (self.directory / "server.log").open("ab") as log:
            self.server = await asyncio.to_thread(
                subprocess.Popen, argv, env=env, stdout=log, stderr=log, start_new_session=True
            )

    async def kill_actor(self) -> None:
        assert self.actor is not None
        self.actor.kill()
        await asyncio.to_thread(self.actor.wait, 10)

    async def end(self) -> None:
        if self.server is not None and self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGKILL)
        await super().end()


@pytest.mark.timeout(600)
async def test_killed_actor_is_succeeded_in_mid_completion(tmp_path: Path) -> None:
    """kill -9 of an actor: the next one, on the same server and under later weights, finishes its completions."""
    write_run(
        tmp_path,
        [f"say {i}" for i in range(8)],
        model__contextTokens=2048,
        recipe={
            "completionsPerPrompt": COMPLETIONS,
            "maxCompletionTokens": MAX_TOKENS,
            "length": {"none": {}},
        },
        generator__maxConcurrentSequences=8,
    )
    models = [endless_policy(seed) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path / "model")
    train = open_task(load_run(tmp_path / "run.yaml").spec.task).train
    coordinator = CoordinatorStandIn()
    await coordinator.start()
    generator = VllmProcesses(tmp_path, coordinator.url)
    try:
        await generator.start_server()
        await generator.start_actor()
        async with aiohttp.ClientSession() as session:
            trainer = TrainerSide(session, generator.control_url)
            await until(lambda: coordinator.members, START_SECONDS)
            sender = Sender(1, trainer)
            await sender.join()
            await sender.send(models[0], 0)
            coordinator.offer(
                2,
                [train[i].id for i in range(2)],
                completions=COMPLETIONS,
                max_tokens=MAX_TOKENS,
                policy_version=1,
            )
            await until(lambda: coordinator.partials.nbytes >= 8 * 8 * 200, 120)
            await generator.kill_actor()
            saved = coordinator.partials.nbytes // 8
            assert not coordinator.groups

            await generator.start_actor()
            await until(lambda: coordinator._registered == 2, START_SECONDS)
            sender = Sender(2, trainer)
            await sender.join()
            await sender.send(models[1], 1)
            coordinator.reassign()
            await until(lambda: len(coordinator.groups) == 2, 120)
            async with session.get(generator.control_url + endpoints.METRICS) as response:
                text = await response.text()
    finally:
        await generator.end()
        await coordinator.kill()
    print(f"{saved} of {2 * COMPLETIONS * MAX_TOKENS} tokens handed over")
    assert f"scalerl_actor_handed_over_tokens_total {saved}.0" in text
    boundaries = []
    for group in coordinator.groups.values():
        prompt = ids(group.prompt_token_ids)
        assert len(group.completions) == COMPLETIONS
        for c in group.completions:
            assert [(s.version, s.start > 0) for s in c.versions] == [(0, False), (1, True)]
            boundary = c.versions[1].start
            boundaries.append(boundary)
            assert c.tokens == MAX_TOKENS or c.finish_reason == "stop"
            logprobs = np.frombuffer(c.logprobs, "<f4")
            before, after = (score(model, prompt, ids(c.token_ids)) for model in models)
            assert np.abs(before - logprobs)[:boundary].max() < 1e-3
            assert np.abs(after - logprobs)[boundary:].max() < 1e-3
            assert np.abs(after - logprobs)[:boundary].max() > 1e-2, "the versions do not differ"
    assert sum(boundaries) == saved
