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
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from interplay import check, see_through, write_examples
from publish import free_port
from transformers import AutoModelForCausalLM

from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_api.wire import prompt_digest
from scalerl_cli.main import main as scalerl
from scalerl_generator.prompt_codec import PromptCodec
from scalerl_generator.vllm_client import VllmClient
from scalerl_tasks.sources import open_tasks

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
            exported = folder / f"exported-{epoch}"
            step = str(epoch * STEPS_AN_EPOCH)
            check(scalerl(["export", str(directory), "--to", str(exported), "--step", step]))
            untie(exported, to)
        made.append(to)
    return made


def untie(model: Path, to: Path) -> None:
    """Give the head weights of its own: vLLM's CPU build keeps the old ones of a tied head when it loads others from a file."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.config.tie_word_embeddings = False
    policy.lm_head.weight = torch.nn.Parameter(policy.get_input_embeddings().weight.detach().clone())
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors"))
    policy.save_pretrained(to)


@dataclass(frozen=True)
class Rival:
    """options: of :mod:`scalerl_generator.vllm_server`. speculation: vLLM's own, in its own words."""

    options: tuple[str, ...] = ()
    speculation: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        own = ["--speculative-config", json.dumps(self.speculation)] if self.speculation else []
        return [*self.options, *(["--", *own] if own else [])]


class Server:
    """A vLLM server with one rival's drafts."""

    def __init__(self, model: Path, rival: Rival, path: Path | None) -> None:
        self.port, self.token = free_port(), secrets.token_hex(8)
        self._log = tempfile.NamedTemporaryFile(suffix=".vllm.log")  # noqa: SIM115  # closed with the server
        environ = os.environ | {"SCALERL_VLLM_TOKEN": self.token}
        if path is not None:
            environ["PYTHONPATH"] = str(path)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "scalerl_generator.vllm_server", "--model", str(model)),
                *("--port", str(self.port), "--dtype", "float32", "--max-model-len", "640"),
                *("--max-num-seqs", "256", "--kv-cache-bytes", str(512 << 20), "--stats"),
                *rival.arguments(),
            ],
            env=environ,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    async def ready(self, client: VllmClient) -> None:
        deadline = time.monotonic() + 300
        while not await client.health():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(Path(self._log.name).read_text()[-3000:])
            await asyncio.sleep(0.3)

    def cpu_seconds(self) -> float:
        """Of all its processes."""
        members = [psutil.Process(self._process.pid)]
        members += members[0].children(recursive=True)
        return sum(sum(one.cpu_times()[:2]) for one in members)

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        self._log.close()


async def counter(client: VllmClient, name: str) -> float:
    """Of vLLM's own metrics; 0 if there is none."""
    text = (await client._call("GET", "/metrics", None, 30)).decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:_total)?\{{.*\}} (\S+)$", text, re.M))


async def load(client: VllmClient, model: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    await client._call("POST", "/collective_rpc", body, 120)


async def sample(
    client: VllmClient, prompts: list[list[int]], groups_at_once: int, salt: str, n: int = COMPLETIONS
) -> list[list[list[int]]]:
    """Completions of each prompt."""
    places = asyncio.Semaphore(groups_at_once)

    async def group(prompt: list[int]) -> list[list[int]]:
        key = prompt_digest(np.asarray(prompt, "<i4").tobytes()).hex()
        async with places:
            completions = await client.generate(
                prompt, n=n, max_tokens=MAX_TOKENS, cache_salt=salt, prompt_key=key
            )
        return [one.token_ids.tolist() for one in completions]

    return list(await asyncio.gather(*map(group, prompts)))


def prompts_of(folder: Path) -> list[list[int]]:
    spec = load_run(folder / "run.yaml").spec
    paths = RunPaths(folder / "run")
    tasks = open_tasks(spec, paths.root)
    codec = PromptCodec(paths.base_model, spec.task.tasks[0].section.prompt, spec.model.context_tokens)
    train = tasks.tasks[0].train
    return [codec.encode(train[at], MAX_TOKENS).token_ids for at in range(len(train))]


async def sampled_epochs(folder: Path, made: list[Path]) -> list[list[list[list[int]]]]:
    """Completions of all prompts under the weights of each epoch, without speculation."""
    file = folder / "sampled.json"
    if not file.exists():
        prompts = prompts_of(folder)
        server = Server(made[0], Rival(), None)
        epochs = []
        try:
            async with VllmClient(f"http://127.0.0.1:{server.port}", server.token) as client:
                await server.ready(client)
                for at, model in enumerate(made):
                    await load(client, model)
                    epochs.append(await sample(client, prompts, 16, str(at)))
                    await check_loaded(client, model, prompts[0] + epochs[-1][0][0])
        finally:
            server.stop()
        file.write_text(json.dumps(epochs))
    read: list[list[list[list[int]]]] = json.loads(file.read_text())
    return read


async def check_loaded(client: VllmClient, model: Path, tokens: list[int]) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        own = torch.log_softmax(policy(torch.tensor([tokens])).logits[0].float(), -1)[:-1]
    expected = own.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    given = await client.prompt_logprobs(tokens)
    if np.abs(expected - given).max() > 1e-3:
        raise RuntimeError(f"the server does not have the weights of {model}")


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made = models(folder, len(sys.argv) > 2)
    epochs = asyncio.run(sampled_epochs(folder, made))
    for groups in epochs:
        print(sum(len(c) for g in groups for c in g) / (PROMPTS * COMPLETIONS))
