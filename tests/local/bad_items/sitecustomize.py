"""Bad items that no data brings about, put into the real processes of a run that has this folder on PYTHONPATH.

Python imports this module when an interpreter starts. It changes two of a run's processes, each at one boundary:

- the actor: in vLLM's answer to every prompt for which :func:`is_clamped` is true, the first token of the first
  completion has the log-probability -9999, which vLLM writes for one that is missing, minus infinity or NaN.
- the trainer's rank 0: at the steps in FAULTY_STEPS (such as ``20,40``) the loss is not a number.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable

CLAMPED_LOGPROB = -9999.0
_ONE_IN = 11


def is_clamped(prompt_token_ids: Iterable[int]) -> bool:
    """Whether the first token of the first completion of this prompt has no usable log-probability."""
    return zlib.crc32(repr([int(token) for token in prompt_token_ids]).encode()) % _ONE_IN == 0


def clamp_logprobs() -> None:
    import json

    from scalerl_generator.vllm_client import VllmClient

    call = VllmClient.call

    async def clamped(self, method, path, body, timeout_seconds):
        answer = await call(self, method, path, body, timeout_seconds)
        sampled = path == "/inference/v1/generate" and "prompt_logprobs" not in body["sampling_params"]
        if not sampled or not is_clamped(body["token_ids"]):
            return answer
        reply = json.loads(answer)
        first = min(reply["choices"], key=lambda choice: choice["index"])
        first["logprobs"]["content"][0]["logprob"] = CLAMPED_LOGPROB
        return json.dumps(reply).encode()

    VllmClient.call = clamped


def break_losses(steps: set[int]) -> None:
    from dataclasses import replace

    from scalerl_trainer.worker import Worker

    train = Worker.train

    def faulty(self):
        if self.version not in steps or self.ranks.rank != 0:
            return train(self)
        loss = self.loss
        self.loss = lambda tokens: replace(found := loss(tokens), loss=found.loss * float("nan"))
        try:
            return train(self)
        finally:
            self.loss = loss

    Worker.train = faulty


if "scalerl_generator.actor" in sys.orig_argv[1:3]:
    clamp_logprobs()
if "scalerl_trainer.main" in sys.orig_argv[1:3]:
    break_losses({int(step) for step in os.environ["FAULTY_STEPS"].split(",")})
