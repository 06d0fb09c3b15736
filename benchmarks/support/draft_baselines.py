"""Measures drafters' acceptance length by a replay of sampled completions.

The result is exact in distribution for drafts with one token per position, since such a token is accepted if and only if
the model samples it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scalerl_generator.drafts.drafter import Drafter

Int32s = NDArray[np.int32]
MAX_DRAFT = 32


class Baseline(Protocol):
    """A drafter in one engine, which gets one prompt after another; the siblings (completions) of a prompt run concurrently."""

    def begin(self, prompt: int, prompt_t: Int32s, siblings: int) -> None: ...
    def draft(self, sibling: int, new: list[int], remaining: int) -> list[int]:
        """Draft up to ``remaining`` tokens after a sibling's new tokens."""

    def end(self, sibling: int) -> None: ...
    def finish(self, completions: list[Int32s], rewards: list[float]) -> None:
        """Called when all siblings have ended."""


@dataclass
class Outcome:
    """Counts of a replay, without each completion's first token.

    tokens: accepted and newly sampled tokens.
    verifications: forward passes that verify a draft, empty drafts included.
    drafted: drafted tokens.
    """

    tokens: int = 0
    verifications: int = 0
    drafted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification."""
        return self.tokens / max(self.verifications, 1)


def replay(
    baseline: Baseline,
    prompts: list[Int32s],
    groups: list[list[Int32s]],
    rewards: list[list[float]] | None = None,
) -> Outcome:
    """Replay one epoch; ``groups`` and ``rewards`` have the completions of each prompt and their rewards."""
    outcome = Outcome()
    for prompt, (prompt_t, completions) in enumerate(zip(prompts, groups, strict=True)):
        baseline.begin(prompt, prompt_t, len(completions))
        # The first token is sampled by the prompt's forward pass and needs no verification.
        at = [0] * len(completions)
        drafts: list[list[int]] = [[] for _ in completions]
        running = set(range(len(completions)))
        while running:
            for i in sorted(running):
                rest = completions[i][at[i] :].tolist()
                right = 0
                while right < min(len(drafts[i]), len(rest) - 1) and drafts[i][right] == rest[right]:
                    right += 1
                new = rest[: right + 1]
                if at[i]:
                    outcome.tokens += len(new)
                    outcome.verifications += 1
                    outcome.drafted += len(drafts[i])
                at[i] += len(new)
                drafts[i] = baseline.draft(i, new, len(completions[i]) + MAX_DRAFT - at[i])
                if at[i] == len(completions[i]):
                    baseline.end(i)
                    running.discard(i)
        baseline.finish(completions, rewards[prompt] if rewards else [0.0] * len(completions))
    return outcome


class Ours:
    """:class:`scalerl_generator.drafts.drafter.Drafter` with a constant threshold."""

    def __init__(self, threshold: float, max_draft: int = MAX_DRAFT, memory_tokens: int = 4_000_000) -> None:
        self.drafter = Drafter(64, memory_tokens, max_draft)
        self._threshold, self._max_draft = threshold, max_draft
        self._one = np.zeros(1, np.int32)

    def begin(self, prompt: int, prompt_t: Int32s, siblings: int) -> None:
        self._slots = [self.drafter.begin(prompt, prompt_t) for _ in range(siblings)]
        self._rows = np.zeros((siblings, len(prompt_t) + 2048), np.int32)
        self._rows[:, : len(prompt_t)] = prompt_t
        self._lengths = [len(prompt_t)] * siblings

    def draft(self, sibling: int, new: list[int], remaining: int) -> list[int]:
        start = self._lengths[sibling]
        self._rows[sibling, start : start + len(new)] = new
        self._lengths[sibling] += len(new)
        slot = self._slots[sibling]
        one = self._one
        draft_sd, drafted_s, _, _ = self.drafter.propose(
            one + slot,
            one + sibling,
            self._rows,
            one + self._lengths[sibling],
            one + min(self._max_draft, remaining),
            self._threshold,
        )
        return list(map(int, draft_sd[slot, : drafted_s[slot]]))

    def end(self, sibling: int) -> None:
        self.drafter.end(self._slots[sibling])

    def finish(self, completions: list[Int32s], rewards: list[float]) -> None: ...


class Suffix:
    """arctic-inference's suffix cache, as in vLLM's ``suffix``; with ``cached`` 0 it has only the sequence's own text."""

    def __init__(self, factor: float, min_probability: float, cached: int = 10_000, depth: int = 24) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache: Any = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=cached)
        self._factor, self._min_probability, self._depth = factor, min_probability, depth
        self._group = 0

    def begin(self, prompt: int, prompt_t: Int32s, siblings: int) -> None:
        self._group += 1
        self._texts = [prompt_t.tolist() for _ in range(siblings)]
        for i in range(siblings):
            self._cache.start_request((self._group, i), prompt_t)

    def draft(self, sibling: int, new: list[int], remaining: int) -> list[int]:
        request = (self._group, sibling)
        self._texts[sibling] += new
        self._cache.add_active_response(request, new)
        draft = self._cache.speculate(
            request,
            np.array(self._texts[sibling][-self._depth :], np.int32),
            max_spec_tokens=min(MAX_DRAFT, remaining),
            max_spec_factor=self._factor,
            min_token_prob=self._min_probability,
        )
        return list(draft.token_ids)

    def end(self, sibling: int) -> None:
        self._cache.stop_request((self._group, sibling))

    def finish(self, completions: list[Int32s], rewards: list[float]) -> None: ...


@dataclass
class RhymeRL:
    """The paper's rule [S, arXiv 2508.18588].

    Drafts from the last epoch's responses to the same prompt, after the longest match of 7 to 3 tokens, in the response of
    highest reward. The draft window grows by 2 while whole drafts are accepted, up to 32, and otherwise returns to 2.
    """

    longest: int = 7
    shortest: int = 3
    _history: dict[int, list[tuple[float, list[int]]]] = field(default_factory=dict)

    def begin(self, prompt: int, prompt_t: Int32s, siblings: int) -> None:
        self._prompt = prompt
        self._texts: list[list[int]] = [[] for _ in range(siblings)]
        self._windows, self._drafted = [2] * siblings, [0] * siblings
        self._index: dict[tuple[int, ...], list[int]] = {}
        for _, text in sorted(self._history.get(prompt, []), key=lambda one: one[0], reverse=True):
            for end in range(self.shortest, len(text)):
                for length in range(self.shortest, min(self.longest, end) + 1):
                    self._index.setdefault(tuple(text[end - length : end]), text[end : end + MAX_DRAFT])

    def draft(self, sibling: int, new: list[int], remaining: int) -> list[int]:
        text = self._texts[sibling]
        text += new
        if drafted := self._drafted[sibling]:
            whole = len(new) == drafted + 1
            self._windows[sibling] = min(self._windows[sibling] + 2, 32) if whole else 2
        draft: list[int] = []
        for length in range(min(self.longest, len(text)), self.shortest - 1, -1):
            if found := self._index.get(tuple(text[-length:])):
                draft = found[: min(self._windows[sibling], remaining)]
                break
        self._drafted[sibling] = len(draft)
        return draft

    def end(self, sibling: int) -> None: ...

    def finish(self, completions: list[Int32s], rewards: list[float]) -> None:
        self._history[self._prompt] = [
            (reward, text.tolist()) for reward, text in zip(rewards, completions, strict=True)
        ]


@dataclass
class Ngram:
    """Drafts after the longest match of 5 to 2 tokens in the sequence itself, as vLLM's ``ngram``."""

    longest: int = 5
    shortest: int = 2
    drafted: int = 8

    def begin(self, prompt: int, prompt_t: Int32s, siblings: int) -> None:
        self._texts = [prompt_t.tolist() for _ in range(siblings)]

    def draft(self, sibling: int, new: list[int], remaining: int) -> list[int]:
        text = self._texts[sibling]
        text += new
        for length in range(self.longest, self.shortest - 1, -1):
            tail = text[-length:]
            for start in range(len(text) - length):
                if text[start : start + length] == tail:
                    return text[start + length : start + length + min(self.drafted, remaining)]
        return []

    def end(self, sibling: int) -> None: ...
    def finish(self, completions: list[Int32s], rewards: list[float]) -> None: ...


def bound(likeliest: list[list[NDArray[np.bool_]]], max_draft: int = MAX_DRAFT) -> Outcome:
    """Acceptance of a drafter that always drafts the model's most probable tokens.

    Args:
        likeliest: by prompt and completion, whether each sampled token was the most probable one, bool ``[tokens]``.
    """
    outcome = Outcome()
    for group in likeliest:
        for right_t in group:
            at = 1
            while at < len(right_t):
                accepted = 0
                while accepted < max_draft and at + accepted < len(right_t) - 1 and right_t[at + accepted]:
                    accepted += 1
                outcome.verifications += 1
                outcome.tokens += accepted + 1
                at += accepted + 1
    return outcome
