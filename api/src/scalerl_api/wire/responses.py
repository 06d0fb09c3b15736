"""Actor → coordinator: past responses to prompts, for drafts."""

from __future__ import annotations

import hashlib
from typing import Final

from scalerl_api.wire.base import Struct
from scalerl_api.wire.prompts import PromptRef

MAX_RESPONSES_BYTES: Final = 2**24
"""Bound on one answer's responses: 4 million tokens. A larger group is not stored."""
MAX_RESPONSES_PROMPTS: Final = 4096
"""Prompts of one request."""


def prompt_digest(prompt_token_ids: bytes) -> bytes:
    """8 bytes that identify a prompt's tokens, little-endian int32: responses to other ones are of no use.

    >>> prompt_digest(bytes(4)).hex()
    '4e842f2f50cc089e'
    """
    return hashlib.blake2b(prompt_token_ids, digest_size=8).digest()


class PromptQuery(Struct, frozen=True, array_like=True):
    """One prompt, as the actor has it now."""

    prompt: PromptRef
    digest: bytes
    """:func:`prompt_digest` of its tokens."""


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/responses``: past responses to at most ``MAX_RESPONSES_PROMPTS`` training prompts."""

    prompts: list[PromptQuery]


class PastResponse(Struct, frozen=True, array_like=True):
    """One response to a prompt."""

    version: int
    """The newest version that sampled a token of it."""
    reward: float | None
    """As it was trained with; None where the verifier failed."""
    token_ids: bytes
    """Little-endian int32."""


class Responses(Struct, frozen=True, kw_only=True):
    """Answers to the first prompts of a request. Fewer than it has: the bound was reached, ask again for the others."""

    groups: list[list[list[PastResponse]]]
    """By prompt, then by group, newest first: its responses. A prompt without any, or whose tokens were others, has no group."""
