"""What every message rests on."""

from __future__ import annotations

import msgspec

WIRE_VERSION = 6
WIRE_HEADER = "x-scalerl-wire"
CONTENT_TYPE = "application/msgpack"


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message."""


class Ack(Struct, frozen=True, kw_only=True):
    ok: bool = True


class Problem(Struct, frozen=True, kw_only=True):
    """Body of every answer that is not 2xx."""

    error: str
    """Short constant, e.g. ``wire-version``, ``unauthorized``, ``unknown-member``, ``superseded``, ``not-ready``."""
    message: str


class Member(Struct, frozen=True, kw_only=True):
    member_id: str
    name: str
    control_url: str
    weight_version: int
