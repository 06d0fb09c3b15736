"""A prompt that is computed once for its completions gives what each gives with a prompt of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from trainable_places import trainable_places

from scalerl_trainer import row_layout
from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import Engine, EngineSettings, TrainBatch, destroy_process_group
from scalerl_trainer.models import Policy
from scalerl_trainer.packing import PackedBatch, RoutedExperts, Sequence, after_prompt, pack

VOCABULARY = 31


def model(kind: str = "llama", window: int = 4) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**sizes, head_dim=8, sliding_window=window, layer_types=layers)
    ).eval()


@st.composite
def groups(draw: st.DrawFn) -> list[Sequence]:
    ids = st.integers(0, VOCABULARY - 1)
    prompts = draw(st.lists(st.lists(ids, min_size=1, max_size=8), min_size=1, max_size=3))
    sequences = []
    for _ in range(draw(st.integers(0, 12))):
        completion = draw(st.lists(ids, max_size=10))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=len(completion), max_size=len(completion)))
        sequences.append(Sequence(draw(st.sampled_from(prompts)), completion, mask))
    return sequences


@pytest.fixture(scope="module", autouse=True)
def always() -> Iterator[None]:
    """Share prompts where it does not pay too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_layout, "PAYS", math.inf)
        yield


def logprobs(policy: Policy, batch: PackedBatch) -> torch.Tensor:
    whole = torch.zeros(batch.trainable)
    for micro in batch.micro_batches:
        inputs = (micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
        values_m, _ = policy(*inputs, 0.7, False, micro.prompts_gp, micro.prompt_b)
        whole = whole.index_copy(0, micro.flat_m, values_m)
    return whole


@given(sequences=groups(), most=st.integers(20, 120))
@settings(max_examples=150, deadline=None)
def test_each_token_has_its_context_within_the_limit(sequences: list[Sequence], most: int) -> None:
    batch = pack(sequences, most, shared_rows=False, shared_prompts=True)
    expected = [
        ([*s.prompt, *s.completion[:place]], s.completion[place], index)
        for index, s in enumerate(sequences)
        for place in trainable_places(s)
    ]
    found: list[Any] = [None] * batch.trainable
    computed = 0
    for micro in batch.micro_batches:
        width = micro.input_ids_bt.shape[1]
        before = 0 if micro.prompts_gp is None else micro.prompts_gp.shape[1]
        # Each row has the keys of its prompt, as a whole row has.
        assert micro.computed + (before * len(micro.input_ids_bt) if before else 0) <= most
        computed += micro.computed
        for at, target, flat, index in zip(
            micro.predict_at_m.tolist(),
            micro.target_m.tolist(),
            micro.flat_m.tolist(),
            micro.sequence_m.tolist(),
            strict=True,
        ):
            row, place = divmod(at, width)
            prompt = [] if micro.prompts_gp is None else micro.prompts_gp[micro.prompt_b[row]].tolist()  # type: ignore[index]
            assert micro.position_ids_bt[row].tolist() == list(range(before, before + width))
            assert found[flat] is None
            found[flat] = (prompt + micro.input_ids_bt[row, : place + 1].tolist(), target, index)
    assert found == expected
    assert computed == batch.tokens + batch.padding
    assert batch.padding >= 0


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@given(sequences=groups(), most=st.integers(20, 120))
@settings(max_examples=15, deadline=None)
def test_logprobs_and_gradients_equal_those_of_whole_rows(
    kind: str, sequences: list[Sequence], most: int
) -> None:
    policy = Policy(model(kind), fp32_head=True)
    shared, whole = (
        logprobs(policy, pack(sequences, most, shared_rows=False, shared_prompts=share))
        for share in (True, False)
    )
    torch.testing.assert_close(shared, whole, rtol=1e-4, atol=1e-5)
    if len(whole):
        direction, parameters = torch.linspace(-1, 1, len(whole)), list(policy.parameters())
        ours, theirs = (
            torch.autograd.grad((each * direction).sum(), parameters, allow_unused=True)
            for each in (shared, whole)
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_prompts_are_shared_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(row_layout, "PAYS", 0.9)
    long, short = [1] * 100, [1] * 4
    for prompt, pays in ((long, True), (short, False)):
        batch = pack([Sequence(prompt, [2] * 50)] * 16, 4096, shared_rows=False, shared_prompts=True)
        assert all((micro.prompts_gp is not None) == pays for micro in batch.micro_batches)
        assert batch.padding == 0
        assert batch.tokens == (99 + 16 * 50 if pays else 16 * (len(prompt) + 49))
    different = [Sequence([n, *long], [2] * 50) for n in range(16)]
    batch = pack(different, 4096, shared_rows=False, shared_prompts=True)
    assert all(micro.prompts_gp is None for micro in batch.micro_batches)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # DeepSpeed reads it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        destroy_process_group()


def step(zero_stage: int, share: bool) -> tuple[Engine, dict[str, torch.Tensor], float]:
    chosen = EngineSettings(
        dtype="float32", zero_stage=zero_stage, warmup_steps=0, learning_rate=1e-2, micro_batch_tokens=96
    )
    engine = Engine(model(), chosen, torch.device("cpu"))
    if not share:
        engine._checks._follows = False
    sequences = [Sequence([1, 2, 3, 4, 5], [6 + n, 7, 8][: 1 + n % 3]) for n in range(12)]
    trained = sum(len(s.completion) for s in sequences)
    batch = TrainBatch(
        sequences,
        torch.full((12,), 1 / trained),
        torch.linspace(-1, 1, 12),
        engine.logprobs(sequences).logprobs_n,
    )
    assert engine.pack(batch).packed.tokens == trained + (4 if share else 12 * 4)
    stats = engine.step(batch, Cispo(5.0))
    assert stats.applied
    return engine, dict(engine._policy.named_parameters()), stats.gradient_norm


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_step_with_shared_prompts_equals_one_without(group: None, zero_stage: int) -> None:
    (_, shared, norm), (_, whole, expected) = step(zero_stage, True), step(zero_stage, False)
    assert norm == pytest.approx(expected, rel=1e-4)
    for name, tensor in whole.items():
        torch.testing.assert_close(shared[name], tensor, rtol=1e-3, atol=1e-4)


def shares(kind: str = "llama", dtype: Any = "float32", window: int = 4, **changes: Any) -> bool:
    settings = {"zero_stage": 1, "micro_batch_tokens": 64} | changes
    chosen = model(kind, window) if isinstance(kind, str) else kind
    return Engine(
        chosen, EngineSettings(dtype=dtype, **settings), torch.device("cpu")
    )._checks.shares_prompts()


def test_a_model_that_differs_after_a_prompt_does_not_share(
    group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert shares()
    assert caplog.messages[-1].endswith("; prompts are computed once")
    assert shares(dtype="bfloat16")
    assert shares("gemma", window=64), "no sequence is longer than the window"
    inherited = Policy._keys_of

    def rolled(self: Policy, prompts_gp: torch.Tensor, prompt_b: torch.Tensor) -> Any:
        return inherited(self, prompts_gp.roll(1, 1), prompt_b)

    def detached(self: Policy, prompts_gp: torch.Tensor, prompt_b: torch.Tensor) -> Any:
        with torch.no_grad():
            return inherited(self, prompts_gp, prompt_b)

    def rolled_beyond(self: Policy, prompts_gp: torch.Tensor, prompt_b: torch.Tensor) -> Any:
        return (rolled if prompts_gp.shape[1] > 20 else inherited)(self, prompts_gp, prompt_b)

    def exhausted(*_: Any) -> Any:
        raise torch.OutOfMemoryError("of a test")

    for wrong in (rolled, detached, lambda *_: {}["keys"]):
        monkeypatch.setattr(Policy, "_keys_of", wrong)
        assert not shares()
    assert "prompts are computed with each completion (KeyError" in caplog.messages[-1]
    monkeypatch.setattr(Policy, "_keys_of", detached)
    assert not shares(dtype="bfloat16")
    monkeypatch.setattr(Policy, "_keys_of", rolled_beyond)
    assert not shares("gemma", window=20)
    monkeypatch.setattr(Policy, "_keys_of", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        shares()


def test_settings_and_configs_under_which_prompts_are_not_shared(group: None) -> None:
    assert not shares(activation_checkpointing=True)
    assert not shares(zero_stage=2)
    assert not shares("gemma", window=54), "a prompt beyond the window leaves no room"
    for rope in (
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ):
        chosen = model("llama" if "factor" in rope else "gemma")
        chosen.config.rope_parameters = rope
        assert not shares(chosen)


def test_recorded_experts_keep_each_prompt_with_its_completion() -> None:
    routed = RoutedExperts(np.arange(3), np.zeros((3, 1, 2), np.uint8))
    for record in (None, routed):
        sequences = [Sequence([1] * 9, [2, 3, n], None, record if n == 5 else None) for n in range(8)]
        batch = pack(sequences, 200, shared_rows=False, shared_prompts=True)
        assert all((micro.prompts_gp is not None) == (record is None) for micro in batch.micro_batches)
        assert batch.routed == (0 if record is None else 3)


def test_a_long_sequence_does_not_decide_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_layout, "PAYS", 0.9)
    alike = [Sequence([1] * 200, [2] * 50)] * 16
    batch = pack([*alike, Sequence([3], [4] * 30000)], 32768, shared_rows=False, shared_prompts=True)
    assert batch.tokens == 199 + 16 * 50 + 30000
    assert [micro.prompts_gp is not None for micro in batch.micro_batches] == [True, False]


def test_after_prompt_keeps_the_order() -> None:
    micro = after_prompt([Sequence([1, 2, 3], [4, 5]), Sequence([1, 2, 3], [6])])
    assert micro.prompts_gp is not None
    assert micro.prompt_b is not None
    assert (micro.prompts_gp.tolist(), micro.prompt_b.tolist()) == ([[1, 2]], [0, 0])
    assert micro.input_ids_bt.tolist() == [[3, 4], [3, 0]]
    assert micro.target_m.tolist() == [4, 5, 6]
