"""Rollouts with drafts from past responses, beside what vLLM has: tokens a verification, and seconds.

A run on op-graph problems gives the weights of three epochs, really trained: a warm start on worked solutions, then
reinforcement learning on 48 prompts, six steps an epoch. Each rival then samples all prompts under the weights of the first
epoch, which is not measured, and under those of the second and third, which are loaded into the living server as an update is.

    none      no speculation
    ngram     vLLM's own: the longest match in the sequence itself
    suffix    vLLM's suffix decoding (needs --arctic), its cache of all prompts warm from epoch to epoch
    cold      the same with no cache: a sequence's own text
    history   ours
    restored  ours, in a server that starts after the first epoch and is given its responses

The bound is what the model itself would draft: its likeliest token at each position of what was sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from interplay import check, see_through, write_examples

from scalerl_cli.main import main as scalerl

EPOCHS = 3
PROMPTS, COMPLETIONS, PROMPTS_A_STEP = 48, 16, 8
STEPS_AN_EPOCH = PROMPTS // PROMPTS_A_STEP
MAX_TOKENS = 320


def training_run(quick: bool) -> dict[str, Any]:
    """A warm start of some hundred steps leaves a model that writes solutions, of which a sixth to a half are right."""
    source = {"operations": [2, 4], "contexts": {"zoo": "1"}, "distractors": 0}
    return {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "rollouts"},
        "spec": {
            "model": {
                "scratch": {
                    "layers": 4,
                    "hiddenSize": 192,
                    "attentionHeads": 6,
                    "intermediateSize": 576,
                    "vocabularySize": 768,
                },
                "dtype": "float32",
                "contextTokens": 640,
            },
            "task": {
                "opGraph": source | {"seed": 7, "size": PROMPTS + 8},
                "verifier": {"name": "opgraph-blend"},
                "heldOut": {"size": 8},
            },
            "warmStart": {
                "steps": 10 if quick else 600,
                "batchSize": 32,
                "learningRate": "3e-3",
                "jsonl": {"path": "worked.jsonl"},
            },
            "recipe": {
                "promptsPerStep": PROMPTS_A_STEP,
                "completionsPerPrompt": COMPLETIONS,
                "maxCompletionTokens": MAX_TOKENS,
                "curriculum": {"uniform": {}},
                "length": {"none": {}},
                "zeroVarianceFilter": False,
                "optimizer": {"learningRate": "3e-4", "warmupSteps": 4},
                "offPolicy": {"pipeline": {"maxStalenessSteps": 1}},
            },
            "generator": {"replicas": 1, "cpuThreads": 1, "kvCache": "256Mi"},
            "trainer": {"replicas": 1, "cpuThreads": 1, "zeroStage": 1},
            "evaluation": {"everySteps": 100, "samplesPerPrompt": 2},
            "checkpoint": {"everySteps": STEPS_AN_EPOCH, "keep": 10},
            "budget": {"maxSteps": EPOCHS * STEPS_AN_EPOCH},
        },
    }


def models(folder: Path, quick: bool) -> list[Path]:
    """The weights of each epoch, made if they are missing."""
    source = {
        "operations": [2, 4],
        "contexts": {"zoo": "1"},
        "modes": ["forward"],
        "distractors": 0,
        "seed": 8,
    }
    write_examples(folder / "worked.jsonl", 400 if quick else 60_000, [(source, 1.0)])
    directory = see_through(training_run(quick), folder, "run")
    made = []
    for epoch in range(1, EPOCHS + 1):
        to = folder / f"epoch-{epoch}"
        if not to.exists():
            step = str(epoch * STEPS_AN_EPOCH)
            check(scalerl(["export", str(directory), "--to", str(to), "--step", step]))
        made.append(to)
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(models(folder, len(sys.argv) > 2))
