"""Measures the mismatch between trainer and generator at one version, on sequences of the last batch.

Both score at temperature 1. Estimators: :mod:`scalerl_trainer.algo.mismatch`.
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
    """int32 token ids of prompt and completion; the first ``prompt_tokens`` are not scored."""

    token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    prompt_tokens: int


Score = Callable[[Sequence[ProbeSequence]], list[torch.Tensor]]
"""The trainer's log-probabilities of each sequence's completion at temperature 1, float32 on the CPU."""


def probe(
    control: ActorControl, member: wire.Member, version: int, sequences: Sequence[ProbeSequence], score: Score
) -> dict[str, float]:
    """``probe_kl`` (k3, mean over tokens) and ``probe_tokens``, also by position, and ``probe_max_difference``.

    ``probe_failed`` instead if the member cannot answer: a failed measurement must not stop the training. Trainer and
    member score concurrently.
    """
    message = wire.Probe(
        version=version,
        sequences=[s.token_ids.astype("<i4").tobytes() for s in sequences],
        prompt_tokens=[s.prompt_tokens for s in sequences],
    )
    calls = control.start([member], endpoints.WEIGHTS_PROBE, {member.member_id: message}, PROBE_SECONDS)
    own = score(sequences)
    answer = calls.wait()[member.member_id]
    if answer.body is None:
        log.warning("probe of version %d: %s", version, answer.error)
        return {"probe_failed": 1.0}
    probed = msgspec.msgpack.decode(answer.body, type=wire.Probed)
    theirs = [torch.from_numpy(np.frombuffer(b, dtype="<f4").astype(np.float32)) for b in probed.logprobs]
    if probed.version != version or [t.numel() for t in theirs] != [o.numel() for o in own]:
        log.warning("probe of version %d: the answer is of another version or of other sequences", version)
        return {"probe_failed": 1.0}
    ours_n, theirs_n = torch.cat(own), torch.cat(theirs)
    position_n = torch.cat([torch.arange(s.prompt_tokens, len(s.token_ids)) for s in sequences])
    table = ratio_table(ours_n, theirs_n, position_buckets(position_n), len(POSITIONS))
    return {
        **by_position(PROBE, [RatioStatistics(*row) for row in table.tolist()]),
        "probe_max_difference": float((ours_n - theirs_n).abs().max()),
    }
