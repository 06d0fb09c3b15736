"""Router replay: forward passes in which the routers of a mixture of experts choose the experts that the generator chose.

Rounding differs between trainer and generator, and where two experts have nearly equal scores it decides which one computes a token.
Replayed, both sides compute the same function of the weights. The experts of a token are given, their weights are not: the
router computes its scores as always, and those of the given experts are used, normalised as the family does, with their gradient.

Axes: ``x`` position of a micro-batch, ``l`` layer of the model, ``k`` chosen expert, ``e`` expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from scalerl_trainer.errors import BadBatchError, ModelError
from scalerl_trainer.models.routing import routers_of
from scalerl_trainer.packing import MicroBatch, to_device

_PROBED_POSITIONS = 2


class _TopK(TorchFunctionMode):
    """Within it, ``topk`` finds the given experts instead of those with the largest scores.

    Args:
        experts_xk: the experts to find; of any dtype of whole numbers.
        known_x: bool, positions that have some; ``topk`` of the others is as without this.
    """

    def __init__(self, experts_xk: torch.Tensor, known_x: torch.Tensor) -> None:
        super().__init__()
        self._experts_xk, self._known_x = experts_xk, known_x
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        self.calls += 1
        scores_xe = args[0] if args else (kwargs or {})["input"]
        chosen_xk = torch.where(self._known_x[:, None], self._experts_xk.long(), result.indices)
        return torch.return_types.topk((scores_xe.gather(-1, chosen_xk), chosen_xk))


class RouterReplay:
    """Replays the experts of a micro-batch in a model, and in others of its architecture.

    Raises ``ModelError`` for a model without routers, or with routers that do not choose experts by one ``topk`` over all of them.
    """

    def __init__(self, causal_lm: Any) -> None:
        self._experts_xlk: torch.Tensor | None = None
        self._known_x: torch.Tensor | None = None
        self._sizes: dict[int, tuple[int, int]] = {}
        """Number of experts and of chosen ones by layer."""
        self.attach(causal_lm)

    def attach(self, causal_lm: Any) -> None:
        """Replay in this model too."""
        found, _ = routers_of(causal_lm)
        kind = causal_lm.config.model_type
        if not found:
            raise ModelError(
                f"trainer.routerReplay: {kind} has no routers that transformers records: leave it out, or choose a mixture of experts"
            )
        hidden = causal_lm.config.get_text_config().hidden_size
        for name, router in found:
            number = re.search(r"\d+", name)
            assert number is not None, f"{name} is in no layer"
            chosen = _chosen(router, hidden)
            if chosen is None:
                raise ModelError(
                    f"trainer.routerReplay: the routers of {kind} ({type(router).__name__}) do not choose experts by one topk: "
                    "leave it out, or choose another model"
                )
            layer = int(number[0])
            self._sizes[layer] = int(router.num_experts), chosen
            router.forward = partial(self._forward, layer, router.forward)

    def _forward(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._experts_xlk is None or self._known_x is None:
            return forward(*args, **kwargs)
        with _TopK(self._experts_xlk[:, layer], self._known_x):
            return forward(*args, **kwargs)

    @contextmanager
    def of(self, micro: MicroBatch, device: torch.device) -> Iterator[None]:
        """A context in which the routers choose the experts of ``micro``.

        The backward pass belongs into it as well: with activation checkpointing it computes the layers again.
        """
        if micro.experts_xlk is not None and micro.known_x is not None:
            self._experts_xlk = to_device(micro.experts_xlk, device)
            self._known_x = to_device(micro.known_x, device)
        try:
            yield
        finally:
            self._experts_xlk = self._known_x = None

    def check(self, micro: MicroBatch) -> None:
        """Raises ``BadBatchError`` if the experts of ``micro`` are not those of this model."""
        if micro.experts_xlk is None or micro.known_x is None:
            return
        ordered_xlk = np.sort(micro.experts_xlk[micro.known_x].numpy(), -1)  # a sixth of torch's time
        if not len(ordered_xlk):
            return
        layers, chosen = ordered_xlk.shape[1:]
        twice_l = (ordered_xlk[..., 1:] == ordered_xlk[..., :-1]).any(0).any(-1)
        low_l, high_l = ordered_xlk[..., 0].min(0), ordered_xlk[..., -1].max(0)
        for layer, (experts, wanted) in self._sizes.items():
            if layer >= layers or chosen != wanted:
                raise BadBatchError(
                    f"the generator recorded {chosen} experts in each of {layers} layers; layer {layer} of the model has {wanted} for "
                    "a token: generators and trainer must have the same model"
                )
            if twice_l[layer] or not 0 <= low_l[layer] <= high_l[layer] < experts:
                raise BadBatchError(
                    f"the generator recorded an expert of layer {layer} twice for a token, or one beyond its {experts}: it does not "
                    "capture the routers of this model; leave trainer.routerReplay out"
                )


def _chosen(router: Any, hidden: int) -> int | None:
    """The number of experts that a router chooses by one ``topk`` over all of them; None if it chooses in another way."""
    weight = next(router.parameters())
    states_xd = torch.zeros(_PROBED_POSITIONS, hidden, dtype=weight.dtype, device=weight.device)
    sizes: list[tuple[int, int]] = []

    class Recorded(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.topk, torch.Tensor.topk):
                scores_xe = args[0] if args else (kwargs or {})["input"]
                sizes.append((scores_xe.shape[-1], result.indices.shape[-1]))
            return result

    with torch.no_grad(), Recorded():
        router(states_xd)
    if len(sizes) != 1 or sizes[0][0] != router.num_experts:
        return None
    return sizes[0][1]
