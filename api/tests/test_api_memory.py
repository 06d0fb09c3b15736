from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalerl_api.load import load_run
from scalerl_api.memory.containers import container_bytes, directory_bytes
from scalerl_api.memory.limits import TooLittle, device_memory_problem, trainer_advice
from scalerl_api.memory.model_size import Adapters, ModelSize
from scalerl_api.memory.roles import (
    checkpoint_copy,
    host_memory,
    offloaded_bytes,
    server_memory,
    trainer_rank_bytes,
)
from scalerl_api.memory.trainer_rank import (
    RankMemory,
    peak,
    rank_moments,
    stage_plan,
    trained_parameters,
    trainer_rank_memory,
)
from scalerl_api.spec import RunSpec, ScratchModel
from scalerl_api.spec_warnings import warnings_of

SIZE = ModelSize(parameters=4000, hidden_size=8, layers=2, intermediate_size=16, vocabulary_size=64)


def spec(**sections: dict[str, Any]) -> RunSpec:
    run: dict[str, Any] = {
        "model": {"scratch": {}, "contextTokens": 64},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}},
        "recipe": {"maxCompletionTokens": 16},
        "trainer": {"microBatchTokens": 64},
        "budget": {"maxSteps": 3},
    }
    return RunSpec.model_validate(run | sections)


def shares(stage: int, world: int, dtype: Any = "bfloat16") -> tuple[int, int, int]:
    got = peak(rank_moments(SIZE, dtype=dtype, zero_stage=stage, world=world, micro_batch_tokens=64))
    return got.parameters, got.gradients, got.optimizer


def test_stages_divide_what_they_partition() -> None:
    count = SIZE.parameters
    assert shares(0, 4, "float32") == (4 * count, 4 * count, 8 * count)
    # A master partition under ZeRO.
    assert shares(1, 4, "float32") == (4 * count, 4 * count, 3 * count)
    assert shares(1, 4) == (2 * count, 4 * count, 3 * count)
    assert shares(2, 4) == (2 * count, count, 3 * count)
    assert shares(3, 4) == (count // 2, count, 3 * count)
    third = peak(rank_moments(SIZE, dtype="bfloat16", zero_stage=3, world=4, micro_batch_tokens=64))
    assert third.gathered == 2 * count, "all of a small model is kept"


def test_recomputed_activations_cost_less_with_many_layers() -> None:
    deep = ModelSize(parameters=1, hidden_size=8, layers=40, intermediate_size=16, vocabulary_size=64)
    kept, again = (
        peak(
            rank_moments(
                deep,
                dtype="float32",
                zero_stage=1,
                world=1,
                micro_batch_tokens=10,
                activation_checkpointing=flag,
            )
        ).activations
        for flag in (False, True)
    )
    layer = 8 * 8 + 4 * 8 + 4 * 16 - 16
    # After the layers, six of the hidden size; in the backward pass of one, gradients of its values.
    assert (kept, again) == (10 * (40 * layer + 6 * 8) * 4, 10 * (40 * 8 + layer + 2 * 16 + 3 * 8) * 4)


@pytest.mark.parametrize(("stage", "world"), [(4, 1), (-1, 1), (1, 0)])
def test_unknown_names_are_refused(stage: int, world: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        peak(rank_moments(SIZE, dtype="float32", zero_stage=stage, world=world, micro_batch_tokens=1))


def test_host_memory_of_all_roles() -> None:
    run = spec(trainer={"replicas": 2, "microBatchTokens": 64}, generator={"replicas": 3, "kvCache": "1Mi"})
    assert host_memory(SIZE, run) == {
        "generator": 3 * (2 * SIZE.parameters + 2**20),
        # With the copies of their states that a checkpoint is written from.
        "trainer": 2 * trainer_rank_memory(SIZE, run).total + 12 * SIZE.parameters,
    }
    assert trainer_rank_memory(SIZE, run).optimizer == 12 * SIZE.parameters // 2


def test_host_memory_on_accelerators() -> None:
    run = spec(trainer={"devices": 1, "microBatchTokens": 64}, generator={"devices": 4})
    assert host_memory(SIZE, run) == {"trainer": 12 * SIZE.parameters}, "the copy of its state"
    assert server_memory(SIZE, run) == 2 * SIZE.parameters // 4


@pytest.mark.parametrize(("rank", "slots_rank"), [(1, 1), (2, 8), (64, 64), (257, 320)])
def test_servers_with_versions_of_adapters(rank: int, slots_rank: int) -> None:
    lora = {"rank": rank, "publish": "Adapter", "inFlight": "FinishOnOwn"}
    recipe = {"maxCompletionTokens": 16, "offPolicy": {"pipeline": {"maxStalenessSteps": 3}}}
    generator = {"devices": 4}
    run = spec(trainer={"devices": 1, "lora": lora}, generator=generator, recipe=recipe)
    layer = 4 * (8 + 8) + 3 * (8 + 16)
    assert server_memory(SIZE, run) == 2 * (SIZE.parameters + 5 * 2 * slots_rank * layer) // 4
    lora |= {"inFlight": "Continue"}
    run = spec(trainer={"devices": 1, "lora": lora}, generator=generator, recipe=recipe)
    assert server_memory(SIZE, run) == 2 * SIZE.parameters // 4


@pytest.mark.parametrize(("dtype", "bytes_a_weight"), [("bfloat16", 14), ("float32", 16)])
def test_checkpoints_have_the_proximal_policy(dtype: str, bytes_a_weight: int) -> None:
    """Two updates share sampled weights."""
    model = {"scratch": {}, "contextTokens": 64, "dtype": dtype}
    recipe = {"maxCompletionTokens": 16, "preset": "grpo", "correction": {"truncated": {}}}
    run = spec(model=model, recipe=recipe)
    assert run.recipe.proximal_updates > 0
    assert checkpoint_copy(SIZE, run) == bytes_a_weight * SIZE.parameters
    without = spec(model=model, recipe={"maxCompletionTokens": 16, "preset": "grpo"})
    assert directory_bytes("trainer", SIZE, run) - directory_bytes("trainer", SIZE, without) == pytest.approx(
        1.1 * (run.checkpoint.keep + 3) * (bytes_a_weight - 12) * SIZE.parameters, abs=2
    )


def test_advice_for_cpus_counts_the_copy_of_the_state() -> None:
    run = spec()
    recomputed = spec(trainer={"microBatchTokens": 64, "activationCheckpointing": True})
    need = trainer_rank_bytes(SIZE, recomputed)
    assert need == trainer_rank_memory(SIZE, recomputed).total + 12 * SIZE.parameters
    first = "trainer.activationCheckpointing: true would fit"
    assert trainer_advice(SIZE, run, need).startswith(first)
    assert not trainer_advice(SIZE, run, need - 1).startswith(first)


def test_adapters_of_heads_that_are_wider_than_the_model() -> None:
    """Qwen3 0.6B: 16 heads of 128 at a hidden size of 1,024, 8 of keys and of values."""
    config = {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    size = ModelSize.of_config(config | heads, 596_049_920)
    assert size is not None
    layer = 2 * (1024 + 2048) + 2 * (1024 + 1024) + 3 * (1024 + 3072)
    assert size.adapter_parameters(Adapters(8)) == 28 * 8 * layer
    plain = ModelSize.of_config(config | {"num_attention_heads": 16}, 596_049_920)
    assert plain is not None
    assert plain.adapter_parameters(Adapters(8)) == 28 * 8 * (8 * 1024 + 3 * (1024 + 3072))


@pytest.mark.parametrize("tokens", [64, 65536])
def test_buffers_of_a_publish_are_beside_activations(tokens: int) -> None:
    """They are kept, and a publish is beside the next step's forward and backward passes."""

    def buckets(publish_bytes: int) -> int:
        return peak(
            rank_moments(
                QWEN3_8B,
                dtype="bfloat16",
                zero_stage=2,
                world=8,
                micro_batch_tokens=tokens,
                publish_bytes=publish_bytes,
                accelerator=True,
            )
        ).buckets

    # A bucket has at least the embedding.
    assert buckets(16 << 20) - buckets(0) == 2 * 2 * 151936 * 4096
    assert buckets(4 << 30) - buckets(0) == 2 * (4 << 30)


def test_ranks_of_all_nodes_divide_the_optimizer_state() -> None:
    run = spec(trainer={"replicas": 2, "devices": 4, "microBatchTokens": 64}, generator={"devices": 1})
    assert trainer_rank_memory(SIZE, run).optimizer == 12 * SIZE.parameters // 8


def test_kl_reference_has_parameters_alone() -> None:
    run = {"zeroStage": 3, "replicas": 2, "microBatchTokens": 64}
    without = spec(trainer=run)
    penalty = {"maxCompletionTokens": 16, "kl": {"penalty": {"coefficient": "0.04"}}}
    memory, more = (trainer_rank_memory(SIZE, s) for s in (without, spec(trainer=run, recipe=penalty)))
    # A share of the weights: what is gathered of them for use is free again before the policy's.
    assert (memory.reference, more.reference) == (0, 2 * SIZE.parameters // 2)
    assert more.total == memory.total + more.reference
    assert "reference" in str(more)
    assert "reference" not in str(memory)


def test_untied_head_counts_twice() -> None:
    tied, own = (
        ModelSize.of_scratch(
            ScratchModel(vocabulary_size=100, hidden_size=32, tied_embeddings=flag)
        ).parameters
        for flag in (True, False)
    )
    assert own - tied == 100 * 32


def test_sizes_are_read_from_a_config() -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 64}
    assert ModelSize.of_config(config, 4000) == SIZE
    assert ModelSize.of_config({"text_config": config, "vision_config": {}}, 4000) == SIZE
    assert ModelSize.of_config(config | {"intermediate_size": None}, 1) == ModelSize(1, 8, 2, 32, 64)
    assert ModelSize.of_config({"hidden_size": 8}, 1) is None


def test_breakdown_names_every_part() -> None:
    got = peak(rank_moments(SIZE, dtype="float32", zero_stage=1, world=1, micro_batch_tokens=2**20))
    assert (
        str(got)
        == f"{got.total / 2**30:.1f} GiB (parameters 0.0, gradients 0.0, optimizer 0.0, activations 1.3, head 0.2, buckets 0.0, allowance 0.0)"
    )


QWEN3_8B = ModelSize(8_190_735_360, 4096, 36, 12288, 151936)
H100 = 81_559 << 20


def on_gpus(memory: str | None, **trainer: Any) -> RunSpec:
    """One node of four GPUs that trains, generators of one."""
    given = {"devices": 4, "microBatchTokens": 8192, "deviceMemory": memory} | trainer
    return spec(trainer=given, generator={"devices": 1, "deviceMemory": memory})


def test_8b_on_four_gpus_of_80_gb_is_refused_at_stage_1() -> None:
    """2 bytes of weights, 4 of gradients and 12 / 4 of optimizer state a parameter are 68.7 GiB before anything else."""
    run = on_gpus(None, activationCheckpointing=True)
    rank = trainer_rank_memory(QWEN3_8B, run)
    assert (rank.parameters + rank.gradients + rank.optimizer) / 2**30 == pytest.approx(68.7, abs=0.1)
    problem = device_memory_problem(QWEN3_8B, run, H100, H100)
    assert problem is not None
    assert problem.field == "trainer"
    assert problem.problem.startswith(
        f"one trainer rank needs about {rank.total / 2**30:.1f} GiB (parameters 15.3,"
    )
    assert problem.problem.endswith("there are 79.6 on its GPU")
    assert problem.advice.startswith("trainer.zeroStage: 2 would fit")


@pytest.mark.parametrize(
    "trainer",
    [{"zeroStage": 2}, {"zeroStage": 3}, {"replicas": 2}],
    ids=["stage 2", "stage 3", "eight ranks"],
)
def test_8b_fits_with_higher_stage_or_more_ranks(trainer: dict[str, Any]) -> None:
    run = on_gpus(None, activationCheckpointing=True, **trainer)
    assert device_memory_problem(QWEN3_8B, run, H100, H100) is None


def test_advice_is_the_first_change_that_fits() -> None:
    without = on_gpus(None, zeroStage=2)  # 36 layers of activations
    problem = device_memory_problem(QWEN3_8B, without, H100, H100)
    assert problem is not None
    assert problem.advice.startswith("trainer.activationCheckpointing: true would fit")
    smaller = device_memory_problem(QWEN3_8B, without, 4 << 30, H100)
    assert smaller is not None
    assert "would fit" not in smaller.advice


def test_generator_whose_weights_do_not_fit_is_named() -> None:
    run = on_gpus(None, activationCheckpointing=True, zeroStage=3)
    problem = device_memory_problem(QWEN3_8B, run, H100, 16 << 30)
    assert problem is not None
    assert problem.field == "generator"
    assert "weights is 15.3 GiB a GPU, generator.memoryFraction (0.9) of 16.0 GiB is less" in problem.problem


def test_given_bucket_has_to_fit_beside_vllm() -> None:
    def problem(**weights: str) -> TooLittle | None:
        run = spec(
            model={"path": "/m", "dtype": "bfloat16", "contextTokens": 8192},
            generator={"devices": 1},
            trainer={"devices": 4, "zeroStage": 3, "activationCheckpointing": True, "microBatchTokens": 8192},
            weightSync=weights,
        )
        return device_memory_problem(QWEN3_8B, run, H100, 24 << 30)

    # A tenth of 24 GiB, for four buckets.
    assert problem() is None
    assert problem(bucket="600Mi") is None
    assert problem(bucket="2Gi", backend="Gloo") is None
    found = problem(bucket="700Mi")
    assert found is not None
    assert found.field == "weightSync.bucket"
    assert "up to 4 buckets of a publish on its GPU, 2.7 GiB" in found.problem
    assert found.problem.endswith("(0.9) of 24.0 GiB leaves 2.4")


def test_bucket_of_nccl_is_counted_on_the_devices_alone() -> None:
    def run(backend: str) -> RunSpec:
        return spec(
            model={"path": "/m", "dtype": "bfloat16", "contextTokens": 8192},
            generator={"devices": 1, "deviceMemory": "80Gi"},
            trainer={"devices": 4, "zeroStage": 2, "microBatchTokens": 8192},
            weightSync={"backend": backend},
        )

    gloo, nccl = run("Gloo"), run("NCCL")
    # Of gloo the embedding is larger than a bucket.
    more = trainer_rank_memory(QWEN3_8B, nccl).buckets - trainer_rank_memory(QWEN3_8B, gloo).buckets
    assert more == max(0, 2 * ((512 << 20) - 2 * 151936 * 4096))
    small = ModelSize(parameters=10**8, hidden_size=64, layers=2, intermediate_size=128, vocabulary_size=1000)
    more = trainer_rank_memory(small, nccl).buckets - trainer_rank_memory(small, gloo).buckets
    assert more == 2 * (2 * 10**8 - 2 * small.largest_parameter), "not more than the model"
    for container in ("server", "trainer"):
        less = container_bytes(container, QWEN3_8B, gloo) - container_bytes(container, QWEN3_8B, nccl)
        assert less == pytest.approx(1.1 * 2 * (16 << 20), abs=1)


def test_unknown_device_memory_is_no_problem() -> None:
    assert device_memory_problem(QWEN3_8B, on_gpus(None), None, None) is None


@pytest.mark.parametrize(
    ("size", "stage", "world", "expected"),
    [
        # GiB, rounded, of an independent count: 8,192 tokens with activation checkpointing, without libraries, fragmentation and publishes.
        (ModelSize(1_543_714_304, 1536, 28, 8960, 151936), 1, 8, 15),
        (QWEN3_8B, 1, 8, 63),
        (ModelSize(14_768_307_200, 5120, 40, 17408, 151936), 1, 8, 116),
        (ModelSize(1_543_714_304, 1536, 28, 8960, 151936), 2, 8, 9),
        (QWEN3_8B, 2, 8, 40),
        (ModelSize(14_768_307_200, 5120, 40, 17408, 151936), 2, 8, 70),
        (QWEN3_8B, 3, 8, 30),
        (QWEN3_8B, 3, 16, 22),
        (ModelSize(14_768_307_200, 5120, 40, 17408, 151936), 3, 8, 50),
    ],
)
def test_estimates_of_large_models(size: ModelSize, stage: int, world: int, expected: int) -> None:
    got = peak(
        rank_moments(
            size,
            dtype="bfloat16",
            zero_stage=stage,
            world=world,
            micro_batch_tokens=8192,
            activation_checkpointing=True,
        )
    )
    assert got.total / 2**30 == pytest.approx(expected, abs=0.1 * expected + 0.5)


QWEN_0_5B, QWEN_1_5B, LLAMA_8B, MIXTURE = (
    {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    for hidden, layers, heads, groups, wide, vocabulary, tied in (
        (896, 24, 14, 2, 4864, 151936, True),
        (1536, 28, 12, 2, 8960, 151936, True),
        (4096, 4, 32, 8, 14336, 128256, False),
        (1024, 8, 16, 4, 3584, 32000, False),
    )
)
CHECKPOINTED = {"activation_checkpointing": True}
FSDP2: dict[str, Any] = {"engine": "FSDP2", "zero_stage": 3}


@pytest.mark.parametrize(
    ("config", "parameters", "tokens", "accumulates", "settings", "measured"),
    [
        (QWEN_0_5B, 494_032_768, 14_336, False, FSDP2 | CHECKPOINTED, 10_250_530_304),
        (QWEN_0_5B, 494_032_768, 14_336, True, {"zero_stage": 1} | CHECKPOINTED, 12_927_098_368),
        (QWEN_0_5B, 494_032_768, 14_336, True, {"zero_stage": 3} | CHECKPOINTED, 13_124_536_832),
        (
            QWEN_0_5B,
            494_032_768,
            14_336,
            True,
            FSDP2 | CHECKPOINTED | {"offload": "OptimizerAndParameters"},
            4_307_498_496,
        ),
        (
            QWEN_0_5B,
            494_032_768,
            14_336,
            True,
            {"zero_stage": 3, "offload": "Optimizer"} | CHECKPOINTED,
            5_220_476_416,
        ),
        (QWEN_1_5B, 1_543_714_304, 14_336, True, FSDP2 | {"adapters": Adapters(8)}, 46_097_980_416),
        (MIXTURE | {"num_experts_per_tok": 2}, 791_200_000, 7_168, False, FSDP2, 16_146_008_064),
        (QWEN_0_5B, 494_032_768, 16_384, False, {"zero_stage": 1}, 32_951_516_672),
        (QWEN_1_5B, 1_543_714_304, 16_384, False, {"zero_stage": 1}, 73_088_035_840),
        (LLAMA_8B, 1_923_125_248, 8_192, False, {"zero_stage": 1}, 38_697_452_032),
        (LLAMA_8B, 1_923_125_248, 8_192, False, {"zero_stage": 1, "fp32_head": False}, 39_234_204_672),
    ],
)
def test_tensors_of_an_h200(
    config: dict[str, Any],
    parameters: int,
    tokens: int,
    accumulates: bool,
    settings: dict[str, Any],
    measured: int,
) -> None:
    """What torch allocated at most in steps of one rank (``benchmarks/gpu_check.py``): in each the head was the largest moment. Steps of
    one micro-batch have no gradients then, unless these are a buffer."""
    size = ModelSize.of_config(config, parameters)
    assert size is not None
    moments = rank_moments(
        size, dtype="bfloat16", world=1, micro_batch_tokens=tokens, accelerator=True, **settings
    )
    head = moments["head"]
    assert head.total == max(one.total for one in moments.values())
    tensors = head.total - head.allowance - (0 if accumulates else head.gradients)
    assert tensors == pytest.approx(measured, rel=0.03 if size.mlp_values else 0.01)
    assert tensors + head.allowance > measured


def moments_of(world: int, tokens: int = 8192, **settings: Any) -> dict[str, RankMemory]:
    return rank_moments(
        QWEN3_8B, dtype="bfloat16", world=world, micro_batch_tokens=tokens, accelerator=True, **settings
    )


def test_fsdp2_fetches_the_last_layer_before_the_head() -> None:
    """Of one rank, whose parameters need no collective, it is copied when it is used."""
    alone, pair = (moments_of(world, **FSDP2)["head"].gathered for world in (1, 2))
    assert pair - alone == 2 * QWEN3_8B.layer


def test_stage_1_casts_one_gradient_at_a_time() -> None:
    first, second = (moments_of(2, zero_stage=stage) for stage in (1, 2))
    assert first["layer"].buckets == 6 * QWEN3_8B.largest_in_layer
    assert first["embedding"].buckets == 6 * 151936 * 4096
    float32 = rank_moments(QWEN3_8B, dtype="float32", zero_stage=1, world=2, micro_batch_tokens=64)
    assert float32["layer"].buckets == 4 * QWEN3_8B.largest_in_layer
    assert second["layer"].buckets == 10 * QWEN3_8B.largest_in_layer + 7 * 50_000_000


def test_logits_of_a_chunk_of_the_kernels_are_counted() -> None:
    """Of 1.6 GiB, which without kernels would be two chunks."""
    size, tokens = ModelSize(494_032_768, 896, 24, 4864, 151936), 2800
    moments = rank_moments(
        size, dtype="bfloat16", zero_stage=1, world=1, micro_batch_tokens=tokens, accelerator=True
    )
    assert moments["head"].head == (6 * tokens + 4 * 896) * 151936, "and the weight's gradient"


ON_TWO_GPUS = load_run(Path(__file__).parents[2] / "examples/lora-hub/run.yaml").spec


def test_8b_with_adapters_fits_on_one_gpu_of_80_gb() -> None:
    rank = trainer_rank_memory(QWEN3_8B, ON_TWO_GPUS)
    assert device_memory_problem(QWEN3_8B, ON_TWO_GPUS, H100, H100) is None
    trained = trained_parameters(QWEN3_8B, ON_TWO_GPUS)
    assert 0.009 < trained / QWEN3_8B.parameters < 0.015
    assert rank.optimizer == 12 * trained
    assert rank.gradients == 4 * trained
    assert rank.parameters == 2 * (QWEN3_8B.parameters + trained)
    whole = ON_TWO_GPUS.model_copy(update={"trainer": ON_TWO_GPUS.trainer.model_copy(update={"lora": None})})
    assert trainer_rank_memory(QWEN3_8B, whole).total > 140 * 2**30


def test_reference_of_adapters_is_no_second_model() -> None:
    kl = {"maxCompletionTokens": 16, "kl": {"penalty": {"coefficient": "0.1"}}}
    adapters: dict[str, Any] = {"trainer": {"microBatchTokens": 64, "lora": {}}}
    whole, alone, warm = (
        trainer_rank_memory(SIZE, spec(recipe=kl, **sections))
        for sections in ({}, adapters, adapters | {"warmStart": {"steps": 1, "batchSize": 1}})
    )
    assert (whole.reference > 0, alone.reference, warm.reference > 0) == (True, 0, True)


def test_plan_of_70b_on_eight_gpus() -> None:
    """The example of docs/models.md: 12 bytes of optimizer state and 4 of gradients a weight are 131 GiB a rank of eight."""
    size = ModelSize(70_553_706_496, 8192, 80, 28672, 128256)
    run = on_gpus("80Gi", devices=8, activationCheckpointing=True)
    plan = stage_plan(size, run)
    assert list(plan) == [1, 2, 3], "without ZeRO, bfloat16 has no master weights"
    assert [round(rank.total / 2**30) for rank in plan.values()] == sorted(
        (round(rank.total / 2**30) for rank in plan.values()), reverse=True
    )
    third = plan[3]
    assert (third.gradients + third.optimizer) / 2**30 == pytest.approx(131.4, abs=0.1)
    assert third.total > 80 * 2**30
    advice = trainer_advice(size, run, 80 * 2**30)
    assert advice.startswith(
        "trainer.zeroStage: 3, trainer.activationCheckpointing: true, trainer.offload: Optimizer would fit with "
    )
    assert "199 GiB more of host memory a rank" in advice
    assert trainer_advice(size, run, 40 * 2**30).startswith(
        "trainer.zeroStage: 3, trainer.activationCheckpointing: true, trainer.offload: OptimizerAndParameters would fit with "
    )
    many = stage_plan(size, on_gpus("80Gi", devices=8, replicas=4, activationCheckpointing=True))
    assert [stage for stage, rank in many.items() if rank.total <= 80 * 2**30] == [3]


def test_fsdp2_has_no_partition_beside_the_master_weights() -> None:
    run = {"zeroStage": 3, "replicas": 2, "microBatchTokens": 64}
    ((stage, rank),) = stage_plan(SIZE, spec(trainer=run | {"engine": "FSDP2"})).items()
    other = stage_plan(SIZE, spec(trainer=run))[3]
    assert (stage, rank.parameters, other.parameters) == (3, 0, SIZE.parameters)
    assert (rank.gradients, rank.optimizer) == (other.gradients, other.optimizer)
    adapters = stage_plan(SIZE, spec(trainer=run | {"engine": "FSDP2", "lora": {}}))[3]
    assert adapters.parameters == SIZE.parameters, "frozen ones are in the model's dtype"


def offloaded(kind: str, engine: str = "DeepSpeed", **trainer: Any) -> RunSpec:
    return on_gpus("80Gi", devices=2, zeroStage=3, offload=kind, engine=engine, **trainer)


class TestOffload:
    def test_what_moves_leaves_the_device(self) -> None:
        whole, one, both, fsdp = (
            trainer_rank_memory(QWEN3_8B, offloaded(*kind))
            for kind in (
                ("None",),
                ("Optimizer",),
                ("OptimizerAndParameters",),
                ("OptimizerAndParameters", "FSDP2"),
            )
        )
        assert (one.parameters, one.gradients, one.optimizer) == (whole.parameters, 0, 0)
        for rank in (both, fsdp):
            assert (rank.parameters, rank.gradients, rank.optimizer) == (0, 0, 0)
            assert rank.gathered > 0
        assert both.total < one.total < whole.total
        assert list(stage_plan(QWEN3_8B, offloaded("Optimizer"))) == [3]

    def test_bytes_on_the_host(self) -> None:
        """Of 2^21 weights on two ranks: gradients twice, master weights and moments; parameters in bfloat16.

        DeepSpeed has those as single tensors first.
        """
        size = ModelSize(2**21, 8, 2, 16, 64)
        half = 2**20
        assert offloaded_bytes(size, offloaded("None")) == 0
        assert offloaded_bytes(size, offloaded("Optimizer")) == 20 * half
        assert offloaded_bytes(size, offloaded("OptimizerAndParameters")) == 26 * half
        assert offloaded_bytes(size, offloaded("OptimizerAndParameters", "FSDP2")) == 24 * half
        more = ModelSize(2**21 + 2, 8, 2, 16, 64)
        assert offloaded_bytes(more, offloaded("Optimizer")) == 12 * (half + 1) + 2 * 8 * half, "page-locked"

    def test_advice_counts_what_is_offloaded_already(self) -> None:
        size = ModelSize(70_553_706_496, 8192, 80, 28672, 128256)
        one, both = (
            on_gpus("80Gi", devices=8, zeroStage=3, activationCheckpointing=True, offload=kind)
            for kind in ("Optimizer", "OptimizerAndParameters")
        )
        more = round((offloaded_bytes(size, both) - offloaded_bytes(size, one)) / 2**30)
        assert 0 < more < 100
        assert f"would fit with {more} GiB more of host memory a rank" in trainer_advice(
            size, one, 40 * 2**30
        )
        plain = both.model_copy(
            update={"trainer": both.trainer.model_copy(update={"activation_checkpointing": False})}
        )
        assert "activationCheckpointing: true would fit; or" in trainer_advice(size, plain, 40 * 2**30)

    def test_hosts_and_pods_are_asked_for_it(self) -> None:
        plain, moved = offloaded("None"), offloaded("OptimizerAndParameters")
        each = offloaded_bytes(QWEN3_8B, moved)
        assert host_memory(QWEN3_8B, moved)["trainer"] - host_memory(QWEN3_8B, plain)["trainer"] == 2 * each
        requests = [container_bytes("trainer", QWEN3_8B, run) for run in (plain, moved)]
        assert requests[1] - requests[0] == pytest.approx(1.1 * each, abs=2)


def test_plan_of_float32_has_all_stages() -> None:
    run = spec(model={"scratch": {}, "contextTokens": 64, "dtype": "float32"})
    assert list(stage_plan(SIZE, run)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("dtype", "rate", "alpha", "warned"),
    [
        ("bfloat16", "9e-5", 32, True),
        ("bfloat16", "1e-4", 32, False),
        ("bfloat16", "3e-5", 128, False),
        ("float32", "9e-5", 32, False),
        ("float32", "1e-6", 32, True),
    ],
)
def test_learning_rate_that_bfloat16_rounds_away_is_warned_of(
    dtype: str, rate: str, alpha: int, warned: bool
) -> None:
    run = spec(
        model={"scratch": {}, "contextTokens": 64, "dtype": dtype},
        recipe={"maxCompletionTokens": 16, "optimizer": {"learningRate": rate}},
        trainer={"microBatchTokens": 64, "lora": {"rank": 32, "alpha": alpha}},
    )
    found = [one for one in warnings_of(run) if "little for the adapters" in str(one)]
    assert bool(found) == warned


@pytest.mark.parametrize(
    ("trainer", "warned"),
    [
        ({"zeroStage": 3}, True),
        ({"zeroStage": 1}, False),
        ({"zeroStage": 3, "replicas": 2}, False),
        ({"zeroStage": 3, "engine": "FSDP2"}, False),
        ({"zeroStage": 3, "devices": 1, "offload": "Optimizer"}, False),
    ],
)
def test_stage_3_over_one_rank_is_warned_of(trainer: dict[str, Any], warned: bool) -> None:
    run = spec(trainer={"microBatchTokens": 64, **trainer})
    assert any(one.where == "spec.trainer.zeroStage" for one in warnings_of(run)) == warned
