"""Renders problems as text: the sentences that define the parameters, in random order, then the question."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_extras.opgraph.contexts import CONTEXTS
from scalerl_extras.opgraph.draws import Draws
from scalerl_extras.opgraph.graph import Form, Graph
from scalerl_extras.opgraph.names import Names


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph in the vocabulary of a context.

    Attributes:
        graph: the operation graph.
        context: a key of :data:`~scalerl_extras.opgraph.contexts.CONTEXTS`.
        names: names of the parameters, like ``"adult otters in Amber Hollow"``, by position in ``graph.nodes``.
        sentences: sentences of the problem; the last one is the question.
    """

    graph: Graph
    context: str
    names: tuple[str, ...]
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The prompt: the problem and its question, and the opening tag of the solution."""
        return f"<question> {' '.join(self.sentences)} </question> <solution>"

    @property
    def answer(self) -> int:
        """The value of the parameter in question."""
        return self.graph.nodes[self.graph.asked].value


def render(graph: Graph, context: str, names: Names, draws: Draws) -> Problem:
    """Render a graph as a problem; ``draws`` shuffles the sentences."""
    words = CONTEXTS[context]
    named = tuple(
        words.total(names.places[node.group])
        if kind is None
        else words.instance(kind, names.places[node.group])
        for node, kind in zip(graph.nodes, names.kinds, strict=True)
    )
    counts = [
        name if kind is None else f"number of {name}" for name, kind in zip(named, names.kinds, strict=True)
    ]
    sentences = [
        _sentence(counts, at, graph)
        for at, node in enumerate(graph.nodes)
        if node.form is not Form.TOTAL and at != graph.unknown
    ]
    if graph.unknown is not None:
        sentences.append(f"It is known that the {counts[graph.top]} is {graph.nodes[graph.top].value}.")
    draws.shuffle(sentences)
    return Problem(graph, context, named, (*sentences, f"What is the {counts[graph.asked]}?"))


def _sentence(counts: list[str], at: int, graph: Graph) -> str:
    node = graph.nodes[at]
    c, given = node.constant, [f"the {counts[parent]}" for parent in node.parents]
    match node.form:
        case Form.CONSTANT:
            what = f"is {c}"
        case Form.EQUAL:
            what = f"equals {given[0]}"
        case Form.MORE:
            what = f"is {c} more than {given[0]}"
        case Form.LESS:
            what = f"is {c} less than {given[0]}"
        case Form.TIMES:
            what = f"is {c} times {given[0]}"
        case Form.DIFFERENCE:
            what = f"is {given[0]} minus {given[1]}"
        case Form.MULTIPLE:
            what = f"is {c} times the sum of {given[0]} and {given[1]}"
        case _:
            what = f"is the sum of {', '.join(given[:-1])} and {given[-1]}"
    return f"The {counts[at]} {what}."
