"""Renders the Kubernetes objects of a run. Pure: same input, same objects.

Lives here: manifests, one file a role beside what all pods share (:mod:`.pods`). Command lines, environment and probes are
the same on one machine and come from the plan.

Never lives here: the decision whether an object is to exist, or I/O.
"""

from __future__ import annotations

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.build import coordinator, generator, network, prepare, storage, trainer
from scalerl_operator.build.scope import Desired, Images, Scope, finished, spec_hash
from scalerl_operator.build.storage import secret
from scalerl_operator.kube.types import Object


def render(
    run: ScaleRLRun, uid: str, desired: Desired, images: Images, *, operator_namespace: str
) -> list[Object]:
    """All objects of a run that are to exist now, in the order of creation, without its token (:func:`secret`).

    Always: the claim (unless the spec names one), the spec's ConfigMap, the NetworkPolicy. The Services exist as long as
    the coordinator or the trainer does, Deployment and PodDisruptionBudget as long as a generator does.

    A Job is immutable: an existing one stays. If its annotation ``scalerl.dev/spec-hash`` differs from :func:`spec_hash`, it
    was created for an earlier spec.

    operator_namespace: where the operator runs; its pods may reach the coordinator.

    Raises:
        ValueError: the run has no namespace.
    """
    scope = Scope(run, uid, images, operator_namespace)
    claim = storage.claim(scope)
    objects = [] if claim is None else [claim]
    objects += [storage.spec_map(scope, trained=desired.trained), network.network_policy(scope)]
    if desired.prepare:
        objects.append(prepare.job(scope))
    if desired.coordinator or desired.trainer_attempt is not None:
        objects += [network.coordinator_service(scope), network.trainer_service(scope)]
    if desired.coordinator:
        objects.append(coordinator.stateful_set(scope))
    if desired.generators:
        objects += [generator.disruption_budget(scope), generator.deployment(scope, desired.generators)]
    if desired.trainer_attempt is not None:
        objects.append(trainer.job(scope, desired.trainer_attempt))
    return [finished(rendered) for rendered in objects]


__all__ = ["render", "secret", "spec_hash"]
