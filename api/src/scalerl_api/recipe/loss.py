"""Losses, corrections of importance ratios, and the off-policy mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from scalerl_api.fields import (
    AtLeastOneDecimal,
    DualClipDecimal,
    Model,
    NonNegativeDecimal,
    PositiveDecimal,
    PositiveUnitDecimal,
    Rule,
    UnitDecimal,
)
from scalerl_api.plugins import LossPlugin
from scalerl_api.recipe.alternatives import OneOf


class LossKind(Model):
    """What a loss implies for a run."""

    @property
    def ratio_bounds(self) -> Sequence[str]:
        """Its fields that bound the importance ratio, without an effect where the ratio is always 1."""
        return ()


class CispoLoss(LossKind):
    """Truncates the importance ratio and detaches it from the gradient, so that every token keeps a gradient."""

    ratio_cap: PositiveDecimal = "5"
    """Upper bound of the ratio; there is no lower clip (4, 5 and 8 made no difference [P])."""

    @property
    def ratio_bounds(self) -> Sequence[str]:
        return ("ratioCap",) if float(self.ratio_cap) >= 1 else ()


class PpoClipLoss(LossKind):
    """PPO's clipped surrogate, as in GRPO, Dr. GRPO, DAPO and Magistral: clipped tokens have no gradient."""

    clip_low: UnitDecimal = "0.2"
    """Ratio ≥ 1 − clipLow."""
    clip_high: NonNegativeDecimal = "0.2"
    """Ratio ≤ 1 + clipHigh. In DAPO it is higher than clipLow."""
    dual_clip: DualClipDecimal | None = None
    """Ratio from which a token with a negative advantage has no gradient (arXiv 1912.09729); verl's default is 3 [S]. Default:
    none, as in PPO, so that the gradient of such a token grows with its ratio without bound."""

    rules = (
        Rule(
            "!has(self.dualClip) || double(string(self.dualClip)) >= "
            "1.0 + (has(self.clipHigh) ? double(string(self.clipHigh)) : 0.0)",
            "%(dualClip)s must be at least 1 + %(clipHigh)s",
            "dualClip",
            lambda loss: loss.dual_clip is None or float(loss.dual_clip) >= 1 + float(loss.clip_high),
        ),
    )

    @property
    def ratio_bounds(self) -> Sequence[str]:
        return ("clipLow", "clipHigh", *(("dualClip",) if self.dual_clip is not None else ()))


class GspoLoss(LossKind):
    """The clipped surrogate with one ratio per completion: the geometric mean over its tokens."""

    clip_low: UnitDecimal = "3e-4"
    """Ratio ≥ 1 − clipLow."""
    clip_high: NonNegativeDecimal = "4e-4"
    """Ratio ≤ 1 + clipHigh."""

    @property
    def ratio_bounds(self) -> Sequence[str]:
        return ("clipLow", "clipHigh")


class ReinforceLoss(LossKind):
    """The policy gradient without an importance ratio, as if the current policy had sampled every token."""


class DppoLoss(LossKind):
    """Masks tokens whose probability differs too much from that of the policy that sampled them."""

    threshold: PositiveUnitDecimal = "0.2"
    """Maximum difference of a token's probability; beyond it, gradients that increase the difference are masked."""
    ratio_cap: AtLeastOneDecimal = "20"
    """Upper bound of the ratio in the gradient, which the difference does not bound (20 in the paper [S])."""

    @property
    def ratio_bounds(self) -> Sequence[str]:
        return ("threshold", "ratioCap")


class LossSpec(OneOf):
    """The policy-gradient objective: one of these."""

    cispo: CispoLoss | None = None
    """Truncated importance ratio with a gradient for every token: ScaleRL and MiniMax-M1."""
    ppo_clip: PpoClipLoss | None = None
    """PPO's clipped surrogate: GRPO, Dr. GRPO, DAPO, Magistral."""
    gspo: GspoLoss | None = None
    """PPO's clipped surrogate with one ratio per completion."""
    reinforce: ReinforceLoss | None = None
    """Policy gradient without an importance ratio."""
    dppo: DppoLoss | None = None
    """Policy gradient that masks tokens by the difference of probabilities."""
    plugin: LossPlugin | None = None
    """A loss of the entry points ``scalerl.losses``."""

    @property
    def chosen(self) -> Model:
        given: Iterator[Model | None] = (getattr(self, name) for name in type(self).model_fields)
        return next(one for one in given if one is not None)


class NoCorrection(Model):
    """No correction beyond the ratio of the loss."""


CorrectionLevel = Literal["Token", "Sequence", "Geometric"]


class TruncatedCorrection(Model):
    """Truncated importance sampling (TIS): weight min(π_prox / π_gen, cap)."""

    cap: PositiveDecimal = "2"
    """Maximum weight of a token."""
    level: CorrectionLevel = "Token"
    """What the ratio is of: a token, a completion (the product over its tokens), or the geometric mean over a completion."""


class MaskedCorrection(Model):
    """Masked importance sampling (MIS): weight π_prox / π_gen, and 0 beyond the bounds. IcePop has the bounds 0.5 and 5 [S]."""

    cap: PositiveDecimal = "2"
    """Tokens with a larger ratio are masked."""
    floor: NonNegativeDecimal = "0"
    """Tokens with a smaller ratio are masked; 0 for no lower bound."""
    level: CorrectionLevel = "Token"
    """What the ratio is of: a token, a completion (the product over its tokens), or the geometric mean over a completion."""

    rules = (
        Rule(
            "double(string(self.floor)) < double(string(self.cap))",
            "%(floor)s must be less than %(cap)s",
            "floor",
            lambda masked: float(masked.floor) < float(masked.cap),
        ),
    )


class CorrectionSpec(OneOf):
    """Importance weights that correct the mismatch of generator and trainer, with any loss: one of these. With weights, the
    ratio of the loss, and so its clip, is to π_prox: the trainer's policy before the ``offPolicy.ppo.stepsPerBatch`` updates
    that share sampled weights, or otherwise the trained policy itself, whose ratio of 1 is never clipped."""

    none: NoCorrection | None = None
    """The loss uses the ratio to the policy that sampled, and its clip bounds it."""
    truncated: TruncatedCorrection | None = None
    """The loss uses the ratio to π_prox, and tokens are weighted by π_prox / π_gen up to a cap."""
    masked: MaskedCorrection | None = None
    """Like truncated, but tokens beyond the bounds are masked."""


class OffPolicyMaskSpec(Model):
    """Masks completions that the trained policy has moved away from, where the advantage is negative
    (DeepSeek-V3.2, arXiv 2512.02556 [P])."""

    max_kl: PositiveDecimal = "0.5"
    """Mean of log π_gen − log π_train over the completion, in nats per token, above which it is masked. The paper has no
    value; TRL's documentation starts from 0.5 [S]."""
