"""Several sequences a row by a variable-length kernel: as each sequence alone, without a mask.

CPUs have no such kernel: ``varlen_kernel`` has its definition. Shapes are those of torch's own kernel, on tensors without values.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import varlen_kernel
from free_port import free_port
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import Engine, EngineSettings, TrainBatch
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models import Policy, varlen
from scalerl_trainer.packing import Sequence, one_row, pack

VOCABULARY = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "attn_implementation": "sdpa",
}


def make_llama() -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def make_gemma() -> Any:
    """With a window of five tokens in one layer of two, and a scale that is not that of the head's size."""
    torch.manual_seed(2)
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=5, layer_types=types, query_pre_attn_scalar=64)
    return Gemma3ForCausalLM(config)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "kernel", lambda: varlen_kernel.grouped)


def sequences(*lengths: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = [torch.randint(VOCABULARY, (n + 1,), generator=generator).tolist() for n in lengths]
    return [Sequence(row[:1], row[1:]) for row in ids]


def computed(
    model: Any, given: list[Sequence], tokens: int, *, shared: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities in flat order, and the gradients of a weighted sum."""
    policy = Policy(model, fp32_head=True).train()
    batch = pack(given, tokens, shared_rows=shared)
    flat = torch.zeros(batch.trainable)
    for micro in batch.micro_batches:
        inputs = (micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
        flat = flat.index_copy(0, micro.flat_m, policy(*inputs)[0])
    weights = torch.linspace(-1, 1, batch.trainable)
    return flat.detach(), list(torch.autograd.grad((flat * weights).sum(), list(policy.parameters())))


@pytest.mark.parametrize("make", [make_llama, make_gemma], ids=["grouped", "windows"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [((1,), 8), ((1, 1, 1), 4), ((24,), 25), ((24, 1, 7, 6, 5, 4, 1), 25), ((3, 17, 2, 2, 9), 64)],
    ids=str,
)
def test_row_of_sequences_is_as_each_alone(
    make: Callable[[], Any], checkpointing: bool, lengths: tuple[int, ...], tokens: int
) -> None:
    model, given = make(), sequences(*lengths)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, theirs = computed(model, given, tokens, shared=False)
    varlen.use(model.config)
    for shared in (True, False):  # rows of one sequence each are padded
        got, ours = computed(model, given, tokens, shared=shared)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=4e-6)
        for mine, other in zip(ours, theirs, strict=True):
            assert float((mine - other).norm()) <= 2e-6 * float(other.norm()) + 1e-9


def test_tokens_of_other_sequences_have_no_gradient() -> None:
    model = make_llama()
    varlen.use(model.config)
    micro = one_row(sequences(6, 5, 4))
    embedded = model.get_input_embeddings()(micro.input_ids_bt).detach().requires_grad_()
    hidden = model.base_model(
        inputs_embeds=embedded,
        position_ids=micro.position_ids_bt,
        use_cache=False,
        **varlen.boundaries(micro.position_ids_bt, torch.device("cpu")),
    ).last_hidden_state
    (gradient,) = torch.autograd.grad(hidden[0, 6:11].sum(), embedded)
    assert gradient[0].abs().sum(-1).gt(0).tolist() == [False] * 6 + [True] * 5 + [False] * 4


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.nbytes for x in tree_leaves(result) if isinstance(x, torch.Tensor) and not func.is_view]
        self.bytes = max([self.bytes, *made])
        return result


def test_16k_tokens_make_no_tensor_of_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own kernel, forward and backward, on the meta device."""
    monkeypatch.undo()
    tokens = 16384
    position_ids = torch.cat([torch.arange(1), torch.arange(tokens - 4001), torch.arange(4000)])[None]
    with torch.device("meta"):
        model = make_llama().to(torch.bfloat16)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    ends = varlen.boundaries(position_ids, position_ids.device)
    assert (ends["cu_seq_lens_q"].tolist(), ends["max_length_q"]) == ([0, 1, 12384, 16384], 12383)
    ends = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in ends.items()}
    varlen.use(model.config)
    with Largest() as largest:
        states = model.base_model(
            input_ids=ids, position_ids=position_ids.to("meta"), use_cache=False, **ends
        ).last_hidden_state
        states.sum().backward()
    assert states.shape == (1, tokens, 32)
    # The widest activation, in float32.
    assert largest.bytes <= 4 * tokens * SIZES["intermediate_size"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"is_causal": False}, "attention to later tokens"),
        ({"cu_seq_lens_q": None}, "no boundaries of sequences"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "a mask"),
    ],
)
def test_what_the_kernel_does_not_compute_raises(asked: dict[str, Any], said: str) -> None:
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    options = {
        "attention_mask": None,
        **varlen.boundaries(torch.arange(4)[None], torch.device("cpu")),
        **asked,
    }
    with pytest.raises(ModelError, match=f"^Linear asks for {said}, which torch's variable-length kernel"):
        varlen.attention(torch.nn.Linear(1, 1), query, key, key, **options)


def test_problem_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = make_llama(), torch.device("cuda")
    assert varlen.problem(model, torch.bfloat16, torch.device("cpu")) == "it needs a CUDA device"
    assert varlen.problem(model, torch.float32, gpu) == "it needs bfloat16"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    assert varlen.problem(model, torch.bfloat16, gpu) == "it needs a device of capability 8.0, not 7.5"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    assert varlen.problem(model, torch.bfloat16, gpu) is None
    model.config.head_dim = 12
    assert "heads of a multiple of 8, at most 256, not 12" in str(varlen.problem(model, torch.bfloat16, gpu))
    model.config._attn_implementation = "eager"
    assert varlen.problem(model, torch.bfloat16, gpu) == "model.attention is eager"


WINDOW: dict[str, Any] = SIZES | {"sliding_window": 8, "max_window_layers": 2, "pad_token_id": 0}
EXPERTS: dict[str, Any] = WINDOW | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHUNKS = SIZES | {
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "pad_token_id": 0,
    "attention_chunk_size": 8,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen2MoeConfig(**EXPERTS, use_sliding_window=True), "sliding_window in its mask alone"),
        (Qwen2MoeConfig(**EXPERTS), None),
        (PhimoeConfig(**WINDOW, num_local_experts=2), "sliding_window in its mask alone"),
        (MixtralConfig(**WINDOW, num_local_experts=2), None),
        (Llama4TextConfig(**CHUNKS), "layers of chunked_attention"),
        (Llama4TextConfig(**CHUNKS, layer_types=["full_attention"] * 2), "attention_chunk_size"),
        (Gemma2Config(**WINDOW), "softcap"),
        (Gemma3TextConfig(**WINDOW), None),
        (
            DeepseekV3Config(**SIZES, n_routed_experts=2, n_group=1, topk_group=1),
            "values of a size of their own",
        ),
    ],
    ids=lambda x: x.model_type if isinstance(x, PretrainedConfig) else str(x),
)
def test_model_with_attention_that_the_kernel_does_not_compute_keeps_sdpa(
    config: PretrainedConfig, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check of short sequences finds a window or chunk longer than they are."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = varlen.problem(model, torch.bfloat16, torch.device("cuda"))
    assert found == (reason and f"{config.model_type} has {reason}, which it does not compute")


def test_family_that_passes_its_window_computes_it() -> None:
    """A Mixtral of window 8 on 40 tokens; those of a Qwen2-MoE would be further off than rounding."""
    far = {}
    for kind in (MixtralConfig, Qwen2MoeConfig):
        torch.manual_seed(3)
        config = kind(**EXPERTS, use_sliding_window=True, num_local_experts=2)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        expected, _ = computed(model, sequences(40), 48, shared=False)
        varlen.use(model.config)
        got, _ = computed(model, sequences(40), 48, shared=False)
        far[kind] = float((got - expected).abs().max())
    assert far[MixtralConfig] < 1e-5
    assert far[Qwen2MoeConfig] > 1e-2


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(caplog: pytest.LogCaptureFixture, tokens: int = 25) -> tuple[dict[str, torch.Tensor], str, str]:
    """Weights after two steps with a reference, the attention in use, and what was logged."""
    settings = EngineSettings(
        engine="FSDP2",
        zero_stage=3,
        dtype="float32",
        learning_rate=1e-3,
        warmup_steps=1,
        micro_batch_tokens=tokens,
        activation_checkpointing=True,
    )
    with caplog.at_level(logging.INFO, "scalerl_trainer"):
        engine = Engine(make_gemma(), settings, torch.device("cpu"))
    engine.set_reference(make_gemma())
    given = sequences(24, 1, 7, 6, 5)
    batch = TrainBatch(given, torch.full((5,), 1 / 43), torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0]))
    stats = [engine.step(batch, Cispo(5.0)) for _ in range(2)]
    assert all(step.applied for step in stats)
    weights = {
        name: tensor.clone()
        for bucket in engine.weights.gather_parameters(64 << 20)
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True)
    }
    engine.close()
    return weights, engine.config._attn_implementation, caplog.text


def test_engine_trains_the_same_weights(
    group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by_sdpa, used, said = trained(caplog)
    assert used == "sdpa"
    assert (
        "attention: sdpa; each sequence has a row of its own (torch's variable-length kernel is not" in said
    )
    caplog.clear()
    monkeypatch.setattr(varlen, "problem", lambda *_: None)
    by_kernel, used, said = trained(caplog)
    assert used == varlen.NAME
    assert "attention: torch_varlen; sequences share rows" in said
    for name, weight in by_sdpa.items():
        torch.testing.assert_close(by_kernel[name], weight, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("wrong", ["scale", "boundaries", "block", "some"])
def test_kernel_that_differs_is_not_used(
    group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    def broken(query: Any, key: Any, value: Any, ends: Any, *_: Any, **options: Any) -> torch.Tensor:
        if wrong == "scale":
            options["scale"] = 0.9
        elif wrong == "boundaries":
            ends = torch.tensor([0, len(query)], dtype=torch.int32)
        longest = int(ends.diff().max())
        found = varlen_kernel.grouped(query, key, value, ends, ends, longest, longest, **options)
        at = torch.cat([torch.arange(int(length)) for length in ends.diff()])
        bad = {"block": at >= 128, "some": at % 5 == 4}.get(wrong, at < 0)
        return torch.where(bad[:, None, None], found.flip(1), found)

    monkeypatch.setattr(varlen, "problem", lambda *_: None)
    monkeypatch.setattr(varlen, "kernel", lambda: broken)
    _, used, said = trained(caplog, 400)
    assert used == "sdpa"
    assert "differs from sdpa" in said
    assert "each sequence gets a row of its own, which is slower" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no kernel image is available"), "a call of it fails: no kernel image is available"),
        (torch.OutOfMemoryError("out of memory"), None),
    ],
)
def test_kernel_that_fails_is_not_used(
    group: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    said: str | None,
) -> None:
    def failing(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(varlen, "problem", lambda *_: None)
    monkeypatch.setattr(varlen, "kernel", lambda: failing)
    if said is None:
        with pytest.raises(torch.OutOfMemoryError):
            trained(caplog)
        return
    _, used, logged = trained(caplog)
    assert used == "sdpa"
    assert (
        f"each sequence has a row of its own (torch's variable-length kernel is not used: {said})" in logged
    )


WORKER = """
import logging, sys, torch, torch.distributed as dist
import test_trainer_varlen as tests, varlen_kernel
from scalerl_trainer.engine import Engine, EngineSettings
from scalerl_trainer.models import varlen
rank, port = int(sys.argv[1]), sys.argv[2]
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
def failing(*_, **__):
    raise RuntimeError("no kernel image")
varlen.problem = lambda *_: None
varlen.kernel = lambda: failing if rank else varlen_kernel.grouped
settings = EngineSettings(engine="FSDP2", zero_stage=3, dtype="float32", micro_batch_tokens=25)
engine = Engine(tests.make_llama(), settings, torch.device("cpu"))
logprobs = engine.logprobs(tests.sequences(6, 5)).logprobs_n
print("used", engine.config._attn_implementation, tuple(logprobs.shape), flush=True)
engine.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_kernel_that_fails_on_one_rank_is_used_on_none() -> None:
    port = str(free_port())
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(varlen_kernel.__file__).parent)])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), port],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("used sdpa (11,)" in each for each in said), said
    assert "(torch's variable-length kernel is not used: rank 1 cannot use it, see its log)" in said[0]
    assert "rank 1 cannot use torch's variable-length kernel: a call of it fails: no kernel image" in said[1]
