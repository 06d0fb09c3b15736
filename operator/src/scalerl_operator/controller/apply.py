"""Apply: what is wanted of a run is brought about; what differs is repaired; the rest is removed.

Only objects that carry the run's uid are ever changed or removed. What another owns is told of and left alone.
"""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.spec_warnings import past_deadline
from scalerl_operator.build import names_of, raw_hash, secret
from scalerl_operator.controller.claim_size import RETRY_SECONDS, Resizes, failed, never_smaller
from scalerl_operator.controller.drift import differences, told
from scalerl_operator.controller.observe import (
    JOB_NAME,
    Problem,
    is_settled,
    label,
    seconds,
)
from scalerl_operator.controller.owned import CLAIM, WORKLOADS, Place, leaving, not_mine, refused
from scalerl_operator.controller.ownership import applied
from scalerl_operator.controller.repairs import Repairs
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import (
    ATTEMPT,
    COMPONENT,
    RENDERED_HASH,
    RUN,
    TOKEN_KEY,
    Names,
    label_value,
)
from scalerl_operator.names import labels as labels_of_run
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

OWN_TRIES: Final = 5
"""How often an object is taken over anew when somebody else writes it in between."""
TRIED_SECONDS: Final = 60.0
"""For so long what the API server would have taken counts as what it takes."""
CHECK_SECONDS: Final = 120.0
"""Between two looks whether a run's Secret, which cannot be watched, is still there."""
SEARCH_SECONDS: Final = 15.0
"""Between two questions for a coordinator's pod that its StatefulSet should have made, and nobody sees."""
HURRIED_SECONDS: Final = 5
"""What the rest of a failed gang gets to end."""
_GATHERED: Final = WORKLOADS | {"Service", "PodDisruptionBudget"}
"""Kinds of which a run's objects are removed when they are not wanted any more; what holds data stays, and what guards it."""


class Applier:
    """Writes a run's objects. Remembers between looks only what makes it quicker, or quieter.

    namespaced: of an operator of a few namespaces, whose role lets it see nothing of the cluster's.
    """

    def __init__(self, api: KubeApi, cache: Cache, *, namespaced: bool = False) -> None:
        self._api = api
        self._cache = cache
        self._namespaced = namespaced
        self.repairs = Repairs()
        self._resizes = Resizes()
        self._tokens: dict[str, str] = {}
        self._checked: dict[str, float] = {}
        """By run, when its Secret was last known to be there."""
        self._doubted: set[str] = set()
        """Runs whose Secret, which cannot be watched, a pod did not find."""
        self._searched: dict[str, float] = {}
        self._owned: dict[str, set[str]] = {}
        """By run, the uids of objects of which nothing is held by having created them."""
        self._trials: dict[tuple[str, str], float] = {}
        """By namespace and :func:`raw_hash`: when such pods were last tried, and taken."""

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self.repairs.forget(uid)
        self._resizes.forget(uid)
        self._tokens.pop(uid, None)
        self._checked.pop(uid, None)
        self._searched.pop(uid, None)
        self._doubted.discard(uid)
        self._owned.pop(uid, None)

    def not_enlarged(self, place: Place) -> Problem | None:
        """Why the run's claim is smaller than wanted."""
        claim = place.objects.get((CLAIM, Names(place.name).claim))
        return self._resizes.problem(place.uid) or (failed(claim) if claim is not None else None)

    def resize_seconds(self, place: Place) -> float | None:
        """When a size that was refused is asked for again."""
        return None if self._resizes.problem(place.uid) is None else RETRY_SECONDS

    def doubt(self, uid: str) -> None:
        """A pod of the run did not find its Secret: it is looked for, and made again, at the next look."""
        self._doubted.add(uid)

    async def token(self, place: Place, again: bool = False) -> str:
        """The run's token; empty while it has none. ``again``: as the Secret has it now."""
        if again or place.uid not in self._tokens:
            held = await self._api.get("Secret", place.namespace, Names(place.name).token)
            self._checked[place.uid] = place.unix_seconds
            if held is not None and place.mine(held):
                self._tokens[place.uid] = _token(held)
            elif held is None and again:
                self.doubt(place.uid)
        return self._tokens.get(place.uid, "")

    # --- before the first object --------------------------------------------------------------------

    async def missing(
        self,
        run: ScaleRLRun,
        place: Place,
        everything: Callable[[], Sequence[Object]],
    ) -> Problem | None:
        """What keeps a run that has nothing yet from being started: found out before anything is made.

        everything: all objects that the run will ever have, for one that brings raw Kubernetes of its own: those
        with pods are tried.
        """
        created = seconds(place.run["metadata"].get("creationTimestamp"))
        if (late := past_deadline(run.spec, created)) is not None:
            return Problem(Reason.DEADLINE_PASSED, str(late))
        storage = run.spec.storage
        if storage.claim_name is not None:
            if await self._api.get(CLAIM, place.namespace, storage.claim_name) is None:
                return Problem(
                    Reason.CLAIM_NOT_FOUND, f"spec.storage.claimName: {storage.claim_name} does not exist"
                )
        elif storage.storage_class_name is not None and not self._namespaced:
            try:
                found = await self._api.get("StorageClass", None, storage.storage_class_name)
            except errors.Forbidden:
                found = {}  # by a role that is not the chart's; the claim's events will say
            if found is None:
                return Problem(
                    Reason.STORAGE_CLASS_NOT_FOUND,
                    f"spec.storage.storageClassName: {storage.storage_class_name} does not exist",
                )
        for kind, name in names_of(run):
            problem = await self._taken(kind, name, place)
            if problem is not None:
                return problem
        return await self._trial(run, place, everything) if _has_raw_parts(run) else None

    async def _trial(
        self, run: ScaleRLRun, place: Place, everything: Callable[[], Sequence[Object]]
    ) -> Problem | None:
        """Whether the API server would take what a user wrote of pods. It is not asked again what it has just taken: of a
        thousand runs with the same pods one is tried.

        A quota of objects that another run has used up meanwhile is therefore told when the first one is refused, with
        some made already, and from then on before.
        """
        tried = (place.namespace, raw_hash(run))
        now = place.unix_seconds
        if tried in self._trials and 0 <= now - self._trials[tried] < TRIED_SECONDS:
            return None
        for obj in everything():
            if obj["kind"] in WORKLOADS:  # what a user writes of pods is in nothing else
                problem = await self._create(obj, place, dry_run=True)
                if problem is not None:
                    return problem
        self._trials = {at: when for at, when in self._trials.items() if 0 <= now - when < TRIED_SECONDS}
        self._trials[tried] = now
        return None

    async def _taken(self, kind: str, name: str, place: Place) -> Problem | None:
        """Whether an object of that name is somebody else's."""
        live = place.objects.get((kind, name))
        if live is None:
            # A moment old will do: nothing is ever made over what has come since.
            live = await self._api.get(kind, place.namespace, name, recent=True)
            if live is not None and not place.mine(live):
                live = await self._api.get(kind, place.namespace, name)  # it may be gone since
        return None if live is None else not_mine(live, kind, name, place)

    # --- every look -----------------------------------------------------------------------------------

    async def find(self, place: Place, names: Sequence[tuple[str, str]]) -> None:
        """Workloads of the run that should be there and are not: one whose label somebody has taken off is nowhere to be
        seen, and works on. Asked for by name before the run comes to rest, when nothing would ask for them any more.

        names: (kind, name) of each.
        """
        for kind, name in names:
            if (kind, name) not in place.objects:
                there = await self._api.get(kind, place.namespace, name)
                if there is not None and place.mine(there):
                    await self._adopt(there, place, _labels_of(name, place), at_once=True)

    async def apply(
        self, run: ScaleRLRun, place: Place, wanted: Sequence[Object], *, frozen: bool = False
    ) -> Problem | None:
        """Make what is wanted, repair what differs, remove the rest. Returns what the cluster did not let us make.

        frozen: what exists is left as it is, and what is missing is not made for a run that is being deleted: somebody
        who deletes in the foreground takes away what a run owns before the run.

        Raises:
            ApiError: no answer, or one that another try may change.
        """
        names = {(obj["kind"], obj["metadata"]["name"]) for obj in wanted}
        for (kind, name), live in place.objects.items():
            if kind in _GATHERED and (kind, name) not in names and place.mine(live) and not leaving(live):
                # Foreground: a Job is gone only when its pods are, so that the next attempt never runs beside it.
                await self._api.delete(
                    kind, place.namespace, name, uid=live["metadata"]["uid"], propagation="Foreground"
                )
            if kind == "Job" and (kind, name) not in names and place.mine(live) and is_settled(live):
                await self._hurry(place, name)
        if frozen:
            present = place.objects.keys() if not leaving(place.run) else names
            wanted = [obj for obj in wanted if (obj["kind"], obj["metadata"]["name"]) not in present]
        problem = await self._make_token(run, place)
        for obj in wanted:
            # Frozen, nothing of what is wanted is known to be there.
            if problem is None:
                problem = await (self._create(obj, place, frozen=True) if frozen else self._bring(obj, place))
        return problem

    async def keep(self, run: ScaleRLRun, place: Place, moving: Sequence[Object]) -> Problem | None:
        """As :meth:`apply`, of a run whose objects are known to be right but those that follow the run's progress."""
        problem = await self._make_token(run, place)
        for obj in moving:
            problem = problem or await self._bring(obj, place)
        return problem

    async def replace_stripped(self, place: Place) -> None:
        """The coordinator's pod, where somebody took its labels off: its Service and we no longer find it, and its name keeps
        the StatefulSet from making another. It is deleted; the next one goes on from the journal."""
        called = Names(place.name)
        name, owner = f"{called.coordinator}-0", place.objects.get(("StatefulSet", called.coordinator))
        pod = place.objects.get(("Pod", name))
        if owner is None or leaving(owner) or (pod is not None and _is_found(pod, place)):
            return
        asked = self._searched.get(place.uid, 0.0)
        young = place.unix_seconds - seconds(owner["metadata"].get("creationTimestamp")) < SEARCH_SECONDS
        if young or 0 <= place.unix_seconds - asked < SEARCH_SECONDS:
            return
        self._searched[place.uid] = place.unix_seconds
        found = await self._api.list("Pod", place.namespace, field_selector=f"metadata.name={name}")
        for pod in found:
            owners = {o["uid"] for o in pod["metadata"].get("ownerReferences") or ()}
            secrets_ = {(v.get("secret") or {}).get("secretName") for v in pod["spec"].get("volumes") or ()}
            if (
                leaving(pod)
                or (_is_found(pod, place) and label(pod, RUN) == label_value(place.name))
                or owners - {owner["metadata"]["uid"]}
                or called.token not in secrets_
            ):
                continue
            await self._api.delete("Pod", place.namespace, name, uid=pod["metadata"]["uid"])
            text = f"Pod {name}: somebody took its labels off; it is made anew"
            await self._api.event(place.run, "Warning", Reason.REPAIRED_DRIFT, text)

    async def _hurry(self, place: Place, job: str) -> None:
        """The ranks that a failed gang has left behind have nothing to save, and may hang in a collective."""
        for (kind, name), pod in place.objects.items():
            if kind == "Pod" and place.mine(pod) and label(pod, JOB_NAME) == job:
                phase = (pod.get("status") or {}).get("phase")
                grace = pod["metadata"].get("deletionGracePeriodSeconds", HURRIED_SECONDS + 1)
                if phase in ("Pending", "Running") and grace > HURRIED_SECONDS:
                    uid = pod["metadata"]["uid"]
                    await self._api.delete(
                        kind, place.namespace, name, uid=uid, grace_seconds=HURRIED_SECONDS
                    )

    async def _make_token(self, run: ScaleRLRun, place: Place) -> Problem | None:
        """The run's token: made once; whoever made it first is right. Not for a run that is being deleted, of which the
        garbage collector may have taken it: nobody new is to read it."""
        if leaving(place.run):
            return None
        # Of a run that has nothing yet, there is no token to ask for.
        known = bool(self._tokens.get(place.uid)) if not place.objects else bool(await self.token(place))
        if known and not 0 <= place.unix_seconds - self._checked.get(place.uid, 0.0) < CHECK_SECONDS:
            self._checked[place.uid] = place.unix_seconds
            if await self._api.get("Secret", place.namespace, Names(place.name).token) is None:
                self.doubt(place.uid)
        if known and place.uid not in self._doubted:
            return None
        name = Names(place.name).token
        # One that somebody has deleted comes back as it was: pods that run still hold it.
        token = self._tokens.get(place.uid) or secrets.token_urlsafe(32)
        wanted = secret(run, place.uid, token)
        try:
            held: Object | None = await self._api.create(wanted)
        except errors.AlreadyExists:
            held = await self._api.get("Secret", place.namespace, name)
        except (errors.Invalid, errors.Forbidden) as error:
            return self._refused(error, wanted, place)
        if held is None or not place.mine(held):
            return Problem(Reason.NAME_TAKEN, f"Secret {name} exists and is not this run's")
        self._tokens[place.uid], self._checked[place.uid] = _token(held), place.unix_seconds
        self._doubted.discard(place.uid)
        return None

    async def _bring(self, wanted: Object, place: Place) -> Problem | None:
        """One object as it is wanted."""
        kind, metadata = wanted["kind"], wanted["metadata"]
        key = (kind, metadata["name"])
        live = place.objects.get(key)
        if live is None:
            return await self._create(wanted, place)
        if not place.mine(live):
            return not_mine(live, *key, place)
        if leaving(live):
            return None
        if kind == "Job":  # it cannot be changed: what is wanted of it anew is another attempt
            return await self._adopt(live, place, _labels_of(metadata["name"], place))
        if kind == CLAIM:
            wanted = never_smaller(wanted, live)
            if self._resizes.waits(place.uid, wanted, live, place.unix_seconds):
                return None
        found = differences(wanted, live)
        if not found or self.repairs.in_vain(place, key, found):
            return None
        annotations, rendered = (
            live["metadata"].get("annotations") or {},
            metadata["annotations"].get(RENDERED_HASH),
        )
        if rendered is not None and annotations.get(RENDERED_HASH) == rendered:
            # What we want has not changed, so somebody else has changed the object.
            if not self.repairs.may(place, key):
                return None
            difference = told(wanted, found[0])
            log.warning("%s/%s: %s was changed: %s", place.namespace, place.name, key, difference)
            text = f"{kind} {metadata['name']}: {difference}"
            await self._api.event(place.run, "Warning", Reason.REPAIRED_DRIFT, text)
        return await self._change(wanted, live, place)

    async def _create(
        self, obj: Object, place: Place, *, dry_run: bool = False, frozen: bool = False
    ) -> Problem | None:
        """Make what is not there, and never over what another has made meanwhile. frozen: what turns out to be there is
        left as it is."""
        kind, name = obj["kind"], obj["metadata"]["name"]
        try:
            made = await self._api.create(obj, dry_run=dry_run)
        except errors.AlreadyExists:
            there = await self._api.get(kind, place.namespace, name)
            if there is None:
                raise  # and gone again: another look will tell
            if (problem := not_mine(there, kind, name, place)) is not None:
                return problem
            if dry_run:
                return None
            ours = _labels_of(name, place) if kind == "Job" else obj["metadata"]["labels"]
            problem = await self._adopt(there, place, ours)
            # Whoever made it, of whatever spec, it is compared like all that is known to be there.
            return problem if frozen or problem is not None else await self._bring(obj, place)
        except (errors.Invalid, errors.Forbidden) as error:
            return self._refused(error, obj, place)
        if not dry_run:
            self._made(made, place)
        return None

    async def _adopt(
        self, there: Object, place: Place, labels: dict[str, str], *, at_once: bool = False
    ) -> Problem | None:
        """An object of the run that was not known to be there: news of it are still on their way, or somebody has taken
        off the labels that they come by. Without these it is never heard of again.

        labels: those that it is to have; of a Job only ours: Kueue lets nobody write its own on one that it has let in.
        at_once: however often somebody takes them off. Returns why the cluster does not let us put them back.
        """
        kind, metadata = there["kind"], there["metadata"]
        stripped = {name: text for name, text in labels.items() if label(there, name) != text}
        if stripped and not leaving(there) and (at_once or self.repairs.may(place, (kind, metadata["name"]))):
            patch = {"metadata": {"uid": metadata["uid"], "labels": stripped}}
            try:
                there = await self._api.patch(kind, place.namespace, metadata["name"], patch)
            except (errors.Invalid, errors.Forbidden) as error:
                self._made(there, place)
                return self._refused(error, there, place)
            text = f"{kind} {metadata['name']}: somebody took labels off: {', '.join(sorted(stripped))}"
            await self._api.event(place.run, "Warning", Reason.REPAIRED_DRIFT, text)
        self._made(there, place)
        return None

    def _made(self, obj: Object, place: Place) -> None:
        place.objects[obj["kind"], obj["metadata"]["name"]] = obj
        self._cache.remember(obj)

    async def _change(self, wanted: Object, live: Object, place: Place) -> Problem | None:
        """Apply what is wanted of an object that is there."""
        kind, name, uid = wanted["kind"], wanted["metadata"]["name"], live["metadata"]["uid"]
        owned = self._owned.setdefault(place.uid, set())
        if uid not in owned:
            there = await self._own(kind, name, place)
            if there is None:
                # A claim that is gone may have held steps: another look decides.
                return await self._create(wanted, place) if kind != CLAIM else None
            if (problem := not_mine(there, kind, name, place)) is not None:
                return problem
            uid = there["metadata"]["uid"]
            owned.add(uid)
        return await self._write(wanted, uid, place)

    async def _own(self, kind: str, name: str, place: Place, tries: int = OWN_TRIES) -> Object | None:
        """What creating an object has set is from now on what we apply (:mod:`.ownership`). The object as it was; None:
        it is gone.

        Asked for again a few times: of what is on its way up somebody writes the status all the time.
        """
        there = await self._api.get(kind, place.namespace, name)
        if there is None or not place.mine(there):
            return there
        metadata = there["metadata"]
        managed = applied(metadata.get("managedFields") or ())
        if managed is None:
            return there
        patch = {"metadata": {"uid": metadata["uid"], "managedFields": managed}}
        version = metadata["resourceVersion"]
        try:
            await self._api.patch(kind, place.namespace, name, patch, resource_version=version)
        except errors.Conflict:
            if tries <= 1:
                raise
            return await self._own(kind, name, place, tries - 1)
        return there

    async def _write(self, obj: Object, uid: str, place: Place) -> Problem | None:
        kind, name = obj["kind"], obj["metadata"]["name"]
        try:
            # To the object that was seen: another may have its name by now.
            made = await self._api.apply(obj, uid=uid)
        except (errors.Invalid, errors.Forbidden) as error:
            live = place.objects.get((kind, name)) if kind == CLAIM else None
            if live is not None and self._resizes.refused(place.uid, obj, live, error, place.unix_seconds):
                return None
            return self._refused(error, obj, place)
        left = differences(obj, made)
        if self.repairs.applied(place, (kind, name), left):
            said = told(obj, left[0])
            log.warning(
                "%s/%s: %s %s is kept otherwise by admission: %s",
                place.namespace,
                place.name,
                kind,
                name,
                said,
            )
        self._made(made, place)
        return None

    def _refused(self, error: errors.ApiError, obj: Object, place: Place) -> Problem:
        """What was taken in the namespace before may be so no longer."""
        self._trials = {at: when for at, when in self._trials.items() if at[0] != place.namespace}
        return refused(error, f"{obj['kind']} {obj['metadata']['name']}", obj, place.run)


def _labels_of(name: str, place: Place) -> dict[str, str]:
    """Of a workload, by its name."""
    called = Names(place.name)
    roles = {
        called.prepare: Role.PREPARE,
        called.coordinator: Role.COORDINATOR,
        called.generator: Role.GENERATOR,
    }
    role = roles.get(name, Role.TRAINER)
    attempt = {ATTEMPT: name.rpartition("-")[2]} if role is Role.TRAINER else {}
    return labels_of_run(place.name, place.uid, role) | attempt


def _is_found(pod: Object, place: Place) -> bool:
    """Whether the coordinator's StatefulSet still knows the pod."""
    return place.mine(pod) and label(pod, COMPONENT) == Role.COORDINATOR


def _token(held: Object) -> str:
    data = held.get("data") or {}
    return base64.b64decode(data.get(TOKEN_KEY, "")).decode()


def _has_raw_parts(run: ScaleRLRun) -> bool:
    spec = run.spec
    templates = (
        spec.pod_template,
        spec.coordinator.pod_template,
        spec.generator.pod_template,
        spec.trainer.pod_template,
    )
    return any(t is not None and t.model_dump(exclude_defaults=True) for t in templates)
