"""Messages between the actor and the server's proposer of drafts. This module imports neither numba nor vLLM.

A request id contains the key of the original prompt, so that all responses to a prompt are found together. The prompt that
the server sees does not suffice: that of a resumed completion includes its tokens so far.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import msgspec

from scalerl_generator.vllm_replies import decode_reply

Result = TypeVar("Result")

MEMORY_TOKENS = "scalerl_memory_tokens"
"""Key in vLLM's ``--additional-config``: tokens that the proposer keeps."""
DRAFTER = "scalerl_drafter"
"""Key there: name and parameters of the drafter of an installed package."""

_REQUEST = re.compile(r"scalerl\.([0-9a-f]{16})\.")


def request_id(key: str) -> str:
    """A new request id that contains ``key``, the prompt's digest in hex (:func:`scalerl_api.wire.prompt_digest`).

    vLLM adds a prefix and a suffix to it.
    """
    return f"scalerl.{key}.{uuid.uuid4().hex}"


def prompt_key_of(request: str) -> str | None:
    """The prompt's key in a request id; None without one, in which case nothing is drafted.

    >>> prompt_key_of("0_generate-tokens-" + request_id("4e842f2f50cc089e") + "-1a2b3c4d")
    '4e842f2f50cc089e'
    """
    match = _REQUEST.search(request)
    return match.group(1) if match else None


DraftTally = tuple[list[int], list[int]]
"""Drafted and accepted tokens, each by position in a draft."""


class PastResponses(msgspec.Struct):
    """Past responses to a prompt; token ids are little-endian int32."""

    prompt_key: str
    prompt_token_ids: bytes
    responses: list[bytes]


@dataclass
class DraftReport:
    """Statistics of a server's drafts since its start."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    threshold: float = 1.0
    """Threshold of the last step (:class:`~.draft_threshold.DraftThreshold`)."""
    remembered_responses: int = 0
    evicted_tokens: int = 0
    """Overwritten tokens of prompts without running completions."""
    evicted_running_tokens: int = 0
    """Overwritten tokens of prompts with running completions: the memory is too small."""
    gain: float = 1.0
    """Tokens per second of steps with drafts, in multiples of steps without (:class:`~.draft_threshold.Control`)."""
    paused_steps: int = 0
    """Steps without drafts because drafts did not pay."""


class _OfWorkers(msgspec.Struct, Generic[Result]):
    """The answer to a call of all workers, of which one drafts."""

    results: Annotated[list[Result], msgspec.Meta(min_length=1)]


_TALLIES = msgspec.json.Decoder(_OfWorkers[DraftTally])
_REPORTS = msgspec.json.Decoder(_OfWorkers[DraftReport])


def read_draft_tally(content: bytes) -> DraftTally:
    """The tally of the worker that drafts. Raises BadReply."""
    return max(decode_reply(_TALLIES, content).results)


def read_draft_report(content: bytes) -> DraftReport:
    """The report of the worker that drafts. Raises BadReply."""
    return max(decode_reply(_REPORTS, content).results, key=lambda report: report.steps)
