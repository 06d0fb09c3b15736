"""Writes the first observations of an environment server as the prompts of a task: python prompts.py URL COUNT > prompts.jsonl

Needs openenv (pip install openenv), in an environment of its own: it cannot be installed beside vLLM. Each prompt keeps its seed, with
which the run resets the environment again. Where observations are equal, their number is added: held-out prompts differ in their text.
"""

import json
import sys

from openenv.core.generic_client import GenericEnvClient

url, count = sys.argv[1], int(sys.argv[2])
prompts = []
with GenericEnvClient(base_url=url).sync() as environment:
    for seed in range(count):
        observation = dict(environment.reset(seed=seed).observation)
        observation.pop("metadata", None)
        texts = [value for value in observation.values() if isinstance(value, str)]
        prompts.append(texts[0] if len(texts) == 1 else json.dumps(observation))
distinct = len(set(prompts)) == count
for seed, prompt in enumerate(prompts):
    text = prompt if distinct else f"{prompt} ({seed})"
    print(json.dumps({"id": f"seed-{seed}", "prompt": text, "answer": "-", "metadata": {"seed": seed}}))
