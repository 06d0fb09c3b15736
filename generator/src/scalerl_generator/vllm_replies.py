"""Decodes and checks the vLLM server's responses.

Errors of :class:`~scalerl_generator.vllm_client.VllmClient`::

    VllmError
    ├── ServerDown         no connection, or no response within the timeout
    ├── ServerRefused      a status other than 200: ``status`` and ``message``
    ├── BadReply           a 200 response with a body that the pinned vLLM release does not send
    ├── GenerationFailed   a response that cannot be trained on (aborted, or of the wrong length)
    └── UpdateFailed       the weights were not installed (:mod:`.update_reports`)
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

UNVERSIONED = -1
"""Version of the weights that a server starts with, before the first update."""

_CLAMPED = -9999.0
"""Value that vLLM writes for a log-probability that is missing, minus infinity or NaN."""

Reply = TypeVar("Reply")


class VllmError(Exception):
    """Base of the errors of a :class:`~scalerl_generator.vllm_client.VllmClient`."""


class ServerDown(VllmError):
    """No connection, a broken connection, or no response within the timeout."""


class ServerRefused(VllmError):
    """The server responded with a status other than 200."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path}: HTTP {status}: {message}")
        self.status = status
        self.message = message


class BadReply(VllmError):
    """The server responded with 200 and an unknown body; it may not be the pinned vLLM release."""


class GenerationFailed(VllmError):
    """The server responded with completions that must not be trained on."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a completion, sampled with the weights of ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Experts that vLLM's routers chose for consecutive positions of a prompt and its completion."""

    start: int
    """The first position; 0 is that of the completion's first token, and positions of the prompt are negative."""
    experts: NDArray[np.uint8] | NDArray[np.uint16]
    """Shape ``[positions, layers, chosen]``."""

    def before(self, end: int) -> RoutedRows:
        """Those of positions before ``end``."""
        return RoutedRows(self.start, self.experts[: max(0, end - self.start)])


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of one completion; three arrays of shape ``[tokens]``."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probabilities in the sampling distribution, ``log_softmax(logits / temperature)``, nats; 0 where masked."""
    masked: NDArray[np.bool_]
    """Tokens without a finite log-probability from the server."""


@dataclass(frozen=True, slots=True)
class Sampled(Part):
    """A response's completion, or the last part of one."""

    weight_versions: tuple[Span, ...]
    """Spans over all tokens of the completion in this response, those of earlier parts included."""
    finish_reason: Literal["stop", "length"]
    """``stop``: the last token is a stop token. ``length``: the completion was truncated at ``max_tokens``."""
    experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """The experts of its positions from ``routed_from`` of the request on, ``[positions, layers, chosen]``; None if the
    server does not report any."""


class _SpanReply(msgspec.Struct):
    version: str
    start: int
    end: int


class _LogprobReply(msgspec.Struct):
    logprob: float | None


class _LogprobsReply(msgspec.Struct):
    content: list[_LogprobReply]


class _ChoiceReply(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _LogprobsReply | None = None
    weight_versions: list[_SpanReply] | None = None
    routed_experts: str | None = None


class _GenerateReply(msgspec.Struct):
    choices: list[_ChoiceReply]
    prompt_logprobs: list[dict[str, _LogprobReply] | None] | None = None


class _ScoredReply(msgspec.Struct):
    prompt_logprobs: list[dict[str, _LogprobReply] | None] | None = None


class _CompletionReply(msgspec.Struct):
    choices: list[_ScoredReply]


class _WeightInfoReply(msgspec.Struct):
    weight_version: str


class _ErrorDetail(msgspec.Struct):
    message: str


class _ErrorReply(msgspec.Struct):
    error: _ErrorDetail


_MAX_EVENT_BYTES = 2**29
"""The last one of a completion may have the experts of its tokens: 512 bytes each for a model of 48 layers and 8 experts."""
_MAX_MESSAGE = 500
"""Of the server's error message, in characters."""

_FINISHED: dict[str | None, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}

_GENERATE = msgspec.json.Decoder(_GenerateReply)
_COMPLETION = msgspec.json.Decoder(_CompletionReply)
_WEIGHT_INFO = msgspec.json.Decoder(_WeightInfoReply)
_ERROR = msgspec.json.Decoder(_ErrorReply)


def read_completions(content: bytes, n: int) -> list[Sampled]:
    """The ``n`` completions of a response, in the order of their indices.

    Raises:
        BadReply, GenerationFailed
    """
    choices = decode_reply(_GENERATE, content).choices
    if len(choices) != n:
        raise GenerationFailed(f"asked for {n} completions, got {len(choices)}")
    return [_sampled(choice) for choice in sorted(choices, key=lambda choice: choice.index)]


class StreamedAnswer:
    """Decodes a response of ``n`` completions in server-sent events; each event extends one completion."""

    def __init__(self, path: str, n: int) -> None:
        self._path = path
        self._rest = bytearray()
        self.unfinished = n
        """Number of completions whose last part has not arrived."""

    def feed(self, content: bytes) -> Iterator[tuple[int, Part]]:
        """Add received bytes; yields the index and new tokens of a completion for each complete event.

        The last part of each completion is a :class:`Sampled`.

        Raises:
            BadReply, GenerationFailed, ServerRefused
        """
        # Only the new bytes are searched: an event with the experts of a long completion has tens of megabytes.
        searched = max(0, len(self._rest) - 1)
        self._rest += content
        while (end := self._rest.find(b"\n\n", searched)) >= 0:
            event = bytes(self._rest[:end]).removeprefix(b"data: ")
            del self._rest[: end + 2]
            searched = 0
            yield from self._event(event)
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise BadReply(f"an event has more than {_MAX_EVENT_BYTES} bytes")

    def _event(self, content: bytes) -> Iterator[tuple[int, Part]]:
        if content == b"[DONE]":
            return
        if content.startswith(b'{"error"'):
            raise ServerRefused(self._path, 500, read_error(content))
        for choice in decode_reply(_GENERATE, content).choices:
            if choice.finish_reason is None:
                yield choice.index, _part(choice)
            else:
                sampled = _sampled(choice)
                self.unfinished -= 1
                yield choice.index, sampled


def read_prompt_logprobs(content: bytes, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Log-probabilities of the tokens after the first, nats, shape ``[len(token_ids) - 1]``; NaN where the server has no finite
    value, which shows that its weights are broken.

    Raises:
        BadReply, GenerationFailed
    """
    logprobs = _of_tokens(decode_reply(_GENERATE, content).prompt_logprobs, token_ids)
    return np.where(_are_usable(logprobs), logprobs, np.float32(np.nan))


def read_completion_prompt_logprobs(
    content: bytes, token_ids: Sequence[int], used: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """As :func:`read_prompt_logprobs`, from a response of ``/v1/completions``.

    Args:
        used: shape ``[len(token_ids) - 1]``; where False, the result is 0 and the response needs no finite value.

    Raises:
        BadReply, GenerationFailed
    """
    choices = decode_reply(_COMPLETION, content).choices
    logprobs = _of_tokens(choices[0].prompt_logprobs if choices else None, token_ids)
    if not _are_usable(logprobs)[used].all():
        raise GenerationFailed("a prompt token has no finite log-probability")
    return np.where(used, logprobs, np.float32(0.0))


def _are_usable(logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
    usable: NDArray[np.bool_] = np.isfinite(logprobs) & (logprobs > _CLAMPED)
    return usable


def _of_tokens(
    rows: list[dict[str, _LogprobReply] | None] | None, token_ids: Sequence[int]
) -> NDArray[np.float32]:
    if rows is None or len(rows) != len(token_ids):
        raise GenerationFailed(f"asked to score {len(token_ids)} tokens, got {rows and len(rows)} rows")
    missing = _LogprobReply(None)
    return _floats(
        [(row or {}).get(str(token), missing) for token, row in zip(token_ids[1:], rows[1:], strict=True)]
    )


def read_weight_version(content: bytes) -> int:
    """Version of the weights that the server holds, or :data:`UNVERSIONED`.

    Raises:
        BadReply
    """
    return _version(decode_reply(_WEIGHT_INFO, content).weight_version)


def read_error(content: bytes, otherwise: str | None = None) -> str:
    """The error message of a response with a status other than 200; ``otherwise``, or its text, where it is not vLLM's."""
    try:
        return _ERROR.decode(content).error.message[:_MAX_MESSAGE]
    except (ValueError, RecursionError):
        return content[:_MAX_MESSAGE].decode(errors="replace") if otherwise is None else otherwise


def decode_reply(decoder: msgspec.json.Decoder[Reply], content: bytes) -> Reply:
    """A reply in its type. Raises BadReply."""
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError) as error:
        start = content[:100].decode(errors="replace")
        raise BadReply(f"{error} (the answer starts with {start!r})") from error


def _version(label: str) -> int:
    if label == "default":
        return UNVERSIONED
    try:
        return int(label)
    except ValueError as error:
        raise BadReply(f"weight version {label!r} is not a number") from error


def _sampled(choice: _ChoiceReply) -> Sampled:
    finish_reason = _FINISHED.get(choice.finish_reason)
    if finish_reason is None:
        raise GenerationFailed(f"completion {choice.index} finished by {choice.finish_reason!r}")
    part = _part(choice)
    spans = tuple(Span(_version(s.version), s.start, s.end) for s in choice.weight_versions or ())
    experts = None if choice.routed_experts is None else _experts(choice.routed_experts)
    return Sampled(part.token_ids, part.logprobs, part.masked, spans, finish_reason, experts)


def _experts(encoded: str) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """An array in NumPy's file format and base64, as vLLM writes it."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise BadReply(f"routed_experts is no array: {error}") from error
    if not (isinstance(array, np.ndarray) and array.ndim == 3 and array.dtype in (np.uint8, np.uint16)):
        raise BadReply("routed_experts is not [positions, layers, chosen] of uint8 or uint16")
    return array


def _part(choice: _ChoiceReply) -> Part:
    token_ids = np.array(choice.token_ids, dtype=np.int32)
    content = choice.logprobs.content if choice.logprobs is not None else []
    if len(content) != len(token_ids):
        raise GenerationFailed(
            f"completion {choice.index}: {len(token_ids)} tokens, {len(content)} log-probabilities"
        )
    logprobs = _floats(content)
    masked = ~_are_usable(logprobs)
    logprobs[masked] = 0.0
    return Part(token_ids, logprobs, masked)


def _floats(entries: Sequence[_LogprobReply]) -> NDArray[np.float32]:
    """The log-probabilities as float32; NaN for null, which the server writes since JSON has no NaN."""
    values = (math.nan if entry.logprob is None else entry.logprob for entry in entries)
    return np.fromiter(values, dtype=np.float32, count=len(entries))
