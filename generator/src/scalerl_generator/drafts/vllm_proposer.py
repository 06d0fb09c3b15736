"""The proposer of drafts that vLLM loads (``method: custom_class``). It passes the batch of each step to :class:`~.drafter.Drafter`.

vLLM passes rows of tokens to a proposer, but not the ids of their requests. Therefore the worker attaches its model runner,
whose batch has the ids (:meth:`HistoryProposer.attach`). A request id contains the key of the prompt (:mod:`.draft_protocol`).
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scalerl_api.registry import Kind, make
from scalerl_generator.drafts.draft_protocol import (
    DRAFTER,
    MEMORY_TOKENS,
    DraftReport,
    DraftTally,
    PastResponses,
    prompt_key_of,
)
from scalerl_generator.drafts.draft_threshold import DraftThreshold
from scalerl_generator.drafts.drafter import Drafter
from scalerl_generator.drafts.vllm_rejection_sampler import max_drafted, patch_rejection_sampler

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PROBE_ROWS = 8
"""In a probe, one of this many rows has a draft."""


@dataclass(slots=True)
class _DraftedRows:
    """Rows of a step that may have drafts."""

    rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Of the drafter."""
    lengths: list[int] = field(default_factory=list)
    """Tokens, without those that vLLM will discard."""
    ends: list[int] = field(default_factory=list)
    """Maximum length; 0 of a sequence that has ended."""
    prefilled: bool = False
    """Whether the step also computed prompts."""


class HistoryProposer:
    """The proposer, ``model`` of vLLM's ``--speculative-config``."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._sequences = vllm_config.scheduler_config.max_num_seqs
        self._step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._memory_tokens = int(vllm_config.additional_config[MEMORY_TOKENS])
        self._plugin = vllm_config.additional_config.get(DRAFTER)
        self._max_draft = vllm_config.speculative_config.num_speculative_tokens
        vocabulary = vllm_config.model_config.get_vocab_size()
        self._max_drafted = max_drafted(self._sequences, self._max_draft, vocabulary)
        self._max_model_len = vllm_config.model_config.max_model_len
        self._runner: Any = None
        self._drafter: Drafter | None = None
        self._threshold = DraftThreshold()
        self._slots: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._tallies: dict[str, NDArray[np.int64]] = {}
        """Tallies (:meth:`Drafter.take_tally`) of ended sequences, by prompt key."""
        self._ended_at: float | None = None
        """When the last call of :meth:`propose` ended."""
        self.report = DraftReport()

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """vLLM calls this in the worker, before it measures memory. There is no model to load."""
        patch_rejection_sampler()

    def attach(self, runner: Any, rank: int) -> None:
        """Start drafting for the requests in this model runner's batch, on rank 0 of the tensor-parallel group.

        The other ranks draft nothing, because vLLM uses the drafts of the first one.
        """
        if rank == 0:
            # If a sequence is so close to the end of the context that a draft model might exceed its own context, vLLM skips
            # the proposer and drafts zeros for all sequences. There is no draft model here.
            runner.effective_drafter_max_model_len = sys.maxsize
            self._drafter = self._new_drafter()
            self._runner = runner

    def _new_drafter(self) -> Drafter:
        sizes = (self._sequences, self._memory_tokens, self._max_draft)
        if self._plugin is None:
            return Drafter(*sizes)
        made: Drafter = make(Kind.DRAFTER, self._plugin["name"], self._plugin["parameters"], *sizes)
        return made

    def remember(self, past: PastResponses) -> None:
        """Add past responses to a prompt to the drafter's memory."""
        if self._drafter is None:
            return
        prompt = self._prompts.setdefault(past.prompt_key, len(self._prompts))
        prompt_t = np.frombuffer(past.prompt_token_ids, np.int32)
        for response in past.responses:
            self._drafter.remember(prompt, prompt_t, np.frombuffer(response, np.int32))
        self.report.remembered_responses += len(past.responses)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for the rows of a step; a row's draft may be empty. vLLM calls this after each step."""
        started = time.perf_counter()
        drafter = self._drafter
        if drafter is None:
            return [[] for _ in sampled_token_ids]
        batch = self._runner.input_batch
        for ended in self._slots.keys() - batch.req_id_to_index.keys():
            self._end(drafter, ended)
        chosen = self._drafted_rows(drafter, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        threshold = self._threshold.value(len(chosen.rows)) if chosen.rows else 1.0
        length_r = np.array(chosen.lengths, np.int32)
        draft_sd, drafted_s, accepted, verified = drafter.propose(
            np.array(chosen.slots, np.int32),
            np.array(chosen.rows, np.int32),
            token_ids_cpu,
            length_r,
            self._limits(np.array(chosen.ends, np.int32) - length_r, len(sampled_token_ids)),
            threshold,
        )
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, slot in zip(chosen.rows, chosen.slots, strict=True):
            if drafted_s[slot]:
                drafts[row] = draft_sd[slot, : drafted_s[slot]].tolist()
                # A request ends there; a past episode goes on with text of its environment.
                stops = self._runner.requests[batch.req_ids[row]].sampling_params.all_stop_token_ids
                if excess := _after_stop(drafts[row], stops):
                    drafted_s[slot] -= excess
                    del drafts[row][-excess:]

        if self._ended_at is not None and chosen.rows and not chosen.prefilled:
            sampled = sum(map(len, sampled_token_ids))
            seconds = started - self._ended_at
            self._threshold.observe(seconds=seconds, rows=len(chosen.rows), drafted=verified, sampled=sampled)
        self._report_step(drafter, threshold, accepted, verified)
        self._ended_at = time.perf_counter()
        self.report.draft_seconds += self._ended_at - started
        return drafts

    def _drafted_rows(
        self,
        drafter: Drafter,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
    ) -> _DraftedRows:
        """The rows of requests that name a prompt; ``drafter`` begins the sequences of new ones."""
        batch = self._runner.input_batch
        chosen = _DraftedRows()
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:  # its prompt is not prefilled completely
                chosen.prefilled = True
                continue
            request = batch.req_ids[row]
            slot = self._slots.get(request)
            if slot is None and (key := prompt_key_of(request)) is not None:
                chosen.prefilled = True
                prompt = self._prompts.setdefault(key, len(self._prompts))
                prompt_t = token_ids_cpu[row, : batch.num_prompt_tokens[row]]
                slot = drafter.begin(prompt, np.ascontiguousarray(prompt_t, np.int32))
                self._slots[request] = slot
            if slot is not None:
                params = self._runner.requests[request].sampling_params
                discarded = _after_stop(sampled, params.all_stop_token_ids)
                end = min(self._max_model_len, int(batch.num_prompt_tokens[row]) + params.max_tokens)
                chosen.rows.append(row)
                chosen.slots.append(slot)
                chosen.lengths.append(int(num_tokens_no_spec[row]) - (discarded or 0))
                chosen.ends.append(end if discarded is None else 0)
        return chosen

    def _limits(self, left_r: NDArray[np.int32], sequences: int) -> NDArray[np.int32]:
        """Maximum length of each draft.

        Args:
            left_r: tokens until each sequence's end.
            sequences: rows of the step, others too.
        """
        # A sequence for which the next step has no room would leave the batch, and be added to memory again when it returns.
        sequences = max(sequences, 1)
        room = min(max(self._step_tokens // sequences - 1, 0), self._max_drafted // sequences)
        limit_r = np.clip(left_r - 1, 0, min(room, self._max_draft)).astype(np.int32)
        if self._threshold.is_probe:
            limit_r[np.arange(len(limit_r)) % _PROBE_ROWS > 0] = 0
        return limit_r

    def _report_step(self, drafter: Drafter, threshold: float, accepted: int, verified: int) -> None:
        report, control = self.report, self._threshold.control
        report.steps += 1
        report.drafted_tokens += verified
        report.accepted_tokens += accepted
        report.threshold = threshold
        report.gain = control.gain
        report.paused_steps = control.paused_steps
        report.evicted_tokens, report.evicted_running_tokens = drafter.evicted_tokens

    def take_tally(self, prompt_key: str) -> DraftTally:
        """Drafted and accepted tokens of a prompt's requests since the last call, including requests that were aborted."""
        tally = self._tallies.pop(prompt_key, np.zeros((2, self._max_draft), np.int64))
        for request, slot in self._slots.items():
            if self._drafter is not None and prompt_key_of(request) == prompt_key:
                tally = tally + self._drafter.take_tally(slot)
        return tally[0].tolist(), tally[1].tolist()

    def _end(self, drafter: Drafter, request: str) -> None:
        slot, key = self._slots.pop(request), prompt_key_of(request)
        if key is not None:
            self._tallies[key] = self._tallies.get(key, 0) + drafter.take_tally(slot)
        drafter.end(slot)


def _after_stop(sampled: list[int], stop_token_ids: set[int]) -> int | None:
    """Number of tokens after the first stop token, which vLLM will discard; None if there is no stop token.

    >>> _after_stop([5, 1, 6, 7], {1}), _after_stop([5, 1], {1}), _after_stop([5, 6], {1})
    (2, 0, None)
    """
    for i, token in enumerate(sampled):
        if token in stop_token_ids:
            return len(sampled) - i - 1
    return None
