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
from scalerl_operator.controller.observe import JOB_NAME, is_abandoned, is_settled, label
from scalerl_operator.controller.refusals import name_taken, preflight, refused
from scalerl_operator.controller.run_context import CLAIM, WORKLOADS, RunContext, is_deleted
from scalerl_operator.controller.volume import never_smaller, note_refusal, was_refused
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import applied, content_hash, first_difference, is_untouched, rendered_hash
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

    async def preflight(self, context: RunContext) -> Problem | None:
        """Why a new run cannot be started; see :func:`.preflight`."""
        images = pinned(context, self._images)
        desired = Desired(
            True, True, max(1, context.run.spec.generator.replicas), 1, source_claim=context.source_claim
        )
        render_all = functools.partial(self._render, context, desired, images)
        found = (self._cache, self._unlabelled, context, render_all)
        return await preflight(self._api, *found, namespaced=self._namespaced)

    async def apply(self, context: RunContext) -> None:
        """Applies the run's decision. Sets in the run's state why an object could not be created.

        Most reconciles follow a change of the status of a pod or a Job. Rendering and comparing all objects is most of the cost
        of a reconcile, so it is skipped while the :func:`fingerprint` is the same.
        """
        decision, state = context.decision, context.state
        desired = Desired(
            *(decision.prepare, decision.coordinator, decision.generators, decision.trainer, context.trained),
            gang=context.gang if is_wanted(decision, context.observed.prepare) else None,
            source_claim=context.source_claim,
        )
        images = pinned(context, self._images)
        points = () if context.coordinator is None else context.coordinator.points
        curve = [await _curve(context, points)] if points else []
        if state.fingerprint is not None and state.fingerprint == fingerprint(context, desired, images):
            blocked = await ensure_token(self._api, context)
            for obj in curve:
                blocked = blocked or await self.apply_one(obj, context)
        else:
            rendered = self._render(context, desired, images)
            wanted = [obj for obj in rendered if not (context.claim_gone and obj["kind"] == CLAIM)]
            blocked = await self._apply_all(context, [*wanted, *curve])
            settled = not state.repaired_lately(context.unix_seconds) and state.size_refused is None
            if blocked is None and not state.refused and settled:
                state.fingerprint = fingerprint(context, desired, images)
        if decision.coordinator and not any(pod.role == Role.COORDINATOR for pod in context.observed.pods):
            await self._replace_unlabelled_coordinator(context)
        blocked = blocked or next(iter(state.refused.values()), None)
        state.blocked = blocked or await diagnose(self._api, context)

    def _render(self, context: RunContext, desired: Desired, images: Images) -> list[Object]:
        return render(
            context.run,
            context.uid,
            desired,
            images,
            operator_namespace=self._operator_namespace,
            size=None if context.model is None else context.model.size,
            created=int(seconds(context.obj["metadata"].get("creationTimestamp"))),
        )

    async def find_unlabelled(self, context: RunContext) -> None:
        """Restores the labels of workloads of a run that begins to drain. Without its labels, a running workload is not in the
        cache, and would not be drained."""
        for kind, name in _to_be_drained(context):
            if (kind, name) not in context.objects:
                live = await self._api.get(kind, context.namespace, name)
                if live is not None and context.owns(live):
                    await self._adopt(live, context, _labels_of(name, context), at_once=True)

    async def _apply_all(self, context: RunContext, wanted: Sequence[Object]) -> Problem | None:
        """Creates, applies and deletes objects until the run has those of ``wanted``. Returns why the API server refused one,
        after which no other is applied. A refused repair is only recorded in the run's state.

        If the decision is frozen, existing objects are not changed. For a run that is being deleted, none is created, since a
        foreground deletion removes the objects before the run.

        Raises:
            ApiError: the call may succeed when retried.
        """
        frozen = context.decision.frozen
        names = {_key(obj) for obj in wanted}
        lost = {pod.job for pod in context.observed.pods if pod.lost and pod.role == Role.TRAINER}
        for (kind, name), live in context.objects.items():
            if (kind, name) in names or not context.owns(live):
                continue
            if kind in _DELETED_KINDS and not is_deleted(live):
                # Foreground: a Job exists until its pods have ended, so that no two attempts run at once.
                uid = live["metadata"]["uid"]
                await self._api.delete(kind, context.namespace, name, uid=uid, propagation="Foreground")
            if kind == "Job" and (is_settled(live) or name in lost):
                await self._end_failed_gang(context, name)
        if frozen:
            present = names if context.deleted else context.objects.keys()
            wanted = [obj for obj in wanted if _key(obj) not in present]
            names = {_key(obj) for obj in wanted}
        context.state.refused = {key: why for key, why in context.state.refused.items() if key in names}
        problem = await ensure_token(self._api, context)
        for obj in wanted:
            if problem is None and frozen:
                problem = await self._create(obj, context, frozen=True)
            elif problem is None:
                problem = await self.apply_one(obj, context)
        return problem

    async def apply_one(self, wanted: Object, context: RunContext) -> Problem | None:
        """Creates an object if it is absent, else applies it if its rendering or its content has changed."""
        key = kind, name = _key(wanted)
        live = context.objects.get(key)
        if live is None:
            return await self._create(wanted, context)
        if (problem := name_taken(live, context)) is not None or is_deleted(live):
            return problem
        if kind in ("Job", WORKLOAD):  # immutable
            labels = _labels_of(name, context) if kind == "Job" else wanted["metadata"]["labels"]
            await self._adopt(live, context, labels)
            return None
        if kind == CLAIM:
            wanted = never_smaller(wanted, live)
            if was_refused(context, wanted, live):
                return None
        state, hashes = context.state, (rendered_hash(wanted), content_hash(live))
        rendering_changed = rendered_hash(live) != rendered_hash(wanted)
        if key not in state.settled and not rendering_changed and is_untouched(wanted, live):
            state.settled[key] = hashes  # applied by an earlier process of the operator
        if state.settled.get(key) == hashes:
            state.refused.pop(key, None)
            return None
        if rendering_changed:
            return (await self._change(wanted, live, context))[1]
        repairs = dict(state.repairs)
        if not state.may_repair(key, context.unix_seconds):
            return None
        applied_object, problem = await self._change(wanted, live, context)
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
        log.warning("%s/%s: %s", context.namespace, context.name, text)
        await self._api.event(context.obj, "Warning", Reason.REPAIRED_DRIFT, text)
        return None

    async def _replace_unlabelled_coordinator(self, context: RunContext) -> None:
        """Deletes the coordinator's pod if its labels were removed: its Service and the operator do not find it, and the
        StatefulSet cannot create another of its name. The next pod resumes from the journal."""
        names = Names(context.name)
        name, owner = f"{names.coordinator}-0", context.objects.get(("StatefulSet", names.coordinator))
        pod = context.objects.get(("Pod", name))
        if owner is None or is_deleted(owner) or (pod is not None and _is_labelled(pod, context)):
            return
        age = context.unix_seconds - seconds(owner["metadata"].get("creationTimestamp"))
        if age < SEARCH_SECONDS or 0 <= context.unix_seconds - context.state.pod_searched < SEARCH_SECONDS:
            return
        context.state.pod_searched = context.unix_seconds
        for pod in await self._api.list("Pod", context.namespace, field_selector=f"metadata.name={name}"):
            owners = {o["uid"] for o in pod["metadata"].get("ownerReferences") or ()}
            mounted = {(v.get("secret") or {}).get("secretName") for v in pod["spec"].get("volumes") or ()}
            labelled = _is_labelled(pod, context) and label(pod, RUN) == label_value(context.name)
            foreign = owners - {owner["metadata"]["uid"]} or names.token not in mounted
            if is_deleted(pod) or labelled or foreign:
                continue
            await self._api.delete("Pod", context.namespace, name, uid=pod["metadata"]["uid"])
            text = f"Pod {name}: its labels were removed; deleted, so that the StatefulSet creates another"
            await self._api.event(context.obj, "Warning", Reason.REPAIRED_DRIFT, text)

    async def _end_failed_gang(self, context: RunContext, job: str) -> None:
        """Deletes the remaining pods of a failed Job, or of one with a lost pod, with a short grace period: they have nothing to
        save, and may hang in a collective."""
        grace_seconds = FAILED_GANG_GRACE_SECONDS
        for (kind, name), pod in context.objects.items():
            if kind == "Pod" and context.owns(pod) and label(pod, JOB_NAME) == job:
                phase, metadata = (pod.get("status") or {}).get("phase"), pod["metadata"]
                longer = metadata.get("deletionGracePeriodSeconds", grace_seconds + 1) > grace_seconds
                if phase in ("Pending", "Running") and longer:
                    uid = metadata["uid"]
                    await self._api.delete(
                        kind, context.namespace, name, uid=uid, grace_seconds=grace_seconds
                    )

    async def _create(self, obj: Object, context: RunContext, *, frozen: bool = False) -> Problem | None:
        """Creates an object. One that exists by now is applied if it is the run's; not if frozen."""
        kind, name = _key(obj)
        try:
            created = await self._api.create(obj)
        except errors.AlreadyExists:
            live = await self._api.get(kind, context.namespace, name)
            if live is None:
                raise  # deleted meanwhile: the next reconcile decides
            if (problem := name_taken(live, context)) is not None:
                return problem
            labels = _labels_of(name, context) if kind == "Job" else obj["metadata"]["labels"]
            await self._adopt(live, context, labels)
            return None if frozen else await self.apply_one(obj, context)
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, context)
        self._settle(obj, created, context)
        return None

    async def _adopt(
        self, live: Object, context: RunContext, labels: dict[str, str], *, at_once: bool = False
    ) -> None:
        """Restores the labels of an object, without which the cache receives no events of it.

        labels: of a Job only the operator's, since Kueue refuses changes of its own labels on an admitted Job.
        at_once: without back-off.
        """
        key = kind, name = _key(live)
        missing = {label_name: text for label_name, text in labels.items() if label(live, label_name) != text}
        if not missing:
            context.state.refused.pop(key, None)
        elif not is_deleted(live) and (at_once or context.state.may_repair(key, context.unix_seconds)):
            patch = {"metadata": {"uid": live["metadata"]["uid"], "labels": missing}}
            try:
                live = await self._api.patch(kind, context.namespace, name, patch)
            except (errors.Invalid, errors.Forbidden) as error:
                context.state.refused[key] = refused(error, live, context)
            else:
                context.state.refused.pop(key, None)
                text = f"{kind} {name}: labels were removed, and are restored: {', '.join(sorted(missing))}"
                await self._api.event(context.obj, "Warning", Reason.REPAIRED_DRIFT, text)
        self._remember(live, context)

    async def _change(
        self, wanted: Object, live: Object, context: RunContext
    ) -> tuple[Object | None, Problem | None]:
        """Applies an object that exists. Returns the object after it (None: it was not applied) and why it was refused."""
        kind, name = _key(wanted)
        uid = live["metadata"]["uid"]
        try:
            if uid not in context.state.applied:
                owned = await self._own_fields(kind, name, context)
                if owned is None:
                    # A claim that is gone may have held steps: the next reconcile decides.
                    return None, await self._create(wanted, context) if kind != CLAIM else None
                if (problem := name_taken(owned, context)) is not None:
                    return None, problem
                uid = owned["metadata"]["uid"]
                context.state.applied.add(uid)
            # By uid: another object may have the name by now.
            applied_object = await self._api.apply(wanted, uid=uid)
        except (errors.Invalid, errors.Forbidden) as error:
            if kind == CLAIM and note_refusal(context, wanted, live, error):
                return None, None
            return None, refused(error, wanted, context)
        self._settle(wanted, applied_object, context)
        return applied_object, None

    async def _own_fields(self, kind: str, name: str, context: RunContext) -> Object | None:
        """Makes the fields that the operator set on creation applied ones (:mod:`scalerl_operator.kube.objects`). Returns the
        object before; None: it is gone."""
        for attempt in range(1, OWNERSHIP_TRIES + 1):
            live = await self._api.get(kind, context.namespace, name)
            if live is None or not context.owns(live):
                break
            metadata = live["metadata"]
            managed = applied(metadata.get("managedFields") or ())
            if managed is None:
                break
            patch = {"metadata": {"uid": metadata["uid"], "managedFields": managed}}
            version = metadata["resourceVersion"]
            try:
                await self._api.patch(kind, context.namespace, name, patch, resource_version=version)
                break
            except errors.Conflict:  # controllers write the status of an object that starts
                if attempt == OWNERSHIP_TRIES:
                    raise
        return live

    def _settle(self, wanted: Object, written: Object, context: RunContext) -> None:
        context.state.refused.pop(_key(written), None)
        context.state.settled[_key(written)] = (rendered_hash(wanted), content_hash(written))
        self._remember(written, context)

    def _remember(self, obj: Object, context: RunContext) -> None:
        context.objects[_key(obj)] = obj
        self._cache.remember(obj)


def _text(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


def _key(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _labels_of(name: str, context: RunContext) -> dict[str, str]:
    """The operator's labels of the workload with that name."""
    names = Names(context.name)
    roles = {
        names.prepare: Role.PREPARE,
        names.coordinator: Role.COORDINATOR,
        names.generator: Role.GENERATOR,
        names.extra_generators: Role.GENERATOR,
    }
    role = roles.get(name, Role.TRAINER)
    attempt = {ATTEMPT: name.rpartition("-")[2]} if role is Role.TRAINER else {}
    return labels_of_run(context.name, context.uid, role) | attempt


def _is_labelled(pod: Object, context: RunContext) -> bool:
    """Whether the pod matches the selector of the coordinator's StatefulSet."""
    return context.owns(pod) and label(pod, COMPONENT) == Role.COORDINATOR


def _to_be_drained(context: RunContext) -> list[tuple[str, str]]:
    """(kind, name) of the workloads of a run that is suspended or deleted and has not begun to drain."""
    memory, names = context.memory, Names(context.name)
    to_stop = context.deleted or context.obj["spec"].get("suspend") is True
    drains = memory.rest is not Suspension.NO or memory.drain_since is not None or memory.outcome
    if not to_stop or drains:
        return []
    workloads = [("Job", names.prepare)] if context.before.phase is Phase.PREPARING else []
    if memory.attempt > 0:
        workloads += [("Deployment", names.generator), ("Deployment", names.extra_generators)]
        workloads += [("StatefulSet", names.coordinator)]
        workloads += [("Job", names.trainer_job(memory.attempt))]
    return workloads


def pinned(context: RunContext, images: Images) -> Images:
    """``images``, with those of running workloads in their place: an upgrade of the operator does not mix versions within a run.
    A run that was suspended gets the new ones.

    The annotation of each workload has its image without ``spec.images``, for the time when the spec no longer names one.
    """
    live: dict[str, str] = {}
    for (kind, _), obj in context.objects.items():
        image = (obj["metadata"].get("annotations") or {}).get(IMAGE)
        if image is not None and kind in WORKLOADS and context.owns(obj) and not is_deleted(obj):
            live[label(obj, COMPONENT)] = image
    return replace(
        images,
        trainer=live.get(Role.TRAINER, live.get(Role.PREPARE, images.trainer)),
        generator=live.get(Role.GENERATOR, images.generator),
        coordinator=live.get(Role.COORDINATOR, images.coordinator),
    )


async def _curve(context: RunContext, points: Sequence[EvaluationPoint]) -> Object:
    """The curve's ConfigMap. The table of thousands of points, whose number the coordinator determines, takes .1 s: in a thread."""
    make = functools.partial(curve_config_map, context.run, context.uid, points)
    return make() if len(points) <= MOST_POINTS_AT_ONCE else await asyncio.to_thread(make)


def fingerprint(context: RunContext, desired: Desired, images: Images) -> int | None:
    """Hash of the inputs of rendering and of the contents of the run's objects: while it is the same, applying them changes
    nothing. None while an object is being deleted, except the Job of an attempt that only pods on lost nodes keep, which may take
    as long as the node is away.

    Left out are pods, which are not rendered, the curve, which every reconcile compares, and of a Job, which is immutable, all
    but its uid and its labels.
    """
    curve = ("ConfigMap", Names(context.name).curve)
    contents: list[tuple[str, str, int]] = []
    for (kind, name), obj in context.objects.items():
        if kind == "Pod" or (kind, name) == curve:
            continue
        if is_deleted(obj) and not (kind == "Job" and is_abandoned(obj, context.observed.pods)):
            return None
        metadata = obj["metadata"]
        job = (metadata["uid"], tuple(sorted((metadata.get("labels") or {}).items())))
        contents.append((kind, name, hash(job) if kind == "Job" else content_hash(obj)))
    labels = tuple(sorted(context.run.metadata.labels.items()))
    size = None if context.model is None else context.model.size
    inputs = (context.generation, labels, desired, images, size, context.decision.frozen, context.deleted)
    return hash((inputs, tuple(sorted(contents))))
