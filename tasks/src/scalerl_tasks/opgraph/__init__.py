"""Op-graph problems: word problems over graphs of arithmetic operations, whose difficulty is a number that is chosen.

::

    OpGraphSource[index] ─▶ graph.draw_graph(), draw_names()   parameters, definitions, values; names
                            render.render()                    sentences and question
                            solve.solve()                      the worked solution
                         ─▶ Prompt (text, answer, solution, difficulty, labels)

    completion ─▶ parse.parse() ─▶ parse.compare() with the parsed gold solution ─▶ verifiers: a Verdict

Here live the words, the graphs and the notation of solutions. Nothing here needs numpy or torch.
"""

from scalerl_tasks.opgraph.contexts import CONTEXTS
from scalerl_tasks.opgraph.graph import MAX_DISTRACTORS, MAX_OPERATIONS, MAX_PROBLEMS, MIN_OPERATIONS
from scalerl_tasks.opgraph.source import MODES, OpGraphSource, OpGraphTask

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
