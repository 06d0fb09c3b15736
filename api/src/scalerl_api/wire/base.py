"""Base of all messages, and the messages that several modules use."""

from __future__ import annotations

import msgspec

WIRE_VERSION = 7
WIRE_HEADER = "x-scalerl-wire"
CONTENT_TYPE = "application/msgpack"


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message."""


class Ack(Struct, frozen=True, kw_only=True):
    """Response without content."""

    ok: bool = True


class Problem(Struct, frozen=True, kw_only=True):
    """Body of every response with a status other than 2xx."""

    error: str
    """Machine-readable constant, e.g. ``wire-version``, ``unauthorized``, ``unknown-member``, ``superseded``, ``not-ready``."""
    message: str


class Member(Struct, frozen=True, kw_only=True):
    """A registered generator."""

    member_id: str
    """Identifier of its present registration."""
    name: str
    control_url: str
    """URL of its weight-update endpoints."""
    weight_version: int
    """Version that its server holds; -1 before the first weights."""


class Uploads(Struct, frozen=True, kw_only=True):
    """Copies of the checkpoints in ``checkpoint.to``."""

    version: int
    """Newest complete one; -1: none."""
    problem: str = ""
    """Why the newest checkpoint on the volume could not be copied; empty after a success."""
