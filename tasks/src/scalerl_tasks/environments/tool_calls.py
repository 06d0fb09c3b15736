"""Tools of the environment ``tools``: their descriptions for a chat template, and calls read from the text of replies.

A call is read here and not by a parser of vLLM: a step is made again from the text of the replies, in a grading process that has no
server, and has to find the same calls. docs/environments.md has the formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from scalerl_tasks.answers.extraction import after_thought
from scalerl_tasks.errors import VerifierError, did_you_mean

if TYPE_CHECKING:
    from scalerl_api.environment import EnvironmentSpec

Format = Literal["Hermes", "Llama3", "Text"]
"""How a reply has a call: ``<tool_call>{…}</tool_call>``; a reply that is JSON; a line ``name: argument``."""
KINDS: Final[Mapping[str, tuple[str, str, str, Mapping[str, type]]]] = {
    "calculator": (
        "expression",
        "The value of an arithmetic expression.",
        "Numbers with + - * / // % ** and parentheses.",
        {},
    ),
    "python": (
        "code",
        "What a Python program prints, and the value of its last expression. Each call is a program of its own.",
        "The program.",
        {"seconds": int},
    ),
    "search": (
        "query",
        "The passages of a collection that fit a query best.",
        "Words to search for.",
        {"path": str, "results": int},
    ),
}
"""By kind of tool: its parameter, its description, that of the parameter, and its options."""
_COMMON: Final[Mapping[str, type]] = {"name": str, "description": str}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LLAMA = re.compile(r'\s*(<\|python_tag\|>|\{(?=[^{}]{0,64}?"name"))')
_WHERE: Final = "environment.parameters"
_CUT: Final = 80


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    tool: int
    argument: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """What is no call of a tool, although it looks like one."""

    problem: str


@dataclass(frozen=True, slots=True)
class ToolConfig:
    """A tool; picklable."""

    kind: str
    """One of :data:`KINDS`."""
    name: str
    """What calls have."""
    description: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameter(self) -> str:
        """Name of the one argument, a text."""
        return KINDS[self.kind][0]

    @property
    def schema(self) -> dict[str, Any]:
        """Its description for a chat template, as transformers and the APIs of servers have it."""
        argument = {self.parameter: {"type": "string", "description": KINDS[self.kind][2]}}
        parameters = {"type": "object", "properties": argument, "required": [self.parameter]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolsConfig:
    """``parameters`` of the environment ``tools``."""

    tools: tuple[ToolConfig, ...]
    format: Format = "Hermes"
    calls: int = 8
    output: int = 4000
    """Maximum characters of the messages after a reply."""

    @classmethod
    def read(
        cls, tools: Any = (), format: Any = "Hermes", calls: Any = 8, output: Any = 4000, **unknown: Any
    ) -> Self:
        """Check the parameters of a spec.

        Raises:
            VerifierError: a parameter is unknown or wrong; the message has its field.
        """
        if unknown:
            known = ("tools", "format", "calls", "output")
            name = min(unknown)
            raise VerifierError(
                f"{_WHERE}.{name}: no such parameter{did_you_mean(name, known)} (known: {', '.join(known)})"
            )
        if not isinstance(tools, Sequence) or isinstance(tools, str) or not 1 <= len(tools) <= 16:
            raise VerifierError(f"{_WHERE}.tools: give a list of 1 to 16 tools, such as [calculator]")
        if format not in get_args(Format):
            raise VerifierError(
                f"{_WHERE}.format: {format!r} is none of {', '.join(get_args(Format))}{did_you_mean(str(format), get_args(Format))}"
            )
        _between(f"{_WHERE}.calls", calls, 1, 64)
        _between(f"{_WHERE}.output", output, 1, 12_000)
        read = tuple(_tool(one, f"{_WHERE}.tools[{at}]") for at, one in enumerate(tools))
        names = [one.name for one in read]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise VerifierError(
                f"{_WHERE}.tools: two have the name {repeated[0]!r}; give one another by name"
            )
        return cls(read, format, calls, output)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The ``tools`` of a chat template."""
        return [tool.schema for tool in self.tools]

    @cached_property
    def _lines(self) -> re.Pattern[str]:
        names = "|".join(re.escape(tool.name) for tool in self.tools)
        return re.compile(rf"^[ \t]*({names}):", re.MULTILINE)

    def read_calls(self, reply: str) -> list[Call | Malformed]:
        """The calls of a reply, in order; none in its thought. An argument that is cut is that of a malformed call, but of ``Text``."""
        text = after_thought(reply)
        match self.format:
            case "Hermes":
                return [self._call(found[1], "arguments") for found in _HERMES.finditer(text)]
            case "Llama3":
                return self._llama3(text)
            case "Text":
                known = [tool.name for tool in self.tools]
                _, *pieces = self._lines.split(text)
                return [
                    Call(known.index(name), argument.strip())
                    for name, argument in zip(pieces[::2], pieces[1::2], strict=True)
                ]

    def _llama3(self, text: str) -> list[Call | Malformed]:
        found = _LLAMA.match(text)
        if found is None:
            return []
        text = text[found.start(1) :].removeprefix("<|python_tag|>").strip()
        decoder, calls = json.JSONDecoder(), list[Call | Malformed]()
        while text:
            try:
                given, end = decoder.raw_decode(text)
            except (ValueError, RecursionError) as error:
                return [*calls, Malformed(_no_json(error))]
            calls.append(self._checked(given, "parameters"))
            text = text[end:].lstrip(" \n\t;,")
        return calls

    def _call(self, text: str, arguments: str) -> Call | Malformed:
        try:
            return self._checked(json.loads(text), arguments)
        except (ValueError, RecursionError) as error:
            return Malformed(_no_json(error))

    def _checked(self, given: Any, arguments: str) -> Call | Malformed:
        names = [tool.name for tool in self.tools]
        name, values = (given.get("name"), given.get(arguments)) if isinstance(given, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(values, dict):
            return Malformed(f'a call is {{"name": …, "{arguments}": {{…}}}}')
        if name not in names:
            return Malformed(
                f"there is no tool {name[:_CUT]!r}{did_you_mean(name[:_CUT], names)}; the tools are {', '.join(names)}"
            )
        at = names.index(name)
        wanted = self.tools[at].parameter
        if values.keys() != {wanted}:
            got = ", ".join(sorted(map(str, values)))[:_CUT] or "none"
            return Malformed(f"{name} has the argument {wanted}, and got {got}")
        if not isinstance(values[wanted], str):
            return Malformed(f"{wanted} of {name} has to be a string")
        return Call(at, values[wanted])


def tools_of(given: EnvironmentSpec | None) -> ToolsConfig | None:
    """The tools of an environment; None if it has none.

    Raises:
        VerifierError: see :meth:`ToolsConfig.read`.
    """
    return None if given is None or given.name != "tools" else ToolsConfig.read(**given.parameters or {})


def _no_json(error: Exception) -> str:
    return f"the call is not JSON: {str(error)[:_CUT] if isinstance(error, json.JSONDecodeError) else 'it is nested too deep, or has a number that is too long'}"


def _between(field: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise VerifierError(f"{field}: {value!r} is no integer from {low} to {high:,}")


def _tool(given: Any, where: str) -> ToolConfig:
    """A tool: its kind, or its kind with options."""
    if isinstance(given, str):
        given = {given: {}}
    if not isinstance(given, Mapping) or len(given) != 1:
        raise VerifierError(f"{where}: write a tool, or a tool with options, such as {{search: {{path: …}}}}")
    ((kind, options),) = given.items()
    if kind not in KINDS:
        raise VerifierError(
            f"{where}: there is no tool {kind!r}{did_you_mean(str(kind), KINDS)} (known: {', '.join(KINDS)})"
        )
    known = {**_COMMON, **KINDS[kind][3]}
    if not isinstance(options, Mapping):
        raise VerifierError(f"{where}.{kind}: give its options, such as {{name: calc}}")
    for name, value in options.items():
        if name not in known or type(value) is not known[name]:
            has = ", ".join(f"{key} ({type_.__name__})" for key, type_ in known.items())
            raise VerifierError(f"{where}.{kind}.{name}: no such option, or not of its type; it has {has}")
    name = options.get("name", kind)
    if not _NAME.fullmatch(name):
        raise VerifierError(f"{where}.{kind}.name: {name!r} is no name of letters, digits and _")
    if kind == "search" and "path" not in options:
        raise VerifierError(f"{where}.search.path: give the file that is searched")
    for option, high in (("seconds", 120), ("results", 20)):
        _between(f"{where}.{kind}.{option}", options.get(option, 1), 1, high)
    own = {key: value for key, value in options.items() if key not in _COMMON}
    return ToolConfig(kind, name, options.get("description", KINDS[kind][1]), own)
