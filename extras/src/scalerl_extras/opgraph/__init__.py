"""Op-graph problems: word problems over graphs of arithmetic operations, with a chosen number of operations as difficulty.

::

    OpGraphSource[index] ─▶ draw_graph(), draw_names()         parameters, definitions, values; names
                            render.render()                    sentences and question
                            solve.solve()                      the worked solution
                         ─▶ Prompt (text, answer, solution, difficulty, labels)

    completion ─▶ parse.parse() ─▶ parse.compare() with the parsed gold solution ─▶ verifiers: a Verdict

This package has the vocabulary, the graphs and the notation of solutions. It needs neither numpy nor torch.
"""

from scalerl_extras.opgraph.contexts import CONTEXTS
from scalerl_extras.opgraph.graph_drawing import MAX_DISTRACTORS, MAX_OPERATIONS, MIN_OPERATIONS
from scalerl_extras.opgraph.names import MAX_PROBLEMS
from scalerl_extras.opgraph.source import MODES, OpGraphSource, OpGraphTask

__all__ = [
    "CONTEXTS",
    "MAX_DISTRACTORS",
    "MAX_OPERATIONS",
    "MAX_PROBLEMS",
    "MIN_OPERATIONS",
    "MODES",
    "OpGraphSource",
    "OpGraphTask",
]
