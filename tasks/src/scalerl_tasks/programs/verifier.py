"""The verifier ``code``: runs a completion's program in the sandbox, against the prompt's tests."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from scalerl_tasks.answers.extraction import after_thought
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.programs.suites import (
    Calls,
    Code,
    Scripts,
    Suite,
    fenced_blocks,
    read_suite,
    same_output,
    same_value,
)
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sandbox.confinement import Limits
from scalerl_tasks.sandbox.remote import RESULT
from scalerl_tasks.sandbox.sandbox import Process, ProgramError, Sandbox, ScriptResult, check_kernel
from scalerl_tasks.sandbox.values import encode, plain, refuse
from scalerl_tasks.verdict import Verdict

_FIRST_SECONDS = 30.0
SHARE_OF_TIMEOUT = 0.8
"""Of a completion's time limit, for its program: the grader must have time to say that it was too slow."""


@dataclass(frozen=True, slots=True)
class CodeConfig:
    """Settings of the verifier.

    Attributes:
        partial: ``All``: 1 if all tests are passed, else 0. ``Share``: the share of tests that are passed.
        limits: of a program.
        seconds: wall-clock time for all tests of a completion.
    """

    partial: Literal["All", "Share"] = "All"
    limits: Limits = field(default_factory=Limits)
    seconds: float = 10.0 * SHARE_OF_TIMEOUT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program did with its tests.

    Attributes:
        passed: number of tests.
        total: the same, of all.
        compiled: whether the program is Python.
        problem: of the first test that it did not pass.
    """

    passed: int
    total: int
    compiled: bool = True
    problem: str = ""


class CodeVerifier:
    """Runs the program of a completion: the last fenced block of what follows the thought, or all of it without a fence.

    The tests are those of the prompt's answer (:mod:`scalerl_tasks.programs.suites`). Verdicts have the parts ``compiled`` and
    ``tests_passed``, a share; with ``All``, tests after the first that fails are not run.
    """

    name = "code"
    part_names = ("compiled", "tests_passed")

    def __init__(self, config: CodeConfig) -> None:
        check_kernel()
        self._config = config
        self._sandbox: Sandbox | None = None
        self._read: tuple[Prompt, Suite] | None = None

    def open(self) -> None:
        """Start the sandbox of this process, before its own limits.

        Raises:
            VerifierError: the sandbox cannot be set up.
        """
        self._sandbox = Sandbox.start(self._config.limits)
        result = self._sandbox.run("print(input())", "1", _FIRST_SECONDS)
        if result != ScriptResult("1\n"):
            self._sandbox.close()
            raise VerifierError(
                f"verifier.code: the sandbox runs no program: {result.problem or result.output}"
            )

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._sandbox is not None
        self._sandbox.close()
        self._sandbox = None

    def score(self, prompt: Prompt, completion: str, /) -> Verdict:
        if self._read is None or self._read[0] is not prompt:  # once for a group: some tests are compressed
            self._read = (prompt, read_suite(prompt))
        suite = self._read[1]
        program = program_of(completion)
        outcome = self.run(prompt, suite, program) if program.strip() else Outcome(0, 1, compiled=False)
        share = outcome.passed / outcome.total
        score = share if self._config.partial == "Share" else float(outcome.passed == outcome.total)
        parts = {"compiled": float(outcome.compiled), "tests_passed": share}
        return Verdict(score, parts, answered=bool(program.strip()))

    def check(self, prompt: Prompt, /) -> None:
        suite = read_suite(prompt)
        if not prompt.solution:
            return
        outcome = self.run(prompt, suite, program_of(prompt.solution))
        if outcome.passed < outcome.total:
            raise VerifierError(
                f"prompt {prompt.id}: its own solution passes {outcome.passed} of {outcome.total} tests: {outcome.problem}; correct the "
                "row, drop it, or raise the limits of verifier.code"
            )

    def samples(self) -> Sequence[tuple[Prompt, str]]:
        script = '{"inputs": ["2\\n"], "outputs": ["4"]}'
        return [
            (Prompt("sample", "", script), "print(int(input()) * 2)"),
            (Prompt("sample", "", '["assert double(2) == 4"]'), "def double(n):\n    return n * 2"),
        ]

    def run(self, prompt: Prompt, suite: Suite, program: str) -> Outcome:
        """Run a program's tests, up to the first that fails if all have to be passed."""
        assert self._sandbox is not None, "open() starts the sandbox"
        deadline = time.monotonic() + self._config.seconds
        if isinstance(suite, Code) and suite.entry and f"def {suite.entry}" not in program:
            program = prompt.text + "\n" + program  # it continues the prompt
        program = textwrap.dedent(program)
        match suite:
            case Scripts():
                return self._scripts(self._sandbox, suite, program, deadline)
            case Calls():
                return self._calls(self._sandbox, suite, program, deadline)
            case Code():
                return self._code(self._sandbox, suite, program, deadline)

    def _scripts(self, sandbox: Sandbox, suite: Scripts, program: str, deadline: float) -> Outcome:
        passed, problem = 0, ""
        for at, (given, wanted) in enumerate(suite.cases):
            seconds = min(sandbox.wall_seconds, deadline - time.monotonic())
            if seconds <= 0:
                problem = problem or "took too long"
                break
            result = sandbox.run(program, given, seconds)
            if not result.compiled:
                return Outcome(0, len(suite.cases), compiled=False, problem=result.problem)
            if not result.problem and same_output(wanted, result.output):
                passed += 1
                continue
            problem = problem or f"test {at + 1}: " + (
                result.problem or f"printed {_shown(result.output)}, not {_shown(wanted)}"
            )
            if self._config.partial == "All":
                break
        return Outcome(passed, len(suite.cases), problem=problem)

    def _calls(self, sandbox: Sandbox, suite: Calls, program: str, deadline: float) -> Outcome:
        passed, total, problem = 0, len(suite.cases), ""
        try:
            with sandbox.process({"source": program}, _seconds(deadline), total) as process:
                if (failed := _failed_to_begin(process, total)) is not None:
                    return failed
                for at, (arguments, wanted) in enumerate(suite.cases):
                    request = {
                        "function": suite.function,
                        "arguments": [encode(one, refuse) for one in arguments],
                    }
                    answer = process.ask(request, sandbox.wall_seconds)
                    if _is_wanted(answer, wanted, exact=suite.exact):
                        passed += 1
                        continue
                    problem = problem or f"test {at + 1}: {_answered(answer)}, not {_shown(wanted[0])}"
                    if self._config.partial == "All":
                        break
        except ProgramError as error:
            problem = problem or str(error)
        return Outcome(passed, total, problem=problem)

    def _code(self, sandbox: Sandbox, suite: Code, program: str, deadline: float) -> Outcome:
        passed, total, problem, done = 0, 1, "", 0
        request = {
            "tests": suite.kind,
            "source": suite.source,
            "setup": list(suite.setup),
            "entry": suite.entry,
        }
        try:
            with sandbox.process({"source": program}, _seconds(deadline), 8) as process:
                if (failed := _failed_to_begin(process, 1)) is not None:
                    return failed
                with sandbox.process(request, _seconds(deadline), 8, tester=True) as tester:
                    while done < total:
                        message = tester.receive()
                        if message[:1] != RESULT:
                            process.send(message[1:])
                            tester.send(process.receive())
                            continue
                        result = json.loads(message[1:])
                        total = result.get("count", total)
                        if "passed" not in result:
                            continue
                        done += 1
                        passed += result["passed"]
                        if not result["passed"]:
                            problem = problem or f"test {done}: {result['why']}"
                            if self._config.partial == "All":
                                break
        except ProgramError as error:
            problem = problem or str(error)
        return Outcome(passed, total, problem=problem)


def program_of(completion: str) -> str:
    """The program of a completion: the last fenced block after the thought; without a fence, all of it. Empty if the block is not
    closed.

    >>> program_of("<think>hm</think>So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)'
    """
    text = after_thought(completion)
    if "```" not in text:
        return text
    if text.count("```") % 2:
        return ""
    blocks = list(fenced_blocks(text))
    return blocks[-1] if blocks else ""


def _seconds(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _failed_to_begin(process: Process, total: int) -> Outcome | None:
    """Read the first answer of a program: None if its top level ran."""
    answer = process.answer()
    if "raised" not in answer:
        return None
    return Outcome(0, total, compiled=answer.get("compiled") is not False, problem=_answered(answer))


def _is_wanted(answer: dict[str, Any], wanted: Sequence[Any], *, exact: bool) -> bool:
    try:
        given = plain(answer["value"])
        return any(bool(one == given) if exact else same_value(one, given) for one in wanted)
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError):
        return False


def _answered(answer: dict[str, Any]) -> str:
    raised = answer.get("raised")
    if isinstance(raised, dict):
        return f"raised {raised.get('exception')}: {str(answer.get('text', ''))[:200]}"
    return f"returned {_shown(json.dumps(answer.get('value')))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
