"""Applies a run's objects: creates missing ones, applies changed ones, deletes those that are no longer wanted.

Only objects with the run's uid are changed or deleted; another object with the same name is reported.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from scalerl_api.conditions import Phase, Reason
from scalerl_api.wire import EvaluationPoint
from scalerl_operator.build import render
from scalerl_operator.build.gang import WORKLOAD
from scalerl_operator.build.scope import Desired, Images
from scalerl_operator.build.storage import curve_config_map
from scalerl_operator.controller.coordinator_poller import ensure_token
from scalerl_operator.controller.diagnosis import diagnose
from scalerl_operator.controller.gang import is_wanted
from scalerl_operator.controller.observe import JOB_NAME, attempt_of, is_abandoned, is_settled
from scalerl_operator.controller.parts import CLAIM, WORKLOADS, Findings, Run
from scalerl_operator.controller.refusals import name_taken, preflight, refused
from scalerl_operator.controller.volume import never_smaller, note_refusal, was_refused
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import (
    applied,
    content_hash,
    first_difference,
    is_deleted,
    is_untouched,
    label,
    rendered_hash,
)
from scalerl_operator.kube.types import Object
from scalerl_operator.kube.unlabelled import UnlabelledNames
from scalerl_operator.names import ATTEMPT, COMPONENT, IMAGE, RUN, Names, label_value
from scalerl_operator.names import labels as labels_of_run
from scalerl_operator.policy.lifecycle_types import Suspension
from scalerl_operator.policy.memory_status import seconds
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

OWNERSHIP_TRIES: Final = 5
"""To take over the ownership of an object's fields while controllers write the object."""
SEARCH_SECONDS: Final = 15.0
"""Between two searches for the coordinator's pod when it is not in the cache."""
FAILED_GANG_GRACE_SECONDS: Final = 5
MOST_POINTS_AT_ONCE: Final = 500
"""Points of a curve whose table is made on the event loop: 5 ms."""
_DELETED_KINDS: Final = WORKLOADS | {"Service", "PodDisruptionBudget", WORKLOAD}
"""Kinds of objects that are deleted when they are no longer wanted; those with data, and the NetworkPolicy, stay."""
_VALUE_CHARACTERS: Final = 60
"""Of a value in a message."""


class Applier:
    """Writes the objects of runs.

    images: of runs that name none.
    operator_namespace: its pods may connect to the coordinators.
    namespaced: see :func:`.preflight`.
    """

    def __init__(
        self, api: KubeApi, cache: Cache, images: Images, operator_namespace: str, *, namespaced: bool
    ) -> None:
        self._api = api
        self._cache = cache
        self._images = images
        self._operator_namespace = operator_namespace
        self._namespaced = namespaced
        self._unlabelled = UnlabelledNames(api)

    async def preflight(self, findings: Findings) -> Problem | None:
        """Why a new run cannot be started; see :func:`.preflight`."""
        replicas, source_claim = findings.accepted.spec.generator.replicas, findings.checks.source_claim
        desired = Desired(True, True, max(1, replicas), 1, source_claim=source_claim)
        images = pinned(findings.run, self._images)
        render_all = functools.partial(self._render, findings, desired, images)
        found = (self._cache, self._unlabelled, findings.run, findings.accepted.run, render_all)
        return await preflight(self._api, *found, namespaced=self._namespaced)

    async def apply(self, findings: Findings) -> Problem | None:
        """Applies the run's decision. Returns why an object could not be created.

        Most reconciles follow a change of the status of a pod or a Job. Rendering and comparing all objects is most of the cost
        of a reconcile, so it is skipped while the :func:`fingerprint` is the same.
        """
        run, decision, state = findings.run, findings.decision, findings.run.state
        observed, checks = findings.observed, findings.checks
        desired = Desired(
            *(decision.prepare, decision.coordinator, decision.generators, decision.trainer, run.steps > 0),
            coordinator_attempt=decision.memory.coordinator_attempt,
            gang=observed.gang if is_wanted(decision, observed.prepare) else None,
            source_claim=checks.source_claim,
        )
        images = pinned(run, self._images)
        points = () if observed.coordinator is None else observed.coordinator.points
        curve = [await _curve(findings, points)] if points else []
        if state.fingerprint is not None and state.fingerprint == fingerprint(findings, desired, images):
            blocked = await ensure_token(self._api, run, findings.accepted.run)
            for obj in curve:
                blocked = blocked or await self.apply_one(obj, run)
        else:
            rendered = self._render(findings, desired, images)
            wanted = [obj for obj in rendered if not (checks.claim_gone and obj["kind"] == CLAIM)]
            blocked = await self._apply_all(findings, [*wanted, *curve])
            settled = not state.repaired_lately(run.unix_seconds) and state.size_refused is None
            if blocked is None and not state.refused and settled:
                state.fingerprint = fingerprint(findings, desired, images)
        if decision.coordinator and not any(pod.role == Role.COORDINATOR for pod in observed.pods):
            await self._replace_unlabelled_coordinator(run)
        await self._delete_lost_coordinators(findings)
        blocked = blocked or next(iter(state.refused.values()), None)
        state.blocked = blocked or await diagnose(self._api, findings)
        return state.blocked

    def _render(self, findings: Findings, desired: Desired, images: Images) -> list[Object]:
        run = findings.run
        return render(
            findings.accepted.run,
            run.uid,
            desired,
            images,
            operator_namespace=self._operator_namespace,
            size=None if findings.model is None else findings.model.size,
            created=int(seconds(run.obj["metadata"].get("creationTimestamp"))),
        )

    async def find_unlabelled(self, run: Run) -> None:
        """Restores the labels of workloads of a run that begins to drain. Without its labels, a running workload is not in the
        cache, and would not be drained."""
        for kind, name in _to_be_drained(run):
            if (kind, name) not in run.objects:
                live = await self._api.get(kind, run.namespace, name)
                if live is not None and run.owns(live):
                    await self._adopt(live, run, _labels_of(name, run), at_once=True)

    async def _apply_all(self, findings: Findings, wanted: Sequence[Object]) -> Problem | None:
        """Creates, applies and deletes objects until the run has those of ``wanted``. Returns why the API server refused one,
        after which no other is applied. A refused repair is only recorded in the run's state.

        If the decision is frozen, existing objects are not changed. For a run that is being deleted, none is created, since a
        foreground deletion removes the objects before the run.

        Raises:
            ApiError: the call may succeed when retried.
        """
        run, frozen = findings.run, findings.decision.frozen
        names = {_key(obj) for obj in wanted}
        lost = {pod.job for pod in findings.observed.pods if pod.lost and pod.role == Role.TRAINER}
        for (kind, name), live in run.objects.items():
            if (kind, name) in names or not run.owns(live):
                continue
            if kind in _DELETED_KINDS and not is_deleted(live):
                # Foreground: a Job exists until its pods have ended, so that no two attempts run at once.
                uid = live["metadata"]["uid"]
                await self._api.delete(kind, run.namespace, name, uid=uid, propagation="Foreground")
            if kind == "Job" and (is_settled(live) or name in lost):
                await self._end_failed_gang(run, name)
        if frozen:
            present = names if run.deleted else run.objects.keys()
            wanted = [obj for obj in wanted if _key(obj) not in present]
            names = {_key(obj) for obj in wanted}
        run.state.refused = {key: why for key, why in run.state.refused.items() if key in names}
        problem = await ensure_token(self._api, run, findings.accepted.run)
        for obj in wanted:
            if problem is None and frozen:
                problem = await self._create(obj, run, frozen=True)
            elif problem is None:
                problem = await self.apply_one(obj, run)
        return problem

    async def apply_one(self, wanted: Object, run: Run) -> Problem | None:
        """Creates an object if it is absent, else applies it if its rendering or its content has changed."""
        key = kind, name = _key(wanted)
        live = run.objects.get(key)
        if live is None:
            return await self._create(wanted, run)
        if (problem := name_taken(live, run)) is not None or is_deleted(live):
            return problem
        if kind in ("Job", WORKLOAD):  # immutable
            labels = _labels_of(name, run) if kind == "Job" else wanted["metadata"]["labels"]
            await self._adopt(live, run, labels)
            return None
        if kind == CLAIM:
            wanted = never_smaller(wanted, live)
            if was_refused(run, wanted, live):
                return None
        state, hashes = run.state, (rendered_hash(wanted), content_hash(live))
        rendering_changed = rendered_hash(live) != rendered_hash(wanted)
        if key not in state.settled and not rendering_changed and is_untouched(wanted, live):
            state.settled[key] = hashes  # applied by an earlier process of the operator
        if state.settled.get(key) == hashes:
            state.refused.pop(key, None)
            return None
        if rendering_changed:
            return (await self._change(wanted, live, run))[1]
        repairs = dict(state.repairs)
        if not state.may_repair(key, run.unix_seconds):
            return None
        applied_object, problem = await self._change(wanted, live, run)
        if problem is not None:
            state.refused[key] = problem
        if applied_object is None:
            return None
        difference = first_difference(live, applied_object)
        if difference is None:  # others only changed fields of their own: not a repair
            state.repairs = repairs
            return None
        path, before, after = difference
        text = f"{kind} {name}: {path} was changed to {_text(before)}, and is restored to {_text(after)}"
        log.warning("%s/%s: %s", run.namespace, run.name, text)
        await self._api.event(run.obj, "Warning", Reason.REPAIRED_DRIFT, text)
        return None

    async def _replace_unlabelled_coordinator(self, run: Run) -> None:
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
        for pod in await self._api.list("Pod", run.namespace, field_selector=f"metadata.name={name}"):
            owners = {o["uid"] for o in pod["metadata"].get("ownerReferences") or ()}
            mounted = {(v.get("secret") or {}).get("secretName") for v in pod["spec"].get("volumes") or ()}
            labelled = _is_labelled(pod, run) and label(pod, RUN) == label_value(run.name)
            foreign = owners - {owner["metadata"]["uid"]} or names.token not in mounted
            if is_deleted(pod) or labelled or foreign:
                continue
            await self._api.delete("Pod", run.namespace, name, uid=pod["metadata"]["uid"])
            text = f"Pod {name}: its labels were removed; deleted, so that the StatefulSet creates another"
            await self._api.event(run.obj, "Warning", Reason.REPAIRED_DRIFT, text)

    async def _delete_lost_coordinators(self, findings: Findings) -> None:
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
            text = f"Pod {pod.name}: its node does not answer; deleted by force, so that the next coordinator starts"
            await self._api.event(run.obj, "Warning", Reason.NODE_LOST, text)
            await self._api.delete("Pod", run.namespace, pod.name, uid=pod.uid, grace_seconds=0)

    async def _end_failed_gang(self, run: Run, job: str) -> None:
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
                await self._api.delete(kind, run.namespace, name, uid=uid, grace_seconds=grace)

    async def _create(self, obj: Object, run: Run, *, frozen: bool = False) -> Problem | None:
        """Creates an object. One that exists by now is applied if it is the run's; not if frozen."""
        kind, name = _key(obj)
        try:
            created = await self._api.create(obj)
        except errors.AlreadyExists:
            live = await self._api.get(kind, run.namespace, name)
            if live is None:
                raise  # deleted meanwhile: the next reconcile decides
            if (problem := name_taken(live, run)) is not None:
                return problem
            labels = _labels_of(name, run) if kind == "Job" else obj["metadata"]["labels"]
            await self._adopt(live, run, labels)
            return None if frozen else await self.apply_one(obj, run)
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, run)
        self._settle(obj, created, run)
        return None

    async def _adopt(self, live: Object, run: Run, labels: dict[str, str], *, at_once: bool = False) -> None:
        """Restores the labels of an object, without which the cache receives no events of it.

        labels: of a Job only the operator's, since Kueue refuses changes of its own labels on an admitted Job.
        at_once: without back-off.
        """
        key = kind, name = _key(live)
        missing = {label_name: text for label_name, text in labels.items() if label(live, label_name) != text}
        if not missing:
            run.state.refused.pop(key, None)
        elif not is_deleted(live) and (at_once or run.state.may_repair(key, run.unix_seconds)):
            patch = {"metadata": {"uid": live["metadata"]["uid"], "labels": missing}}
            try:
                live = await self._api.patch(kind, run.namespace, name, patch)
            except (errors.Invalid, errors.Forbidden) as error:
                run.state.refused[key] = refused(error, live, run)
            else:
                run.state.refused.pop(key, None)
                text = f"{kind} {name}: labels were removed, and are restored: {', '.join(sorted(missing))}"
                await self._api.event(run.obj, "Warning", Reason.REPAIRED_DRIFT, text)
        self._remember(live, run)

    async def _change(self, wanted: Object, live: Object, run: Run) -> tuple[Object | None, Problem | None]:
        """Applies an object that exists. Returns the object after it (None: it was not applied) and why it was refused."""
        kind, name = _key(wanted)
        uid = live["metadata"]["uid"]
        try:
            if uid not in run.state.applied:
                owned = await self._own_fields(kind, name, run)
                if owned is None:
                    # A claim that is gone may have held steps: the next reconcile decides.
                    return None, await self._create(wanted, run) if kind != CLAIM else None
                if (problem := name_taken(owned, run)) is not None:
                    return None, problem
                uid = owned["metadata"]["uid"]
                run.state.applied.add(uid)
            # By uid: another object may have the name by now.
            applied_object = await self._api.apply(wanted, uid=uid)
        except (errors.Invalid, errors.Forbidden) as error:
            if kind == CLAIM and note_refusal(run, wanted, live, error):
                return None, None
            return None, refused(error, wanted, run)
        self._settle(wanted, applied_object, run)
        return applied_object, None

    async def _own_fields(self, kind: str, name: str, run: Run) -> Object | None:
        """Makes the fields that the operator set on creation applied ones (:mod:`scalerl_operator.kube.objects`). Returns the
        object before; None: it is gone."""
        for attempt in range(1, OWNERSHIP_TRIES + 1):
            live = await self._api.get(kind, run.namespace, name)
            if live is None or not run.owns(live):
                break
            metadata = live["metadata"]
            managed = applied(metadata.get("managedFields") or ())
            if managed is None:
                break
            patch = {"metadata": {"uid": metadata["uid"], "managedFields": managed}}
            version = metadata["resourceVersion"]
            try:
                await self._api.patch(kind, run.namespace, name, patch, resource_version=version)
                break
            except errors.Conflict:  # controllers write the status of an object that starts
                if attempt == OWNERSHIP_TRIES:
                    raise
        return live

    def _settle(self, wanted: Object, written: Object, run: Run) -> None:
        run.state.refused.pop(_key(written), None)
        run.state.settled[_key(written)] = (rendered_hash(wanted), content_hash(written))
        self._remember(written, run)

    def _remember(self, obj: Object, run: Run) -> None:
        run.objects[_key(obj)] = obj
        self._cache.remember(obj)


def _text(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


def _key(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _labels_of(name: str, run: Run) -> dict[str, str]:
    """The operator's labels of the workload with that name."""
    names = Names(run.name)
    roles = {
        names.prepare: Role.PREPARE,
        names.coordinator: Role.COORDINATOR,
        names.generator: Role.GENERATOR,
        names.extra_generators: Role.GENERATOR,
        names.environment: Role.ENVIRONMENT,
        names.extra_environments: Role.ENVIRONMENT,
    }
    role = roles.get(name, Role.TRAINER)
    attempt = {ATTEMPT: name.rpartition("-")[2]} if role is Role.TRAINER else {}
    return labels_of_run(run.name, run.uid, role) | attempt


def _is_labelled(pod: Object, run: Run) -> bool:
    """Whether the pod matches the selector of the coordinator's StatefulSet."""
    return run.owns(pod) and label(pod, COMPONENT) == Role.COORDINATOR


def _to_be_drained(run: Run) -> list[tuple[str, str]]:
    """(kind, name) of the workloads of a run that is suspended or deleted and has not begun to drain."""
    memory, names = run.memory, Names(run.name)
    to_stop = run.deleted or run.obj["spec"].get("suspend") is True
    drains = memory.rest is not Suspension.NO or memory.drain_since is not None or memory.outcome
    if not to_stop or drains:
        return []
    workloads = [("Job", names.prepare)] if run.before.phase is Phase.PREPARING else []
    if memory.attempt > 0:
        workloads += [("Deployment", names.generator), ("Deployment", names.extra_generators)]
        workloads += [("StatefulSet", names.coordinator)]
        workloads += [("Job", names.trainer_job(memory.attempt))]
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
    return make() if len(points) <= MOST_POINTS_AT_ONCE else await asyncio.to_thread(make)


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
    inputs = (run.generation, labels, desired, images, size, findings.decision.frozen, run.deleted)
    return hash((inputs, tuple(sorted(contents))))
