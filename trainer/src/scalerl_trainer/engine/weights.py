"""The policy's weights as a publish, an export and a checkpoint of the model see them: whole, by name, in buckets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist

from scalerl_trainer.engine.backend import Backend
from scalerl_trainer.engine.stats import ParameterBucket
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models.checkpoint_names import CheckpointNames
from scalerl_trainer.models.lora import PEFT, AdapterNames, Adapters, is_adapter, merged, peft_name
from scalerl_trainer.models.policy import PREFIX, Policy


class Weights:
    """Names, shapes and values of the parameters of ``policy``.

    Args:
        backend: of ``policy``.
        dtype: of the model.
        adapters: those of the policy, if it has some.
        stored: names of the tensors in the model's files.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        dtype: torch.dtype,
        adapters: Adapters | None,
        stored: Collection[str] | None,
    ) -> None:
        self._backend, self._dtype, self._adapters, self._rank = backend, dtype, adapters, dist.get_rank()
        causal_lm: Any = policy.causal_lm
        self._model_type: str = causal_lm.config.model_type
        every = {n.removeprefix(PREFIX): p for n, p in policy.named_parameters()}
        self._parameters = {n: p for n, p in every.items() if not is_adapter(n)}
        self.adapters = {n: p for n, p in every.items() if is_adapter(n)}
        """Parameters of the adapters."""
        shapes = [(name, backend.shape(p)) for name, p in self._parameters.items()]
        self._checkpoint = CheckpointNames(causal_lm, shapes, stored)

    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of the parameters, in the order of ``gather_parameters``. Not a collective."""
        return [
            (name, self._backend.shape(self._parameters[name]))
            for group in self._checkpoint.groups
            for name in group.parameters
        ]

    def checkpoint_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes in the model's checkpoint files, in the order of ``gather_checkpoint``. Not a collective."""
        return [item for group in self._checkpoint.groups for item in group.tensors.items()]

    def gather_parameters(
        self, bucket_bytes: int, dtype: torch.dtype | None = None
    ) -> Iterator[ParameterBucket]:
        """Yield whole parameters in buckets of at most ``bucket_bytes`` (a larger parameter is alone in its bucket).

        Names are those of the transformers model; tied parameters occur once. All ranks must exhaust the iterator together;
        no collective is in progress while a bucket is yielded. Where it is no collective (below ZeRO-3), it may be consumed on a
        thread beside a forward or backward pass, but not beside an update (``before_update``).

        Args:
            dtype: of the yielded tensors; None for the model's.
        """
        dtype = dtype or self._dtype
        for names, parameters in self.buckets(bucket_bytes, dtype):
            shapes = tuple(self._backend.shape(parameter) for parameter in parameters)
            adapters = {n: one for n in names if self._adapters and (one := self._adapters.of(n))}
            needed = [p for one in adapters.values() for p in (one.lora_A, one.lora_B)]
            whole = self._backend.whole([*parameters, *needed])
            factors = iter(whole[len(parameters) :])
            tensors = tuple(
                merged(tensor, next(factors), next(factors), adapters[name].scale, dtype)
                if name in adapters
                else tensor.to(dtype)
                for name, tensor in zip(names, whole, strict=False)
            )
            yield ParameterBucket(names, shapes, dtype, tensors)

    def gather_checkpoint(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights one by one under the names and in the layouts of the model's checkpoint files, on rank 0.

        Other ranks yield nothing. Otherwise as :meth:`gather_parameters`: a tensor may be a view of the live parameter.
        """
        groups = iter(self._checkpoint.groups)
        for bucket in self.gather_parameters(bucket_bytes):
            parameters = dict(zip(bucket.names, bucket.tensors, strict=False))
            while parameters:
                group = next(groups)
                yield from zip(group.tensors, self._checkpoint.convert(group, parameters), strict=True)
                for name in group.parameters:
                    del parameters[name]

    def adapter_shapes(self, names: AdapterNames) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of the adapters, in the order of ``gather_adapters``. Not a collective.

        Raises:
            ModelError: the files have the weight of a layer in another layout, so its adapter cannot be published.
        """
        parameters = self.adapters.items()
        return [(self._adapter_name(n, names), self._backend.shape(p)) for n, p in parameters]

    def gather_adapters(self, names: AdapterNames) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters one by one, on rank 0; other ranks yield nothing. A collective under ZeRO-3."""
        for group in self.adapter_groups():
            # Copies of live parameters too: they are small, and may be read after the next update.
            whole = [t.clone() for t in self._backend.whole([self.adapters[name] for name in group])]
            yield from zip((self._adapter_name(name, names) for name in group), whole, strict=False)

    def buckets(
        self, bucket_bytes: int, dtype: torch.dtype
    ) -> Iterator[tuple[tuple[str, ...], list[torch.nn.Parameter]]]:
        """Parameters in buckets that divide no group of ``CheckpointNames``."""
        names: list[str] = []
        filled = 0
        for group in self._checkpoint.groups:
            # The head shares the output embedding's parameter, which occurs once.
            elements = sum(math.prod(self._backend.shape(self._parameters[n])) for n in group.parameters)
            size = elements * dtype.itemsize
            if names and filled + size > bucket_bytes:
                yield tuple(names), [self._parameters[n] for n in names]
                names, filled = [], 0
            names += group.parameters
            filled += size
        if names:
            yield tuple(names), [self._parameters[n] for n in names]

    def _adapter_name(self, parameter: str, names: AdapterNames) -> str:
        if names == PEFT:
            return peft_name(parameter)
        layer, _, which = parameter.rpartition(".")
        stored = self._checkpoint.stored_alone(f"{layer}.weight")
        if stored is None:
            raise ModelError(
                f"trainer.lora.publish: Adapter: {self._model_type} has {layer}.weight in another layout in its files: "
                "publish Merged, or leave it out of targetModules"
            )
        return f"{stored}/{which}"

    def adapter_groups(self) -> list[tuple[str, ...]]:
        """Names of A and B of each layer."""
        names = list(self.adapters)
        return list(zip(names[::2], names[1::2], strict=True))
