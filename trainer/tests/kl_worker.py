"""One rank of the tests of the KL penalty: runs its jobs, writes the results to ``<out>/<name>-<r>.pt``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_worker import SETTINGS, parameters, share, whole_batch

from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo
from scalerl_trainer.checkpoints.engine_files import SavedState
from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.models import load_model
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.packing import Sequence
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.reference import write_weights

given: dict[str, Any] = WORKER  # type: ignore[name-defined]  # noqa: F821
out: Path = given["out"]
rank: int = given["rank"]
world: int = given["world"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(rank, world, rank, "127.0.0.1", given["port"]), device="cpu", timeout_seconds=240
)
ranks = Ranks(rank, world, 60)


def engine_of(job: dict[str, Any], **changes: Any) -> Engine:
    settings = EngineSettings(
        zero_stage=job["stage"], dtype=job["dtype"], **{**SETTINGS, "max_gradient_norm": 0.0, **changes}
    )
    return Engine(load_model(given["start"], dtype="float32"), settings, device)


def saved(engine: Engine, name: str) -> SavedState:
    folder = out / name
    if rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    engine.save(folder)
    torch.distributed.barrier()
    return SavedState(folder)


def gradient(job: dict[str, Any]) -> dict[str, Any]:
    """One step against another model as the reference: the loss, the mean KL, the gradient (a tenth of it is AdamW's
    first moment)."""
    engine = engine_of(job, micro_batch_tokens=job["tokens"])
    engine.set_reference(load_model(given["other"], dtype="float32"))
    stats = engine.step(share(0, rank, world), WithKl(Cispo(), job["estimator"], job["coefficient"]))
    state = saved(engine, f"{given['name']}-{job['name']}")
    found = {}
    for name, shape in state.header.parameters.items():
        flat = torch.empty(torch.Size(shape).numel())
        state.read(name, "exp_avg", 0, flat)
        found[name] = flat.view(shape) / 0.1
    engine.close()
    return {"loss": stats.loss, "kl": stats.loss_means["reference_kl"], "gradient": found}


def start_kl(engine: Engine) -> dict[str, float]:
    if rank == 0:
        return engine.start_kl()
    engine.logprobs([])
    return {}


def resume(job: dict[str, Any]) -> dict[str, Any]:
    """Three steps from the reference itself; the third again after a restart from the checkpoint of the second."""
    loss = WithKl(Cispo(), "k2", 0.5)
    start = load_model(given["start"], dtype="float32")
    engine = engine_of(job)
    engine.set_reference(start)
    sample = whole_batch(0)["sequences"] if rank == 0 else []
    engine.keep_start([Sequence(one.prompt, one.completion) for one in sample])
    kl, since_start = [], [start_kl(engine)]
    for step in range(2):
        kl.append(engine.step(share(step, rank, world), loss).loss_means["reference_kl"])
        since_start.append(start_kl(engine))
    state = f"{given['name']}-{job['name']}"
    saved(engine, state)
    write_weights(engine, out / f"{state}.safetensors", ranks)
    with pytest.raises(OSError, match="No such file"):  # on every rank, though rank 0 alone writes
        write_weights(engine, out / "missing" / "weights.safetensors", ranks)
    written = parameters(engine)
    kl.append(engine.step(share(2, rank, world), loss).loss_means["reference_kl"])
    final = parameters(engine)
    engine.close()

    again = engine_of(job)
    again.load(out / state)
    start_again = start_kl(again)
    again.set_reference(load_model(given["start"], dtype="float32"))
    kl_again = again.step(share(2, rank, world), loss).loss_means["reference_kl"]
    final_again = parameters(again)
    again.close()
    return {
        "kl": kl,
        "kl_again": kl_again,
        "since_start": since_start,
        "start_again": start_again,
        "final": final,
        "final_again": final_again,
        "written": written,
        "file": out / f"{state}.safetensors",
    }


results = {}
unshared = Policy.variable_length
for job in given["jobs"]:
    if job.get("packed"):
        # transformers separates the sequences of a row by their positions, with sdpa too.
        Policy.variable_length = property(lambda self: True)  # type: ignore[method-assign, assignment]
    results[job["name"]] = globals()[job["do"]](job)
    Policy.variable_length = unshared  # type: ignore[method-assign]
torch.save(results, out / f"{given['name']}-{rank}.pt")
destroy_process_group()
