"""Names that fields of the recipe had in the release before, read for one release. Pure.

An API server keeps them in the objects that it has, with the defaults of that release written out, so a field that has
them is only asked where the manifest says nothing newer: no present name of it, and no other preset than ``scalerl``,
which that release did not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from scalerl_api.fields import Model, NonNegativeDecimal, PositiveDecimal, UnitDecimal


class EarlierLoss(Model):
    """Fields that ``recipe.loss`` had."""

    name: Literal["CISPO", "GRPO"] | None = None
    """Earlier form of loss.cispo and loss.ppoClip, read for one release."""
    ratio_cap: PositiveDecimal | None = None
    """Earlier name of loss.cispo.ratioCap, read for one release."""
    clip_low: UnitDecimal | None = None
    """Earlier name of loss.ppoClip.clipLow, read for one release."""
    clip_high: NonNegativeDecimal | None = None
    """Earlier name of loss.ppoClip.clipHigh, read for one release."""


class EarlierRecipe(Model):
    """Fields that ``recipe`` had."""

    advantage_normalization: Literal["Batch", "Group", "None"] | None = None
    """Earlier name of advantage.normalization, read for one release."""
    max_staleness_steps: Annotated[int, Field(ge=0, le=64)] | None = None
    """Earlier name of offPolicy.pipeline.maxStalenessSteps, read for one release."""
    fp32_head: bool | None = None
    """Earlier form of fp32Logits, read for one release: true is Both, false is None."""


@dataclass(frozen=True)
class EarlierName:
    """A field that a manifest gives by its earlier name, with another value than the default was; or a section that the
    release with the earlier names did not have (value None)."""

    name: str
    """Path in ``spec.recipe``."""
    value: Any
    section: str
    """Where the field is now."""
    read: bool
    """False: a newer field of the manifest takes its place."""


_DEFAULTS: Final = {
    "loss": {"name": "CISPO", "ratioCap": "5", "clipLow": "0.2", "clipHigh": "0.2"},
    "advantage": {"advantageNormalization": "Batch"},
    "offPolicy": {"maxStalenessSteps": "8"},
    "fp32Logits": {"fp32Head": "True"},
}
"""By the present section: earlier names, and the values that were written where a manifest had none."""
_ONLY: Final[Mapping[str, Any]] = {"length": {"none": {}}, "curriculum": {"uniform": {}}}
"""What that release did, for which it had no fields."""
_OF_THE_LOSS: Final = frozenset(_DEFAULTS["loss"])
_OF_THE_RECIPE: Final = frozenset().union(*_DEFAULTS.values()) - _OF_THE_LOSS


def translated(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[EarlierName, ...]]:
    """A manifest's recipe by present names, and the earlier names in it whose value was not the default.

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
            # Another name than CISPO and GRPO is an unknown alternative, and refused as one.
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
    """A whole recipe with the earlier names beside the present ones, for a pod of a run under way that still has the image
    of the release before: it drops names that it does not know, and would take its defaults for the others.

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
