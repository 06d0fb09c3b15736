"""Steps of episodes, as verdicts with messages: of an environment's processes, or of the task's verifier (``retry``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scalerl_tasks.environments.protocol import Message, write_replies
from scalerl_tasks.grading.combined import GroupGrader
from scalerl_tasks.grading.grading_pool import Graded
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.text import THOUGHT


class EpisodeGrader(Protocol):
    """Makes the steps of a task's episodes."""

    async def steps(
        self,
        prompt: Prompt,
        episodes: Sequence[Sequence[str]],
        *,
        in_thought: bool = False,
        on_graded: Callable[[], None] | None = None,
    ) -> list[Graded]:
        """The step after the last reply of each of several episodes of a prompt.

        Args:
            episodes: all replies of each so far.
            in_thought: whether the prompt opens a thought that each reply continues.
            on_graded: see :meth:`~scalerl_tasks.grading.grading_pool.GradingPool.score_group`.

        Raises:
            GradingError: the processes cannot be kept running.
        """
        ...


@dataclass(frozen=True)
class EnvironmentGrader:
    """Sends episodes to the processes of an environment, which :class:`~.verifier.EnvironmentVerifier` serves there."""

    pool: GroupGrader

    async def steps(
        self,
        prompt: Prompt,
        episodes: Sequence[Sequence[str]],
        *,
        in_thought: bool = False,
        on_graded: Callable[[], None] | None = None,
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
        self,
        prompt: Prompt,
        episodes: Sequence[Sequence[str]],
        *,
        in_thought: bool = False,
        on_graded: Callable[[], None] | None = None,
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
        return Graded(graded.verdict, None, (Message(text),))
