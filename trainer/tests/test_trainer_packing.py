"""Packing is exact: a packed row gives the results of each sequence by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainable_places import trainable_places

from scalerl_trainer.errors import BadBatchError, SequenceTooLongError
from scalerl_trainer.models import LogprobHead, Policy
from scalerl_trainer.models.logits import LogitTransform
from scalerl_trainer.packing import MicroBatch, PackedBatch, Sequence, one_row, pack

VOCABULARY = 31


@st.composite
def shares(draw: st.DrawFn) -> list[Sequence]:
    ids = st.integers(0, VOCABULARY - 1)
    sequences = []
    for _ in range(draw(st.integers(0, 9))):
        prompt = draw(st.lists(ids, min_size=1, max_size=8))
        completion = draw(st.lists(ids, max_size=12))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=len(completion), max_size=len(completion)))
        sequences.append(Sequence(prompt, completion, mask))
    return sequences


@pytest.fixture(scope="module")
def causal_lm() -> object:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def packed_logprobs(policy: Policy, batch: PackedBatch, temperature: float) -> torch.Tensor:
    parts = []
    for micro in batch.micro_batches:
        logprobs_m, _ = policy(
            micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m, temperature
        )
        parts.append((micro.flat_m, logprobs_m))
    whole = torch.zeros(batch.trainable)
    for places, values in parts:
        whole = whole.index_copy(0, places, values)
    return whole


def alone(causal_lm: object, sequences: list[Sequence], temperature: float) -> torch.Tensor:
    found = [torch.zeros(0)]
    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
        logprobs = (causal_lm(ids).logits[0] / temperature).log_softmax(-1)  # type: ignore[operator]
        at = [len(sequence.prompt) + place for place in trainable_places(sequence)]
        found.append(logprobs[[p - 1 for p in at], ids[0, at]])
    return torch.cat(found)


@given(
    sequences=shares(),
    most=st.integers(20, 160),
    shared=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6]),
)
@settings(max_examples=40, deadline=None)
def test_packed_logprobs_and_gradients_match_single_sequences(
    causal_lm: object, sequences: list[Sequence], most: int, shared: bool, temperature: float
) -> None:
    policy = Policy(causal_lm, fp32_head=True, chunk_bytes=4 * VOCABULARY * 5)
    batch = pack(sequences, most, shared_rows=shared)
    packed, expected = packed_logprobs(policy, batch, temperature), alone(causal_lm, sequences, temperature)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)
    if batch.trainable:
        direction = torch.linspace(-1, 1, batch.trainable)
        parameters = list(policy.parameters())
        ours = torch.autograd.grad((packed * direction).sum(), parameters)
        theirs = torch.autograd.grad((expected * direction).sum(), parameters)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@given(sequences=shares(), most=st.integers(20, 160), shared=st.booleans())
@settings(max_examples=100, deadline=None)
def test_pack_predicts_each_trainable_token_once_within_limit(
    sequences: list[Sequence], most: int, shared: bool
) -> None:
    batch = pack(sequences, most, shared_rows=shared)
    expected = [s.completion[p] for s in sequences for p in trainable_places(s)]
    target: list[int] = [-1] * batch.trainable
    seen = 0
    for micro in batch.micro_batches:
        b, t = micro.input_ids_bt.shape
        assert b * t <= most
        assert b == 1 or not shared
        assert int(micro.position_ids_bt.max()) < t
        for place, token in zip(micro.flat_m.tolist(), micro.target_m.tolist(), strict=True):
            assert target[place] == -1
            target[place] = token
        seen += micro.input_ids_bt.numel()
    assert target == expected
    assert batch.trainable_s.tolist() == [len(trainable_places(s)) for s in sequences]
    assert seen == batch.tokens + batch.padding


def token_by_token(
    rows: list[list[int]], sequences: list[Sequence], one_row: bool
) -> dict[str, list[int] | list[list[int]]]:
    """A micro-batch of these rows, by a loop over tokens."""
    places = [trainable_places(s) for s in sequences]
    firsts = [sum(map(len, places[:index])) for index in range(len(sequences))]
    lengths = [
        s.tokens - 1 if one_row else len(s.prompt) + p[-1] if p else 0
        for s, p in zip(sequences, places, strict=True)
    ]
    width = max(sum(lengths[index] for index in row) for row in rows)
    found: dict[str, list[Any]] = {name: [] for name in MicroBatch.__slots__[:6]}
    for number, row in enumerate(rows):
        ids: list[int] = []
        positions: list[int] = []
        for index in row:
            sequence = sequences[index]
            for nth, place in enumerate(places[index]):
                found["predict_at_m"].append(number * width + len(ids) + len(sequence.prompt) - 1 + place)
                found["target_m"].append(int(sequence.completion[place]))
                found["flat_m"].append(firsts[index] + nth)
                found["sequence_m"].append(index)
            ids += [*sequence.prompt, *sequence.completion][: lengths[index]]
            positions += range(lengths[index])
        found["input_ids_bt"].append(ids + [0] * (width - len(ids)))
        found["position_ids_bt"].append([*positions, *range(len(ids), width)])
    return found


@given(sequences=shares(), most=st.integers(20, 160), shared=st.booleans(), arrays=st.booleans())
@settings(max_examples=200, deadline=None)
def test_pack_equals_a_loop_over_tokens(
    sequences: list[Sequence], most: int, shared: bool, arrays: bool
) -> None:
    given_ones = sequences
    if arrays:
        given_ones = [
            Sequence(
                np.array(s.prompt, np.int32),
                np.array(s.completion, np.int32),
                None if s.trainable is None else np.array(s.trainable, np.bool_),
            )
            for s in sequences
        ]
    micro_batches = [(micro, False) for micro in pack(given_ones, most, shared_rows=shared).micro_batches]
    if sequences:
        micro_batches.append((one_row(given_ones), True))
    for micro, single in micro_batches:
        rows: list[list[int]] = [[] for _ in micro.input_ids_bt]
        if single:
            rows = [list(range(len(sequences)))]
        else:
            width = micro.input_ids_bt.shape[1]
            for place, index in zip(micro.predict_at_m.tolist(), micro.sequence_m.tolist(), strict=True):
                if index not in rows[place // width]:
                    rows[place // width].append(index)
        for name, expected in token_by_token(rows, sequences, single).items():
            tensor = getattr(micro, name)
            assert tensor.dtype == torch.int64
            assert tensor.tolist() == expected, name


def test_pack_first_fit_decreasing() -> None:
    # Lengths without the last token: 6, 5, 4, 3, 2 into rows of 10: [6, 4], [5, 3, 2].
    batch = pack([Sequence([1], [2] * n) for n in (2, 4, 6, 5, 3)], 10, shared_rows=True)
    assert [m.input_ids_bt.shape[1] for m in batch.micro_batches] == [10, 10]
    assert batch.padding == 0


def test_one_row_keeps_the_order() -> None:
    micro = one_row([Sequence([1], [2]), Sequence([3, 4], [5, 6])])
    assert micro.input_ids_bt.tolist() == [[1, 3, 4, 5]]
    assert micro.position_ids_bt.tolist() == [[0, 0, 1, 2]]
    assert (micro.predict_at_m.tolist(), micro.target_m.tolist()) == ([0, 2, 3], [2, 5, 6])


def test_pack_errors() -> None:
    with pytest.raises(SequenceTooLongError, match="sequence 1 has 5 tokens, but a micro-batch holds 4"):
        pack([Sequence([1], [2]), Sequence([1, 2], [3, 4, 5])], 4, shared_rows=True)
    with pytest.raises(BadBatchError, match="at least one prompt token"):
        Sequence([], [1])
    with pytest.raises(BadBatchError, match="completion of 2 tokens has a mask of 1"):
        Sequence([1], [1, 2], [True])
    with pytest.raises(ValueError, match="must be positive"):
        pack([], 0, shared_rows=False)


def test_forced_tokens_have_no_gradient() -> None:
    """Changing what a forced token is changes later log-probabilities, but has no gradient of its own."""
    hidden = torch.randn(4, 8, requires_grad=True)
    head = LogprobHead(torch.nn.Linear(8, 11, bias=False), fp32=True)
    batch = pack([Sequence([1], [2, 3, 4, 5], [True, False, False, True])], 8, shared_rows=True)
    micro = batch.micro_batches[0]
    logprobs_m, _ = head(hidden.index_select(0, micro.predict_at_m), micro.target_m, 1.0, False)
    logprobs_m.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum(1).gt(0).tolist() == [True, False, False, True]
    assert micro.target_m.tolist() == [2, 5]


class TestHead:
    @pytest.mark.parametrize("chunk", [1, 3, 100])
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_head_is_invariant_to_chunk_size(self, chunk: int, temperature: float) -> None:
        torch.manual_seed(1)
        linear = torch.nn.Linear(8, 13, bias=False)
        hidden = torch.randn(7, 8, requires_grad=True)
        target, direction = torch.randint(0, 13, (7,)), torch.randn(7)
        head = LogprobHead(linear, fp32=True, chunk_bytes=4 * 13 * chunk)
        got, entropy = head(hidden, target, temperature, True)
        full = (linear(hidden) / temperature).log_softmax(-1)
        torch.testing.assert_close(got, full.gather(1, target[:, None])[:, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad((got * direction).sum(), [hidden, linear.weight])
        expected = torch.autograd.grad(
            (full.gather(1, target[:, None])[:, 0] * direction).sum(), [hidden, linear.weight]
        )
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(
        "transform",
        [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(cap=3.0), LogitTransform(4.0, 3.0)],
    )
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_head_scale_cap_and_bias(self, bias: bool, transform: LogitTransform, temperature: float) -> None:
        """Values, entropies and gradients are those of autograd through the formula, with logits far beyond the cap."""
        torch.manual_seed(4)
        linear = torch.nn.Linear(8, 13, bias=bias).double()
        hidden = (6 * torch.randn(7, 8, dtype=torch.float64)).requires_grad_()
        target, direction = torch.randint(0, 13, (7,)), torch.randn(7)
        logits = linear(hidden) * transform.scale
        if transform.cap is not None:
            assert logits.abs().max() > 0.9 * transform.cap
            logits = transform.cap * torch.tanh(logits / transform.cap)
        full = (logits / temperature).log_softmax(-1)
        expected = full.gather(1, target[:, None])[:, 0]
        leaves = [hidden, *linear.parameters()]
        theirs = torch.autograd.grad((expected * direction).sum(), leaves)
        single = torch.nn.Linear(8, 13, bias=bias)
        single.load_state_dict(linear.state_dict())
        states = hidden.detach().float().requires_grad_()
        head = LogprobHead(single, fp32=True, chunk_bytes=4 * 13 * 3, transform=transform)
        got, entropy = head(states, target, temperature, True)
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1).float(), rtol=1e-4, atol=1e-5)
        ours = torch.autograd.grad((got * direction).sum(), [states, *single.parameters()])
        assert len(ours) == (3 if bias else 2)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)

    def test_head_float32_logits_are_more_accurate(self) -> None:
        torch.manual_seed(2)
        linear = torch.nn.Linear(64, 500, bias=False).bfloat16()
        hidden = (4 * torch.randn(50, 64)).bfloat16()
        target = torch.randint(0, 500, (50,))
        exact = (
            (hidden.double() @ linear.weight.detach().double().t())
            .log_softmax(-1)
            .gather(1, target[:, None])[:, 0]
        )
        errors = {}
        for fp32 in (True, False):
            got, _ = LogprobHead(linear, fp32=fp32)(hidden, target, 1.0, False)
            assert got.dtype == torch.float32
            errors[fp32] = float((got.detach() - exact).abs().max())
        assert errors[True] < 1e-5
        assert errors[False] > 1e-3


def test_pack_single_sequence_rows_by_length() -> None:
    batch = pack([Sequence([1], [2] * n) for n in (2, 4, 9, 4, 8)], 20, shared_rows=False)
    assert [tuple(m.input_ids_bt.shape) for m in batch.micro_batches] == [(2, 9), (3, 4)]
    assert batch.padding == 1 + 2
    # Positions only count up: the kernel sees no packing and needs no mask.
    assert all((m.position_ids_bt.diff(dim=1) == 1).all() for m in batch.micro_batches)
