"""How far generation may be ahead of training: which steps weights may generate for, and which versions are published.

======================  ==============================================  ==================================================
scheme                  weights of version v generate for               the trainer publishes
======================  ==============================================  ==================================================
:class:`PipelineRL`     steps up to v + k, continued by newer ones      after every update
:class:`PpoOffPolicy`   the k steps from the last multiple of k on      after k updates: versions 0, k, 2k, …
======================  ==============================================  ==================================================

Both bound staleness: by k, and by k − 1. PipelineRL keeps generators and trainer busy at once; under PPO-off-policy they
take turns (ScaleRL, arXiv 2510.13786 §3 [P]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from scalerl_coordinator.settings import Identity


class OffPolicy(Protocol):
    """A scheme. ``version``: of the weights that a generator holds, or of the trainer's."""

    def may_lease(self, version: int) -> int:
        """The first step that weights of ``version`` may not generate for."""
        ...

    def publishes(self, version: int) -> bool:
        """Whether the trainer publishes ``version`` when it reaches it."""
        ...

    def oldest(self, version: int) -> int:
        """The oldest weights that may generate while the trainer has ``version``; a generator with older ones gets these."""
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
    """PPO-off-policy-k. A generator that joins within a batch gets the weights of that moment, as nobody has older ones.

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
