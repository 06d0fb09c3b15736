"""Measures the log-probability mismatch between trainer and generator at one version, on sequences of the last batch.

Both score the sequences at temperature 1. :mod:`scalerl_trainer.algo.mismatch` has the estimators.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from scalerl_api import endpoints, wire
from scalerl_api.mismatch import POSITIONS, PROBE
from scalerl_trainer.algo.mismatch import (
    RatioStatistics,
    by_position,
    k3_estimates,
    position_buckets,
    ratio_table,
)
from scalerl_trainer.packing import Sequence as PackedSequence
from scalerl_trainer.publish.actor_control import ActorControl

log = logging.getLogger(__name__)

PROBE_SECONDS = 60.0
OUTLIER_LIMITS = 20.0
"""The most that one token counts in the check against the limit, in limits: a twentieth of the tokens decide."""
MIN_COMPARED_TOKENS = 64
"""A batch with fewer, over all sequences, is not probed: of 64, four tokens have to be outliers to exceed a limit."""


@dataclass(frozen=True)
class ProbeSequence:
    """A sequence to score."""

    token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    """Token ids of prompt and completion."""
    prompt_tokens: int
    """Number of prompt tokens, which are not scored."""

    @property
    def sequence(self) -> PackedSequence:
        """Prompt and completion for the engine."""
        prompt, completion = np.split(self.token_ids, [self.prompt_tokens])
        return PackedSequence(prompt.tolist(), completion.tolist())


@dataclass(frozen=True)
class Measured:
    """The mismatch of several members at one version."""

    stats: dict[str, float]
    """For metrics.jsonl: ``probe_kl`` (k3, mean over tokens) and ``probe_tokens``, also by position, and
    ``probe_max_difference``, of the first member that answered. If none did, only ``probe_failed``: a failed measurement
    must not stop the training."""
    k3_n: dict[str, torch.Tensor]
    """k3 estimate of each token by member id, of the members that answered, float64 ``[N]``."""

    def above(self, limit: float) -> list[str]:
        """Ids of the members whose mean is above ``limit``, or not a number.

        A token counts at most :data:`OUTLIER_LIMITS` times the limit. Rounding makes mixtures of experts choose other experts
        for a few tokens, whose log-probabilities then differ by as much as with wrong weights.
        """
        return [
            member
            for member, k3_n in self.k3_n.items()
            if len(k3_n) > 0 and not float(k3_n.clamp(max=OUTLIER_LIMITS * limit).mean()) <= limit
        ]


def probe(
    control: ActorControl,
    members: Sequence[wire.Member],
    version: int,
    sequences: Sequence[ProbeSequence],
    of_trainer: Sequence[torch.Tensor],
) -> Measured:
    """Score ``sequences`` by each of ``members``, concurrently, and compare with the trainer's log-probabilities.

    Nothing is measured if the trainer's own log-probabilities are not finite: the weights are broken then, not the generators.

    Args:
        of_trainer: of each sequence's completion at temperature 1, float32 on the CPU.
    """
    message = wire.Probe(
        version=version,
        sequences=[s.token_ids.astype("<i4").tobytes() for s in sequences],
        prompt_tokens=[s.prompt_tokens for s in sequences],
    )
    messages = {member.member_id: message for member in members}
    calls = control.start(list(members), endpoints.WEIGHTS_PROBE, messages, PROBE_SECONDS)
    answers = calls.wait()
    trainer_n = torch.cat(list(of_trainer))
    if not bool(trainer_n.isfinite().all()):
        log.warning(
            "version %d has log-probabilities that are not finite; generators are not compared", version
        )
        return Measured({"probe_failed": 1.0}, {})
    position_n = torch.cat([torch.arange(s.prompt_tokens, len(s.token_ids)) for s in sequences])
    stats: dict[str, float] = {}
    k3: dict[str, torch.Tensor] = {}
    for member in members:
        body, problem = answers[member.member_id].body, answers[member.member_id].error
        of_generator: list[torch.Tensor] = []
        if body is not None:
            probed = msgspec.msgpack.decode(body, type=wire.Probed)
            of_generator = [
                torch.from_numpy(np.frombuffer(b, dtype="<f4").astype(np.float32)) for b in probed.logprobs
            ]
            if probed.version != version or [len(g) for g in of_generator] != [len(t) for t in of_trainer]:
                problem = "it scored another version or other sequences"
        if problem:
            log.warning("the probe of version %d on %s failed: %s", version, member.name, problem)
            continue
        generator_n = torch.cat(of_generator)
        table = ratio_table(trainer_n, generator_n, position_buckets(position_n), len(POSITIONS))
        k3[member.member_id] = k3_estimates(trainer_n, generator_n)
        stats = stats or {
            **by_position(PROBE, [RatioStatistics(*row) for row in table.tolist()]),
            "probe_max_difference": float((trainer_n - generator_n).abs().max()),
        }
    return Measured(stats or {"probe_failed": 1.0}, k3)
