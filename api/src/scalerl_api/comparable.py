"""Whether a finished run may serve as a prior for another: the same model on the same task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from scalerl_api.edits import flat, without_indices
from scalerl_api.spec import RunSpec

MAY_DIFFER: Final = frozenset(
    {
        "model.dtype",
        "model.attention",
        "model.cache.claimName",
        "model.cache.readOnly",
        "model.contextTokens",
        "task.verifier.timeoutSeconds",
        "task.verifier.memory",
        "task.verifier.workers",
        "task.mix.verifier.timeoutSeconds",
        "task.mix.verifier.memory",
        "task.mix.verifier.workers",
        *(
            f"{task}.environment.{name}"
            for task in ("task", "task.mix")
            for name in ("turnTimeoutSeconds", "memory", "workers")
        ),
    }
)
"""Fields of model and task that may differ, because they only determine where and how weights are stored, and how completions are scored.
contextTokens only bounds recipe.maxCompletionTokens, which is in the digest of the evaluation set. All other fields of
model and task must agree."""


def comparable(earlier: RunSpec, run: RunSpec) -> str:
    """The reason why a finished run of spec ``earlier`` is no prior for ``run``, with the field; empty if it may be one.

    Model, task, warm start and, with ``budget.split``, the compute of mid-training must agree. Recipe, seed, budget and
    sizes may differ: the prior measures how much runs differ because of them. The digest in each point compares
    evaluations; this function does not.
    """
    one, other = (dict(_fields(spec)) for spec in (earlier, run))
    for path in [*one, *(path for path in other if path not in one)]:
        if one.get(path) != other.get(path):
            return f"{path} is {_shown(one.get(path))}, this run's is {_shown(other.get(path))}"
    return ""


def _fields(spec: RunSpec) -> Iterator[tuple[str, Any]]:
    dumped = spec.model_dump(mode="json", by_alias=True)
    compared = {name: dumped[name] for name in ("model", "task", "warmStart")}
    if spec.budget.split is not None:  # the split determines where mid-training ends
        compared["budget"] = {name: dumped["budget"][name] for name in ("maxComputeTokens", "split")}
    for path, value in flat(compared):
        if without_indices(path) not in MAY_DIFFER and value is not None:
            yield path, value


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
