"""Off-policy schemes: for which steps a weight version may generate, and which versions are published.

======================  ==============================================  ==================================================
scheme                  weights of version v generate for               the trainer publishes
======================  ==============================================  ==================================================
:class:`PipelineRL`     steps up to v + k, continued by newer ones      after every update
:class:`PpoOffPolicy`   the k steps from the last multiple of k on      after k updates: versions 0, k, 2k, …
======================  ==============================================  ==================================================

The staleness bound is k for PipelineRL and k − 1 for PPO-off-policy. With PipelineRL, generators and trainer are busy at the
same time; with PPO-off-policy they alternate (ScaleRL, arXiv 2510.13786 §3 [P]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from scalerl_coordinator.settings import Identity


class OffPolicy(Protocol):
    """An off-policy scheme."""

    def may_lease(self, version: int) -> int:
        """The first step for which a generator with weights of ``version`` may not generate."""
        ...

    def publishes(self, version: int) -> bool:
        """Whether the trainer publishes ``version`` right after the step that produced it."""
        ...

    def oldest(self, version: int) -> int:
        """The oldest version that may generate while the trainer has ``version``; generators with older weights are updated."""
        ...


@dataclass(frozen=True, slots=True)
class PipelineRL:
    """PipelineRL-k.

    >>> PipelineRL(8).may_lease(5), PipelineRL(8).publishes(5), PipelineRL(8).oldest(5)
    (14, True, 5)
    """

    max_staleness_steps: int

    def may_lease(self, version: int) -> int:
        return version + self.max_staleness_steps + 1

    def publishes(self, version: int) -> bool:
        return True

    def oldest(self, version: int) -> int:
        return version


@dataclass(frozen=True, slots=True)
class PpoOffPolicy:
    """PPO-off-policy-k. A generator that joins within a batch gets the trainer's current weights, the only ones that it has.

    >>> [PpoOffPolicy(8).may_lease(v) for v in (0, 7, 8)], [PpoOffPolicy(8).publishes(v) for v in (0, 7, 8)]
    ([8, 8, 16], [True, False, True])
    >>> PpoOffPolicy(8).oldest(13)
    8
    """

    steps_per_batch: int

    def may_lease(self, version: int) -> int:
        return (version // self.steps_per_batch + 1) * self.steps_per_batch

    def publishes(self, version: int) -> bool:
        return version % self.steps_per_batch == 0

    def oldest(self, version: int) -> int:
        return version - version % self.steps_per_batch


def scheme(identity: Identity) -> OffPolicy:
    """The scheme of ``recipe.offPolicy``."""
    if identity.steps_per_batch:
        return PpoOffPolicy(identity.steps_per_batch)
    return PipelineRL(identity.max_staleness_steps)
