"""One rank with the real engine: answers jobs over a pipe until it is closed.

A job is a dictionary: ``settings`` of the engine, ``recipe``, ``shards`` (this rank's, one a step), ``shared_rows`` (as
under variable-length kernels, which a CPU does not have; the mask of ``sdpa`` gives the same), ``keep`` (whether the
engine stays for later jobs of the same settings), ``resumed`` (a folder for each step after which another engine continues
from a checkpoint). The answer: of each step its ``StepStats``, and the pieces that this
rank owns of the weights and of Adam's first moment after it.
"""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from scalerl_trainer.algo.losses.make_loss import make_loss
from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.models import load_model
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.shard_conversion import rank_batch

given: dict[str, Any] = SERVER  # type: ignore[name-defined]  # noqa: F821
pipe: Connection = given["pipe"]

torch.set_num_threads(1)
device = init_process_group(
    Rank(given["rank"], given["world"], given["rank"], "127.0.0.1", given["port"]),
    device="cpu",
    timeout_seconds=240,
)
kept: dict[str, Engine] = {}


def engine_of(job: dict[str, Any]) -> Engine:
    micro_batch_tokens = job["settings"]["micro_batch_tokens"]
    key = repr({**job["settings"], "micro_batch_tokens": None})
    engine = kept.pop(key, None)
    if engine is None:
        settings = EngineSettings(**job["settings"])
        engine = Engine(load_model(given["model"], dtype="float32"), settings, device)
        if job["recipe"].proximal_updates:
            engine.keep_proximal(load_model(given["model"], dtype="float32"))
    # Nothing but the packing reads it.
    engine.settings = replace(engine.settings, micro_batch_tokens=micro_batch_tokens)
    if job["keep"]:
        kept[key] = engine
    return engine


while True:
    try:
        job = pipe.recv()
    except EOFError:
        break
    Policy.variable_length = property(lambda _, shared=job["shared_rows"]: shared)  # type: ignore[assignment, misc]
    engine = engine_of(job)
    answer = []
    for shard in job["shards"]:
        updates = job["recipe"].proximal_updates
        if updates and shard.step % updates == 0:
            engine.set_proximal()
        stats = engine.step(rank_batch(shard, job["recipe"]).batch, make_loss(job["recipe"]))
        pieces = [
            (piece.name, piece.start, {key: value.numpy().copy() for key, value in piece.values.items()})
            for piece in engine._trained.pieces()
        ]
        answer.append((stats, pieces))
        if folder := job.get("resumed", {}).get(shard.step):
            folder.mkdir(exist_ok=True)
            torch.distributed.barrier()
            engine.save(folder)
            torch.distributed.barrier()
            engine.close()
            kept.clear()
            engine = engine_of({**job, "keep": False})
            engine.load(folder)
    if not job["keep"]:
        engine.close()
    pipe.send(answer)
destroy_process_group()
