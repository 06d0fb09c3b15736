"""The decision of a reconcile: that of the lifecycle (:mod:`scalerl_lifecycle.lifecycle`) on what was observed. Pure."""

from __future__ import annotations

from dataclasses import replace

from scalerl_api.conditions import Phase
from scalerl_lifecycle import lifecycle
from scalerl_lifecycle.lifecycle_types import GATED_SECONDS, LifecycleDecision, LifecycleInput, Service
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Accepted, Observed, Run
from scalerl_operator.kube.objects import label
from scalerl_operator.manifests.scope import spec_hash
from scalerl_operator.names import QUEUE


def decide(
    run: Run, accepted: Accepted, observed: Observed, gated_seconds: float = GATED_SECONDS
) -> LifecycleDecision:
    """The lifecycle's decision. A run without an accepted spec stays as it is until it is deleted; its drain needs no spec."""
    if accepted.found is not None or run.deleted:
        spec = None if accepted.found is None else accepted.found.spec
        return lifecycle.decide(
            spec,
            replace(lifecycle_input(run, accepted, observed), gated_seconds=gated_seconds),
            run.persisted,
        )
    phase = run.before.phase if run.persisted.attempt else Phase.PENDING
    return LifecycleDecision(phase, run.persisted)


def lifecycle_input(run: Run, accepted: Accepted, observed: Observed) -> LifecycleInput:
    """The observations that the lifecycle depends on."""
    spec = None if accepted.found is None else accepted.found.spec
    return LifecycleInput(
        unix_seconds=run.unix_seconds,
        deleting=run.deleted,
        suspend=spec is not None and spec.suspend,
        queued=bool(label(run.obj, QUEUE)),
        unadmitted=observed.gang is not None and not observed.gang.admitted,
        serving=observed.serving,
        prepare=observed.prepare,
        trainer=observed.trainer,
        coordinator=_service(accepted, observed, Role.COORDINATOR),
        generators=_service(accepted, observed, Role.GENERATOR),
        environment=None
        if spec is None or spec.environment is None
        else _service(accepted, observed, Role.ENVIRONMENT),
        status=observed.coordinator,
        stop="" if run.state.autoscaler is None else run.state.autoscaler.stop,
        steps=run.steps,
        started=all(_is_started(accepted, observed, role) for role in (Role.COORDINATOR, Role.GENERATOR)),
        edit=accepted.edit,
        unproven=accepted.unproven,
    )


def _is_started(accepted: Accepted, observed: Observed, role: Role) -> bool:
    """Whether a pod of a role is ready that was created for the accepted spec, as far as that is known."""
    hashes = ("", "" if accepted.found is None else spec_hash(accepted.found, role))
    return any(pod.ready and pod.spec_hash in hashes for pod in observed.of(role))


def _service(accepted: Accepted, observed: Observed, role: Role) -> Service:
    """The lifecycle's input about a role; failures of pods of an earlier spec, which are being replaced, do not count."""
    found = observed.service(role)
    if accepted.found is None or (found.bad_input is None and not found.restarts):
        return found
    return observed.service(role, spec_hash(accepted.found, role))
