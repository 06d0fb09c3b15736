"""What a real API server says to the runs of ``invalid_specs.yaml``, and that it takes the valid ones as the models do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from client_side_apply import ANNOTATION, applied_configuration
from invalid_specs import Case, Object, Warned, cases, merged, warned
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from scalerl_api import crd
from scalerl_api.load import run_from_object
from scalerl_api.spec import GROUP, PLURAL, VERSION
from scalerl_api.status import RunStatus

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
NEW = [case for case in cases("schema", "cel") if case.changed is None]
CHANGES = [case for case in cases("schema", "cel") if case.changed is not None]
BASE: Object = yaml.load((Path(__file__).parent / "invalid_specs.yaml").read_text(), yaml.CSafeLoader)["base"]
ESTABLISHED_SECONDS = 120.0


class Server:
    """Runs on an API server that has the definition; unknown fields are refused, as ``kubectl`` has it."""

    def __init__(self, kubeconfig: Path) -> None:
        self.api = config.new_client_from_config(config_file=str(kubeconfig))
        self.runs = client.CustomObjectsApi(self.api)
        namespace = client.CoreV1Api(self.api).create_namespace({"metadata": {"generateName": "invalid-"}})
        self.where = (GROUP, VERSION, namespace.metadata.name, PLURAL)

    def close(self) -> None:
        client.CoreV1Api(self.api).delete_namespace(self.where[2])
        self.api.close()

    def create(self, run: Object, **options: str) -> Object:
        return dict(
            self.runs.create_namespaced_custom_object(*self.where, run, field_validation="Strict", **options)
        )

    def replace(self, run: Object, **options: str) -> Object:
        name = run["metadata"]["name"]
        return dict(
            self.runs.replace_namespaced_custom_object(
                *self.where, name, run, field_validation="Strict", **options
            )
        )

    def write_status(self, run: Object, status: Object) -> Object:
        name, body = run["metadata"]["name"], merged(run, {"status": status})
        return dict(self.runs.replace_namespaced_custom_object_status(*self.where, name, body))

    def delete(self, name: str) -> None:
        self.runs.delete_namespaced_custom_object(*self.where, name)


def install(api: client.ApiClient, definition: Object | None = None) -> None:
    """The definition as the models have it now, or another, whatever was there before."""
    extensions = client.ApiextensionsV1Api(api)
    body = definition or crd.definition()
    name = body["metadata"]["name"]
    try:
        extensions.create_custom_resource_definition(body)
    except ApiException as error:
        if error.status != 409:
            raise
        known = extensions.read_custom_resource_definition(name)
        version = known.metadata.resource_version
        extensions.replace_custom_resource_definition(
            name, merged(body, {"metadata": {"resourceVersion": version}})
        )
    until = time.monotonic() + ESTABLISHED_SECONDS
    while time.monotonic() < until:
        status = extensions.read_custom_resource_definition(name).status
        conditions = {c.type: c for c in (status.conditions if status and status.conditions else [])}
        assert "NonStructuralSchema" not in conditions, conditions["NonStructuralSchema"].message
        if "Established" in conditions and conditions["Established"].status == "True" and _served(api):
            return
        time.sleep(0.2)
    raise TimeoutError(f"{name}: not served within {ESTABLISHED_SECONDS:.0f} s")


def _served(api: client.ApiClient) -> bool:
    """Whether runs are served: a moment after their definition is established."""
    try:
        client.CustomObjectsApi(api).list_cluster_custom_object(GROUP, VERSION, PLURAL, limit=1)
    except ApiException as error:
        if error.status == 404:
            return False
        raise
    return True


@pytest.fixture(scope="module")
def server(control_plane: Any) -> Iterator[Server]:
    found = Server(Path(control_plane.kubeconfig))
    install(found.api)
    yield found
    found.close()


@pytest.fixture
def stored(server: Server, request: pytest.FixtureRequest) -> Iterator[Object]:
    """The run of a case, on the server."""
    created = server.create(getattr(request, "param", BASE))
    yield created
    server.delete(created["metadata"]["name"])


def refusal(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError):
        return str(error.body)


def assert_refused(case: Case, error: ApiException) -> None:
    said = refusal(error)
    assert case.field in said, said
    assert case.says in said, said


def test_client_side_apply_takes_the_definition(server: Server, control_plane: Any) -> None:
    """As in test_api_crd.py, which limits its size."""
    words = ("apply", "--dry-run=server", "-o", "json", "-f", str(ROOT / "crds" / crd.FILE_NAME))
    applied = json.loads(control_plane.kubectl(*words))
    stored = applied["metadata"]["annotations"][ANNOTATION]
    assert stored == applied_configuration(crd.definition())
    pod_template = control_plane.once_served("explain", "scalerlruns.spec.generator.podTemplate")
    assert "Its fields: as in spec.podTemplate." in " ".join(pod_template.split())


def test_base_of_the_table_is_valid(server: Server) -> None:
    server.create(BASE, dry_run="All")


@pytest.mark.parametrize("case", NEW, ids=lambda case: case.name)
def test_invalid_run_is_refused_at_once(server: Server, case: Case) -> None:
    with pytest.raises(ApiException) as refused:
        server.create(case.run, dry_run="All")
    assert_refused(case, refused.value)


@pytest.mark.parametrize("row", warned(), ids=lambda row: row.name)
def test_run_with_a_warning_is_taken(server: Server, row: Warned) -> None:
    server.create(row.run, dry_run="All")


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.name)
def test_invalid_change_is_refused_at_once(server: Server, case: Case) -> None:
    assert case.changed is not None
    created = server.create(case.run)
    try:
        if case.status is not None:
            created = server.write_status(created, case.status)
        version = created["metadata"]["resourceVersion"]
        with pytest.raises(ApiException) as refused:
            server.replace(merged(case.changed, {"metadata": {"resourceVersion": version}}))
        assert_refused(case, refused.value)
        # The same run once more is no change.
        server.replace(merged(case.run, {"metadata": {"resourceVersion": version}}))
    finally:
        server.delete(created["metadata"]["name"])


def test_allowed_changes_are_accepted(server: Server, stored: Object) -> None:
    change = {
        "budget": {"maxSteps": 9},
        "suspend": True,
        "recipe": {"optimizer": {"learningRate": "1e-4"}},
        "trainer": {
            "replicas": 2,
            "podTemplate": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
        },
        "autoscaling": {"mode": "Auto", "deadline": "2026-08-01T12:00:00.5+02:00", "generators": {"max": 4}},
        "images": {"trainer": "registry.local/t@sha256:0"},
        "ttlSecondsAfterFinished": 0,
        "storage": {"onDelete": "Delete"},
    }
    changed = server.replace(merged(stored, {"spec": change}))
    assert changed["metadata"]["generation"] == stored["metadata"]["generation"] + 1
    run = run_from_object(changed)
    assert run.spec.trainer.pod_template is not None
    assert run.spec.trainer.pod_template.env == [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]


def test_server_fills_in_what_the_models_do(stored: Object) -> None:
    written = run_from_object(stored).to_manifest()["spec"]
    assert run_from_object(stored).spec == run_from_object(BASE).spec

    def shown(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {key: shown(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in ({}, [])}

    spec = dict(stored["spec"])
    recipe = spec.pop("recipe")
    assert not {"loss", "aggregation", "promptsPerStep", "offPolicy"} & recipe.keys(), (
        "those are the preset's"
    )
    whole = shown(written.pop("recipe"))
    assert {
        name: merged(whole[name], item) if isinstance(item, dict) else item for name, item in recipe.items()
    } == {name: whole[name] for name in recipe}
    assert spec == shown(written)


def test_null_field_is_an_absent_field(server: Server) -> None:
    run = merged(BASE, {})
    run["spec"] |= {"seed": None, "warmStart": None, "generator": None}
    assert "warmStart" not in server.create(run, dry_run="All")["spec"]


def test_decimal_strings_stay_unchanged(server: Server) -> None:
    run = merged(BASE, {"spec": {"recipe": {"temperature": 1}, "storage": {"size": 1073741824}}})
    created = server.create(run, dry_run="All")
    assert created["spec"]["recipe"]["temperature"] == 1
    assert run_from_object(created).spec.storage.size == "1073741824"


def test_values_of_a_tasks_parameters_keep_their_type(server: Server) -> None:
    parameters = {"a": 1, "b": True, "c": "0.5", "d": [1, 2], "e": ["x"]}
    source = {"name": "chain_sum", "parameters": parameters}
    run = merged(BASE, {"spec": {"task": {"jsonl": None, "reasoningGym": source}}})
    created = server.create(run, dry_run="All")
    assert created["spec"]["task"]["reasoningGym"]["parameters"] == parameters


def test_mix_weights_sum_to_one_exactly(server: Server) -> None:
    """As doubles, ten tenths do not."""
    tasks = [{"name": f"t{at}", "weight": "0.1", **BASE["spec"]["task"]} for at in range(10)]
    mix = {"jsonl": None, "verifier": None, "mix": tasks}
    run = merged(BASE, {"spec": {"task": mix, "evaluation": {"forecastSet": "weighted-mean"}}})
    created = server.create(run, dry_run="All")
    assert run_from_object(created).spec.forecast_set == "weighted-mean"


def test_generators_are_scaled_within_their_range(server: Server) -> None:
    run = merged(BASE, {"spec": {"autoscaling": {"generators": {"max": 3}}}})
    name = server.create(run)["metadata"]["name"]
    where = (*server.where, name)
    try:
        server.runs.patch_namespaced_custom_object_scale(*where, {"spec": {"replicas": 3}})
        read = server.runs.get_namespaced_custom_object(*where)
        assert read["spec"]["generator"]["replicas"] == 3
        with pytest.raises(ApiException) as refused:
            server.runs.patch_namespaced_custom_object_scale(*where, {"spec": {"replicas": 4}})
        assert "generator.replicas must lie within autoscaling.generators" in refusal(refused.value)
    finally:
        server.delete(name)


def test_max_steps_may_be_the_present_step(server: Server, stored: Object) -> None:
    at_step = server.write_status(stored, {"step": 2})
    limited = server.replace(merged(at_step, {"spec": {"budget": {"maxSteps": 2}}}))
    beyond = server.write_status(limited, {"step": 3})
    assert server.replace(merged(beyond, {"spec": {"suspend": True}}))["spec"]["budget"]["maxSteps"] == 2


def test_status_is_stored_whole_without_touching_the_spec(server: Server, stored: Object) -> None:
    status = RunStatus.model_validate(
        {
            "phase": "Running",
            "observedGeneration": 1,
            "conditions": [
                {
                    "type": "Accepted",
                    "status": "True",
                    "lastTransitionTime": "2026-08-01T12:00:00Z",
                    "reason": "Accepted",
                    "message": "",
                }
            ],
            "step": 4,
            "replicas": 1,
            "selector": "scalerl.dev/run=invalid",
            "decisions": [{"sequence": 1, "time": "2026-08-01T12:00:00Z", "state": "CONTINUE"}],
        }
    ).to_object()
    where = (*server.where, stored["metadata"]["name"])
    body = merged(stored, {"status": status, "spec": {"suspend": True}})
    written = server.runs.replace_namespaced_custom_object_status(*where, body)
    assert written["status"] == status
    assert written["spec"] == stored["spec"]
    assert written["metadata"]["generation"] == stored["metadata"]["generation"]
    scale = server.runs.get_namespaced_custom_object_scale(*where)
    assert scale["status"] == {"replicas": 1, "selector": "scalerl.dev/run=invalid"}
    twice = merged(written, {})
    twice["status"]["conditions"] *= 2
    with pytest.raises(ApiException) as refused:
        server.runs.replace_namespaced_custom_object_status(*where, twice)
    assert "Duplicate value" in refusal(refused.value)


def test_run_accepted_before_a_rule_continues(server: Server) -> None:
    """Its status is written, and it can be suspended; who breaks the rule again is refused."""
    without = crd.definition()
    schema = without["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del schema["x-kubernetes-validations"]
    broken = merged(BASE, {"spec": {"trainer": {"replicas": 64}, "recipe": {"promptsPerStep": 8}}})
    install(server.api, without)
    deadline = time.monotonic() + ESTABLISHED_SECONDS
    created = None
    try:
        while created is None:  # until the rules are no longer in force
            try:
                created = server.create(merged(broken, {"metadata": {"name": "earlier"}}))
            except ApiException:
                assert time.monotonic() < deadline
                time.sleep(0.2)
    finally:
        install(server.api)
    deadline = time.monotonic() + ESTABLISHED_SECONDS
    while True:  # until the rules are in force
        try:
            server.create(merged(broken, {"metadata": {"name": "later"}}), dry_run="All")
        except ApiException as error:
            said = refusal(error)
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "trainer.devices must be at most" in said
    run = server.write_status(created, {"phase": "Running", "step": 1})
    run = server.replace(merged(run, {"spec": {"suspend": True}}))
    assert run["spec"]["suspend"] is True
    server.delete("earlier")
