"""Actor → coordinator: past responses to a prompt, from which speculative decoding drafts."""

from __future__ import annotations

import hashlib
from typing import Final

from scalerl_api.wire.base import Struct
from scalerl_api.wire.prompts import PromptRef

MAX_RESPONSES_BYTES: Final = 2**24
"""Maximum bytes of a group's responses: 4 million tokens. A larger group is not stored."""


def prompt_digest(prompt_token_ids: bytes) -> bytes:
    """8-byte digest of a prompt's token ids (little-endian int32); responses to other tokens are of no use as drafts.

    >>> prompt_digest(bytes(4)).hex()
    '4e842f2f50cc089e'
    """
    return hashlib.blake2b(prompt_token_ids, digest_size=8).digest()


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/responses``: past responses to a training prompt."""

    prompt: PromptRef
    digest: bytes
    """:func:`prompt_digest` of the prompt's tokens, as the actor renders it now."""


class PastResponse(Struct, frozen=True, array_like=True):
    """One response to a prompt."""

    version: int
    """Newest weight version that sampled a token of the response."""
    token_ids: bytes
    """Little-endian int32."""


class Responses(Struct, frozen=True, kw_only=True):
    """Response to a :class:`ResponsesRequest`."""

    responses: list[PastResponse]
    """Responses of the prompt's newest group; empty if there is no group, or if the prompt had other tokens then."""
