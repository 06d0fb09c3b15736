"""A generator's vLLM server beside the trainer's policy on one device, for ``gpu_check``: start, mismatch, updates, throughput.

NCCL takes no two processes on one device, so weights travel through files (``weightSync.backend: Files``). The first update negates
half of all weights that the server was started from, so that a tensor which no update reaches shows. The next two negate a few weights
in half of the tensors each, the fourth takes that back, after which the server must answer as after the first, and the last one is of
adapters of the first weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalerl_api.paths import RunPaths
from scalerl_api.process import DIR
from scalerl_api.wire import WeightReceive
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import Sampled
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_trainer.algo.mismatch import k3_estimates
from scalerl_trainer.publish.published_weights import tensor_spec
from scalerl_trainer.publish.weight_folders import VolumeFolder
from scalerl_trainer.publish.weight_writer import WeightWriter
from support.gpu_device import Options, require
from support.gpu_trainer import Trainer
from support.vllm_process import START_SECONDS, VllmProcess, use_source_tree

BUCKET_BYTES = 64 << 20
FIRST_START_SECONDS, EAGER_START_SECONDS = 80.0, 30.0
TOTAL_SECONDS = 125.0
"""The second server starts only if it is expected to end before."""
ALL, FEW = 0.5, 0.005
"""Shares of the weights that an update negates. A few in half of the tensors move log-probabilities by about three nats."""
CHANGES = (((0, ALL), (1, ALL)), ((0, FEW),), ((1, FEW),), ((0, FEW), (1, FEW)), ((0, ALL), (1, ALL)))
"""What each update negates: in even or odd tensors, and which share. Twice is not at all. The last one is of adapters."""
MAX_DIFFERENCE = 0.15
"""Mean difference of log-probabilities, in nats, that rounding explains: two computations in bfloat16 are about .05 apart here."""
TELLING = re.compile(
    r"attention backend|FlashAttention version|Model Runner|torch\.compile t|Graph captur|init engine|KV cache size|Model loading",
    re.I,
)


class Measured:
    """What is compared and timed at one server."""

    client: VllmClient
    weights: WeightUpdateClient
    last: WeightReceive

    def __init__(self, trainer: Trainer, writer: WeightWriter, result: dict[str, Any]) -> None:
        self.trainer, self.writer, self.result = trainer, writer, result
        self.salts = itertools.count()

    @contextlib.asynccontextmanager
    async def at(self, server: VllmProcess) -> AsyncIterator[None]:
        async with server.client() as self.client:
            self.weights = WeightUpdateClient(self.client)
            yield

    async def all(self, server: VllmProcess, options: Options) -> None:
        async with self.at(server):
            await self.updates()
            for count in (4, 8) if options.tiny else (64, 256):
                await self.decode(count, 32 if options.tiny else 256)

    async def bfloat16_head(self, server: VllmProcess) -> None:
        async with self.at(server):
            await self.install(self.last)
            self.add("sampled, bfloat16 head", await self.sampled_mismatch())

    async def sample(self, prompts: list[list[int]], tokens: int) -> list[Sampled]:
        """One completion of each. No cached prefix is of other weights."""
        salt = str(next(self.salts))
        calls = [self.client.generate(ids, n=1, max_tokens=tokens, cache_salt=salt) for ids in prompts]
        return [sampled for (sampled,) in await gather_all(calls)]

    async def score(self, sequences: list[list[int]]) -> torch.Tensor:
        """One after the other, so that equal weights give equal answers."""
        return torch.from_numpy(np.concatenate([await self.client.prompt_logprobs(ids) for ids in sequences]))

    async def sampled_mismatch(self) -> dict[str, float]:
        prompts = self.trainer.prompts(16)
        sampled = await self.sample(prompts, min(256, self.trainer.shape.sequence // 2))
        sequences = [ids + one.token_ids.tolist() for ids, one in zip(prompts, sampled, strict=True)]
        theirs = torch.from_numpy(np.concatenate([one.logprobs for one in sampled]))
        return compare(self.trainer.score(sequences, len(prompts[0])), theirs)

    async def install(self, request: WeightReceive) -> dict[str, float]:
        """Install a version that is written, while requests are in flight."""
        done, crossed = asyncio.Event(), 0

        async def generate() -> None:
            nonlocal crossed
            while not done.is_set():
                (sampled,) = await self.sample(self.trainer.prompts(1), self.trainer.shape.sequence // 4)
                crossed += len(sampled.weight_versions) > 1

        in_flight = [asyncio.create_task(generate()) for _ in range(16)]
        await asyncio.sleep(0.3)
        fetched = await self.weights.fetch(request)
        begin = time.perf_counter()
        received = await self.weights.install(request, fetched)
        paused = time.perf_counter() - begin
        done.set()
        await asyncio.gather(*in_flight)
        if not crossed:
            raise AssertionError(f"no request was in flight over the update to version {request.version}")
        seconds = {
            "read_seconds": fetched.seconds,
            "paused_seconds": paused,
            "load_seconds": received.load_seconds,
        }
        return seconds | {"requests_over_it": crossed}

    async def update(self, version: int, tensors: dict[str, torch.Tensor], scale: float) -> dict[str, float]:
        """Write a version and install it."""
        specs = [tensor_spec(*item) for item in tensors.items()]
        begin = time.perf_counter()
        written = self.writer.write(version, specs, lambda: iter(tensors.items()))
        wrote = time.perf_counter() - begin
        self.last = WeightReceive(
            epoch=0,
            version=version,
            tensors=specs,
            bucket_bytes=BUCKET_BYTES,
            timeout_seconds=60.0,
            adapter_scale=scale,
            files=written.files,
        )
        return {"bytes": written.bytes, "write_seconds": wrote} | await self.install(self.last)

    async def updates(self) -> None:
        """Five versions, each compared with the trainer's weights of it and with those before."""
        trainer = self.trainer
        probes, answers = trainer.prompts(trainer.shape.rows), []
        ours: torch.Tensor | None = None
        for version, changes in enumerate(CHANGES, start=1):
            name, tensors, scale = f"version {version}", trainer.weights, 0.0
            for change in changes:
                trainer.negate(*change)
            if version == len(CHANGES):
                name, tensors, scale = f"{name}, of adapters", trainer.adapters(), 0.5
                trainer.merge(tensors, scale)
            self.add(name, await self.update(version, tensors, scale))
            if version == 1:
                sampled = await self.sample(probes, trainer.shape.sequence * 5 // 8)
                probes = [ids + one.token_ids.tolist() for ids, one in zip(probes, sampled, strict=True)]
            before, ours = ours, trainer.score(probes)
            answers.append(await self.score(probes))
            near = self.add(f"{name}, scored", compare(ours, answers[-1]))["mean"]
            if before is not None:
                far = self.add(f"{name}, weights before", compare(before, answers[-1]))["mean"]
                if not far > 4 * near:
                    raise AssertionError(f"{name}: the weights before are as near")
            near = max(near, self.add(f"{name}, sampled", await self.sampled_mismatch())["mean"])
            if not near < min(MAX_DIFFERENCE, 1.5 * self.result["version 1, scored"]["mean"] + 0.005):
                raise AssertionError(f"{name}: log-probabilities differ by {near:.3g}")
        same = self.add("version 4 beside version 1, equal", compare(answers[3], answers[0]))
        if not same["mean"] < 0.1 * near:
            raise AssertionError("the server answers otherwise with the same weights")

    async def decode(self, count: int, length: int) -> None:
        prompts, begin = self.trainer.prompts(count), time.perf_counter()
        sampled = await self.sample(prompts, length)
        seconds = time.perf_counter() - begin
        tokens = sum(len(one.token_ids) for one in sampled)
        found = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        self.add(f"decoding of {count}", found)

    def add(self, name: str, found: dict[str, float]) -> dict[str, float]:
        """Printed too: of a check that is cut off nothing else stays."""
        print(f"    {name}: {json.dumps(found)}", flush=True)
        self.result[name] = found
        return found


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Log-probabilities of the same tokens. ``ratio`` is the mean importance ratio, ``kl`` the k3 estimate."""
    difference = (ours - theirs).double()
    return {
        "tokens": len(difference),
        "mean": float(difference.abs().mean()),
        "max": float(difference.abs().max()),
        "ratio": float(difference.exp().mean()),
        "kl": float(k3_estimates(ours, theirs).mean()),
    }


@contextlib.contextmanager
def serving(model: Path, options: Options, result: dict[str, Any], *arguments: str) -> Iterator[VllmProcess]:
    """A server that answers; without CUDA graphs if it does not with them in time."""
    limit = FIRST_START_SECONDS if options.device == "cuda" else START_SECONDS
    length = 256 if options.tiny else 2048
    given = ["--dtype", "bfloat16", "--max-model-len", str(length), "--memory-fraction", "0.3", *arguments]
    given += ["--log-level", "info"]
    begin, server = time.monotonic(), VllmProcess(model, *given)
    try:
        try:
            asyncio.run(server.ready(limit))
        except RuntimeError as error:
            result["start with CUDA graphs"] = str(error)[-600:]
            print(server.log()[-8000:], flush=True)
            server.stop()
            begin, server = time.monotonic(), VllmProcess(model, *given, "--", "--enforce-eager")
            asyncio.run(server.ready(EAGER_START_SECONDS))
        result["start_seconds"] = time.monotonic() - begin
        result["log"] = [line for line in server.log().splitlines() if TELLING.search(line)]
        yield server
    except BaseException:
        print(server.log()[-8000:], flush=True)
        raise
    finally:
        server.stop()


def check_vllm(options: Options) -> dict[str, Any]:
    require("vllm", "aiohttp", "psutil", "tokenizers")
    begin, trainer = time.monotonic(), Trainer(options)
    result: dict[str, Any] = {"attention": trainer.policy.causal_lm.config._attn_implementation}
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        os.environ[DIR] = folder
        use_source_tree(Path(folder) / "plugin")
        trainer.save(paths.base_model)
        writer = WeightWriter(VolumeFolder(paths.weights / "0.1-a"), BUCKET_BYTES, lambda: None)
        measured = Measured(trainer, writer, result)
        with serving(paths.base_model, options, result) as server:
            asyncio.run(measured.all(server, options))
        if time.monotonic() - begin + result["start_seconds"] < TOTAL_SECONDS:
            with serving(paths.base_model, options, {}, "--no-fp32-head") as server:
                asyncio.run(measured.bfloat16_head(server))
    return result
