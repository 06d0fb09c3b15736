"""Advantages: rewards relative to those of their group.

ScaleRL (arXiv 2510.13786, equation in the recipe section [P])::

    Â_i = (r_i - mean of its prompt's group) / std of all centred rewards in the batch

Shapes: see the package's legend.
"""

from __future__ import annotations

from typing import Literal

import torch

from scalerl_trainer.errors import BadBatchError

Normalization = Literal["Batch", "Group", "None"]
Baseline = Literal["GroupMean", "LeaveOneOut"]

# Avoids a division by zero. A group or batch without variance has centred rewards of zero, so its advantages are zero for
# any value of this constant. The papers' own constant is not known [?].
EPSILON = 1e-6


def group_indices(group_s: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Number the groups 0, 1, … in the order of their identifiers.

    Returns the group number of each sequence, int64 ``[S]``, and the number of groups.

    >>> group_indices(torch.tensor([7, 7, 3]))
    (tensor([1, 1, 0]), 2)
    """
    identifiers_g, index_s = torch.unique(group_s, return_inverse=True)
    return index_s, int(identifiers_g.numel())


def centred(rewards_s: torch.Tensor, group_s: torch.Tensor) -> torch.Tensor:
    """Rewards minus the mean of their group, float64 ``[S]``. A group of one is centred to zero.

    >>> centred(torch.tensor([1., -1., 5.]), torch.tensor([0, 0, 1])).tolist()
    [1.0, -1.0, 0.0]
    """
    _check(rewards_s, group_s)
    index_s, groups = group_indices(group_s)
    rewards_s = rewards_s.double()
    size_g = torch.zeros(groups, dtype=torch.float64).index_add_(0, index_s, torch.ones_like(rewards_s))
    mean_g = torch.zeros(groups, dtype=torch.float64).index_add_(0, index_s, rewards_s) / size_g
    return rewards_s - mean_g[index_s]


def advantages(
    rewards_s: torch.Tensor,
    group_s: torch.Tensor,
    normalization: Normalization = "Batch",
    baseline: Baseline = "GroupMean",
) -> torch.Tensor:
    """Group-centred advantages, float32 ``[S]``.

    ``baseline`` is subtracted from a reward:

    ``GroupMean``
        the mean of its group (GRPO, ScaleRL [P]).
    ``LeaveOneOut``
        the mean of the other rewards of its group (RLOO, arXiv 2402.14740 [P]), which is independent of the reward
        itself. The centred rewards are G/(G - 1) times those of ``GroupMean``; this factor cancels under ``Batch``
        with groups of one size, and under ``Group``.

    ``normalization`` divides the centred rewards:

    ``Batch``
        by the standard deviation of all centred rewards given (ScaleRL [P]). The centred rewards have mean zero, so
        this is their root mean square; whether the paper divides by S or S - 1, and whether it counts groups that the
        zero-variance filter drops, is not known [?].
        Magistral's form, (Â - mean) / std over the minibatch, is equal, since the mean of centred rewards is 0.
    ``Group``
        by the group's own standard deviation, over its G members (GRPO: (R - mean) / std [P]).
    ``None``
        by nothing: the rewards are only centred (Dr. GRPO [P]).

    The result depends on the whole batch: compute it from all rewards, then take a rank's shard.

    Raises ``BadBatchError`` if the shapes differ or a reward is not finite.

    >>> advantages(torch.tensor([1., -1., 1., 1.]), torch.tensor([0, 0, 1, 1]), "Group").tolist()
    [0.9999989867210388, -0.9999989867210388, 0.0, 0.0]
    """
    centred_s = centred(rewards_s, group_s)
    if baseline == "LeaveOneOut":
        index_s, groups = group_indices(group_s)
        size_g = torch.zeros(groups, dtype=torch.float64).index_add_(0, index_s, torch.ones_like(centred_s))
        centred_s = centred_s * (size_g / (size_g - 1).clamp(min=1))[index_s]
    if normalization == "None" or centred_s.numel() == 0:
        return centred_s.float()
    if normalization == "Batch":
        return (centred_s / (centred_s.square().mean().sqrt() + EPSILON)).float()
    if normalization == "Group":
        index_s, groups = group_indices(group_s)
        zeros_g = torch.zeros(groups, dtype=torch.float64)
        size_g = zeros_g.index_add(0, index_s, torch.ones_like(centred_s))
        std_g = (zeros_g.index_add(0, index_s, centred_s.square()) / size_g).sqrt()
        return (centred_s / (std_g[index_s] + EPSILON)).float()
    raise BadBatchError(f"advantage normalisation {normalization!r} is unknown: choose Batch, Group or None")


def _check(rewards_s: torch.Tensor, group_s: torch.Tensor) -> None:
    if rewards_s.shape != group_s.shape or rewards_s.dim() != 1:
        raise BadBatchError(
            f"rewards {tuple(rewards_s.shape)} and groups {tuple(group_s.shape)} must be one entry per sequence"
        )
    if not bool(torch.isfinite(rewards_s).all()):
        first = int((~torch.isfinite(rewards_s)).nonzero()[0])
        raise BadBatchError(
            f"reward of sequence {first} is {float(rewards_s[first])}: a verifier must return a number"
        )
