"""The proposer of drafts that vLLM loads (``method: custom_class``): gives :class:`~.drafter.Drafter` the batch of each step.

vLLM passes a proposer rows of tokens, but not which requests they are: the worker attaches its model runner, whose batch has the
ids (:meth:`HistoryProposer.attach`). A request id names its prompt (:mod:`.draft_protocol`), so that responses of one prompt, of this
epoch and of the last, are found together even where the server sees another prompt: a resumed completion's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scalerl_generator.draft_protocol import MEMORY_TOKENS, DraftReport, PastResponses, prompt_key_of
from scalerl_generator.draft_threshold import DraftThreshold
from scalerl_generator.drafter import Drafter

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PROBE_ROWS = 8
"""In a probe one row of so many has a draft."""


class HistoryProposer:
    """``model`` of vLLM's ``--speculative-config``."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.speculative_config
        self._max_draft = config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._drafter = Drafter(
            vllm_config.scheduler_config.max_num_seqs,
            int(vllm_config.additional_config[MEMORY_TOKENS]),
            self._max_draft,
        )
        self._threshold = DraftThreshold()
        self._runner: Any = None
        self._slots: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._tallies: dict[str, NDArray[np.int64]] = {}
        """By prompt: drafted and accepted tokens of sequences that ended."""
        self._ended_at: float | None = None
        self.report = DraftReport()

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """vLLM calls it; there is no model."""

    def attach(self, runner: Any) -> None:
        """Take the ids of requests from this model runner's batch. Before, nothing is drafted."""
        self._runner = runner

    def remember(self, past: PastResponses) -> None:
        """Take in past responses of a prompt."""
        started = time.perf_counter()
        prompt = self._prompts.setdefault(past.prompt_key, len(self._prompts))
        prompt_t = np.frombuffer(past.prompt_token_ids, np.int32)
        for response in past.responses:
            self._drafter.remember(prompt, prompt_t, np.frombuffer(response, np.int32))
        self.report.remembered_responses += len(past.responses)
        self.report.remembered_tokens += sum(map(len, past.responses)) // 4
        self.report.remember_seconds += time.perf_counter() - started

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for the rows of a step, empty where nothing is drafted."""
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._runner is None:
            return drafts
        batch = self._runner.input_batch
        for ended in self._slots.keys() - batch.req_id_to_index.keys():
            self._end(ended)
        rows: list[int] = []
        slots: list[int] = []
        prefilled = False
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:  # its prompt is not complete
                prefilled = True
                continue
            slot = self._slots.get(batch.req_ids[row])
            if slot is None:
                prefilled = True
                slot = self._begin(batch.req_ids[row], token_ids_cpu[row, : batch.num_prompt_tokens[row]])
            rows.append(row)
            slots.append(slot)
        row_r = np.array(rows, np.int32)
        slot_r = np.array(slots, np.int32)
        length_r = num_tokens_no_spec[row_r].astype(np.int32)
        limit_r = np.clip(self._max_model_len - length_r - 1, 0, self._max_draft).astype(np.int32)
        threshold = self._threshold.value(len(rows)) if rows else 1.0
        if self._threshold.is_probe:
            limit_r[np.arange(len(rows)) % _PROBE_ROWS > 0] = 0
        draft_sd, drafted_s, accepted, verified = self._drafter.propose(
            slot_r, row_r, token_ids_cpu, length_r, limit_r, threshold
        )
        for row, slot in zip(rows, slots, strict=True):
            if drafted_s[slot]:
                drafts[row] = draft_sd[slot, : drafted_s[slot]].tolist()

        sampled_tokens = sum(map(len, sampled_token_ids))
        if self._ended_at is not None and rows and not prefilled:
            self._threshold.observe(
                seconds=started - self._ended_at, rows=len(rows), drafted=verified, sampled=sampled_tokens
            )
        report = self.report
        report.steps += 1
        report.drafting_steps += any(drafts)
        report.drafted_tokens += verified
        report.accepted_tokens += accepted
        report.sampled_tokens += sampled_tokens
        report.threshold = threshold
        self._ended_at = time.perf_counter()
        report.draft_seconds += self._ended_at - started
        return drafts

    def take_tally(self, prompt_key: str) -> tuple[int, int]:
        """Drafted and accepted tokens for a prompt's requests since the last call."""
        tally = self._tallies.pop(prompt_key, np.zeros(2, np.int64))
        for request, slot in self._slots.items():
            if prompt_key_of(request) == prompt_key:
                tally = tally + self._drafter.take_tally(slot)
        return int(tally[0]), int(tally[1])

    def _end(self, request: str) -> None:
        slot = self._slots.pop(request)
        key = prompt_key_of(request)
        if key != request:  # otherwise nobody takes it
            self._tallies[key] = self._tallies.get(key, 0) + self._drafter.take_tally(slot)
        self._drafter.end(slot)

    def _begin(self, request: str, prompt_t: NDArray[np.int32]) -> int:
        prompt = self._prompts.setdefault(prompt_key_of(request), len(self._prompts))
        slot = self._slots[request] = self._drafter.begin(prompt, np.ascontiguousarray(prompt_t, np.int32))
        return slot
