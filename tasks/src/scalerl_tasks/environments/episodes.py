"""Steps of episodes, as verdicts with messages: of an environment's processes, of the task's verifier (``retry``), or of both
(``tool_environment``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from scalerl_tasks.environments.protocol import Message, read_replies, write_replies
from scalerl_tasks.environments.tool_environment import PARTS
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.grading.combined import GroupGrader
from scalerl_tasks.grading.grading_pool import Graded, PoolCounts, Tick
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.thoughts import THOUGHT
from scalerl_tasks.verdict import MAX_PARTS, Verdict

Episodes = Sequence[Sequence[str]]
"""Episodes of a prompt: all replies of each so far."""


class EpisodeGrader(Protocol):
    """Makes the steps of a task's episodes."""

    async def steps(
        self, prompt: Prompt, episodes: Episodes, *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        """The step after the last reply of each of several episodes of a prompt.

        Args:
            in_thought: whether the prompt opens a thought that each reply continues.
            on_graded: see :meth:`~scalerl_tasks.grading.grading_pool.GradingPool.score_group`.

        Raises:
            GradingError: the processes cannot be kept running.
        """


@dataclass(frozen=True)
class EnvironmentGrader:
    """Sends episodes to the processes of an environment, which :class:`~.environment_verifier.EnvironmentVerifier` serves there."""

    pool: GroupGrader

    async def steps(
        self, prompt: Prompt, episodes: Episodes, *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        head = THOUGHT if in_thought else ""
        return await self.pool.score_group(
            prompt,
            [write_replies([head + reply for reply in replies]) for replies in episodes],
            on_graded=on_graded,
        )


@dataclass(frozen=True)
class Retry:
    """Grades the last reply by a verifier, and puts its verdict into words until the score is 1."""

    verifier: GroupGrader
    wrong: str = "That is not correct. Try again."
    unanswered: str = "There is no answer in your reply. Try again."

    async def steps(
        self, prompt: Prompt, episodes: Episodes, *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        last = [replies[-1] for replies in episodes]
        return [
            self._said(graded)
            for graded in await self.verifier.score_group(
                prompt, last, in_thought=in_thought, on_graded=on_graded
            )
        ]

    def _said(self, graded: Graded) -> Graded:
        if graded.verdict is None or graded.verdict.score >= 1:
            return graded
        text = self.unanswered if graded.verdict.answered is False else self.wrong
        return replace(graded, messages=(Message(text),))


class ToolsGrader:
    """Makes the calls of replies in processes of their own, and has the task's verifier score replies without calls.

    A :class:`~scalerl_tasks.grading.combined.GroupGrader` of :func:`~.protocol.write_replies` of episodes, for
    :class:`EnvironmentGrader`. Verdicts have the verifier's parts and those of :class:`~.tool_environment.Tools`; the score of an episode that
    ends with calls is 0.
    """

    def __init__(self, tools: GroupGrader, verifier: GroupGrader) -> None:
        self._tools, self._verifier = tools, verifier
        self._stack = contextlib.AsyncExitStack()
        self.part_names: tuple[str, ...] = ()

    @property
    def counts(self) -> PoolCounts:
        """The verifier's, and what failed or was restarted of the tools'."""
        return self._verifier.counts + self._tools.counts

    @property
    def problem(self) -> str:
        return self._verifier.problem

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._verifier)
            await stack.enter_async_context(self._tools)
            self.part_names = (*self._verifier.part_names, *PARTS)
            if len(set(self.part_names)) < len(self.part_names) or len(self.part_names) > MAX_PARTS:
                raise VerifierError(
                    f"environment tools: the parts of a verdict are {', '.join(self.part_names)}; name at most {MAX_PARTS}, each once"
                )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def score_group(
        self, prompt: Prompt, completions: Sequence[str], *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        steps = await self._tools.score_group(prompt, completions, on_graded=on_graded)
        last = [at for at, step in enumerate(steps) if step.verdict is not None and not step.messages]
        answers = [read_replies(completions[at])[-1] for at in last]
        graded = await self._verifier.score_group(prompt, answers, on_graded=on_graded) if last else []
        found = [self._of_calls(step) for step in steps]
        for at, one in zip(last, graded, strict=True):
            found[at] = self._of_answer(steps[at], one)
        return found

    def _of_calls(self, step: Graded) -> Graded:
        if step.verdict is None:
            return step
        parts = {**dict.fromkeys(self._verifier.part_names, 0.0), **step.verdict.parts}
        return Graded(Verdict(0.0, parts, False), None, step.messages)

    def _of_answer(self, step: Graded, graded: Graded) -> Graded:
        if graded.verdict is None or step.verdict is None:
            return graded
        parts = {**graded.verdict.parts, **step.verdict.parts}
        return replace(graded, verdict=Verdict(graded.verdict.score, parts, graded.verdict.answered))

    async def check(self, prompts: Sequence[Prompt], on_checked: Callable[[str | None], None]) -> None:
        """See :meth:`~scalerl_tasks.grading.grading_pool.GradingPool.check`; of the verifier."""
        await self._verifier.check(prompts, on_checked)
