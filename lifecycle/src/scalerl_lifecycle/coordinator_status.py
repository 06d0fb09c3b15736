"""Decodes a coordinator's status within bounds of memory: a tenant controls what answers at the address of a coordinator.

A few bytes of MessagePack become hundreds of bytes of Python objects. A small answer is decoded at once; a large one field by
field, without what the operator does not use (the curves of other evaluation sets, rewards by label).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec

from scalerl_api.http_answers import BadAnswer, decode_msgpack
from scalerl_api.wire import EvaluationPoint, Status

MAX_STATUS_BYTES: Final = 8 * 2**20
SMALL_BYTES: Final = 64 * 1024
"""Up to this size, an answer is decoded at once, on the event loop: about 150 points, 0.2 ms."""
MAX_POINTS: Final = 4096
"""Maximum number of points of a curve; of a longer one, the newest are kept. Each takes about 600 bytes of memory, twice while the
next status is decoded."""
MAX_POINT_VALUES: Final = 25_000
"""Maximum number of pass@k values and parts of verdicts in all points of a curve; as :data:`MAX_POINTS`."""
MAX_SENT_POINTS: Final = 40_000
"""Maximum number of points in an answer: more do not fit into :data:`MAX_STATUS_BYTES`, as a point has at least 210 bytes."""
DROPPED_TOGETHER: Final = 256
"""The oldest points are left out by multiples of this number, so that the others keep their places from one status to the next."""
MAX_POINT_BYTES: Final = 16 * 1024
"""Maximum size of a point without its rewards by label."""
MAX_OTHER_BYTES: Final = 256 * 1024
"""Maximum size of a status without its points."""
MAX_TEXT: Final = 2048
"""Longer texts are truncated, in characters."""

_Fields = Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=200)]
_Points = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_SENT_POINTS)]


def decode_status(content: bytes | bytearray) -> Status:
    """The status, with texts of at most ``MAX_TEXT`` characters.

    Raises:
        BadAnswer: it is none, or exceeds a limit of this module.
    """
    status = decode_msgpack(content, Status) if len(content) <= SMALL_BYTES else _decode_large(content)
    return _bounded(status)


def _decode_large(content: bytes | bytearray) -> Status:
    fields = _as(content, _Fields, "the answer is not a Status")
    points = _as(
        fields.pop("points", msgspec.Raw(b"\x90")),
        _Points,
        f"the status has more than {MAX_SENT_POINTS} points, or none",
    )
    fields.pop("set_points", None)
    if sum(len(memoryview(value)) for value in fields.values()) > MAX_OTHER_BYTES:
        raise BadAnswer(f"the status has more than {MAX_OTHER_BYTES} bytes besides its points")
    status = decode_msgpack(msgspec.msgpack.encode({**fields, "points": []}), Status)
    curve: list[EvaluationPoint] = []
    values = 0
    for raw in reversed(points[-MAX_POINTS:]):
        point = _as(raw, _Fields, "a point of the status is not an EvaluationPoint")
        point.pop("by_label", None)
        encoded = msgspec.msgpack.encode(point)
        if len(encoded) > MAX_POINT_BYTES:
            raise BadAnswer(f"a point of the status has more than {MAX_POINT_BYTES} bytes")
        decoded = decode_msgpack(encoded, EvaluationPoint)
        values += len(decoded.pass_at) + len(decoded.parts)
        if values > MAX_POINT_VALUES:
            break
        curve.append(decoded)
    curve.reverse()
    rest = -(len(points) - len(curve)) % DROPPED_TOGETHER
    return msgspec.structs.replace(status, points=curve[rest:] if rest < len(curve) else curve)


def _as(content: bytes | bytearray | msgspec.Raw, kind: Any, problem: str) -> Any:
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(problem) from error


def _bounded(status: Status) -> Status:
    """Truncates texts, and refuses figures that no run has, which the API server would refuse in the run's status."""
    figures = (
        *(status.wall_seconds, status.device_seconds, status.compute_tokens, status.waiting_seconds),
        *(status.inherited_seconds, status.inherited_device_seconds),
    )
    counts = (
        *(status.step, status.tokens_generated, status.tokens_trained),
        *(status.checkpoint_version + 1, status.forked_step + 1),
    )
    if not all(math.isfinite(figure) for figure in figures) or any(count >= 2**63 for count in counts):
        raise BadAnswer("the status has figures that are not finite, or do not fit into 64 bits")
    if min(*figures, *counts) < 0:  # without a checkpoint, its version is -1
        raise BadAnswer("the status has negative figures")
    long = {
        name: value[:MAX_TEXT]
        for name in Status.__struct_fields__
        if isinstance(value := getattr(status, name), str) and len(value) > MAX_TEXT
    }
    trackers = status.trackers
    if any(len(tracker.problem) + len(tracker.name) > MAX_TEXT for tracker in trackers):
        trackers = [
            msgspec.structs.replace(t, name=t.name[:64], problem=t.problem[:MAX_TEXT]) for t in trackers
        ]
    return msgspec.structs.replace(status, **long, trackers=trackers) if long or trackers else status
