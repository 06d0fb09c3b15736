"""Environments: what answers the replies of a model, turn by turn, and ends an episode with a reward.

::

    prompt, replies ─▶ EnvironmentGrader.steps()                               in the caller's process
                         ├▶ GradingPool.score_group() ─▶ EnvironmentVerifier    in a grading process, with its limits
                         │                                 └─▶ Environment.step(prompt, replies) ─▶ Step
                         ├▶ tools: ToolsGrader, which asks such a process, then the verifier for replies without calls
                         ├▶ ServerGrader: a session of a server (``environment.url``), found by the replies
                         └▶ retry: GroupGrader.score_group() of the last reply, and its verdict in words
                    ◀── Graded(verdict, messages) for each episode: without messages, it has ended

:mod:`.protocol` has what an environment implements, :mod:`.nim` an example, :mod:`.built_in` their names; :mod:`.tool_calls` reads calls,
:mod:`.tool_environment` makes them. A step replays all replies: an episode has no
state but its replies, so another process can continue it. This package does not tokenize.
"""
