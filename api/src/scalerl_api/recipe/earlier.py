"""Translates field names of the recipe in the previous release, which are read for one release. Pure.

Objects on an API server keep these names, with the defaults of that release written out. Therefore an earlier name counts only
if the manifest has nothing newer: not the present name of the field, and no preset other than ``scalerl``, because that release
had no presets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from scalerl_api.fields import Model, NonNegativeDecimal, PositiveDecimal, UnitDecimal


class EarlierLoss(Model):
    """Earlier fields of ``recipe.loss``."""

    name: Literal["CISPO", "GRPO"] | None = None
    """Earlier form of loss.cispo and loss.ppoClip, read for one release."""
    ratio_cap: PositiveDecimal | None = None
    """Earlier name of loss.cispo.ratioCap, read for one release."""
    clip_low: UnitDecimal | None = None
    """Earlier name of loss.ppoClip.clipLow, read for one release."""
    clip_high: NonNegativeDecimal | None = None
    """Earlier name of loss.ppoClip.clipHigh, read for one release."""


class EarlierRecipe(Model):
    """Earlier fields of ``recipe``."""

    advantage_normalization: Literal["Batch", "Group", "None"] | None = None
    """Earlier name of advantage.normalization, read for one release."""
    max_staleness_steps: Annotated[int, Field(ge=0, le=64)] | None = None
    """Earlier name of offPolicy.pipeline.maxStalenessSteps, read for one release."""
    fp32_head: bool | None = None
    """Earlier form of fp32Logits, read for one release: true is Both, false is None."""


@dataclass(frozen=True)
class EarlierName:
    """A field that a manifest gives by its earlier name, with a value other than the earlier default; or a section that the
    previous release did not have."""

    name: str
    """Earlier path in ``spec.recipe``."""
    value: Any
    """The given value; None for a section that the previous release did not have."""
    section: str
    """Present section of the field."""
    read: bool
    """Whether the value is used; False: a newer field of the manifest takes precedence."""


_DEFAULTS: Final = {
    "loss": {"name": "CISPO", "ratioCap": "5", "clipLow": "0.2", "clipHigh": "0.2"},
    "advantage": {"advantageNormalization": "Batch"},
    "offPolicy": {"maxStalenessSteps": "8"},
    "fp32Logits": {"fp32Head": "True"},
}
"""Earlier names with their defaults as text, by present section."""
_ONLY: Final[Mapping[str, Any]] = {"length": {"none": {}}, "curriculum": {"uniform": {}}}
"""Behaviour of the previous release for which it had no fields, as values of the present sections."""
_OF_THE_LOSS: Final = frozenset(_DEFAULTS["loss"])
_OF_THE_RECIPE: Final = frozenset().union(*_DEFAULTS.values()) - _OF_THE_LOSS


def translated(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[EarlierName, ...]]:
    """A manifest's recipe with present names, and its earlier names whose value was not the default.

    >>> recipe, names = translated({"maxStalenessSteps": 2, "loss": {"name": "CISPO", "ratioCap": "4"}})
    >>> recipe["loss"], recipe["offPolicy"], recipe["curriculum"]
    ({'cispo': {'ratioCap': '4'}}, {'pipeline': {'maxStalenessSteps': 2}}, {'uniform': {}})
    """
    recipe = {name: value for name, value in given.items() if name not in _OF_THE_RECIPE}
    old = {name: given[name] for name in _OF_THE_RECIPE if given.get(name) is not None}
    loss = given.get("loss")
    if isinstance(loss, Mapping):
        recipe["loss"] = {name: value for name, value in loss.items() if name not in _OF_THE_LOSS}
        old |= {name: loss[name] for name in _OF_THE_LOSS if loss.get(name) is not None}
    found = []
    for section, defaults in _DEFAULTS.items():
        names = [name for name in defaults if name in old]
        present = recipe.get(section)
        if section == "advantage" and isinstance(present, Mapping):
            present = present.get("normalization")  # its other fields are new
        chosen = (
            any(v is not None for v in present.values())
            if isinstance(present, Mapping)
            else present is not None
        )
        read = not chosen and given.get("preset", "scalerl") == "scalerl"
        if names and read:
            meant = _successor(section, old)
            recipe[section] = meant | (recipe.get(section) or {}) if isinstance(meant, dict) else meant
        found += [
            EarlierName(f"loss.{name}" if section == "loss" else name, old[name], section, read)
            for name in names
            if str(old[name]) != defaults[name]
        ]
    if old and given.get("preset", "scalerl") == "scalerl":
        for section, only in _ONLY.items():
            if recipe.get(section) is None:
                recipe[section] = only
                found.append(EarlierName(section, None, section, True))
    return recipe, tuple(found)


def _successor(section: str, old: Mapping[str, Any]) -> Any:
    match section:
        case "loss":
            name = old.get("name", "CISPO")
            # A name other than CISPO and GRPO is an unknown alternative, and rejected as one.
            alternative = "cispo" if name == "CISPO" else "ppoClip" if name == "GRPO" else str(name)
            fields = ("ratioCap",) if name == "CISPO" else ("clipLow", "clipHigh")
            return {alternative: {field: old[field] for field in fields if field in old}}
        case "advantage":
            return {"normalization": old["advantageNormalization"]}
        case "offPolicy":
            return {"pipeline": {"maxStalenessSteps": old["maxStalenessSteps"]}}
        case _:
            return (
                "Both" if old["fp32Head"] is True else "None" if old["fp32Head"] is False else old["fp32Head"]
            )


def with_earlier_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A complete recipe with the earlier names added to the present ones, for a pod of an active run that still has the image of
    the previous release: that image ignores unknown names, and would use its defaults instead.

    >>> with_earlier_names({"loss": {"ppoClip": {"clipLow": "0.1"}}, "fp32Logits": "None"})
    {'loss': {'ppoClip': {'clipLow': '0.1'}, 'name': 'GRPO', 'clipLow': '0.1'}, 'fp32Logits': 'None', 'fp32Head': False}
    """
    both = dict(recipe)
    loss = recipe.get("loss", {})
    if "cispo" in loss:
        both["loss"] = loss | {"name": "CISPO"} | loss["cispo"]
    elif "ppoClip" in loss:
        both["loss"] = loss | {"name": "GRPO"} | loss["ppoClip"]
    if "normalization" in recipe.get("advantage", {}):
        both["advantageNormalization"] = recipe["advantage"]["normalization"]
    if "pipeline" in recipe.get("offPolicy", {}):
        both["maxStalenessSteps"] = recipe["offPolicy"]["pipeline"]["maxStalenessSteps"]
    if recipe.get("fp32Logits") in ("Both", "None"):
        both["fp32Head"] = recipe["fp32Logits"] == "Both"
    return both
