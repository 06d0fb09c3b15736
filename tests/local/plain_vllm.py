"""What plain vLLM makes of a model's folder: ``python plain_vllm.py MODEL ASKED`` prints it as JSON.

ASKED holds lists of token ids; the answer to each: log-probabilities after the first, and the greedy continuation.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

# As the run's own servers: no worker process beside the engine's, no compiler.
os.environ |= {
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    gc.disable()  # most of the objects are those of imports, which stay
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(sys.argv[2]).read_text())
    llm = LLM(
        model=sys.argv[1],
        # Left to choose, vLLM computes a float32 model in bfloat16.
        dtype=json.loads(Path(sys.argv[1], "config.json").read_text())["dtype"],
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend="uni",
    )
    parameters = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in asked]
    answers = llm.generate(prompts, parameters, use_tqdm=False)
    found = [
        {
            "logprobs": [
                row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
            ],
            "greedy": list(answer.outputs[0].token_ids),
        }
        for ids, answer in zip(asked, answers, strict=True)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
