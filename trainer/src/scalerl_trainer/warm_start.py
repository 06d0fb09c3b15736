"""Runs the warm start (:mod:`.sft`) on the task's solutions, before the first step."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_api.spec import RunSpec
from scalerl_tasks import Task, open_task
from scalerl_trainer.engine import Engine, StepStats
from scalerl_trainer.errors import BadBatchError, Stopped, WarmStartError
from scalerl_trainer.models import load_tokenizer
from scalerl_trainer.ranks import Ranks
from scalerl_trainer.sft import warm_start

log = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 50


def run_warm_start(engine: Engine, spec: RunSpec, model: Path, ranks: Ranks, stop: threading.Event) -> None:
    """Run ``spec.warmStart`` on training prompts. A collective.

    Raises:
        Stopped: on all ranks, once ``stop`` is set on one.
        WarmStartError: an example is empty, or longer than a micro-batch.
    """
    wanted = spec.warm_start
    assert wanted is not None
    tokenizer = load_tokenizer(str(model), chat=spec.task.prompt.format == "Chat")

    def show(step: int, stats: StepStats) -> None:
        if ranks.is_leader and (step + 1) % _LOG_EVERY_STEPS == 0:
            log.info("warm start %d/%d: loss %.4f", step + 1, wanted.steps, stats.loss)
        if any(ranks.all_gather(stop.is_set())):
            raise Stopped(f"stopped after step {step + 1} of the warm start; the next start repeats it")

    try:
        done = warm_start(
            engine,
            tokenizer,
            solved_pairs(open_task(spec.task), spec, tokenizer, wanted.steps * wanted.batch_size),
            steps=wanted.steps,
            batch_size=wanted.batch_size,
            learning_rate=float(wanted.learning_rate),
            stop_at=float(wanted.stop_at_pass_rate) if wanted.stop_at_pass_rate else None,
            rank=ranks.rank,
            world=ranks.world,
            seed=spec.seed,
            on_step=show,
        )
    except BadBatchError as error:
        raise WarmStartError(f"warmStart: {error}") from error
    if ranks.is_leader:
        log.info(
            "warm start: %d steps, loss %.4f, pass rate %.3f, %.1f s",
            *(done.steps, done.loss, done.solved, done.seconds),
        )


def solved_pairs(task: Task, spec: RunSpec, tokenizer: Any, most: int) -> list[tuple[list[int], str]]:
    """Up to ``most`` training prompts, as token ids, with their worked solutions; the same on all ranks.

    The token ids are those that the actor sends to the server: with the tokenizer's special tokens for ``Raw``, in the
    chat template for ``Chat``.

    Raises:
        BadBatchError: a prompt has neither solution nor answer.
    """
    order = np.random.default_rng(spec.seed).permutation(len(task.train))[:most]
    pairs = []
    for index in order:
        prompt = task.train[int(index)]
        rendered = task.render(prompt)
        if spec.task.prompt.format == "Chat":
            ids = tokenizer.apply_chat_template(
                rendered.messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            ids = tokenizer.encode(rendered.user, add_special_tokens=True)
        try:
            pairs.append((list(ids), prompt.worked_solution))
        except ValueError as error:
            raise BadBatchError(str(error)) from error
    return pairs
