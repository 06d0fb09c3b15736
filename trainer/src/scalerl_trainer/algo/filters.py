"""Groups that teach nothing.

When all completions of a prompt have the same reward, every advantage is zero. ScaleRL (arXiv 2510.13786 [P])
drops such prompts from the effective batch and does not refill it (DAPO refills).

Shapes: see the package's legend.
"""

from __future__ import annotations

import torch

from scalerl_trainer.algo.advantages import group_indices

# Rewards are verifier outputs near ±1; a spread below this is rounding.
SPREAD = 1e-8


def has_spread(rewards_s: torch.Tensor, group_s: torch.Tensor) -> torch.Tensor:
    """True for the sequences whose group holds at least two different rewards, bool ``[S]``.

    A group of one never does. All may be False: then the batch is empty and the step trains on nothing.

    >>> has_spread(torch.tensor([1., -1., 1., 1., 1.]), torch.tensor([0, 0, 1, 1, 2])).tolist()
    [True, True, False, False, False]
    """
    index_s, groups = group_indices(group_s)
    rewards_s = rewards_s.double()
    high_g = torch.full((groups,), -torch.inf, dtype=torch.float64)
    low_g = torch.full((groups,), torch.inf, dtype=torch.float64)
    high_g = high_g.scatter_reduce(0, index_s, rewards_s, "amax")
    low_g = low_g.scatter_reduce(0, index_s, rewards_s, "amin")
    return (high_g - low_g > SPREAD)[index_s]
