"""How long a checkpoint stops training, beside one that is written while training waits.

    python benchmarks/checkpoint.py [--quick] [--rounds N] [--megabytes N] [--directory DIR]

One rank of the engine (gloo, ZeRO 1, bfloat16) with a Llama whose checkpoint has about 1 GB. *waits* is the time in
which the state is written, flushed, hashed and committed in line; *stops* is what training is stopped for: the call, the time for which the
update of the next step waits until the state is copied to the host, and the commit once the thread has written. *copied first* is the same, but
the copy has ended before the step begins. Beside the copy and the begin of the write, with which it shares memory and processors, a step takes
longer than alone: *delays* is what training is stopped for and that. Rounds alternate; medians. The first checkpoint, which reserves the
host's memory, is shown apart. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from support.memory_worker import batch
from support.vllm_process import free_port
from transformers import LlamaConfig, LlamaForCausalLM

from scalerl_api.paths import RunPaths
from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.checkpoints.volume import CheckpointStore, files_in
from scalerl_trainer.checkpoints.write import Checkpointer
from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.fence import Fence
from scalerl_trainer.ranks import Ranks


def make_engine(megabytes: int, device: torch.device) -> Engine:
    width, vocabulary = 512, 8192
    layer = 4 * width**2 + 3 * width * 4 * width
    layers = max(1, round((megabytes * 1e6 / 12 - 2 * vocabulary * width) / layer))
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=4 * width,
        num_attention_heads=8,
        vocab_size=vocabulary,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.use_cache = False
    settings = EngineSettings(zero_stage=1, micro_batch_tokens=64, warmup_steps=0, ratio_guard=None)
    return Engine(model, settings, device)


def measure(root: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    device = init_process_group(Rank(0, 1, 0, "127.0.0.1", free_port()), device="cpu", timeout_seconds=300)
    engine = make_engine(megabytes, device)
    paths = RunPaths(root)
    fence = Fence.begin(paths.checkpoints, None, Disk())
    store = CheckpointStore(paths, 1, fence=fence)
    aside = CheckpointStore(paths, 1, fence=fence, removes_aside=True)
    checkpointer = Checkpointer(aside, Ranks(0, 1, 960.0), engine)
    found = defaultdict[str, list[float]](list)

    def step(kind: str, number: int) -> float:
        """Take one; returns for how long its update waited."""
        stats = engine.step(batch(number, 64, 2, engine.config.vocab_size), Cispo(5.0))
        assert stats.applied
        found[kind].append(stats.seconds["total"] - stats.seconds["copy"])
        return stats.seconds["copy"]

    step("warm-up", 0)
    for number in range(3 * rounds + 1):
        kind = "first" if number == 0 else ("waits", "stops", "copied first")[number % 3]
        step("step", number)
        begin = time.perf_counter()
        if kind == "waits":
            staged = store.stage(number + 1)
            engine.save(staged.directory)
            records = store.flush_and_hash(staged, files_in(staged.directory))
            store.commit(staged, b"snapshot", records, {})
            found[kind].append(time.perf_counter() - begin)
            continue
        assert checkpointer.start(number + 1, b"snapshot") is None
        if kind == "copied first":
            engine._trained.finish_copy()
        stopped = time.perf_counter() - begin
        stopped += step(f"{kind}: step", number)
        while not checkpointer.flushed:
            time.sleep(0.01)
        begin = time.perf_counter()
        assert checkpointer.finish().error is None
        found[kind].append(stopped + time.perf_counter() - begin)
    size = sum(f.stat().st_size for f in paths.checkpoint(3 * rounds + 1).iterdir())
    aside.close()
    engine.close()
    destroy_process_group()
    return {"bytes": size, **{name: statistics.median(values) for name, values in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="100 MB, of which fixed costs are a larger share"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="a folder on the volume to be measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        found = measure(Path(root), 100 if arguments.quick else arguments.megabytes, arguments.rounds)
    print(f"{found['bytes'] / 1e9:.2f} GB: waits {found['waits']:.2f} s; a step alone {found['step']:.2f} s")
    for kind in ("stops", "copied first", "first"):
        delay = found[kind] + found[f"{kind}: step"] - found["step"]
        shares = " and ".join(
            f"{seconds:.3f} s ({seconds / found['waits']:.1%})" for seconds in (found[kind], delay)
        )
        print(f"{kind}, delays: {shares}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
