"""Countdown, as a package of one's own: reach a number with all of the given ones."""

import ast
import operator
import random

from scalerl_tasks import Prompt, Verdict

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Countdown:
    """``task.plugin: {name: countdown, parameters: {size: 1000, largest: 20}}``"""

    def __init__(self, size: int = 1000, largest: int = 20, seed: int = 0) -> None:
        self._size, self._largest, self._seed = size, largest, seed
        self.digest = f"countdown 1: {size} {largest} {seed}"  # equal digests: equal prompts

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        rng = random.Random(f"{self._seed}/{index}")
        a, b, c = (rng.randint(1, self._largest) for _ in range(3))
        text = f"Problem {index}: use {a}, {b} and {c} once each to make {a * b - c}."
        return Prompt(
            str(index), text, f"{a} * {b} - {c}", metadata={"numbers": [a, b, c], "target": a * b - c}
        )


class CountdownVerifier:
    """``verifier: {name: countdown}``: 1 for the target, 0.1 for another value of the given numbers."""

    part_names = ("numbers",)

    def score(self, prompt: Prompt, completion: str) -> Verdict:
        try:
            tree = ast.parse(completion.strip().splitlines()[-1], mode="eval").body
            value, used = (
                self._value(tree),
                sorted(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)),
            )
        except (SyntaxError, ValueError, IndexError, KeyError, RecursionError, TypeError):
            return Verdict(0.0, {"numbers": 0.0})
        right = used == sorted(prompt.metadata["numbers"])
        return Verdict(
            1.0 if right and value == prompt.metadata["target"] else 0.1 * right, {"numbers": float(right)}
        )

    def _value(self, node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        return (
            OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
            if isinstance(node, ast.BinOp)
            else {}[0]
        )
