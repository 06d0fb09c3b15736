"""``spec.weightSync``: the transfer of new weights to the generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from scalerl_api.fields import Model, PositiveDecimal, PositiveQuantity, Rule, StorePrefix
from scalerl_api.weight_backends import BackendName

DEFAULT_PROBE_LIMITS: Final[Mapping[str, float]] = {"bfloat16": 0.01, "float32": 1e-6}
"""Default of ``weightSync.probeLimit``. With equal weights, tiny random models gave 3e-13 in float32 and 1e-4 (dense) to 1e-2
(mixtures of experts) in bfloat16; with unpacked experts, OLMoE gave 0.017 and Qwen3-MoE 0.15."""


PROBE_SEQUENCES: Final = 8
"""Sequences that both sides score after a publish to measure the trainer–generator mismatch: the one with the longest completion whole,
of the others beginnings with 8,192 tokens in total, or more if 64 completion tokens need it. Sequences with fewer are not probed: the
ones before are again."""


class WeightSyncSpec(Model):
    """Transfer of new weights to the generators: one broadcast per bucket over a separate process group, or files."""

    backend: BackendName = "Auto"
    """``Auto``: NCCL if both sides have accelerators, otherwise gloo. ``Files``: through the run's volume, mostly as differences from
    the version before; without connections between trainer and generators for it, with a copy of the weights in the memory of each."""
    to: StorePrefix | None = None
    """Prefix of an S3 bucket, of this run alone, in the volume's place with ``backend: Files``. Provide credentials as variables in
    ``trainer.podTemplate.env`` and ``generator.podTemplate.env``, from a Secret."""
    bucket: PositiveQuantity | None = None
    """Bytes per broadcast, or of a part of a file. Default: 16Mi, where larger buckets cause page faults on fresh memory in the receiver
    (measured on CPU), and with NCCL 512Mi or what a generator's device has free."""
    timeout_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    """Timeout of a publish, which is then repeated without the lost generators."""
    probe_limit: PositiveDecimal | None = None
    """Largest mismatch after a publish (k3 estimate of the KL divergence, nats per token; one token counts at most 20 times the
    limit), measured on 8 sequences that both sides score. A generator above it gets no work, and if no generator is below it, the run ends. Default: 0.01 for model.dtype bfloat16, 1e-6 for float32. Raise it only for a
    known inexactness of the generators, such as a quantized KV cache."""

    rules = (
        Rule(
            "!has(self.to) || self.backend == 'Files'",
            "to has no effect without backend: Files",
            "to",
            lambda weights: weights.to is None or weights.backend == "Files",
        ),
    )
