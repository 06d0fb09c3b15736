"""What a version is published as: whole weights, or adapters alone, by the run's LoRA mode (``trainer.lora``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scalerl_api import wire
from scalerl_api.spec import RunSpec
from scalerl_trainer.engine.weights import Weights
from scalerl_trainer.models.lora import PUBLISHED, AdapterNames
from scalerl_trainer.publish.buckets import NamedTensors
from scalerl_trainer.publish.publisher import WeightSource


def weights_to_publish(
    spec: RunSpec,
    weights: Weights,
    whole: Callable[[], NamedTensors],
    adapters: Callable[[AdapterNames], NamedTensors],
) -> WeightSource:
    """The current weights, or the adapters, as they are published.

    Args:
        weights: of which names and shapes are read.
        whole: streams whole weights, with merged adapters.
        adapters: streams the adapters.
    """
    lora, only_adapters = spec.trainer.lora, spec.trainer.publishes_adapters
    shapes = weights.adapter_shapes(PUBLISHED) if only_adapters else weights.checkpoint_shapes()
    manifest = [wire.TensorSpec(name, spec.model.dtype, list(shape)) for name, shape in shapes]
    if lora is not None and only_adapters:
        return WeightSource(manifest, partial(adapters, PUBLISHED), lora.alpha / lora.rank)
    return WeightSource(manifest, whole)
