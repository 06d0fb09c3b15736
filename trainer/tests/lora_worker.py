"""One rank of the tests of adapters: runs its jobs, writes the results to ``<out>/<name>-<r>.pt``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_worker import SETTINGS, parameters, share
from engines_and_stages import engine_of as partition_of

from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo, Loss
from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.errors import TrainerError
from scalerl_trainer.models import load_model
from scalerl_trainer.models.lora import PEFT, PUBLISHED, Lora

given: dict[str, Any] = WORKER  # type: ignore[name-defined]  # noqa: F821
out: Path = given["out"]
rank: int = given["rank"]
world: int = given["world"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(rank, world, rank, "127.0.0.1", given["port"]), device="cpu", timeout_seconds=380
)


def engine_of(job: dict[str, Any]) -> Engine:
    settings = EngineSettings(
        **partition_of(job["stage"]),
        dtype=job["dtype"],
        lora=Lora(*job["lora"]),
        **(SETTINGS | job.get("settings", {})),
    )
    return Engine(load_model(given["model"], dtype="float32"), settings, device)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Three steps, a save, a fourth; then the fourth again from what was saved."""
    engine = engine_of(job)
    loss: Loss = Cispo()
    if job.get("kl"):
        engine.set_base_as_reference()
        loss = WithKl(loss, "k3", 0.5)
    found: dict[str, Any] = {"steps": []}
    if job.get("proximal"):
        engine.keep_proximal(load_model(given["model"], dtype="float32"))
    for step in range(3):
        if job.get("proximal") and step == 1:
            engine.set_proximal()
        stats = engine.step(share(step, rank, world), loss)
        found["steps"].append((stats.loss, stats.gradient_norm, stats.loss_means))
    found["merged"] = parameters(engine)
    found["adapters"] = dict(engine.weights.gather_adapters(PEFT))
    found["published"] = [name for name, _ in engine.weights.adapter_shapes(PUBLISHED)]
    found["shapes"] = engine.weights.adapter_shapes(PEFT)
    folder = out / job["name"]
    if rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    engine.save(folder)
    torch.distributed.barrier()
    found["fourth"] = engine.step(share(3, rank, world), loss).loss
    engine.close()
    again = engine_of(job)
    if job.get("kl"):
        again.set_base_as_reference()
    if job.get("proximal"):
        again.keep_proximal(load_model(given["model"], dtype="float32"))
    again.load(folder)
    found["loaded"] = dict(again.weights.gather_adapters(PEFT))
    found["resumed"] = again.step(share(3, rank, world), loss).loss
    again.close()
    return found


def norms(job: dict[str, Any]) -> list[float]:
    """Gradient norms of three steps."""
    engine = engine_of(job)
    found = [engine.step(share(step, rank, world), Cispo()).gradient_norm for step in range(3)]
    engine.close()
    return found


def refused(job: dict[str, Any]) -> str:
    engine = engine_of(job)
    try:
        engine.load(out / job["source"])
    except TrainerError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing was raised"


results = {job["name"]: globals()[job["do"]](job) for job in given["jobs"]}
torch.save(results, out / f"{given['name']}-{rank}.pt")
destroy_process_group()
