"""Which images a run's roles have: over upgrades of the operator, and changes of ``spec.images``."""

from __future__ import annotations

import pytest

from operator_tests.manifests import EVERYTHING, UID, cluster_run
from scalerl_lifecycle import lifecycle
from scalerl_lifecycle.lifecycle_types import LifecycleInput, PersistedState
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.apply import pinned
from scalerl_operator.controller.parts import Run
from scalerl_operator.controller.pod_views import observe_objects
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import render, spec_hash
from scalerl_operator.manifests.scope import Images, Scope

OLD = Images("trainer:1", "generator:1", "operator:1")
NEW = Images("trainer:2", "generator:2", "operator:2")
KINDS = ("Job", "StatefulSet", "Deployment")
OF_ROLES = {
    "math-prepare": "trainer",
    "math-trainer-1": "trainer",
    "math-generator": "generator",
    "math-coordinator": "coordinator",
}


class Cluster:
    """The workloads of one run, as one operator after the other brings them about."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}

    def reconcile(self, operator: Images, **named: str) -> dict[str, str]:
        """The image of each workload after a reconcile."""
        run = cluster_run(images=named)
        metadata = {"uid": UID, "namespace": "ml", "name": "math"}
        images = pinned(Run({"metadata": metadata}, self.objects, 0.0), operator)
        for obj in render(Scope(run, UID, images, "o", desired=EVERYTHING)):
            key = (obj["kind"], obj["metadata"]["name"])
            if obj["kind"] in KINDS and (
                obj["kind"] != "Job" or key not in self.objects
            ):  # a Job never changes
                self.objects[key] = obj
        return {
            name: obj["spec"]["template"]["spec"]["containers"][0]["image"]
            for (_, name), obj in self.objects.items()
        }


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def images(**own: str) -> dict[str, str]:
    by_role = {"trainer": OLD.trainer, "generator": OLD.generator, "coordinator": OLD.coordinator} | own
    return {name: by_role[role] for name, role in OF_ROLES.items()}


def test_pinned_keeps_images_of_a_running_run(cluster: Cluster) -> None:
    assert cluster.reconcile(OLD) == images()
    assert cluster.reconcile(NEW) == images()
    cluster.objects.clear()  # suspended, and resumed
    assert set(cluster.reconcile(NEW).values()) == {NEW.trainer, NEW.generator, NEW.coordinator}


def test_pinned_replaces_an_image_that_is_no_longer_named(cluster: Cluster) -> None:
    assert cluster.reconcile(OLD, generator="mine:1")["math-generator"] == "mine:1"
    assert cluster.reconcile(OLD) == images()


def test_pinned_uses_the_release_of_the_other_roles(cluster: Cluster) -> None:
    cluster.reconcile(OLD, generator="mine:1", coordinator="mine:2")
    assert cluster.reconcile(NEW, coordinator="mine:2") == images(coordinator="mine:2")
    assert cluster.reconcile(NEW) == images()


def test_pinned_takes_an_image_that_is_named_later(cluster: Cluster) -> None:
    cluster.reconcile(OLD)
    assert cluster.reconcile(NEW, generator="mine:1") == images(generator="mine:1")
    assert cluster.reconcile(NEW) == images()


def test_pinned_images_end_with_an_edit_of_trainer_devices(cluster: Cluster) -> None:
    """The edit removes all workloads, so none of them pins an image."""
    cluster.reconcile(OLD)
    run = cluster_run(trainer={"replicas": 1, "devices": 8})
    roles = (Role.PREPARE, Role.TRAINER)
    observed = observe_objects(cluster.objects, UID, {role: spec_hash(run, role) for role in roles})
    inputs = LifecycleInput(unix_seconds=0.0, prepare=observed.prepare, trainer=observed.trainer)
    decision = lifecycle.decide(run.spec, inputs, PersistedState(attempt=1))
    assert (
        decision.wanted.prepare,
        decision.wanted.coordinator,
        decision.wanted.generators,
        decision.wanted.trainer,
    ) == (*(False, False, False, None),)
