"""A queued run as one Workload of Kueue. test_kueue.py has the same with a real Kueue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from kubernetes.aio.client.configuration import Configuration
from lifecycle_inputs import DONE, FIRST, RUNNING, SPEC, exists

from operator_tests.builders import container, pod
from operator_tests.manifests import EVERYTHING, IMAGES, UID, cluster_run, findings, pod_spec, rendered
from operator_tests.test_operator_main import LEAST
from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_lifecycle.lifecycle import decide
from scalerl_lifecycle.lifecycle_types import (
    Job,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    PersistedState,
    Wanted,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller import gang_admission
from scalerl_operator.controller.check import queue_problem
from scalerl_operator.controller.claimed_runs import ReconcileContext, reconciler
from scalerl_operator.controller.conditions import _admitted
from scalerl_operator.controller.parts import Findings, Observed
from scalerl_operator.controller.pod_views import observe_objects
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.informer import Informer
from scalerl_operator.kube.kinds import KINDS
from scalerl_operator.kube.namespace_claims import NamespaceClaims
from scalerl_operator.kube.types import Object
from scalerl_operator.main import Operator
from scalerl_operator.manifests import render
from scalerl_operator.manifests.gang import Gang, minimum
from scalerl_operator.manifests.scope import Scope
from scalerl_operator.names import COMPONENT, PRIORITY, QUEUE
from scalerl_operator.settings import Settings

LABELS = {QUEUE: "team", PRIORITY: "urgent"}
RACKS = {"kueue.x-k8s.io/podset-required-topology": "example.com/rack"}
ADMISSION: Object = {
    "clusterQueue": "c",
    "podSetAssignments": [
        {"name": "coordinator", "flavors": {"cpu": "cpus"}},
        {"name": "generator", "flavors": {"cpu": "spot", "memory": "spot", "nvidia.com/gpu": "spot"}},
        {
            "name": "trainer",
            "flavors": {"nvidia.com/gpu": "spot"},
            "topologyAssignment": {"levels": ["rack"]},
        },
    ],
}
TAINT = {"key": "spot", "operator": "Exists"}
SPOT = {"nodeLabels": {"pool": "spot"}, "tolerations": [TAINT]}


class Api:
    """Answers reads of flavors and of the class ``urgent``, and keeps patches. refusal: of patches."""

    def __init__(
        self,
        flavors: dict[str, Object] | None = None,
        *,
        classes: dict[str, int] | None = None,
        refusal: type[errors.ApiError] | None = None,
    ) -> None:
        self.flavors, self.classes, self.refusal = flavors, classes, refusal
        self.reads, self.patches = 0, []  # type: ignore[var-annotated]

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        if kind == "WorkloadPriorityClass" and self.classes is not None:
            return {"value": self.classes[name]} if name in self.classes else None
        self.reads += 1
        if self.flavors is None:
            raise errors.Forbidden("no", code=403, reason="Forbidden", what="get")
        spec = self.flavors.get(name)
        return None if spec is None else {"spec": spec}

    async def patch(self, *arguments: Any, **options: Any) -> Object:
        if self.refusal is not None:
            raise self.refusal("the role has no such right", code=403, reason="r", what="patch")
        self.patches.append((arguments, options))
        return {}


THREE: Object = {"generator": {"replicas": 3, "devices": 1}}
"""No generator beyond a gang of three."""


def queued(**spec: Any) -> Any:
    parts = {"generator": {"replicas": 4, "devices": 1}, "trainer": {"replicas": 2, "devices": 8}} | spec
    return cluster_run(labels=LABELS, **parts)


def live(
    *true: str, admission: Object | None = None, generators: int = 3, evicted: str = "Preempted"
) -> Object:
    """The run's Workload."""
    made = rendered_workload(generators)
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": evicted if kind == "Evicted" else "r",
            "message": f"m {kind}",
        }
        for kind in true
    ]
    made["metadata"] |= {"uid": "w", "resourceVersion": "7", "generation": 1}
    return made | {"status": {"conditions": conditions} | ({"admission": admission} if admission else {})}


def rendered_workload(generators: int, run: Any = None) -> Object:
    desired = replace(EVERYTHING, gang=Gang(generators, priority=7))
    objects = render(Scope(run or queued(), UID, IMAGES, "o", desired=desired))
    return next(obj for obj in objects if obj["kind"] == "Workload")


def seen(
    workload: Object | None,
    *pods: Object,
    run: Any = None,
    persisted: PersistedState = FIRST,
    gang: Gang | None = None,
    trainer: Job | None = None,
) -> Findings:
    objects: dict[tuple[str, str], Object] = {
        ("Pod", p["metadata"]["name"]): {"kind": "Pod", **p} for p in pods
    }
    if workload is not None:
        objects["Workload", workload["metadata"]["name"]] = workload
    observed = replace(observe_objects(objects, UID, {Role.PREPARE: "", Role.TRAINER: ""}), gang=gang)
    if trainer is not None:
        observed = replace(observed, trainer=trainer)
    made = findings(run or queued(), objects=objects, persisted=persisted, observed=observed)
    made.run.obj["metadata"]["labels"] = LABELS
    return made


async def find(api: Any, made: Findings, *, served: bool) -> Gang | None:
    return await gang_admission.find(api, made.run, made.accepted, served=served)


def test_workload_has_all_parts_and_only_what_kueue_counts() -> None:
    template = {"tolerations": [TAINT], "env": [{"name": "A", "value": "b"}], "annotations": RACKS}
    run = queued(podTemplate=template, autoscaling={"generators": {"min": 2, "max": 8}})
    assert minimum(run.spec) == 2
    assert minimum(queued().spec) == 4
    workload = rendered_workload(2, run)
    assert workload["spec"]["priority"] == 7, "which Kueue requires beside the class"
    assert workload["spec"]["queueName"] == "team"
    assert workload["spec"]["priorityClassRef"]["name"] == "urgent"
    sets = {each["name"]: each for each in workload["spec"]["podSets"]}
    assert {name: each["count"] for name, each in sets.items()} == {
        "coordinator": 1,
        "generator": 2,
        "trainer": 2,
    }
    trainer = sets["trainer"]["template"]["spec"]
    assert trainer["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert trainer["tolerations"] == [TAINT]
    assert not {"volumes", "securityContext"} & trainer.keys()
    assert "env" not in trainer["containers"][0]
    assert sets["trainer"]["topologyRequest"] == {
        "required": "example.com/rack",
        "podIndexLabel": "batch.kubernetes.io/job-completion-index",
    }
    assert sets["generator"]["topologyRequest"] == {"required": "example.com/rack"}


def test_nothing_of_a_gang_has_a_queue_of_its_own_but_the_preparation_and_extra_generators() -> None:
    run = queued(**THREE)
    waiting = rendered(run, replace(EVERYTHING, gang=Gang(3)))
    assert "Job/trainer" not in waiting, "the pods of a Job would start"
    placed = Gang(3, json.dumps({"trainer": {}}), admitted=True)
    objects = rendered(run, replace(EVERYTHING, gang=placed))
    labelled = {key for key, obj in objects.items() if QUEUE in obj["metadata"]["labels"]}
    assert labelled == {"Job/prepare"}
    assert "Job/trainer" in objects


def test_generators_beyond_the_gang_are_queued_one_by_one() -> None:
    gang = Gang(3, json.dumps({"generator": {"nodeSelector": {"pool": "a"}}}), admitted=True)
    desired, run = replace(EVERYTHING, gang=gang), queued(generator={"replicas": 5, "devices": 1})
    objects = render(Scope(run, UID, IMAGES, "o", desired=desired))
    first, extra = (obj for obj in objects if obj["kind"] == "Deployment")
    assert (first["spec"]["replicas"], extra["spec"]["replicas"]) == (3, 2)
    assert extra["metadata"]["labels"][QUEUE] == "team"
    assert QUEUE not in first["metadata"]["labels"]
    assert pod_spec(first)["nodeSelector"] == {"pool": "a"}
    assert "nodeSelector" not in pod_spec(extra), "Kueue places each of its pods"
    chosen = extra["spec"]["selector"]["matchLabels"]
    assert chosen.items() <= extra["spec"]["template"]["metadata"]["labels"].items()
    assert not chosen.items() <= first["spec"]["template"]["metadata"]["labels"].items()
    # The first one's selector, which is immutable and was there before gangs, has the labels of both; but a ReplicaSet selects by the
    # hash of its template too, and a Deployment takes over no ReplicaSet that has another owner.
    templates = [pods["spec"]["template"]["metadata"]["labels"] for pods in (first, extra)]
    assert templates[0] != templates[1]


def test_no_selector_has_pods_of_another_run_or_role() -> None:
    desired = replace(EVERYTHING, gang=Gang(3, json.dumps({"trainer": {}}), admitted=True))
    made = {
        uid: render(Scope(queued(), uid, IMAGES, "o", desired=desired)) for uid in (UID, "of an earlier run")
    }
    pods = [
        (uid, obj["metadata"]["labels"][COMPONENT], obj["spec"]["template"]["metadata"]["labels"])
        for uid, objects in made.items()
        for obj in objects
        if "template" in obj["spec" if "spec" in obj else "metadata"]
    ]
    checked = set()
    for uid, objects in made.items():
        for obj in objects:
            kind, spec = obj["kind"], obj.get("spec") or {}
            if kind not in ("Deployment", "StatefulSet", "PodDisruptionBudget", "Service"):
                continue
            chosen = spec["selector"].get("matchLabels", spec["selector"])
            roles = {(u, role) for u, role, labels in pods if chosen.items() <= labels.items()}
            assert roles == {(uid, obj["metadata"]["labels"][COMPONENT])}, obj["metadata"]["name"]
            checked.add(kind)
    assert {"Deployment", "StatefulSet", "PodDisruptionBudget", "Service"} == checked


async def test_admitted_pods_go_where_their_flavors_are() -> None:
    api = Api({"spot": SPOT, "cpus": {}})
    workload = live("QuotaReserved", "Admitted", admission=ADMISSION)
    made = seen(workload)
    found = await find(api, made, served=True)
    assert found is not None
    assert found.admitted
    assert found.generators == 3
    assert api.reads == 2
    await find(api, made, served=True)
    assert api.reads == 2, "flavors are read once for an admission"
    objects = rendered(
        queued(podTemplate={"nodeSelector": {"a": "b"}}, **THREE), replace(EVERYTHING, gang=found)
    )
    trainer, generator = objects["Job/trainer"], objects["Deployment/generator"]
    for each in (trainer, generator):
        assert pod_spec(each)["nodeSelector"] == {"a": "b", "pool": "spot"}
        assert pod_spec(each)["tolerations"] == [TAINT]
    assert pod_spec(trainer)["schedulingGates"] == [{"name": "kueue.x-k8s.io/topology"}]
    metadata = trainer["spec"]["template"]["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/podset"] == "trainer"
    assert metadata["annotations"]["kueue.x-k8s.io/workload"] == workload["metadata"]["name"]
    assert metadata["annotations"]["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"
    assert "schedulingGates" not in pod_spec(generator)
    assert pod_spec(objects["StatefulSet/coordinator"])["nodeSelector"] == {"a": "b"}
    assert made.run.state.unread_flavors == ""


async def test_flavors_that_the_operator_may_not_read_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """As by an operator of a few namespaces: the pods of the gang may land on nodes of another quota."""
    api, made = Api(), seen(live("QuotaReserved", "Admitted", admission=ADMISSION))
    for _ in range(2):
        found = await find(api, made, served=True)
    assert found is not None
    assert found.admitted
    assert caplog.text.count("may not get the ResourceFlavor cpus, spot,") == 1, "once for an admission"
    holds, why = _admitted(replace(made, observed=Observed(trainer=Job(JobState.ACTIVE), gang=found)))
    assert holds is True
    assert why.reason is Reason.QUEUE_ADMITTED
    assert "ClusterRole that may get resourceflavors.kueue.x-k8s.io" in why.message


async def test_evicted_pods_stay_as_they_are_while_the_trainer_saves() -> None:
    """Other templates would replace the coordinator, which writes the checkpoint."""
    api: Any = Api({"spot": SPOT, "cpus": SPOT})
    before = await find(api, seen(live("QuotaReserved", "Admitted", admission=ADMISSION)), served=True)
    evicted = live("QuotaReserved", "Admitted", "Evicted", admission=ADMISSION)
    after = await find(api, seen(evicted), served=True)
    first, second = (rendered(queued(**THREE), replace(EVERYTHING, gang=each)) for each in (before, after))
    for key in ("StatefulSet/coordinator", "Deployment/generator"):
        assert pod_spec(first[key])["nodeSelector"] == {"pool": "spot"}
        assert first[key] == second[key]
    assert "Job/trainer" in first
    assert "Job/trainer" not in second, "so it is deleted, and its ranks save"


async def test_who_has_a_gang() -> None:
    api: Any = Api(classes={"urgent": 7})
    assert await find(api, seen(None), served=True) == Gang(4, priority=7)
    assert await find(api, seen(None), served=False) is None
    assert await find(api, seen(live()), served=False) == Gang(3, priority=7), "it has begun as one"
    unqueued = seen(None)
    unqueued.run.obj["metadata"]["labels"] = {}
    assert await find(api, unqueued, served=True) is None
    assert await find(api, seen(live("QuotaReserved", admission=ADMISSION)), served=True) == Gang(
        3, priority=7
    )
    started = seen(None)
    started.run.objects["StatefulSet", "math-coordinator"] = rendered(queued())["StatefulSet/coordinator"]
    assert await find(api, started, served=True) is None, "its parts were queued one by one"


async def test_class_of_a_priority() -> None:
    assert await find(Api(), seen(None), served=True) is None, "it may not be read: part by part"
    without = seen(None)
    without.run.obj["metadata"]["labels"] = {QUEUE: "team"}
    assert await find(Api(), without, served=True) == Gang(4)
    missing: Any = Api(classes={})
    assert await find(missing, seen(None), served=True) == Gang(4)
    made = seen(None, gang=Gang(4))
    said = await queue_problem(ExistingQueue(), made, Phase.PENDING)  # type: ignore[arg-type]
    assert said.startswith("no WorkloadPriorityClass urgent"), said
    made = seen(None, gang=Gang(4, priority=0))
    assert await queue_problem(ExistingQueue(), made, Phase.PENDING) == ""  # type: ignore[arg-type]


class ExistingQueue:
    async def get(self, kind: str, namespace: str | None, name: str) -> Object:
        return {}


TRAINER = pod("t", Role.TRAINER, container({"running": {}}))


@pytest.mark.parametrize(
    ("workload", "pods", "persisted", "expected"),
    [
        (live(), [], FIRST, Job(JobState.ACTIVE, FIRST.attempt, gated=True)),
        (
            live("QuotaReserved", "Evicted"),
            [TRAINER],
            FIRST,
            Job(JobState.ACTIVE, FIRST.attempt, gated=True, pods_terminating=True),
        ),
        (None, [], FIRST, Job()),
        (live(), [], replace(FIRST, last_recorded_attempt=FIRST.attempt), Job()),
        (live(), [], PersistedState(), Job()),
    ],
)
def test_trainer_of_a_gang_is_seen_as_a_held_job(
    workload: Object | None, pods: list[Object], persisted: PersistedState, expected: Job
) -> None:
    made = seen(workload, *pods, persisted=persisted, gang=Gang(3))
    assert gang_admission.observed_in_queue(made.run, made.observed).trainer == expected
    admitted = replace(made.observed, gang=Gang(3, "{}", admitted=True))
    assert gang_admission.observed_in_queue(made.run, admitted) == admitted


def test_evicted_run_saves_and_then_frees_all_at_once() -> None:
    evicted = replace(RUNNING, queued=True, serving=True, unadmitted=True)
    # The Workload was deleted by hand: its Job runs until the next reconcile.
    for trainer in (
        Job(JobState.ACTIVE, 1, ready=True),
        Job(JobState.ACTIVE, 1, gated=True, pods_terminating=True),
        Job(JobState.TERMINATING, 1),
    ):
        assert decide(SPEC, replace(evicted, trainer=trainer), FIRST).wanted.coordinator, trainer
    decision = decide(SPEC, replace(evicted, trainer=Job(JobState.ACTIVE, 1, gated=True)), FIRST)
    assert (decision.phase, exists(decision)) == ("Pending", (True, False, False, 1))
    assert gang_admission.is_wanted(decision, DONE), "it stays in the queue"
    between = decide(SPEC, replace(evicted, trainer=Job(JobState.FAILED, 1)), FIRST)
    assert between.phase == "Pending"


def test_place_in_the_queue_is_kept_from_the_first_attempt_to_the_end() -> None:
    def wanted(phase: Phase, attempt: int = 1, preparation: Job = DONE, **parts: Any) -> bool:
        decision = LifecycleDecision(phase, replace(FIRST, attempt=attempt), Wanted(**parts))
        return gang_admission.is_wanted(decision, preparation)

    assert wanted(Phase.RUNNING, prepare=True, coordinator=True), "between two attempts too"
    assert wanted(Phase.PENDING, prepare=True)
    assert wanted(Phase.SUSPENDING, coordinator=True, trainer=1)
    held = Job(JobState.ACTIVE, gated=True)
    assert not wanted(Phase.PREPARING, 0, held, prepare=True)
    assert not wanted(Phase.PENDING, prepare=False)
    assert not wanted(Phase.COMPLETED, prepare=True, trainer=1), "an ended run keeps its Jobs, and no quota"
    assert not wanted(Phase.SUSPENDED)
    first = decide(SPEC, LifecycleInput(0.0, queued=True, unadmitted=True, prepare=DONE), PersistedState())
    assert (first.phase, exists(first)) == ("Pending", (True, False, False, 1))
    assert gang_admission.is_wanted(first, DONE)
    resumed = decide(SPEC, LifecycleInput(0.0, queued=True, unadmitted=True, prepare=held), FIRST)
    assert (resumed.phase, resumed.wanted.prepare) == ("Pending", True)
    assert not gang_admission.is_wanted(resumed, held), "the run would compete with its own preparation"
    draining = wanted(Phase.SUSPENDING, preparation=Job(), coordinator=True, trainer=1)
    assert draining, "it keeps its quota until it has saved"


async def answered(
    workload: Object, *pods: Object, admitted: bool = False, generators: int = 4, generating: bool = True
) -> Object | None:
    api: Any = Api()
    trainer = Job(JobState.ACTIVE, 1, ready=admitted)
    run = queued(generator={"replicas": generators, "devices": 1})
    made = seen(workload, *pods, run=run, gang=Gang(3, "{}", admitted=admitted), trainer=trainer)
    wanted = Wanted(generators=generating)
    await gang_admission.write_workload_status(
        api, replace(made, decision=replace(made.decision, wanted=wanted))
    )
    if not api.patches:
        return None
    ((kind, _, name, patch, subresource), options) = api.patches[0]
    assert (kind, name, subresource) == ("Workload", workload["metadata"]["name"], "status")
    assert options == {"resource_version": "7"}
    return dict(patch["status"])


async def test_quota_is_given_back_when_the_pods_have_ended() -> None:
    evicted = live("QuotaReserved", "Admitted", "Evicted", admission=ADMISSION)
    for role in (Role.TRAINER, Role.GENERATOR, Role.COORDINATOR):
        assert await answered(evicted, pod("p", role, container({"running": {}}))) is None
    over = pod("p", Role.TRAINER, phase="Succeeded")
    status = await answered(evicted, over, pod("q", Role.PREPARE, container({"running": {}})))
    assert status is not None
    assert status["admission"] is None
    said = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}
    assert said["QuotaReserved"] == ("False", "Pending", "m Evicted")
    assert said["Admitted"][0] == "False"
    assert said["Requeued"] == ("True", "Preempted", "m Evicted")
    assert said["Evicted"][0] == "True", "Kueue's own"
    stopped = await answered(live("QuotaReserved", "Evicted", evicted="Deactivated", admission=ADMISSION))
    assert stopped is not None
    assert {c["type"]: c["status"] for c in stopped["conditions"]}["Requeued"] == "False", (
        "not before it is activated"
    )
    assert await answered(live("Evicted")) is None, "it has been given back"


def lost(name: str, role: Role) -> Object:
    """A pod that its node does not end."""
    evicted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "m",
    }
    ready = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    return pod(
        name, role, container({"running": {}}), deleted="2001-01-01T00:00:00Z", conditions=[evicted, *ready]
    )


async def test_quota_is_given_back_though_a_node_is_lost() -> None:
    evicted = live("QuotaReserved", "Admitted", "Evicted", admission=ADMISSION)
    pods = [lost(f"p-{role}", role) for role in (Role.TRAINER, Role.GENERATOR, Role.COORDINATOR)]
    assert await answered(evicted, *pods) is not None
    made = seen(evicted, *pods, gang=Gang(3, "{}"), trainer=Job(abandoned=FIRST.attempt))
    held = gang_admission.observed_in_queue(made.run, made.observed).trainer
    assert held == Job(JobState.ACTIVE, FIRST.attempt, gated=True, abandoned=FIRST.attempt)
    decision = decide(SPEC, replace(RUNNING, queued=True, serving=True, unadmitted=True, trainer=held), FIRST)
    assert exists(decision)[1:3] == (False, False)
    assert decision.persisted.last_recorded_attempt == FIRST.attempt, "its number is not used again"


async def test_pods_ready_is_said_once_all_of_the_gang_is() -> None:
    admitted = live("QuotaReserved", "Admitted", admission=ADMISSION)
    ready = [{"type": "Ready", "status": "True"}]
    pods = [pod(f"g{i}", Role.GENERATOR, container({}, ready=True), conditions=ready) for i in range(3)]
    pods.append(pod("c", Role.COORDINATOR, container({}, ready=True), conditions=ready))
    assert await answered(admitted, *pods[1:], admitted=True) is None
    assert await answered(admitted, *pods[1:], admitted=True, generators=2) is not None, (
        "the spec has fewer now"
    )
    assert await answered(admitted, pods[-1], admitted=True) is None
    assert await answered(admitted, pods[-1], admitted=True, generating=False) is not None, "it only saves"
    status = await answered(admitted, *pods, admitted=True)
    assert status is not None
    assert "admission" not in status
    assert {c["type"]: c["status"] for c in status["conditions"]}["PodsReady"] == "True"
    assert (
        await answered(
            live("QuotaReserved", "Admitted", "PodsReady", admission=ADMISSION), *pods, admitted=True
        )
        is None
    )


@pytest.mark.parametrize("refusal", [errors.Forbidden, errors.Invalid, errors.NotFound])
async def test_refused_answer_is_said_and_fails_no_reconcile(refusal: type[errors.ApiError]) -> None:
    made = seen(live("QuotaReserved", "Admitted", "Evicted", admission=ADMISSION), gang=Gang(3))
    await gang_admission.write_workload_status(Api(refusal=refusal), made)  # type: ignore[arg-type]
    assert "the role has no such right" in gang_admission.why_waiting(made.run)
    await gang_admission.write_workload_status(Api(), made)  # type: ignore[arg-type]
    assert "no such right" not in gang_admission.why_waiting(made.run)
    with pytest.raises(errors.Conflict):
        await gang_admission.write_workload_status(Api(refusal=errors.Conflict), made)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["two", "0", "", "1.5", "-2", "９", "99999999999"])
def test_size_of_a_slice_is_a_number(size: str) -> None:
    template = {"annotations": {"kueue.x-k8s.io/podset-slice-size": size}}
    with pytest.raises(ValueError, match="podset-slice-size"):
        queued(podTemplate=template)
    earlier = queued(podTemplate={"annotations": {"kueue.x-k8s.io/podset-slice-size": "2"}})
    earlier.spec.pod_template.annotations["kueue.x-k8s.io/podset-slice-size"] = size
    sets = rendered_workload(2, earlier)["spec"]["podSets"]
    assert sets[0]["topologyRequest"]["podSetSliceSize"] == size, "the API server refuses it, with a message"


async def test_workloads_that_cannot_be_listed_hold_only_runs_of_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = Operator(Settings.read(LEAST), Configuration(), reconciler)
    (workloads,) = (each for each in operator._informers if each.kind.name == "Workload")
    operator.watches.listed.set()
    for informer in operator._informers:
        if informer is not workloads:
            assert informer.what in operator._awaited()
            informer.synced.set()
    await asyncio.wait_for(operator._fill_cache(), 60)
    assert not operator._workloads_known()
    reconciled: list[Any] = []

    async def noted(self: Reconciler, key: Any) -> None:
        reconciled.append(key)

    async def mine(self: NamespaceClaims, namespace: str) -> bool:
        return True

    monkeypatch.setattr(Reconciler, "reconcile", noted)
    monkeypatch.setattr(NamespaceClaims, "mine", mine)
    run = seen(None).run.obj
    monkeypatch.setattr(operator.cache, "run", lambda *key: run)
    parts = ReconcileContext(
        *(operator._settings, operator.api, operator.cache, operator.metrics, lambda key: None),
        workloads_known=operator._workloads_known,
    )
    async with reconciler(parts) as reconcile:
        assert await reconcile(("ml", "math")) is not None
        assert not reconciled
        run["metadata"]["labels"] = {}
        await reconcile(("ml", "math"))
        assert len(reconciled) == 1
        run["metadata"] |= {"labels": LABELS, "deletionTimestamp": "2026-01-01T00:00:00Z"}
        await reconcile(("ml", "math"))
        assert len(reconciled) == 2, "a deleted run must be able to go"
        del run["metadata"]["deletionTimestamp"]
        workloads.synced.set()
        await reconcile(("ml", "math"))
        assert len(reconciled) == 3


def test_waiting_run_says_what_kueue_says() -> None:
    workload = live()
    message = "insufficient unused quota for nvidia.com/gpu in flavor default, 2 more needed"
    workload["status"]["conditions"] = [{"type": "QuotaReserved", "status": "False", "message": message}]
    assert gang_admission.why_waiting(seen(workload).run) == message
    assert "Kueue" in gang_admission.why_waiting(seen(None).run)


class Unserved:
    """An API server that refuses the lists of a kind."""

    def __init__(self, error: type[errors.ApiError]) -> None:
        self.error, self.calls = error, 0

    async def pages(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        self.calls += 1
        raise self.error("no", code=404, reason="r", what="list")
        yield


@pytest.mark.parametrize("error", [errors.NotFound, errors.Forbidden])
async def test_operator_starts_where_workloads_are_not_served(error: type[errors.ApiError]) -> None:
    """Without Kueue, or with a role that may not list them."""
    api: Any = Unserved(error)
    found = {kind: Informer(api, Cache(lambda key: None), KINDS[kind], None) for kind in ("Workload", "Job")}
    tasks = [asyncio.create_task(informer.run()) for informer in found.values()]
    await asyncio.wait_for(found["Workload"].synced.wait(), 60)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not found["Workload"].served
    assert not found["Job"].synced.is_set(), "of all other kinds it is an error"
