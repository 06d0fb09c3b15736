"""One rank of the tests of edits: saves a checkpoint of the base, or loads it under each given run and takes a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_worker import share

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun
from scalerl_trainer.algo.losses.make_loss import make_loss
from scalerl_trainer.checkpoints.load import CheckpointLoader
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.write import Checkpointer
from scalerl_trainer.engine import Engine, Rank, destroy_process_group, init_process_group
from scalerl_trainer.engine.fsdp_backend import FsdpBackend
from scalerl_trainer.engine.settings import engine_settings
from scalerl_trainer.models import load_model
from scalerl_trainer.ranks import Ranks

given: dict[str, Any] = WORKER  # type: ignore[name-defined]  # noqa: F821
rank: int = given["rank"]
world: int = given["world"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(rank, world, rank, "127.0.0.1", given["port"]), device="cpu", timeout_seconds=240
)
ranks = Ranks(rank, world, 60.0)
results = {}
for path, manifest in given["runs"].items():
    spec = ScaleRLRun.model_validate(manifest).spec
    settings = engine_settings(spec)
    engine = Engine(load_model(given["model"], dtype=spec.model.dtype), settings, device)
    store = CheckpointStore(RunPaths(given["root"]), spec.checkpoint.keep)
    checkpointer = Checkpointer(store, ranks, engine)
    version = CheckpointLoader(store, ranks, engine).load()
    if spec.recipe.kl.penalty is not None:
        engine.set_reference(load_model(given["model"], dtype=spec.model.dtype))
    steps = engine.steps_done
    stats = engine.step(share(steps, rank, world), make_loss(spec.recipe))
    backend: Any = engine._backend
    fsdp = isinstance(backend, FsdpBackend)
    group = (backend._optimizer if fsdp else backend.engine.optimizer).param_groups[0]
    if version is None:
        assert checkpointer.start(engine.steps_done, b"snapshot") is None
        assert checkpointer.finish().error is None
    results[path] = {
        "version": version,
        "steps": steps,
        "loss": stats.loss,
        "engine": "FSDP2" if fsdp else "DeepSpeed",
        "stage": 3 if fsdp else backend.engine.zero_optimization_stage(),
        "expected_rate": settings.learning_rate_at(steps),
        "expected": (settings.betas, settings.epsilon, settings.weight_decay),
        "rate": group["lr"],
        "used": (tuple(group["betas"]), group["eps"], group["weight_decay"]),
    }
    engine.close()
if rank == 0:
    torch.save(results, given["out"])
destroy_process_group()
