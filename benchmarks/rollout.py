"""Rollouts with drafts from past responses, beside what vLLM has: acceptance length, and seconds.

A run on op-graph problems gives the weights of three epochs, really trained: a warm start on worked solutions, then
reinforcement learning on 48 prompts, six steps an epoch. Each baseline then samples all prompts under the weights of the first
epoch, which is not measured, and under those of the second and third, which are loaded into the living server as an update is.

    none      no speculation
    ngram     vLLM's own: the longest match in the sequence itself
    suffix    vLLM's suffix decoding (needs --arctic), its cache of all prompts warm from epoch to epoch
    cold      the same with no cache: a sequence's own text
    history   ours
    restored  ours, in a server that starts after the first epoch and is given its responses

First what was sampled is replayed through each drafter, which is exact for drafts of one token a position, also at a higher
temperature, where past responses say less; then servers sample. The bound is what the model itself would draft: its likeliest
token at each position.

    make bench-rollout               # builds arctic-inference's suffix trees, then all of it
    python benchmarks/rollout.py --dir rollout --replay-only
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interplay import check, see_through, write_examples
from support.draft_baselines import Baseline as DraftBaseline
from support.draft_baselines import Ngram, Ours, Outcome, RhymeRL, Suffix, bound, replay
from support.vllm_process import VllmProcess
from transformers import AutoModelForCausalLM

from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_api.wire import prompt_digest
from scalerl_cli.main import main as scalerl
from scalerl_generator.drafts.draft_protocol import PastResponses
from scalerl_generator.drafts.drafter import Drafter
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.vllm_client import VllmClient
from scalerl_tasks.sources import open_tasks

Epoch = list[list[list[int]]]
"""Token ids by prompt and completion."""
EPOCHS = 3
PROMPTS, COMPLETIONS, PROMPTS_A_STEP = 48, 16, 8
STEPS_AN_EPOCH = PROMPTS // PROMPTS_A_STEP
MAX_TOKENS = 320
FACTORS, PROBABILITIES = (1.0, 2.0, 4.0), (0.05, 0.1, 0.2)
"""``max_spec_factor`` and ``min_token_prob`` of vLLM's ``suffix``."""


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
                "plugin": {"name": "opgraph", "parameters": source | {"seed": 7, "size": PROMPTS + 8}},
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
class Baseline:
    """options: of :mod:`scalerl_generator.vllm_server`. speculation: vLLM's own, in its own words."""

    options: tuple[str, ...] = ()
    speculation: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        own = ["--speculative-config", json.dumps(self.speculation)] if self.speculation else []
        return [*self.options, *(["--", *own] if own else [])]


def start_server(model: Path, baseline: Baseline, arctic: Path | None) -> VllmProcess:
    """A vLLM server with one baseline's drafts."""
    return VllmProcess(
        model,
        *("--dtype", "float32", "--max-model-len", "640", "--max-num-seqs", "256"),
        *("--kv-cache-bytes", str(512 << 20), "--stats", *baseline.arguments()),
        python_path=arctic,
    )


async def counter(client: VllmClient, name: str) -> float:
    """Of vLLM's own metrics; 0 if there is none."""
    text = (await client.call("GET", "/metrics", None, 30)).decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:_total)?\{{.*\}} (\S+)$", text, re.M))


async def load(client: VllmClient, model: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    await client.call("POST", "/collective_rpc", body, 120)


async def sample(
    client: VllmClient,
    prompts: list[list[int]],
    groups_at_once: int,
    salt: str,
    temperature: float = 1.0,
    n: int = COMPLETIONS,
) -> Epoch:
    """Completions of each prompt."""
    places = asyncio.Semaphore(groups_at_once)

    async def group(prompt: list[int]) -> list[list[int]]:
        key = prompt_digest(np.asarray(prompt, "<i4").tobytes()).hex()
        async with places:
            completions = await client.generate(
                prompt,
                n=n,
                max_tokens=MAX_TOKENS,
                temperature=temperature,
                cache_salt=salt,
                prompt_key=key,
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


async def sampled_epochs(folder: Path, made: list[Path], temperature: float) -> list[Epoch]:
    """Completions of all prompts under the weights of each epoch, without speculation; kept in a file."""
    file = folder / f"sampled-{temperature:g}.json"
    if not file.exists():
        prompts = prompts_of(folder)
        server = start_server(made[0], Baseline(), None)
        epochs = []
        try:
            await server.ready()
            async with server.client() as client:
                for at, model in enumerate(made):
                    await load(client, model)
                    epochs.append(await sample(client, prompts, 16, str(at), temperature))
                    await check_loaded(client, model, prompts[0] + epochs[-1][0][0])
        finally:
            server.stop()
        file.write_text(json.dumps(epochs))
    read: list[Epoch] = json.loads(file.read_text())
    return read


async def check_loaded(client: VllmClient, model: Path, tokens: list[int]) -> None:
    given = await client.prompt_logprobs(tokens)
    logprobs_tv = logprobs(AutoModelForCausalLM.from_pretrained(model), [tokens])[0, :-1]
    expected = logprobs_tv.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    if np.abs(expected - given).max() > 1e-3:
        raise RuntimeError(f"the server does not have the weights of {model}")


def logprobs(policy: Any, rows: list[list[int]]) -> torch.Tensor:
    """Of the token after each position, shape [rows, positions, vocabulary]."""
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        scores: torch.Tensor = torch.log_softmax(policy(padded).logits.float(), -1)
    return scores


def of_the_model(
    model: Path, prompts: list[list[int]], epoch: Epoch, temperature: float
) -> tuple[Outcome, float]:
    """What drafts of the likeliest token would yield, and the entropy in nats a token of what was sampled from."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    likeliest, entropies = [], []
    for prompt, completions in zip(prompts, epoch, strict=True):
        scores = logprobs(policy, [prompt + one for one in completions])[:, len(prompt) - 1 : -1]
        scores = torch.log_softmax(scores / temperature, -1)
        entropy = -(scores.exp() * scores).sum(-1)
        best = scores.argmax(-1)
        likeliest.append(
            [(best[i, : len(one)] == torch.tensor(one)).numpy() for i, one in enumerate(completions)]
        )
        entropies += [float(value) for i, one in enumerate(completions) for value in entropy[i, : len(one)]]
    return bound(likeliest), sum(entropies) / len(entropies)


def replayed(folder: Path, made: list[Path], temperature: float, with_suffix: bool) -> dict[str, Any]:
    """Acceptance length of each drafter over what was sampled; drafts of at most 32 tokens."""
    epochs = asyncio.run(sampled_epochs(folder, made, temperature))
    prompts = prompts_of(folder)
    prompts_t = [np.array(prompt, np.int32) for prompt in prompts]
    epochs_t = [[[np.array(one, np.int32) for one in group] for group in epoch] for epoch in epochs]
    limits = [of_the_model(m, prompts, e, temperature) for m, e in zip(made, epochs, strict=True)]
    baselines: dict[str, Callable[[], DraftBaseline]] = {"ngram": Ngram, "RhymeRL's rule": RhymeRL}
    if with_suffix:
        for factor in FACTORS:
            for probability in PROBABILITIES:
                baselines[f"suffix, {factor:g}, {probability:g}"] = partial(Suffix, factor, probability)
        baselines["suffix, no cache"] = partial(Suffix, 4.0, 0.1, 0)
    for threshold in (0.05, 0.2):
        baselines[f"history, {threshold:g}"] = partial(Ours, threshold)
    figures: dict[str, list[Outcome]] = {}
    for name, make in baselines.items():
        baseline = make()
        figures[name] = [replay(baseline, prompts_t, epoch) for epoch in epochs_t]
    figures["likeliest token"] = [limit for limit, _ in limits]
    entropy = [value for _, value in limits]
    print(
        f"temperature {temperature:g}: entropy {', '.join(f'{value:.2f}' for value in entropy)} nats a token"
    )
    print(
        f"{'acceptance length (draft length)':32}"
        + "".join(f"   epoch {at}    " for at in range(1, EPOCHS + 1))
    )
    for name, outcomes in figures.items():
        columns = "".join(
            f"{one.acceptance_length:7.2f} ({one.drafted / one.verifications:4.1f})" for one in outcomes
        )
        print(f"{name:32}{columns}")
    per_verification = {
        name: [round(one.acceptance_length, 3) for one in outcomes] for name, outcomes in figures.items()
    }
    return {"entropy": [round(value, 3) for value in entropy], "acceptance length": per_verification}


def drafting(folder: Path, made: list[Path]) -> dict[str, float]:
    """Microseconds a sequence and step with 256 sequences, and a stored token, on one core."""
    epochs = asyncio.run(sampled_epochs(folder, made, 1.0))
    prompts = [np.array(prompt, np.int32) for prompt in prompts_of(folder)[:16]]
    drafter = Drafter(256, 4_000_000, 32)
    started, tokens = time.process_time(), 0
    for at, prompt_t in enumerate(prompts):
        for one in epochs[0][at]:
            drafter.remember(at, prompt_t, np.array(one, np.int32))
            tokens += len(one)
    remembering = (time.process_time() - started) / tokens
    texts = [[*prompts[at].tolist(), *one] for at in range(16) for one in epochs[1][at]]
    longest = max(map(len, texts))
    rows_rt = np.zeros((256, longest), np.int32)
    for row, text in enumerate(texts):
        rows_rt[row, : len(text)] = text
    slots = np.array([drafter.begin(at, prompts[at]) for at in range(16) for _ in range(16)], np.int32)
    begun, ends = (
        np.array(lengths)
        for lengths in ([len(prompts[at // 16]) for at in range(256)], list(map(len, texts)))
    )
    seconds, drafts = 0.0, 0
    for step in range(1, longest):
        row_r = np.flatnonzero(begun + step <= ends).astype(np.int32)
        limit_r = np.full(len(row_r), 32, np.int32)
        started = time.process_time()
        drafter.propose(slots[row_r], row_r, rows_rt, (begun[row_r] + step).astype(np.int32), limit_r, 0.05)
        seconds += time.process_time() - started
        drafts += len(row_r)
    figures = {"us a sequence and step": 1e6 * seconds / drafts, "us a stored token": 1e6 * remembering}
    print(", ".join(f"{value:.1f} {name}" for name, value in figures.items()))
    return figures


BASELINES = {
    "none": Baseline(),
    "ngram": Baseline(
        speculation={
            "method": "ngram",
            "num_speculative_tokens": 8,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        }
    ),
    "suffix": Baseline(
        speculation={
            "method": "suffix",
            "num_speculative_tokens": 32,
            "suffix_decoding_max_spec_factor": 4.0,
            "suffix_decoding_min_token_prob": 0.05,
        }
    ),
    "history": Baseline(options=("--max-draft-tokens", "32")),
    "restored": Baseline(options=("--max-draft-tokens", "32")),
}
"""``suffix`` has the settings that are best in the replay."""


@dataclass(frozen=True)
class Batch:
    """groups: in flight. completions: of each. prompts: that are sampled."""

    groups: int
    completions: int
    prompts: int


BATCHES = {"full, 256 sequences": Batch(16, 16, PROMPTS), "tail, 8 sequences": Batch(1, 8, 16)}


async def fight(
    folder: Path, made: list[Path], name: str, arctic: Path | None
) -> dict[str, dict[str, float]]:
    """Seconds, seconds of processor and acceptance length of the second epoch, in batches of each size."""
    prompts = prompts_of(folder)
    figures = {}
    for label, batch in BATCHES.items():
        server = start_server(made[0], BASELINES[name], arctic)
        try:
            await server.ready()
            async with server.client() as client:
                asked = prompts[: batch.prompts]
                first = await sampled_epochs(folder, made, 1.0)
                if name == "restored":
                    for prompt, completions in zip(asked, first[0], strict=False):
                        wire = np.array(prompt, "<i4").tobytes()
                        past = [np.array(one, "<i4").tobytes() for one in completions]
                        await client.remember(PastResponses(prompt_digest(wire).hex(), wire, past))
                else:
                    await sample(client, asked, 16, "0")
                await load(client, made[1])
                accepted = await counter(client, "spec_decode_num_accepted_tokens")
                cpu, started = server.cpu_seconds(), time.perf_counter()
                sampled = await sample(client, asked, batch.groups, "1", n=batch.completions)
                seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - cpu
                accepted = await counter(client, "spec_decode_num_accepted_tokens") - accepted
        finally:
            server.stop()
        tokens = sum(len(one) for group in sampled for one in group)
        figures[label] = {
            "tokens": tokens,
            "tokens a second": tokens / seconds,
            "tokens a processor second": tokens / cpu,
            "acceptance length": tokens / (tokens - accepted),
        }
        print(
            f"{name:10} {label:22} {tokens / seconds:8.0f} tokens/s {tokens / cpu:8.0f} tokens/s of processor "
            f"{tokens / (tokens - accepted):6.2f} acceptance length",
            flush=True,
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="keeps run, weights and samples; default: a temporary one")
    parser.add_argument(
        "--arctic", type=Path, help="folder with arctic_inference (make bench-rollout builds it)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="weights that were hardly trained, and no servers of baselines"
    )
    parser.add_argument("--replay-only", action="store_true")
    arguments = parser.parse_args()
    if arguments.arctic is not None:
        sys.path.insert(0, str(arguments.arctic))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.dir or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        made = models(folder, arguments.quick)
        result: dict[str, Any] = {"benchmark": "rollout"}
        for temperature in (1.0,) if arguments.quick else (1.0, 1.5):
            result[f"replay at {temperature:g}"] = replayed(
                folder, made, temperature, arguments.arctic is not None
            )
        result["drafting"] = drafting(folder, made)
        if not (arguments.quick or arguments.replay_only):
            for name in BASELINES:
                if name != "suffix" or arguments.arctic is not None:
                    result[name] = asyncio.run(fight(folder, made, name, arguments.arctic))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
