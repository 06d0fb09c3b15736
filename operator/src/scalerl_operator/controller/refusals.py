"""Refusals by the API server, with the fields of the run's spec: a refused ``spec.template.spec.volumes[5]`` of a Job may be
the user's ``spec.podTemplate.volumes[0]``. Also the checks before a run is started."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from scalerl_api import plugins
from scalerl_api.cluster import StorageSpec
from scalerl_api.conditions import Reason
from scalerl_api.registry import Kind
from scalerl_api.spec import KIND, RunSpec, ScaleRLRun
from scalerl_api.spec_warnings import past_deadline
from scalerl_operator.controller.parts import CLAIM, WORKLOADS, Run
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.objects import is_deleted
from scalerl_operator.kube.types import Object
from scalerl_operator.kube.unlabelled import UnlabelledNames
from scalerl_operator.manifests.scope import IMAGE, SECTION
from scalerl_operator.names import COMPONENT, Names
from scalerl_operator.policy.persisted_state import seconds
from scalerl_operator.policy.problems import Problem, creation_problem
from scalerl_operator.workloads import Role

_TEMPLATE: Final = "spec.template."
_IN_TEXT: Final = re.compile(r"\bspec\.template\.[\w.\[\]/-]*\w\]?")
_ENTRY: Final = re.compile(r"(?P<list>\w+)\[(?P<index>\d+)\](?P<rest>.*)", re.DOTALL)
_KEYS: Final = {
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "initContainers": "name",
    "resourceClaims": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""The key of a list's entries; entries of other lists are compared as a whole."""


async def preflight(
    api: KubeApi,
    cache: Cache,
    unlabelled: UnlabelledNames,
    run: Run,
    accepted: ScaleRLRun,
    render_all: Callable[[], Sequence[Object]],
    *,
    namespaced: bool,
) -> Problem | None:
    """The first problem that keeps a run from being started; None for a run that has been started.

    namespaced: the operator's role does not permit reads of cluster-scoped objects.
    render_all: renders all objects that the run will have. If the run has a podTemplate, its workloads are created as a dry run,
    which also finds that their names are taken: a refusal of the generators would otherwise show only after the preparation.
    """
    started = any(kind in WORKLOADS and run.owns(obj) for (kind, _), obj in run.objects.items())
    if run.before.start_time is not None or started:
        return None
    created = seconds(run.obj["metadata"].get("creationTimestamp"))
    if (late := past_deadline(accepted.spec, created)) is not None:
        return Problem(Reason.SPEC_INVALID, str(late))
    problem = plugin_problem(accepted.spec) or await _check_storage(
        api, run, accepted.spec.storage, namespaced=namespaced
    )
    objects = render_all()
    tried = [obj for obj in objects if obj["kind"] in WORKLOADS] if _has_raw_parts(accepted.spec) else []
    names = [(obj["kind"], obj["metadata"]["name"]) for obj in objects if obj not in tried]
    for kind, name in (*names, ("Secret", Names(run.name).token)):
        if problem is None and await _may_be_taken(cache, unlabelled, kind, name, run):
            problem = await _check_name(api, kind, name, run)
    return problem or await _dry_run(api, run, tried)


def plugin_problem(spec: RunSpec) -> Problem | None:
    """The first name of what the coordinator opens that its image does not have: that image is the operator's, unless the run names
    another one. The preparation and the vLLM servers check what is in theirs."""
    if spec.images.coordinator is not None:
        return None
    found = plugins.problems(
        spec, (Kind.SOURCE, Kind.VERIFIER, Kind.ENVIRONMENT, Kind.SCHEDULE, Kind.TRACKER)
    )
    return Problem(Reason.REFERENCE_NOT_FOUND, ": ".join(found[0])) if found else None


async def _check_storage(api: KubeApi, run: Run, storage: StorageSpec, *, namespaced: bool) -> Problem | None:
    claim, storage_class = storage.claim_name, storage.storage_class_name
    if claim is not None:
        if await api.get(CLAIM, run.namespace, claim) is None:
            return Problem(Reason.REFERENCE_NOT_FOUND, f"spec.storage.claimName: {claim} does not exist")
    elif storage_class is not None and not namespaced:
        # With another role than the chart's, Events of the claim report a missing class.
        with contextlib.suppress(errors.Forbidden):
            if await api.get("StorageClass", None, storage_class) is None:
                message = f"spec.storage.storageClassName: {storage_class} does not exist"
                return Problem(Reason.REFERENCE_NOT_FOUND, message)
    return None


async def _may_be_taken(cache: Cache, unlabelled: UnlabelledNames, kind: str, name: str, run: Run) -> bool:
    """Whether an object may have the name. One that was created in the last seconds is found by the create."""
    there = (kind, name) in run.objects or cache.version(kind, run.namespace, name) >= 0
    return there or await unlabelled.may_have(kind, run.namespace, name)


async def _check_name(api: KubeApi, kind: str, name: str, run: Run) -> Problem | None:
    live = run.objects.get((kind, name))
    if live is None:
        live = await api.get(kind, run.namespace, name, recent=True)
        if live is not None and not run.owns(live):
            live = await api.get(kind, run.namespace, name)  # it may have been deleted since
    return None if live is None else name_taken(live, run)


async def _dry_run(api: KubeApi, run: Run, objects: Sequence[Object]) -> Problem | None:
    """Whether the API server accepts the run's workloads, and their names are free."""
    for obj in objects:
        try:
            await api.create(obj, dry_run=True)
        except errors.AlreadyExists:
            live = await api.get(obj["kind"], run.namespace, obj["metadata"]["name"])
            if live is not None and (problem := name_taken(live, run)) is not None:
                return problem
        except (errors.Invalid, errors.Forbidden) as error:
            return refused(error, obj, run)
    return None


def _has_raw_parts(spec: RunSpec) -> bool:
    templates = [part.pod_template for part in (spec, spec.coordinator, spec.generator, spec.trainer)]
    return any(t is not None and t.model_dump(exclude_defaults=True) for t in templates)


def name_taken(live: Object, run: Run) -> Problem | None:
    """The problem of an object that is not the run's but has the name of one; None: it is the run's."""
    if run.owns(live):
        return None
    owners = live["metadata"].get("ownerReferences") or ()
    text = "exists and is not this run's"
    if live["kind"] == CLAIM:
        text = "holds another run's data"
    elif is_deleted(live) or any(o.get("kind") == KIND and o.get("name") == run.name for o in owners):
        text = "is of an earlier run of this name, and still being removed"
    return Problem(Reason.NAME_TAKEN, f"{live['kind']} {live['metadata']['name']} {text}")


def refused(error: errors.ApiError, obj: Object, run: Run) -> Problem:
    """Why the API server refused ``obj``, with fields of the run's spec."""
    name = f"{obj['kind']} {obj['metadata']['name']}"
    if isinstance(error, errors.QuotaExceeded):
        return Problem(Reason.QUOTA_EXCEEDED, f"{name}: {error.message}")
    text = in_terms_of_the_spec(error, obj, run.obj)
    return Problem(creation_problem(error.message), f"{name}: {text}")


def in_terms_of_the_spec(error: errors.ApiError, obj: Object, run: Object) -> str:
    """The message of ``error``, which refused ``obj``, with fields of ``run`` in place of those of ``obj``.

    Fields that the operator itself sets keep their names. The message has one line per field of ``run``, which may be a field
    of several containers.
    """
    if "template" not in obj.get("spec", {}):
        return error.message
    lines = [f"{spec_field(c.field, obj, run)}: {c.message}" for c in error.causes if c.field]
    if lines:
        return "; ".join(dict.fromkeys(lines))
    return _IN_TEXT.sub(lambda match: spec_field(match[0], obj, run), error.message)


def spec_field(path: str, obj: Object, run: Object) -> str:
    """The field of ``run`` that sets the field ``path`` of ``obj``; ``path`` itself if none does."""
    role = obj["metadata"].get("labels", {}).get(COMPONENT)
    if role not in SECTION or not path.startswith(_TEMPLATE):
        return path
    member = SECTION[role]
    below = path.removeprefix(_TEMPLATE).removeprefix("metadata.").removeprefix("spec.")
    part: Any = obj["spec"]["template"]["spec"]
    entry = _ENTRY.match(below)
    if entry is not None and entry["list"] == "containers" and entry["rest"].startswith("."):
        containers = part["containers"]
        part, below = containers[int(entry["index"]) % len(containers)], entry["rest"][1:]
        if below == "image":
            own = member == Role.ENVIRONMENT and (run["spec"].get(member) or {}).get("image")
            return f"spec.{member}.image" if own else f"spec.images.{IMAGE[Role(role)]}"
        entry = _ENTRY.match(below)
    spec = run["spec"]
    templates = {
        f"spec.{member}.podTemplate": (spec.get(member) or {}).get("podTemplate") or {},
        "spec.podTemplate": spec.get("podTemplate") or {},
    }
    for base, template in templates.items():
        if entry is not None:
            index = _index(template.get(entry["list"]) or (), part.get(entry["list"]) or (), entry)
            if index is not None:
                return f"{base}.{entry['list']}[{index}]{entry['rest']}"
        elif below.startswith("resources."):
            kind = re.split(r"[.\[]", below)[1]
            if (template.get("resources") or {}).get(kind):
                return f"{base}.{below}"
        # The API server does not name the entry of some lists.
        elif template.get(re.split(r"[.\[]", below)[0]):
            return f"{base}.{below}"
    return path


def _index(given: Sequence[Any], rendered: Sequence[Any], entry: re.Match[str]) -> int | None:
    """The index of a rendered entry in the user's list."""
    if int(entry["index"]) >= len(rendered):
        return None
    wanted, key = rendered[int(entry["index"])], _KEYS.get(entry["list"])
    for index, other in enumerate(given):
        if other == wanted if key is None else other.get(key) == wanted.get(key):
            return index
    return None
