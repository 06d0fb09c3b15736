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


def turn_advantages(
    returns_t: torch.Tensor,
    sequence_t: torch.Tensor,
    turn_t: torch.Tensor,
    group_s: torch.Tensor,
    credit: Literal["Return", "Turn"],
    normalization: Normalization = "Batch",
    baseline: Baseline = "GroupMean",
) -> torch.Tensor:
    """Advantages of the turns of episodes, float32 ``[T]``; ``t`` runs over the turns of all sequences.

    A turn counts 1 / (number of turns of its episode) in each mean below, so an episode counts once, whatever its length.

    ``Return``
        The baseline of a turn's return is the mean over all turns of its group (Kevin, arXiv 2507.11948, pools the turns of a
        prompt likewise, but with equal weights [S]), and ``Group`` divides by the standard deviation over them. If an episode's
        returns are all its reward, the result is that of :func:`advantages`.
    ``Turn``
        The baseline is the mean over the turns of the group with the same index, as in MT-GRPO (arXiv 2505.11821 [P]) for
        episodes of two turns, and ``Group`` divides by the standard deviation over those. A turn that only one episode of
        its group has reached has no baseline, and the advantage 0.

    ``Batch`` divides by the root mean square of all centred returns given. ``LeaveOneOut`` leaves the turn's own episode out of the baseline.

    Args:
        returns_t: return of each turn.
        sequence_t: index of its sequence, ascending.
        turn_t: index of the turn in its episode.
        group_s: group of each sequence.

    Raises ``BadBatchError`` as :func:`advantages`.

    >>> sequence_t, turn_t, group_s = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.tensor([5, 5])
    >>> turn_advantages(torch.tensor([1., 0., 1.]), sequence_t, turn_t, group_s, "Return", "None").tolist()
    [0.25, -0.75, 0.25]
    >>> turn_advantages(torch.tensor([1., 0., 0.]), sequence_t, turn_t, group_s, "Turn", "None").tolist()
    [0.5, 0.0, -0.5]
    """
    group_t = group_s[sequence_t]
    _check(returns_t, group_t)
    returns_t = returns_t.double()
    share_t = 1 / torch.bincount(sequence_t, minlength=len(group_s)).double()[sequence_t]
    # Turns of a cell have one baseline. An episode has one turn in a cell of Turn, and all its turns in one of Return.
    if credit == "Return":
        cell_t, own_t, weight_t = group_t, sequence_t, share_t
    else:
        cell_t = group_indices(group_t)[0] * (int(turn_t.max()) + 1 if len(turn_t) else 1) + turn_t
        own_t, weight_t = torch.arange(len(turn_t)), torch.ones_like(share_t)
    cell_t = group_indices(cell_t)[0]
    size_t, total_t = _sums(weight_t, cell_t), _sums(weight_t * returns_t, cell_t)
    centred_t = returns_t - total_t / size_t
    if baseline == "LeaveOneOut":
        others_t = size_t - _sums(weight_t, own_t)
        rest_t = total_t - _sums(weight_t * returns_t, own_t)
        # Below half the weight of an episode, there is no other one, and only rounding remains.
        centred_t = torch.where(others_t > 0.5, returns_t - rest_t / others_t.clamp(min=0.5), 0.0)
    if normalization == "None" or centred_t.numel() == 0:
        return centred_t.float()
    if normalization == "Batch":
        scale_t = ((share_t * centred_t.square()).sum() / share_t.sum()).sqrt()
    else:
        scale_t = (_sums(weight_t * centred_t.square(), cell_t) / size_t).sqrt()
    return (centred_t / (scale_t + EPSILON)).float()


def _sums(values_t: torch.Tensor, index_t: torch.Tensor) -> torch.Tensor:
    """The sum of the values with the same index, of each value."""
    zeros = torch.zeros(int(index_t.max()) + 1 if len(index_t) else 0, dtype=torch.float64)
    return zeros.index_add(0, index_t, values_t)[index_t]


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
