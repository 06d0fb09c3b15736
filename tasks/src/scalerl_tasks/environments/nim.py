"""Nim with one heap, a game that a small model learns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scalerl_tasks.answers.extraction import extract_answer
from scalerl_tasks.environments.protocol import Step
from scalerl_tasks.prompts import Prompt

_INTEGER = re.compile(r"\d{1,9}")


class Nim:
    """Two players take from 1 to ``most`` objects in turn; who takes the last one wins.

    The prompt's last two integers are the heap and ``most``. The last integer of a reply is the number that the model takes.
    The message after it has the heap that the opponent leaves, and ``most``. A reply that is no legal move loses. The
    opponent leaves a multiple of ``most + 1`` if it can (C. L. Bouton, Annals of Mathematics 3, 1901, on such
    positions), else it takes 1: to win, the model leaves one in every turn.
    """

    def step(self, prompt: Prompt, replies: Sequence[str], /) -> Step:
        """Play the game with these moves.

        Raises:
            ValueError: the prompt has no two integers of at least 1.
        """
        numbers = [int(number) for number in _INTEGER.findall(prompt.text)[-2:]]
        if len(numbers) < 2 or min(numbers) < 1:
            raise ValueError(
                "the prompt has no heap and no maximum: write two integers of at least 1, such as '13 3'"
            )
        heap, most = numbers
        for reply in replies:
            found = _INTEGER.findall(extract_answer(reply))
            taken = int(found[-1]) if found else 0
            if not 1 <= taken <= min(most, heap):
                return Step(done=True)
            heap -= taken
            if heap == 0:
                return Step(done=True, reward=1.0)
            heap -= heap % (most + 1) or 1
            if heap == 0:
                return Step(done=True)
        return Step([f"{heap} {most}"])
