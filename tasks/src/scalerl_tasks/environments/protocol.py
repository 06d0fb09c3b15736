"""What an environment implements, and the check of what it returns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from scalerl_tasks.errors import VerifierError
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import SCORE_RANGE, Verdict, as_verdict

MAX_MESSAGE_BYTES: Final = 48_000
"""Maximum size of the messages of a step, as JSON."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the environment."""

    content: str
    role: str = "user"
    """A role that the model's chat template knows, such as ``user`` or ``tool``."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says to a reply."""

    messages: Sequence[Message | str | Mapping[str, str]] = ()
    """What the model reads next; at least one, unless the episode is done. A text is a message of the user."""
    done: bool = False
    reward: float = 0.0
    """Reward of the episode if it ends here: because it is done, or because it has no turns or tokens left."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers that explain the reward, by the names that the environment declares in ``part_names``."""
    turn_reward: float = 0.0
    """The part of the episode's reward that this reply earned, for ``recipe.advantage.credit``; at most the width of the range of
    rewards. The last reply has the rest of the episode's reward, whatever its own is."""


class Environment(Protocol):
    """An environment of a task's episodes.

    One object serves all episodes, in any order. Rewards are in [0, 1], or in its attribute ``range: tuple[float, float]``; an
    attribute ``part_names: Sequence[str]`` declares the names of ``Step.parts``.
    """

    def step(self, prompt: Prompt, replies: Sequence[str], /) -> Step:
        """The step after the last of ``replies``, at least one, which are all replies of the episode so far.

        It depends on its arguments alone, as if the episode were played again from the start: another process may have made
        the earlier steps.
        """


@dataclass(frozen=True, slots=True)
class Continued:
    """An episode that goes on."""

    verdict: Verdict
    """Its verdict if it ends here."""
    content: bytes
    """What the model reads next, and the reward of the turn; see :func:`read_content`."""


def checked_step(
    step: Any,
    label: str,
    part_names: Sequence[str],
    bounds: tuple[float, float] = SCORE_RANGE,
) -> Verdict | Continued:
    """Check what an environment returned.

    Raises:
        VerifierError: it is no :class:`Step`, has no message although the episode goes on, or its messages are too long.
        ArithmeticError, TypeError, ValueError: the reward or a part is not in its range.
    """
    if not isinstance(step, Step):
        raise VerifierError(
            f"{label} returned {type(step).__name__}; return a scalerl_tasks.environments.protocol.Step"
        )
    verdict = as_verdict(Verdict(step.reward, step.parts), part_names, bounds)
    if step.done is True:
        return verdict
    if isinstance(step.messages, str | bytes | Mapping) or not isinstance(step.messages, Sequence):
        raise VerifierError(f"{label}: messages is {type(step.messages).__name__}; make it a list")
    if not step.messages:
        raise VerifierError(
            f"{label} returned no message, and the episode is not done; return a message, or done=True"
        )
    reward = float(step.turn_reward) / (bounds[1] - bounds[0])
    if not -1 <= reward <= 1:  # NaN is not
        raise ValueError(f"the verifier gave a turn {step.turn_reward}; the range of rewards is {bounds}")
    messages = [_pair(message, label) for message in step.messages]
    size = sum(len(content) for _, content in messages)
    encoded = json.dumps([reward, *messages]).encode() if size <= MAX_MESSAGE_BYTES else b""
    if not 0 < len(encoded) <= MAX_MESSAGE_BYTES:
        raise VerifierError(
            f"{label} returned messages of {max(size, len(encoded)):,} bytes; the limit is {MAX_MESSAGE_BYTES:,}: shorten them"
        )
    return Continued(verdict, encoded)


def _pair(message: Any, label: str) -> tuple[str, str]:
    """Role and content of a message."""
    match message:
        case str():
            return "user", message
        case Message(content=content, role=role) | {"content": content, "role": role}:
            if isinstance(content, str) and isinstance(role, str):
                return role, content
    raise VerifierError(
        f"{label} returned a message of {type(message).__name__}; it needs a role and a content, both texts"
    )


def read_content(encoded: bytes) -> tuple[tuple[Message, ...], float]:
    """The messages of a :class:`Continued`, in which lone surrogates are replaced, and the reward of its turn, as part of a score."""
    reward, *messages = json.loads(encoded)
    return tuple(
        Message(content.encode("utf-8", "replace").decode(), role.encode("utf-8", "replace").decode())
        for role, content in messages
    ), reward


def write_replies(replies: Sequence[str]) -> str:
    """Replies as one text, for a grading process."""
    return json.dumps(replies)


def read_replies(text: str) -> list[str]:
    """The replies of :func:`write_replies`."""
    replies: list[str] = json.loads(text)
    return replies
