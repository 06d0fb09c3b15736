from __future__ import annotations

from typing import Any

import pytest
from minimal_run import run_spec

from scalerl_local.resume_changes import forbidden_changes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"budget": {"maxSteps": 99, "maxSeconds": 5}}, []),
        ({"suspend": True}, []),
        ({"autoscaling": {"mode": "Off"}}, []),
        ({"seed": 3}, ["spec.seed: 0 → 3 (the seed cannot change"]),
        ({"recipe": {"promptsPerStep": 7}}, []),
        (
            {"recipe": {"temperature": "0.5"}},
            ["spec.recipe.temperature: 1 → 0.5 (the recipe's temperature cannot change: accepted rollouts"],
        ),
        ({"trainer": {"replicas": 2, "zeroStage": 3}, "generator": {"extraArgs": ["--enforce-eager"]}}, []),
        (
            {"seed": 3, "warmStart": {"steps": 5}},
            ["spec.seed: 0 → 3 (", "spec.warmStart.batchSize: (not set) → 64 (warmStart cannot change"],
        ),
        (
            {"model": {"path": "/m"}},
            ["spec.model.path: (not set) → /m (", "spec.model.scratch.attentionHeads: 4 → (not set) ("],
        ),
    ],
)
def test_table(change: dict[str, Any], named: list[str]) -> None:
    found = forbidden_changes(run_spec().to_manifest(), run_spec(**change).to_manifest())
    assert [n for n in named if any(line.startswith(n) for line in found)] == named
    assert bool(found) == bool(named)


def test_labels_may_change_and_the_name_may_not() -> None:
    before = run_spec().to_manifest()
    after = {**before, "metadata": {"name": "other", "labels": {"a.b/c": "d"}, "annotations": {}}}
    assert forbidden_changes(before, after) == ["metadata.name: test → other (it names the run)"]


def test_cluster_only_fields_may_differ_on_resume() -> None:
    after = run_spec(
        storage={"size": "1Gi"},
        images={"trainer": "t:2"},
        podTemplate={"labels": {"a": "b"}},
        coordinator={"podTemplate": {"labels": {"a": "b"}}},
        ttlSecondsAfterFinished=1,
    ).to_manifest()
    before = run_spec().to_manifest()
    assert forbidden_changes(before, after) == []
    for name in ("storage", "images", "deviceResource", "coordinator"):
        del before["spec"][name]
    del before["spec"]["trainer"]["maxRestarts"]
    assert forbidden_changes(before, after) == []
