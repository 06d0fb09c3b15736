"""Grades hostile text in separate processes.

``grading_pool`` is the caller's interface, ``fork_client`` its side of the sockets, ``fork_server`` the process that forks
graders, ``grader`` a grader, ``audit_guard`` its restrictions, ``protocol`` the messages between them.

::

    caller's process            fork server (one, single-threaded)       graders (replaced when needed)
    GradingPool ──control──────▶ imports the verifier once, forks ─────▶ one verifier each, warm
        └──────────────────────one socket per grader───────────────────▶ completions in, scores out

Why a fork server: the caller has threads and an event loop and must not fork; a new interpreter takes seconds to import
sympy; and a killed grader must be replaced in milliseconds.

Lifetimes: the fork server kills a grader that is too slow, because only it knows that the pid is still its child. A
grader dies with the fork server (PR_SET_PDEATHSIG). The fork server ends when its control socket closes or its parent
dies, and kills its graders.
"""
