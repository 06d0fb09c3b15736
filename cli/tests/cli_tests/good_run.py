"""A run file without problems, and changes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {"name": "good"},
    "spec": {
        "model": {"scratch": {"layers": 2, "hiddenSize": 64, "attentionHeads": 2}, "contextTokens": 64},
        "task": {
            "reasoningGym": {"name": "chain_sum", "size": 500},
            "verifier": {"name": "reasoning-gym"},
            "heldOut": {"size": 32},
        },
        "recipe": {"maxCompletionTokens": 8},
        "budget": {"maxSteps": 200},
    },
}
REMOVE = object()


def changed(**changes: Any) -> str:
    """``GOOD`` with dotted paths (``__`` for the dot) set, or removed."""
    run = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = run
        for part in parents:
            node = node.setdefault(part, {})
        if value is REMOVE:
            del node[last]
        else:
            node[last] = value
    return yaml.safe_dump(run)


Check = Callable[[Path, list[str]], None]
