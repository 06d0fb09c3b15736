"""Op-graph problems made per second, solutions graded per second, and their lengths, on one core.

``--mutations`` grades so many broken solutions instead, and says how many raised. ``--guesses`` prints instead how often a
model is right that has learned only which answers are frequent, and how operations and edges compare.

    python benchmarks/opgraph.py [--quick] [--mutations 1000000 | --guesses]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator

from scalerl_extras.opgraph import CONTEXTS, MODES, OpGraphSource, OpGraphTask
from scalerl_extras.opgraph.render import Problem
from scalerl_tasks import VerifierConfig, open_verifier

WEIGHTS = dict.fromkeys(CONTEXTS, "0.25")
WORD = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
PIECES = (
    "Define ",
    " as ",
    "; so ",
    " = ",
    " + ",
    "x",
    "a",
    "(" * 40,
    "9" * 400,
    "</solution>",
    "<answer>",
    "\ud800",
    "²",
)


def problems(low: int, high: int) -> OpGraphSource:
    return OpGraphSource(OpGraphTask((low, high), WEIGHTS, ("forward", "reverse")))


def made_per_second(source: OpGraphSource, first: int, count: int) -> float:
    """Prompts with their solutions."""
    begin = time.process_time()
    for index in range(first, first + count):
        source[index]
    return count / (time.process_time() - begin)


def graded_per_second(operations: int, count: int) -> float:
    """One completion for each prompt, so that every gold solution is parsed too."""
    source, verifier = problems(operations, operations), open_verifier(VerifierConfig("opgraph-blend"))
    prompts = [source[index] for index in range(count)]
    begin = time.process_time()
    for prompt in prompts:
        verifier.score(prompt, prompt.worked_solution)
    return count / (time.process_time() - begin)


def mean_words(operations: int, count: int) -> tuple[float, float]:
    """Words, digits and marks of a prompt and of a solution."""
    source = problems(operations, operations)
    prompts = [source[index] for index in range(count)]
    return (
        sum(len(WORD.findall(prompt.text)) for prompt in prompts) / count,
        sum(len(WORD.findall(prompt.worked_solution)) for prompt in prompts) / count,
    )


def mutated(rng: random.Random, text: str) -> str:
    """Up to six edits: a span is dropped, doubled, moved, or replaced by a piece of notation."""
    for _ in range(rng.randint(1, 6)):
        start, at = rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((1, 1, 4, 30, 300)))
        span = text[start:end]
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:start] + text[end:]
        elif kind == 1:
            text = text[:start] + rng.choice(PIECES) + text[end:]
        elif kind == 2:
            text = text[:at] + span * rng.randint(1, 5) + text[at:]
        elif kind == 3:
            text = text[:at] + chr(rng.randrange(0x3000)) + text[at:]
        else:
            text = text[:at]
    return text


def grade_mutations(count: int, seed: int) -> dict[str, float]:
    source, rng = problems(2, 20), random.Random(seed)
    prompts = [source[index] for index in range(2000)]
    verifiers = [
        open_verifier(VerifierConfig(f"opgraph-{name}"))
        for name in ("outcome", "blend", "strict", "verified")
    ]
    raised = outside = strict = 0
    longest, begin = 0.0, time.process_time()
    for index in range(count):
        prompt = prompts[index % 2000]
        text = mutated(rng, prompt.worked_solution)
        started = time.process_time()
        try:
            verdict = verifiers[index % 4].score(prompt, text)
        except Exception as error:
            raised += 1
            print(f"raised {error!r} on {text!r}")
            continue
        longest = max(longest, time.process_time() - started)
        outside += not (0 <= verdict.score <= 1 and 0 <= verdict.parts["process"] <= 1)
        strict += verdict.parts["process"] == 1
    return {
        "mutations": count,
        "raised": raised,
        "outside_of_0_to_1": outside,
        "process_still_1": strict,
        "longest_ms": round(longest * 1000, 2),
        "seconds": round(time.process_time() - begin, 1),
    }


def of_size(
    size: int, mode: str, count: int, *, first: int = 0, unit: str = "Operations"
) -> Iterator[Problem]:
    source = OpGraphSource(OpGraphTask((size, size), WEIGHTS, (mode,), count=unit))
    return (source.problem(index) for index in range(first, first + count))


def guessed(size: int, mode: str, count: int) -> list[float]:
    """pass@1, @16 and @128 of guesses from the distribution of answers to other problems of the same size and mode."""
    seen = Counter(problem.answer for problem in of_size(size, mode, count))
    wanted = [problem.answer for problem in of_size(size, mode, count // 4, first=count)]
    return [statistics.mean(1 - (1 - seen[one] / count) ** k for one in wanted) for k in (1, 16, 128)]


def report_guesses(count: int) -> None:
    for size in (2, 4, 6, 10, 14, 20):
        edges = statistics.mean(problem.graph.edges for problem in of_size(size, "forward", count))
        operations = statistics.mean(
            problem.graph.operations for problem in of_size(size, "forward", count, unit="Edges")
        )
        print(f"{size} operations are {edges:.1f} edges; {size} edges are {operations:.1f} operations")
        for mode in MODES:
            print(
                f"  {mode}: pass@1 {{:.2f}}, @16 {{:.2f}}, @128 {{:.2f}}".format(*guessed(size, mode, count))
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mutations", type=int, default=0)
    parser.add_argument("--guesses", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    arguments = parser.parse_args()
    if arguments.mutations:
        print(json.dumps(grade_mutations(arguments.mutations, arguments.seed)))
        return
    if arguments.guesses:
        report_guesses(1_000 if arguments.quick else 8_000)
        return
    count = 2_000 if arguments.quick else 20_000
    result: dict[str, object] = {}
    for low, high in ((2, 10), (10, 10), (20, 20)):
        rate = made_per_second(problems(low, high), 0, count)
        print(f"made, op {low} to {high}: {rate:,.0f}/s")
        result[f"made_{low}_{high}"] = round(rate)
    rate = made_per_second(problems(2, 10), 1_000_000 - count, count)
    print(f"made, op 2 to 10, the last of a million: {rate:,.0f}/s")
    result["made_last"] = round(rate)
    for operations in (12, 20):
        rate = graded_per_second(operations, count // 4)
        print(f"graded, op {operations}: {rate:,.0f}/s")
        result[f"graded_{operations}"] = round(rate)
    for operations in (2, 12, 20):
        prompt, solution = mean_words(operations, 1000)
        print(f"words, op {operations}: prompt {prompt:.0f}, solution {solution:.0f}")
        result[f"words_{operations}"] = [round(prompt), round(solution)]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
