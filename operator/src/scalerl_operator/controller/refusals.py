"""Refusals by the API server, with the fields of the run's spec: a refused ``spec.template.spec.volumes[5]`` of a Job may be
the user's ``spec.podTemplate.volumes[0]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from scalerl_api.reasons import Reason
from scalerl_api.spec import KIND
from scalerl_lifecycle.lifecycle_types import Problem
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.cluster_messages import creation_problem
from scalerl_operator.controller.parts import CLAIM, Run
from scalerl_operator.kube import errors
from scalerl_operator.kube.objects import is_deleted
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.scope import IMAGE, SECTION
from scalerl_operator.names import COMPONENT

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
        if part["name"] == "actor" and below.startswith("resources."):
            given = (run["spec"].get("generator") or {}).get("actorResources") or {}
            return (
                f"spec.generator.actorResources{below.removeprefix('resources')}"
                if given.get(_kind(below))
                else path
            )
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
            if (template.get("resources") or {}).get(_kind(below)):
                return f"{base}.{below}"
        # The API server does not name the entry of some lists.
        elif template.get(re.split(r"[.\[]", below)[0]):
            return f"{base}.{below}"
    return path


def _kind(below: str) -> str:
    """``limits`` or ``requests``, of a path below a container."""
    return re.split(r"[.\[]", below)[1]


def _index(given: Sequence[Any], rendered: Sequence[Any], entry: re.Match[str]) -> int | None:
    """The index of a rendered entry in the user's list."""
    if int(entry["index"]) >= len(rendered):
        return None
    wanted, key = rendered[int(entry["index"])], _KEYS.get(entry["list"])
    for index, other in enumerate(given):
        if other == wanted if key is None else other.get(key) == wanted.get(key):
            return index
    return None
