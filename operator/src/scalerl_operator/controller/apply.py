"""Applies a run's objects: creates what is missing, applies what differs, removes what is no longer wanted.

Only objects that carry the run's uid are changed or removed. An object of somebody else with the same name is reported and
left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

from scalerl_api.conditions import Reason
from scalerl_api.spec import GROUP, ScaleRLRun
from scalerl_operator.controller.access_token import ensure_token
from scalerl_operator.controller.claim_size import never_smaller, refused_size, waits
from scalerl_operator.controller.fingerprint import content_hash
from scalerl_operator.controller.observe import JOB_NAME, Problem, is_settled, label, seconds
from scalerl_operator.controller.refusals import name_taken, refused
from scalerl_operator.controller.run_context import CLAIM, WORKLOADS, RunContext, is_deleted
from scalerl_operator.controller.run_state import Settled
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.managed_fields import applied, other_writers
from scalerl_operator.kube.types import Object
from scalerl_operator.names import ATTEMPT, COMPONENT, RENDERED_HASH, RUN, Names, label_value
from scalerl_operator.names import labels as labels_of_run
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
    """Writes the objects of runs."""

    def __init__(self, api: KubeApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def find_unlabelled(self, context: RunContext, names: Sequence[tuple[str, str]]) -> None:
        """Finds by name the workloads, as (kind, name), whose label somebody removed: they are not in the cache, and run.
        For a run that is about to drain, since nothing asks for them later."""
        for kind, name in names:
            if (kind, name) not in context.objects:
                live = await self._api.get(kind, context.namespace, name)
                if live is not None and context.owns(live):
                    await self._adopt(live, context, _labels_of(name, context), at_once=True)

    async def apply(
        self, run: ScaleRLRun, context: RunContext, wanted: Sequence[Object], *, frozen: bool = False
    ) -> Problem | None:
        """Creates, applies and removes objects until the run has those of ``wanted``. Returns what the cluster refused.

        frozen: existing objects are left as they are, and nothing is created for a run that is being deleted: a deletion in
        the foreground removes what a run owns before the run.

        Raises:
            ApiError: no answer, or one that another try may change.
        """
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
            present = context.objects.keys() if not is_deleted(context.run) else names
            wanted = [obj for obj in wanted if _key(obj) not in present]
        problem = await ensure_token(self._api, run, context)
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
            return await self._adopt(live, context, _labels_of(name, context))
        if kind == CLAIM:
            wanted = never_smaller(wanted, live)
            if waits(context, wanted, live):
                return None
        state, now = context.state, Settled(_rendered(wanted), content_hash(live))
        if key not in state.settled and _rendered(live) == now.rendered and _is_untouched(wanted, live):
            state.settled[key] = now  # the first reconcile of this process finds what an earlier one applied
        if state.settled.get(key) == now:
            return None
        if _rendered(live) != now.rendered:
            return (await self._change(wanted, live, context))[1]
        before = state.repairs.get(key)
        if not state.may_repair(key, context.unix_seconds):
            return None
        made, problem = await self._change(wanted, live, context)
        changed = None if made is None else first_difference(live, made)
        if changed is not None:
            path, was, restored = changed
            text = (
                f"{kind} {name}: {path} was changed to {_shown(was)}, and is restored to {_shown(restored)}"
            )
            log.warning("%s/%s: %s", context.namespace, context.name, text)
            await self._api.event(context.run, "Warning", Reason.REPAIRED_DRIFT, text)
        elif made is not None:  # others changed only what is theirs: no repair, so it does not count as one
            state.repairs.pop(key)
            state.repairs |= {} if before is None else {key: before}
        return problem

    async def replace_unlabelled_coordinator(self, context: RunContext) -> None:
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
            await self._api.event(context.run, "Warning", Reason.REPAIRED_DRIFT, text)

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
            problem = await self._adopt(live, context, ours)
            return problem if frozen or problem is not None else await self.apply_one(obj, context)
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, context)
        self._settle(obj, made, context)
        return None

    async def _adopt(
        self, live: Object, context: RunContext, labels: dict[str, str], *, at_once: bool = False
    ) -> Problem | None:
        """Restores the labels of an object: without them the cache does not get its events.

        labels: those to restore; of a Job only ours, since Kueue lets nobody write its own on a Job that it has admitted.
        at_once: without back-off. Returns why the API server refused.
        """
        key = kind, name = _key(live)
        missing = {label_name: text for label_name, text in labels.items() if label(live, label_name) != text}
        if (
            missing
            and not is_deleted(live)
            and (at_once or context.state.may_repair(key, context.unix_seconds))
        ):
            patch = {"metadata": {"uid": live["metadata"]["uid"], "labels": missing}}
            try:
                live = await self._api.patch(kind, context.namespace, name, patch)
            except (errors.Invalid, errors.Forbidden) as error:
                self._remember(live, context)
                return refused(error, live, context)
            text = f"{kind} {name}: labels were removed, and are restored: {', '.join(sorted(missing))}"
            await self._api.event(context.run, "Warning", Reason.REPAIRED_DRIFT, text)
        self._remember(live, context)
        return None

    async def _change(
        self, wanted: Object, live: Object, context: RunContext
    ) -> tuple[Object | None, Problem | None]:
        """Applies an object that exists. Returns it as it is now, None where it was not applied, and what was refused."""
        kind, name = _key(wanted)
        uid = live["metadata"]["uid"]
        if uid not in context.state.applied:
            there = await self._own_fields(kind, name, context)
            if there is None:
                # A claim that is gone may have held steps: the next reconcile decides.
                return None, await self._create(wanted, context) if kind != CLAIM else None
            if (problem := name_taken(there, context)) is not None:
                return None, problem
            uid = there["metadata"]["uid"]
            context.state.applied.add(uid)
        try:
            # By uid: another object may have the name by now.
            made = await self._api.apply(wanted, uid=uid)
        except (errors.Invalid, errors.Forbidden) as error:
            if kind == CLAIM and refused_size(context, wanted, live, error):
                return None, None
            return None, refused(error, wanted, context)
        self._settle(wanted, made, context)
        return made, None

    async def _own_fields(
        self, kind: str, name: str, context: RunContext, tries: int = OWNERSHIP_TRIES
    ) -> Object | None:
        """Turns what creating an object has set into what we apply (:mod:`scalerl_operator.kube.managed_fields`). Returns the
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
        context.state.settled[_key(made)] = Settled(_rendered(wanted), content_hash(made))
        self._remember(made, context)

    def _remember(self, obj: Object, context: RunContext) -> None:
        context.objects[_key(obj)] = obj
        self._cache.remember(obj)


def first_difference(before: Any, after: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first field of two versions of an object that differs, as (path, before, after); None for a field that is absent.

    Status and what the API server itself writes of an object do not count.

    >>> first_difference({"spec": {"replicas": 5}}, {"spec": {"replicas": 1}, "status": {}})
    ('spec.replicas', 5, 1)
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            below = f"{path}.{name}" if path else name
            if below not in _NOT_COMPARED:
                found = first_difference(before.get(name), after.get(name), below)
                if found is not None:
                    return found
        return None
    if isinstance(before, list) and isinstance(after, list):
        for index, (one, other) in enumerate(zip_longest(before, after)):
            if (found := first_difference(one, other, f"{path}[{index}]")) is not None:
                return found
        return None
    return None if before == after else (path, before, after)


_NOT_COMPARED: Final = frozenset(
    ("status", "metadata.generation", "metadata.resourceVersion", "metadata.managedFields")
)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _key(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _rendered(obj: Object) -> str:
    """The hash of an object as rendered, from its annotation; an object without one is compared by all annotations."""
    annotations = obj["metadata"].get("annotations") or {}
    ours = sorted((name, text) for name, text in annotations.items() if name.startswith(f"{GROUP}/"))
    return str(annotations.get(RENDERED_HASH) or ours)


def _is_untouched(wanted: Object, live: Object) -> bool:
    """Whether an object is as an earlier process applied it, by what it says itself: who wrote it since, and, as the removal
    of a field leaves no trace there, whether every field that we set is still there."""
    return not other_writers(live["metadata"].get("managedFields") or ()) and _has_all(wanted, live)


def _has_all(wanted: Any, live: Any) -> bool:
    """Whether ``live`` has a value wherever ``wanted`` has one that the API server keeps; values are not compared."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return all(_has_all(value, live.get(name)) for name, value in wanted.items() if value)
    if isinstance(wanted, list) and isinstance(live, list):
        named = {item["name"]: item for item in live if isinstance(item, dict) and "name" in item}
        if all(isinstance(item, dict) and "name" in item for item in wanted):
            return all(_has_all(item, named.get(item["name"])) for item in wanted)
        return len(live) >= len(wanted)
    return live is not None


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
