"""Writes data.jsonl: the larger of two two-digit numbers. Run it again: same file."""

import json
from pathlib import Path

with Path(__file__).with_name("data.jsonl").open("w") as file:
    for a in range(10, 100):
        for b in range(10, 100):
            file.write(
                json.dumps({"prompt": f"{a}>{b}:", "answer": str(max(a, b))}, separators=(",", ":")) + "\n"
            )
