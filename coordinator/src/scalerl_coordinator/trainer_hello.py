"""A trainer's hello: which trainer is accepted, at which version, and the restore of a lost journal from its checkpoint."""

from __future__ import annotations

import logging
from typing import NoReturn

import msgspec

from scalerl_api import wire
from scalerl_api.attempts import Attempt
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Core, Refusal, check_identity
from scalerl_coordinator.state import CoordinatorState

log = logging.getLogger(__name__)


def accept_trainer(core: Core, request: wire.TrainerHello, now: float) -> None:
    """Accept a trainer, with the version of its checkpoint; it supersedes the previous one.

    Raises:
        Refusal: ``bad-request``, ``superseded``, ``bad-snapshot``, ``identity``, ``no-state``, ``checkpoints-lost`` or
            ``unknown-version``.
    """
    state = core.state
    if not request.incarnation:
        raise Refusal("bad-request", "incarnation is empty")
    attempt, latest = Attempt.parse(request.incarnation), Attempt.parse(state.incarnation)
    if attempt is not None and latest is not None and attempt < latest:
        raise Refusal(
            "superseded", f"attempt {latest} of the trainer has sent hello; attempt {attempt} must exit"
        )
    if state.awaits_trainer and request.snapshot is not None:
        _restore(core, request.snapshot, request.version)
    elif state.awaits_trainer and core.steps_lost:
        raise Refusal(
            "checkpoints-lost",
            "the run has trained steps, but neither its volume nor checkpoint.to has a checkpoint: restore one of them, or "
            "create another run",
        )
    if not all(state.closed(step) for step in range(state.version, request.version)):
        raise Refusal(
            "no-state",
            f"the trainer's checkpoint has version {request.version}, but the journal has {state.version} steps. "
            f"Only an empty coordinator can be restored from a checkpoint: empty its directory, or start a new run",
        )
    if request.version < 0:
        raise Refusal("bad-request", f"version is {request.version}, must be at least 0")
    if request.version < state.first_kept_step:
        _refuse_forgotten(state, request.version)
    if request.version < state.version:
        log.warning(
            "the trainer returns from version %d to %d; the steps between them are trained again, on the same rollouts",
            *(state.version, request.version),
        )
    core.flush_usage(now)
    core.commit(r.TrainerJoined(request.incarnation, request.version))
    core.failed_checkpoint = None
    log.info("trainer of %d ranks at version %d", request.world_size, request.version)


def _refuse_forgotten(state: CoordinatorState, version: int) -> NoReturn:
    if version == 0:
        raise Refusal(
            "checkpoints-lost",
            f"the trainer has no checkpoint, but a checkpoint of version {state.checkpoint} was committed and the "
            f"batches before version {state.first_kept_step} are deleted: starting from version 0 would lose "
            f"{state.counts.acknowledged} acknowledged rollouts and {len(state.points)} evaluation points. Restore a "
            f"checkpoint, or start a new run in an empty directory",
        )
    raise Refusal(
        "unknown-version",
        f"version {version} is older than the oldest kept checkpoint ({state.first_kept_step}); "
        f"start from a kept checkpoint",
    )


def _restore(core: Core, snapshot: bytes, version: int) -> None:
    try:
        restored = CoordinatorState.decode(snapshot)
    except msgspec.DecodeError as error:
        raise Refusal(
            "bad-snapshot", f"the checkpoint's coordinator snapshot cannot be decoded: {error}"
        ) from error
    check_identity(restored, core.settings)
    if restored.version != version:
        raise Refusal(
            "bad-snapshot",
            f"the snapshot has version {restored.version}, but its checkpoint has {version}",
        )
    forked = core.settings.forked_step
    # A checkpoint of the fork's own has the step in its snapshot.
    of_source = version == forked and restored.forked_step != forked
    if of_source:
        log.info("forked: continuing from the other run's checkpoint of version %d", version)
    else:
        log.warning("no journal: restoring the state from the trainer's checkpoint of version %d", version)
    core.commit(r.Restored(snapshot, forked if of_source else -1))
    core.updated_since_restore = set()
    for member in core.membership.members.values():
        core.mark_lost(member.version)
