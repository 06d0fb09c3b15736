"""Which images a run's roles have: over upgrades of the operator, and changes of ``spec.images``."""

from __future__ import annotations

from typing import Any

import pytest

from operator_tests.manifests import EVERYTHING, UID, cluster_run
from scalerl_operator.build import render
from scalerl_operator.controller.apply import pinned
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.kube.types import Images, Object
from scalerl_operator.names import IMAGE

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

    def look(self, operator: Images, **named: str) -> dict[str, str]:
        """The image of each workload after a look."""
        run = cluster_run(images=named)
        metadata = {"uid": UID, "namespace": "ml", "name": "math"}
        images = pinned(RunContext({"metadata": metadata}, self.objects, 0.0), run.spec.images, operator)
        for obj in render(run, UID, EVERYTHING, images, operator_namespace="o"):
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


def test_a_run_keeps_the_release_that_it_began_with(cluster: Cluster) -> None:
    assert cluster.look(OLD) == images()
    assert cluster.look(NEW) == images()
    cluster.objects.clear()  # suspended, and resumed
    assert set(cluster.look(NEW).values()) == {NEW.trainer, NEW.generator, NEW.coordinator}


def test_an_image_that_is_no_longer_named_gives_place_to_the_operators(cluster: Cluster) -> None:
    assert cluster.look(OLD, generator="mine:1")["math-generator"] == "mine:1"
    assert cluster.look(OLD) == images()


def test_and_to_that_of_the_release_that_the_others_have(cluster: Cluster) -> None:
    cluster.look(OLD, generator="mine:1", coordinator="mine:2")
    assert cluster.look(NEW, coordinator="mine:2") == images(coordinator="mine:2")
    assert cluster.look(NEW) == images()


def test_an_image_that_is_named_later_is_taken(cluster: Cluster) -> None:
    cluster.look(OLD)
    assert cluster.look(NEW, generator="mine:1") == images(generator="mine:1")
    assert cluster.look(NEW) == images()


@pytest.mark.parametrize(
    ("named", "after"), [({}, OLD.generator), ({"generator": OLD.generator}, NEW.generator)]
)
def test_of_a_release_that_noted_nothing_what_runs_counts_unless_it_was_named(
    cluster: Cluster, named: dict[str, Any], after: str
) -> None:
    cluster.look(OLD, **named)
    for obj in cluster.objects.values():
        del obj["metadata"]["annotations"][IMAGE]
    assert cluster.look(NEW, **named)["math-generator"] == OLD.generator
    assert cluster.look(NEW)["math-generator"] == after
