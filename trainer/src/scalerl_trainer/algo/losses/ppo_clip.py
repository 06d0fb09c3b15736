"""PPO's clipped surrogate with group advantages: the loss of GRPO, Dr. GRPO, DAPO and Magistral.

The objective per token, which is maximised [P]::

    min(r Â, clip(r, 1 - ε_low, 1 + ε_high) Â)      r = π_train / π_old

π_old is the policy that sampled, so its log-probabilities are the generator's. The recipes differ in these settings, whose
values are in the spec's presets:

============ ============== ==================== ==============================================
recipe       ε_low, ε_high  aggregation          advantage
============ ============== ==================== ==============================================
GRPO         .2, .2         ``SampleAverage``    ``Group``
Dr. GRPO     .2, .2         ``Constant``         ``None``
DAPO         .2, .28        ``TokenAverage``     ``Group``; as ScaleRL rebuilt it .2, .26, ``PromptAverage``
Magistral    .2, .26 to .28 ``TokenAverage``     ``Batch``
============ ============== ==================== ==============================================

The minimum bounds a token's gradient by 1 + ε_high where Â > 0, and not at all where Â < 0: a token that the trained policy
finds e^10 times as likely as the policy that sampled it has 22,000 times the gradient of the others. The dual clip
(arXiv 1912.09729 [P]) stops the gradient above c::

    max(min(r Â, clip(r, 1 - ε_low, 1 + ε_high) Â), c Â)     where Â < 0

GRPO's KL penalty is in :mod:`scalerl_trainer.algo.kl`; ScaleRL's recipe and its rebuilt baselines have none [P].
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import (
    LossOutput,
    TokenBatch,
    check_clip,
    check_dual_clip,
    clipped_surrogate,
    weighted,
)
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class PpoClip:
    """The clip range of the ratio is [1 - clip_low, 1 + clip_high]."""

    token_local = True

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c, the ratio from which a token of a negative advantage has no gradient; None for no bound."""

    def __post_init__(self) -> None:
        check_clip("PPO", self.clip_low, self.clip_high)
        check_dual_clip("PPO", self.clip_high, self.dual_clip)

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the number of tokens without a gradient because of the clip (``clipped``).

        >>> import torch
        >>> logprobs_n = torch.tensor([0.0], requires_grad=True)
        >>> one = torch.ones(1)
        >>> batch = TokenBatch(logprobs_n, torch.tensor([-1.0]), one, one, torch.zeros(1, dtype=torch.long))
        >>> round(PpoClip()(batch).loss.item(), 6)  # e is cut to 1.2
        -1.2
        """
        ratio_n = (tokens.logprobs_n - tokens.generator_logprobs_n).clamp(max=LOG_RATIO_LIMIT).exp()
        objective_n, clipped_n = clipped_surrogate(
            ratio_n, tokens.advantages_n, self.clip_low, self.clip_high, self.dual_clip
        )
        return LossOutput(weighted(objective_n, tokens), {"clipped": clipped_n.sum()})
