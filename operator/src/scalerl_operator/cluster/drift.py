"""Drift: whether an object is as rendered. Pure."""

from __future__ import annotations

from scalerl_operator.cluster.types import Object


def differs(desired: Object, live: Object) -> str | None:
    """The first field of ``desired`` that ``live`` does not have so, as a path with both values; None: all is as desired."""
    raise NotImplementedError
