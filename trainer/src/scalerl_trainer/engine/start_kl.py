"""KL of the policy from the weights that the run started with, without a second model.

Completions that those weights sampled are kept with their log-probabilities. With d = log π_start(y) - log π(y) of their tokens y
under later weights π, the means of d (k1) and of exp(-d) - 1 + d (k3) estimate KL(π_start ‖ π), the forward KL, over the prefixes
that π_start samples (``algo.mismatch`` has the estimators). The sample stays the same, so the estimate changes only with the
weights.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from scalerl_trainer.algo.mismatch import k3_estimates
from scalerl_trainer.errors import EngineError
from scalerl_trainer.packing import Sequence

START_KL: Final = "start_kl"
"""Key of the k3 estimate in a step's statistics, nats per token; that of k1 ends in ``_k1``."""
_FILE: Final = "start.msgpack"


class StartSample(msgspec.Struct, frozen=True):
    """Completions of the start."""

    temperature: float
    """At which they were sampled, and are scored."""
    prompts: list[list[int]]
    completions: list[list[int]]
    """Their first tokens."""
    logprobs: bytes
    """Of all these tokens under the weights of the start, as the trainer computes them; little-endian float32."""

    @classmethod
    def of(cls, sequences: Items[Sequence], logprobs_n: torch.Tensor, temperature: float) -> StartSample:
        return cls(
            temperature,
            [list(one.prompt) for one in sequences],
            [list(one.completion) for one in sequences],
            logprobs_n.numpy().astype("<f4").tobytes(),
        )

    @property
    def sequences(self) -> list[Sequence]:
        return [Sequence(*pair) for pair in zip(self.prompts, self.completions, strict=True)]

    def kl(self, logprobs_n: torch.Tensor) -> dict[str, float]:
        """The estimates, from the tokens' log-probabilities under later weights."""
        start_n = torch.from_numpy(np.frombuffer(self.logprobs, dtype="<f4").astype(np.float32))
        return {
            START_KL: float(k3_estimates(logprobs_n, start_n).mean()),
            f"{START_KL}_k1": float((start_n.double() - logprobs_n.double()).mean()),
        }

    def save(self, directory: Path) -> Path:
        """Write the file, and return it. Raises OSError."""
        file = directory / _FILE
        file.write_bytes(msgspec.msgpack.encode(self))
        return file

    @classmethod
    def load(cls, directory: Path, most_tokens: int) -> StartSample | None:
        """None of a checkpoint without one, or with longer sequences. Raises ``EngineError`` if it cannot be read."""
        file = directory / _FILE
        try:
            found = msgspec.msgpack.decode(file.read_bytes(), type=cls) if file.is_file() else None
            fits = found is not None and all(one.tokens <= most_tokens for one in found.sequences)
            return found if fits else None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise EngineError(f"{file} cannot be read: {error}") from error
