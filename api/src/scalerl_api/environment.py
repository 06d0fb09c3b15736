"""``task.environment``: what answers the replies of an episode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from scalerl_api.built_in import BUILT_IN_ENVIRONMENTS, DEFAULT_SESSIONS, SERVER, BuiltInEnvironment
from scalerl_api.fields import GraderQuantity, Matches, Model, exactly_one
from scalerl_api.plugins import EnvironmentPlugin, Parameters, PluginName


class PythonEnvironment(Model):
    """A class of your own as an environment, from a file or an installed package, which is trusted code."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Python file: on one machine, relative to the run file; on a cluster, absolute, on a mounted volume or in the images."""
    module: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Installed module, in place of path."""
    class_name: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the class there; see docs/environments.md."""

    rules = (exactly_one("path", "module"),)


USE_VERIFIER: Final = tuple(name for name, one in BUILT_IN_ENVIRONMENTS.items() if one.uses_verifier)
"""Environments in which the task's verifier scores."""


class EnvironmentSpec(Model):
    """Episodes of several turns: the environment answers each reply of the model, and ends the episode with a reward."""

    name: PluginName | None = None
    """``retry``: the verdict of the task's verifier in words, then another try. ``tools``: calls of tools, then an answer. ``nim``: a
    game. ``server``: the servers of ``spec.environment``. Another name: an environment of the entry points ``scalerl.environments``."""
    python: PythonEnvironment | None = None
    """A class of your own; give this, name or url."""
    url: (
        Annotated[
            str,
            Field(max_length=2048),
            AfterValidator(
                Matches(
                    r"^https?://[^/@ ]+(/[^ ]*)?$",
                    "must be http://host:port or https://host/…, without a password: that is the variable ENVIRONMENT_TOKEN",
                )
            ),
        ]
        | None
    ) = None
    """A server that speaks OpenEnv's protocol. While it is down, episodes wait."""
    parameters: Parameters | None = None
    """Arguments of the environment; write fractions as strings (``"0.5"``)."""
    max_turns: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum replies of an episode; after the last, it ends with the reward of that step."""
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Maximum length of a reply. A longer one is cut, and ends the episode. Default: what is left of maxCompletionTokens, which
    counts replies and messages together."""
    turn_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    """Time limit of a step of the environment; of ``retry``, the verifier's limits hold."""
    memory: GraderQuantity = "1Gi"
    """Memory limit of an environment's process; not of ``retry`` and servers."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Environment processes per generator; not of ``retry`` and servers."""

    rules = (exactly_one("name", "python", "url"),)

    @property
    def uses_verifier(self) -> bool:
        """Whether the task's verifier scores the replies."""
        return self.name in USE_VERIFIER

    @property
    def makes_steps(self) -> bool:
        """Whether it makes its steps itself, and not the task's verifier alone."""
        return self._built_in is None or self._built_in.makes_steps

    @property
    def has_tools(self) -> bool:
        """Whether its parameters name tools."""
        return self._built_in is not None and self._built_in.has_tools

    @property
    def _built_in(self) -> BuiltInEnvironment | None:
        return None if self.name is None else BUILT_IN_ENVIRONMENTS.get(self.name)

    @property
    def is_server(self) -> bool:
        """Whether a server makes the steps: that of ``url``, or those of ``spec.environment``."""
        return self.url is not None or self.name == SERVER

    @property
    def sessions(self) -> int:
        """Maximum sessions of a generator at a server, or its default; one that is no number is refused elsewhere."""
        given = (self.parameters or {}).get("sessions")
        return given if type(given) is int and given > 0 else DEFAULT_SESSIONS

    @property
    def installed(self) -> EnvironmentPlugin | None:
        """The environment of a package that is named."""
        if self.name is None or self.name in BUILT_IN_ENVIRONMENTS:
            return None
        return EnvironmentPlugin(name=self.name, parameters=self.parameters or {})

    @property
    def is_own_code(self) -> bool:
        """Whether it is the user's own code."""
        return self.is_server or self.name not in BUILT_IN_ENVIRONMENTS

    @property
    def tool_files(self) -> dict[str, str]:
        """Files that tools read, by path of their field."""
        tools = (self.parameters or {}).get("tools") if self.has_tools else None
        found = {}
        for at, tool in enumerate(tools if isinstance(tools, list) else ()):
            path = (
                tool["search"].get("path")
                if isinstance(tool, dict) and isinstance(tool.get("search"), dict)
                else None
            )
            if isinstance(path, str):
                found[f"parameters.tools[{at}].search.path"] = path
        return found

    @property
    def title(self) -> str:
        """The environment, for messages."""
        if self.python is None:
            return self.url or self.name or ""
        return f"{Path(self.python.path).name if self.python.path else self.python.module}:{self.python.class_name}"
