"""The recipe of a run: its fields (``spec``), published recipes (``presets``), and the origin of each value (``resolve``)::

    manifest ──RecipeSpec, completed by presets.PRESETS──▶ every value ──resolve──▶ Recipe: value, origin, source

To add a loss or a length rule, add its model and a field of ``LossSpec`` or ``LengthSpec``; to add a published recipe, add an
entry to ``presets.PRESETS``.
"""

from scalerl_api.recipe.alternatives import ONE_OF
from scalerl_api.recipe.curriculum import CurriculumSpec
from scalerl_api.recipe.loss import (
    CispoLoss,
    CorrectionSpec,
    DppoLoss,
    GspoLoss,
    LossSpec,
    OffPolicyMaskSpec,
    PpoClipLoss,
    ReinforceLoss,
)
from scalerl_api.recipe.presets import PRESETS, Source
from scalerl_api.recipe.resolve import Choice, Recipe, resolve
from scalerl_api.recipe.spec import (
    MAX_BATCH_COMPLETIONS,
    AdvantageSpec,
    Credit,
    DistillationSpec,
    InterruptionSpec,
    KlEstimator,
    KlPenalty,
    KlSpec,
    LengthPenaltySpec,
    LengthSpec,
    OffPolicySpec,
    OptimizerSpec,
    OverlongSpec,
    PipelineSpec,
    PpoOffPolicySpec,
    RecipeSpec,
    RefillSpec,
    TeacherSpec,
)

__all__ = [
    "MAX_BATCH_COMPLETIONS",
    "ONE_OF",
    "PRESETS",
    "AdvantageSpec",
    "Choice",
    "CispoLoss",
    "CorrectionSpec",
    "Credit",
    "CurriculumSpec",
    "DistillationSpec",
    "DppoLoss",
    "GspoLoss",
    "InterruptionSpec",
    "KlEstimator",
    "KlPenalty",
    "KlSpec",
    "LengthPenaltySpec",
    "LengthSpec",
    "LossSpec",
    "OffPolicyMaskSpec",
    "OffPolicySpec",
    "OptimizerSpec",
    "OverlongSpec",
    "PipelineSpec",
    "PpoClipLoss",
    "PpoOffPolicySpec",
    "Recipe",
    "RecipeSpec",
    "RefillSpec",
    "ReinforceLoss",
    "Source",
    "TeacherSpec",
    "resolve",
]
