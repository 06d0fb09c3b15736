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
        ({"sessions": 63, "concurrent": 64}, "while steps are slow, up to 320 episodes"),
        ({"sessions": None, "concurrent": 256}, ""),  # defaults
        ({"sessions": 64, "concurrent": 256}, "has 64 sessions: 192 wait"),
        ({"sessions": 32, "concurrent": 256, **SMALL}, ""),  # the recipe has no more
        ({"sessions": 31, "concurrent": 256, **SMALL}, "up to 32 episodes"),
        ({"sessions": 15, "concurrent": 16, **SMALL}, "while steps are slow, up to 32 episodes"),
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
    assert not waits or (PER_REPLICA in found[0] and f": {waits} episodes wait for one" in found[0])


def test_sessions_of_tasks_with_other_environments() -> None:
    """A generator has sessions for each of them, also at the same servers."""
    run = spec(16, 16, per_replica=31)
    mine = run.task.environment
    assert mine is not None
    longer = mine.model_copy(update={"max_turns": 99, "parameters": {"sessions": 15}})
    own = {"jsonl": {"path": "e.jsonl"}, "environment": longer}
    sets: list[dict[str, Any]] = [
        {"name": "a"},
        {"name": "same", "task": own | {"environment": mine}},
        {"name": "other", "task": own},
    ]
    document = run.model_dump(by_alias=True, exclude_unset=True)
    document["evaluation"] = {"sets": sets}
    both = RunSpec.model_validate(document)
    assert list(both.server_environments) == [
        "spec.task.environment",
        "spec.evaluation.sets.2.task.environment",
    ]
    assert [one.where for one in warnings_of(both) if "sessions" in one.where] == [
        "spec.evaluation.sets.2.task.environment.parameters.sessions"
    ]
    assert not local_warnings_of(both)
    document["environment"]["sessionsPerReplica"] = 30
    (found,) = local_warnings_of(RunSpec.model_validate(document))
    assert "is 30, for 31 sessions of generators: 1 episodes wait" in str(found)
    document["environment"]["sessionsPerReplica"] = 16
    (found,) = local_warnings_of(RunSpec.model_validate(document))
    assert "15 episodes wait" in str(found)


def test_warning_of_a_mix_has_the_path_of_its_task() -> None:
    server = {"url": "http://game:8000", "parameters": {"sessions": 8}}
    task = {"environment": server, "weight": "0.5", "heldOut": {"size": 16}}
    given = spec(64, 64).model_dump(by_alias=True, exclude_unset=True)
    given["task"] = {
        "mix": [
            {"name": "a", "jsonl": {"path": "a.jsonl"}} | task | {"environment": server | {"maxTurns": 3}},
            {"name": "b", "jsonl": {"path": "b.jsonl"}} | task,
        ]
    }
    found = [one.where for one in warnings_of(RunSpec.model_validate(given)) if "sessions" in one.where]
    assert found == [f"spec.task.mix.{at}.environment.parameters.sessions" for at in (0, 1)]
