"""Converts snapshots of earlier releases to format 4, the current one.

Format 1 has no field ``format``. A run has one task, and a prompt is an index into its split.
Format 2: a run has one evaluation set, and an incomplete evaluation has its version as key.
Format 3: a run has one task and one ``cursor``; 0 stands for ``next_slot``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scalerl_api.wire import Split


class _Head(msgspec.Struct):
    format: int = 1


def present_format(data: bytes) -> bytes:
    """The snapshot in the current format.

    Raises:
        msgspec.DecodeError: ``data`` is not a snapshot.
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
        raise msgspec.DecodeError(f"cannot convert a snapshot of an earlier release: {error}") from error


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
