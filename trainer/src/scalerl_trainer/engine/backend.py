"""What a backend has, the class through which :class:`.training_step.Engine` uses ``trainer.engine``: DeepSpeed or FSDP2.

It partitions a model's state over ranks and updates it. Either has float32 master weights and AdamW's moments of the parameters that require gradients, in parts of flattened parameters
(:class:`.engine_files.Piece`), so that a checkpoint of one loads in the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from scalerl_api.engines import EngineName
from scalerl_trainer.checkpoints.engine_files import Piece
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.errors import EngineError
from scalerl_trainer.models.weight_stream import WeightStream


class Backend(Protocol):
    """A module on all ranks, its gradients and its optimizer. Calls of the module and :meth:`backward` are collectives."""

    def __call__(self, *arguments: Any) -> Any:
        """Run the module."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of ``loss``, averaged over ranks, in float32."""

    def step(self, learning_rate: float) -> float:
        """Apply the update; returns the global gradient norm before clipping.

        If the norm is NaN or infinite, no weight changes.
        """

    def discard(self, output: Callable[[], torch.Tensor]) -> None:
        """Discard the accumulated gradients.

        Args:
            output: runs the module on next to nothing; returns its output.
        """

    def gradient_norms(self, norm: float) -> dict[str, float]:
        """The global norm that :meth:`step` returned, by kind of parameter. A collective, but for ZeRO 0."""

    def reset_optimizer(self) -> None:
        """Reset the moments and their step count to zero."""

    def whole(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Whole parameters in the model's dtype on rank 0, nothing on others. A collective where parameters are partitioned.

        A tensor may be the live parameter: it is not to be written to, and read before the next update.
        """

    def shape(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        """The full shape of a parameter, also while it is partitioned."""

    def pieces(self, *, owned: bool) -> Iterator[Piece]:
        """Yield the pieces of parameters whose float32 weights and moments this rank holds, as views.

        Args:
            owned: only pieces that this rank owns, which partition the state over ranks.
        """

    @property
    def optimizer_steps(self) -> float:
        """AdamW's step count, which is equal for all parameters."""

    def restoring(self, optimizer_steps: float) -> AbstractContextManager[None]:
        """A context in which the caller writes to the views of ``pieces``; its exit updates the model's weights from them."""

    def close(self) -> None:
        """Remove hooks and references."""


class Frozen(Protocol):
    """A module without gradients and optimizer. Where it is partitioned over the ranks, calls are collectives."""

    def __call__(self, *arguments: Any) -> Any:
        """Run the module without gradients."""

    def copy_from(self, sources: list[tuple[str, torch.nn.Parameter]]) -> None:
        """Copy parameters of a module of the same architecture, by name. A collective under ZeRO-3."""

    def part(self, name: str, start: int, count: int) -> torch.Tensor:
        """A view of elements of a flattened parameter; where it is partitioned they must be of this rank's part."""

    def parts(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Of each parameter, the part that this rank holds: name, start, and a flat view without padding."""

    def close(self) -> None:
        """Remove hooks and references."""


def open_backend(
    module: torch.nn.Module,
    settings: EngineSettings,
    device: torch.device,
    weights: WeightStream | None = None,
) -> Backend:
    """Put ``module`` on the device, partition it and make its optimizer. A collective.

    Raises:
        EngineError: DeepSpeed is asked for and not installed.
        ModelError: the weights cannot be read, or the module cannot be partitioned.
    """
    trained, _ = _classes(settings.engine)
    return trained(module, settings, device, weights)


def open_frozen(
    module: torch.nn.Module,
    settings: EngineSettings,
    device: torch.device,
    weights: WeightStream | None = None,
) -> Frozen:
    """As :func:`open_backend`, of a module that is not trained."""
    _, frozen = _classes(settings.engine)
    return frozen(module, settings, device, weights)


def _classes(engine: EngineName) -> tuple[Callable[..., Backend], Callable[..., Frozen]]:
    """What makes a module that is trained, and one that is not. DeepSpeed is imported if it is used."""
    match engine:
        case "FSDP2":
            from scalerl_trainer.engine.fsdp_backend import FsdpBackend, FsdpFrozen

            return FsdpBackend, FsdpFrozen
        case "DeepSpeed":
            _need_deepspeed()
            from scalerl_trainer.engine.deepspeed_backend import DeepSpeedBackend, FrozenModule

            return DeepSpeedBackend, FrozenModule


def _need_deepspeed() -> None:
    # With its autotuner, which is not used, DeepSpeed would import MLflow where it is installed: half a second of a processor.
    hidden = sys.modules.setdefault("mlflow", None) is None  # type: ignore[arg-type]
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise EngineError(
            f"trainer.engine: DeepSpeed needs the package deepspeed ({error}): install it, or set FSDP2"
        ) from error
    finally:
        if hidden:
            del sys.modules["mlflow"]
