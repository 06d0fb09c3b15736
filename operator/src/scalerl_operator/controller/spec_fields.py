"""Maps fields of rendered objects back to the fields of the run's spec that they were rendered from. Pure.

The API server refuses ``spec.template.spec.volumes[5]``; what the user can change is ``spec.podTemplate.volumes[0]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Object
from scalerl_operator.names import COMPONENT
from scalerl_operator.workloads import Role

_TEMPLATE: Final = "spec.template."
_IN_TEXT: Final = re.compile(r"\bspec\.template\.[\w.\[\]/-]*\w\]?")
_ENTRY: Final = re.compile(r"(?P<list>\w+)\[(?P<index>\d+)\](?P<rest>.*)", re.DOTALL)
_MEMBER: Final[Mapping[str, str]] = {
    Role.COORDINATOR: "coordinator",
    Role.GENERATOR: "generator",
    Role.TRAINER: "trainer",
    Role.PREPARE: "trainer",
}
"""The part of the spec with the podTemplate and the image of each role."""
_KEYS: Final = {"env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""What tells the entries of a list apart; those of other lists are compared whole."""
_VALUES: Final = (
    # Of some lists the API server does not say which entry it means.
    *_KEYS,
    "affinity",
    "nodeSelector",
    "runtimeClassName",
    "priorityClassName",
    "labels",
    "annotations",
)


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
    member = _MEMBER.get(obj["metadata"].get("labels", {}).get(COMPONENT, ""))
    if member is None or not path.startswith(_TEMPLATE):
        return path
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
        elif re.split(r"[.\[]", below)[0] in _VALUES and template.get(re.split(r"[.\[]", below)[0]):
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
