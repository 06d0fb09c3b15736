"""The environment ``tools``: makes the calls of a reply, and gives what they return as messages of the role ``tool``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from scalerl_tasks.environments.calculator import calculate
from scalerl_tasks.environments.passages import Passages
from scalerl_tasks.environments.protocol import Message, Step
from scalerl_tasks.environments.tool_calls import Call, Malformed, ToolConfig, ToolsConfig
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sandbox.confinement import Limits
from scalerl_tasks.sandbox.sandbox import TOOK_TOO_LONG, Sandbox, check_kernel

ROLE: Final = "tool"
PARTS: Final = ("calls", "malformed")
"""Number of calls of an episode that were made, and of those that were not."""
_OTHER_CALLS: Final = "error: {} further calls were not made; a reply may have {} at most"
_MAX_BYTES: Final = 40_000
"""Of the messages after a reply, below :data:`~.protocol.MAX_MESSAGE_BYTES`."""
_PROGRAM: Final = """
import ast as _ast
def _run(source):
    tree = _ast.parse(source, "call.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    names = {{"__name__": "__main__"}}
    exec(compile(tree, "call.py", "exec"), names)
    if last is not None:
        value = eval(compile(_ast.Expression(last.value), "call.py", "eval"), names)
        if value is not None:
            print(value if isinstance(value, str) else repr(value))
try:
    _run({source!r})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
_TOOL_PYTHON: Final = "environment.parameters.tools: the tool python"
_Run = Callable[[str, float], str]
"""A tool: its argument and a time on the monotonic clock at which it has to end, to what it returns.

Raises:
    ValueError: it fails; the text says why.
"""


class Tools:
    """Calls are made in their order, each as if it were the only one. A reply without calls is done; its reward is that of the verifier.

    Args:
        seconds: for all calls of a reply.
        memory_bytes: of a program.
        parameters: as :meth:`~.tool_calls.ToolsConfig.read`.

    Raises:
        VerifierError: a parameter is wrong, or a tool cannot be used here.
    """

    part_names = PARTS

    def __init__(self, seconds: float = 8.0, memory_bytes: int = 256 << 20, **parameters: Any) -> None:
        self._config = ToolsConfig.read(**parameters)
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._sandboxes: dict[int, Sandbox] = {}
        self._run: list[_Run] = [self._runner(at, tool) for at, tool in enumerate(self._config.tools)]

    def _runner(self, at: int, tool: ToolConfig) -> _Run:
        match tool.kind:
            case "calculator":
                return lambda text, _: calculate(text)
            case "search":
                passages, results = Passages(tool.options["path"]), tool.options.get("results", 3)
                return lambda text, end: "\n\n".join(passages.search(text, results, end)) or "nothing found"
        check_kernel(_TOOL_PYTHON, ", or leave the tool out")
        return lambda text, deadline: self._python(at, text, deadline)

    def open(self) -> None:
        """Start the sandboxes of this process, before its own limits.

        Raises:
            VerifierError: a sandbox cannot be set up.
        """
        for at, tool in enumerate(self._config.tools):
            if tool.kind == "python":
                limits = Limits(tool.options.get("seconds", 4), self._memory_bytes)
                self._sandboxes[at] = Sandbox.start(limits, user=_TOOL_PYTHON)

    def close(self) -> None:
        for sandbox in self._sandboxes.values():
            sandbox.close()

    def step(self, prompt: Prompt, replies: Sequence[str], /) -> Step:
        found = [self._config.read_calls(reply) for reply in replies]
        made = [[isinstance(one, Call) for one in calls[: self._config.calls]] for calls in found]
        calls = sum(map(sum, made))
        parts = {"calls": calls, "malformed": sum(map(len, found)) - calls}
        if not found[-1]:
            return Step(done=True, parts=parts)
        deadline = time.monotonic() + self._seconds
        texts = [self._result(one, deadline) for one in found[-1][: self._config.calls]]
        if more := len(found[-1]) - len(texts):
            texts.append(_OTHER_CALLS.format(more, self._config.calls))
        return Step([Message(self._cut(text, len(texts)), ROLE) for text in texts], parts=parts)

    def _result(self, call: Call | Malformed, deadline: float) -> str:
        if isinstance(call, Malformed):
            return f"error: {call.problem}"
        try:
            return self._run[call.tool](call.argument, deadline)
        except ValueError as error:
            return f"error: {error}"

    def _python(self, at: int, source: str, deadline: float) -> str:
        sandbox = self._sandboxes[at]
        seconds = min(sandbox.wall_seconds, deadline - time.monotonic())
        if seconds <= 0:
            raise ValueError("no time was left for this call")
        result = sandbox.run(_PROGRAM.format(source=source), "", seconds)
        if result.problem:
            has = f"{sandbox.limits.cpu_seconds} s of processor time and {sandbox.limits.memory_bytes >> 20:,} MiB"
            if result.problem == TOOK_TOO_LONG:
                has = f"{seconds:.3g} s"
            return f"{result.output}\nerror: the program {result.problem} (it has {has})".lstrip()
        return result.output.removesuffix("\n") or "(the program printed nothing)"

    def _cut(self, text: str, messages: int) -> str:
        """The first and the last characters of a text that is longer than its share."""
        characters, most = self._config.output // messages or 1, _MAX_BYTES // messages
        found = _shortened(text, characters)
        while len(json.dumps(found)) > most:
            characters = characters * 3 // 4
            found = _shortened(text, characters)
        return found


def _shortened(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    mark = f" … {len(text) - characters:,} characters left out … "
    kept = characters - len(mark)
    return text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :] if kept > 0 else text[:characters]
