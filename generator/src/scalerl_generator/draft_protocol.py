"""Messages between the actor and the server's proposer of drafts. Slim: neither numba nor vLLM is imported.

A request id names its prompt, so that responses of one prompt are found together also where the server sees another prompt: that
of a resumed completion has its tokens so far.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

import msgspec

MEMORY_TOKENS = "scalerl_memory_tokens"
"""Key in vLLM's ``--additional-config``: tokens that the proposer remembers."""

_REQUEST = re.compile(r"scalerl\.([0-9a-f]{16})\.")


def request_id(key: str) -> str:
    """A new request's id that names its prompt by its digest in hex (:func:`scalerl_api.wire.prompt_digest`); vLLM adds parts
    before and after it."""
    return f"scalerl.{key}.{uuid.uuid4().hex}"


def prompt_key_of(request: str) -> str | None:
    """The prompt of a request; None for one that names none, for which nothing is drafted.

    >>> prompt_key_of("0_generate-tokens-" + request_id("4e842f2f50cc089e") + "-1a2b3c4d")
    '4e842f2f50cc089e'
    """
    named = _REQUEST.search(request)
    return named.group(1) if named else None


DraftTally = tuple[list[int], list[int]]
"""Drafted and accepted tokens, each by position in a draft."""


class PastResponses(msgspec.Struct):
    """Past responses of a prompt; token ids are int32, little-endian."""

    prompt_key: str
    prompt_token_ids: bytes
    responses: list[bytes]


@dataclass
class DraftReport:
    """Drafts of a server since its start."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    threshold: float = 1.0
    """Of the last step."""
    remembered_responses: int = 0
