"""The only way to change the state: :func:`apply`, used live and in replay.

It is pure: no I/O, no clock, no randomness, and no settings except the journaled :class:`~.settings.Identity`. The same
records yield the same state, and every prefix of the records yields a state that the run was in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalerl_coordinator import batch_sizes
from scalerl_coordinator import generator_transitions as of_generators
from scalerl_coordinator import journal_records as r
from scalerl_coordinator import trainer_transitions as of_trainer
from scalerl_coordinator.state import CoordinatorState


def apply(state: CoordinatorState, record: r.Record) -> None:
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
    r.LeasesIssued: of_generators.issued,
    r.LeaseClosed: of_generators.lease_closed,
    r.GroupAccepted: of_generators.group_accepted,
    r.GivenUp: of_generators.given_up,
    r.Dropped: of_generators.dropped,
    r.EvaluationStarted: of_generators.evaluation_started,
    r.EvaluationReleased: of_generators.evaluation_released,
    r.EvaluationAccepted: of_generators.evaluation_accepted,
    r.TrainerJoined: of_trainer.trainer_joined,
    r.WeightsLost: of_trainer.weights_lost,
    r.StepTrained: of_trainer.step_trained,
    r.StepSkipped: of_trainer.step_skipped,
    r.SupervisedTrained: of_trainer.supervised_trained,
    r.Published: of_trainer.published,
    r.UnprovenChanged: of_trainer.unproven_changed,
    r.CheckpointCommitted: of_trainer.checkpoint_committed,
    r.StopRequested: of_trainer.stop_requested,
    r.FinishSent: of_trainer.finish_sent,
    r.UsageAdded: of_trainer.usage_added,
}
"""What each record changes."""
