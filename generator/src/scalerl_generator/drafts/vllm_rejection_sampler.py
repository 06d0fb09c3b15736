"""Bounds the memory in which vLLM (0.32) verifies drafts, and fixes its steps without any draft.

- vLLM takes the log-softmax over rows × (longest draft of the step + 1) × vocabulary: one sequence of 64 that drafts 16 tokens
  makes 1,088 rows of 80. Here only rows that exist are computed, in chunks.
- The run that measures the memory of a step verifies one drafted token for each sequence. Here it verifies as many as a step
  may have (:func:`max_drafted`).
- A server with drafts verifies in every step. Without a drafted token, ``top_k`` then takes the maximum of an empty tensor, which
  ends the engine. Here such a step is sampled as without drafts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

LOGITS_BYTES = 2 << 30
"""Memory for the verification of the drafted tokens of a step."""
_COPIES = 3
"""Float32 rows of the vocabulary for each drafted token: its logits, those that are sampled from, and probabilities."""
CHUNK_ROWS = 256


def max_drafted(sequences: int, max_draft: int, vocabulary: int) -> int:
    """Maximum number of drafted tokens of a step.

    >>> max_drafted(256, 16, 151_936), max_drafted(256, 16, 32_000)
    (1177, 4096)
    """
    return min(sequences * max_draft, LOGITS_BYTES // (4 * _COPIES * vocabulary))


def patch_rejection_sampler() -> None:
    """Replace vLLM's functions; may be called more than once."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if RejectionSampler._get_logprobs_tensors is logprobs_of_rows:
        return
    verify, measure = RejectionSampler.forward, GPUModelRunner._dummy_sampler_run

    def forward(
        self: Any,
        metadata: Any,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> Any:
        if not metadata.max_spec_len:
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        return verify(self, metadata, draft_probs, logits, sampling_metadata)

    def dummy_sampler_run(self: Any, hidden_states: torch.Tensor) -> Any:
        output = measure(self, hidden_states)
        if self.speculative_config and not current_platform.is_cpu():  # where memory is not measured
            verify_most(self)
        return output

    RejectionSampler.forward = forward
    RejectionSampler._get_logprobs_tensors = logprobs_of_rows
    GPUModelRunner._dummy_sampler_run = dummy_sampler_run


def logprobs_of_rows(
    self: Any,
    max_num_logprobs: int,
    metadata: Any,
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    bonus_logits: torch.Tensor,
    sampled_token_ids: torch.Tensor,
) -> Any:
    """``RejectionSampler._get_logprobs_tensors`` without the rows that pad each sequence to the longest draft.

    Shapes: ``target_logits`` [drafted tokens, vocabulary], ``bonus_logits`` [sequences, vocabulary], ``sampled_token_ids``
    [sequences, longest draft + 1]. The result has one row for each element of the last; those of padding are zero, and vLLM
    drops them.
    """
    from vllm.utils.torch_utils import async_tensor_h2d
    from vllm.v1.outputs import LogprobsTensors

    sequences, width = sampled_token_ids.shape
    drafted = torch.tensor(metadata.num_draft_tokens)
    bonus_at = torch.arange(sequences) * width + drafted
    of_draft = torch.arange(width) < drafted[:, None]
    device = logits.device
    ids = sampled_token_ids.flatten().to(torch.int64).clamp(min=0)  # rejected tokens are -1
    columns = max_num_logprobs + 1
    result = LogprobsTensors(
        torch.zeros(len(ids), columns, dtype=torch.int32, device=device),
        torch.zeros(len(ids), columns, device=device),
        torch.zeros(len(ids), dtype=torch.int64, device=device),
    )
    for rows, positions in ((target_logits, of_draft.flatten().nonzero()[:, 0]), (bonus_logits, bonus_at)):
        at = async_tensor_h2d(positions, device)
        for start, end in pairwise([*range(0, len(rows), CHUNK_ROWS), len(rows)]):
            chunk = rows[start:end].to(torch.float32)
            if not self.is_logits_logprobs_mode:
                chunk = self.sampler.compute_logprobs(chunk)
            gathered = self.sampler.gather_logprobs(chunk, max_num_logprobs, ids[at[start:end]])
            for whole, part in zip(result[:3], gathered[:3], strict=True):
                whole[at[start:end]] = part.to(whole.dtype)
    return result


def verify_most(runner: Any) -> None:
    """Verify the most drafted tokens that a step of this model runner may have, for the measurement of its memory."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    config = runner.speculative_config
    sequences, vocabulary = runner.max_num_reqs, runner.model_config.get_vocab_size()
    most = max_drafted(sequences, config.num_speculative_tokens, vocabulary)
    drafts = [[0] * ((most + i) // sequences) for i in range(sequences)]
    drafted, device = sum(map(len, drafts)), runner.device
    if not drafted:
        return
    ones = torch.ones(sequences, device=device)
    metadata = SpecDecodeMetadata.make_dummy(drafts, device)
    sampling = SamplingMetadata(
        temperature=ones,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        logprob_token_ids=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=ones,
        presence_penalties=ones,
        repetition_penalties=ones,
        output_token_ids=[[] for _ in range(sequences)],
        spec_token_ids=[[] for _ in range(sequences)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    logits = torch.zeros(drafted + sequences, vocabulary, device=device)
    runner.rejection_sampler(metadata, None, logits, sampling)
