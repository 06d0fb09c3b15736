"""Writes one object of a run: creates it if it is absent, applies it if its rendering has changed, and repairs it if another writer
has changed it.

Only objects with the run's uid are changed; another object with the same name is reported.

The operator may not watch Secrets: it reads the one with the run's token by name, periodically, and when a pod or the coordinator
reports a problem.
"""

from __future__ import annotations

import base64
import logging
import secrets
from typing import Any, Final

from scalerl_api.reasons import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_lifecycle.lifecycle_types import Problem
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import CLAIM, Run
from scalerl_operator.controller.refusals import name_taken, refused
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
from scalerl_operator.manifests import secret
from scalerl_operator.manifests.gang import WORKLOAD
from scalerl_operator.names import ATTEMPT, TOKEN_KEY, Names
from scalerl_operator.names import labels as labels_of_run

log = logging.getLogger(__name__)

OWNERSHIP_TRIES: Final = 5
"""To take over the ownership of an object's fields while controllers write the object."""
CHECK_SECONDS: Final = 120.0
"""Between two reads of a run's Secret."""
_VALUE_CHARACTERS: Final = 60
"""Of a value in a message."""


class ObjectWriter:
    """Writes objects of runs; the cache and ``run.objects`` get each response."""

    def __init__(self, api: KubeApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def write(self, wanted: Object, run: Run) -> Problem | None:
        """Creates an object if it is absent, else applies it if its rendering or its content has changed."""
        key = kind, _ = key_of(wanted)
        live = run.objects.get(key)
        if live is None:
            return await self.create(wanted, run)
        if (problem := name_taken(live, run)) is not None or is_deleted(live):
            return problem
        if kind in ("Job", WORKLOAD):  # immutable
            await self.restore_labels(live, run, _own_labels(wanted, run))
            return None
        if kind == CLAIM:
            wanted = never_smaller(wanted, live)
            if was_refused(run, wanted, live):
                return None
        state, hashes = run.state, (rendered_hash(wanted), content_hash(live))
        rendering_changed = rendered_hash(live) != rendered_hash(wanted)
        if key not in state.applied_hashes and not rendering_changed and is_untouched(wanted, live):
            state.applied_hashes[key] = hashes  # applied by an earlier process of the operator
        if state.applied_hashes.get(key) == hashes:
            state.refused.pop(key, None)
            return None
        if rendering_changed:
            return (await self._change(wanted, live, run))[1]
        await self._repair(wanted, live, run)
        return None

    async def create(self, obj: Object, run: Run, *, update: bool = True) -> Problem | None:
        """Creates an object. One that exists by now is applied if it is the run's; not without ``update``."""
        kind, name = key_of(obj)
        try:
            created = await self._api.create(obj)
        except errors.AlreadyExists:
            live = await self._api.get(kind, run.namespace, name)
            if live is None:
                raise  # deleted meanwhile: the next reconcile decides
            if (problem := name_taken(live, run)) is not None:
                return problem
            await self.restore_labels(live, run, _own_labels(obj, run))
            return await self.write(obj, run) if update else None
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, run)
        self._settle(obj, created, run)
        return None

    async def restore_labels(
        self, live: Object, run: Run, labels: dict[str, str], *, at_once: bool = False
    ) -> None:
        """Restores the labels of an object, without which the cache receives no events of it.

        Args:
            at_once: without back-off.
        """
        key = kind, name = key_of(live)
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

    async def _repair(self, wanted: Object, live: Object, run: Run) -> None:
        """Applies an object that another writer has changed, with back-off; an Event says what was restored. A refusal is only
        recorded in the run's state."""
        key = kind, name = key_of(wanted)
        state, repairs = run.state, dict(run.state.repairs)
        if not state.may_repair(key, run.unix_seconds):
            return
        restored, problem = await self._change(wanted, live, run)
        if problem is not None:
            state.refused[key] = problem
        if restored is None:
            return
        difference = first_difference(live, restored)
        if difference is None:  # others only changed fields of their own: not a repair
            state.repairs = repairs
            return
        path, before, after = difference
        text = f"{kind} {name}: {path} was changed to {_text(before)}, and is restored to {_text(after)}"
        log.warning("%s/%s: %s", run.namespace, run.name, text)
        await self._api.event(run.obj, "Warning", Reason.REPAIRED_DRIFT, text)

    async def _change(self, wanted: Object, live: Object, run: Run) -> tuple[Object | None, Problem | None]:
        """Applies an object that exists. Returns the object after it (None: it was not applied) and why it was refused."""
        kind, name = key_of(wanted)
        uid = live["metadata"]["uid"]
        try:
            if uid not in run.state.applied:
                owned = await self._own_fields(kind, name, run)
                if owned is None:
                    # A claim that is gone may have held steps: the next reconcile decides.
                    return None, await self.create(wanted, run) if kind != CLAIM else None
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
        run.state.refused.pop(key_of(written), None)
        run.state.applied_hashes[key_of(written)] = (rendered_hash(wanted), content_hash(written))
        self._remember(written, run)

    def _remember(self, obj: Object, run: Run) -> None:
        run.objects[key_of(obj)] = obj
        self._cache.remember(obj)


def _text(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


def key_of(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _own_labels(wanted: Object, run: Run) -> dict[str, str]:
    """The labels to restore: of a Job only the operator's, since Kueue refuses changes of its own labels on an admitted Job."""
    labels: dict[str, str] = wanted["metadata"]["labels"]
    return labels_of(wanted["metadata"]["name"], run) if wanted["kind"] == "Job" else labels


def labels_of(name: str, run: Run) -> dict[str, str]:
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


# --- the Secret with the token -------------------------------------------------------------------


async def read_token(api: KubeApi, run: Run, *, again: bool = False) -> str:
    """The run's token; empty while it has none. again: read the Secret though a token is known."""
    state = run.state
    if again or not state.token:
        live = await api.get("Secret", run.namespace, Names(run.name).token)
        state.token_checked = run.unix_seconds
        if live is not None and run.owns(live):
            state.token = _token(live)
        elif live is None and again:
            state.token_unverified = True
    return state.token


async def ensure_token(api: KubeApi, run: Run, accepted: ScaleRLRun) -> Problem | None:
    """Creates the Secret if there is none. Not for a run that is being deleted, whose Secret the garbage collector may have
    deleted."""
    if run.deleted:
        return None
    state, name = run.state, Names(run.name).token
    # A run without objects has no Secret to read.
    known = bool(state.token) if not run.objects else bool(await read_token(api, run))
    if known and not 0 <= run.unix_seconds - state.token_checked < CHECK_SECONDS:
        state.token_checked = run.unix_seconds
        state.token_unverified |= await api.get("Secret", run.namespace, name) is None
    if known and not state.token_unverified:
        return None
    # A deleted Secret is restored with the same token, which running pods use.
    wanted = secret(accepted, run.uid, state.token or secrets.token_urlsafe(32))
    try:
        live = await api.create(wanted)
    except errors.AlreadyExists:
        found = await api.get("Secret", run.namespace, name)
        if found is None:
            raise  # deleted meanwhile: the next reconcile creates it
        live = found
    except (errors.Invalid, errors.Forbidden) as error:
        return refused(error, wanted, run)
    if not run.owns(live):
        return name_taken(live, run)
    state.token, state.token_checked, state.token_unverified = _token(live), run.unix_seconds, False
    return None


def _token(live: Object) -> str:
    data = live.get("data") or {}
    return base64.b64decode(data.get(TOKEN_KEY, "")).decode()
