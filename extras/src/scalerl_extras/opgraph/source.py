"""Op-graph problems as a source of prompts: each read generates the problem from seed and index."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from scalerl_extras.opgraph.contexts import CONTEXTS
from scalerl_extras.opgraph.draws import Draws
from scalerl_extras.opgraph.graph_drawing import MAX_DISTRACTORS, MAX_OPERATIONS, MIN_OPERATIONS, draw_graph
from scalerl_extras.opgraph.names import MAX_PROBLEMS, draw_names, permuted
from scalerl_extras.opgraph.render import Problem, render
from scalerl_extras.opgraph.solve import solve
from scalerl_tasks.errors import ParameterError, did_you_mean
from scalerl_tasks.prompts import Prompt, check_index

MODES = ("forward", "reverse")
COUNTS = ("Operations", "Edges")
_MAX_SCALE = 10**9
_VERSION = 1  # of everything that determines a problem: vocabulary, draws, sentences, solutions


@dataclass(frozen=True, slots=True)
class OpGraphTask:
    """Settings of the problems; the index of a problem determines all draws within them.

    Attributes:
        operations: minimum and maximum number of operations, or of what ``count`` says; drawn uniformly between them.
        contexts: weights by name, as decimal text; they sum to 1.
        modes: ``forward`` (all constants are given, the answer is the final value), ``reverse`` (the final value is given, the
            answer is a constant); drawn uniformly.
        distractors: maximum number of sentences that the answer does not need; drawn uniformly from 0 to this number.
        seed: seed of the problems.
        size: number of problems.
        count: what ``operations`` counts, ``Operations`` or ``Edges``, as :mod:`.graph` defines them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    operations: tuple[int, int]
    contexts: Mapping[str, str] = field(default_factory=lambda: {"zoo": "1"})
    modes: Sequence[str] = ("forward",)
    distractors: int = 2
    seed: int = 0
    size: int = 1_000_000
    count: str = "Operations"

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
        if any(not 0 <= Fraction(weight) <= 1 for weight in self.contexts.values()):
            raise ParameterError("weights of contexts must be from 0 to 1", "contexts")
        if (total := sum(map(Fraction, self.contexts.values()))) != 1:
            raise ParameterError(
                f"the shares of contexts sum to {float(total):g}; they must sum to 1", "contexts"
            )
        if _scale(self.contexts) > _MAX_SCALE:
            raise ParameterError(
                "weights of contexts have more than nine digits after the point: round them", "contexts"
            )
        if self.count not in COUNTS:
            raise ParameterError(f"count is {self.count!r}: give one of {', '.join(COUNTS)}", "count")
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
    """The smallest positive integer whose product with every weight is an integer."""
    return math.lcm(*(Fraction(weight).denominator for weight in weights.values()))


def open_op_graph(**parameters: Any) -> OpGraphSource:
    """The source of ``task.plugin: {name: opgraph, parameters: …}``, whose parameters are the fields of :class:`OpGraphTask`.

    Raises:
        pydantic.ValidationError: a parameter is unknown, of a wrong type, or out of range.
    """
    return OpGraphSource(TypeAdapter(OpGraphTask).validate_python(parameters))


class OpGraphSource:
    """A :class:`~scalerl_tasks.PromptSource` of op-graph problems; its memory does not depend on the number of problems.

    Two indices never give the same problem, not even with its sentences in another order. Two seeds can give the same problem,
    so held-out prompts come from :func:`scalerl_tasks.split_held_out`, never from a second seed.

    >>> prompt = OpGraphSource(OpGraphTask((3, 3)))[5]
    >>> prompt.labels, prompt.answer
    ({'operations': '3', 'edges': '5', 'context': 'zoo', 'mode': 'forward'}, '2')
    """

    def __init__(self, task: OpGraphTask) -> None:
        self.task = task
        identity = {"kind": "op-graph", "version": _VERSION, **dataclasses.asdict(task)}
        if task.count == "Operations":
            del identity["count"]  # the digest is that of before the field
        self._digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._scale = _scale(task.contexts)
        # Sorted, because an API server does not preserve the order of a mapping.
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
        operations, edges = problem.graph.operations, problem.graph.edges
        return Prompt(
            id=f"op-graph/{self._digest[:12]}/{index}",
            text=problem.text,
            answer=str(solution.answer),
            solution=solution.text,
            difficulty=float(edges if self.task.count == "Edges" else operations),
            graph=problem.graph.key,
            labels={
                "operations": str(operations),
                "edges": str(edges),
                "context": problem.context,
                "mode": "forward" if problem.graph.unknown is None else "reverse",
            },
        )

    def difficulty(self, index: int, /) -> float:
        """Number of operations or edges of the problem, as ``count`` says, without generating it."""
        return float(self._operations(index)[0])

    def problem(self, index: int) -> Problem:
        """The problem at ``index``, with its graph. Raises IndexError."""
        task = self.task
        operations, draws = self._operations(index)
        context = self._context(draws.below(self._scale))
        mode = task.modes[draws.below(len(task.modes))]
        graph = draw_graph(
            draws,
            operations,
            reverse=mode == "reverse",
            distractors=draws.below(task.distractors + 1),
            count_edges=task.count == "Edges",
        )
        return render(graph, context, draw_names(draws, graph, permuted(index, task.seed)), draws)

    def _operations(self, index: int) -> tuple[int, Draws]:
        """Number of operations or edges of the problem at ``index``, and the source of randomness for its other draws."""
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
