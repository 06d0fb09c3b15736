"""Where each value of a recipe comes from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from scalerl_api.recipe.presets import DEFAULTS, PRESETS, Source
from scalerl_api.recipe.spec import RecipeSpec

Origin = Literal["preset", "default", "spec"]


@dataclass(frozen=True)
class Choice:
    """A value of the recipe. source: of the paper that gives it; None where the spec, or no paper, gives the value."""

    field: str
    """Path in ``spec.recipe``."""
    value: str
    origin: Origin
    source: Source | None

    @property
    def shown_origin(self) -> str:
        """The origin, and the paper where there is one."""
        return f"{self.origin}: {self.source}" if self.source else self.origin

    def __str__(self) -> str:
        return f"{self.value} ({self.shown_origin})"


@dataclass(frozen=True)
class Recipe:
    """A recipe with every value said, in the order of the spec."""

    preset: str
    choices: tuple[Choice, ...]


def resolve(recipe: RecipeSpec) -> Recipe:
    """Every value of a recipe with its origin. One that the spec gives and that equals the preset's counts as the
    preset's, so that a manifest with all values written out tells the same.

    >>> print(*(f"{c.field}: {c}" for c in resolve(RecipeSpec(preset="dapo")).choices[:2]), sep="\\n")
    loss.ppoClip.clipLow: 0.2 (preset: as rebuilt in ScaleRL, arXiv 2510.13786 [P])
    loss.ppoClip.clipHigh: 0.26 (preset: as rebuilt in ScaleRL, arXiv 2510.13786 [P])
    """
    # Compared with the preset alone, completed by the defaults.
    expected = dict(_leaves(RecipeSpec(preset=recipe.preset)))
    published, scalerl = PRESETS[recipe.preset], PRESETS["scalerl"]
    choices = []
    for path, value in _leaves(recipe):
        origin: Origin
        if expected.get(path) != value:
            origin, source = "spec", None
            if path in DEFAULTS and DEFAULTS[path].value == value:
                origin, source = "default", DEFAULTS[path].source
        elif path in published:
            origin, source = "preset", published[path].source
        else:
            origin = "default"
            source = scalerl[path].source if path in scalerl else None
        choices.append(Choice(path, str(value), origin, source))
    return Recipe(recipe.preset, tuple(choices))


def _leaves(recipe: RecipeSpec) -> list[tuple[str, Any]]:
    dumped = recipe.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"preset"})
    return list(_flat(dumped, ""))


def _flat(value: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            flat += _flat(inner, f"{path}{name}.")
        else:
            flat.append((f"{path}{name}", "{}" if inner == {} else inner))
    return flat
