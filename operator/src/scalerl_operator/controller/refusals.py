"""What the API server refuses of a run's objects, in terms of the run's spec; tried before anything of the run is created.

The API server refuses ``spec.template.spec.volumes[5]``; what the user can change is ``spec.podTemplate.volumes[0]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from scalerl_api.conditions import Reason
from scalerl_api.spec import KIND, ScaleRLRun
from scalerl_api.spec_warnings import past_deadline
from scalerl_operator.build.scope import SECTION
from scalerl_operator.controller.observe import seconds
from scalerl_operator.controller.run_context import CLAIM, WORKLOADS, RunContext, is_deleted
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import COMPONENT, Names
from scalerl_operator.policy.problems import Problem, creation_problem

_TEMPLATE: Final = "spec.template."
_IN_TEXT: Final = re.compile(r"\bspec\.template\.[\w.\[\]/-]*\w\]?")
_ENTRY: Final = re.compile(r"(?P<list>\w+)\[(?P<index>\d+)\](?P<rest>.*)", re.DOTALL)
_KEYS: Final = {"env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""The field that identifies an entry of a list; entries of other lists are compared whole."""


async def preflight(
    api: KubeApi, context: RunContext, render_all: Callable[[], Sequence[Object]], *, namespaced: bool
) -> Problem | None:
    """The first thing that keeps a run of which there is nothing yet from being started.

    namespaced: the operator's role lets it read nothing of the cluster's.
    render_all: gives all objects that the run will ever have. A run with Kubernetes fields of its own (podTemplate) has
    those with pods dry-run: the generators' would else be refused only after an hour of preparation.
    """
    begun = any(kind in WORKLOADS and context.owns(obj) for (kind, _), obj in context.objects.items())
    if context.before.start_time is not None or begun:
        return None
    run, created = context.run, seconds(context.obj["metadata"].get("creationTimestamp"))
    if (late := past_deadline(run.spec, created)) is not None:
        return Problem(Reason.SPEC_INVALID, str(late))
    problem = await _check_storage(api, context, namespaced=namespaced)
    objects = render_all()
    names = [(obj["kind"], obj["metadata"]["name"]) for obj in objects]
    for kind, name in (*names, ("Secret", Names(context.name).token)):
        problem = problem or await _check_name(api, kind, name, context)
    if problem is not None or not _has_raw_parts(run):
        return problem
    return await _dry_run(api, context, objects)


async def _check_storage(api: KubeApi, context: RunContext, *, namespaced: bool) -> Problem | None:
    storage = context.run.spec.storage
    claim, storage_class = storage.claim_name, storage.storage_class_name
    if claim is not None:
        if await api.get(CLAIM, context.namespace, claim) is None:
            return Problem(Reason.REFERENCE_NOT_FOUND, f"spec.storage.claimName: {claim} does not exist")
    elif storage_class is not None and not namespaced:
        try:
            found = await api.get("StorageClass", None, storage_class)
        except errors.Forbidden:
            found = {}  # by a role that is not the chart's; the claim's events will say
        if found is None:
            message = f"spec.storage.storageClassName: {storage_class} does not exist"
            return Problem(Reason.REFERENCE_NOT_FOUND, message)
    return None


async def _check_name(api: KubeApi, kind: str, name: str, context: RunContext) -> Problem | None:
    live = context.objects.get((kind, name))
    if live is None:
        # A cached answer will do: nothing is ever written over an object that was created since.
        live = await api.get(kind, context.namespace, name, recent=True)
        if live is not None and not context.owns(live):
            live = await api.get(kind, context.namespace, name)  # it may be gone since
    return None if live is None else name_taken(live, context)


async def _dry_run(api: KubeApi, context: RunContext, objects: Sequence[Object]) -> Problem | None:
    """Whether the API server accepts the run's pods."""
    for obj in objects:
        if obj["kind"] not in WORKLOADS:
            continue
        try:
            await api.create(obj, dry_run=True)
        except errors.AlreadyExists:
            pass  # its name was checked
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, context)
    return None


def _has_raw_parts(run: ScaleRLRun) -> bool:
    spec = run.spec
    templates = [part.pod_template for part in (spec, spec.coordinator, spec.generator, spec.trainer)]
    return any(t is not None and t.model_dump(exclude_defaults=True) for t in templates)


def name_taken(live: Object, context: RunContext) -> Problem | None:
    """Why an object that exists cannot be the run's; None: it is the run's."""
    if context.owns(live):
        return None
    kind = live["kind"]
    what = f"{kind} {live['metadata']['name']}"
    if kind == CLAIM:
        return Problem(Reason.NAME_TAKEN, f"{what} holds another run's data")
    owners = live["metadata"].get("ownerReferences") or ()
    if is_deleted(live) or any(o.get("kind") == KIND and o.get("name") == context.name for o in owners):
        return Problem(
            Reason.NAME_TAKEN, f"{what} is of an earlier run of this name, and still being removed"
        )
    return Problem(Reason.NAME_TAKEN, f"{what} exists and is not this run's")


def refused(error: errors.ApiError, obj: Object, context: RunContext) -> Problem:
    """Why the API server refused ``obj``, in terms of the run's spec."""
    what = f"{obj['kind']} {obj['metadata']['name']}"
    if isinstance(error, errors.QuotaExceeded):
        return Problem(Reason.QUOTA_EXCEEDED, f"{what}: {error.message}")
    text = in_terms_of_the_spec(error, obj, context.obj)
    return Problem(creation_problem(error.message), f"{what}: {text}")


def in_terms_of_the_spec(error: errors.ApiError, obj: Object, run: Object) -> str:
    """The message of ``error``, which refused ``obj``, with the fields of ``run`` in place of those of ``obj``.

    A field that no podTemplate has, because the operator itself writes it, keeps its name. What is said of several
    containers and comes from one field is said once.
    """
    if "template" not in obj.get("spec", {}):
        return error.message
    said = [f"{spec_field(c.field, obj, run)}: {c.message}" for c in error.causes if c.field]
    if said:
        return "; ".join(dict.fromkeys(said))
    return _IN_TEXT.sub(lambda match: spec_field(match[0], obj, run), error.message)


def spec_field(path: str, obj: Object, run: Object) -> str:
    """The path in ``run`` of what stands at ``path`` in ``obj``; ``path`` where the run does not have it."""
    role = obj["metadata"].get("labels", {}).get(COMPONENT)
    if role not in SECTION or not path.startswith(_TEMPLATE):
        return path
    member = SECTION[role]
    below = path.removeprefix(_TEMPLATE).removeprefix("metadata.").removeprefix("spec.")
    part: Any = obj["spec"]["template"]["spec"]
    found = _ENTRY.match(below)
    if found is not None and found["list"] == "containers" and found["rest"].startswith("."):
        containers = part["containers"]
        part, below = containers[int(found["index"]) % len(containers)], found["rest"][1:]
        if below == "image":
            return f"spec.images.{member}"
        found = _ENTRY.match(below)
    spec = run["spec"]
    templates = {
        f"spec.{member}.podTemplate": (spec.get(member) or {}).get("podTemplate") or {},
        "spec.podTemplate": spec.get("podTemplate") or {},
    }
    for base, template in templates.items():
        if found is not None:
            index = _index(template.get(found["list"]) or (), part.get(found["list"]) or (), found)
            if index is not None:
                return f"{base}.{found['list']}[{index}]{found['rest']}"
        elif below.startswith("resources."):
            kind = re.split(r"[.\[]", below)[1]
            if (template.get("resources") or {}).get(kind):
                return f"{base}.{below}"
        elif template.get(re.split(r"[.\[]", below)[0]):  # of some lists the API server names no entry
            return f"{base}.{below}"
    return path


def _index(given: Sequence[Any], rendered: Sequence[Any], found: re.Match[str]) -> int | None:
    """Where the rendered entry stands in the user's list."""
    if int(found["index"]) >= len(rendered):
        return None
    entry, key = rendered[int(found["index"])], _KEYS.get(found["list"])
    for index, other in enumerate(given):
        if other == entry if key is None else other.get(key) == entry.get(key):
            return index
    return None
