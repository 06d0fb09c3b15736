"""From a journal to the state it holds."""

from __future__ import annotations

import secrets

import msgspec

from scalerl_coordinator import records as r
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal import Journal
from scalerl_coordinator.state import State


def load_state(journal: Journal) -> State:
    """The state after every record on disk; the journal then knows where the tokens of its groups are.

    Raises:
        CorruptJournal: acknowledged bytes are damaged, or do not fit.
        OSError: they cannot be read.
    """
    recovery = journal.recover()
    try:
        state = State() if recovery.snapshot is None else State.decode(recovery.snapshot)
    except msgspec.DecodeError as error:
        raise CorruptJournal(
            str(journal.directory), 0, f"the snapshot's state does not fit: {error}"
        ) from error
    for item in recovery:
        try:
            record = r.decode(item.header)
        except msgspec.DecodeError as error:
            at = item.location
            raise CorruptJournal(
                f"{journal.directory}, segment {at.segment}", at.offset, f"a record does not fit: {error}"
            ) from error
        state.apply(record)
        if isinstance(record, r.GroupAccepted):
            recovery.index(record.lease_id, item.location)
    recovery.retain(group.lease_id for group in state.groups.values() if not group.given_up)
    return state


def new_nonce() -> str:
    """Names a coordinator process in its lease ids."""
    return secrets.token_hex(4)


def new_member_id(name: str) -> str:
    """Names one incarnation of a member."""
    return f"{name}/{secrets.token_hex(4)}"
