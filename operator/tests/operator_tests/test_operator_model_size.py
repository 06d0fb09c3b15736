"""What follows from the model's size, which the preparation reports: memory requests, and warnings about smaller ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from operator_tests.builders import container as container_status
from operator_tests.builders import job, pod
from operator_tests.manifests import EVERYTHING, IMAGES, UID, cluster_run, container, findings
from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.fields import quantity_bytes
from scalerl_api.memory.containers import container_bytes
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.memory.trainer_rank import trainer_rank_memory
from scalerl_api.reasons import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import ModelStatus, RunStatus
from scalerl_lifecycle.lifecycle_types import JobState, LifecycleDecision, PersistedState
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.apply import fingerprint
from scalerl_operator.controller.parts import Observed
from scalerl_operator.controller.pod_views import observe_objects, pod_view
from scalerl_operator.controller.report import report
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Scope

QWEN_1_5B = ModelStatus(
    parameters=1_543_714_304, hidden_size=1536, layers=28, intermediate_size=8960, vocabulary_size=151_936,
    largest_tensor=151_936 * 1536, checkpoint_bytes=3_087_467_144, dtype="BF16",
)  # fmt: skip
PATH: Object = {"path": "/models/one"}
GIB = 2**30


def requested(run: ScaleRLRun, size: ModelSize | None) -> dict[str, float]:
    """Memory requests in GiB, by container."""
    objects = render(Scope(run, UID, IMAGES, "o", desired=EVERYTHING, size=size))
    kinds = {
        "prepare": "math-prepare",
        "server": "math-generator",
        "actor": "math-generator",
        "trainer": "math-trainer-1",
    }
    found = {}
    for name, of in kinds.items():
        obj = next(o for o in objects if o["metadata"]["name"] == of and o["kind"] in ("Job", "Deployment"))
        found[name] = quantity_bytes(container(obj, name)["resources"]["requests"]["memory"]) / GIB
    return found


def ended(
    message: str, *, code: int = 0, name: str = "prepare", role: Role = Role.PREPARE, **more: Any
) -> Object:
    state = {"terminated": {"exitCode": code, "message": message}}
    return pod(
        f"p-{more.get('created', '')}", role, container_status(state, name=name), phase="Succeeded", **more
    )


def test_requests_of_an_unknown_model_are_floors() -> None:
    assert requested(cluster_run(model=PATH), None) == {
        "prepare": 1.0,
        "server": 1.0,
        "actor": 1.25,
        "trainer": 1.0,
    }


def test_requests_follow_from_the_reported_size() -> None:
    run = cluster_run(model=PATH)
    found = requested(run, QWEN_1_5B.size)
    rank = trainer_rank_memory(QWEN_1_5B.size, run.spec).total / GIB
    assert rank > 20
    copy = 12 * QWEN_1_5B.size.parameters / GIB
    assert found["trainer"] == pytest.approx(1 + 1.1 * (rank + copy), abs=0.01)
    assert 2 * QWEN_1_5B.checkpoint_bytes / GIB < found["server"] < 4 * QWEN_1_5B.checkpoint_bytes / GIB
    assert (found["prepare"], found["actor"]) == (1.0, 1.25)


def test_requests_of_pods_with_several_ranks_and_devices() -> None:
    """Each rank has a copy of its state on the host, and the pod's shared memory is added."""
    run = cluster_run(model=PATH, trainer={"devices": 4}, generator={"devices": 2})
    found = requested(run, QWEN_1_5B.size)
    one = container_bytes("trainer", QWEN_1_5B.size, run.spec) / GIB
    copy = 12 * QWEN_1_5B.size.parameters / 4 / GIB
    assert 4 + 1.1 * copy < one < 4 + 1.1 * copy + 4
    assert found["trainer"] == pytest.approx(4 * one + 4, abs=0.01)
    assert 9 < found["server"] < 12


def test_the_copy_of_published_files_is_requested_once_a_pod() -> None:
    given = {"model": PATH, "trainer": {"devices": 4}}
    without = requested(cluster_run(**given), QWEN_1_5B.size)["trainer"]
    found = requested(cluster_run(**given, weightSync={"backend": "Files"}), QWEN_1_5B.size)["trainer"]
    assert found - without == pytest.approx(1.1 * 2 * QWEN_1_5B.size.parameters / GIB, abs=0.01)


def test_preparation_of_a_scratch_model_is_known_from_the_spec() -> None:
    """The other requests wait for the report."""
    run = cluster_run(model={"scratch": {"hiddenSize": 8192, "attentionHeads": 64, "vocabularySize": 65536}})
    found = requested(run, None)
    assert found["prepare"] == pytest.approx(1 + 1.1 * 16 * 65536 * 8192 / GIB, abs=0.01)
    assert (found["server"], found["trainer"]) == (1.0, 1.0)
    assert requested(run, QWEN_1_5B.size)["trainer"] > 20


def test_requests_of_the_user_win() -> None:
    template = {"resources": {"requests": {"memory": "3Gi"}}}
    run = cluster_run(
        model=PATH,
        podTemplate=template,
        generator={"podTemplate": {"resources": {"limits": {"memory": "90Gi"}}}},
    )
    assert requested(run, QWEN_1_5B.size) == {"prepare": 3.0, "server": 3.0, "actor": 1.25, "trainer": 3.0}
    run = cluster_run(model=PATH, generator={"actorResources": {"limits": {"memory": "5Gi"}}})
    assert requested(run, QWEN_1_5B.size)["actor"] == 5.0


# --- the report ------------------------------------------------------------------------------------------


def test_report_of_a_preparation_is_read() -> None:
    text = QWEN_1_5B.model_dump_json(by_alias=True)
    assert pod_view(ended(text)).model == QWEN_1_5B
    assert len(text) < 4096, "what the kubelet keeps of a termination message"


def _report(**values: Any) -> str:
    return json.dumps(QWEN_1_5B.model_dump(by_alias=True) | values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "done",
        "null",
        "[]",
        "{}",
        "[" * 4000,
        _report(parameters=-1),
        _report(parameters=2**60),
        _report(layers="many"),
        _report(dtype="x" * 65),
        _report()[:-3],
        '{"parameters": NaN}',
    ],
    ids=range(12),
)
def test_other_messages_are_no_report(text: str) -> None:
    assert pod_view(ended(text)).model is None


def test_only_a_preparation_that_ended_well_reports() -> None:
    text = QWEN_1_5B.model_dump_json(by_alias=True)
    assert pod_view(ended(text, code=1)).model is None
    assert pod_view(ended(text, name="trainer", role=Role.TRAINER)).model is None
    assert pod_view(ended(text, name="sidecar")).model is None


def test_newest_report_counts() -> None:
    newer = QWEN_1_5B.model_copy(update={"layers": 29})
    pods = [
        ended(model.model_dump_json(by_alias=True), created=f"2026-01-0{day}T00:00:00Z")
        for day, model in ((2, newer), (1, QWEN_1_5B))
    ]
    found = observe_objects(
        {("Pod", str(n)): one for n, one in enumerate(pods)}, UID, dict.fromkeys(Role, "")
    )
    assert found.model == newer


def test_preparation_ends_with_its_pod() -> None:
    """A Job may be seen as complete before the end of its pod is, with the report that the trainer's requests need."""
    complete = job(Role.PREPARE, {"type": "Complete", "status": "True"}, name="prepare")
    running = pod("p", Role.PREPARE, container_status({"running": {}}, name="prepare"), job="prepare")
    hashes = dict.fromkeys(Role, "")
    assert (
        observe_objects({("Job", "a"): complete, ("Pod", "p"): running}, UID, hashes).prepare.state
        is JobState.ACTIVE
    )
    finished = ended(QWEN_1_5B.model_dump_json(by_alias=True), job="prepare")
    assert (
        observe_objects({("Job", "a"): complete, ("Pod", "p"): finished}, UID, hashes).prepare.state
        is JobState.COMPLETE
    )
    assert observe_objects({("Job", "a"): complete}, UID, hashes).prepare.state is JobState.COMPLETE, (
        "the pod is gone"
    )


def test_report_is_stored_and_kept_without_its_pod() -> None:
    decision = LifecycleDecision(Phase.RUNNING, PersistedState(attempt=1))
    at = findings(cluster_run(model=PATH), decision=decision)
    assert report(at).model is None
    observed = Observed(pods=(pod_view(ended(QWEN_1_5B.model_dump_json(by_alias=True))),))
    status = report(replace(at, observed=observed))
    assert status.to_object()["model"]["vocabularySize"] == 151_936
    again = findings(cluster_run(model=PATH), RunStatus.read(status.to_object()), decision=decision)
    assert report(again).model == QWEN_1_5B


def test_new_report_is_rendered() -> None:
    decision = LifecycleDecision(Phase.RUNNING, PersistedState(attempt=1))
    at = findings(cluster_run(model=PATH), decision=decision)
    then = findings(cluster_run(model=PATH), RunStatus(model=QWEN_1_5B), decision=decision)
    assert fingerprint(then, EVERYTHING, IMAGES) != fingerprint(at, EVERYTHING, IMAGES)


# --- warnings --------------------------------------------------------------------------------------------


def accepted(size: ModelStatus | None = QWEN_1_5B, **spec: Any) -> tuple[str, str]:
    decision = LifecycleDecision(Phase.RUNNING, PersistedState(attempt=1))
    at = findings(cluster_run(model=PATH, **spec), RunStatus(model=size), decision=decision)
    condition = next(c for c in report(at).conditions if c.type == ConditionType.ACCEPTED)
    return condition.reason, condition.message


@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_warns_of_less_than_the_estimate(kind: str) -> None:
    small = {"podTemplate": {"resources": {kind: {"memory": "2Gi"}}}}
    reason, message = accepted(
        trainer=small, generator={"podTemplate": {"resources": {kind: {"memory": "64Gi"}}}}
    )
    assert reason == Reason.ACCEPTED_WITH_WARNINGS
    assert f"spec.trainer.podTemplate.resources.{kind}.memory: 2Gi is below the estimate of " in message
    assert "for the container trainer with this model (1,544 M parameters)" in message
    assert "generator" not in message
    reason, message = accepted(**small)
    assert f"spec.podTemplate.resources.{kind}.memory: 2Gi is below the estimate of " in message
    assert "for the container server" in message


@pytest.mark.parametrize(
    "amount", ["1.5G", "0.5Gi", "1e9", "1E9", "128974848000m", "2048k", "104857600", 104857600]
)
def test_warns_of_each_form_of_a_quantity_once(amount: str | int) -> None:
    reason, message = accepted(trainer={"podTemplate": {"resources": {"requests": {"memory": amount}}}})
    assert reason == Reason.ACCEPTED_WITH_WARNINGS
    assert message.count("below the estimate") == 1
    assert "for the container trainer" in message


@pytest.mark.parametrize("amount", ["1500.5Gi", "1e12", "2E", "2Pi"])
def test_enough_in_each_form_of_a_quantity(amount: str) -> None:
    _, message = accepted(podTemplate={"resources": {"limits": {"memory": amount}}})
    assert "below the estimate" not in message


def test_does_not_warn_without_a_size_or_with_enough() -> None:
    for size, amount in ((None, "2Gi"), (QWEN_1_5B, "128Gi")):
        _, message = accepted(size, podTemplate={"resources": {"limits": {"memory": amount}}})
        assert "below the estimate" not in message


@pytest.mark.parametrize(("amount", "warned"), [("1279Mi", True), ("1280Mi", False)])
def test_warns_of_less_than_the_actors_default(amount: str, warned: bool) -> None:
    _, message = accepted(None, generator={"actorResources": {"limits": {"memory": amount}}})
    text = f"spec.generator.actorResources.limits.memory: {amount} is below the 1280Mi of the container actor"
    assert (text in message) == warned


# --- a killed preparation --------------------------------------------------------------------------------


def test_killed_container_names_its_limit() -> None:
    state = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    killed = pod("p", Role.PREPARE, container_status(state, name="prepare"))
    killed["spec"] = {"containers": [{"name": "prepare", "resources": {"limits": {"memory": "1Gi"}}}]}
    problem = pod_view(killed).problem
    assert problem is not None
    assert (problem.reason, problem.message) == (
        Reason.OUT_OF_MEMORY,
        "prepare was killed: it used more memory than its limit of 1Gi: raise podTemplate.resources.limits.memory",
    )
    killed["spec"]["containers"][0]["resources"] = {"requests": {"memory": "1024Mi"}}
    problem = pod_view(killed).problem
    assert problem is not None
    assert problem.message.endswith(
        "its node ran out of memory (its request is 1024Mi): raise podTemplate.resources.requests.memory"
    )
    killed = pod("g", Role.GENERATOR, container_status(state, name="actor"))
    killed["spec"] = {"containers": [{"name": "actor", "resources": {"limits": {"memory": "1Gi"}}}]}
    problem = pod_view(killed).problem
    assert problem is not None
    assert problem.message.endswith("raise generator.actorResources.limits.memory")
