"""Loads the state from a journal."""

from __future__ import annotations

import msgspec

from scalerl_coordinator import journal_records as r
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal import Journal
from scalerl_coordinator.state import CoordinatorState
from scalerl_coordinator.transitions import apply


def load_state(journal: Journal) -> CoordinatorState:
    """The state after all records on disk. Also loads the journal's index of the groups' tokens.

    Raises:
        CorruptJournal: acknowledged bytes are damaged, or cannot be decoded.
        OSError: they cannot be read.
    """
    recovery = journal.recover()
    try:
        state = (
            CoordinatorState() if recovery.snapshot is None else CoordinatorState.decode(recovery.snapshot)
        )
    except msgspec.DecodeError as error:
        raise CorruptJournal(
            str(journal.directory), 0, f"the snapshot's state cannot be decoded: {error}"
        ) from error
    for header, at in recovery:
        try:
            record = r.decode(header)
        except msgspec.DecodeError as error:
            raise CorruptJournal(
                f"{journal.directory}, segment {at.segment}",
                at.offset,
                f"a record cannot be decoded: {error}",
            ) from error
        apply(state, record)
        if isinstance(record, r.GroupAccepted):
            recovery.blobs[record.lease_id] = at
    recovery.retain(group.lease_id for group in state.groups.values() if not group.given_up)
    return state
