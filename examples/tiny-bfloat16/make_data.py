"""Writes data.jsonl: loaded dice of four sides, and for each a long record of throws. Run it again: same file.

The prompt gives the sides' loads; side k falls in proportion to the square of its load. The worked solution throws the
die, twelve times a line, and ends each line with the side that fell most often so far. The answer is the heaviest side.
Throws are written as 1 to 4 and verdicts as 6 to 9, so that none is taken for the other. Solutions are 2 to 100 lines of
14 tokens.
"""

import json
import random
from itertools import permutations
from pathlib import Path

ROWS, MAX_LINES, THROWS = 600, 100, 12
FIRST_SIDE, FIRST_VERDICT = 1, 6
dice = random.Random(0)


def record(loads: tuple[int, ...], lines: int) -> str:
    fallen = [0] * len(loads)
    text = ""
    for _ in range(lines):
        throws = dice.choices(range(len(loads)), [load * load for load in loads], k=THROWS)
        for side in throws:
            fallen[side] += 1
        leader = fallen.index(max(fallen))
        text += "".join(str(FIRST_SIDE + side) for side in throws) + f"={FIRST_VERDICT + leader}"
    return text


with Path(__file__).with_name("data.jsonl").open("w") as file:
    for loads in dice.sample(list(permutations(range(1, 10), 4)), ROWS):
        row = {
            "prompt": "".join(map(str, loads)) + ":",
            "answer": str(FIRST_VERDICT + loads.index(max(loads))),
            "solution": record(loads, dice.randint(2, MAX_LINES)),
        }
        file.write(json.dumps(row, separators=(",", ":")) + "\n")
