"""For an edit of every field: a run that has trained and does not start with it is held, and reverting the edit goes on.

The operator's own steps (accept, observe, decide, render, report) on objects in memory, as a cluster would hold them; the same
against an API server: ``tests/cluster/test_failing_edits.py``.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from coordinator_statuses import status
from spec_edits import UNKNOWN_PLUGINS, Edited, edits, entry_edits

from operator_tests.manifests import IMAGES, UID
from scalerl_api.edits import Effect
from scalerl_api.status import RunStatus
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_lifecycle.status_fields import persisted_state
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.parts import Findings, Run
from scalerl_operator.controller.pod_views import observe_objects
from scalerl_operator.controller.reconcile import accept, decide
from scalerl_operator.controller.report import report
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Desired, Scope
from scalerl_operator.names import COMPONENT, SPEC_HASH

STEPS = 120
RESTARTING = [
    edited
    for edited in (*edits(refused=False), *entry_edits(refused=False))
    if edited.edit.effect not in (Effect.AT_ONCE, Effect.ENVIRONMENT)
    and not edited.path.startswith(UNKNOWN_PLUGINS)
]
NOT_RESTARTING = [
    edited
    for edited in edits(refused=False)
    if edited.edit.effect is Effect.AT_ONCE and edited.path != "suspend"
]


class World:
    """One run, its objects and its status between reconciles; a coordinator that answers while its pod is ready."""

    def __init__(self, manifest: Object) -> None:
        metadata = {"uid": UID, "namespace": "ml", "generation": 1, "resourceVersion": "1"}
        self.obj: Object = {**manifest, "metadata": manifest["metadata"] | metadata, "status": {}}
        self.objects: dict[tuple[str, str], Object] = {}
        self.coordinator = status([], step=STEPS, published_version=STEPS, wall_seconds=0.5)
        self.now = 1e9

    def edit(self, manifest: Object) -> None:
        self.obj["spec"] = copy.deepcopy(manifest["spec"])

    def reconcile(self) -> RunStatus:
        self.now += 5.0
        before = RunStatus.read(json.loads(json.dumps(self.obj["status"])))
        run = Run(self.obj, dict(self.objects), self.now, before, persisted_state(before))
        accepted = accept(run)
        assert accepted.invalid is None, accepted.invalid
        observed = observe_objects(run.objects, UID, accepted.spec_hashes())
        if observed.service(Role.COORDINATOR).ready:
            observed = replace(observed, coordinator=self.coordinator)
        decision = decide(run, accepted, observed)
        findings = Findings(run, accepted, observed, decision)
        written = report(findings)
        self.obj["status"] = written.to_object()
        if decision.request_stop is not None:
            phase = CoordinatorPhase.FINISHED if decision.request_stop else CoordinatorPhase.RUNNING
            self.coordinator = msgspec.structs.replace(
                self.coordinator, stop_reason=decision.request_stop, phase=phase
            )
            if decision.request_stop:  # the trainer saves, and ends
                self._end(Role.TRAINER, None)
        self._apply(
            findings,
            Desired(decision.wanted),
        )
        return written

    def _apply(self, findings: Findings, desired: Desired) -> None:
        wanted = {
            (o["kind"], o["metadata"]["name"]): o
            for o in render(Scope(findings.accepted.run, UID, IMAGES, "scalerl-system", desired=desired))
            if o["kind"] in ("Job", "StatefulSet", "Deployment")
        }
        for key in self.objects.keys() - wanted.keys():
            if key[0] != "Pod":
                self._delete(key)
        for key, obj in wanted.items():
            hashed = obj["spec"]["template"]["metadata"]["annotations"][SPEC_HASH]
            pod = self.objects.get(("Pod", f"{key[1]}-pod"))
            replaced = key[0] != "Job" and findings.decision.update_existing
            if key not in self.objects or (replaced and pod is not None and _hash(pod) != hashed):
                self._delete(key)
                self.objects[key] = obj
                self.objects["Pod", f"{key[1]}-pod"] = _pod(obj, self.now)

    def _delete(self, key: tuple[str, str]) -> None:
        self.objects.pop(key, None)
        self.objects.pop(("Pod", f"{key[1]}-pod"), None)

    def pods(self, role: Role) -> list[Object]:
        return [
            o
            for o in self.objects.values()
            if o["kind"] == "Pod" and o["metadata"]["labels"][COMPONENT] == role
        ]

    def work(self) -> None:
        """All pods start, and a preparation completes."""
        for role in Role:
            for pod in self.pods(role):
                if pod["status"]["phase"] == "Pending":
                    pod["status"] = _state({"running": {}}, "Running", ready=True)
        self._end(Role.PREPARE, None)

    def _end(self, role: Role, code: int | None, message: str = "") -> None:
        """The role's pods end with an exit code; None: they succeed."""
        for pod in self.pods(role):
            if pod["status"]["phase"] in ("Succeeded", "Failed"):
                continue
            over = {"terminated": {"exitCode": code or 0, "message": message, "reason": "Error"}}
            pod["status"] = _state(over, "Failed" if code else "Succeeded")
            job = self.objects.get(("Job", pod["metadata"]["name"].removesuffix("-pod")))
            if job is not None:
                then = {"type": "Failed" if code else "Complete", "status": "True"}
                job["status"] = {"conditions": [then | {"lastTransitionTime": "2001-09-09T01:46:40Z"}]}

    def fail(self, roles: frozenset[str]) -> str:
        """The first role that the edit restarts rejects its input; returns its last log line."""
        role = next(r for r in (Role.PREPARE, Role.COORDINATOR, Role.GENERATOR) if r in roles)
        for _ in range(10):  # until the role has been restarted
            self.reconcile()
            if [pod["status"]["phase"] for pod in self.pods(role)] == ["Pending"]:
                break
        line = f"{role}: this is wrong"
        self._end(role, 2, line)
        return line

    def until(self, phase: str, *, works: bool = True) -> RunStatus:
        for _ in range(20):
            found = self.reconcile()
            if found.phase == phase:
                return found
            if works:
                self.work()
        raise AssertionError(f"{phase} is not reached: {found.to_object()}")

    def until_ready(self) -> RunStatus:
        for _ in range(20):
            found = self.until("Running")
            trainer = found.condition("TrainerReady")
            if trainer is not None and trainer.status == "True":
                return found
            self.work()
        raise AssertionError("the trainer is not ready")


def _hash(pod: Object) -> str:
    return str(pod["metadata"]["annotations"][SPEC_HASH])


def _state(state: Object, phase: str, *, ready: bool = False) -> Object:
    container = {"name": "c", "ready": ready, "state": state, "restartCount": 0}
    return {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [container],
    }


def _pod(owner: Object, now: float) -> Object:
    template = owner["spec"]["template"]
    labels = template["metadata"]["labels"] | {"batch.kubernetes.io/job-name": owner["metadata"]["name"]}
    metadata = {
        "name": f"{owner['metadata']['name']}-pod",
        "uid": f"{owner['metadata']['name']}-{now}",
        "labels": labels,
        "annotations": template["metadata"]["annotations"],
        "creationTimestamp": "2001-09-09T01:46:40Z",
    }
    return {"kind": "Pod", "metadata": metadata, "status": _state({"waiting": {}}, "Pending")}


def started(manifest: Object) -> World:
    world = World(copy.deepcopy(manifest))
    found = world.until_ready()
    assert (found.step, found.has_trained) == (STEPS, True)
    return world


def test_covered_fields_are_those_of_the_models() -> None:
    assert len(RESTARTING) > 80
    # Environment servers have tests of their own: their failure ends a run after 20 restarts alone.
    others = {Effect.AT_ONCE, Effect.ENVIRONMENT, Effect.REFUSED}
    assert {edited.edit.effect for edited in RESTARTING} == {*Effect} - others


@pytest.mark.parametrize("edited", RESTARTING, ids=str)
def test_edit_that_fails_is_held_and_its_revert_goes_on(edited: Edited) -> None:
    world = started(edited.before)
    attempt = persisted_state(RunStatus.read(world.obj["status"])).attempt
    world.edit(edited.manifest)
    line = world.fail(edited.edit.effect.roles)
    found = world.until("Suspended", works=False)
    suspended = found.condition("Suspended")
    assert suspended is not None
    assert (suspended.status, suspended.reason) == ("True", "EditFailed")
    assert line in suspended.message
    assert f"spec.{edited.path.removesuffix('.none')}" in suspended.message
    assert "revert or fix the edit" in suspended.message
    for type_ in ("Failed", "Completed"):
        condition = found.condition(type_)
        assert condition is None or condition.status == "False"
    found = world.reconcile()
    assert {key[0] for key in world.objects} <= {"Job", "Pod"}, "no generator, no coordinator"
    assert {p["status"]["phase"] for p in world.objects.values() if p["kind"] == "Pod"} <= {
        "Failed",
        "Succeeded",
    }
    for _ in range(3):
        assert world.reconcile().to_object() == found.to_object(), "it stays held, also for another operator"

    world.edit(edited.before)
    assert world.reconcile().trained_spec is None
    found = world.until_ready()
    assert (found.step, found.trained_spec) == (STEPS, None)
    assert found.trainer.attempt >= attempt
    suspended = found.condition("Suspended")
    assert suspended is not None
    assert suspended.status == "False"


@pytest.mark.parametrize("edited", NOT_RESTARTING, ids=str)
def test_edit_without_a_restart_leaves_the_run_alone(edited: Edited) -> None:
    world = started(edited.before)
    before = {key: o for key, o in world.objects.items() if key[0] == "Job"}
    world.edit(edited.manifest)
    for _ in range(3):
        found = world.reconcile()
    assert (found.phase, found.unproven_since, found.trained_spec) == ("Running", None, None)
    assert {key: o for key, o in world.objects.items() if key[0] == "Job"} == before


def test_pod_of_a_reverted_edit_fails_nothing() -> None:
    """It is still there when the operator sees the revert."""
    edited = next(edited for edited in RESTARTING if edited.path == "trace")
    world = started(edited.before)
    world.edit(edited.manifest)
    world.reconcile()
    (pod,) = world.pods(Role.COORDINATOR)
    world.edit(edited.before)
    world._end(Role.COORDINATOR, 2, "wrong")
    assert pod["status"]["phase"] == "Failed"
    assert world.reconcile().phase == "Running"
    assert world.until_ready().step == STEPS


@pytest.mark.parametrize("path", ["generator.extraArgs", "trace"])
def test_spec_whose_pods_never_work_is_not_the_one_to_go_back_to(path: str) -> None:
    """Training goes on with the generators, or the coordinator, of the spec before; then another edit fails."""
    edited = next(edited for edited in RESTARTING if edited.path == path)
    world = started(edited.before)
    trained = RunStatus.read(world.obj["status"]).accepted_spec
    world.edit(edited.manifest)
    for _ in range(5):
        world.coordinator = msgspec.structs.replace(world.coordinator, step=world.coordinator.step + 20)
        found = world.reconcile()  # the new pod stays pending
    assert found.trained_spec == trained
    world.work()
    world.reconcile()
    world.coordinator = msgspec.structs.replace(world.coordinator, step=world.coordinator.step + 20)
    assert world.reconcile().trained_spec is None


def test_run_that_was_given_more_steps_goes_on() -> None:
    """Completed, then ``budget.maxSteps`` is raised; other edits start nothing."""
    manifest: Any = copy.deepcopy(RESTARTING[0].before)
    manifest["spec"]["budget"] = {"maxSteps": STEPS}
    world = started(manifest)
    world.coordinator = msgspec.structs.replace(
        world.coordinator, phase=CoordinatorPhase.FINISHED, stop_reason="maxSteps"
    )
    world._end(Role.TRAINER, None)
    found = world.until("Completed", works=False)
    assert found.completion_time is not None
    for patch in ({"ttlSecondsAfterFinished": 100_000}, {"trace": True}):
        manifest["spec"] |= patch
        world.edit(manifest)
        assert world.reconcile().phase == "Completed"
    manifest["spec"]["budget"] = {"maxSteps": STEPS + 200}
    world.edit(manifest)
    world.coordinator = msgspec.structs.replace(world.coordinator, phase=CoordinatorPhase.WAITING)
    found = world.reconcile()
    assert (found.phase, found.completion_time) == ("Pending", None)
    found = world.until_ready()
    assert (found.step, found.resumed) == (STEPS, True)
