"""Applies a run's objects: writes those that are wanted (:mod:`.object_writer`), deletes those that are no longer wanted, and pods
that keep the run from going on (:mod:`.stray_pods`). Only objects with the run's uid are changed or deleted."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.wire import EvaluationPoint
from scalerl_lifecycle.lifecycle_types import Suspension, Wanted
from scalerl_lifecycle.problems import Problem
from scalerl_lifecycle.status_fields import seconds
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.coordinator_poller import ensure_token
from scalerl_operator.controller.diagnosis import diagnose
from scalerl_operator.controller.gang_admission import is_wanted
from scalerl_operator.controller.object_writer import ObjectWriter, key_of, labels_of
from scalerl_operator.controller.parts import CLAIM, WORKLOADS, Findings, Run
from scalerl_operator.controller.pod_views import is_abandoned, is_settled
from scalerl_operator.controller.stray_pods import (
    delete_lost_coordinators,
    end_failed_gang,
    replace_unlabelled_coordinator,
)
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import content_hash, is_deleted, label
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import render
from scalerl_operator.manifests.gang import WORKLOAD
from scalerl_operator.manifests.scope import Desired, Images, Scope
from scalerl_operator.manifests.storage import curve_config_map
from scalerl_operator.names import COMPONENT, IMAGE, Names

log = logging.getLogger(__name__)

MAX_POINTS_AT_ONCE: Final = 500
"""Points of a curve whose table is made on the event loop: 5 ms."""
_DELETED_KINDS: Final = WORKLOADS | {"Service", "PodDisruptionBudget", WORKLOAD}
"""Kinds of objects that are deleted when they are no longer wanted; those with data, and the NetworkPolicy, stay."""


class Applier:
    """Writes the objects of runs.

    Args:
        images: of runs that name none.
        operator_namespace: its pods may connect to the coordinators.
    """

    def __init__(self, api: KubeApi, cache: Cache, images: Images, operator_namespace: str) -> None:
        self._api = api
        self._cache = cache
        self._images = images
        self._operator_namespace = operator_namespace
        self._writer = ObjectWriter(api, cache)

    def render_all(self, findings: Findings) -> list[Object]:
        """All objects that a new run will have."""
        desired = Desired(Wanted(True, True, True, 1), source_claim=findings.checks.source_claim)
        return self._render(findings, desired, pinned(findings.run, self._images))

    async def apply(self, findings: Findings) -> Problem | None:
        """Applies the run's decision. Returns why an object could not be created.

        Most reconciles follow a change of the status of a pod or a Job. Rendering and comparing all objects is most of the cost
        of a reconcile, so it is skipped while the :func:`fingerprint` is the same.
        """
        run, decision, state = findings.run, findings.decision, findings.run.state
        observed, checks = findings.observed, findings.checks
        desired = Desired(
            decision.wanted,
            trained=run.steps > 0,
            coordinator_attempt=decision.persisted.coordinator_attempt,
            gang=observed.gang if is_wanted(decision, observed.prepare) else None,
            source_claim=checks.source_claim,
        )
        images = pinned(run, self._images)
        points = () if observed.coordinator is None else observed.coordinator.points
        curve = [await _curve(findings, points)] if points else []
        if state.fingerprint is not None and state.fingerprint == fingerprint(findings, desired, images):
            blocked = await ensure_token(self._api, run, findings.accepted.run)
            for obj in curve:
                blocked = blocked or await self._writer.write(obj, run)
        else:
            rendered = self._render(findings, desired, images)
            wanted = [obj for obj in rendered if not (checks.claim_gone and obj["kind"] == CLAIM)]
            blocked = await self._apply_all(findings, [*wanted, *curve])
            settled = not state.repaired_lately(run.unix_seconds) and state.size_refused is None
            if blocked is None and not state.refused and settled:
                state.fingerprint = fingerprint(findings, desired, images)
        if decision.wanted.coordinator and not any(pod.role == Role.COORDINATOR for pod in observed.pods):
            await replace_unlabelled_coordinator(self._api, run)
        await delete_lost_coordinators(self._api, findings)
        blocked = blocked or next(iter(state.refused.values()), None)
        state.blocked = blocked or await diagnose(self._api, findings)
        return state.blocked

    def _render(self, findings: Findings, desired: Desired, images: Images) -> list[Object]:
        run = findings.run
        return render(
            Scope(
                findings.accepted.run,
                run.uid,
                images,
                self._operator_namespace,
                size=None if findings.model is None else findings.model.size,
                desired=desired,
                created=int(seconds(run.obj["metadata"].get("creationTimestamp"))),
            )
        )

    async def find_unlabelled(self, run: Run) -> None:
        """Restores the labels of workloads of a run that begins to drain. Without its labels, a running workload is not in the
        cache, and would not be drained."""
        for kind, name in _to_be_drained(run):
            if (kind, name) not in run.objects:
                live = await self._api.get(kind, run.namespace, name)
                if live is not None and run.owns(live):
                    await self._writer.restore_labels(live, run, labels_of(name, run), at_once=True)

    async def _apply_all(self, findings: Findings, wanted: Sequence[Object]) -> Problem | None:
        """Creates, applies and deletes objects until the run has those of ``wanted``. Returns why the API server refused one,
        after which no other is applied. A refused repair is only recorded in the run's state.

        Existing objects change only if the decision says so (``update_existing``). For a run that is being deleted, none is created, since a
        foreground deletion removes the objects before the run.

        Raises:
            ApiError: the call may succeed when retried.
        """
        run, update = findings.run, findings.decision.update_existing
        names = {key_of(obj) for obj in wanted}
        lost = {pod.job for pod in findings.observed.pods if pod.lost and pod.role == Role.TRAINER}
        for (kind, name), live in run.objects.items():
            if (kind, name) in names or not run.owns(live):
                continue
            if kind in _DELETED_KINDS and not is_deleted(live):
                # Foreground: a Job exists until its pods have ended, so that no two attempts run at once.
                uid = live["metadata"]["uid"]
                await self._api.delete(kind, run.namespace, name, uid=uid, propagation="Foreground")
            if kind == "Job" and (is_settled(live) or name in lost):
                await end_failed_gang(self._api, run, name)
        if not update:
            present = names if run.deleted else run.objects.keys()
            wanted = [obj for obj in wanted if key_of(obj) not in present]
            names = {key_of(obj) for obj in wanted}
        run.state.refused = {key: why for key, why in run.state.refused.items() if key in names}
        problem = await ensure_token(self._api, run, findings.accepted.run)
        for obj in wanted:
            if problem is None and not update:
                problem = await self._writer.create(obj, run, update=False)
            elif problem is None:
                problem = await self._writer.write(obj, run)
        return problem


def _to_be_drained(run: Run) -> list[tuple[str, str]]:
    """(kind, name) of the workloads of a run that is suspended or deleted and has not begun to drain."""
    persisted, names = run.persisted, Names(run.name)
    to_stop = run.deleted or run.obj["spec"].get("suspend") is True
    drains = (
        persisted.suspension is not Suspension.NO or persisted.drain_since is not None or persisted.outcome
    )
    if not to_stop or drains:
        return []
    workloads = [("Job", names.prepare)] if run.before.phase is Phase.PREPARING else []
    if persisted.attempt > 0:
        workloads += [("Deployment", names.generator), ("Deployment", names.extra_generators)]
        workloads += [("StatefulSet", names.coordinator)]
        workloads += [("Job", names.trainer_job(persisted.attempt))]
        if run.obj["spec"].get("environment"):
            workloads += [("Deployment", names.environment), ("Deployment", names.extra_environments)]
    return workloads


def pinned(run: Run, images: Images) -> Images:
    """``images``, with those of running workloads in their place: an upgrade of the operator does not mix versions within a run.
    A run that was suspended gets the new ones.

    The annotation of each workload has its image without ``spec.images``, for the time when the spec no longer names one.
    """
    live: dict[str, str] = {}
    for (kind, _), obj in run.objects.items():
        image = (obj["metadata"].get("annotations") or {}).get(IMAGE)
        if image is not None and kind in WORKLOADS and run.owns(obj) and not is_deleted(obj):
            live[label(obj, COMPONENT)] = image
    return replace(
        images,
        trainer=live.get(Role.TRAINER, live.get(Role.PREPARE, images.trainer)),
        generator=live.get(Role.GENERATOR, images.generator),
        coordinator=live.get(Role.COORDINATOR, images.coordinator),
    )


async def _curve(findings: Findings, points: Sequence[EvaluationPoint]) -> Object:
    """The curve's ConfigMap. The table of thousands of points, whose number the coordinator determines, takes .1 s: in a thread."""
    make = functools.partial(curve_config_map, findings.accepted.run, findings.run.uid, points)
    return make() if len(points) <= MAX_POINTS_AT_ONCE else await asyncio.to_thread(make)


def fingerprint(findings: Findings, desired: Desired, images: Images) -> int | None:
    """Hash of the inputs of rendering and of the contents of the run's objects: while it is the same, applying them changes
    nothing. None while an object is being deleted, except the Job of an attempt that only pods on lost nodes keep, which may take
    as long as the node is away.

    Left out are pods, which are not rendered, the curve, which every reconcile compares, and of a Job, which is immutable, all
    but its uid and its labels.
    """
    run = findings.run
    curve = ("ConfigMap", Names(run.name).curve)
    contents: list[tuple[str, str, int]] = []
    for (kind, name), obj in run.objects.items():
        if kind == "Pod" or (kind, name) == curve:
            continue
        if is_deleted(obj) and not (kind == "Job" and is_abandoned(obj, findings.observed.pods)):
            return None
        metadata = obj["metadata"]
        job = (metadata["uid"], tuple(sorted((metadata.get("labels") or {}).items())))
        contents.append((kind, name, hash(job) if kind == "Job" else content_hash(obj)))
    labels = tuple(sorted(findings.accepted.run.metadata.labels.items()))
    size = None if findings.model is None else findings.model.size
    inputs = (run.generation, labels, desired, images, size, findings.decision.update_existing, run.deleted)
    return hash((inputs, tuple(sorted(contents))))
