"""The reference policy of ``recipe.kl``: the run's initial model, which is the same after every restart.

It is the prepared model or, in a run with a warm start, the weights after that. The trainer writes those weights to the run's
directory before its first checkpoint, so a trainer that finds a checkpoint finds them as well, and one that finds none repeats
the warm start and writes them again. It also writes them without a penalty, because an edit of the spec may add one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_trainer.checkpoints.disk import flush
from scalerl_trainer.engine import Engine
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models import WeightStream, open_model
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.tensor_files import TensorInfo, write_tensors

_BUCKET_BYTES = 256 << 20


def write_weights(engine: Engine, path: Path, ranks: Ranks) -> None:
    """Write the engine's weights, in the model's dtype, to ``path``. Atomic; a failure leaves nothing on the volume.

    A collective: no rank returns before the file is complete.

    Raises:
        OSError: on all ranks.
    """
    dtype = getattr(torch, engine.settings.dtype)
    infos = [TensorInfo(name, dtype, shape) for name, shape in engine.weights.parameter_shapes()]
    tensors = (
        tensor for bucket in engine.weights.gather_parameters(_BUCKET_BYTES) for tensor in bucket.tensors
    )
    problem = ""
    if ranks.is_leader:
        staged = path.with_name(f".{path.name}")
        try:
            write_tensors(staged, infos, tensors, {"format": "pt"})
            flush(staged)
            staged.rename(path)
            flush(path.parent)
        except OSError as error:
            problem = str(error)
        finally:
            with suppress(OSError):
                staged.unlink(missing_ok=True)
    for _ in tensors:  # all ranks take part to the end, rank 0 also after a failure
        pass
    if problem := ranks.broadcast(problem if ranks.is_leader else None, str):
        raise OSError(problem)


def load_reference(paths: RunPaths, spec: RunSpec) -> tuple[Any, WeightStream]:
    """The run's initial model without values, and its weights.

    Raises:
        ModelError: it cannot be loaded, or the weights after the warm start are missing or of another model.
    """
    model, weights = open_model(paths.base_model, dtype=spec.model.dtype, attention=spec.model.attention)
    if spec.warm_start is None:
        return model, weights
    path = paths.warm_started_weights
    try:
        return model, WeightStream.of_file(model, path)
    except ModelError as error:
        raise ModelError(
            f"recipe.kl.penalty with a warmStart: {path}, the weights after the warm start, cannot be read: "
            f"{error}; put the file back, set recipe.kl to {{none: {{}}}}, or create another run"
        ) from error
