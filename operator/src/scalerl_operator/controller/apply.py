"""Applies a run's objects: writes those that are wanted (:mod:`.object_writer`), deletes those that are no longer wanted, and pods
that keep the run from going on and that no controller deletes: of a failed gang, of a coordinator without its labels or on a node
that does not answer. Only objects with the run's uid are changed or deleted."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_api.wire import EvaluationPoint
from scalerl_lifecycle.lifecycle_types import Problem, Suspension, Wanted
from scalerl_lifecycle.status_fields import seconds
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.diagnosis import diagnose
from scalerl_operator.controller.gang_admission import is_wanted
from scalerl_operator.controller.object_writer import ObjectWriter, ensure_token, key_of, labels_of
from scalerl_operator.controller.parts import CLAIM, WORKLOADS, Findings, Run
from scalerl_operator.controller.pod_views import JOB_NAME, attempt_of, is_abandoned, is_settled
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import content_hash, is_deleted, label
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import render
from scalerl_operator.manifests.gang import WORKLOAD
from scalerl_operator.manifests.scope import Desired, Images, Scope
from scalerl_operator.manifests.storage import curve_config_map
from scalerl_operator.names import COMPONENT, IMAGE, RUN, Names, label_value

log = logging.getLogger(__name__)

MAX_POINTS_AT_ONCE: Final = 500
"""Points of a curve whose table is made on the event loop: 5 ms."""
_DELETED_KINDS: Final = WORKLOADS | {"Service", "PodDisruptionBudget", WORKLOAD}
"""Kinds of objects that are deleted when they are no longer wanted; those with data, and the NetworkPolicy, stay."""
SEARCH_SECONDS: Final = 15.0
"""Between two searches for the coordinator's pod when it is not in the cache."""
FAILED_GANG_GRACE_SECONDS: Final = 5


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


async def replace_unlabelled_coordinator(api: KubeApi, run: Run) -> None:
    """Deletes the coordinator's pod if its labels were removed: its Service and the operator do not find it, and the
    StatefulSet cannot create another of its name. The next pod resumes from the journal."""
    names = Names(run.name)
    name, owner = f"{names.coordinator}-0", run.objects.get(("StatefulSet", names.coordinator))
    pod = run.objects.get(("Pod", name))
    if owner is None or is_deleted(owner) or (pod is not None and _is_labelled(pod, run)):
        return
    age = run.unix_seconds - seconds(owner["metadata"].get("creationTimestamp"))
    if age < SEARCH_SECONDS or 0 <= run.unix_seconds - run.state.pod_searched < SEARCH_SECONDS:
        return
    run.state.pod_searched = run.unix_seconds
    for pod in await api.list("Pod", run.namespace, field_selector=f"metadata.name={name}"):
        owners = {o["uid"] for o in pod["metadata"].get("ownerReferences") or ()}
        mounted = {(v.get("secret") or {}).get("secretName") for v in pod["spec"].get("volumes") or ()}
        labelled = _is_labelled(pod, run) and label(pod, RUN) == label_value(run.name)
        foreign = owners - {owner["metadata"]["uid"]} or names.token not in mounted
        if is_deleted(pod) or labelled or foreign:
            continue
        await api.delete("Pod", run.namespace, name, uid=pod["metadata"]["uid"])
        text = f"Pod {name}: its labels were removed; deleted, so that the StatefulSet creates another"
        await api.event(run.obj, "Warning", Reason.REPAIRED_DRIFT, text)


async def delete_lost_coordinators(api: KubeApi, findings: Findings) -> None:
    """Deletes the coordinator's pods on lost nodes by force, once no other with their number can follow. They may still run: the
    next one takes the journal over."""
    run = findings.run
    owner = run.objects.get(("StatefulSet", Names(run.name).coordinator))
    for pod in findings.observed.lost_coordinators:
        if (
            owner is not None
            and not is_deleted(owner)
            and attempt_of(owner["spec"]["template"]) <= pod.attempt
        ):
            continue
        text = (
            f"Pod {pod.name}: its node does not answer; deleted by force, so that the next coordinator starts"
        )
        await api.event(run.obj, "Warning", Reason.NODE_LOST, text)
        await api.delete("Pod", run.namespace, pod.name, uid=pod.uid, grace_seconds=0)


async def end_failed_gang(api: KubeApi, run: Run, job: str) -> None:
    """Deletes the remaining pods of a failed Job, or of one with a lost pod, with a short grace period: they have nothing to
    save, and may hang in a collective."""
    grace = FAILED_GANG_GRACE_SECONDS
    for (kind, name), pod in run.objects.items():
        if kind != "Pod" or not run.owns(pod) or label(pod, JOB_NAME) != job:
            continue
        phase, metadata = (pod.get("status") or {}).get("phase"), pod["metadata"]
        longer = metadata.get("deletionGracePeriodSeconds", grace + 1) > grace
        if phase in ("Pending", "Running") and longer:
            uid = metadata["uid"]
            await api.delete(kind, run.namespace, name, uid=uid, grace_seconds=grace)


def _is_labelled(pod: Object, run: Run) -> bool:
    """Whether the pod matches the selector of the coordinator's StatefulSet."""
    return run.owns(pod) and label(pod, COMPONENT) == Role.COORDINATOR
