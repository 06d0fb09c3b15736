"""Trains the tiny model of each family for three steps on one rank, and compares it with transformers; writes JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import model_families
import torch
import transformers
import varlen_kernel
from transformers import AutoModelForCausalLM

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.models import Policy, load_model, varlen
from scalerl_trainer.models.structure import problems
from scalerl_trainer.packing import Sequence

STEPS = 3
VOCABULARY = 300

generator = torch.Generator().manual_seed(3)
sequences = [
    Sequence(
        *(torch.randint(3, VOCABULARY, (tokens,), generator=generator).tolist() for tokens in (prompt, rest))
    )
    for prompt, rest in ((5, 30), (9, 12), (3, 21), (7, 7))
]
tokens = sum(len(sequence.completion) for sequence in sequences)


def alone(folder: Path) -> torch.Tensor:
    """transformers' log-probabilities of each sequence alone, with another attention than the trainer's where there is one."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for sequence in sequences:
        ids_bt = torch.tensor([[*sequence.prompt, *sequence.completion]])
        with torch.no_grad():
            logprobs_tv = model(ids_bt, use_cache=False).logits[0].float().log_softmax(-1)
        at = list(range(len(sequence.prompt), ids_bt.shape[1]))
        found.append(logprobs_tv[[place - 1 for place in at], ids_bt[0, at]])
    return torch.cat(found)


def divergence(ours_n: torch.Tensor, theirs_n: torch.Tensor) -> float:
    """The mean of exp(d) - 1 - d, which is positive and estimates KL, nats a token."""
    difference_n = ours_n - theirs_n
    return float((torch.expm1(difference_n) - difference_n).mean())


def by_kernel(engine: Engine, theirs_n: torch.Tensor) -> float | None:
    """KL of sequences that share rows by a variable-length kernel; None if the engine's own check refuses to."""
    varlen.use(engine.config)
    engine._checks._separates = None
    if not engine._checks.shares_rows():
        return None
    return divergence(engine.logprobs(sequences).logprobs_n, theirs_n)


def train(folder: Path) -> dict[str, Any]:
    model = load_model(str(folder), dtype="float32")
    settings = EngineSettings(
        zero_stage=0, dtype="float32", learning_rate=1e-3, warmup_steps=1, micro_batch_tokens=80
    )
    engine = Engine(model, settings, torch.device("cpu"))
    batch = TrainBatch(sequences, torch.full((4,), 1 / tokens), torch.tensor([1.0, -1.0, 0.5, -0.5]))
    applied = [engine.step(batch, Cispo(5.0)).applied for _ in range(STEPS)]
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.load_state_dict(model.state_dict())
    whole.save_pretrained(folder / "trained")
    theirs_n = alone(folder / "trained")
    own_n = engine.logprobs(sequences).logprobs_n
    # Positions tell transformers where a sequence of a row begins, with sdpa too.
    patched, Policy.variable_length = Policy.variable_length, property(lambda self: True)  # type: ignore[method-assign, assignment]
    try:
        shared = engine._checks.shares_rows()
        chosen_n = engine.logprobs(sequences).logprobs_n
        engine._checks._separates = True
        mixed_n = engine.logprobs(sequences).logprobs_n
    finally:
        Policy.variable_length = patched  # type: ignore[method-assign]
    found = {"kl_of_kernel": by_kernel(engine, theirs_n)} if varlen.passes_boundaries(model) else {}
    engine.close()
    return found | {
        "applied": applied,
        "moved": divergence(own_n, alone(folder)),
        "kl": divergence(own_n, theirs_n),
        "rows": "shared" if shared else "own",
        "kl_of_rows": divergence(chosen_n, theirs_n),
        "kl_if_shared": divergence(mixed_n, theirs_n),
    }


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
given = json.loads(sys.argv[1])
torch.set_num_threads(1)
varlen.kernel = lambda: varlen_kernel.grouped  # CPUs have none
init_process_group(Rank.from_environment(os.environ), device="cpu", timeout_seconds=240)
results: dict[str, Any] = {}
for family in model_families.FAMILIES:
    if family.name not in given["names"]:
        continue
    folder = model_families.write_family(family, Path(given["out"]) / family.name)
    found = problems(folder, "float32", "sdpa")
    results[family.name] = {"problems": found} if found or family.refused else train(folder)
(Path(given["out"]) / "results.json").write_text(json.dumps(results))
destroy_process_group()
