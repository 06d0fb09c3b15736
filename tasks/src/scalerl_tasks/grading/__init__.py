"""Grading of hostile text, at arm's length.

What lives here: the pool that a caller holds (``pool``), the process that forks graders (``fork_server``),
the grader (``worker``), what a grader may not do (``guard``), and the bytes between them (``protocol``). What
never does: a verifier, a retry policy for groups, anything that knows what a reward is used for.

::

    caller's process            fork server (one, a single thread)      graders (short-lived at will)
    GradingPool ──control──────▶ imports the verifier once, forks ─────▶ one verifier each, warm
        └──────────────────────one socket per grader───────────────────▶ completions in, scores out

Why a fork server: the caller has threads and an event loop, and must not fork; a new interpreter takes
seconds to import sympy, and a grader that was killed must be replaced in milliseconds.

Who dies when: a grader that is too slow is killed by the fork server, which alone knows that the pid is
still its child. A grader dies with the fork server (PR_SET_PDEATHSIG). The fork server ends when its control
socket does, or when its parent is no longer its parent, and takes the graders with it.
"""
