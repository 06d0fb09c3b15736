"""Measures the log-probability mismatch between trainer and generator at one version, on sequences of the last batch.

Both score the sequences at temperature 1. :mod:`scalerl_trainer.algo.mismatch` has the estimators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from scalerl_api import endpoints, wire
from scalerl_api.mismatch import POSITIONS, PROBE
from scalerl_trainer.algo.mismatch import RatioStatistics, by_position, position_buckets, ratio_table
from scalerl_trainer.publish.actor_control import ActorControl

log = logging.getLogger(__name__)

PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class ProbeSequence:
    """A sequence to score."""

    token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    """Token ids of prompt and completion."""
    prompt_tokens: int
    """Number of prompt tokens, which are not scored."""


Score = Callable[[Sequence[ProbeSequence]], list[torch.Tensor]]
"""The trainer's log-probabilities of each sequence's completion at temperature 1, float32 on the CPU."""


def probe(
    control: ActorControl, member: wire.Member, version: int, sequences: Sequence[ProbeSequence], score: Score
) -> dict[str, float]:
    """Score ``sequences`` by the trainer and by ``member``, concurrently.

    Returns:
        ``probe_kl`` (k3, mean over tokens) and ``probe_tokens``, also by position, and ``probe_max_difference``. If the
        member cannot answer, only ``probe_failed``, because a failed measurement must not stop the training.
    """
    message = wire.Probe(
        version=version,
        sequences=[s.token_ids.astype("<i4").tobytes() for s in sequences],
        prompt_tokens=[s.prompt_tokens for s in sequences],
    )
    calls = control.start([member], endpoints.WEIGHTS_PROBE, {member.member_id: message}, PROBE_SECONDS)
    of_trainer = score(sequences)
    answer = calls.wait()[member.member_id]
    if answer.body is None:
        log.warning("the probe of version %d failed: %s", version, answer.error)
        return {"probe_failed": 1.0}
    probed = msgspec.msgpack.decode(answer.body, type=wire.Probed)
    of_generator = [
        torch.from_numpy(np.frombuffer(b, dtype="<f4").astype(np.float32)) for b in probed.logprobs
    ]
    if probed.version != version or [g.numel() for g in of_generator] != [t.numel() for t in of_trainer]:
        log.warning(
            "the probe of version %d failed: the generator scored another version or other sequences", version
        )
        return {"probe_failed": 1.0}
    trainer_n, generator_n = torch.cat(of_trainer), torch.cat(of_generator)
    position_n = torch.cat([torch.arange(s.prompt_tokens, len(s.token_ids)) for s in sequences])
    table = ratio_table(trainer_n, generator_n, position_buckets(position_n), len(POSITIONS))
    return {
        **by_position(PROBE, [RatioStatistics(*row) for row in table.tolist()]),
        "probe_max_difference": float((trainer_n - generator_n).abs().max()),
    }
