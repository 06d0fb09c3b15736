"""Sequences for the probe of a publish before the first batch: fixed text, so that wrong weights are found before any training.

Text, unlike random token ids, has the probabilities that a model was trained for: the log-probability of a token that is
almost impossible differs in bfloat16 by more than the limit of the probe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from scalerl_api.source import PromptSpec
from scalerl_api.spec import RunSpec
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.publish.probe import ProbeSequence

_TEXT: Final = """\
A train leaves the station at 9:15 and travels 84 kilometres in 70 minutes. Its average speed is 84 / 70 * 60 = 72 km/h.
The second train travels at 96 km/h, so it needs 84 / 96 * 60 = 52.5 minutes for the same distance.

def greatest_common_divisor(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a

Let x + y = 12 and x - y = 4. Adding both equations gives 2x = 16, so x = 8 and y = 4. Check: 8 + 4 = 12 and 8 - 4 = 4.
Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain, because the air pressure is lower
there. The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29; their sum is 129.
"""
_PARTS: Final = 4


def first_probes(model: Path, spec: RunSpec) -> list[ProbeSequence]:
    """Sequences of at least two tokens: the whole text, and parts of it.

    ``model`` is the folder with the tokenizer.
    """
    (ids,) = ModelTokenizer(model, PromptSpec()).encode([_TEXT])
    # A server scores a sequence as a prompt, which leaves room for one token.
    most = min(spec.model.context_tokens - 1, spec.micro_batch_tokens)
    size = -(-len(ids) // _PARTS)
    parts = [ids, *(ids[start : start + size] for start in range(0, len(ids), size))]
    sequences = [ProbeSequence(np.array(part[:most], dtype=np.int32), 1) for part in parts]
    return [s for s in sequences if len(s.token_ids) > 1]
