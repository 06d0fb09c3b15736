"""How far trainer and generators are apart: what it is called in metrics.jsonl, in Prometheus and in the summary.

Three measurements, each a KL estimate (k3, nats a token) over tokens that a generator scored and the trainer scored:

=========== ==========================================================================================================
``sampled`` tokens that the very weights sampled which train on them, and nothing older before them in their completion
            (else its key-value cache would hold older weights' states): the two numerical stacks alone, as they train
``probe``   sequences that one generator scores again after a publish: the same weights, but scored in one pass
``ratio``   all tokens of the step: the two stacks, and the staleness that the loss corrects
=========== ==========================================================================================================

A mean over all tokens hides an error that grows with the position (rounded rotary tables, a wrong rope scaling), so
each is also taken by the token's position in its whole sequence, prompt included.
"""

from __future__ import annotations

from typing import Final

SAMPLED: Final = "sampled"
PROBE: Final = "probe"
RATIO: Final = "ratio"
SOURCES: Final = (SAMPLED, PROBE, RATIO)

POSITION_EDGES: Final = (256, 1024, 4096, 16384)
"""First position of each bucket but the first."""
POSITIONS: Final = ("0_256", "256_1k", "1k_4k", "4k_16k", "16k_up")
ALL: Final = "all"


def key(source: str, what: str, positions: str = ALL) -> str:
    """Key of a step's scalar.

    >>> key(SAMPLED, "kl"), key(PROBE, "tokens", "1k_4k")
    ('sampled_kl', 'probe_tokens_1k_4k')
    """
    return f"{source}_{what}" if positions == ALL else f"{source}_{what}_{positions}"
