"""What a float32 head on the trainer's side, the generator's, or both does to the mismatch of sampled tokens in bfloat16.

    python benchmarks/fp32_logits.py [--quick] [--initializer-range 0.1]

A real vLLM server samples with each kind of head, and the trainer's own policy scores what it sampled with each kind:
the four values of ``recipe.fp32Logits``. The weights are the same everywhere, so all that differs is rounding. ``KL`` is
the k3 estimate in nats a token, ``|Δ|`` the mean absolute difference of log-probabilities, both ± the standard error over
sequences, and by the tokens' positions. ``beyond`` is the share of tokens whose ratio leaves [1/1.1, 1.1].

The model is random: the spread of its logits, which decides how coarse they are in bfloat16, grows with
``--initializer-range`` and is printed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
from pathlib import Path

import torch
from support.vllm_process import VllmProcess

from scalerl_api.mismatch import POSITION_EDGES
from scalerl_api.spec import ScratchModel
from scalerl_generator.vllm_client import gather_all
from scalerl_trainer.algo.mismatch import RatioStatistics, ratio_statistics
from scalerl_trainer.models.load import load_model
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.models.precision import cast_parameters
from scalerl_trainer.models.scratch import llama_config, train_tokenizer, write_safetensors
from scalerl_trainer.packing import Sequence, pack

CONTEXT_TOKENS = 512
PROMPT_TOKENS = 8
BY_HEADS = {
    (False, False): "None",
    (True, False): "Trainer",
    (False, True): "Generator",
    (True, True): "Both",
}
"""``recipe.fp32Logits`` by which head is in float32: the trainer's, the generator's."""
FAR = math.log(1.1)


def make_model(directory: Path, model: ScratchModel) -> None:
    """A random Llama in bfloat16 that ends no completion."""
    directory.mkdir()
    train_tokenizer(["0 1 2 3"], 512).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    )
    config = llama_config(model, model.vocabulary_size, "bfloat16", CONTEXT_TOKENS)
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": None, "pad_token_id": 0}))
    write_safetensors(directory / "model.safetensors", model, model.vocabulary_size, 0, "bfloat16")


async def sample(process: VllmProcess, vocabulary: int, count: int) -> list[tuple[Sequence, torch.Tensor]]:
    """``count`` completions to the end of the context, each with the log-probabilities that vLLM gave."""
    await process.ready()
    async with process.client() as server:
        prompts = [
            [3 + (131 * i + 17 * j) % (vocabulary - 3) for j in range(PROMPT_TOKENS)] for i in range(count)
        ]
        length = CONTEXT_TOKENS - PROMPT_TOKENS
        answers = await gather_all(server.generate(prompt, n=1, max_tokens=length) for prompt in prompts)
    return [
        (Sequence(prompt, sampled.token_ids.tolist()), torch.from_numpy(sampled.logprobs.copy()))
        for prompt, (sampled,) in zip(prompts, answers, strict=True)
    ]


def generate(
    model: Path, vocabulary: int, count: int, *, fp32_head: bool
) -> list[tuple[Sequence, torch.Tensor]]:
    """:func:`sample` of a server of its own."""
    server = VllmProcess(
        model,
        *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "64"),
        "--fp32-head" if fp32_head else "--no-fp32-head",
    )
    try:
        return asyncio.run(sample(server, vocabulary, count))
    finally:
        server.stop()


def score(policy: Policy, sequence: Sequence) -> torch.Tensor:
    """Log-probabilities of the completion, as the trainer computes them."""
    (micro,) = pack([sequence], CONTEXT_TOKENS, shared_rows=False).micro_batches
    with torch.no_grad():
        logprobs, _ = policy(micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
    return logprobs


def logit_spread(policy: Policy, sequence: Sequence) -> float:
    """Standard deviation of a token's logits, mean over the sequence."""
    ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
    with torch.no_grad():
        return float(policy.causal_lm(ids).logits.float().std(-1).mean())


def with_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error."""
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std() / math.sqrt(len(values)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="a small model, few sequences")
    p.add_argument("--initializer-range", default="0.1", help="standard deviation of the weights")
    p.add_argument("--sequences", type=int, default=32, help="completions of each generator")
    given = p.parse_args()
    layers, hidden, vocabulary = (2, 256, 2048) if given.quick else (4, 512, 4096)
    count = 4 if given.quick else given.sequences
    shape = ScratchModel(
        layers=layers,
        hidden_size=hidden,
        attention_heads=hidden // 64,
        intermediate_size=3 * hidden,
        vocabulary_size=vocabulary,
        initializer_range=given.initializer_range,
    )
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "model"
        make_model(folder, shape)
        sampled = {head: generate(folder, vocabulary, count, fp32_head=head) for head in (False, True)}
        model = load_model(str(folder), dtype="bfloat16")
    cast_parameters(model, torch.bfloat16)
    policies = {head: Policy(model, fp32_head=head).eval() for head in (False, True)}
    edge = POSITION_EDGES[0] - PROMPT_TOKENS
    spread = logit_spread(policies[True], sampled[True][0][0])
    print(
        f"{layers} layers of {hidden}, vocabulary {vocabulary}, logits of standard deviation {spread:.2f}; "
        f"{count} completions of {CONTEXT_TOKENS - PROMPT_TOKENS} tokens"
    )
    print(f"{'fp32Logits':>10} {'KL':>19} {'|Δ|':>17} {'beyond':>8} {'KL to 256':>10} {'from 256':>10}")
    figures: dict[str, float] = {"logit_spread": spread}
    for (trainer, generator), name in BY_HEADS.items():
        pairs = [(score(policies[trainer], sequence), theirs) for sequence, theirs in sampled[generator]]
        parts: list[RatioStatistics] = [ratio_statistics(ours, theirs) for ours, theirs in pairs]
        kl, kl_error = with_error([part.kl_k3 for part in parts])
        apart, apart_error = with_error([part.absolute_difference for part in parts])
        beyond, _ = with_error([float(((a - b).abs() > FAR).double().mean()) for a, b in pairs])
        near = sum((ratio_statistics(a[:edge], b[:edge]) for a, b in pairs), RatioStatistics()).kl_k3
        far = sum((ratio_statistics(a[edge:], b[edge:]) for a, b in pairs), RatioStatistics()).kl_k3
        print(
            f"{name:>10} {kl:9.2e} ± {kl_error:.1e} {apart:8.5f} ± {apart_error:.5f} {beyond:8.2%} {near:10.2e} {far:10.2e}",
            flush=True,
        )
        figures |= {
            f"kl_{name}": kl,
            f"kl_error_{name}": kl_error,
            f"difference_{name}": apart,
            f"difference_error_{name}": apart_error,
            f"beyond_{name}": beyond,
            f"kl_to_256_{name}": near,
            f"kl_from_256_{name}": far,
        }
    print(json.dumps({"benchmark": "fp32_logits", "figures": figures}))


if __name__ == "__main__":
    main()
