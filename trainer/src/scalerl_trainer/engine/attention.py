"""Which kernel computes attention, and what its rows are."""

from __future__ import annotations

import logging
from typing import Any

import torch

from scalerl_trainer.engine.distributed import gather_vectors
from scalerl_trainer.engine.start_checks import StartChecks
from scalerl_trainer.models import varlen
from scalerl_trainer.models.policy import Policy

log = logging.getLogger(__name__)


def choose_attention(
    policy: Policy, checks: StartChecks, dtype: torch.dtype, device: torch.device, rank: int
) -> None:
    """Use torch's variable-length kernel in place of ``sdpa`` where device and model allow it. A collective."""
    config: Any = policy.causal_lm.config
    reason = varlen.problem(policy.causal_lm, dtype, device) or varlen.failure(config, dtype, device)
    able = gather_vectors(torch.full((1,), int(reason is None), device=device)).flatten().tolist()
    if reason is None and not all(able):
        reason = f"rank {able.index(0)} cannot use it, see its log"
    elif any(able) and reason is not None:
        log.warning("rank %d cannot use torch's variable-length kernel: %s", rank, reason)
    if reason is None:
        varlen.use(config)
    shared = checks.shares_rows()
    if reason is None and not shared:
        config._attn_implementation = "sdpa"
        reason = "the model does not keep sequences apart by position, or differs from sdpa"
    # The first call compares, on all ranks.
    once = "once" if checks.shares_prompts() else f"with each completion ({checks.why_whole})"
    if rank == 0:
        kind = "sequences share rows" if shared else "each sequence has a row of its own"
        why = f" (torch's variable-length kernel is not used: {reason})" if reason else ""
        log.info("attention: %s; %s%s; prompts are computed %s", config._attn_implementation, kind, why, once)
