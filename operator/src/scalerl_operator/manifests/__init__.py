"""Renders the Kubernetes objects of a run. Pure: same input, same objects.

Lives here: manifests, one file per kind of workload, and the parts that all pods share (:mod:`.pods`, :mod:`.container_fields`).
Command lines, environment and probes come from the plan, which is the same on one machine.

Never lives here: the decision whether an object exists, or I/O.
"""

from __future__ import annotations

from dataclasses import replace

from scalerl_lifecycle.workloads import Role
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import coordinator, gang, network, storage
from scalerl_operator.manifests.deployments import (
    beside_gang,
    disruption_budget,
    environment_servers,
    generators,
)
from scalerl_operator.manifests.gang import Gang
from scalerl_operator.manifests.jobs import prepare_job, trainer_job
from scalerl_operator.manifests.scope import Scope, finished, spec_hash
from scalerl_operator.manifests.storage import secret


def render(scope: Scope) -> list[Object]:
    """All objects of a run that should exist, in the order of creation, without its token (:func:`secret`).

    The claim (unless the spec names one), the spec's ConfigMap and the NetworkPolicies always exist, the Services with the
    coordinator or the trainer, environment servers with the coordinator, Deployment and PodDisruptionBudget with a generator.

    A Job is immutable. If the annotation ``scalerl.dev/spec-hash`` of an existing one differs from :func:`spec_hash`, it was
    created for an earlier spec.

    Raises:
        ValueError: the run has no namespace.
    """
    desired, wanted = scope.desired, scope.desired.wanted
    claim = storage.claim(scope)
    objects = [] if claim is None else [claim]
    objects += [storage.spec_map(scope, trained=desired.trained), network.network_policy(scope)]
    has_servers = scope.spec.environment is not None
    if has_servers:
        objects.append(network.environment_policy(scope))
    if wanted.prepare:
        objects.append(prepare_job(scope))
    if wanted.coordinator or wanted.trainer is not None:
        objects += [network.coordinator_service(scope), network.trainer_service(scope)]
    if desired.gang is not None:
        objects.append(_workload(scope, desired.gang))
    if wanted.coordinator:
        objects.append(coordinator.stateful_set(scope))
        if has_servers:
            objects.append(network.environment_service(scope))
            objects += beside_gang(scope, Role.ENVIRONMENT, environment_servers)
    if wanted.generators:
        objects.append(disruption_budget(scope))
        objects += beside_gang(scope, Role.GENERATOR, generators)
    if wanted.trainer is not None and (desired.gang is None or desired.gang.admitted):
        objects.append(trainer_job(scope, wanted.trainer))
    return [finished(rendered) for rendered in objects]


def _workload(scope: Scope, of: Gang) -> Object:
    """As it is before it is admitted."""
    scope = replace(scope, desired=replace(scope.desired, gang=None))
    job = trainer_job(scope, 1)["spec"]
    templates = {
        Role.COORDINATOR: (1, coordinator.stateful_set(scope)["spec"]["template"]),
        Role.GENERATOR: (of.generators, generators(scope)["spec"]["template"]),
        Role.TRAINER: (job["parallelism"], job["template"]),
    }
    if scope.spec.environment is not None and of.environments:
        template = environment_servers(scope)["spec"]["template"]
        templates[Role.ENVIRONMENT] = (of.environments, template)
    return gang.workload(scope.metadata(scope.names.workload), scope.queue_labels, templates, of.priority)


__all__ = ["render", "secret", "spec_hash"]
