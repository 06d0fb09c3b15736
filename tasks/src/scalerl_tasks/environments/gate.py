"""Holds the episodes of an environment that fails, so that nothing is learned from what is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from scalerl_processes.waiting import calling
from scalerl_tasks.environments.episodes import EpisodeGrader, Episodes
from scalerl_tasks.grading.grading_pool import Graded, Tick
from scalerl_tasks.prompts import Prompt

log = logging.getLogger("scalerl_tasks.environments.gate")

EPISODES: Final = 64
"""Of which the share is taken."""
MAX_FAILURES: Final = EPISODES // 2
_MAX_TRIES = 6
"""After which an episode that fails alone is let go."""


class EnvironmentGate:
    """Makes the steps of ``grader``. While more than half of the last :data:`EPISODES` episodes have failed, an episode that fails has no
    verdict yet: its step, which replays it, is tried again with back-off. What succeeds goes on, and opens the gate once it has ended.
    An episode counts as failed once, however often it is tried. One whose failure lasts is let go without a verdict after
    :data:`_MAX_TRIES` tries, if since then at least as many others have ended with one as wait: a group whose members hold it would
    otherwise end none that opens the gate.

    ``problem`` says why episodes wait; empty if none does.

    Args:
        delays: seconds before the first try, and the longest ones.
        waiting_seconds: between two calls of ``on_graded``.
    """

    def __init__(
        self,
        grader: EpisodeGrader,
        where: str,
        delays: tuple[float, float] = (1.0, 30.0),
        waiting_seconds: float = 1.0,
    ) -> None:
        self._grader, self._where = grader, where
        (self._first_delay, self._max_delay), self._waiting_seconds = delays, waiting_seconds
        self._failed: deque[bool] = deque(maxlen=EPISODES)
        """Whether each of the last episodes failed."""
        self._ended = self._waiting = 0
        self.problem = ""

    async def steps(
        self, prompt: Prompt, episodes: Episodes, *, in_thought: bool = False, on_graded: Tick = None
    ) -> list[Graded]:
        """See :meth:`~.episodes.EpisodeGrader.steps`. Calls ``on_graded`` every second while it waits, so that the lease is kept.

        Raises:
            GradingError
        """
        found = await self._grader.steps(prompt, episodes, in_thought=in_thought, on_graded=on_graded)
        failed = _failed(found)
        if not failed:
            return found
        self._note([True] * len(failed), f"{found[failed[0]].error}")
        delay, tries, ended, held = self._first_delay, 1, self._ended, time.monotonic()
        while failed and self.problem:
            if tries >= _MAX_TRIES and self._ended - ended >= self._waiting + len(failed):
                break
            self._waiting += len(failed)
            try:
                async with calling(on_graded or (lambda: None), self._waiting_seconds):
                    await asyncio.sleep(delay)
                waited = time.monotonic() - held
                again = await self._grader.steps(
                    prompt, [episodes[at] for at in failed], in_thought=in_thought, on_graded=on_graded
                )
            finally:
                self._waiting -= len(failed)
            for at, step in zip(failed, again, strict=True):
                found[at] = replace(step, waited=waited + step.waited)
            delay, tries, failed = min(2 * delay, self._max_delay), tries + 1, _failed(found)
        return found

    def ended(self, episodes: int) -> None:
        """Notes episodes that have ended with a verdict."""
        self._ended += episodes
        self._note([False] * episodes, "")

    def _note(self, failed: Sequence[bool], error: str) -> None:
        self._failed.extend(failed)
        failures = sum(self._failed)
        is_shut = len(self._failed) == EPISODES and failures > MAX_FAILURES
        if is_shut and not self.problem:
            log.warning("%s fails; its episodes wait: %s", self._where, error)
        elif self.problem and not is_shut:
            log.info("%s works again", self._where)
        if not is_shut:
            self.problem = ""
        elif error:
            self.problem = f"{self._where} failed in {failures} of the last {EPISODES} episodes: {error}"


def _failed(steps: Sequence[Graded]) -> list[int]:
    return [at for at, step in enumerate(steps) if step.error is not None]
