"""Apply: what is wanted of a run is brought about; what differs is repaired; the rest is removed.

Only objects that carry the run's uid are ever changed or removed. What another owns is told of and left alone.
"""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scalerl_api.cluster import ImagesSpec
from scalerl_api.conditions import Reason
from scalerl_api.spec import KIND, ScaleRLRun
from scalerl_operator.cluster import errors
from scalerl_operator.cluster.api import KubeApi
from scalerl_operator.cluster.cache import Cache
from scalerl_operator.cluster.drift import differs
from scalerl_operator.cluster.names import COMPONENT, IMAGE, RENDERED_HASH, RUN_UID, TOKEN_KEY, Names
from scalerl_operator.cluster.observed import (
    JOB_NAME,
    Observed,
    Problem,
    creation_problem,
    is_settled,
    label,
    mount_problem,
    seconds,
)
from scalerl_operator.cluster.render import secret
from scalerl_operator.cluster.types import Desired, Images, Object
from scalerl_operator.policy.lifecycle import JobState
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = 10.0
"""An object of ours that has come to nothing for so long has its events looked at for the reason."""
REPAIR_SECONDS: Final = 2.0
"""The first repair of an object comes at once, the next after so long, then twice that, up to five minutes."""
LONGEST_REPAIR_SECONDS: Final = 300.0
ASK_SECONDS: Final = 15.0
"""Between two questions of why something has come to nothing."""
RECENT_SECONDS: Final = 300.0
"""What an event says that is older may be mended: those who cannot make or start a pod say so again and again."""
_MAKING: Final = ("FailedCreate",)
_BEGINNING: Final = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
HURRIED_SECONDS: Final = 5
"""What the rest of a failed gang gets to end."""
WORKLOADS: Final = frozenset({"Job", "Deployment", "StatefulSet"})
_GATHERED: Final = WORKLOADS | {"Service", "PodDisruptionBudget", "NetworkPolicy"}
"""Kinds of which a run's objects are removed when they are not wanted any more; what holds data stays."""
_CLAIM: Final = "PersistentVolumeClaim"


@dataclass(frozen=True)
class Place:
    """One run as it is found: the object, and what there is of it by (kind, name)."""

    run: Object
    objects: Mapping[tuple[str, str], Object]
    unix_seconds: float

    @property
    def uid(self) -> str:
        return str(self.run["metadata"]["uid"])

    @property
    def namespace(self) -> str:
        return str(self.run["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.run["metadata"]["name"])

    def mine(self, obj: Object) -> bool:
        """Whether an object is this run's, not an earlier one's of the same name."""
        return label(obj, RUN_UID) == self.uid


def leaving(obj: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


class Applier:
    """Writes a run's objects. Remembers between looks only what makes it quicker, or quieter."""

    def __init__(self, api: KubeApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._repairs: dict[str, dict[tuple[str, str], tuple[int, float]]] = {}
        self._tokens: dict[str, str] = {}
        self._doubted: set[str] = set()
        """Runs whose Secret, which cannot be watched, a pod did not find."""
        self._stuck: dict[str, tuple[float, Problem | None]] = {}

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self._repairs.pop(uid, None)
        self._tokens.pop(uid, None)
        self._doubted.discard(uid)
        self._stuck.pop(uid, None)

    async def token(self, place: Place) -> str:
        """The run's token; empty while it has none."""
        if place.uid not in self._tokens:
            held = await self._api.get("Secret", place.namespace, Names(place.name).token)
            if held is None or not place.mine(held):
                return ""
            self._tokens[place.uid] = _token(held)
        return self._tokens[place.uid]

    # --- before the first object --------------------------------------------------------------------

    async def missing(
        self,
        run: ScaleRLRun,
        place: Place,
        wanted: Sequence[Object],
        everything: Callable[[], Sequence[Object]],
    ) -> Problem | None:
        """What keeps a run that has nothing yet from being started: found out before anything is made.

        everything: all objects that the run will ever have, for one that brings raw Kubernetes of its own: those
        with pods are tried.
        """
        storage = run.spec.storage
        if storage.claim_name is not None:
            if await self._api.get(_CLAIM, place.namespace, storage.claim_name) is None:
                return Problem(
                    Reason.CLAIM_NOT_FOUND, f"spec.storage.claimName: {storage.claim_name} does not exist"
                )
        elif storage.storage_class_name is not None:
            try:
                found = await self._api.get("StorageClass", None, storage.storage_class_name)
            except errors.Forbidden:
                found = {}  # an operator of a few namespaces may not look
            if found is None:
                return Problem(
                    Reason.STORAGE_CLASS_NOT_FOUND,
                    f"spec.storage.storageClassName: {storage.storage_class_name} does not exist",
                )
        for obj in (secret(run, place.uid, ""), *wanted):
            problem = await self._taken(obj, place)
            if problem is not None:
                return problem
        if _has_raw_parts(run):
            asked = {(obj["kind"], obj["metadata"]["name"]) for obj in wanted}
            for obj in everything():
                kind = obj["kind"]
                problem = None
                if (kind, obj["metadata"]["name"]) not in asked:
                    problem = await self._taken(obj, place)
                if problem is None and kind in WORKLOADS:  # what a user writes of pods is in nothing else
                    problem = await self._write(obj, dry_run=True)
                if problem is not None:
                    return problem
        return None

    async def _taken(self, wanted: Object, place: Place) -> Problem | None:
        """Whether an object of that name is somebody else's."""
        kind, metadata = wanted["kind"], wanted["metadata"]
        live = place.objects.get((kind, metadata["name"]))
        if live is None:
            live = await self._api.get(kind, place.namespace, metadata["name"])
        if live is None or place.mine(live):
            return None
        what = f"{kind} {metadata['name']}"
        if kind == _CLAIM:
            return Problem(Reason.CLAIM_TAKEN, f"{what} holds another run's data")
        owners = live["metadata"].get("ownerReferences") or ()
        if leaving(live) or any(o.get("kind") == KIND and o.get("name") == place.name for o in owners):
            return Problem(
                Reason.NAME_TAKEN, f"{what} is of an earlier run of this name, and still being removed"
            )
        return Problem(Reason.NAME_TAKEN, f"{what} exists and is not this run's")

    # --- every look -----------------------------------------------------------------------------------

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
            problem = problem or await self._bring(obj, place)
        return problem

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
        if place.uid not in self._doubted and await self.token(place):
            return None
        name = Names(place.name).token
        # One that somebody has deleted comes back as it was: pods that run still hold it.
        token = self._tokens.get(place.uid) or secrets.token_urlsafe(32)
        try:
            held: Object | None = await self._api.create(secret(run, place.uid, token))
        except errors.AlreadyExists:
            held = await self._api.get("Secret", place.namespace, name)
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, f"Secret {name}")
        if held is None or not place.mine(held):
            return Problem(Reason.NAME_TAKEN, f"Secret {name} exists and is not this run's")
        self._tokens[place.uid] = _token(held)
        self._doubted.discard(place.uid)
        return None

    async def _bring(self, wanted: Object, place: Place) -> Problem | None:
        """One object as it is wanted."""
        kind, metadata = wanted["kind"], wanted["metadata"]
        key = (kind, metadata["name"])
        live = place.objects.get(key)
        if live is None or not place.mine(live):
            return await self._taken(wanted, place) or await self._write(wanted)
        if leaving(live) or kind == "Job":
            return None  # a Job cannot be changed: what is wanted of it anew is another attempt
        difference = differs(wanted, live)
        if difference is None:
            return None
        annotations, rendered = (
            live["metadata"].get("annotations") or {},
            metadata["annotations"].get(RENDERED_HASH),
        )
        if rendered is not None and annotations.get(RENDERED_HASH) == rendered:
            # What we want has not changed, so somebody else has changed the object.
            if not self._may_repair(place, key):
                return None
            log.warning("%s/%s: %s was changed: %s", place.namespace, place.name, key, difference)
            text = f"{kind} {metadata['name']}: {difference}"
            await self._api.event(place.run, "Warning", Reason.REPAIRED_DRIFT, text)
        return await self._write(wanted)

    def _may_repair(self, place: Place, key: tuple[str, str]) -> bool:
        """Whoever else writes our fields is not fought at full speed."""
        repairs = self._repairs.setdefault(place.uid, {})
        count, last = repairs.get(key, (0, 0.0))
        quiet = place.unix_seconds - last
        if quiet > 2 * LONGEST_REPAIR_SECONDS:
            count = 0
        if count and 0 <= quiet < min(REPAIR_SECONDS * 2.0 ** min(count - 1, 16), LONGEST_REPAIR_SECONDS):
            return False
        repairs[key] = (count + 1, place.unix_seconds)
        return True

    async def _write(self, obj: Object, *, dry_run: bool = False) -> Problem | None:
        try:
            made = await self._api.apply(obj, dry_run=dry_run)
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, f"{obj['kind']} {obj['metadata']['name']}")
        if not dry_run:
            self._cache.remember(made)
        return None

    # --- what came to nothing -------------------------------------------------------------------------

    async def stuck(self, place: Place, observed: Observed, desired: Desired) -> Problem | None:
        """Why a pod that should be there is not, or does not begin: only events tell. Asked now and then, of one object:
        of many pods that wait, the others wait for the same."""
        asked, problem = self._stuck.get(place.uid, (0.0, None))
        silent = self._silent(place, observed, desired)
        if silent is None:
            self._stuck.pop(place.uid, None)
            return None
        if 0 <= place.unix_seconds - asked < ASK_SECONDS:
            return problem
        what, uid, reasons = silent
        message = await self._last_event(place, uid, reasons)
        problem = None
        if message:
            made = reasons is _MAKING
            problem = Problem((creation_problem if made else mount_problem)(message), f"{what}: {message}")
            if Names(place.name).token in message:
                self._doubted.add(place.uid)
        self._stuck[place.uid] = (place.unix_seconds, problem)
        return problem

    def _silent(
        self, place: Place, observed: Observed, desired: Desired
    ) -> tuple[str, str, tuple[str, ...]] | None:
        """The first object that has come to nothing: its name, its uid, and which events of it would say why."""
        for (kind, name), obj in place.objects.items():
            role = label(obj, COMPONENT)
            old = place.unix_seconds - seconds(obj["metadata"].get("creationTimestamp")) > SILENT_SECONDS
            if not old or leaving(obj) or any(p.role == role for p in observed.pods):
                continue
            job = observed.trainer if role == Role.TRAINER else observed.prepare
            wanted = kind == "StatefulSet" and desired.coordinator
            if wanted or (kind == "Job" and job.state is JobState.ACTIVE and not job.held):
                return f"{kind} {name}", obj["metadata"]["uid"], _MAKING
        for pod in observed.pods:
            if pod.creating and not pod.leaving and place.unix_seconds - pod.created > SILENT_SECONDS:
                return pod.name, pod.uid, _BEGINNING
        return None

    async def _last_event(self, place: Place, uid: str, reasons: Sequence[str]) -> str:
        try:
            events = await self._api.list(
                "Event", place.namespace, field_selector=f"involvedObject.uid={uid}"
            )
        except errors.Forbidden:
            return ""
        told = [e for e in events if e.get("reason") in reasons and _is_recent(e, place.unix_seconds)]
        told.sort(key=lambda e: seconds(e.get("lastTimestamp") or e.get("eventTime")))
        return str(told[-1].get("message", "")) if told else ""


def _is_recent(event: Object, now: float) -> bool:
    return now - seconds(event.get("lastTimestamp") or event.get("eventTime")) < RECENT_SECONDS


def pinned(place: Place, named: ImagesSpec, images: Images) -> Images:
    """``images``, but for roles that work already: an upgrade of the operator does not mix versions in a run that is
    under way. One that was suspended takes the new ones.

    named: the run's own, which win. Each workload has beside its image the one that it would have without: a role whose
    image is no longer named goes back to that, and not to what it had been given.
    """
    given: dict[str, str | None] = {
        Role.PREPARE: named.trainer,
        Role.TRAINER: named.trainer,
        Role.GENERATOR: named.generator,
        Role.COORDINATOR: named.coordinator,
    }
    live: dict[str, str] = {}
    for (kind, _), obj in place.objects.items():
        if kind in WORKLOADS and place.mine(obj) and not leaving(obj):
            role = label(obj, COMPONENT)
            own = (obj["metadata"].get("annotations") or {}).get(IMAGE)
            if own is None and given.get(role) is None:  # made by a release that did not note it
                own = obj["spec"]["template"]["spec"]["containers"][0]["image"]
            if own is not None:
                live[role] = own
    return Images(
        trainer=live.get(Role.TRAINER, live.get(Role.PREPARE, images.trainer)),
        generator=live.get(Role.GENERATOR, images.generator),
        coordinator=live.get(Role.COORDINATOR, images.coordinator),
        pull_policy=images.pull_policy,
    )


def refused(error: errors.ApiError, what: str) -> Problem:
    """What the API server's no comes to."""
    if isinstance(error, errors.QuotaExceeded):
        return Problem(Reason.QUOTA_EXCEEDED, f"{what}: {error.message}")
    if isinstance(error, errors.Forbidden) and "cannot" in error.message and "User" in error.message:
        return Problem(Reason.FORBIDDEN, f"{what}: {error.message}")
    return Problem(creation_problem(error.message), f"{what}: {error.message}")


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
