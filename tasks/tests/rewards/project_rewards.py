"""Rewards as projects write them: for verl, for TRL, and for this project."""

import asyncio
import os
import re
import subprocess
import time

from helper_of_rewards import last_number

print("imported")  # nothing that is printed may reach the protocol


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's documentation writes a custom reward function."""
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"no reward for {data_source=}")
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return {
        "score": 1.0 if found and found[-1].replace(",", "") == ground_truth else 0.0,
        "seen": extra_info["index"],
    }


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    """For verl's batch reward manager."""
    return [bonus + float(truth in text) for text, truth in zip(solution_strs, ground_truths, strict=True)]


def short_compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """As the files of verl/utils/reward_score: without data_source and extra_info."""
    found = last_number(solution_str)
    return 0 if found is None else score if found == ground_truth else format_score


def countdown(solution_str, ground_truth):
    """Evaluates an equation of the completion, as rewards for countdown do; ground_truth is a dict."""
    match = re.search(r"<answer>([0-9+\-*/() ]+)</answer>", solution_str)
    if match is None:
        return 0.0
    used = sorted(int(n) for n in re.findall(r"\d+", match[1]))
    if used != sorted(ground_truth["numbers"]):
        return 0.1
    return 1.0 if eval(match[1], {"__builtins__": None}, {}) == ground_truth["target"] else 0.1


def format_reward(completions, **kwargs):
    """As TRL's documentation writes one for conversations."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", c) else 0.0 for c in contents]


def reward_len(completions, target_length=20.0, **kwargs):
    """As TRL's quickstart."""
    return [-abs(target_length - len(completion)) for completion in completions]


def accuracy(completions, ground_truth, prompts, log_metric=None, **kwargs):
    """None where the row is of another kind."""
    log_metric("accuracy", 1.0)
    assert len(prompts) == len(completions)
    return [
        None if truth == "skip" else float(truth in text)
        for text, truth in zip(completions, ground_truth, strict=True)
    ]


async def judge(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [len(text) / 10 for text in completions]


begun = []


async def slow_one(completion, answer):
    """Waits until 21 calls have begun, which never happens one after the other."""
    begun.append(completion)
    while len(begun) < 21:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if completion == "bad":
        raise ValueError("refused")
    return completion == answer


def score(prompt, completion, answer, metadata):
    """Whatever a completion asks for."""
    print("x" * 100_000)
    before = dict(metadata)
    metadata.clear()
    metadata["changed"] = True
    match completion:
        case "raise":
            raise ValueError("cannot read this")
        case "raise nothing":
            raise AssertionError
        case "exit":
            raise SystemExit(1)
        case "text":
            return "0.5"
        case "nan":
            return float("nan")
        case "none":
            return None
        case "list":
            return [1.0]
        case "dict":
            return {"reward": 1}
        case "high":
            return 2
        case "huge":
            return 10**400
        case "slow":
            time.sleep(60)
        case "die":
            os._exit(7)
        case "memory":
            return len(bytes(4 << 30))
        case "child":
            subprocess.Popen(["sleep", "600.25"])
            time.sleep(60)
    return before == {"row": [1, 2]} and completion == answer


def ranks(prompt, completions, answer, metadata, wrong_number=0, text=False):
    completions.sort()
    if text:
        return "0" * len(completions)
    if wrong_number:
        return [0.0] * (len(completions) + wrong_number)
    if "slow" in completions:
        time.sleep(60)
    if "die" in completions:
        os._exit(1)
    return [at / 10 for at in range(len(completions))]


def with_parts(completion):
    return {"score": 0.5, "length": len(completion), "kind": "not a number"}


with_parts.part_names = ("length",)
