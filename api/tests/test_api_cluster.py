"""What only a cluster uses of a run: the object's own door, pod templates, storage, status, conditions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.load import SpecError, parse_run, run_from_object
from scalerl_api.pods import PodTemplate, PullSecret
from scalerl_api.process import ProcessEnvironment
from scalerl_api.reasons import Reason
from scalerl_api.spec import RunSpec
from scalerl_api.spec_warnings import cluster_warnings_of
from scalerl_api.status import Condition, RunStatus
from scalerl_api.vllm_options import GROUPS, free_option

OBJECT: dict[str, Any] = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {
        "name": "a-run",
        "namespace": "team",
        "labels": {"kueue.x-k8s.io/queue-name": "q"},
        "annotations": {"note": "x"},
        "uid": "0000",
        "resourceVersion": "12",
        "generation": 3,
        "creationTimestamp": "2026-08-01T12:00:00Z",
        "deletionTimestamp": "2026-08-01T13:00:00Z",
        "finalizers": ["scalerl.dev/drain"],
        "ownerReferences": [],
        "managedFields": [{"manager": "kubectl"}],
    },
    "spec": {
        "model": {"scratch": {}, "contextTokens": 64},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}},
        "recipe": {"maxCompletionTokens": 16},
        "budget": {"maxSteps": 3},
    },
    "status": {"phase": "Running"},
}


def spec_with(**fields: Any) -> dict[str, Any]:
    changed = copy.deepcopy(OBJECT)
    changed["spec"] |= fields
    return changed


def test_object_of_a_cluster_becomes_a_run() -> None:
    before = copy.deepcopy(OBJECT)
    run = run_from_object(OBJECT)
    assert before == OBJECT
    metadata = run.metadata
    assert (metadata.name, metadata.namespace, metadata.annotations) == ("a-run", "team", {"note": "x"})
    assert metadata.labels == {"kueue.x-k8s.io/queue-name": "q"}
    assert parse_run(yaml.safe_dump(run.to_manifest()), "run.yaml") == run


def test_file_with_server_fields_is_refused() -> None:
    with pytest.raises(SpecError, match=r"metadata\.uid: unknown field"):
        parse_run(yaml.safe_dump(OBJECT), "run.yaml")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spec": {}}, r"team/a-run: spec\.budget: required"),
        ({"spec": None}, r"team/a-run: spec: "),
        ({"metadata": None}, "metadata: required"),
        ({"metadata": {}}, r"metadata\.name: required"),
        ({"extra": 1}, "extra: unknown field"),
    ],
)
def test_object_that_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        run_from_object(OBJECT | change)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": {"path": "models/a"}}, r"spec\.model\.path: must be absolute on a cluster"),
        (
            {"task": {"jsonl": {"path": "data.jsonl"}, "verifier": {"name": "exact"}}},
            r"spec\.task\.jsonl\.path: must be absolute on a cluster",
        ),
    ],
)
def test_relative_path_is_refused_on_a_cluster(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        run_from_object(spec_with(**fields))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"env": [{"value": "x"}]}, "every variable needs a name"),
        ({"env": [{"name": "SCALERL_DIR", "value": "x"}]}, "SCALERL_ are the operator's"),
        ({"env": [{"name": "WORLD_SIZE", "value": "8"}]}, "WORLD_SIZE: the operator itself sets RANK"),
        ({"env": [{"name": "A", "value": 1}]}, "put it in quotes"),
        ({"env": [{"name": "A"}, {"name": "A"}]}, "name A is given twice"),
        ({"volumes": [{"name": "scalerl-run", "emptyDir": {}}]}, "scalerl- are the operator's"),
        ({"volumeMounts": [{"name": "a", "mountPath": "data"}]}, "must be absolute"),
        ({"volumeMounts": [{"name": "a", "mountPath": "/etc/scalerl/spec"}]}, "choose another path"),
        ({"volumeMounts": [{"name": "a", "mountPath": "/var/run/scalerl/run"}]}, "choose another path"),
        ({"volumeMounts": [{"name": "a", "mountPath": "/var/run"}]}, "choose another path"),
        ({"volumeMounts": [{"name": "a", "mountPath": "/usr/local"}]}, "hides the image's own programs"),
        ({"volumeMounts": [{"name": "a"}]}, "a mountPath"),
        ({"labels": {"scalerl.dev/run": "x"}}, "scalerl.dev/ is the operator's own"),
        ({"labels": {"a b": "x"}}, "like team or example.com/team"),
        ({"labels": {"a": True}}, "valid string"),
        ({"resources": {"limits": {"cpu": "much"}}}, "like 4, 500m or 16Gi"),
        ({"resources": {"limits": {"cpu": 0.5}}}, "valid string"),
        ({"shmSize": "0"}, "at least 1"),
        ({"imagePullSecrets": [{"name": "A"}]}, "lower-case letters"),
        ({"serviceAccountName": "Trainer"}, "lower-case letters"),
        ({"schedulerName": ""}, "at least 1 character"),
        ({"topologySpreadConstraints": ["zone"]}, "valid dictionary"),
        ({"envFrom": [{"prefix": "A_"}]}, "give exactly one of secretRef, configMapRef"),
        (
            {"envFrom": [{"secretRef": {"name": "a"}, "configMapRef": {"name": "b"}}]},
            "given are secretRef, configMapRef",
        ),
        ({"envFrom": [{"fieldRef": {}}]}, "envFrom.0.fieldRef"),
        (
            {"resourceClaims": [{"name": "gpus"}]},
            "exactly one of resourceClaimTemplateName, resourceClaimName",
        ),
        (
            {
                "resourceClaims": [
                    {"name": "a", "resourceClaimName": "b"},
                    {"name": "a", "resourceClaimName": "c"},
                ]
            },
            "name a is given twice",
        ),
        ({"initContainers": [{"name": "a"}]}, "image"),
        (
            {"initContainers": [{"name": "trainer", "image": "i"}]},
            "have the names prepare, fetch-model, coordinator",
        ),
        ({"initContainers": [{"name": "a_b", "image": "i"}]}, "lower-case letters, digits and -"),
        (
            {"initContainers": [{"name": "a", "image": "i", "securityContext": {"privileged": True}}]},
            "securityContext",
        ),
        ({"initContainers": [{"name": "a", "image": "i", "restartPolicy": "Always"}]}, "restartPolicy"),
        (
            {"initContainers": [{"name": "a", "image": "i", "env": [{"name": "SCALERL_DIR"}]}]},
            "are the operator's",
        ),
        (
            {
                "initContainers": [
                    {
                        "name": "a",
                        "image": "i",
                        "volumeMounts": [{"name": "scalerl-token", "mountPath": "/t"}],
                    }
                ]
            },
            "scalerl- are the operator's",
        ),
        (
            {
                "initContainers": [
                    {"name": "a", "image": "i", "volumeMounts": [{"name": "x", "mountPath": "/tmp"}]}
                ]
            },
            "choose another path",
        ),
        ({"nodeSelectors": {}}, "did you mean nodeSelector?"),
    ],
)
def test_pod_template_may_not_set_reserved_fields(template: dict[str, Any], says: str) -> None:
    for fields in ({"podTemplate": template}, {"generator": {"podTemplate": template}}):
        with pytest.raises(SpecError) as refused:
            run_from_object(spec_with(**fields))
        assert says in str(refused.value)


def test_path_with_a_reserved_prefix_is_allowed() -> None:
    mount = {"name": "a", "mountPath": "/tmpfiles"}
    assert run_from_object(spec_with(podTemplate={"volumeMounts": [mount]})).spec.pod_template is not None


def test_role_template_overrides_the_shared_one() -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    base = PodTemplate.model_validate(
        {
            "env": [{"name": "A", "value": "0"}, {"name": "B", "value": "$(A)"}],
            "tolerations": [toleration],
            "affinity": {"nodeAffinity": {}},
            "resources": {"requests": {"cpu": 1, "memory": "1Gi"}},
            "runtimeClassName": "plain",
            "imagePullSecrets": [{"name": "one"}],
            "shmSize": "1Gi",
            "schedulerName": "kai-scheduler",
            "serviceAccountName": "data",
            "envFrom": [{"secretRef": {"name": "hub"}}],
            "topologySpreadConstraints": [{"topologyKey": "zone"}],
            "resourceClaims": [{"name": "gpus", "resourceClaimName": "one"}],
            "initContainers": [{"name": "data", "image": "old"}, {"name": "last", "image": "l"}],
        }
    )
    role = PodTemplate.model_validate(
        {
            "env": [{"name": "C", "value": "2"}, {"name": "A", "value": "1"}],
            "tolerations": [toleration, {"key": "more"}],
            "resources": {"requests": {"cpu": "2"}},
            "runtimeClassName": "nvidia",
            "imagePullSecrets": [{"name": "two"}, {"name": "one"}],
            "serviceAccountName": "trainer",
            "envFrom": [{"secretRef": {"name": "hub"}}, {"configMapRef": {"name": "c"}, "prefix": "A_"}],
            "topologySpreadConstraints": [{"topologyKey": "host"}],
            "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight"}],
            "initContainers": [{"name": "more", "image": "m"}, {"name": "data", "image": "new"}],
        }
    )
    both = role.over(base)
    assert [(e["name"], e["value"]) for e in both.env] == [("A", "1"), ("B", "$(A)"), ("C", "2")]
    assert both.tolerations == [toleration, {"key": "more"}]
    assert both.affinity == {"nodeAffinity": {}}
    assert both.resources.requests == {"cpu": "2", "memory": "1Gi"}
    assert (both.runtime_class_name, both.shm_size) == ("nvidia", "1Gi")
    assert both.image_pull_secrets == [PullSecret(name="one"), PullSecret(name="two")]
    assert (both.scheduler_name, both.service_account_name) == ("kai-scheduler", "trainer")
    assert [source.prefix for source in both.env_from] == ["", "A_"]
    assert both.topology_spread_constraints == [{"topologyKey": "zone"}, {"topologyKey": "host"}]
    assert [claim.resource_claim_template_name for claim in both.resource_claims] == ["eight"]
    assert [(c.name, c.image) for c in both.init_containers] == [
        ("data", "new"),
        ("last", "l"),
        ("more", "m"),
    ]
    assert role.over(None) == role
    assert PodTemplate().over(base) == base


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ({"claimName": "c", "storageClassName": "fast"}, "storageClassName has no effect"),
        ({"claimName": "c", "onDelete": "Delete"}, "one given by claimName is kept"),
        ({"accessMode": "ReadOnlyMany"}, "'ReadWriteMany' or 'ReadWriteOnce'"),
        ({"size": "10GB"}, "like 512Mi or 2Gi"),
    ],
)
def test_claim_is_existing_or_created(storage: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        run_from_object(spec_with(storage=storage))
    assert says in str(refused.value)


def test_spec_may_lie_elsewhere_than_the_run(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    variables = {
        "SCALERL_DIR": str(tmp_path),
        "SCALERL_NAME": "trainer-0",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:80",
        "SCALERL_TOKEN_FILE": str(tmp_path / "token"),
    }
    assert ProcessEnvironment.read(variables).paths.run_file == tmp_path / "run.yaml"
    paths = ProcessEnvironment.read(variables | {"SCALERL_RUN_FILE": "/etc/scalerl/spec/run.yaml"}).paths
    assert paths.run_file == Path("/etc/scalerl/spec/run.yaml")
    assert paths.curve == tmp_path / "curve.csv"


def test_status_survives_the_server_and_a_newer_operator() -> None:
    condition = Condition(
        type=ConditionType.ACCEPTED,
        status="False",
        observed_generation=3,
        last_transition_time="2026-08-01T12:00:00Z",
        reason=Reason.REFERENCE_NOT_FOUND,
        message="spec.storage.claimName: no claim c",
    )
    status = RunStatus(phase=Phase.PENDING, conditions=[condition])
    written = status.to_object()
    assert written["conditions"][0]["reason"] == "ReferenceNotFound"
    assert RunStatus.model_validate(written | {"ofTomorrow": 1}) == status
    assert status.condition("Accepted") == condition
    assert status.condition(ConditionType.FAILED) is None


def test_every_constant_says_what_it_means() -> None:
    for constant in (*ConditionType, *Reason, *Phase):
        assert constant.text.endswith("."), constant
        assert constant.isalpha(), constant
        assert constant[0].isupper(), constant


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        *((a, "is set from other fields") for a in ("--config=/data/x.yaml", "--max_model_len=4", "--ssl-keyfile=/k", "-tp")),
        *((a, "is set from other fields") for a in ("--weight_transfer-config.backend=x", "--kv-cache-memory-bytes=1")),
        *((a, "is not supported") for a in ("--data-parallel-size=2", "--data_parallel_size", "-dp", "-dpl=2", "-pp", "-q=fp8")),
        *((a, "is not supported") for a in ("--enable-lora", "--no-enable-expert-parallel", "--tokenizer=/x", "--help")),
        *((a, "write an option in full") for a in ("--hos=0.0.0.0", "--por", "--dty=half", "--ud=", "--gpu_memory-util=0.5")),
        *((a, "write an option in full") for a in ("--pipe=4", "-qfp8", "-t", "-e", "-n2", "--no-enable-sc", "--hf", "--max-logp=1")),
        *((a, "write an option in full") for a in ("--", "-x", "-_max-logprobs=1", "--max.logprobs=1", "--host 0.0.0.0")),
        ("--hf-overrides.head_dtype=float16", "head_dtype is set from recipe.fp32Logits"),
        ('{"head_dtype": "float16"}', "head_dtype is set from recipe.fp32Logits"),
    ],
)  # fmt: skip
def test_vllm_options_that_a_run_must_not_set_are_refused(argument: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        free_option(argument)


@pytest.mark.parametrize(
    "argument",
    [
        *("--tokenizer-mode=slow", "--max_logprobs=1", "--model-impl=vllm", "-O3", "-O", "-O=1", "-cc.mode=3", "-1"),
        *("--hf-overrides={}", "--hf_overrides.rope_theta=1", "--enforce-eager", "--no-enforce-eager", "--watermark=0.2"),
        *("--additional-config={}", "a value", '{"a": "--host"}'),
    ],
)  # fmt: skip
def test_other_vllm_options_are_allowed(argument: str) -> None:
    assert free_option(argument) == argument


def test_every_vllm_option_is_in_the_table_once() -> None:
    options = [option for group in GROUPS for option in group.options]
    assert len(options) == len(set(options))
    assert all(group.effect.endswith(".") for group in GROUPS)


BUCKET = {"storage": {"mountedBy": "Coordinator"}, "checkpoint": {"to": "s3://bucket/run"}}
ACCOUNT = {"podTemplate": {"serviceAccountName": "buckets"}}
KEY = {"podTemplate": {"serviceAccountName": "buckets", "env": [{"name": "AWS_ACCESS_KEY_ID", "value": "k"}]}}
HISTORY = {"speculation": {"history": {}}}


@pytest.mark.parametrize(
    ("sections", "roles"),
    [
        ({**BUCKET, **ACCOUNT}, ["generator"]),
        ({**BUCKET, "trainer": ACCOUNT}, ["generator"]),
        ({**BUCKET, "trainer": ACCOUNT, "generator": HISTORY}, ["generator", "coordinator"]),
        ({**BUCKET, **ACCOUNT, "generator": HISTORY}, ["generator"]),
        ({**BUCKET, **ACCOUNT, "generator": ACCOUNT}, []),
        ({**BUCKET, "trainer": KEY}, []),
        ({**BUCKET, "trainer": {"podTemplate": {"env": KEY["podTemplate"]["env"]}}}, []),
        ({"checkpoint": {"to": "s3://bucket/run"}, **ACCOUNT}, []),
    ],
)
def test_pods_that_fetch_the_model_without_an_identity_are_warned_of(
    sections: dict[str, Any], roles: list[str]
) -> None:
    spec = {
        "model": {"scratch": {}},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
        "budget": {"maxSteps": 1},
    }
    found = [problem.where for problem in cluster_warnings_of(RunSpec.model_validate(spec | sections))]
    assert found == [f"spec.{role}.podTemplate.serviceAccountName" for role in roles]


@pytest.mark.parametrize(
    ("sections", "roles"),
    [
        ({}, ["trainer", "generator"]),
        ({"trainer": KEY}, ["generator"]),
        ({"trainer": ACCOUNT, "generator": ACCOUNT}, []),
        (ACCOUNT, ["generator"]),
        (KEY, []),
    ],
)
def test_roles_without_credentials_for_weights_in_a_bucket_are_warned_of(
    sections: dict[str, Any], roles: list[str]
) -> None:
    spec = {
        "model": {"scratch": {}},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
        "budget": {"maxSteps": 1},
        "weightSync": {"backend": "Files", "to": "s3://bucket/run"},
    }
    found = [problem.where for problem in cluster_warnings_of(RunSpec.model_validate(spec | sections))]
    assert found == [f"spec.{role}.podTemplate.env" for role in roles]
