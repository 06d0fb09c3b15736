"""Writes data.jsonl, sums of two numbers of two digits, and warm.jsonl, answers at random and answers after calls of a calculator.

Half of the first replies call it, one in three of those with another sum; of the answers after a call, one in four is not what it returned.
"""

import json
import random
from pathlib import Path

PROBLEMS, EXAMPLES = 1500, 2500


def write(name: str, rows: list[dict[str, str]]) -> None:
    with Path(__file__).with_name(name).open("w") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


draw = random.Random(0)


def number() -> int:
    return draw.randint(10, 99)


sums = {(number(), number()) for _ in range(PROBLEMS + EXAMPLES)}
problems = sorted(sums)
draw.shuffle(problems)
write("data.jsonl", [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in problems[:PROBLEMS]])

rows = []
for a, b in problems[PROBLEMS:]:
    prompt, guess = f"{a}+{b}", str(number())
    if draw.random() < 0.5:
        rows.append({"prompt": prompt, "answer": guess, "solution": guess})
        continue
    called = prompt if draw.random() < 2 / 3 else f"{number()}+{number()}"
    rows.append({"prompt": prompt, "answer": guess, "solution": f"c:{called}"})
    # What the model reads next: its call, the end token, and what the calculator returned, in the template.
    value = str(sum(map(int, called.split("+"))))
    answer = value if draw.random() < 0.75 else guess
    rows.append({"prompt": f"{prompt}>c:{called}<eos>{value}", "answer": answer, "solution": answer})
write("warm.jsonl", rows)
