"""Reads snapshots of earlier releases.

Format 1, without the field ``format``: runs of one task, whose prompts are named by an index into their split.
Format 2: runs of one evaluation set, whose incomplete evaluations are named by their version.
Format 3: runs of one task, with one cursor; where it is 0, it is ``next_slot``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scalerl_api.wire import Split


class _Head(msgspec.Struct):
    format: int = 1


def present_format(data: bytes) -> bytes:
    """A snapshot of an earlier release as this one writes it; one of this release as it is.

    Raises:
        msgspec.DecodeError: it is no snapshot.
    """
    format = msgspec.msgpack.decode(data, type=_Head).format
    if format > 3:
        return data
    try:
        state = msgspec.msgpack.decode(data)
        state = _of_format_1(state) if format == 1 else state
        if format < 3:
            state["evaluations"] = {
                (version, 0): evaluation for version, evaluation in state.get("evaluations", {}).items()
            }
        state["format"] = 4
        state["cursors"] = [state.pop("cursor", 0) or state.get("next_slot", 0)]
        return msgspec.msgpack.encode(state)
    except (AttributeError, TypeError, ValueError) as error:
        raise msgspec.DecodeError(f"a snapshot of an earlier release: {error}") from error


def _of_format_1(state: dict[str, Any]) -> dict[str, Any]:
    def train(index: int) -> list[Any]:
        return [0, Split.TRAIN, index]

    state["prompts"] = {slot: train(index) for slot, index in state.get("prompts", {}).items()}
    state["leases"] = {
        lease_id: [[0, split, index], slot, *rest]
        for lease_id, (split, slot, index, *rest) in state.get("leases", {}).items()
    }
    state["tries"] = {
        slot: [[train(index), group] for index, group in tries]
        for slot, tries in state.get("tries", {}).items()
    }
    if "history" in state:
        state["histories"] = [state.pop("history")]
    return state
