"""What a fork may not share with its source."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_api.fork import refused_changes
from scalerl_api.spec import RunSpec


def spec(**sections: Any) -> RunSpec:
    given: dict[str, Any] = {
        "model": {"path": "/models/a", "contextTokens": 64},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "exact"}},
        "recipe": {"maxCompletionTokens": 16},
        "budget": {"maxSteps": 100},
    }
    return RunSpec.model_validate(given | sections)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"checkpoint": {"to": "s3://bucket/source"}}, "spec.checkpoint.to"),
        ({"trainer": {"export": {"to": "hf://owner/source"}}}, "spec.trainer.export.to"),
    ],
)
def test_fork_with_the_targets_of_its_source_is_refused(section: dict[str, Any], field: str) -> None:
    """Its copies would replace the source's."""
    (problem,) = refused_changes(spec(**section), spec(**section), 10)
    assert problem.startswith(f"{field}: ")
    assert "give the fork a target of its own" in problem
    assert refused_changes(spec(**section), spec(), 10) == []
    assert refused_changes(spec(), spec(**section), 10) == []
