"""Actor → coordinator: past responses to a prompt, for drafts."""

from __future__ import annotations

import hashlib
from typing import Final

from scalerl_api.wire.base import Struct
from scalerl_api.wire.prompts import PromptRef

MAX_RESPONSES_BYTES: Final = 2**24
"""Bound on a group's responses: 4 million tokens. A larger group is not stored."""


def prompt_digest(prompt_token_ids: bytes) -> bytes:
    """8 bytes that identify a prompt's tokens, little-endian int32: responses to other ones are of no use.

    >>> prompt_digest(bytes(4)).hex()
    '4e842f2f50cc089e'
    """
    return hashlib.blake2b(prompt_token_ids, digest_size=8).digest()


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/responses``: past responses to a training prompt."""

    prompt: PromptRef
    digest: bytes
    """:func:`prompt_digest` of its tokens, as the actor has them now."""


class PastResponse(Struct, frozen=True, array_like=True):
    """One response to a prompt."""

    version: int
    """The newest version that sampled a token of it."""
    token_ids: bytes
    """Little-endian int32."""


class Responses(Struct, frozen=True, kw_only=True):
    responses: list[PastResponse]
    """Of the prompt's newest group; none where there is no group, or where the prompt had other tokens."""
