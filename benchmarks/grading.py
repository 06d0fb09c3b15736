"""Completions graded per second by one worker, verifier by verifier, what a killed grader costs, and the check of a file.

Groups of 16 short completions of which half are right, through the real pool: child process, limits, sockets. The file has 50,000
rows, each with another reference; it is read, and with each verifier checked as ``scalerl validate`` does: each reference is graded
as a reply, alone and in a box.

``--own``: the same comparison of numbers as a function of ``verifier.python``, in each signature, beside ``number``, alternating; and
the scores per second of a reward service on loopback, in another process.

    python benchmarks/grading.py [--quick] [--own]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scalerl_api.spec import RunSpec
from scalerl_tasks import GradingPool, GymTask, Prompt, ReasoningGymSource, VerifierConfig
from scalerl_tasks.grading.http_grader import HttpGrader, RewardService
from scalerl_tasks.python_function import PythonFunction
from scalerl_tasks.task_checks import task_problems

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


async def rate(verifier: VerifierConfig | HttpGrader, seconds: float) -> dict[str, float]:
    """Start-up time, and completions per second with eight groups waiting at any time."""
    source = ReasoningGymSource(TASK)
    prompts = [source[i] for i in range(len(source))]
    begin = time.perf_counter()
    async with verifier if isinstance(verifier, HttpGrader) else GradingPool(verifier) as pool:
        if isinstance(verifier, HttpGrader):  # it is there when it answers
            await pool.score_group(prompts[0], ["1"])
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


REFERENCES = {
    "exact": ("{}", "{} of these", "x = {}"),
    "number": ("{}", "{}/7", r"\${}"),
    "math-verify": ("{}", r"\frac{{{}}}{{7}}", r"{}\sqrt{{2}} \text{{ cm}}"),
}
"""Forms of the references, each of a third of the rows."""


def file_seconds(rows: int) -> dict[str, float]:
    """Seconds to read a file of so many rows, and beyond that to check its references with each verifier."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        for name, forms in REFERENCES.items():
            spec = RunSpec.model_validate(
                {
                    "model": {"path": folder, "contextTokens": 1024},
                    "task": {
                        "jsonl": {"path": str(path)},
                        "verifier": {"name": name},
                        "heldOut": {"size": 64},
                    },
                    "recipe": {"maxCompletionTokens": 512},
                    "budget": {"maxSteps": 1},
                }
            )
            with path.open("w", encoding="utf-8") as file:
                for at in range(rows):
                    row = {"prompt": f"Problem {at}: " + 40 * "word ", "answer": forms[at % 3].format(at)}
                    file.write(json.dumps(row) + "\n")
            for answers in (False, True):
                begin = time.perf_counter()
                problems = task_problems(spec, answers=answers)
                assert not problems, problems[:3]
                seconds = time.perf_counter() - begin
                if answers:
                    found[f"check_{name}_seconds"] = seconds - found["read_seconds"]
                else:
                    found["read_seconds"] = seconds
    return found


OWN = """
from functools import lru_cache

from scalerl_tasks.answers.extraction import extract
from scalerl_tasks.answers.quantity import last_quantity, read_quantity, same_quantity

read_reference = lru_cache(read_quantity)

def same(completion, answer):
    text, enclosed = extract(completion)
    given = read_quantity(text) if enclosed else last_quantity(text)
    return float(given is not None and same_quantity(read_reference(answer), given))

def score(prompt, completion, answer, metadata):
    return same(completion, answer)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return same(solution_str, ground_truth)

def reward(prompts, completions, answer, **kwargs):
    return [same(text, wanted) for text, wanted in zip(completions, answer)]
"""

SERVICE = """
import sys
from aiohttp import web

async def score(request):
    rows = (await request.json())["completions"]
    return web.json_response({"scores": [float(row["answer"] in row["completion"]) for row in rows]})

app = web.Application(client_max_size=1 << 28)
app.router.add_post("/", score)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


async def own(quick: bool) -> dict[str, float]:
    """Rates of functions in a file beside the verifier number, and of a service."""
    seconds, rounds = (0.5, 1) if quick else (4.0, 5)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.py"
        path.write_text(OWN)
        verifiers = {"number": VerifierConfig("number")} | {
            signature: VerifierConfig(
                "python", python=PythonFunction(name, path=str(path), signature=signature)
            )
            for signature, name in (("score", "score"), ("verl", "compute_score"), ("trl", "reward"))
        }
        for _ in range(rounds):
            for name, verifier in verifiers.items():
                rates.setdefault(name, []).append((await rate(verifier, seconds))["completions_per_second"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (Path(folder) / "service.py").write_text(SERVICE)
        process = subprocess.Popen([sys.executable, str(Path(folder) / "service.py"), str(port)])  # noqa: ASYNC220
        try:
            service = HttpGrader(RewardService(f"http://127.0.0.1:{port}/", batch=64, concurrency=4))
            found = await rate(service, seconds * rounds)
            rates["http"] = [found["completions_per_second"]]
        finally:
            process.terminate()
            process.wait()
    return {f"own_{name}_per_second": statistics.median(values) for name, values in rates.items()}


async def main(quick: bool, own_only: bool) -> None:
    if own_only:
        figures = {name: round(value, 1) for name, value in (await own(quick)).items()}
        print(json.dumps({"benchmark": "grading", "figures": figures}, indent=1))
        return
    await built_in(quick)


async def built_in(quick: bool) -> None:
    figures: dict[str, float] = {}
    for verifier in VERIFIERS:
        found = await rate(verifier, 1.0 if quick else 10.0)
        print(
            f"{verifier.name:14} {found['completions_per_second']:10,.0f}/s   start {found['start_seconds']:.2f} s"
        )
        figures |= {f"{verifier.name}_{name}": round(value, 3) for name, value in found.items()}
    figures["replacement_seconds"] = round(await replacement(3 if quick else 20), 4)
    print(f"a grader is replaced in {figures['replacement_seconds'] * 1000:.0f} ms")
    rows = 500 if quick else 50_000
    for name, seconds in (await asyncio.to_thread(file_seconds, rows)).items():
        print(f"{rows:,} rows, {name}: {seconds:.1f}")
        figures[f"rows_{name}"] = round(seconds, 2)
    print(json.dumps({"benchmark": "grading", "figures": figures}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds in all")
    parser.add_argument(
        "--own", action="store_true", help="functions of verifier.python and a reward service"
    )
    arguments = parser.parse_args()
    asyncio.run(main(arguments.quick, arguments.own))
