"""Holds the episodes of an environment that fails, so that nothing is learned from what is left."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from scalerl_processes.waiting import calling
from scalerl_tasks.environments.episodes import EpisodeGrader
from scalerl_tasks.grading.grading_pool import Graded
from scalerl_tasks.prompts import Prompt

log = logging.getLogger("scalerl_tasks.environments.gate")

EPISODES: Final = 64
"""Of which the share is taken."""
MOST_FAILURES: Final = EPISODES // 2
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 1.0, 30.0
_WAITING_SECONDS = 1.0


class EnvironmentGate:
    """Makes the steps of ``grader``. While more than half of the last :data:`EPISODES` episodes have failed, an episode that fails has no
    verdict yet: its step, which replays it, is tried again with back-off. What succeeds goes on, and opens the gate.

    ``problem`` says why episodes wait; empty if none does.
    """

    def __init__(self, grader: EpisodeGrader, where: str) -> None:
        self._grader, self._where = grader, where
        self._failed: deque[bool] = deque(maxlen=EPISODES)
        """Whether each of the last episodes, or tries, failed."""
        self.problem = ""

    async def steps(
        self,
        prompt: Prompt,
        episodes: Sequence[Sequence[str]],
        *,
        in_thought: bool = False,
        on_graded: Callable[[], None] | None = None,
    ) -> list[Graded]:
        """See :meth:`~.episodes.EpisodeGrader.steps`. Calls ``on_graded`` every second while it waits, so that the lease is kept.

        Raises:
            GradingError
        """
        found = await self._grader.steps(prompt, episodes, in_thought=in_thought, on_graded=on_graded)
        delay = _FIRST_DELAY_SECONDS
        while failed := [at for at, step in enumerate(found) if step.error is not None]:
            self._note([True] * len(failed), f"{found[failed[0]].error}")
            if not self.problem:
                break
            async with calling(on_graded or (lambda: None), _WAITING_SECONDS):
                await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY_SECONDS)
            again = await self._grader.steps(
                prompt, [episodes[at] for at in failed], in_thought=in_thought, on_graded=on_graded
            )
            for at, step in zip(failed, again, strict=True):
                found[at] = step
        return found

    def ended(self, episodes: int) -> None:
        """Notes episodes that have ended with a verdict."""
        self._note([False] * episodes, "")

    def _note(self, failed: Sequence[bool], error: str) -> None:
        self._failed.extend(failed)
        failures = sum(self._failed)
        is_shut = len(self._failed) == EPISODES and failures > MOST_FAILURES
        if is_shut and not self.problem:
            log.warning("%s fails; its episodes wait: %s", self._where, error)
        elif self.problem and not is_shut:
            log.info("%s works again", self._where)
        if not is_shut:
            self.problem = ""
        elif error:
            self.problem = f"{self._where} failed in {failures} of the last {EPISODES} episodes: {error}"
