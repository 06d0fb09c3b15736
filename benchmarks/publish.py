"""How long a publish takes, and on what: pause, gather, transfer, load, resume, over model sizes.

    python benchmarks/publish.py [--quick] [--sizes 1,135,1000] [--repeats 5] [--bucket-mib 16]

The sender is the trainer's own publisher over bf16 tensors of a Llama; the receiver a real vLLM server
behind the actor's own weight control. ``transfer`` is the receiver's time in broadcasts. It is set
against bare gloo: the same number of bytes in the same buckets between two processes that do nothing else.
``hidden`` is what the sender spends on gathering, packing and summing, most of it while a bucket travels.
Phases are medians over the repeats; ``share`` sets the best transfer against the best of bare gloo, measured
before and after, so that what else the machine does counts for neither.

The bucket's size matters on CPUs: the receiver needs fresh memory for each, and above 32 MiB the C library
takes it from the kernel page by page every time, which can cost more than the bytes' way.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from support.vllm_process import VllmProcess, free_port

from scalerl_api import wire
from scalerl_api.spec import ScratchModel
from scalerl_api.weight_layout import lay_out
from scalerl_generator.actor_api import actor_app
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.weights.weight_control import WeightControl
from scalerl_trainer.models.scratch import llama_config, parameter_shapes, train_tokenizer, write_safetensors
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.group_publisher import GroupPublisher, PublishSettings
from scalerl_trainer.publish.published_weights import WeightSource

SIZES = {
    1: ScratchModel(layers=4, hidden_size=128, attention_heads=4, intermediate_size=384, vocabulary_size=512),
    30: ScratchModel(
        layers=8, hidden_size=512, attention_heads=8, intermediate_size=1536, vocabulary_size=8192
    ),
    135: ScratchModel(
        layers=30, hidden_size=576, attention_heads=9, intermediate_size=1536, vocabulary_size=32768
    ),
    500: ScratchModel(
        layers=24, hidden_size=1280, attention_heads=20, intermediate_size=3456, vocabulary_size=32768
    ),
    1000: ScratchModel(
        layers=24, hidden_size=1792, attention_heads=28, intermediate_size=4864, vocabulary_size=49152
    ),
}
"""Millions of parameters, roughly, to a Llama of that size."""
TIMEOUT_SECONDS = 120.0


# --- the receiver ------------------------------------------------------------------------------------------


class Generator:
    """A vLLM server with random weights, and its actor's weight control on a thread."""

    def __init__(self, model: Path) -> None:
        control_port = free_port()
        self.member = wire.Member(
            member_id="g0", name="g0", control_url=f"http://127.0.0.1:{control_port}", weight_version=-1
        )
        self.server = VllmProcess(
            model,
            *("--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "16"),
            *("--kv-cache-bytes", str(64 << 20)),
        )
        self._ready = threading.Event()
        self._control_port = control_port
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        state, busy = ServerState(), BusyClock()
        metrics = ActorMetrics(state, busy)
        async with self.server.client() as client:
            runner = web.AppRunner(
                actor_app(
                    WeightControl(client, state, busy, metrics), metrics, self.server.token, lambda: None
                )
            )
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._control_port).start()
            state.mark_up()
            self._ready.set()
            await asyncio.Event().wait()

    def wait(self) -> None:
        asyncio.run(self.server.ready())
        if not self._ready.wait(30):
            raise RuntimeError("the actor's control did not start")


def make_model(directory: Path, model: ScratchModel) -> None:
    """Config, tokenizer and random weights."""
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", model, model.vocabulary_size, 0, "bfloat16")
    train_tokenizer(["0 1 2 3"], 512).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    )
    config = llama_config(model, model.vocabulary_size, "bfloat16", 256) | {
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))


# --- the sender --------------------------------------------------------------------------------------------


def make_tensors(model: ScratchModel) -> dict[str, torch.Tensor]:
    block = (torch.randn(1 << 20) * 0.02).bfloat16()

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        return block.repeat(-(-count // len(block)))[:count].view(shape)

    return {name: tensor(shape) for name, shape in parameter_shapes(model, model.vocabulary_size)}


def as_weights(tensors: dict[str, torch.Tensor]) -> WeightSource:
    manifest = [wire.TensorSpec(name, "bfloat16", list(tensor.shape)) for name, tensor in tensors.items()]
    return WeightSource(manifest, lambda: iter(tensors.items()))


# --- bare gloo ---------------------------------------------------------------------------------------------


def gloo_member(rank: int, port: int, sizes: list[int], repeats: int) -> list[float]:
    """Seconds of each repeat: ``sizes`` broadcast one after the other."""
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timeout)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, 2, options)
    broadcast = dist.BroadcastOptions()
    broadcast.rootRank = broadcast.rootTensor = 0
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    seconds = []
    for _ in range(repeats):
        group.barrier().wait()
        started = time.perf_counter()
        for size in sizes:
            group.broadcast([buffer[:size]], broadcast).wait()
        seconds.append(time.perf_counter() - started)
    group.barrier().wait()
    return seconds


def bare_gloo(sizes: list[int], repeats: int) -> list[float]:
    """Seconds of each repeat at the receiver, the first one left out."""
    arguments = [str(free_port()), json.dumps(sizes), str(repeats + 1)]
    command = [sys.executable, __file__, "--bare"]
    sender = subprocess.Popen([*command, "0", *arguments], stdout=subprocess.DEVNULL)
    try:
        done = subprocess.run(
            [*command, "1", *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
        sender.wait(TIMEOUT_SECONDS)
    finally:
        sender.kill()
        sender.wait()
    seconds: list[float] = json.loads(done.stdout)[1:]
    return seconds


# --- the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Medians over the repeats, seconds."""

    millions: float
    megabytes: float
    total: float
    pause: float
    gather: float
    transfer: float
    load: float
    resume: float
    bare: float
    share: float
    """Of bare gloo's speed that the transfer reaches: best against best."""

    def __str__(self) -> str:
        phases = " ".join(
            f"{seconds:9.4f}"
            for seconds in (
                self.pause,
                self.gather,
                self.transfer,
                self.load,
                self.resume,
                self.total,
                self.bare,
            )
        )
        return f"{self.millions:8.1f} {self.megabytes:8.1f} {phases} {self.share:6.0%}"


HEADER = (
    f"{'M params':>8} {'MB':>8} "
    + " ".join(f"{name:>9}" for name in ("pause", "hidden", "transfer", "load", "resume", "total", "bare"))
    + f" {'share':>6}"
)


def measure(model: ScratchModel, work: Path, repeats: int, bucket_bytes: int) -> Row:
    directory = work / "model"
    make_model(directory, model)
    generator = Generator(directory)
    try:
        tensors = make_tensors(model)
        weights = as_weights(tensors)
        sizes = [bucket.total_bytes for bucket in lay_out(weights.manifest, bucket_bytes)]
        generator.wait()
        bare = bare_gloo(sizes, repeats)
        settings = PublishSettings("127.0.0.1", "gloo", bucket_bytes, TIMEOUT_SECONDS)
        control = ActorControl(generator.server.token)
        publisher = GroupPublisher(settings, control)
        outcomes = []
        for version in range(repeats + 1):
            outcome = publisher.publish(version, weights, [generator.member])
            if outcome.failed:
                raise RuntimeError(f"version {version} was not taken")
            outcomes.append(outcome.stats)
        publisher.close()
        control.close()
        bare += bare_gloo(sizes, repeats)
    finally:
        generator.server.stop()
        shutil.rmtree(directory)

    def median(name: str) -> float:  # of all but the first, which opens the group and touches fresh memory
        return statistics.median(stats[f"publish_{name}"] for stats in outcomes[1:])

    return Row(
        millions=sum(t.numel() for t in tensors.values()) / 1e6,
        megabytes=sum(sizes) / 1e6,
        total=median("seconds"),
        pause=median("pause_seconds"),
        gather=median("gather_seconds"),
        transfer=median("transfer_seconds"),
        load=median("load_seconds"),
        resume=median("resume_seconds"),
        bare=statistics.median(bare),
        share=min(bare) / min(stats["publish_transfer_seconds"] for stats in outcomes[1:]),
    )


def rows(sizes: list[int], repeats: int, bucket_bytes: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as work:
        for size in sizes:
            yield measure(SIZES[size], Path(work), repeats, bucket_bytes)


def main() -> None:
    if sys.argv[1:2] == ["--bare"]:
        rank, port, sizes, repeats = sys.argv[2:]
        print(json.dumps(gloo_member(int(rank), int(port), json.loads(sizes), int(repeats))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one small size, within a minute")
    parser.add_argument("--sizes", help=f"millions of parameters, of {', '.join(map(str, SIZES))}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=16)
    arguments = parser.parse_args()
    chosen = [int(s) for s in arguments.sizes.split(",")] if arguments.sizes else list(SIZES)
    if arguments.quick:
        chosen, arguments.repeats = [30], 5
    torch.set_num_threads(1)
    print(HEADER, flush=True)
    measured = []
    for row in rows(chosen, arguments.repeats, arguments.bucket_mib << 20):
        measured.append(row)
        print(row, flush=True)
    figures: dict[str, float] = {}
    for row in measured:
        prefix = f"{row.millions:.0f}M"
        for name in ("pause", "gather", "transfer", "load", "resume", "total"):
            figures[f"{prefix}_{name}_seconds"] = round(getattr(row, name), 5)
        figures[f"{prefix}_transfer_share_of_bare_gloo"] = round(row.share, 3)
    figures["lowest_transfer_share"] = round(min(row.share for row in measured), 3)
    print(json.dumps({"benchmark": "publish", "figures": figures}))


if __name__ == "__main__":
    main()
