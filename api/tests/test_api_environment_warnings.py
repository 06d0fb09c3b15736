"""Warnings about environment servers with fewer sessions than there are episodes at once."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl_api.spec import RunSpec
from scalerl_api.spec_warnings import local_warnings_of, warnings_of

SESSIONS, PER_REPLICA = "spec.task.environment.parameters.sessions", "spec.environment.sessionsPerReplica"


def spec(
    sessions: int | None, concurrent: int, per_replica: int | None = None, replicas: int = 1, **recipe: Any
) -> RunSpec:
    parameters = {} if sessions is None else {"sessions": sessions}
    environment: dict[str, Any] = {"name": "server"} if per_replica else {"url": "http://game:8000"}
    given: dict[str, Any] = {
        "model": {"path": "/m", "contextTokens": 512},
        "task": {"jsonl": {"path": "p.jsonl"}, "environment": {**environment, "parameters": parameters}},
        "recipe": {"maxCompletionTokens": 256, **recipe},
        "generator": {"replicas": replicas, "maxConcurrentSequences": concurrent},
        "budget": {"maxSteps": 3},
    }
    if per_replica:
        given["environment"] = {"command": ["serve"], "sessionsPerReplica": per_replica}
    return RunSpec.model_validate(given)


SMALL = {"promptsPerStep": 4, "completionsPerPrompt": 4, "offPolicy": {"pipeline": {"maxStalenessSteps": 1}}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sessions": 64, "concurrent": 64}, ""),
        ({"sessions": None, "concurrent": 64}, ""),
        ({"sessions": 63, "concurrent": 64}, "up to 64 episodes at once, and has 63 sessions: 1 wait"),
        ({"sessions": None, "concurrent": 256}, "has 64 sessions: 192 wait"),
        ({"sessions": 32, "concurrent": 256, **SMALL}, ""),  # the recipe has no more
        ({"sessions": 31, "concurrent": 256, **SMALL}, "up to 32 episodes"),
        ({"sessions": 16, "concurrent": 256, "replicas": 2, **SMALL}, ""),
        ({"sessions": 8, "concurrent": 16, "per_replica": 99}, "server: a generator samples up to 16"),
    ],
)
def test_sessions_of_a_generator(given: dict[str, Any], says: str) -> None:
    found = [one for one in warnings_of(spec(**given)) if one.where == SESSIONS]
    assert len(found) == bool(says)
    assert says in "".join(map(str, found))


@pytest.mark.parametrize(
    ("given", "waits"),
    [
        ({"sessions": 16, "concurrent": 16, "per_replica": 16}, 0),
        ({"sessions": 16, "concurrent": 16, "per_replica": 15}, 1),
        ({"sessions": 16, "concurrent": 16, "per_replica": 16, "replicas": 2}, 16),
        ({"sessions": 64, "concurrent": 16, "per_replica": 16}, 0),
        ({"sessions": 16, "concurrent": 64, "per_replica": 16}, 0),  # the other warning says it
        ({"sessions": 16, "concurrent": 16}, 0),
    ],
)
def test_sessions_of_the_process_of_one_machine(given: dict[str, Any], waits: int) -> None:
    found = [str(one) for one in local_warnings_of(spec(**given))]
    assert len(found) == bool(waits)
    assert not waits or (PER_REPLICA in found[0] and f": {waits} wait for a session" in found[0])
