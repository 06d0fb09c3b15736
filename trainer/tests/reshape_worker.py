"""One rank of the tests of saved engines: runs its jobs, writes the results to ``<out>/<name>-<r>.pt``.

``save``  3 steps, save, 3 more: what an uninterrupted run of this shape comes to; the weights after the first are kept as the
          proximal policy
``load``  load what another shape saved, save it again, 3 more steps
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_worker import SETTINGS, parameters, share
from engines_and_stages import engine_of

from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.models import load_model

given: dict[str, Any] = WORKER  # type: ignore[name-defined]  # noqa: F821
out: Path = given["out"]
rank: int = given["rank"]
world: int = given["world"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(rank, world, rank, "127.0.0.1", given["port"]), device="cpu", timeout_seconds=240
)


def folder(name: str) -> Path:
    if rank == 0:
        (out / name).mkdir()
    torch.distributed.barrier()
    return out / name


def steps(engine: Engine, first: int, end: int) -> list[float]:
    return [engine.step(share(step, rank, world), Cispo()).loss for step in range(first, end)]


results = {}
for job in given["jobs"]:
    _, stage, dtype = job["shape"]
    settings = EngineSettings(**engine_of(stage), dtype=dtype, **SETTINGS)
    engine = Engine(load_model(given["model"], dtype="float32"), settings, device)
    found: dict[str, Any] = {}
    engine.keep_proximal(load_model(given["model"], dtype="float32"))
    if job["do"] == "save":
        steps(engine, 0, 1)
        engine.set_proximal()
        steps(engine, 1, 3)
        engine.save(folder(job["name"]))
    else:
        engine.load(out / job["source"])
        engine.save(folder(job["name"]))
        found["loaded"] = parameters(engine)
    found["steps_done"] = engine.steps_done
    found["after"] = steps(engine, 3, 6)
    found["parameters"] = parameters(engine)
    engine.close()
    results[job["name"]] = found
torch.save(results, out / f"{given['name']}-{rank}.pt")
destroy_process_group()
