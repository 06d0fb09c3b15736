"""Op-graph problems as a source of prompts: made from seed and index at each read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from scalerl_tasks.errors import ParameterError, did_you_mean
from scalerl_tasks.opgraph.contexts import CONTEXTS
from scalerl_tasks.opgraph.graph import (
    MAX_DISTRACTORS,
    MAX_OPERATIONS,
    MAX_PROBLEMS,
    MIN_OPERATIONS,
    Draws,
    draw_graph,
    draw_names,
    permuted,
)
from scalerl_tasks.opgraph.render import Problem, render
from scalerl_tasks.opgraph.solve import solve
from scalerl_tasks.prompts import Prompt, check_index

MODES = ("forward", "reverse")
_MAX_SCALE = 10**9
_VERSION = 1  # of all that a problem depends on: words, draws, sentences, solutions


@dataclass(frozen=True, slots=True)
class OpGraphTask:
    """Which problems: all choices of a problem are drawn by its index.

    Attributes:
        operations: least and greatest number of operations; each number between is as likely.
        contexts: weights by name, as decimal texts; they sum to 1.
        modes: ``forward`` (all is given, one parameter is asked for), ``reverse`` (one constant is unknown, the value at
            the end is given); each is as likely.
        distractors: greatest number of sentences that the answer does not need; each number from 0 is as likely.
        seed: of the problems.
        size: number of problems.
    """

    operations: tuple[int, int]
    contexts: Mapping[str, str] = field(default_factory=lambda: {"zoo": "1"})
    modes: Sequence[str] = ("forward",)
    distractors: int = 2
    seed: int = 0
    size: int = 1_000_000

    def __post_init__(self) -> None:
        """Raises ParameterError."""
        low, high = self.operations
        if not MIN_OPERATIONS <= low <= high <= MAX_OPERATIONS:
            raise ParameterError(
                f"operations are {low} to {high}: give the least first, and both from {MIN_OPERATIONS} to {MAX_OPERATIONS}",
                "operations",
            )
        for name in self.contexts:
            if name not in CONTEXTS:
                raise ParameterError(
                    f"no context {name!r}{did_you_mean(name, CONTEXTS)} (known: {', '.join(CONTEXTS)})",
                    "contexts",
                )
        if (total := sum(map(Fraction, self.contexts.values()))) != 1:
            raise ParameterError(
                f"the weights of contexts sum to {float(total):g}, and must to 1", "contexts"
            )
        if _scale(self.contexts) > _MAX_SCALE:
            raise ParameterError(
                "weights of contexts have more than nine digits after the point: round them", "contexts"
            )
        if not self.modes or not set(self.modes) <= set(MODES):
            raise ParameterError(f"modes are {list(self.modes)}: give some of {', '.join(MODES)}", "modes")
        if not 0 <= self.distractors <= MAX_DISTRACTORS:
            raise ParameterError(
                f"distractors are {self.distractors}: give 0 to {MAX_DISTRACTORS}", "distractors"
            )
        if not 1 <= self.size <= MAX_PROBLEMS:
            raise ParameterError(
                f"size is {self.size}; a seed has 1 to {MAX_PROBLEMS:,} problems: take another seed for others",
                "size",
            )


def _scale(weights: Mapping[str, str]) -> int:
    """The least number whose product with every weight is an integer."""
    return math.lcm(*(Fraction(weight).denominator for weight in weights.values()))


class OpGraphSource:
    """A :class:`~scalerl_tasks.PromptSource` of op-graph problems; memory does not grow with size.

    Two indices never give the same problem, also not one with its sentences in another order. Problems of two seeds may
    be the same, so held-out prompts come from :func:`scalerl_tasks.split_held_out`, never from a second seed.

    >>> prompt = OpGraphSource(OpGraphTask((3, 3)))[5]
    >>> prompt.labels, prompt.answer
    ({'operations': '3', 'context': 'zoo', 'mode': 'forward'}, '2')
    """

    def __init__(self, task: OpGraphTask) -> None:
        self.task = task
        identity = {"kind": "op-graph", "version": _VERSION, **dataclasses.asdict(task)}
        self._digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._scale = _scale(task.contexts)
        # In an order that does not depend on the mapping's, which an API server does not keep.
        shares = [
            (int(Fraction(weight) * self._scale), name) for name, weight in sorted(task.contexts.items())
        ]
        self._shares = sorted(shares, key=lambda share: -share[0])

    @property
    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return self.task.size

    def __getitem__(self, index: int, /) -> Prompt:
        problem = self.problem(index)
        solution = solve(problem)
        operations = problem.graph.operations
        return Prompt(
            id=f"op-graph/{self._digest[:12]}/{index}",
            text=problem.text,
            answer=str(solution.answer),
            solution=solution.text,
            difficulty=float(operations),
            labels={
                "operations": str(operations),
                "context": problem.context,
                "mode": "forward" if problem.graph.unknown is None else "reverse",
            },
        )

    def difficulty(self, index: int, /) -> float:
        """Operations of the problem, without making it."""
        return float(self._operations(index)[0])

    def problem(self, index: int) -> Problem:
        """The problem at ``index``, with its graph. Raises IndexError."""
        task = self.task
        operations, draws = self._operations(index)
        context = self._context(draws.below(self._scale))
        mode = task.modes[draws.below(len(task.modes))]
        graph = draw_graph(
            draws, operations, reverse=mode == "reverse", distractors=draws.below(task.distractors + 1)
        )
        return render(graph, context, draw_names(draws, graph, permuted(index, task.seed)), draws)

    def _operations(self, index: int) -> tuple[int, Draws]:
        """Operations of the problem at ``index``, and what the rest of it is drawn from."""
        check_index(index, self.task.size)
        draws = Draws(f"op-graph/{_VERSION}/{self.task.seed}/{index}/")
        low, high = self.task.operations
        return low + draws.below(high - low + 1), draws

    def _context(self, drawn: int) -> str:
        for share, name in self._shares:
            if drawn < share:
                return name
            drawn -= share
        raise AssertionError("the shares sum to the scale")
