"""Generates an edit of every spec field from the models, so that a new field is covered or raises an error here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, get_args

from invalid_specs import Object, merged
from pydantic import ValidationError

from scalerl_api.edits import Edit, edit_of, leaves
from scalerl_api.spec import RunSpec, ScaleRLRun

BASE: Final[Object] = {
    "apiVersion": "scalerl.dev/v1alpha1",
    "kind": "ScaleRLRun",
    "metadata": {"name": "edited"},
    "spec": {
        "model": {
            "scratch": {
                "layers": 1,
                "hiddenSize": 32,
                "attentionHeads": 2,
                "intermediateSize": 48,
                "vocabularySize": 64,
            },
            "dtype": "float32",
            "contextTokens": 64,
        },
        "task": {
            "reasoningGym": {"name": "chain_sum", "size": 400},
            "verifier": {"name": "exact"},
            "heldOut": {"size": 3},
        },
        "recipe": {
            "promptsPerStep": 4,
            "completionsPerPrompt": 2,
            "maxCompletionTokens": 16,
            "offPolicy": {"pipeline": {"maxStalenessSteps": 2}},
        },
        "evaluation": {"everySteps": 2, "samplesPerPrompt": 2},
        "generator": {"replicas": 2},
        "budget": {"maxSteps": 100},
    },
}

_OP_GRAPH: Final[Object] = {"name": "opgraph", "parameters": {"operations": [2, 4]}}
UNKNOWN_PLUGINS: Final = ("schedule.plugin", "trackers.plugin")
"""Fields whose edits here name what is not installed: the operator refuses them, so nothing starts that could fail."""
_HALF: Final[Object] = {"weight": "0.5", "plugin": _OP_GRAPH, "verifier": {"name": "exact"}}
_MIX: Final[Object] = {
    "reasoningGym": None,
    "verifier": None,
    "heldOut": None,
    "mix": [_HALF | {"name": "a"}, _HALF | {"name": "b", "environment": {"name": "retry"}}],
}

_HTTP: Final[Object] = {"task": {"verifier": {"name": None, "http": {"url": "http://rewards:8000/score"}}}}
_PYTHON: Final[Object] = {"name": None, "python": {"path": "/code/reward.py", "function": "score"}}
_HUB: Final[Object] = {"files": None, "hub": {"name": "a/b"}}
_OF_DATASET: Final[dict[str, Object]] = {
    "files": {},
    "hub.name": _HUB,
    "hub.config": {"files": None, "hub": {"name": "a/b", "config": "main"}},
    "hub.split": {"files": None, "hub": {"name": "a/b", "split": "test"}},
    "hub.revision": {"files": None, "hub": {"name": "a/b", "revision": "c"}},
    **{
        f"columns.{name}": {"columns": {name: "a.b"}}
        for name in ("prompt", "answer", "id", "difficulty", "solution", "system")
    },
    "columns.labels": {"columns": {"labels": {"level": "level"}}},
    "answerPattern": {"answerPattern": "Boxed"},
    "metadata": {"metadata": ["a"]},
    "filter.where": {"filter": {"where": ["a > 1"]}},
    "filter.maxRejected": {"filter": {"maxRejected": "0.1"}},
    "filter.overlap": {"filter": {"overlap": 13}},
}


WITH_ENVIRONMENT: Final[Object] = merged(
    BASE,
    {"metadata": {"name": "edited-environment"}, "spec": {"task": {"environment": {"name": "retry"}}}},
)
_LIMITS: Final = ("turnTimeoutSeconds", "memory", "workers")
WITH_SERVERS: Final[Object] = merged(
    BASE,
    {
        "metadata": {"name": "edited-servers"},
        "spec": {
            "task": {"verifier": None, "environment": {"name": "server"}},
            "environment": {"image": "game:1"},
        },
    },
)
BEFORE: Final[dict[str, Object]] = {
    **{f"task.environment.{name}": WITH_ENVIRONMENT for name in _LIMITS},
    **{leaf.path: WITH_SERVERS for leaf in leaves(RunSpec) if leaf.path.startswith("environment.")},
}
"""The run before an edit, if it is not :data:`BASE`."""


def _within(path: str, value: Any) -> Object:
    """The merge patch that sets the value at a path."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


OTHER: Final[dict[str, Object]] = {
    "model.hub.name": {"model": {"scratch": None, "hub": {"name": "a/b"}}},
    "model.hub.revision": {"model": {"scratch": None, "hub": {"name": "a/b", "revision": "c"}}},
    "model.cache.claimName": {
        "model": {"scratch": None, "hub": {"name": "a/b"}, "cache": {"claimName": "models"}}
    },
    "model.cache.readOnly": {
        "model": {"scratch": None, "hub": {"name": "a/b"}, "cache": {"claimName": "models", "readOnly": True}}
    },
    "model.path": {"model": {"scratch": None, "path": "/data/model"}},
    "model.scratch.hiddenSize": {"model": {"scratch": {"hiddenSize": 64}}},
    "evaluation.generators": {"evaluation": {"generators": 1}},
    "evaluation.sets": {"evaluation": {"sets": [{"name": "held-out"}]}},
    "evaluation.forecastSet": {"evaluation": {"forecastSet": "held-out"}},
    "task.jsonl.path": {"task": {"reasoningGym": None, "jsonl": {"path": "/data/a.jsonl"}}},
    **{
        f"task.dataset.{path}": {
            "task": {"reasoningGym": None, "dataset": {"files": ["/data/a.csv"]} | section}
        }
        for path, section in _OF_DATASET.items()
    },
    "task.mix": {"task": _MIX},
    "task.heldOut.graphs": {
        "task": {"reasoningGym": None, "plugin": _OP_GRAPH, "heldOut": {"graphs": "0.2"}}
    },
    "task.prompt.template": {"task": {"prompt": {"template": "{prompt} ="}}},
    "task.prompt.chatTemplate": {"task": {"prompt": {"format": "Chat", "chatTemplate": "{{ messages }}"}}},
    "task.prompt.system": {"task": {"prompt": {"format": "Chat", "system": "Add."}}},
    "task.verifier.range": {"task": {"verifier": _PYTHON | {"range": [-1, 1]}}},
    **{
        f"task.verifier.python.{name}": {"task": {"verifier": _PYTHON}}
        for name in ("path", "function", "signature", "parameters")
    },
    "task.verifier.python.module": {
        "task": {"verifier": {"name": None, "python": {"module": "rewards", "function": "score"}}}
    },
    **{f"task.verifier.http.{name}": _HTTP for name in ("url", "batch", "concurrency")},
    "task.verifier.parameters": {"task": {"verifier": {"name": "other", "parameters": {"size": 1}}}},
    **{
        f"task.verifier.code.{name}": {"task": {"verifier": {"name": None, "code": {}}}}
        for name in ("partial", "cpuSeconds", "memory")
    },
    "task.verifiers": {"task": {"verifier": None, "verifiers": [{"name": "exact"}]}},
    "task.combine": {"task": {"combine": "Product"}},
    **{
        f"task.environment.{name}": {"task": {"environment": {"name": "retry"}}}
        for name in ("name", "parameters", "maxTurns", "maxTokensPerTurn")
    },
    **{
        f"task.environment.python.{name}": {
            "task": {
                "verifier": None,
                "environment": {"python": {"path": "/code/game.py", "className": "Game"}},
            }
        }
        for name in ("path", "className")
    },
    "task.environment.url": {"task": {"verifier": None, "environment": {"url": "http://game:8000"}}},
    "task.environment.python.module": {
        "task": {"verifier": None, "environment": {"python": {"module": "game", "className": "Game"}}}
    },
    **{
        f"task.plugin.{name}": {"task": {"reasoningGym": None, "plugin": {"name": "a"}}}
        for name in ("name", "parameters")
    },
    "from.run": {"from": {"run": "other"}},
    "from.step": {"from": {"run": "other", "step": 50}},
    "warmStart.steps": {"warmStart": {"steps": 1}},
    "warmStart.batchSize": {"warmStart": {"steps": 1, "batchSize": 8}},
    "warmStart.learningRate": {"warmStart": {"steps": 1, "learningRate": "1e-4"}},
    "warmStart.stopAtPassRate": {"warmStart": {"steps": 1, "stopAtPassRate": "0.5"}},
    "warmStart.jsonl.path": {"warmStart": {"steps": 1, "jsonl": {"path": "/data/a.jsonl"}}},
    **{
        f"warmStart.dataset.{path}": {
            "warmStart": {"steps": 1, "dataset": {"files": ["/data/a.csv"]} | section}
        }
        for path, section in _OF_DATASET.items()
    },
    "budget.maxComputeTokens": {"budget": {"maxComputeTokens": 1_000_000}},
    "budget.split.beta": {
        "warmStart": {"steps": 1},
        "budget": {"maxComputeTokens": 1000, "split": {"beta": "0.2"}},
    },
    "recipe.offPolicy.ppo.stepsPerBatch": {
        "recipe": {"offPolicy": {"pipeline": None, "ppo": {"stepsPerBatch": 2}}}
    },
    "recipe.loss.reinforce": {"recipe": {"loss": {"reinforce": {}}}},
    "recipe.correction.none": {"recipe": {"correction": {"truncated": {}}}},
    "recipe.kl.none": {"recipe": {"kl": {"penalty": {"coefficient": "0.04"}}}},
    "recipe.kl.penalty.estimator": {
        "recipe": {"kl": {"penalty": {"coefficient": "0.04", "estimator": "k2"}}}
    },
    "recipe.distillation.teacher.url": {"recipe": {"distillation": {"teacher": {"url": "http://teacher"}}}},
    "recipe.distillation.teacher.model": {
        "recipe": {"distillation": {"teacher": {"url": "http://teacher", "model": "large"}}}
    },
    "recipe.distillation.coefficient": {
        "recipe": {"distillation": {"teacher": {"url": "http://teacher"}, "coefficient": "0.5"}}
    },
    "recipe.distillation.rewards": {
        "recipe": {"distillation": {"teacher": {"url": "http://teacher"}, "rewards": "Added"}}
    },
    "recipe.advantage.discount": {"recipe": {"advantage": {"credit": "Turn", "discount": "0.9"}}},
    "schedule.byLength": {"schedule": {"byLength": {}}},
    **{
        f"recipe.length.{name}": {"recipe": {"length": {alternative: {}}}}
        for name, alternative in (("none", "overlong"), ("penalty", "penalty"), ("overlong", "overlong"))
    },
    "recipe.refill": {"recipe": {"refill": {}}},
    **{
        f"recipe.curriculum.{name}": {"recipe": {"curriculum": {name: {}}}}
        for name in ("uniform", "edgeOfCompetence")
    },
    "recipe.curriculum.difficultyPools.edges": {
        "recipe": {"curriculum": {"difficultyPools": {"edges": ["0.3", "0.6"], "weights": [1, 1, 1]}}}
    },
    "recipe.curriculum.sec.edges": {"recipe": {"curriculum": {"sec": {"edges": [3, 7]}}}},
    "recipe.curriculum.sec.temperature": {
        "recipe": {"curriculum": {"sec": {"edges": [3], "temperature": 1}}}
    },
    "recipe.curriculum.difficultyPools.weights": {
        "recipe": {"curriculum": {"difficultyPools": {"edges": ["0.5"], "weights": [2, 3]}}}
    },
    "generator.compileCache.claimName": {"generator": {"compileCache": {"claimName": "compiled"}}},
    **{
        f"trainer.lora.{name}": {"trainer": {"lora": {name: value}}}
        for name, value in {
            "rank": 8,
            "alpha": 64,
            "targetModules": ["q_proj"],
            "publish": "Adapter",
            "export": "Adapter",
        }.items()
    },
    "trainer.routerReplay": {"trainer": {"routerReplay": True}, "generator": {"devices": 1}},
    "trainer.offload": {"trainer": {"zeroStage": 3, "devices": 1, "offload": "Optimizer"}},
    "trainer.lora.inFlight": {"trainer": {"lora": {"inFlight": "FinishOnOwn", "publish": "Adapter"}}},
    "trainer.engine": {"trainer": {"engine": "FSDP2", "zeroStage": 3}},
    "trainer.microBatchTokens": {"trainer": {"microBatchTokens": 128}},
    "checkpoint.to": {"checkpoint": {"to": "s3://bucket/run"}},
    "trainer.export.to": {"trainer": {"export": {"to": "/data/models"}}},
    "weightSync.backend": {"weightSync": {"backend": "Gloo"}},
    "weightSync.to": {"weightSync": {"backend": "Files", "to": "s3://bucket/run"}},
    "weightSync.timeoutSeconds": {"weightSync": {"timeoutSeconds": 110}},
    "autoscaling.pricePerDeviceHour": {"autoscaling": {"pricePerDeviceHour": 2, "valuePerPoint": 9}},
    "autoscaling.valuePerPoint": {"autoscaling": {"pricePerDeviceHour": 1, "valuePerPoint": 10}},
    "autoscaling.generators.min": {"autoscaling": {"generators": {"min": 2, "max": 4}}},
    "autoscaling.generators.max": {"autoscaling": {"generators": {"max": 5}}},
    "autoscaling.deadline": {"autoscaling": {"deadline": "2099-01-01T00:00:00Z"}},
    "trackers.tensorBoard.directory": {"trackers": {"tensorBoard": {"directory": "/shared/tensorboard"}}},
    "trackers.mlflow.uri": {"trackers": {"mlflow": {"uri": "https://mlflow"}}},
    "trackers.mlflow.experiment": {"trackers": {"mlflow": {"uri": "https://mlflow", "experiment": "other"}}},
    **{
        f"{path}.{name}": _within(path, {"name": "other", "parameters": {"size": 1}})
        for path in (
            "recipe.loss.plugin",
            "schedule.plugin",
            "trackers.plugin",
            "generator.speculation.history.drafter",
        )
        for name in ("name", "parameters")
    },
    "storage.claimName": {"storage": {"claimName": "mine"}},
    "storage.mountedBy": {"storage": {"mountedBy": "Coordinator"}, "checkpoint": {"to": "s3://bucket/run"}},
    "storage.size": {"storage": {"size": "20Gi"}},
    "storage.storageClassName": {"storage": {"storageClassName": "fast"}},
}
"""Edits that need other fields to change too, as merge patches of the spec."""

_SOME: Final[tuple[Any, ...]] = (
    *("0.25", "64Mi", "20Gi", "2", "3", "other", "nvidia.com/other", 2, True, False),
    *({"team": "a"}, {"cpu": "2"}, ["--x"], ["task"], [{"name": "a", "value": "b"}], [{"name": "a"}]),
    *([{"name": "a", "emptyDir": {}}], [{"name": "a", "mountPath": "/a"}], [{"key": "a"}], {"nodeAffinity": {}}),
    *([{"prefix": "", "secretRef": {"name": "a", "optional": False}}], [{"name": "a", "resourceClaimName": "a"}], [{"name": "a", "image": "a"}]),
)  # fmt: skip


@dataclass(frozen=True)
class Edited:
    """A run with one field changed from ``before``."""

    path: str
    edit: Edit
    manifest: Object
    before: Object = field(default_factory=lambda: BASE)

    @property
    def run(self) -> ScaleRLRun:
        return ScaleRLRun.model_validate(self.manifest)

    def __str__(self) -> str:
        return self.path


def base() -> ScaleRLRun:
    return ScaleRLRun.model_validate(BASE)


def value_at(manifest: Object, path: str) -> Any:
    """The value at a path below ``spec``; None if the field is absent."""
    found: Any = manifest["spec"]
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else (found or {}).get(part)
    return found


def _alternatives(model_field: Any, now: Any) -> Iterator[Any]:
    """Candidate values: an enumeration's own first, then integers next to the present one, then values of other types."""
    for kind in (model_field.annotation, *get_args(model_field.annotation)):
        yield from (value for value in get_args(kind) if isinstance(value, str))
    if isinstance(now, int) and not isinstance(now, bool):
        yield from (now + 1, now - 1)
    yield from copy.deepcopy(_SOME)


def _edited(path: str, model_field: Any) -> Object:
    before = BEFORE.get(path, BASE)
    now = value_at(ScaleRLRun.model_validate(before).to_manifest(), path)
    if path in OTHER:
        return merged(before, {"spec": OTHER[path]})
    for value in _alternatives(model_field, now):
        manifest = merged(before, {"spec": _within(path, value)})
        try:
            run = ScaleRLRun.model_validate(manifest)
        except (ValidationError, TypeError):
            continue
        if value_at(run.to_manifest(), path) != now:
            return manifest
    raise AssertionError(f"spec.{path}: no other value of it is known; add one to {__name__}.OTHER")


@cache
def _one_edit_of_each_field() -> list[Edited]:
    return [
        Edited(leaf.path, edit_of(leaf.path), _edited(leaf.path, leaf.field), BEFORE.get(leaf.path, BASE))
        for leaf in leaves(RunSpec)
    ]


def edits(*, refused: bool) -> list[Edited]:
    """One edit of every field; all callers share them."""
    return [edited for edited in _one_edit_of_each_field() if (edited.edit.effect == "Refused") is refused]


_OF_MIXED_TASK: Final[dict[str, Object]] = {
    "name": {"name": "c"},
    "weight": {"weight": "0.50"},
    "plugin": {"plugin": {"parameters": {"distractors": 0}}},
    "jsonl": {"plugin": None, "jsonl": {"path": "/data/a.jsonl"}},
    "dataset": {"plugin": None, "dataset": {"files": ["/data/a.csv"]}},
    "heldOut.size": {"heldOut": {"size": 4}},
    "prompt.template": {"prompt": {"template": "{prompt} ="}},
    "maxCompletionTokens": {"maxCompletionTokens": 8},
    "verifier.name": {"verifier": {"name": "number"}},
    "verifier.timeoutSeconds": {"verifier": {"timeoutSeconds": 5}},
    "verifier.memory": {"verifier": {"memory": "2Gi"}},
    "verifier.workers": {"verifier": {"workers": 2}},
    "environment.maxTurns": {"environment": {"maxTurns": 3}},
    "environment.turnTimeoutSeconds": {"environment": {"turnTimeoutSeconds": 5}},
    "environment.memory": {"environment": {"memory": "2Gi"}},
    "environment.workers": {"environment": {"workers": 2}},
}


_OF_HELD_OUT_SET: Final[dict[str, Object]] = {
    "everySteps": {"everySteps": 3},
    "samplesPerPrompt": {"samplesPerPrompt": 3},
    "k": {"k": 1},
    "task": {"task": {"plugin": _OP_GRAPH, "verifier": {"name": "exact"}, "size": 3}},
}

_OF_SET: Final[dict[str, Object]] = {
    "name": {"name": "other"},
    "everySteps": {"everySteps": 1},
    "samplesPerPrompt": {"samplesPerPrompt": 5},
    "k": {"k": 2},
    "task.plugin": {"task": {"plugin": {"parameters": {"distractors": 0}}}},
    "task.jsonl": {"task": {"plugin": None, "jsonl": {"path": "/data/a.jsonl"}}},
    "task.dataset": {"task": {"plugin": None, "dataset": {"files": ["/data/a.csv"]}}},
    "task.reasoningGym": {"task": {"plugin": None, "reasoningGym": {"name": "chain_sum"}}},
    "task.prompt": {"task": {"prompt": {"template": "{prompt} ="}}},
    "task.size": {"task": {"size": 4}},
    "task.verifier.name": {"task": {"verifier": {"name": "number"}}},
    "task.verifier.timeoutSeconds": {"task": {"verifier": {"timeoutSeconds": 5}}},
    "task.verifier.memory": {"task": {"verifier": {"memory": "2Gi"}}},
    "task.verifier.workers": {"task": {"verifier": {"workers": 2}}},
    "task.environment.maxTurns": {"task": {"environment": {"maxTurns": 3}}},
    "task.environment.turnTimeoutSeconds": {"task": {"environment": {"turnTimeoutSeconds": 5}}},
    "task.environment.memory": {"task": {"environment": {"memory": "2Gi"}}},
    "task.environment.workers": {"task": {"environment": {"workers": 2}}},
}


def mix_base() -> Object:
    """A run with a mix of two tasks and an evaluation set of the first task."""
    sets = [{"name": "sums", "heldOutOf": "a"}]
    return merged(
        BASE, {"metadata": {"name": "edited-mix"}, "spec": {"task": _MIX, "evaluation": {"sets": sets}}}
    )


def sets_base() -> Object:
    """A run with two evaluation sets, the second with its own task."""
    task = {"plugin": _OP_GRAPH, "verifier": {"name": "exact"}, "environment": {"name": "retry"}, "size": 3}
    sets = [
        {"name": "held-out"},
        {"name": "hard", "everySteps": 4, "samplesPerPrompt": 4, "k": 4, "task": task},
    ]
    return merged(BASE, {"metadata": {"name": "edited-sets"}, "spec": {"evaluation": {"sets": sets}}})


def entry_edits(*, refused: bool) -> list[Edited]:
    """One edit of each field of the list entries in :func:`mix_base` and :func:`sets_base`; paths contain the entry's index."""
    found = [
        *_of_entry(mix_base(), "task.mix.1", _OF_MIXED_TASK),
        *_of_entry(mix_base(), "evaluation.sets.0", {"heldOutOf": {"heldOutOf": "b"}}),
        *_of_entry(sets_base(), "evaluation.sets.0", _OF_HELD_OUT_SET),
        *_of_entry(sets_base(), "evaluation.sets.1", _OF_SET),
    ]
    return [edited for edited in found if (edited.edit.effect == "Refused") is refused]


def _of_entry(before: Object, path: str, patches: dict[str, Object]) -> Iterator[Edited]:
    *_, index = path.split(".")
    for name, patch in patches.items():
        manifest = copy.deepcopy(before)
        entries = value_at(manifest, path.removesuffix(f".{index}"))
        entries[int(index)] = merged(entries[int(index)], patch)
        yield Edited(f"{path}.{name}", edit_of(f"{path}.{name}"), manifest, before)
