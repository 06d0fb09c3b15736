"""The actor and a real vLLM server: updates with requests in flight, and a killed server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_stand_ins import (
    CHARACTERS,
    END,
    CoordinatorStandIn,
    Generator,
    TrainerSide,
    role_environment,
    until,
    write_run,
)
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_api import endpoints
from scalerl_api.load import load_run
from scalerl_api.weight_layout import lay_out, tensor_checksum, trailer
from scalerl_api.wire import (
    Ack,
    Group,
    GroupJoin,
    Probe,
    Probed,
    Split,
    TensorSpec,
    WeightReceive,
    WeightReceived,
)
from scalerl_tasks.sources import open_task

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BUCKET_BYTES = 1 << 20
START_SECONDS = 360.0
VOCABULARY = len(CHARACTERS) + 2
COMPLETIONS, MAX_TOKENS = 8, 300


def policy(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class Sender:
    """The trainer's end of one process group of two."""

    def __init__(self, epoch: int, trainer: TrainerSide) -> None:
        self._epoch, self._trainer = epoch, trainer
        limit = timedelta(seconds=120)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._group: Any = None

    def _open(self) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=120)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = dist.PrefixStore(f"scalerl-{self._epoch}", self._store)
        self._group = dist.ProcessGroupGloo(store, 0, 2, options)
        self._group.allreduce([torch.ones(1)]).wait()

    async def join(self) -> None:
        message = GroupJoin(
            epoch=self._epoch,
            store_host="127.0.0.1",
            store_port=self._store.port,
            rank=1,
            world_size=2,
            backend="gloo",
            timeout_seconds=120.0,
        )
        joined, _ = await asyncio.gather(
            self._trainer.post(endpoints.WEIGHTS_JOIN, message, Ack), asyncio.to_thread(self._open)
        )
        assert joined == Ack(), joined

    async def send(self, model: LlamaForCausalLM, version: int) -> WeightReceived:
        tensors = [TensorSpec(n, "float32", list(p.shape)) for n, p in model.named_parameters()]
        message = WeightReceive(
            epoch=self._epoch,
            version=version,
            tensors=tensors,
            bucket_bytes=BUCKET_BYTES,
            timeout_seconds=120.0,
        )
        received, _ = await asyncio.gather(
            self._trainer.post(endpoints.WEIGHTS_RECEIVE, message, WeightReceived),
            asyncio.to_thread(self._broadcast, model, tensors, version),
        )
        assert isinstance(received, WeightReceived), received
        return received

    def _broadcast(self, model: LlamaForCausalLM, tensors: list[TensorSpec], version: int) -> None:
        parameters = dict(model.named_parameters())
        for bucket in lay_out(tensors, BUCKET_BYTES):
            buffer = torch.zeros(bucket.total_bytes, dtype=torch.uint8)
            for slot in bucket.slots:
                flat = parameters[slot.tensor.name].detach().contiguous().view(-1).view(torch.uint8)
                buffer[slot.offset : slot.offset + len(flat)] = flat
            words = trailer(version, bucket.index, tensor_checksum(torch, buffer[: bucket.payload_bytes]))
            buffer[bucket.payload_bytes :].view(torch.int64).copy_(torch.tensor(words))
            self._group.broadcast([buffer]).wait()


@dataclass
class VllmGenerator(Generator):
    """The actor in this process, beside a real server."""

    server: subprocess.Popen[bytes] | None = None

    async def start_server(self) -> None:
        argv = [
            sys.executable,
            "-m",
            "scalerl_generator.vllm_server",
            "--model",
            str(self.directory / "model"),
        ]
        argv += ["--port", str(self.server_port), "--dtype", "float32", "--max-model-len", "512"]
        argv += ["--max-num-seqs", "64", "--kv-cache-bytes", str(128 << 20)]
        env = os.environ | role_environment(self.directory, "server-0", self.coordinator_url)
        with (self.directory / "server.log").open("ab") as log:
            self.server = await asyncio.to_thread(
                subprocess.Popen, argv, env=env, stdout=log, stderr=log, start_new_session=True
            )

    async def kill_server(self) -> None:
        """As when its container dies: the server and its engine at once."""
        if self.server is not None and self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGKILL)
            await asyncio.to_thread(self.server.wait, 10)

    async def end(self) -> None:
        await super().end()
        await self.kill_server()


@dataclass
class Scene:
    coordinator: CoordinatorStandIn
    generator: VllmGenerator
    trainer: TrainerSide
    train: list[str]
    held_out: list[str]

    def offer(self, groups: int, split: Split = Split.TRAIN, **changes: Any) -> None:
        prompts = self.train if split is Split.TRAIN else self.held_out
        self.coordinator.offer(
            groups, prompts, split, completions=COMPLETIONS, max_tokens=MAX_TOKENS, **changes
        )


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    write_run(
        tmp_path,
        [f"say {i}" for i in range(12)],
        model__contextTokens=512,
        recipe={"completionsPerPrompt": COMPLETIONS, "maxCompletionTokens": MAX_TOKENS},
        generator__maxConcurrentSequences=64,
    )
    policy(0).save_pretrained(tmp_path / "model")
    task = open_task(load_run(tmp_path / "run.yaml").spec.task)
    train, held_out = ([s[i].id for i in range(len(s))] for s in (task.train, task.held_out))
    coordinator = CoordinatorStandIn()
    await coordinator.start()
    generator = VllmGenerator(tmp_path, coordinator.url)
    await generator.start_server()
    await generator.start_actor()
    try:
        async with aiohttp.ClientSession() as session:
            yield Scene(coordinator, generator, TrainerSide(session, generator.control_url), train, held_out)
    finally:
        await generator.end()
        await coordinator.kill()


def score(model: LlamaForCausalLM, prompt: list[int], completion: list[int]) -> np.ndarray[Any, Any]:
    """Log-probabilities of a completion by the trainer's own forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].float()
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()


def ids(data: bytes) -> list[int]:
    return [int(i) for i in np.frombuffer(data, "<i4")]


def check(groups: list[Group]) -> None:
    """What every group from a real server must be."""
    for group in groups:
        assert len(group.completions) == COMPLETIONS
        for c in group.completions:
            tokens, logprobs = ids(c.token_ids), np.frombuffer(c.logprobs, "<f4")
            assert 1 <= len(tokens) == len(logprobs) <= MAX_TOKENS
            assert np.isfinite(logprobs).all()
            assert logprobs.max() <= 0
            assert (tokens[-1] == END) == (c.finish_reason == "stop")
            assert (len(tokens) == MAX_TOKENS) or c.finish_reason == "stop"
            assert END not in tokens[:-1]
            assert c.versions[0].start == 0


async def test_in_flight_update_and_a_killed_server(scene: Scene) -> None:
    coordinator, models = scene.coordinator, {v: policy(v + 1) for v in range(3)}
    await until(lambda: coordinator.members, START_SECONDS)
    sender = Sender(1, scene.trainer)
    await sender.join()
    await sender.send(models[0], 0)

    # Lease, generate, grade, push; weights arrive meanwhile.
    scene.offer(1, Split.HELD_OUT)
    scene.offer(1, Split.HELD_OUT, temperature=0.0, lease_id="greedy")
    scene.offer(16)
    await until(lambda: len(coordinator.groups) >= 1, 120)
    received = await sender.send(models[1], 1)
    assert received.version == 1
    await until(lambda: len(coordinator.groups) == 18, 120)
    groups = list(coordinator.groups.values())
    check(groups)
    spans = [[s.version for s in c.versions] for g in groups for c in g.completions]
    assert [0] in spans
    assert [0, 1] in spans, "nothing was in flight"
    assert all(s in ([0], [0, 1], [1]) for s in spans)

    greedy = coordinator.groups["greedy"].completions
    assert all(c.token_ids == greedy[0].token_ids for c in greedy if c.versions == greedy[0].versions)

    # Tokens of one version alone have the log-probabilities that the trainer computes with it.
    for group in groups:
        for c in group.completions:
            if len(c.versions) == 1:
                own = score(models[c.versions[0].version], ids(group.prompt_token_ids), ids(c.token_ids))
                assert np.abs(own - np.frombuffer(c.logprobs, "<f4")).max() < 1e-3
    sample = groups[-1].completions[0]
    prompt = ids(groups[-1].prompt_token_ids)
    sequence = np.array([*prompt, *ids(sample.token_ids)], dtype="<i4").tobytes()
    probe = Probe(version=1, sequences=[sequence], prompt_tokens=[len(prompt)])
    probed = await scene.trainer.post(endpoints.WEIGHTS_PROBE, probe, Probed)
    expected = score(models[1], prompt, ids(sample.token_ids))
    assert np.abs(np.frombuffer(probed.logprobs[0], "<f4") - expected).max() < 1e-3

    # Killed in mid-generation: leases go back, come again once there is a server with weights, and continue.
    scene.offer(16, policy_version=2)
    await until(lambda: len(coordinator.leased) >= 8, 120)
    # The other groups have tokens then: lengths are by chance.
    await until(lambda: len(coordinator.groups) > 18, 120)
    before = len(coordinator.groups)
    await scene.generator.kill_server()
    killed = time.monotonic()
    await until(lambda: not coordinator.beats[-1].healthy, 120)
    await until(lambda: not coordinator.leased, 120)
    assert time.monotonic() - killed < 120, "noticed late"
    assert len(coordinator.groups) < 18 + 16, "killed too late to show anything"
    await scene.generator.start_server()
    await until(lambda: coordinator._registered == 2, START_SECONDS)
    assert len(coordinator.groups) - before <= 8, "generated without published weights"
    sender = Sender(2, scene.trainer)
    await sender.join()
    await sender.send(models[2], 2)
    await until(lambda: len(coordinator.groups) == 34, 120)
    check(list(coordinator.groups.values()))
    continued = 0
    for group in list(coordinator.groups.values())[18:]:
        for c in group.completions:
            if [s.version for s in c.versions] != [1, 2]:
                continue
            continued += 1
            start, logprobs = c.versions[1].start, np.frombuffer(c.logprobs, "<f4")
            before, after = (
                score(models[version], ids(group.prompt_token_ids), ids(c.token_ids)) for version in (1, 2)
            )
            assert np.abs(before - logprobs)[:start].max() < 1e-3
            assert np.abs(after - logprobs)[start:].max() < 1e-3
    assert continued
