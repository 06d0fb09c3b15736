"""Names of the trainer–generator mismatch in metrics.jsonl, in Prometheus and in the summary.

There are three measurements, each a KL estimate (k3, nats per token) over tokens that both a generator and the trainer
scored:

=========== ==========================================================================================================
``sampled`` tokens sampled by the same weights that train on them, without older tokens before them in their completion
            (else the KV cache would have states of older weights): numerical differences in training, without staleness
``probe``   sequences that one generator scores again after a publish: the same weights, but scored in one pass
``ratio``   all tokens of the step: numerical differences, and the staleness that the loss corrects
=========== ==========================================================================================================

A mean over all tokens hides an error that grows with the position (rounded rotary tables, a wrong rope scaling), so each
measurement is also reported by range of the token's position in its sequence, prompt included.
"""

from __future__ import annotations

from typing import Final

SAMPLED: Final = "sampled"
PROBE: Final = "probe"
RATIO: Final = "ratio"
SOURCES: Final = (SAMPLED, PROBE, RATIO)

POSITION_EDGES: Final = (256, 1024, 4096, 16384)
"""First position of each range, without the first range."""
POSITIONS: Final = ("0_256", "256_1k", "1k_4k", "4k_16k", "16k_up")
ALL: Final = "all"


def key(source: str, what: str, positions: str = ALL) -> str:
    """Key of a scalar in a step's statistics.

    >>> key(SAMPLED, "kl"), key(PROBE, "tokens", "1k_4k")
    ('sampled_kl', 'probe_tokens_1k_4k')
    """
    return f"{source}_{what}" if positions == ALL else f"{source}_{what}_{positions}"
