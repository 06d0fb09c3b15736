"""Writes data.jsonl: descriptions of functions of one number, their tests, and a program each. Run it again: same file.

A description has two or three operations, in their order: "add 3, double, at most 9". Any program that passes the tests is right.
"""

import json
import random
from pathlib import Path

ROWS = 2400
TESTED = (-7, -1, 0, 3, 8, 25)
OPERATIONS = {
    "double": "({}*2)",
    "square": "({0}*{0})",
    "negate": "(-{})",
    "halve": "({}//2)",
    "size": "abs({})",
    "add N": "({}+N)",
    "take N": "({}-N)",
    "times N": "({}*N)",
    "rest by N": "({}%N)",
    "at most N": "min({},N)",
    "at least N": "max({},N)",
}
"""An expression by the words for it; {} is what is before it, and N a digit from 3 to 9."""


def main() -> None:
    """Write the file."""
    chosen = random.Random(0)
    rows: dict[str, str] = {}
    while len(rows) < ROWS:
        words, expression = [], "x"
        for _ in range(chosen.choice((2, 3))):
            name = chosen.choice(list(OPERATIONS))
            digit = str(chosen.randint(3, 9))
            if name == "square" and len(expression) > 1:
                continue  # it would be in the program twice
            words.append(name.replace("N", digit))
            expression = OPERATIONS[name].format(expression).replace("N", digit)
        values = [eval(expression, {"x": x}) for x in TESTED]  # noqa: S307 - made above
        if len(words) > 1 and len(set(values)) > 2:
            rows[", ".join(words) + ":"] = expression
    with Path(__file__).with_name("data.jsonl").open("w") as file:
        for prompt, expression in rows.items():
            outputs = [eval(expression, {"x": x}) for x in TESTED]  # noqa: S307
            tests = {"fn_name": "f", "inputs": [[x] for x in TESTED], "outputs": outputs}
            row = {
                "prompt": prompt,
                "answer": json.dumps(tests, separators=(",", ":")),
                "solution": f"f=lambda x:{expression}",
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


main()
