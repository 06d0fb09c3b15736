"""One of two ranks: a shard of the model disappears after its headers were read. ``STREAM``: see below."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engines_and_stages import engine_of

from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models import open_model

given: dict[str, Any] = STREAM  # type: ignore[name-defined]  # noqa: F821
pipe: Connection = given["pipe"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(given["rank"], 2, given["rank"], "127.0.0.1", given["port"]), device="cpu", timeout_seconds=240
)
errors = []
for stage, folder in given["folders"].items():
    model, weights = open_model(Path(folder), dtype="float32")
    torch.distributed.barrier()
    if given["rank"] == 0:
        sorted(Path(folder).glob("*.safetensors"))[-1].unlink()
    try:
        Engine(model, EngineSettings(**engine_of(stage), dtype="float32"), device, weights=weights)
    except ModelError as error:
        errors.append(str(error))
pipe.send(errors)
destroy_process_group()
