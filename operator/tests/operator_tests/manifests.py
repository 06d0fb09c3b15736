"""Runs as a cluster holds them, and their objects by kind and name, for the tests of render and drift."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimal_run import run_spec

from scalerl_api.conditions import Phase
from scalerl_api.load import load_run
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_api.wire import Status
from scalerl_lifecycle.lifecycle_types import LifecycleDecision, PersistedState, Problem, Wanted
from scalerl_operator.controller.coordinator_problems import update_faults
from scalerl_operator.controller.parts import Accepted, Checks, Findings, Observed, Run
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Desired, Images, Scope

EXAMPLES = Path(__file__).parents[3] / "examples"
UID = "0b6f0c52-7d4e-4a53-9a68-0a3c5c1f3f10"
IMAGES = Images("registry/trainer:1", "registry/generator:1", "registry/operator:1")
RUNNING = Desired(Wanted(coordinator=True, generators=True, trainer=1))
PODS = ("Job/prepare", "StatefulSet/coordinator", "Deployment/generator", "Job/trainer")
"""What has pods, as :func:`rendered` names it."""
EVERYTHING = Desired(Wanted(prepare=True, coordinator=True, generators=True, trainer=1))


def cluster_run(name: str = "math", labels: dict[str, str] | None = None, **spec: Any) -> ScaleRLRun:
    run = run_spec(**spec)
    metadata = {"name": name, "namespace": "ml", "labels": labels or {}}
    return ScaleRLRun.model_validate(run.to_manifest() | {"metadata": metadata})


def example(path: str) -> ScaleRLRun:
    run = load_run(EXAMPLES / path)
    return run.model_copy(update={"metadata": run.metadata.model_copy(update={"namespace": "ml"})})


def rendered(run: ScaleRLRun, desired: Desired = EVERYTHING, uid: str = UID) -> dict[str, Object]:
    """By kind and, of what there are two of, component: ``Service/trainer``."""
    objects = render(Scope(run, uid, IMAGES, "scalerl-system", desired=desired))
    found = {f"{o['kind']}/{o['metadata']['labels']['app.kubernetes.io/component']}": o for o in objects}
    assert len(found) == len(objects)
    return found


def pod_spec(obj: Object) -> Object:
    spec: Object = obj["spec"]["template"]["spec"]
    return spec


def every_container(objects: dict[str, Object]) -> Iterator[tuple[Object, Object]]:
    for key in PODS:
        for each in pod_spec(objects[key])["containers"]:
            yield pod_spec(objects[key]), each


def container(obj: Object, name: str) -> Object:
    return next(c for c in pod_spec(obj)["containers"] if c["name"] == name)


def environment(container: Object) -> dict[str, Any]:
    """A variable's text, or the field it comes from."""
    return {e["name"]: e.get("value") or e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"]}


def findings(
    run: ScaleRLRun | None,
    before: RunStatus | None = None,
    *,
    coordinator: Status | None = None,
    unix_seconds: float = 1e9,
    objects: dict[tuple[str, str], Object] | None = None,
    observed: Observed | None = None,
    decision: LifecycleDecision | None = None,
    invalid: Problem | None = None,
    blocked: Problem | None = None,
    persisted: PersistedState | None = None,
    state: RunState | None = None,
    **checks: Any,
) -> Findings:
    """A run at one reconcile. ``checks``: fields of :class:`Checks`."""
    metadata = {"uid": UID, "generation": 1, "namespace": "ml", "name": "math"}
    status, decided = before or RunStatus(), decision or LifecycleDecision(Phase.PENDING, PersistedState())
    made = Run(
        {"metadata": metadata},
        objects or {},
        unix_seconds,
        status,
        persisted or PersistedState(),
        state or RunState(),
    )
    found = replace(observed or Observed(), coordinator=coordinator, faults=status.faults)
    if coordinator is not None:
        found = replace(found, faults=update_faults(status.faults, coordinator, unix_seconds))
    return Findings(made, Accepted(run, invalid=invalid), found, decided, Checks(**checks), blocked)
