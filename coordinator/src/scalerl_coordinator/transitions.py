"""The only way to change the state: :func:`apply`, used live and in replay.

It is pure: no I/O, no clock, no randomness, and no settings except the journaled :class:`~.settings.Identity`. The same
records yield the same state, and every prefix of the records yields a state that the run was in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalerl_coordinator import batch_sizes, generator_transitions, trainer_transitions
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.state import CoordinatorState


def apply(state: CoordinatorState, record: r.AnyRecord) -> None:
    """Change ``state`` by one record. :mod:`.core` has checked the record, so one that does not fit the state is a bug."""
    _APPLY[type(record)](state, record)


def _started(state: CoordinatorState, record: r.Started) -> None:
    batch_sizes.change(state, record.identity)
    state.nonce, state.next_lease = record.nonce, 0


def _restored(state: CoordinatorState, record: r.Restored) -> None:
    identity, nonce, number = state.known_identity, state.nonce, state.next_lease
    restored = CoordinatorState.decode(record.snapshot)
    for name in state.__struct_fields__:
        setattr(state, name, getattr(restored, name))
    state.nonce, state.next_lease = nonce, number
    state.restored = state.version
    if record.forked_step >= 0:
        state.forked_step = record.forked_step
        state.inherited_seconds = state.usage.wall_seconds
        state.inherited_device_seconds = state.usage.device_seconds
        # As in a new run: its own time counts from its first lease.
        state.usage.waiting_seconds, state.leased = 0.0, False
        state.checkpoint_failures = state.reported_failures = 0
    batch_sizes.change(state, identity)


_APPLY: dict[type, Callable[[CoordinatorState, Any], None]] = {
    r.Started: _started,
    r.Restored: _restored,
    **generator_transitions.APPLY,
    **trainer_transitions.APPLY,
}
