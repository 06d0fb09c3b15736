"""Applies a run's objects: creates what is missing, applies what differs, removes what is no longer wanted.

Only objects that carry the run's uid are changed or removed. An object of somebody else with the same name is reported and
left alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from scalerl_api.conditions import Phase, Reason
from scalerl_operator.build import render
from scalerl_operator.build.scope import Desired, Images
from scalerl_operator.build.storage import curve_config_map
from scalerl_operator.controller.coordinator_poller import ensure_token
from scalerl_operator.controller.diagnosis import diagnose
from scalerl_operator.controller.observe import JOB_NAME, is_settled, label, seconds
from scalerl_operator.controller.refusals import name_taken, preflight, refused
from scalerl_operator.controller.run_context import CLAIM, WORKLOADS, RunContext, Settled, is_deleted
from scalerl_operator.controller.volume import never_smaller, note_refusal, was_refused
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import applied, content_hash, first_difference, is_untouched, rendered_hash
from scalerl_operator.kube.types import Object
from scalerl_operator.names import ATTEMPT, COMPONENT, IMAGE, RUN, Names, label_value
from scalerl_operator.names import labels as labels_of_run
from scalerl_operator.policy.lifecycle_types import Suspension
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

OWNERSHIP_TRIES: Final = 5
"""How often the ownership of an object's fields is taken over again when somebody writes the object meanwhile."""
SEARCH_SECONDS: Final = 15.0
"""Between two searches for a coordinator's pod that its StatefulSet should have made and that is not in the cache."""
FAILED_GANG_GRACE_SECONDS: Final = 5
_REMOVED: Final = WORKLOADS | {"Service", "PodDisruptionBudget"}
"""Kinds of which a run's objects are removed when they are no longer wanted; what holds data stays, and what guards it."""
_SHOWN: Final = 60
"""Characters of a value in a message."""


class Applier:
    """Writes the objects of runs.

    images: where a run names none. operator_namespace: its pods may reach the coordinators. namespaced: see
    :func:`.preflight`.
    """

    def __init__(
        self, api: KubeApi, cache: Cache, images: Images, operator_namespace: str, *, namespaced: bool
    ) -> None:
        self._api = api
        self._cache = cache
        self._images = images
        self._operator_namespace = operator_namespace
        self._namespaced = namespaced

    async def preflight(self, context: RunContext) -> Problem | None:
        """What keeps a run of which there is nothing yet from being started; see :func:`.preflight`."""
        images = pinned(context, self._images)
        every = Desired(True, True, max(1, context.run.spec.generator.replicas), 1)
        render_all = functools.partial(self._render, context, every, images)
        return await preflight(self._api, context, render_all, namespaced=self._namespaced)

    async def apply(self, context: RunContext) -> None:
        """Makes the run's objects as its decision has them, and notes in the run's state what keeps one from being made.

        Most reconciles follow a change of a pod's or a Job's status. To render and compare all of a run's objects is most of
        what a reconcile costs, so they are left alone while neither their inputs nor what they hold has changed.
        """
        decision, state = context.decision, context.state
        desired = Desired(
            decision.prepare, decision.coordinator, decision.generators, decision.trainer, context.trained
        )
        images = pinned(context, self._images)
        points = () if context.coordinator is None else context.coordinator.points
        curve = [curve_config_map(context.run, context.uid, points)] if points else []
        known = state.fingerprint
        if known is not None and known == fingerprint(context, desired, images):
            blocked = await ensure_token(self._api, context)
            for obj in curve:
                blocked = blocked or await self.apply_one(obj, context)
        else:
            wanted = [
                obj
                for obj in self._render(context, desired, images)
                if not (context.claim_gone and obj["kind"] == CLAIM)
            ]
            blocked = await self._apply_all(context, [*wanted, *curve])
            found = fingerprint(context, desired, images)
            settled = not state.repaired_lately(context.unix_seconds) and state.size_refused is None
            if blocked is None and not state.refused and found is not None and settled:
                state.fingerprint = found
        if decision.coordinator and not any(pod.role == Role.COORDINATOR for pod in context.observed.pods):
            await self._replace_unlabelled_coordinator(context)
        blocked = blocked or next(iter(state.refused.values()), None)
        state.blocked = blocked or await diagnose(self._api, context)

    def _render(self, context: RunContext, desired: Desired, images: Images) -> list[Object]:
        return render(context.run, context.uid, desired, images, operator_namespace=self._operator_namespace)

    async def find_unlabelled(self, context: RunContext) -> None:
        """Finds by name the workloads whose label somebody removed: they are not in the cache, and run. For a run that is about
        to drain, since nothing asks for them later."""
        for kind, name in _to_be_drained(context):
            if (kind, name) not in context.objects:
                live = await self._api.get(kind, context.namespace, name)
                if live is not None and context.owns(live):
                    await self._adopt(live, context, _labels_of(name, context), at_once=True)

    async def _apply_all(self, context: RunContext, wanted: Sequence[Object]) -> Problem | None:
        """Creates, applies and removes objects until the run has those of ``wanted``. Returns what the cluster refused; a
        refused repair keeps no other object from being applied, and is noted in the run's state.

        Where the decision is frozen, existing objects are left as they are, and nothing is created for a run that is being
        deleted: a deletion in the foreground removes what a run owns before the run.

        Raises:
            ApiError: no answer, or one that another try may change.
        """
        frozen = context.decision.frozen
        names = {_key(obj) for obj in wanted}
        for (kind, name), live in context.objects.items():
            if (kind, name) in names or not context.owns(live):
                continue
            if kind in _REMOVED and not is_deleted(live):
                # Foreground: a Job is gone only when its pods are, so that the next attempt never runs beside it.
                uid = live["metadata"]["uid"]
                await self._api.delete(kind, context.namespace, name, uid=uid, propagation="Foreground")
            if kind == "Job" and is_settled(live):
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
        """One object, created if absent, else applied if what is rendered or what the object holds has changed since."""
        key = kind, name = _key(wanted)
        live = context.objects.get(key)
        if live is None:
            return await self._create(wanted, context)
        if (problem := name_taken(live, context)) is not None or is_deleted(live):
            return problem
        if kind == "Job":  # immutable: another spec is another attempt
            await self._adopt(live, context, _labels_of(name, context))
            return None
        if kind == CLAIM:
            wanted = never_smaller(wanted, live)
            if was_refused(context, wanted, live):
                return None
        state, now = context.state, Settled(rendered_hash(wanted), content_hash(live))
        if key not in state.settled and rendered_hash(live) == now.rendered and is_untouched(wanted, live):
            state.settled[key] = now  # the first reconcile of this process finds what an earlier one applied
        if state.settled.get(key) == now:
            state.refused.pop(key, None)
            return None
        if rendered_hash(live) != now.rendered:
            return (await self._change(wanted, live, context))[1]
        before = state.repairs.get(key)
        if not state.may_repair(key, context.unix_seconds):
            return None
        made, problem = await self._change(wanted, live, context)
        if problem is not None:
            state.refused[key] = problem
        changed = None if made is None else first_difference(live, made)
        if changed is not None:
            path, was, restored = changed
            text = (
                f"{kind} {name}: {path} was changed to {_shown(was)}, and is restored to {_shown(restored)}"
            )
            log.warning("%s/%s: %s", context.namespace, context.name, text)
            await self._api.event(context.obj, "Warning", Reason.REPAIRED_DRIFT, text)
        elif made is not None:  # others changed only what is theirs: no repair, so it does not count as one
            state.repairs.pop(key)
            state.repairs |= {} if before is None else {key: before}
        return None

    async def _replace_unlabelled_coordinator(self, context: RunContext) -> None:
        """Deletes the coordinator's pod if somebody removed its labels: its Service and the operator no longer find it, and
        its name keeps the StatefulSet from creating another. The next one resumes from the journal."""
        called = Names(context.name)
        name, owner = f"{called.coordinator}-0", context.objects.get(("StatefulSet", called.coordinator))
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
            foreign = owners - {owner["metadata"]["uid"]} or called.token not in mounted
            if is_deleted(pod) or labelled or foreign:
                continue
            await self._api.delete("Pod", context.namespace, name, uid=pod["metadata"]["uid"])
            text = f"Pod {name}: its labels were removed; deleted, so that the StatefulSet creates another"
            await self._api.event(context.obj, "Warning", Reason.REPAIRED_DRIFT, text)

    async def _end_failed_gang(self, context: RunContext, job: str) -> None:
        """Ranks left over by a failed gang have nothing to save, and may hang in a collective."""
        for (kind, name), pod in context.objects.items():
            if kind == "Pod" and context.owns(pod) and label(pod, JOB_NAME) == job:
                phase = (pod.get("status") or {}).get("phase")
                grace = pod["metadata"].get("deletionGracePeriodSeconds", FAILED_GANG_GRACE_SECONDS + 1)
                if phase in ("Pending", "Running") and grace > FAILED_GANG_GRACE_SECONDS:
                    uid, seconds_left = pod["metadata"]["uid"], FAILED_GANG_GRACE_SECONDS
                    await self._api.delete(kind, context.namespace, name, uid=uid, grace_seconds=seconds_left)

    async def _create(self, obj: Object, context: RunContext, *, frozen: bool = False) -> Problem | None:
        """Creates an object, never over one that another has created meanwhile. frozen: one that exists is left as it is."""
        kind, name = _key(obj)
        try:
            made = await self._api.create(obj)
        except errors.AlreadyExists:
            live = await self._api.get(kind, context.namespace, name)
            if live is None:
                raise  # and gone again: the next reconcile decides
            if (problem := name_taken(live, context)) is not None:
                return problem
            ours = _labels_of(name, context) if kind == "Job" else obj["metadata"]["labels"]
            await self._adopt(live, context, ours)
            return None if frozen else await self.apply_one(obj, context)
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, context)
        self._settle(obj, made, context)
        return None

    async def _adopt(
        self, live: Object, context: RunContext, labels: dict[str, str], *, at_once: bool = False
    ) -> None:
        """Restores the labels of an object: without them the cache does not get its events.

        labels: those to restore; of a Job only ours, since Kueue lets nobody write its own on a Job that it has admitted.
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
        """Applies an object that exists. Returns it as it is now, None where it was not applied, and what was refused."""
        kind, name = _key(wanted)
        uid = live["metadata"]["uid"]
        try:
            if uid not in context.state.applied:
                there = await self._own_fields(kind, name, context)
                if there is None:
                    # A claim that is gone may have held steps: the next reconcile decides.
                    return None, await self._create(wanted, context) if kind != CLAIM else None
                if (problem := name_taken(there, context)) is not None:
                    return None, problem
                uid = there["metadata"]["uid"]
                context.state.applied.add(uid)
            # By uid: another object may have the name by now.
            made = await self._api.apply(wanted, uid=uid)
        except (errors.Invalid, errors.Forbidden) as error:
            if kind == CLAIM and note_refusal(context, wanted, live, error):
                return None, None
            return None, refused(error, wanted, context)
        self._settle(wanted, made, context)
        return made, None

    async def _own_fields(
        self, kind: str, name: str, context: RunContext, tries: int = OWNERSHIP_TRIES
    ) -> Object | None:
        """Turns what creating an object has set into what we apply (:mod:`scalerl_operator.kube.objects`). Returns the
        object as it was; None: it is gone.

        Retries on a conflict: while an object starts, controllers write its status all the time.
        """
        live = await self._api.get(kind, context.namespace, name)
        if live is None or not context.owns(live):
            return live
        metadata = live["metadata"]
        managed = applied(metadata.get("managedFields") or ())
        if managed is None:
            return live
        patch = {"metadata": {"uid": metadata["uid"], "managedFields": managed}}
        version = metadata["resourceVersion"]
        try:
            await self._api.patch(kind, context.namespace, name, patch, resource_version=version)
        except errors.Conflict:
            if tries <= 1:
                raise
            return await self._own_fields(kind, name, context, tries - 1)
        return live

    def _settle(self, wanted: Object, made: Object, context: RunContext) -> None:
        context.state.refused.pop(_key(made), None)
        context.state.settled[_key(made)] = Settled(rendered_hash(wanted), content_hash(made))
        self._remember(made, context)

    def _remember(self, obj: Object, context: RunContext) -> None:
        context.objects[_key(obj)] = obj
        self._cache.remember(obj)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _key(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _labels_of(name: str, context: RunContext) -> dict[str, str]:
    """Of a workload, by its name."""
    called = Names(context.name)
    roles = {
        called.prepare: Role.PREPARE,
        called.coordinator: Role.COORDINATOR,
        called.generator: Role.GENERATOR,
    }
    role = roles.get(name, Role.TRAINER)
    attempt = {ATTEMPT: name.rpartition("-")[2]} if role is Role.TRAINER else {}
    return labels_of_run(context.name, context.uid, role) | attempt


def _is_labelled(pod: Object, context: RunContext) -> bool:
    """Whether the coordinator's StatefulSet still finds the pod."""
    return context.owns(pod) and label(pod, COMPONENT) == Role.COORDINATOR


def _to_be_drained(context: RunContext) -> list[tuple[str, str]]:
    """(kind, name) of what should work in a run that is to be suspended or deleted and has not begun to drain."""
    memory, names = context.memory, Names(context.name)
    asked = context.deleted or context.obj["spec"].get("suspend") is True
    done = memory.rest is not Suspension.NO or memory.drain_since is not None or memory.outcome
    if not asked or done:
        return []
    found = [("Job", names.prepare)] if context.before.phase is Phase.PREPARING else []
    if memory.attempt > 0:
        found += [("Deployment", names.generator), ("StatefulSet", names.coordinator)]
        found += [("Job", names.trainer_job(memory.attempt))]
    return found


def pinned(context: RunContext, images: Images) -> Images:
    """``images``, but for roles that run already: an upgrade of the operator does not mix versions in a run that is
    under way. A run that was suspended gets the new ones.

    The annotation of each workload has the image that it would have without ``spec.images``: a role whose image is no longer
    named there goes back to that one.
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


def fingerprint(context: RunContext, desired: Desired, images: Images) -> int | None:
    """Hash of all that a run's objects are rendered from and of what they hold: while it is the same, applying them would
    change nothing. None while an object is being deleted.

    Pods and statuses are not rendered. Of a Job, which cannot be changed, only its uid and its labels count. The curve is
    compared at every reconcile.
    """
    curve = ("ConfigMap", Names(context.name).curve)
    there: list[tuple[str, str, int]] = []
    for (kind, name), obj in context.objects.items():
        if kind == "Pod" or (kind, name) == curve:
            continue
        if is_deleted(obj):
            return None
        metadata = obj["metadata"]
        job = (metadata["uid"], tuple(sorted((metadata.get("labels") or {}).items())))
        there.append((kind, name, hash(job) if kind == "Job" else content_hash(obj)))
    there.sort()
    labels = tuple(sorted(context.run.metadata.labels.items()))
    inputs = (context.generation, labels, desired, images, context.decision.frozen, context.deleted)
    return hash((inputs, tuple(there)))
