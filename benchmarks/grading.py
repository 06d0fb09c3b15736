"""Completions graded per second by one worker, verifier by verifier, and what a killed grader costs.

Groups of 16 short completions of which half are right, through the real pool: child process, limits, sockets.

    python benchmarks/grading.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from scalerl_tasks import GradingPool, GymTask, Prompt, VerifierConfig, open_reasoning_gym

GROUP = 16
TASK = GymTask(
    "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}, seed=1, size=100
)
VERIFIERS = (
    VerifierConfig("exact"),
    VerifierConfig("number"),
    VerifierConfig("reasoning-gym", task=TASK),
    VerifierConfig("math-verify"),
)
# A scorer that multiplies whatever numbers it is given: minutes for these.
FACTORS = VerifierConfig("reasoning-gym", task=GymTask("prime_factorization", {}, seed=1, size=5))
FOREVER = " × ".join(["9" * 4000] * 2000)
TIMEOUT_SECONDS = 0.2


async def rate(verifier: VerifierConfig, seconds: float) -> dict[str, float]:
    """Start-up time, and completions per second with eight groups waiting at any time."""
    source = open_reasoning_gym(TASK.name, TASK.parameters, seed=TASK.seed, size=TASK.size)
    prompts = [source[i] for i in range(len(source))]
    begin = time.perf_counter()
    async with GradingPool(verifier) as pool:
        started = time.perf_counter() - begin
        graded, begin = 0, time.perf_counter()

        async def ask(first: int) -> None:
            nonlocal graded
            for i in range(first, 10**9, 8):
                if time.perf_counter() - begin > seconds:
                    return
                prompt = prompts[i % len(prompts)]
                completions = [
                    f"I get <answer>{prompt.answer if j % 2 else j}</answer>" for j in range(GROUP)
                ]
                graded += len(await pool.score_group(prompt, completions))

        await asyncio.gather(*map(ask, range(8)))
        return {"start_seconds": started, "completions_per_second": graded / (time.perf_counter() - begin)}


async def replacement(kills: int) -> float:
    """Seconds that a completion which hangs costs beyond its own timeout: kill, fork, and the next one's grade."""
    prompt = Prompt("1", "Factorize 6", "2 × 3")
    async with GradingPool(FACTORS, timeout_seconds=TIMEOUT_SECONDS) as pool:
        await pool.score_group(prompt, [prompt.answer])
        begin = time.perf_counter()
        await pool.score_group(prompt, [FOREVER, prompt.answer] * kills)
        assert pool.counts.timeouts == kills
        return (time.perf_counter() - begin) / kills - TIMEOUT_SECONDS


async def main(quick: bool) -> None:
    figures: dict[str, float] = {}
    for verifier in VERIFIERS:
        found = await rate(verifier, 1.0 if quick else 10.0)
        print(
            f"{verifier.name:14} {found['completions_per_second']:10,.0f}/s   start {found['start_seconds']:.2f} s"
        )
        figures |= {f"{verifier.name}_{name}": round(value, 3) for name, value in found.items()}
    figures["replacement_seconds"] = round(await replacement(3 if quick else 20), 4)
    print(f"a grader is replaced in {figures['replacement_seconds'] * 1000:.0f} ms")
    print(json.dumps({"benchmark": "grading", "figures": figures}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds in all")
    asyncio.run(main(parser.parse_args().quick))
