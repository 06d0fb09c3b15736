"""Memory of a trainer rank, measured, beside the estimate that refuses runs (``scalerl_api.memory``).

    python benchmarks/memory.py [--quick] [--only NAME,...]

Each case is an engine of one or two gloo ranks and a Llama of 50 M parameters, which takes two steps of two micro-batches. Bytes
are the resident memory of rank 0 beyond that of the same process after two steps of a tiny model. *held* is after the second step,
*peak* the maximum since the first; both per parameter. The estimate is of the peak. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scalerl_api.memory.model_size import Adapters, ModelSize
from scalerl_api.memory.trainer_rank import peak, rank_moments

WORKER = Path(__file__).parent / "support" / "memory_worker.py"
LIMIT_SECONDS = 600.0
MODEL = {
    "hidden_size": 512,
    "num_hidden_layers": 10,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "vocab_size": 16384,
    "tie_word_embeddings": True,
}
WIDE = MODEL | {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 768, "vocab_size": 150_000}
"""Most of its parameters are in the embedding."""

LARGE = MODEL | {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
}
EXPERTS = MODEL | {"intermediate_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2}


def case(stage: int, world: int, **changes: Any) -> dict[str, Any]:
    settings = {
        "model": MODEL,
        "dtype": "bfloat16",
        "stage": stage,
        "world": world,
        "tokens": 64,
        "sequences": 2,
        "checkpointing": False,
        "fp32_head": True,
        "reference": False,
        "lora": None,
        "targets": [],
        # Below the model's size, as those of a real run are.
        "bucket": 5_000_000,
        "engine": "DeepSpeed",
    }
    return settings | changes


CASES: dict[str, dict[str, Any]] = {
    "stage 0, float32, 1 rank": case(0, 1, dtype="float32"),
    "stage 0, float32, 2 ranks": case(0, 2, dtype="float32"),
    "stage 1, 1 rank": case(1, 1),
    "stage 1, 2 ranks": case(1, 2),
    "stage 2, 1 rank": case(2, 1),
    "stage 2, 2 ranks": case(2, 2),
    "stage 3, 1 rank": case(3, 1),
    "stage 3, 2 ranks": case(3, 2),
    "FSDP2, 1 rank": case(3, 1, engine="FSDP2"),
    "FSDP2, 2 ranks": case(3, 2, engine="FSDP2"),
    "stage 1, float32, 1 rank": case(1, 1, dtype="float32"),
    "stage 1, float32, 2 ranks": case(1, 2, dtype="float32"),
    "stage 1, float32, 4 ranks": case(1, 4, dtype="float32"),
    "vocabulary of 150,000": case(1, 1, model=WIDE),
    "2,048 tokens": case(1, 1, tokens=2048, sequences=8),
    "2,048 tokens, checkpointing": case(1, 1, tokens=2048, sequences=8, checkpointing=True),
    "experts, 2,048 tokens": case(1, 1, model=EXPERTS, tokens=2048, sequences=8),
    "experts, stage 3, 2 ranks": case(3, 2, model=EXPERTS),
    "KL reference, stage 3": case(3, 1, reference=True),
    "adapters, stage 1": case(1, 1, lora=32),
    "adapters, stage 1, 218 M": case(1, 1, lora=32, model=LARGE),
    "adapters, stage 2, 2 ranks": case(2, 2, lora=32),
    "adapters, stage 3, 2 ranks": case(3, 2, lora=32),
    "adapters of queries and values, 1,024 tokens": case(
        1, 1, lora=16, targets=["q_proj", "v_proj"], tokens=1024, sequences=4
    ),
    "adapters of 218 M, stage 1, 2 ranks, 512 tokens": case(
        1, 2, lora=8, model=LARGE, tokens=512, sequences=4
    ),
    "8 experts, stage 1, 2 ranks, 512 tokens": case(
        1, 2, model=EXPERTS | {"num_local_experts": 8}, tokens=512, sequences=4
    ),
}
QUICK = ("stage 1, 1 rank", "stage 2, 2 ranks")


def measure(settings: dict[str, Any]) -> dict[str, int]:
    """Rank 0's parameters, held and peak bytes. Raises ``RuntimeError`` with the ranks' last lines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(settings["world"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        # Freed tensors go back to the system at once.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    with tempfile.TemporaryFile("w+") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), json.dumps(settings)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank in range(settings["world"])
        ]
        try:
            outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
        if not results:
            log.seek(0)
            raise RuntimeError(log.read()[-2000:])
    found: dict[str, int] = json.loads(results[0].removeprefix("RESULT "))
    return found


def estimate(settings: dict[str, Any], parameters: int) -> int:
    size = ModelSize.of_config(settings["model"], parameters)
    assert size is not None
    return peak(
        rank_moments(
            size,
            adapters=None
            if settings["lora"] is None
            else Adapters(settings["lora"], tuple(settings["targets"])),
            dtype=settings["dtype"],
            zero_stage=settings["stage"],
            engine=settings["engine"],
            world=settings["world"],
            micro_batch_tokens=settings["tokens"],
            activation_checkpointing=settings["checkpointing"],
            frozen=int(settings["reference"]),
            fp32_head=settings["fp32_head"],
            bucket_elements=settings["bucket"],
        )
    ).total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two cases")
    parser.add_argument("--only", help="names of cases, separated by semicolons")
    arguments = parser.parse_args()
    names = arguments.only.split(";") if arguments.only else QUICK if arguments.quick else tuple(CASES)
    rows: dict[str, dict[str, float]] = {}
    print(f"{'case':28} {'held':>6} {'peak':>6} {'estimate':>9} {'error':>6}   bytes a parameter")
    for name in names:
        settings = CASES[name]
        found = measure(settings)
        count = found["parameters"]
        expected = estimate(settings, count)
        row = {
            "held": found["held"] / count,
            "peak": found["peak"] / count,
            "estimate": expected / count,
            "error": expected / found["peak"] - 1,
        }
        rows[name] = {key: round(value, 3) for key, value in row.items()}
        print(
            f"{name:28} {row['held']:6.2f} {row['peak']:6.2f} {row['estimate']:9.2f} {row['error']:+6.1%}",
            flush=True,
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
