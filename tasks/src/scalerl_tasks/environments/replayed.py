"""Environments whose objects have a state: one object plays one episode, as in SkyRL-gym and the APIs that follow Gym.

A subclass makes the object, and steps replay it (:mod:`.protocol`)::

    class Own(Replayed):
        def open(self, prompt):
            return Game(seed=prompt.id, goal=prompt.answer)
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from scalerl_tasks.environments.protocol import Step
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import SCORE_RANGE


@dataclass(frozen=True, slots=True)
class _Episode:
    game: Any
    rewards: tuple[float, ...] = ()
    """Of its steps so far."""

    def close(self) -> None:
        if callable(close := getattr(self.game, "close", None)):
            with contextlib.suppress(Exception):
                close()


class Replayed(ABC):
    """An environment made of objects with a method ``step(action)``.

    ``step`` returns ``observations`` (messages), ``reward`` and ``done``, as items or as attributes. The object of an episode that goes on is
    kept for its next step; where it is gone, another one gets all replies again. So it has to be repeatable: what it draws depends
    on the prompt.
    """

    kept: ClassVar[int] = 512
    """Maximum number of objects that a process keeps. With more episodes at once, each step replays those before it."""

    @abstractmethod
    def open(self, prompt: Prompt) -> Any:
        """A new object at the start of the prompt's episode."""

    def total(self, rewards: Sequence[float]) -> float:
        """The reward of an episode that ends now, of those of its steps: their sum."""
        return sum(rewards)

    def step(self, prompt: Prompt, replies: Sequence[str], /) -> Step:
        """See :class:`~.protocol.Environment`.

        Raises:
            ValueError: an episode ended before its last reply.
        """
        kept: OrderedDict[tuple[str, ...], _Episode] = self.__dict__.setdefault("_kept", OrderedDict())
        *earlier, last = replies
        key = (prompt.id, prompt.text, prompt.answer, *earlier)
        episode = kept.pop(key, None)
        if episode is None:
            episode = _Episode(self.open(prompt))
            for reply in earlier:
                episode, _, done = _played(episode, reply)
                if done:
                    episode.close()
                    raise ValueError("the episode ended before its last reply: steps are not repeatable")
        episode, observations, done = _played(episode, last)
        if done:
            episode.close()
        else:
            if (other := kept.pop((*key, last), None)) is not None:  # of an equal episode
                other.close()
            kept[*key, last] = episode
            while len(kept) > self.kept:
                kept.popitem(last=False)[1].close()
        turn = 0.0
        if type(self).total is Replayed.total:  # of another total, no part is known
            low, high = getattr(self, "range", SCORE_RANGE)
            turn = min(max(episode.rewards[-1], low - high), high - low)
        return Step(observations, done, self.total(episode.rewards), turn_reward=turn)


def _played(episode: _Episode, reply: str) -> tuple[_Episode, Sequence[Any], bool]:
    """The episode after a reply, the messages, and whether it is over."""
    try:
        found = episode.game.step(reply)
        if isinstance(found, Mapping):
            observations, reward, done = (found[name] for name in ("observations", "reward", "done"))
        else:
            observations, reward, done = found.observations, found.reward, found.done
        return _Episode(episode.game, (*episode.rewards, float(reward))), observations, bool(done)
    except BaseException:
        episode.close()
        raise
