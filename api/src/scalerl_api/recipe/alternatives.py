"""Sections of a recipe of which at most one alternative is given: losses, corrections, curricula, length rules.

To add an alternative, add a field to its section.
"""

from __future__ import annotations

from typing import Any, Final

from scalerl_api.fields import Model, at_most_one

ONE_OF: Final[dict[str, tuple[str, ...]]] = {}
"""Alternatives of each section, by its field of the recipe, from the models: one that the manifest gives replaces the preset's."""


class OneOf(Model):
    """Base of a section, whose class has the name of its field of the recipe: the fields are its alternatives."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        alternatives = tuple(field.alias or name for name, field in cls.model_fields.items())
        cls.rules = (at_most_one(*alternatives),)
        section = cls.__name__.removesuffix("Spec")
        ONE_OF[section[0].lower() + section[1:]] = alternatives

    @property
    def name(self) -> str:
        """Name of the given alternative.

        >>> from scalerl_api.recipe import RecipeSpec
        >>> RecipeSpec(preset="dapo").loss.name
        'ppoClip'
        """
        fields = type(self).model_fields
        return next(f.alias or name for name, f in fields.items() if getattr(self, name) is not None)
