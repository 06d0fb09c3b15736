"""Writes data.jsonl, the openings that the first player can win, and warm.jsonl, legal moves in games of random moves."""

import json
import random
from pathlib import Path

HEAPS, MOST = range(3, 17), range(2, 6)
GAMES = 400


def write(name: str, rows: list[dict[str, str]]) -> None:
    with Path(__file__).with_name(name).open("w") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


openings = [(heap, most) for most in MOST for heap in HEAPS if heap > most and heap % (most + 1)]
write(
    "data.jsonl", [{"prompt": f"{heap} {most}", "answer": f"{heap % (most + 1)}"} for heap, most in openings]
)

draw, rows = random.Random(0), {}
for game in range(GAMES):
    heap, most = openings[game % len(openings)]
    prompt = f"{heap} {most}"
    while heap:
        taken = draw.randint(1, min(most, heap))
        rows[prompt, taken] = {"prompt": prompt, "answer": f"{taken}", "solution": f"{taken}"}
        heap -= taken
        # The opponent's reply, and what the model reads next: its move, the end token and the next prompt.
        heap -= (heap % (most + 1) or 1) if heap else 0
        prompt += f":{taken}<eos>{heap} {most}"
write("warm.jsonl", list(rows.values()))
