"""What keeps a run from being started, found out before anything of it is created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.spec_warnings import past_deadline
from scalerl_operator.build import names_of, raw_hash
from scalerl_operator.controller.observe import Problem, seconds
from scalerl_operator.controller.refusals import name_taken, refused
from scalerl_operator.controller.run_context import CLAIM, WORKLOADS, RunContext
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object

TRIED_SECONDS: Final = 60.0
"""For so long a dry run that succeeded stands for other runs with the same pods."""


class Preflight:
    """Checks runs of which nothing exists yet. namespaced: the operator's role lets it read nothing of the cluster's."""

    def __init__(self, api: KubeApi, *, namespaced: bool = False) -> None:
        self._api = api
        self._namespaced = namespaced
        self._tried: dict[tuple[str, str], float] = {}
        """By namespace and :func:`raw_hash`: when such pods last passed a dry run."""

    async def check(
        self, run: ScaleRLRun, context: RunContext, render_all: Callable[[], Sequence[Object]]
    ) -> Problem | None:
        """The first thing that keeps the run from being started.

        render_all: gives all objects that the run will ever have. A run with Kubernetes fields of its own (podTemplate) has
        those with pods dry-run: the generators' would else be refused only after an hour of preparation.
        """
        created = seconds(context.run["metadata"].get("creationTimestamp"))
        if (late := past_deadline(run.spec, created)) is not None:
            return Problem(Reason.DEADLINE_PASSED, str(late))
        problem = await self._check_storage(run, context)
        for kind, name in names_of(run):
            problem = problem or await self._check_name(kind, name, context)
        if problem is not None or not _has_raw_parts(run):
            return problem
        return await self._dry_run(run, context, render_all)

    def forget_namespace(self, namespace: str) -> None:
        """What passed a dry run in a namespace may be refused by now."""
        self._tried = {at: when for at, when in self._tried.items() if at[0] != namespace}

    async def _check_storage(self, run: ScaleRLRun, context: RunContext) -> Problem | None:
        claim, storage_class = run.spec.storage.claim_name, run.spec.storage.storage_class_name
        if claim is not None:
            if await self._api.get(CLAIM, context.namespace, claim) is None:
                return Problem(Reason.CLAIM_NOT_FOUND, f"spec.storage.claimName: {claim} does not exist")
        elif storage_class is not None and not self._namespaced:
            try:
                found = await self._api.get("StorageClass", None, storage_class)
            except errors.Forbidden:
                found = {}  # by a role that is not the chart's; the claim's events will say
            if found is None:
                message = f"spec.storage.storageClassName: {storage_class} does not exist"
                return Problem(Reason.STORAGE_CLASS_NOT_FOUND, message)
        return None

    async def _check_name(self, kind: str, name: str, context: RunContext) -> Problem | None:
        live = context.objects.get((kind, name))
        if live is None:
            # A cached answer will do: nothing is ever written over an object that was created since.
            live = await self._api.get(kind, context.namespace, name, recent=True)
            if live is not None and not context.owns(live):
                live = await self._api.get(kind, context.namespace, name)  # it may be gone since
        return None if live is None else name_taken(live, context)

    async def _dry_run(
        self, run: ScaleRLRun, context: RunContext, render_all: Callable[[], Sequence[Object]]
    ) -> Problem | None:
        """Whether the API server accepts the run's pods. Of a thousand runs with the same pods one is tried."""
        tried, now = (context.namespace, raw_hash(run)), context.unix_seconds
        self._tried = {at: when for at, when in self._tried.items() if 0 <= now - when < TRIED_SECONDS}
        if tried in self._tried:
            return None
        for obj in render_all():
            if obj["kind"] not in WORKLOADS:
                continue
            try:
                await self._api.create(obj, dry_run=True)
            except errors.AlreadyExists:
                pass  # its name was checked
            except (errors.Invalid, errors.Forbidden) as error:
                return refused(error, obj, context)
        self._tried[tried] = now
        return None


def _has_raw_parts(run: ScaleRLRun) -> bool:
    spec = run.spec
    templates = (
        spec.pod_template,
        spec.coordinator.pod_template,
        spec.generator.pod_template,
        spec.trainer.pod_template,
    )
    return any(t is not None and t.model_dump(exclude_defaults=True) for t in templates)
