"""Replicas: how many generators a run on a cluster has, where a person and the autoscaler both have a say. Pure.

========================================================  ==========================  =======================
spec.generator.replicas since the autoscaler chose        generators                  GeneratorsPinned
========================================================  ==========================  =======================
it never chose, or may not                                the spec's                  no
unchanged                                                 the autoscaler's            no
changed (``kubectl scale``, an HPA, an edit)              the spec's                  yes, until it is what it was
========================================================  ==========================  =======================
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_api.autoscaling import AutoscalingSpec


@dataclass(frozen=True)
class Replicas:
    """wanted: generators there are to be. base, chosen: to be remembered in the run's status; None while nothing was
    chosen. pinned: a person's number stands against the autoscaler's.
    """

    wanted: int
    base: int | None = None
    chosen: int | None = None
    pinned: bool = False


def decide(
    replicas: int,
    autoscaling: AutoscalingSpec,
    *,
    base: int | None = None,
    chosen: int | None = None,
    new: int | None = None,
) -> Replicas:
    """How many generators there are to be.

    The autoscaler's number never leaves ``autoscaling.generators``, whatever that was when it was chosen. Outside
    ``Auto``, or without a range, the spec's number holds and what was chosen is forgotten.

    Parameters
    ----------
    replicas : spec.generator.replicas as it is now.
    base, chosen : what was remembered: spec.generator.replicas when the autoscaler chose, and its choice.
    new : what it has chosen now; None: nothing new. The same again changes nothing.

    >>> auto = AutoscalingSpec.model_validate({"mode": "Auto", "generators": {"min": 1, "max": 4}})
    >>> decide(1, auto, new=3)
    Replicas(wanted=3, base=1, chosen=3, pinned=False)
    >>> decide(2, auto, base=1, chosen=3)
    Replicas(wanted=2, base=1, chosen=3, pinned=True)
    """
    allowed = autoscaling.generators
    if autoscaling.mode != "Auto" or allowed is None:
        return Replicas(replicas)
    if base is not None and base != replicas:
        return Replicas(replicas, base, chosen, pinned=True)
    if new is not None:
        base, chosen = replicas, new
    if chosen is None:
        return Replicas(replicas)
    chosen = min(max(chosen, allowed.min), allowed.max)
    return Replicas(chosen, replicas, chosen)
