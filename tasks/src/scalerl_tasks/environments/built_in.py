"""The environments of this project that make their steps in a process of a generator, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from scalerl_tasks.environments.nim import Nim
from scalerl_tasks.environments.protocol import Environment
from scalerl_tasks.environments.tool_environment import Tools

ENVIRONMENTS: Final[Mapping[str, Callable[..., Environment]]] = {"nim": Nim, "tools": Tools}
"""``scalerl_api.built_in`` has all names, with ``retry``, whose steps the task's verifier makes (:mod:`.episodes`), and ``server``,
whose steps are made elsewhere (:mod:`.server_grader`)."""
