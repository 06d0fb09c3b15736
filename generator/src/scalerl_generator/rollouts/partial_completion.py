"""The tokens of one completion so far, over all requests that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from scalerl_api.wire import MASKED, MessageSpan, Partial, VersionSpan
from scalerl_generator.vllm_replies import GenerationFailed, Part, RoutedRows, Span
from scalerl_tasks.grading.grading_pool import Graded

_TOKEN: Final = np.dtype(
    [("token_ids", "i4"), ("logprobs", "f4"), ("masked", "?"), ("versions", "i4")], align=True
)
_Tokens = NDArray[np.void]
"""Array ``[tokens]`` of :data:`_TOKEN`."""


def _concatenated(parts: Sequence[_Tokens]) -> _Tokens:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, _TOKEN), *parts])


def _spans(versions: NDArray[np.int32]) -> tuple[Span, ...]:
    if len(versions) and (versions == versions[0]).all():  # the common case, which is ten times as fast
        return (Span(int(versions[0]), 0, len(versions)),)
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()] if len(versions) else []
    ends = [*starts[1:], len(versions)]
    return tuple(Span(int(versions[s]), s, e) for s, e in zip(starts, ends, strict=False))


def _version_spans(tokens: _Tokens) -> list[VersionSpan]:
    spans = _spans(np.where(tokens["masked"], MASKED, tokens["versions"]))
    return [VersionSpan(span.version, span.start) for span in spans]


class PartialCompletion:
    """Tokens, log-probabilities and weight versions, so far or, with a finish reason, of the whole completion.

    The server reports the versions of a response's tokens only at its end (:meth:`settle`). Until then, and permanently if
    the response breaks off, a token has the oldest version that can have sampled it.
    """

    def __init__(self) -> None:
        self._parts: list[_Tokens] = []
        self.tokens = 0
        """Number of tokens."""
        self.finish_reason: Literal["stop", "length"] | None = None
        """None while it is not complete."""
        self.turns: list[MessageSpan] = []
        """Messages of the environment of an episode."""
        self.outcome: Graded | None = None
        """Result of an episode that has ended."""
        self.sampling_seconds = 0.0
        """Seconds of an episode's requests in this process."""
        self.environment_seconds = 0.0
        """Seconds of its steps."""
        self.waited_seconds = 0.0
        """The part in which they waited for an environment that was down."""
        self.text: str | None = None
        """Text of an episode of one turn; of others it has to be decoded."""
        self.has_forced = False
        """Whether :meth:`force` appended tokens."""
        self.sampled_end = 0
        """Number of tokens up to the last one that the policy chose."""
        self._routed: list[RoutedRows] = []
        self.reported = 0
        """Number of leading tokens that the coordinator has."""
        self.truncations = 0
        """Number of truncations and resets, which invalidate a report in progress."""

    def append(self, part: Part, version: int) -> None:
        """Add tokens that were sampled by ``version`` or by later weights."""
        tokens = np.empty(len(part.token_ids), _TOKEN)
        tokens["token_ids"], tokens["logprobs"], tokens["masked"] = part.token_ids, part.logprobs, part.masked
        tokens["versions"] = version
        self._parts.append(tokens)
        self.tokens += len(tokens)
        if version != MASKED:
            self.sampled_end = self.tokens

    def add_routed(self, rows: RoutedRows) -> None:
        """Add experts that a response reported, of positions after those of the responses before it."""
        self._routed.append(rows)

    def force(self, token_ids: NDArray[np.int32]) -> None:
        """Append tokens that the policy did not choose: log-probability 0, version :data:`~scalerl_api.wire.MASKED`."""
        tokens = len(token_ids)
        part = Part(token_ids, np.zeros(tokens, np.float32), np.zeros(tokens, np.bool_))
        self.append(part, MASKED)
        self.has_forced = True

    def reopen(self, message_ids: NDArray[np.int32], reward: float = 0.0) -> None:
        """Continue an episode after a reply with the environment's messages, which are appended by :meth:`force`.

        Args:
            reward: see :attr:`~scalerl_api.wire.MessageSpan.reward`.
        """
        self.finish_reason = None
        self.turns.append(MessageSpan(self.tokens, self.tokens + len(message_ids), reward))
        self.force(message_ids)

    def settle(self, since: int, spans: Sequence[Span]) -> None:
        """Set the versions of the tokens from ``since`` on: ``spans``, which count from there.

        Raises:
            GenerationFailed: the spans are not those of these tokens.
        """
        lengths = [span.end - span.start for span in spans]
        if sum(lengths) != self.tokens - since:
            raise GenerationFailed("the answer lacks the weight versions of its tokens")
        self._whole()["versions"][since:] = np.repeat([span.version for span in spans], lengths)

    def forget_reports(self) -> None:
        """Mark all tokens as not reported, including those of a report in progress."""
        self.reported = 0
        self.truncations += 1

    def truncate(self, tokens: int) -> None:
        """Keep only the first ``tokens`` tokens, and reset the finish reason."""
        self._parts = [self._whole()[:tokens]]
        self.tokens, self.finish_reason = min(tokens, self.tokens), None
        self.reported = min(self.reported, self.tokens)
        self.sampled_end = min(self.sampled_end, self.tokens)
        self._routed = [rows.before(self.tokens - 1) for rows in self._routed]
        self.turns = [turn for turn in self.turns if turn.end <= self.tokens]
        self.truncations += 1

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Shape ``[tokens]``, as :attr:`logprobs` and :attr:`masked`."""
        return self._whole()["token_ids"]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return self._whole()["logprobs"]

    @property
    def masked(self) -> NDArray[np.bool_]:
        return self._whole()["masked"]

    @property
    def weight_versions(self) -> tuple[Span, ...]:
        """Spans of equal versions that cover all tokens, each as long as possible."""
        return _spans(self._whole()["versions"])

    @property
    def version_spans(self) -> list[VersionSpan]:
        """The same in the wire's form; masked tokens have separate spans."""
        return _version_spans(self._whole())

    @property
    def routed(self) -> list[RoutedRows]:
        """What its responses reported of experts."""
        return [rows for rows in self._routed if len(rows.experts)]

    def unreported(self) -> Partial:
        """The tokens after the :attr:`reported` ones, for a report to the coordinator."""
        missing, parts = self.tokens - self.reported, list[_Tokens]()
        while sum(map(len, parts)) < missing:
            parts.insert(0, self._parts[-1 - len(parts)])
        whole = _concatenated(parts)
        tail = whole[len(whole) - missing :]
        return Partial(
            start=self.reported,
            token_ids=tail["token_ids"].astype("<i4").tobytes(),
            logprobs=tail["logprobs"].astype("<f4").tobytes(),
            versions=_version_spans(tail),
            finish_reason=self.finish_reason,
            turns=self.turns.copy(),
        )

    def _whole(self) -> _Tokens:
        """All tokens as one array ``[tokens]`` of :data:`_TOKEN`, which replaces the parts."""
        self._parts = [_concatenated(self._parts)]
        return self._parts[0]
