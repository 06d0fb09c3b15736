"""Writes data.jsonl, positions that the player can win, and warm.jsonl, legal moves in games of random moves."""

import json
import random
from pathlib import Path

MOST = (2, 3, 4)
HEAP = 14
POSITIONS, GAMES = 1500, 1500


def write(name: str, rows: list[dict[str, str]]) -> None:
    with Path(__file__).with_name(name).open("w") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


draw = random.Random(0)


def position() -> tuple[int, int, str]:
    """A heap that can be won, the most that may be taken at once, and the prompt: earlier heaps, the heap, the most."""
    most = draw.choice(MOST)
    heap = draw.choice([heap for heap in range(1, HEAP) if heap % (most + 1)])
    earlier = draw.sample(range(heap + 1, HEAP + 6), draw.randint(0, 4))
    return heap, most, " ".join(map(str, [*sorted(earlier, reverse=True), heap, most]))


positions = {prompt: heap % (most + 1) for heap, most, prompt in (position() for _ in range(2 * POSITIONS))}
write("data.jsonl", [{"prompt": p, "answer": f"{move}"} for p, move in list(positions.items())[:POSITIONS]])

rows = {}
for _ in range(GAMES):
    heap, most, prompt = position()
    while heap > 0:
        taken = draw.randint(1, min(most, heap))
        rows[prompt] = {"prompt": prompt, "answer": f"{taken}", "solution": f"{taken}"}
        heap -= taken
        # The opponent's move, and what the model reads next: its own move, the end token and the next prompt.
        heap -= heap % (most + 1) or 1
        prompt += f":{taken}<eos>{heap} {most}"
write("warm.jsonl", list(rows.values()))
