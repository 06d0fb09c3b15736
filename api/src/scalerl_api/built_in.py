"""Names of the verifiers and environments of this project; others are of installed packages (:mod:`.registry`).

Standard library only: grading processes import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

BUILT_IN_VERIFIERS: Final = ("reasoning-gym", "exact", "number", "math-verify")
SERVER: Final = "server"
"""Name of the environment whose servers are those of ``spec.environment``."""
DEFAULT_SESSIONS: Final = 64
"""Of a generator at an environment's server."""


class BuiltInEnvironment(NamedTuple):
    """What is done for an environment of this project besides its steps."""

    uses_verifier: bool = False
    """The task's verifier scores its episodes."""
    makes_steps: bool = True
    """It makes its steps itself, not the task's verifier alone."""
    has_tools: bool = False
    """Its parameters name tools, with files and a sandbox for programs."""


BUILT_IN_ENVIRONMENTS: Final[Mapping[str, BuiltInEnvironment]] = {
    "retry": BuiltInEnvironment(uses_verifier=True, makes_steps=False),
    "tools": BuiltInEnvironment(uses_verifier=True, has_tools=True),
    "nim": BuiltInEnvironment(),
    SERVER: BuiltInEnvironment(),
}
"""Environments of this project, by name; their classes are in ``scalerl_tasks.environments.built_in``."""
