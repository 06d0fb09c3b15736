"""One rank of TRL's side of ``benchmarks/train_step.py``: TRL's GRPO trainer with given sequences in place of generated ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class _Given(GRPOTrainer):  # type: ignore[misc]
    """Trains on ``batches``, one a step, each padded to its longest sequence, which is what TRL's generation returns."""

    batches: list[list[list[int]]]
    prompt_tokens: int
    on_batch: Callable[[], None]

    def _generate_and_score_completions(self, inputs: object) -> dict[str, torch.Tensor]:
        rows = self.batches[self.state.global_step]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        at = self.prompt_tokens
        self.on_batch()
        return {
            "prompt_ids": ids[:, :at],
            "prompt_mask": mask[:, :at],
            "completion_ids": ids[:, at:],
            "completion_mask": mask[:, at:],
            "advantages": torch.linspace(-1, 1, len(rows)),
            "num_items_in_batch": self.accelerator.gather(mask[:, at:].sum()).sum(),
        }


class _Ends(TrainerCallback):  # type: ignore[misc]
    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def on_step_end(self, *_: object, **__: object) -> None:
        self._on_step()


def train(
    model: Any,
    batches: list[list[list[int]]],
    *,
    prompt_tokens: int,
    micro_batch: int,
    dtype: str,
    on_batch: Callable[[], None],
    on_step: Callable[[], None],
) -> None:
    """Take a step on each of ``batches``.

    Args:
        model: in float32; with ``dtype`` bfloat16 it is trained under autocast, TRL's default.
        batches: token ids of this rank's sequences, by step; equal numbers of sequences.
        micro_batch: sequences of a forward pass.
        on_batch: called before each step's forward pass.
        on_step: called after each step's update.
    """
    words = {"<pad>": 0, "<eos>": 1, "x": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="x")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    accumulation = len(batches[0]) // micro_batch
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            bf16=dtype == "bfloat16",
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            num_generations=2,
            loss_type="cispo",
            epsilon_high=5.0,
            beta=0.0,
            learning_rate=5e-7,
            weight_decay=0.01,
            max_grad_norm=1.0,
            max_steps=len(batches),
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = _Given(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 64),
            processing_class=tokenizer,
            callbacks=[_Ends(on_step)],
        )
        trainer.batches, trainer.prompt_tokens, trainer.on_batch = batches, prompt_tokens, on_batch
        torch.set_num_threads(1)
        trainer.train()
        wrapped = type(trainer.model_wrapped).__name__
        if (
            wrapped != "DistributedDataParallel"
            or int(os.environ["WORLD_SIZE"]) != trainer.accelerator.num_processes
        ):
            raise RuntimeError(f"TRL trained a {wrapped} on {trainer.accelerator.num_processes} ranks")
