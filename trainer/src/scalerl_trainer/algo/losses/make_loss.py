"""The loss of a recipe."""

from __future__ import annotations

from scalerl_api.recipe import LossSpec, RecipeSpec
from scalerl_api.registry import Kind, make
from scalerl_trainer.algo.corrections import Corrected, OffPolicyMasked
from scalerl_trainer.algo.distillation import Distilled
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo, Dppo, Gspo, Loss, PpoClip, Reinforce, is_token_local
from scalerl_trainer.algo.losses.base import check_token_local


def make_loss(recipe: RecipeSpec) -> Loss:
    """The loss of ``recipe.loss`` with ``recipe.kl``, both weighted by ``recipe.correction``.

    ``recipe.offPolicyMask`` comes before the correction, because it compares with the policy that sampled; and the advantages of
    ``recipe.distillation`` before both, because they do too, and the mask depends on their sign.
    """
    loss = _corrected(recipe)
    if recipe.off_policy_mask is not None:
        loss = OffPolicyMasked(loss, float(recipe.off_policy_mask.max_kl))
    distillation = recipe.distillation
    return loss if distillation is None else Distilled(loss, float(distillation.coefficient))


def _corrected(recipe: RecipeSpec) -> Loss:
    loss, correction = _loss(recipe.loss), recipe.correction
    penalty = recipe.kl.penalty
    if penalty is not None:
        loss = WithKl(loss, penalty.estimator, float(penalty.coefficient))
    if (truncated := correction.truncated) is not None:
        return Corrected(loss, float(truncated.cap), "truncate", truncated.level)
    if (masked := correction.masked) is not None:
        return Corrected(loss, float(masked.cap), "mask", masked.level, float(masked.floor))
    return loss


def _loss(spec: LossSpec) -> Loss:
    if spec.cispo is not None:
        return Cispo(float(spec.cispo.ratio_cap))
    if spec.ppo_clip is not None:
        return PpoClip(
            float(spec.ppo_clip.clip_low), float(spec.ppo_clip.clip_high), _number(spec.ppo_clip.dual_clip)
        )
    if spec.gspo is not None:
        return Gspo(float(spec.gspo.clip_low), float(spec.gspo.clip_high))
    if spec.reinforce is not None:
        return Reinforce()
    if spec.dppo is not None:
        return Dppo(float(spec.dppo.threshold), float(spec.dppo.ratio_cap))
    if spec.plugin is not None:
        made: Loss = make(Kind.LOSS, spec.plugin.name, spec.plugin.parameters)
        if is_token_local(made):
            check_token_local(made)
        return made
    raise AssertionError("a parsed recipe has a loss")


def _number(value: str | None) -> float | None:
    return None if value is None else float(value)
