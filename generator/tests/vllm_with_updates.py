"""A real vLLM server with a tiny model, and the trainer's side of its weight updates, in this process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from free_port import free_port
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scalerl_api.paths import RunPaths
from scalerl_api.process import DIR
from scalerl_api.weight_layout import lay_out, tensor_checksum, trailer
from scalerl_api.wire import GroupJoin, TensorSpec, WeightReceive
from scalerl_generator.server.require_token import TOKEN_VARIABLE
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_generator.weights.update_reports import FetchReport
from scalerl_trainer.publish.weight_folders import VolumeFolder
from scalerl_trainer.publish.weight_writer import WeightWriter

TOKEN = "the-run's-token"
BUCKET_BYTES = 200_000
JOIN_SECONDS = 120.0
"""Limit for both sides on a busy machine: a wait ends with its event."""


def build_model(where: Path, *, tied: bool, dtype: torch.dtype, vocabulary_size: int = 64) -> None:
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(97 + i % 26) + str(i): i + 2 for i in range(62)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        where
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(where)


@dataclass
class Server:
    url: str
    model: Path
    process: subprocess.Popen[bytes]
    log: Path


def start_server(
    root: Path,
    *,
    tied: bool,
    dtype: str,
    fp32_head: bool,
    options: Sequence[str] = (),
    build: Callable[..., None] = build_model,
    port: int | None = None,
) -> Iterator[Server]:
    model = root / "model"
    build(model, tied=tied, dtype=getattr(torch, dtype))
    port = port or free_port()
    argv = ["--model", str(model), "--port", str(port), "--dtype", dtype, "--max-num-seqs", "64"]
    argv += ["--kv-cache-bytes", str(128 << 20)] + ([] if fp32_head else ["--no-fp32-head"])
    argv += options
    log = (root / "server.log").open("w")
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "scalerl_generator.vllm_server", *argv],
        stdout=log,
        stderr=log,
        env=os.environ | {TOKEN_VARIABLE: TOKEN, DIR: str(root)},
    )
    try:

        async def ready() -> None:
            async with VllmClient(f"http://127.0.0.1:{port}", TOKEN) as client:
                while not await client.health():
                    assert process.poll() is None, (root / "server.log").read_text()[-4000:]
                    assert time.monotonic() - started < 360, (root / "server.log").read_text()[-4000:]
                    await asyncio.sleep(0.2)

        asyncio.run(ready())
        yield Server(f"http://127.0.0.1:{port}", model, process, root / "server.log")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        finally:
            process.kill()
            process.wait(120)
            log.close()


def new_weights(model: Path, seed: int) -> LlamaForCausalLM:
    """The served model with every matrix drawn again, wide enough that versions differ visibly."""
    policy = LlamaForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
    return policy


@dataclass
class TensorSource:
    """Tensors to publish as they are, in place of a model's parameters."""

    tensors: dict[str, torch.Tensor]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def manifest(policy: LlamaForCausalLM | TensorSource) -> list[TensorSpec]:
    return [
        TensorSpec(n, str(p.dtype).removeprefix("torch."), list(p.shape))
        for n, p in policy.named_parameters()
    ]


class Sender:
    """The trainer's side of a group with the workers of one server, in this process."""

    def __init__(self, epoch: int, workers: int = 1) -> None:
        self.epoch = epoch
        self._world = 1 + workers
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_SECONDS)
        )
        self._group: Any = None

    def join(self, timeout_seconds: float = JOIN_SECONDS) -> GroupJoin:
        return GroupJoin(
            epoch=self.epoch,
            store_host="127.0.0.1",
            store_port=self._store.port,
            rank=1,
            world_size=self._world,
            backend="gloo",
            timeout_seconds=timeout_seconds,
        )

    def open(self) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=JOIN_SECONDS)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore(f"scalerl-{self.epoch}", self._store), 0, self._world, options
        )
        self._group.allreduce([torch.ones(1)]).wait()

    def send(
        self, policy: LlamaForCausalLM | TensorSource, version: int, damaged_bucket: int | None = None
    ) -> None:
        tensors = dict(policy.named_parameters())
        for bucket in lay_out(manifest(policy), BUCKET_BYTES):
            buffer = torch.zeros(bucket.total_bytes, dtype=torch.uint8)
            for slot in bucket.slots:
                flat = tensors[slot.tensor.name].detach().contiguous().view(-1).view(torch.uint8)
                buffer[slot.offset : slot.offset + len(flat)] = flat
            words = trailer(version, bucket.index, tensor_checksum(torch, buffer[: bucket.payload_bytes]))
            buffer[bucket.payload_bytes :].view(torch.int64).copy_(torch.tensor(words))
            if bucket.index == damaged_bucket:
                buffer[5] ^= 1
            how = dist.BroadcastOptions()
            how.rootRank = 0
            how.timeout = timedelta(seconds=JOIN_SECONDS)
            self._group.broadcast([buffer], how).wait()


async def connect(client: VllmClient, epoch: int, workers: int = 1) -> Sender:
    sender = Sender(epoch, workers)
    await asyncio.gather(WeightUpdateClient(client).init_group(sender.join()), asyncio.to_thread(sender.open))
    return sender


def receive(
    policy: LlamaForCausalLM | TensorSource, epoch: int, version: int, timeout_seconds: float = JOIN_SECONDS
) -> WeightReceive:
    return WeightReceive(
        epoch=epoch,
        version=version,
        tensors=manifest(policy),
        bucket_bytes=BUCKET_BYTES,
        timeout_seconds=timeout_seconds,
    )


async def publish(client: VllmClient, sender: Sender, policy: LlamaForCausalLM, version: int) -> None:
    await asyncio.gather(
        WeightUpdateClient(client).install(receive(policy, sender.epoch, version)),
        asyncio.to_thread(sender.send, policy, version),
    )


def weight_writer(server: Server) -> WeightWriter:
    """The trainer's writer of files, into the directory of the server's run."""
    return WeightWriter(
        VolumeFolder(RunPaths(server.model.parent).weights / "0.1-a"), BUCKET_BYTES, lambda: None
    )


def write(
    writer: WeightWriter,
    policy: LlamaForCausalLM | TensorSource,
    version: int,
    timeout_seconds: float = JOIN_SECONDS,
) -> WeightReceive:
    """Write a version; returns the request to receive it."""
    tensors = {name: tensor.detach() for name, tensor in policy.named_parameters()}
    files = writer.write(version, manifest(policy), lambda: iter(tensors.items())).files
    return msgspec.structs.replace(receive(policy, 0, version, timeout_seconds), files=files)


async def publish_files(
    client: VllmClient, writer: WeightWriter, policy: LlamaForCausalLM, version: int
) -> FetchReport:
    request = write(writer, policy, version)
    fetched = await WeightUpdateClient(client).fetch(request)
    await WeightUpdateClient(client).install(request, fetched)
    return fetched


def score(policy: LlamaForCausalLM, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probability of each token after the first, by the trainer's own forward, head in float32."""
    with torch.no_grad():
        hidden = policy.model(torch.tensor([tokens])).last_hidden_state[0]
        logits = hidden.float() @ policy.lm_head.weight.float().T
    logprobs = torch.log_softmax(logits, -1)[:-1]
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


async def weight_version(client: VllmClient) -> str:
    body = await client.call("GET", "/weight_info", None, 10)
    return str(json.loads(body)["weight_version"])
