"""What the workers of the tests of mixtures of experts have in common: a rank, and its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from engines_and_stages import engine_of

from scalerl_trainer.engine import Engine, EngineSettings, Rank, destroy_process_group, init_process_group
from scalerl_trainer.models import load_model


@contextmanager
def experts_engine(given: dict[str, Any], **settings: Any) -> Iterator[Engine]:
    """An engine of the model in ``given["folder"]``, on this rank of the group of ``given``."""
    torch.set_num_threads(1)
    device = init_process_group(
        Rank(given["rank"], given["world"], given["rank"], "127.0.0.1", given["port"]),
        device="cpu",
        timeout_seconds=200,
    )
    engine = Engine(
        load_model(given["folder"], dtype="float32"),
        EngineSettings(
            **engine_of(given["stage"]),
            dtype="float32",
            warmup_steps=0,
            learning_rate=1e-3,
            micro_batch_tokens=32,
            ratio_guard=None,
            activation_checkpointing=given["checkpointing"],
            **settings,
        ),
        device,
    )
    yield engine
    engine.close()
    destroy_process_group()
