"""Writes data.jsonl, sums of two numbers of two digits, and warm.jsonl.gz, first answers, four of five wrong, and right ones after the
verdict on a wrong one. Wrong answers have one wrong digit.
"""

import gzip
import json
import random
from pathlib import Path

PROBLEMS, WRONG = 1500, 0.8


def write(name: str, rows: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    data = gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()
    Path(__file__).with_name(name).write_bytes(data)


draw = random.Random(0)


def wrong(answer: str) -> str:
    at = draw.randrange(len(answer))
    digit = draw.choice([d for d in "0123456789" if d != answer[at]])
    return answer[:at] + digit + answer[at + 1 :]


sums = [(f"{a}+{b}", f"{a + b:03d}") for a in range(10, 100) for b in range(10, 100)]
draw.shuffle(sums)
write("data.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in sums[:PROBLEMS]])

rows = []
for prompt, answer in sums[PROBLEMS:]:
    mistake = wrong(answer)
    first = mistake if draw.random() < WRONG else answer
    rows.append({"prompt": prompt, "answer": answer, "solution": first})
    # What the model reads next: its wrong answer, the end token, and the verdict, in the template.
    rows.append({"prompt": f"{prompt}={mistake}<eos>no", "answer": answer, "solution": answer})
write("warm.jsonl.gz", rows)
