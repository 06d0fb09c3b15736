"""vLLM's verification of drafts on the rows that exist, against its own on padded rows."""

import sys
import warnings
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerl_generator.drafts import vllm_rejection_sampler
from scalerl_generator.drafts.vllm_rejection_sampler import (
    logprobs_of_rows,
    max_drafted,
    patch_rejection_sampler,
    verify_most,
)
from scalerl_generator.server.vllm_cpu_sampler import patch_cpu_sampler

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

VOCABULARY = 50


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # as in the server on CPUs
        from vllm.platforms import current_platform
        from vllm.utils import cpu_triton_utils
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        for owner, name in (
            (RejectionSampler, "forward"),
            (RejectionSampler, "_get_logprobs_tensors"),
            (GPUModelRunner, "_dummy_sampler_run"),
            (cpu_triton_utils, "_expand_kernel_impl"),
        ):
            patch.setattr(owner, name, getattr(owner, name))  # restored at the end
        patch_cpu_sampler()
        # vLLM reads the attributes of all modules, and those of llvmlite's library, if a test imported it, raise.
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
        with warnings.catch_warnings(action="ignore"):
            current_platform.register_triton_kernel_overrides()
        sys.modules.update(hidden)
        yield


def metadata_of(drafts: list[int], seed: int = 0) -> Any:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    generator = torch.Generator().manual_seed(seed)
    rows = [drafted + 1 for drafted in drafts]
    ends = list(accumulate(rows))
    return SpecDecodeMetadata(
        draft_token_ids=torch.randint(VOCABULARY, (sum(drafts),), generator=generator, dtype=torch.int32),
        num_draft_tokens=drafts,
        cu_num_draft_tokens=torch.tensor(list(accumulate(drafts)), dtype=torch.int32),
        cu_num_sampled_tokens=torch.tensor(ends, dtype=torch.int32),
        target_logits_indices=torch.tensor(
            [end - n + i for n, end in zip(rows, ends, strict=True) for i in range(n - 1)], dtype=torch.int64
        ),
        bonus_logits_indices=torch.tensor(ends) - 1,
        logits_indices=torch.arange(ends[-1]),
    )


def sampling(sequences: int, top_k: int | None = None, temperature: float = 1.0) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    ones = torch.ones(sequences)
    return SamplingMetadata(
        temperature=ones * temperature,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None if top_k is None else torch.full((sequences,), top_k, dtype=torch.int32),
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=ones,
        presence_penalties=ones,
        repetition_penalties=ones,
        output_token_ids=[[] for _ in range(sequences)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def verifier() -> Any:
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    return RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))


@pytest.mark.parametrize("drafts", [[3, 0, 2, 0, 1], [16, *[0] * 63], [1] * 5, [4]])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [None, 7])
def test_logprobs_of_rows_equal_vllms_on_padded_rows(
    drafts: list[int], temperature: float, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    sampler, metadata = verifier(), metadata_of(drafts)
    monkeypatch.setattr(vllm_rejection_sampler, "CHUNK_ROWS", 3)
    logits = torch.randn(sum(drafts) + len(drafts), VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[metadata.target_logits_indices, metadata.draft_token_ids.long()] += 5.0  # most drafts are accepted
    asked = sampling(len(drafts), top_k, temperature)
    padded = RejectionSampler._get_logprobs_tensors
    assert padded is not logprobs_of_rows
    found = []
    for compute in (padded, logprobs_of_rows):
        monkeypatch.setattr(RejectionSampler, "_get_logprobs_tensors", compute)
        torch.manual_seed(5)
        output = sampler(metadata, None, logits.clone(), asked)
        found.append(
            RejectionSampler.parse_output(
                output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors
            )
        )
    (tokens, expected), (same_tokens, computed) = found
    assert tokens == same_tokens
    assert any(len(row) > 1 for row in tokens)
    for one, other in zip(expected, computed, strict=True):
        assert torch.equal(torch.tensor(one), torch.tensor(other))


def test_logprobs_of_one_long_draft_among_64_take_80_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    sampler, metadata = verifier(), metadata_of([16, *[0] * 63])
    computed: list[int] = []
    plain = sampler.sampler.compute_logprobs
    sampler.sampler.compute_logprobs = lambda rows: (computed.append(len(rows)), plain(rows))[1]
    logits = torch.randn(80, VOCABULARY)
    sampler(metadata, None, logits.clone(), sampling(64))
    assert sum(computed) == 64 * 17, "vLLM computes only real rows by now: drop the patch"
    computed.clear()
    monkeypatch.setattr(RejectionSampler, "_get_logprobs_tensors", logprobs_of_rows)
    monkeypatch.setattr(vllm_rejection_sampler, "CHUNK_ROWS", 32)
    sampler(metadata, None, logits.clone(), sampling(64))
    assert (sum(computed), max(computed)) == (80, 32)


def test_top_k_without_a_draft_samples_as_without_drafts() -> None:
    """vLLM takes the maximum of no values, and its engine ends."""
    sampler, metadata = verifier(), metadata_of([0, 0, 0])
    logits, asked = torch.randn(3, VOCABULARY), sampling(3, top_k=5)
    with pytest.raises(RuntimeError, match="max"):
        sampler(metadata, None, logits.clone(), asked)
    patch_rejection_sampler()
    patch_rejection_sampler()  # vLLM may load plug-ins twice
    torch.manual_seed(3)
    output = sampler(metadata, None, logits.clone(), asked)
    torch.manual_seed(3)
    plain = sampler.sampler(logits=logits.clone(), sampling_metadata=asked)
    assert torch.equal(output.sampled_token_ids, plain.sampled_token_ids)
    assert torch.equal(output.logprobs_tensors.logprobs, plain.logprobs_tensors.logprobs)
    top = logits.topk(5).indices
    assert all(int(row[0]) in top[i] for i, row in enumerate(output.sampled_token_ids))


@pytest.mark.parametrize(
    ("sequences", "max_draft", "vocabulary"), [(256, 16, 151_936), (64, 16, 64), (8, 64, 10**9)]
)
def test_memory_is_measured_with_the_most_drafted_tokens(
    sequences: int, max_draft: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = max_drafted(sequences, max_draft, vocabulary)
    seen: list[tuple[int, int, int]] = []

    def verify(metadata: Any, _: None, logits: torch.Tensor, asked: Any) -> None:
        seen.append((len(metadata.draft_token_ids), len(logits), asked.max_num_logprobs))

    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=max_draft),
        max_num_reqs=sequences,
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary),
        device=torch.device("meta"),
        rejection_sampler=verify,
    )
    monkeypatch.setattr("vllm.v1.spec_decode.metadata.SpecDecodeMetadata.make_dummy", make_dummy_on_meta)
    verify_most(runner)
    assert seen == ([(most, most + sequences, 0)] if most else [])


def make_dummy_on_meta(drafts: list[list[int]], _: torch.device) -> Any:
    return SimpleNamespace(draft_token_ids=[token for row in drafts for token in row])


def test_measurement_runs_with_vllms_sampler() -> None:
    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        max_num_reqs=8,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        device=torch.device("cpu"),
        rejection_sampler=verifier(),
    )
    verify_most(runner)
