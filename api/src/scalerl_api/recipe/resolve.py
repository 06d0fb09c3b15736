"""The origin of each value of a recipe. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from scalerl_api.edits import flat
from scalerl_api.recipe.presets import DEFAULTS, PRESETS, Source
from scalerl_api.recipe.spec import RecipeSpec

Origin = Literal["preset", "default", "spec"]


@dataclass(frozen=True)
class Choice:
    """An effective value of the recipe."""

    field: str
    """Path in ``spec.recipe``."""
    value: str
    origin: Origin
    """Whether the preset, the default or the spec provides the value."""
    source: Source | None
    """Source of the value; None if it is from the spec, or without a source."""

    @property
    def shown_origin(self) -> str:
        """The origin, followed by the source if there is one."""
        return f"{self.origin}: {self.source}" if self.source else self.origin

    def __str__(self) -> str:
        return f"{self.value} ({self.shown_origin})"


@dataclass(frozen=True)
class Recipe:
    """A recipe with all values and their origins."""

    preset: str
    choices: tuple[Choice, ...]
    """The values in the order of the spec."""


def resolve(recipe: RecipeSpec) -> Recipe:
    """All values of a recipe with their origins. A value in the spec that equals the preset's has the origin ``preset``, so
    that a manifest with all values written out has the same result.

    >>> print(*(f"{c.field}: {c}" for c in resolve(RecipeSpec(preset="dapo")).choices[:2]), sep="\\n")
    loss.ppoClip.clipLow: 0.2 (preset: as rebuilt in ScaleRL, arXiv 2510.13786 [P])
    loss.ppoClip.clipHigh: 0.26 (preset: as rebuilt in ScaleRL, arXiv 2510.13786 [P])
    """
    # The recipe is compared with one that sets only the preset.
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
    return list(flat(dumped))
