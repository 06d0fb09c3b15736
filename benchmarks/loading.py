"""Memory of the ranks while they load a model: peak of the anonymous resident memory beyond that before, on the host.

    python benchmarks/loading.py [--quick] [--stage N] [--engine FSDP2]

Two gloo ranks load a Llama of 368 M parameters (bfloat16, 701 MiB; ``--quick``: 46 M) from several shards. At stage 3 the target is a
rank's partition and a quarter of it, and the largest tensor; at other stages the same of the whole model; with
FSDP2, whose partition is float32, the same of twice the bytes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 2**20
LIMIT_SECONDS = 600.0
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "vocab_size": 60_000,
    "tie_word_embeddings": True,
}
QUICK = SIZES | {"num_hidden_layers": 3, "vocab_size": 8_000}


def write(folder: Path, sizes: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    total = sum(p.numel() * 2 for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // 4)


def rank(folder: Path, stage: int, fsdp: bool) -> None:
    """One rank: reports when it is about to load, and after it has."""
    import torch

    from scalerl_trainer.engine import (
        EngineSettings,
        Rank,
        deepspeed_backend,
        destroy_process_group,
        fsdp_backend,
        init_process_group,
    )
    from scalerl_trainer.engine.deepspeed_config import deepspeed_config
    from scalerl_trainer.models import Policy, open_model

    torch.set_num_threads(1)
    device = init_process_group(Rank.from_environment(os.environ), device="cpu", timeout_seconds=300)
    settings = EngineSettings(zero_stage=stage)

    def load(path: Path) -> torch.nn.Module:
        model, weights = open_model(path)
        policy = Policy(model, fp32_head=True)
        if fsdp:
            placed: torch.nn.Module = fsdp_backend.place(
                policy, torch.bfloat16, device, weights, keep_root=True
            )
            return placed
        count = sum(p.numel() for p in policy.parameters())
        config = deepspeed_config(settings, 2, count, device)
        return deepspeed_backend.place(policy, config, device, weights)

    kept = [load(folder.with_name("tiny"))]  # the libraries' own memory
    print("BEGIN", flush=True)
    sys.stdin.readline()
    begin = time.process_time()
    kept.append(load(folder))
    print(f"END {time.process_time() - begin:.2f}", flush=True)
    sys.stdin.readline()
    destroy_process_group()


def anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def measure(folder: Path, stage: int, engine: str) -> tuple[list[int], float]:
    """Each rank's peak beyond the memory before, bytes, and the processor time of both, seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        # Freed tensors go back to the system at once.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, __file__, "--rank", str(folder), "--stage", str(stage), "--engine", engine]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(one), "LOCAL_RANK": str(one)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for one in range(2)
    ]

    def wait(word: str, process: Any) -> str:
        for line in process.stdout:
            if line.startswith(word):
                return str(line)
        raise RuntimeError(f"a rank ended before {word}")

    try:
        for process in processes:
            wait("BEGIN", process)
        before = [anonymous(process.pid) for process in processes]
        peaks, deadline = list(before), time.monotonic() + LIMIT_SECONDS
        for process in processes:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        readers = [process.stdout.fileno() for process in processes]  # type: ignore[union-attr]

        ended: dict[int, str] = {}
        while len(ended) < 2 and time.monotonic() < deadline:
            peaks = [max(p, anonymous(process.pid)) for p, process in zip(peaks, processes, strict=True)]
            left = [reader for reader in readers if reader not in ended]
            for reader in select.select(left, [], [], 0.001)[0]:
                ended[reader] = wait("END", processes[readers.index(reader)])
        seconds = sum(float(line.split()[1]) for line in ended.values())
        return [p - b for p, b in zip(peaks, before, strict=True)], seconds
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="46 M parameters")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--engine", choices=["DeepSpeed", "FSDP2"], default="DeepSpeed")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank(arguments.rank, arguments.stage, arguments.engine == "FSDP2")
        return
    from scalerl_trainer.models.files import stored_tensors

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write(folder, QUICK if arguments.quick else SIZES)
        write(folder.with_name("tiny"), SIZES | {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64})
        sizes = [tensor.elements * 2 for tensor in stored_tensors(folder).values()]
        partition = sum(sizes) // 2 if arguments.stage == 3 else sum(sizes)
        partition *= 2 if arguments.engine == "FSDP2" else 1
        allowed = partition * 1.25 + max(sizes)
        peaks, seconds = measure(folder, arguments.stage, arguments.engine)
        print(
            f"peak {' / '.join(f'{p / MIB:,.0f}' for p in peaks)} MiB, allowed {allowed / MIB:,.0f}, model "
            f"{sum(sizes) / MIB:,.0f}, {seconds:.1f} s of processor time"
        )
        row = {
            "model": sum(sizes),
            "largest": max(sizes),
            "allowed": allowed,
            "peaks": peaks,
            "cpu_seconds": seconds,
        }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
