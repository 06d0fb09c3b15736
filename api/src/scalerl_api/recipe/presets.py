"""Presets: published recipes, each value with its source.

A preset sets fields of :class:`~scalerl_api.recipe.spec.RecipeSpec` by path. A field that it does not set has its default,
which is ScaleRL's. GRPO, DAPO and MiniMax-M1 follow the reimplementations that ScaleRL compares itself with
(arXiv 2510.13786, appendix), which differ in parts from the original papers. Magistral has its own paper's loss, aggregation,
advantages and filter, and only the off-policy form of that reimplementation.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic.alias_generators import to_camel, to_snake

from scalerl_api.recipe.alternatives import ONE_OF

Grade = Literal["P", "S", "?"]
"""P: from the paper itself. S: from a secondary source. ?: unknown, chosen by this project."""


@dataclass(frozen=True)
class Source:
    """Source of a value."""

    paper: str
    """Title and arXiv number."""
    grade: Grade

    def __str__(self) -> str:
        return f"{self.paper} [{self.grade}]"


@dataclass(frozen=True)
class Published:
    """A value with its source."""

    value: Any
    source: Source


_SCALERL: Final = Source("ScaleRL, arXiv 2510.13786", "P")
_REBUILT: Final = Source("as rebuilt in ScaleRL, arXiv 2510.13786", "P")
_GRPO: Final = Source("GRPO, arXiv 2402.03300", "P")
_DAPO: Final = Source("DAPO, arXiv 2503.14476", "P")
_GSPO: Final = Source("GSPO, arXiv 2507.18071", "P")
_GSPO_OFF_POLICY: Final = Source("GSPO, arXiv 2507.18071", "S")
_DR_GRPO: Final = Source("Dr. GRPO, arXiv 2503.20783", "P")
_MAGISTRAL: Final = Source("Magistral, arXiv 2506.10910", "P")
_MINIMAX: Final = Source("MiniMax-M1, arXiv 2506.13585", "S")
_SEC: Final = Source("SEC's authors' commands for mathematics, arXiv 2505.14970", "S")
_CHOSEN: Final = Source("the papers do not say", "?")


def _all(source: Source, **values: Any) -> dict[str, Published]:
    """Values with a common source, by path; ``__`` in a keyword stands for a dot."""
    return {path.replace("__", "."): Published(value, source) for path, value in values.items()}


INTERRUPTION_PHRASE: Final = (
    "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
)
"""ScaleRL's phrase [P]."""
_PLAIN: Final = _all(_CHOSEN, length__none={}, curriculum__uniform={})
_PPO_OFF_POLICY_8 = {"offPolicy.ppo.stepsPerBatch": Published(8, _REBUILT)}

PRESETS: Final[Mapping[str, Mapping[str, Published]]] = {
    "scalerl": _all(
        _SCALERL,
        loss__cispo__ratioCap="5",
        aggregation="PromptAverage",
        advantage__normalization="Batch",
        zeroVarianceFilter=True,
        promptsPerStep=48,
        completionsPerPrompt=16,
        maxCompletionTokens=14336,
        temperature="1",
        length__interruption__phrase=INTERRUPTION_PHRASE,
        curriculum__noPositiveResampling__passRate="0.9",
        offPolicy__pipeline__maxStalenessSteps=8,
        fp32Logits="Both",
        optimizer__learningRate="5e-7",
        optimizer__weightDecay="0.01",
        optimizer__epsilon="1e-15",
        optimizer__warmupSteps=100,
    ),
    "grpo": {
        **_all(
            _REBUILT, loss__ppoClip__clipLow="0.2", loss__ppoClip__clipHigh="0.2", aggregation="SampleAverage"
        ),
        **_all(_GRPO, advantage__normalization="Group"),
        **_all(_CHOSEN, zeroVarianceFilter=False, fp32Logits="None"),
        **_PLAIN,
        **_PPO_OFF_POLICY_8,
    },
    "dapo": {
        **_all(_REBUILT, loss__ppoClip__clipLow="0.2", loss__ppoClip__clipHigh="0.26"),
        **_all(_REBUILT, aggregation="PromptAverage", promptsPerStep=80, zeroVarianceFilter=True),
        **_all(_DAPO, advantage__normalization="Group"),
        **_all(_CHOSEN, fp32Logits="None"),
        **_PLAIN,
        **_PPO_OFF_POLICY_8,
    },
    "gspo": {
        **_all(_GSPO, loss__gspo__clipLow="3e-4", loss__gspo__clipHigh="4e-4", aggregation="SampleAverage"),
        **_all(_GSPO, advantage__normalization="Group"),
        **_all(_GSPO_OFF_POLICY, offPolicy__ppo__stepsPerBatch=4),
        **_all(_CHOSEN, zeroVarianceFilter=False, fp32Logits="None"),
        **_PLAIN,
    },
    "dr-grpo": {
        **_all(_DR_GRPO, loss__ppoClip__clipLow="0.2", loss__ppoClip__clipHigh="0.2", aggregation="Constant"),
        **_all(_DR_GRPO, advantage__normalization="None"),
        **_all(_CHOSEN, zeroVarianceFilter=False, fp32Logits="None", offPolicy__ppo__stepsPerBatch=1),
        **_PLAIN,
    },
    "magistral": {
        **_all(_MAGISTRAL, loss__ppoClip__clipLow="0.2", loss__ppoClip__clipHigh="0.28"),
        **_all(_MAGISTRAL, aggregation="TokenAverage", advantage__normalization="Batch"),
        **_all(_MAGISTRAL, zeroVarianceFilter=True),
        **_all(_REBUILT, offPolicy__pipeline__maxStalenessSteps=8),
        **_all(_CHOSEN, fp32Logits="None"),
        **_PLAIN,
    },
    "minimax-m1": {
        **_all(_CHOSEN, loss__cispo__ratioCap="5"),
        **_all(_REBUILT, aggregation="PromptAverage", promptsPerStep=80),
        **_all(_REBUILT, fp32Logits="Both"),
        **_all(_MINIMAX, advantage__normalization="Group"),
        **_all(_CHOSEN, offPolicy__ppo__stepsPerBatch=8),
        **_PLAIN,
    },
    "ppo-off-policy": _PPO_OFF_POLICY_8,
}

DEFAULTS: Final[Mapping[str, Published]] = {
    **_all(_SEC, curriculum__sec__temperature="0.4"),
}
"""Defaults with their sources, for fields that no preset sets."""


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with missing values added from its preset; names are as in a manifest or as in Python.

    >>> completed({"preset": "dapo", "loss": {"ppoClip": {"clipLow": "0.1"}}})["loss"]
    {'ppoClip': {'clipLow': '0.1', 'clipHigh': '0.26'}}
    >>> completed({"preset": "dapo", "loss": {"cispo": {}}})["loss"]
    {'cispo': {}}
    """
    preset = given.get("preset", "scalerl")
    if not isinstance(preset, str) or preset not in PRESETS:
        return dict(given)  # the validation of the field rejects it
    published = _nested(preset)
    if _ignores_rewards(given.get("distillation")):
        published = {**published, "zeroVarianceFilter": False}
    merged = _merged(published, given)
    # An empty one-of section that the preset does not set either is dropped, so that the field's default applies.
    return {name: value for name, value in merged.items() if value != {} or to_camel(name) not in ONE_OF}


def _ignores_rewards(distillation: Any) -> bool:
    """Whether ``recipe.distillation``, parsed or not, ignores the rewards: the advantages come from the teacher alone."""
    if isinstance(distillation, Mapping):
        return bool(distillation.get("rewards", "Ignored") == "Ignored")
    return getattr(distillation, "rewards", None) == "Ignored"


def _merged(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(given)
    for name, value in preset.items():
        written = name if name in given else to_snake(name)
        own = given.get(written)
        if own is None:
            merged[name] = value
        elif isinstance(value, dict) and isinstance(own, Mapping):
            chosen = {n for n in ONE_OF.get(name, ()) if own.get(n, own.get(to_snake(n))) is not None}
            if not chosen or chosen <= value.keys():
                merged[written] = _merged(value, own)
    return merged


@functools.cache
def _nested(preset: str) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, published in PRESETS[preset].items():
        section = nested
        *sections, last = path.split(".")
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = published.value
    return nested


def set_by_others() -> frozenset[str]:
    """Paths set by a preset other than ``scalerl``: if the spec does not set them, their value depends on the preset."""
    return frozenset(path for name, fields in PRESETS.items() if name != "scalerl" for path in fields)


def cel(path: str, default: Any) -> str:
    """CEL expression, with the spec as ``self``, of the effective value of a number or boolean of the recipe: given, from the
    preset, or the default.

    >>> cel("maxCompletionTokens", 14336)
    '(has(self.recipe.maxCompletionTokens) ? self.recipe.maxCompletionTokens : 14336)'
    """
    otherwise = json.dumps(default)
    by_value: dict[Any, list[str]] = {}
    for name, fields in PRESETS.items():
        if path in fields and fields[path].value != default:
            by_value.setdefault(fields[path].value, []).append(name)
    for value, names in by_value.items():
        otherwise = f"self.recipe.preset in {names} ? {json.dumps(value)} : {otherwise}"
    return f"(has(self.recipe.{path}) ? self.recipe.{path} : {otherwise})"
