"""Trackers of a spec: what is odd about them on a cluster."""

from __future__ import annotations

import pytest

from scalerl_api.spec import RunSpec
from scalerl_api.spec_warnings import cluster_warnings_of

KEY = {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}}}


def warnings(**sections: object) -> list[str]:
    spec = {
        "model": {"scratch": {}},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
        "budget": {"maxSteps": 1},
    }
    return [str(problem) for problem in cluster_warnings_of(RunSpec.model_validate(spec | sections))]


def test_wandb_without_a_key_is_warned_of() -> None:
    (said,) = warnings(trackers={"wandb": {}})
    assert said.startswith("spec.trackers.wandb: coordinator.podTemplate.env has no WANDB_API_KEY")


@pytest.mark.parametrize(
    "sections",
    [
        {"trackers": {"wandb": {"offline": True}}},
        {"trackers": {"wandb": {}}, "coordinator": {"podTemplate": {"env": [KEY]}}},
        {"trackers": {"wandb": {}}, "podTemplate": {"env": [KEY]}},
        {"trackers": {"tensorBoard": {}, "mlflow": {"uri": "https://mlflow"}}},
    ],
)
def test_trackers_that_work_are_not_warned_of(sections: dict[str, object]) -> None:
    assert warnings(**sections) == []


def test_directory_on_no_volume_is_warned_of() -> None:
    (said,) = warnings(trackers={"tensorBoard": {"directory": "/shared/events"}})
    assert said.startswith("spec.trackers.tensorBoard.directory: /shared/events lies in no volume")
