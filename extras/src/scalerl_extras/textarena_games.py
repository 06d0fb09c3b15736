"""The environment ``textarena``: games of one player of the package textarena, which is installed beside this one.

``python -m scalerl_extras.textarena_games GAME COUNT [OPTIONS]`` writes the prompts of a task: the first observations of COUNT games,
with their seeds. A game draws from the interpreter's generator of random numbers; here each game has a state of it of its own, so that a step is
repeatable whatever other games do in between.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from scalerl_tasks.answers.extraction import after_thought
from scalerl_tasks.environments.replayed import Replayed
from scalerl_tasks.errors import VerifierError, did_you_mean
from scalerl_tasks.prompts import Prompt

RELEASE: Final = "0.7.4"
"""Release of textarena. Another one has other games for the same seed: a change here is a change of the environment's code."""
ONLINE: Final = ("GuessWho", "TwentyQuestions")
"""Games of one player that ask a model over the network."""
GO_ON: Final = "Go on."
"""The message where a game says nothing to a move."""
NLTK_DATA: Final = "words averaged_perceptron_tagger_eng"
"""Data of nltk that games of words read."""


class TextArena(Replayed):
    """Games of one player. The prompt is a game's first observation, and its metadata have the ``seed``.

    The reward is what the game gives at its end, between 0 and 1: a negative one counts as 0, and so does one that is no number, which some games
    give for an invalid move. A game that has not ended has 0.

    Args:
        game: its id, such as ``GuessTheNumber-v0``.
        options: arguments of the game, in place of those of its id.

    Raises:
        VerifierError: textarena is not installed, or has no such game that can be played here.
    """

    def __init__(self, game: str, options: Mapping[str, Any] | None = None) -> None:
        self._game, self._options = game, dict(options or {})
        Game(game, self._options, 0)  # imports what it needs, and is refused before the run

    def open(self, prompt: Prompt) -> Game:
        seed = prompt.metadata.get("seed")
        if type(seed) is not int:
            raise ValueError(
                f"the prompt {prompt.id} has no seed in its metadata: write prompts with python -m {__spec__.name} {self._game} COUNT"
            )
        return Game(self._game, self._options, seed)


class Game:
    """One game; ``step`` is that of :class:`~scalerl_tasks.environments.replayed.Replayed`.

    Raises:
        VerifierError: it cannot be played.
    """

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        arena = _textarena()
        known = sys.modules["textarena.envs.registration"].ENV_REGISTRY
        if name not in known:
            raise VerifierError(f"textarena has no game {name!r}{did_you_mean(name, known)}")
        if name.startswith(ONLINE):
            raise VerifierError(
                f"textarena's game {name} asks a model over the network: choose one that is offline, such as GuessTheNumber-v0"
            )
        outer = random.getstate()
        try:
            random.seed(seed)
            with _no_download():
                wrapped = arena.make(name, **options)
            self._actions: list[Callable[[str], str]] = []
            while isinstance(wrapped, arena.Wrapper):
                # Wrappers of observations repeat earlier ones, which the model still has in its context.
                if isinstance(wrapped, arena.ActionWrapper):
                    self._actions.append(wrapped.action)
                wrapped = wrapped.env
            self._env: Any = wrapped
            random.seed(seed)
            self._env.reset(num_players=1, seed=seed)
            self._random = random.getstate()
        except Exception as error:
            raise VerifierError(f"textarena's game {name} {_reason(error)}") from error
        finally:
            random.setstate(outer)
        if not isinstance(self._env.state, arena.SinglePlayerState):
            raise VerifierError(f"textarena's game {name} {_reason(None)}")
        self.first = self._said()

    def _said(self) -> str:
        """What the game has said since it was asked last."""
        own = sys.modules["textarena"].ObservationType.PLAYER_ACTION
        _, observations = self._env.get_observation()
        # Some games put a move where the kind belongs, and a number in place of the text.
        texts = [text for _, text, kind in observations if kind is not own and isinstance(text, str)]
        return "\n".join(text.strip("\n") for text in texts).strip()

    def step(self, reply: str) -> Mapping[str, Any]:
        """The game's answer to a move: ``observations``, ``reward`` and ``done``."""
        move = after_thought(reply).strip()
        for action in self._actions:
            move = action(move)
        outer = random.getstate()
        random.setstate(self._random)
        try:
            done, _ = self._env.step(move)
            self._random = random.getstate()
        finally:
            random.setstate(outer)
        if not done:
            return {"observations": [self._said() or GO_ON], "reward": 0.0, "done": False}
        reward = (self._env.close()[0] or {}).get(0)
        scored = min(max(float(reward), 0.0), 1.0) if isinstance(reward, int | float) else 0.0
        return {"observations": [], "reward": scored, "done": True}


def _textarena() -> Any:
    """The package.

    Raises:
        VerifierError: this release is not installed.
    """
    try:
        found = importlib.metadata.version("textarena")
        if found == RELEASE:
            return importlib.import_module("textarena")
        problem = f"is {found} here"
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        problem = f"is not installed here ({error})"
    raise VerifierError(
        f"textarena {problem}: pip install 'scalerl-extras[textarena]', which is textarena=={RELEASE}; on a cluster in the images of generator and trainer"
    )


@contextlib.contextmanager
def _no_download() -> Iterator[None]:
    """Modules of games of words download data of nltk when they are imported, each time; what is there is found without."""
    nltk: Any = importlib.import_module("nltk")
    download = nltk.download
    nltk.download = lambda *_, **__: True
    try:
        yield
    finally:
        nltk.download = download


def _reason(error: Exception | None) -> str:
    """Why a game cannot be played, and what to do."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, LookupError) and "nltk" in text:
        return f"needs data of nltk, which a run does not download: python -m nltk.downloader {NLTK_DATA}, on each machine"
    if error is None or (isinstance(error, AssertionError) and "number of players" in text):
        return "has several players, and textarena has no opponent that is offline: choose one of one player, such as GuessTheNumber-v0"
    return f"cannot be played here: {text[:300]}"


def main(arguments: list[str]) -> int:
    """Write prompts to standard output."""
    if len(arguments) not in (2, 3) or not arguments[1].isdecimal():
        print(f"usage: python -m {__spec__.name} GAME COUNT ['{{\"option\": value}}']", file=sys.stderr)
        return 2
    try:
        options = json.loads(arguments[2]) if len(arguments) == 3 else {}
        games = [Game(arguments[0], options, seed).first for seed in range(int(arguments[1]))]
    except (VerifierError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    distinct = len(set(games)) == len(games)
    for seed, first in enumerate(games):
        # Held-out prompts differ from those of training by their text; where a game hides all that differs, by its number.
        text = first if distinct else f"{first}\nGame {seed}."
        line = {"id": f"seed-{seed}", "prompt": text, "answer": "-", "metadata": {"seed": seed}}
        print(json.dumps(line, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
