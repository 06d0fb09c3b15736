"""The recipe of a run: its fields (``spec``), published recipes (``presets``), and the origin of each value (``resolve``)::

    manifest ──RecipeSpec, completed by presets.PRESETS──▶ every value ──resolve──▶ Recipe: value, origin, source

To add a loss or a length rule, add its model and a field of ``LossSpec`` or ``LengthSpec``; to add a published recipe, add an
entry to ``presets.PRESETS``.
"""

from scalerl_api.recipe.alternatives import ONE_OF
from scalerl_api.recipe.curriculum import CurriculumSpec
from scalerl_api.recipe.loss import LossSpec
from scalerl_api.recipe.presets import PRESETS
from scalerl_api.recipe.spec import (
    MAX_BATCH_COMPLETIONS,
    Credit,
    KlEstimator,
    LengthSpec,
    RecipeSpec,
    TeacherSpec,
)

__all__ = [
    "MAX_BATCH_COMPLETIONS",
    "ONE_OF",
    "PRESETS",
    "Credit",
    "CurriculumSpec",
    "KlEstimator",
    "LengthSpec",
    "LossSpec",
    "RecipeSpec",
    "TeacherSpec",
]
