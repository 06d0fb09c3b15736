"""The estimate of a rank's memory against the resident memory of real ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from free_port import free_port

from scalerl_api.memory.model_size import BYTES, Adapters, ModelSize
from scalerl_api.memory.trainer_rank import peak, rank_moments
from scalerl_api.model_source import ScratchExperts
from scalerl_api.spec import ScratchModel
from scalerl_trainer.models.scratch import write_scratch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["stage 0, float32, 1 rank", "stage 1, 2 ranks", "stage 2, 2 ranks", "stage 3, 2 ranks"]
)
def test_estimate_is_within_a_tenth_of_measured(name: str) -> None:
    module: dict[str, Any] = runpy.run_path(str(BENCHMARK))
    settings = module["CASES"][name]
    found = module["measure"](settings)
    expected = module["estimate"](settings, found["parameters"])
    assert expected == pytest.approx(found["peak"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_low_precision_gradients_are_freed_during_backward(dtype: str) -> None:
    """Stage 1 keeps 2 bytes less per parameter; the estimate counts on it. The full test measures it."""
    from scalerl_api.engines import BUCKET_ELEMENTS
    from scalerl_trainer.engine.deepspeed_config import deepspeed_config
    from scalerl_trainer.engine.settings import EngineSettings

    config = deepspeed_config(EngineSettings(zero_stage=1, dtype=dtype), 2, 10**9, torch.device("cpu"))  # type: ignore[arg-type]
    assert config["bf16"]["immediate_grad_update"] == (dtype == "bfloat16")
    # The estimate's buckets are the engine's.
    assert config["zero_optimization"]["reduce_bucket_size"] == BUCKET_ELEMENTS


@pytest.mark.slow
@pytest.mark.parametrize(("device", "stages"), [("cpu", []), ("cuda", [3])])
def test_reductions_overlap_where_deepspeed_orders_them(device: str, stages: list[int]) -> None:
    """The engine refuses them at stages 0 and 1, with accumulation by the caller."""
    from scalerl_trainer.engine.deepspeed_config import deepspeed_config
    from scalerl_trainer.engine.settings import EngineSettings

    found = [
        stage
        for stage in range(4)
        if deepspeed_config(
            EngineSettings(zero_stage=stage, dtype="float32"), 2, 10**9, torch.device(device)
        )["zero_optimization"]["overlap_comm"]
    ]
    assert found == stages


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_requests_are_above_what_containers_use() -> None:
    """``test_api_pod_memory`` compares the estimates with recorded figures."""
    module: dict[str, Any] = runpy.run_path(str(BENCHMARK.with_name("pod_memory.py")))
    found, estimates = module["measure"](module["CASES"]["99 M, bfloat16, 2 ranks"])
    for container, estimate in estimates.items():
        assert 0 < found[container] < estimate, container


PRODUCTS = """
import os, torch
from scalerl_trainer.engine import Rank, init_process_group

init_process_group(Rank.from_environment(os.environ), device="cpu")
torch.set_num_threads(1)
weight = torch.ones(256, 128, dtype=torch.bfloat16)
for end in (120, 420):
    for tokens in range(end - 100, end):
        torch.nn.functional.linear(torch.ones(tokens, 128, dtype=torch.bfloat16), weight)
    with open("/proc/self/status") as file:
        print(*(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon")))
"""


@pytest.mark.slow
def test_rank_keeps_few_compiled_products() -> None:
    """Without a limit a hundred numbers of tokens take 50 MB and more; nothing is compiled on processors without AVX-512."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    ran = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        env=os.environ | rank | {"MASTER_PORT": str(free_port()), "MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    before, after = map(int, ran.stdout.split()[-2:])
    assert after - before < 20e6


MIXTURES = {
    "Mixtral 8x7B": (
        "mixtral",
        {"num_local_experts": 8, "num_key_value_heads": 8},
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151_936,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_layers_of_experts_are_estimated_as_on_the_meta_device(name: str) -> None:
    """ZeRO-3 gathers layers, and a publish whole parameters; a config's intermediate size is of one expert, or of none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = MIXTURES[name]
    config = AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    # The files have the experts one by one, so their largest tensor is the embedding.
    size = ModelSize.of_config(config.to_dict(), count, config.vocab_size * config.hidden_size)
    assert size is not None
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert size.layer == pytest.approx(layer, rel=1e-3)
    largest = max(parameter.numel() for parameter in model.parameters())
    assert largest <= size.largest_parameter < 1.05 * largest
    # Gathered at stage 3: two layers, and the embeddings.
    outside = 2 * config.vocab_size * config.hidden_size
    plan = peak(rank_moments(size, dtype="bfloat16", zero_stage=3, world=16, micro_batch_tokens=64))
    assert plan.gathered == pytest.approx(2 * (2 * layer + outside), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 2, "intermediate_size": 640}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 4}),
        ("qwen2_moe", {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}),
        (
            "qwen3_moe",
            {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "head_dim": 32},
        ),
        (
            "qwen3_moe",
            {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 48, "head_dim": 64},
        ),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 64}),
        ("olmo2", {}),
        ("olmoe", {"num_experts": 8, "num_experts_per_tok": 4}),
        ("gemma2", {"head_dim": 32}),
        ("gemma3_text", {"head_dim": 32}),
    ],
)
def test_activations_are_within_a_tenth_of_what_autograd_keeps(
    kind: str, more: dict[str, Any], dtype: Any
) -> None:
    estimated, kept = activations(kind, more, dtype, None)
    assert estimated == pytest.approx(kept, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rank", [4, 64])
@pytest.mark.parametrize(
    "targets",
    [
        (),
        ("q_proj", "v_proj"),
        ("o_proj",),
        ("mlp.up_proj",),
        ("self_attn.k_proj", "down_proj"),
        ("gate_proj", "up_proj", "down_proj"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"num_key_value_heads": 2, "intermediate_size": 640}])
def test_activations_beside_adapters_are_those_that_autograd_keeps(
    more: dict[str, Any], targets: tuple[str, ...], rank: int, dtype: Any
) -> None:
    estimated, kept = activations("llama", more, dtype, Adapters(rank, targets))
    assert estimated == pytest.approx(kept, rel=0.03)


def activations(kind: str, more: dict[str, Any], dtype: Any, adapters: Adapters | None) -> tuple[int, float]:
    """Bytes that a layer keeps for the backward pass of 64 tokens: estimated, and kept by autograd."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from scalerl_trainer.models.lora import Adapters as OfModel
    from scalerl_trainer.models.lora import Lora

    tokens, sizes = 64, {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 100} | more

    def kept(layers: int) -> tuple[int, ModelSize]:
        settings = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": layers} | sizes
        config = AutoConfig.for_model(kind, **settings)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        if adapters is not None:
            OfModel(model, Lora(adapters.rank, adapters.rank, adapters.targets))
            model.to(getattr(torch, dtype)).enable_input_require_grads()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model.model(input_ids=torch.randint(3, 90, (1, tokens)), use_cache=False)
        size = ModelSize.of_config(config.to_dict(), model.num_parameters())
        assert size is not None
        assert output is not None
        return sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in own), size

    (one, size), (three, _) = kept(1), kept(3)
    return tokens * BYTES[dtype] * size.activation_values(dtype, adapters), (three - one) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype", "experts"),
    [
        (0, "float32", None),
        (1, "bfloat16", None),
        (2, "bfloat16", None),
        (3, "bfloat16", None),
        (3, "bfloat16", ScratchExperts(count=4)),
    ],
)
def test_plan_is_within_a_tenth_of_the_engines_tensors(
    tmp_path: Path, processes: Any, stage: int, dtype: Any, experts: ScratchExperts | None
) -> None:
    """The plan is that of the model on the meta device; the tensors are those of two ranks, between backward pass and update."""
    from scalerl_trainer.models.checkpoint_names import skeleton

    folder, bucket = tmp_path / "model", 20_000
    folder.mkdir()
    sizes = ScratchModel(
        layers=8,
        hidden_size=320,
        attention_heads=4,
        intermediate_size=1024,
        vocabulary_size=300,
        experts=experts,
    )
    write_scratch(folder, sizes, ["0123456789"], seed=0, dtype="bfloat16", context_tokens=64)
    port, pipes = free_port(), []
    given = {
        "world": 2,
        "port": port,
        "folder": str(folder),
        "stage": stage,
        "dtype": dtype,
        "bucket": bucket,
    }
    for rank in range(2):
        ours, theirs = multiprocessing.Pipe()
        processes.run("counters_worker.py", COUNTERS=given | {"pipe": theirs, "rank": rank})
        theirs.close()
        pipes.append(ours)
    meta = skeleton(folder)
    assert {parameter.device.type for parameter in meta.parameters()} == {"meta"}
    parameters = sum(parameter.numel() for parameter in meta.parameters())
    size = ModelSize.of_config(json.loads((folder / "config.json").read_text()), parameters)
    assert size is not None
    plan = peak(
        rank_moments(
            size, dtype=dtype, zero_stage=stage, world=2, micro_batch_tokens=64, bucket_elements=bucket
        )
    )
    held = plan.parameters + plan.gradients + plan.optimizer
    for pipe in pipes:
        assert pipe.poll(240)
        assert pipe.recv() == pytest.approx(held, rel=0.1)
