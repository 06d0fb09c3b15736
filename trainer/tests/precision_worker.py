"""The engine's log-probabilities beside those of plain transformers, and those of a step beside those of scoring.

One rank; writes ``<out>/results.pt``. Models are made at random in the shapes that are trained in earnest: grouped queries, biases, scaled rotary tables,
sliding windows, scaled embeddings. Their weights are ten times larger than usual, so that attention depends on where
a token stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
)

from scalerl_trainer.algo.losses import LossOutput, Supervised, TokenBatch
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    Rank,
    TrainBatch,
    destroy_process_group,
    init_process_group,
)
from scalerl_trainer.models import load_model
from scalerl_trainer.packing import Sequence

POSITIONS = 4096
COMMON = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(
        **COMMON, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "llama3": lambda: LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, query_pre_attn_scalar=32, sliding_window=512),
}
TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NOISY = {
    "gpt2": lambda: GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    ),
    "llama": lambda: LlamaConfig(**TINY, intermediate_size=48, attention_dropout=0.5),
    "opt": lambda: OPTConfig(
        **TINY, ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, layerdrop=0.5
    ),
}


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    """The bfloat16 model as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def engine_logprobs(folder: Path, ids: list[int], stage: int, device: torch.device) -> torch.Tensor:
    settings = EngineSettings(zero_stage=stage, micro_batch_tokens=POSITIONS, fp32_head=False)
    engine = Engine(load_model(str(folder), dtype="bfloat16"), settings, device)
    found = engine.logprobs([Sequence(ids[:1], ids[1:])]).logprobs_n
    engine.close()
    return found


class Recording:
    """A loss that records its log-probabilities."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        self.seen.append(tokens.logprobs_n.detach().clone())
        return Supervised()(tokens)


def noise(config: Any, checkpointing: bool, device: torch.device) -> tuple[float, int]:
    """The largest difference between a step's log-probabilities and those scored before it at the same weights; how
    often a layer was computed in that step."""
    settings = EngineSettings(zero_stage=0, dtype="float32", activation_checkpointing=checkpointing)
    torch.manual_seed(7)
    engine = Engine(AutoModelForCausalLM.from_config(config).train(), settings, device)
    sequence = Sequence(list(range(3, 13)), list(range(20, 50)))
    scored = engine.logprobs([sequence]).logprobs_n
    computed: list[int] = []
    first = next(m for n, m in engine._policy.named_modules() if n.endswith(("c_proj", "v_proj")))
    first.register_forward_hook(lambda *_: computed.append(1))
    loss = Recording()
    engine.step(TrainBatch([sequence], torch.full((1,), 1 / 30), torch.ones(1)), loss)
    engine.close()
    return float((torch.cat(loss.seen) - scored).abs().max()), len(computed)


def main() -> None:
    torch.set_num_threads(1)
    given: dict[str, Any] = WORKER  # type: ignore[name-defined]  # noqa: F821
    out: Path = given["out"]
    device = init_process_group(Rank(0, 1, 0, "127.0.0.1", given["port"]), device="cpu", timeout_seconds=240)
    results: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(7)
        folder = out / name
        AutoModelForCausalLM.from_config(config()).to(torch.bfloat16).save_pretrained(folder)
        ids = torch.randint(3, 256, (POSITIONS,)).tolist()
        expected = reference(folder, ids)
        for stage in (1, 3) if name == "qwen2" else (1,):
            results[f"{name} {stage}"] = (engine_logprobs(folder, ids, stage, device) - expected).abs()
    for name, config in NOISY.items():
        for checkpointing in (False, True):
            results[f"noise {name} {checkpointing}"] = noise(config(), checkpointing, device)
    torch.save(results, out / "results.pt")
    destroy_process_group()


if __name__ == "__main__":
    main()
