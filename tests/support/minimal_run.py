"""A spec for tests."""

from __future__ import annotations

from typing import Any

from scalerl_api.spec import ScaleRLRun


def run_spec(**spec: Any) -> ScaleRLRun:
    base: dict[str, Any] = {
        "model": {"scratch": {}},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}},
        "budget": {"maxSteps": 4},
    }
    return ScaleRLRun.model_validate({"metadata": {"name": "test"}, "spec": base | spec})
