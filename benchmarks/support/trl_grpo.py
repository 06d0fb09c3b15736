"""Runs TRL's GRPO trainer on a given model and prompts, and prints samples per second. Started by against_trl.py."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, COMPLETIONS = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--max-completion", required=True, type=int)
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()

    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    ends: list[float] = []
    lengths: list[int] = []

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(c.split()[-1:] == [a]) for c, a in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.monotonic())

    config = GRPOConfig(
        output_dir=arguments.output,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=PROMPTS * COMPLETIONS // arguments.micro_batch,
        num_generations=COMPLETIONS,
        max_completion_length=arguments.max_completion,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-7,
        max_steps=arguments.steps,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        callbacks=[Clock()],
    )
    trainer.train()
    # The first step warms up caches and is not counted.
    steps = len(ends) - 1
    rate = steps * PROMPTS * COMPLETIONS / (ends[-1] - ends[0])
    mean = sum(lengths) / len(lengths)
    json.dump({"samples_per_second": rate, "mean_tokens": mean, "steps": steps}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
