"""Verdicts of ``math-verify`` against those of the package math-verify itself, and the rate of reference checks.

The pairs are those of ``tasks/tests/verdicts``. The package grades with its own ``parse`` and ``verify`` as they are by default, with
the reference between dollar signs. Every pair on which they disagree is listed.

    python benchmarks/verdicts.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from math_verify import parse, verify

from scalerl_tasks import Prompt, VerifierConfig, open_verifier

FOLDER = Path(__file__).parent.parent / "tasks/tests/verdicts"


def pairs(name: str) -> list[tuple[str, str, int]]:
    """Reference, reply and right score of each pair of a verifier."""
    rows = [line.split(" ¦ ") for line in (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()]
    return [(row[1], row[2], int(row[0])) for row in rows if len(row) == 3 and row[0] in "01"]


def compare(step: int) -> dict[str, float]:
    """Right verdicts of both, and the disagreements."""
    own = open_verifier(VerifierConfig("math-verify"))
    right = {"own": 0, "plain": 0}
    seconds = {"own": 0.0, "plain": 0.0}
    chosen = pairs("math-verify")[::step]
    for reference, reply, score in chosen:
        begin = time.perf_counter()
        plain = int(verify(parse(f"${reference}$"), parse(reply)))
        between = time.perf_counter()
        given = own.score(Prompt("1", "q", reference), reply)
        seconds["plain"] += between - begin
        seconds["own"] += time.perf_counter() - between
        right["own"] += given == score
        right["plain"] += plain == score
        if given != plain:
            print(f"right {score}, plain {plain}: {reference}  |  {reply}")
    return {
        "pairs": len(chosen),
        **{f"{name}_right": count for name, count in right.items()},
        **{f"{name}_milliseconds_per_pair": round(1000 * s / len(chosen), 2) for name, s in seconds.items()},
    }


def check_rate(name: str, rows: int) -> float:
    """References checked per second, all different: a third integers, the rest fractions and roots where the verifier has them."""
    verifier = open_verifier(VerifierConfig(name))
    forms = ("{}", r"\frac{{{}}}{{7}}", r"{}\sqrt{{2}} \text{{ cm}}" if name == "math-verify" else r"\${}")
    begin = time.perf_counter()
    for at in range(rows):
        verifier.check(Prompt(str(at), "q", forms[at % 3].format(at)))
    return rows / (time.perf_counter() - begin)


def main(quick: bool) -> None:
    figures = compare(16 if quick else 1)
    for name in ("exact", "number", "math-verify"):
        figures[f"{name}_checks_per_second"] = round(check_rate(name, 1000 if quick else 20_000))
    for name, value in figures.items():
        print(f"{name:32} {value:,}")
    print(json.dumps({"benchmark": "verdicts", "figures": figures}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every sixteenth pair, fewer references")
    main(parser.parse_args().quick)
