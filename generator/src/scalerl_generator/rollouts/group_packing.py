"""A sampled and graded group in the form in which the coordinator gets it; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scalerl_api.wire import (
    MAX_TEXT_BYTES,
    Completion,
    GroupText,
    RoutedExperts,
    Sample,
    Verdicts,
)
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_tasks.answers.extraction import extract_answer
from scalerl_tasks.grading.grading_pool import Graded
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.tokenizer import ModelTokenizer

_MAX_REPLY_CHARACTERS, _MAX_ANSWER_CHARACTERS = 400, 200
MAX_PATTERN_TOKENS: Final = 512
"""Longer patterns are not searched."""
MIN_REPEATS: Final = 4
"""Occurrences of the pattern in a row."""
MIN_LOOP_TOKENS: Final = 64
"""Of all occurrences: shorter ends repeat for good reasons, such as the lines of a table or the zeros of a number."""
_COMPARED: Final = 8


def packed_completions(
    completions: Sequence[PartialCompletion], teacher_logprobs: Sequence[bytes], prompt_tokens: int
) -> list[Completion]:
    """The finished completions with the teacher's log-probabilities.

    Args:
        teacher_logprobs: of each completion, little-endian float32; empty without a teacher.
    """
    packed = []
    for one, of_teacher in zip(completions, teacher_logprobs, strict=True):
        assert one.finish_reason is not None, "the completion is not complete"
        packed.append(
            Completion(
                token_ids=one.token_ids.tobytes(),
                logprobs=one.logprobs.tobytes(),
                teacher_logprobs=of_teacher,
                versions=one.version_spans,
                finish_reason=one.finish_reason,
                turns=one.turns,
                routed=routed_experts(one, prompt_tokens),
            )
        )
    return packed


def routed_experts(completion: PartialCompletion, prompt_tokens: int) -> RoutedExperts | None:
    """The recorded experts in the wire's form; None without any."""
    routed = completion.routed
    if not routed:
        return None
    kind = np.result_type(*(rows.experts.dtype for rows in routed)).newbyteorder("<")
    _, layers, chosen = routed[0].experts.shape
    return RoutedExperts(
        layers=layers,
        chosen=chosen,
        spans=[
            (prompt_tokens + rows.start, prompt_tokens + rows.start + len(rows.experts)) for rows in routed
        ],
        experts=b"".join(rows.experts.astype(kind).tobytes() for rows in routed),
    )


def group_verdicts(graded: Sequence[Graded], part_names: Sequence[str]) -> Verdicts:
    """Verdicts on a group's completions, in the wire's form."""
    answers = [None if grade.verdict is None else grade.verdict.answered for grade in graded]
    return Verdicts(
        scores=[grade.score for grade in graded],
        parts={
            name: [0.0 if grade.verdict is None else grade.verdict.parts[name] for grade in graded]
            for name in part_names
        },
        errors={i: grade.error for i, grade in enumerate(graded) if grade.error is not None},
        unanswered=[i for i, answered in enumerate(answers) if answered is False]
        if any(answered is not None for answered in answers)
        else None,
    )


def excerpt(text: str, characters: int) -> str:
    """At most ``characters`` characters of a text: its start and, since answers are there, more of its end.

    >>> excerpt("abcdefghijklmnop", 9)
    'ab … mnop'
    """
    if len(text) <= characters:
        return text
    head = (characters - 3) // 3
    return f"{text[:head]} … {text[len(text) - (characters - 3 - head) :]}"


def sample_of(prompt: Prompt, texts: Sequence[str], graded: Sequence[Graded]) -> Sample | None:
    """The first graded completion if all have the same score; else None, since the policy can learn from the group."""
    scored = [at for at, grade in enumerate(graded) if grade.error is None]
    if len({graded[at].score for at in scored}) != 1:
        return None
    text = texts[scored[0]]

    def cut(text: str, characters: int) -> str:
        return excerpt(text, characters).encode("utf-8", "replace").decode()

    return Sample(
        prompt_id=cut(prompt.id, _MAX_ANSWER_CHARACTERS),
        reply=cut(text, _MAX_REPLY_CHARACTERS),
        answer=cut(extract_answer(text), _MAX_ANSWER_CHARACTERS),
        reference=cut(prompt.answer, _MAX_ANSWER_CHARACTERS),
        score=graded[scored[0]].score,
    )


def _recorded(text: str, tokens: int) -> str:
    """A text for the record of rollouts, which UTF-8 can encode and which is not longer than the wire's limit.

    >>> _recorded("a\\ud800", 1), _recorded("é" * 20, 1)
    ('a\\\\ud800', 'éééééééé')
    """
    encoded = text.encode("utf-8", "backslashreplace")
    return encoded[: MAX_TEXT_BYTES * tokens].decode("utf-8", "ignore")


def count_loops(completions: Sequence[PartialCompletion]) -> int:
    """Number of completions that end in a loop, before their end token."""
    return sum(
        ends_in_loop(c.token_ids[:-1] if c.finish_reason == "stop" else c.token_ids) for c in completions
    )


def group_text(
    tokenizer: ModelTokenizer,
    prompt: Prompt,
    prompt_token_ids: list[int],
    texts: Sequence[str],
    completions: Sequence[PartialCompletion],
) -> GroupText:
    """The texts of a group for the record of rollouts; ``texts`` are those of the completions."""
    (rendered,) = tokenizer.texts([prompt_token_ids])
    recorded = [
        _recorded(text, len(sampled.token_ids)) for text, sampled in zip(texts, completions, strict=True)
    ]
    lengths = [
        tokenizer.characters(sampled.token_ids.tolist(), text) or []
        for text, sampled in zip(recorded, completions, strict=True)
    ]
    return GroupText(
        prompt=_recorded(rendered, len(prompt_token_ids)),
        reference=_recorded(prompt.answer, len(prompt_token_ids)),
        labels={_recorded(name, 64): _recorded(value, 64) for name, value in prompt.labels.items()},
        completions=recorded,
        token_characters=[np.array(of_token, dtype="<u2").tobytes() for of_token in lengths],
    )


def ends_in_loop(ids: NDArray[Any]) -> bool:
    """Whether ``ids [tokens]`` end with at least :data:`MIN_REPEATS` copies of a pattern of at most :data:`MAX_PATTERN_TOKENS`
    tokens, of at least :data:`MIN_LOOP_TOKENS` tokens together.

    A policy that degenerates repeats a pattern until the maximum length ("neural text degeneration", Holtzman et al.,
    arXiv 1904.09751 [P]). The pattern is searched as vLLM's ``repetition_detection`` does, which ends such completions: the same
    tokens, several times in a row, up to the end. A loop in which something changes, such as a number that counts up, is not found.

    >>> ends_in_loop(np.array([7, 8, 9] + 32 * [1, 2])), ends_in_loop(np.array(31 * [1, 2])), ends_in_loop(np.arange(100))
    (True, False, False)
    """
    backwards = ids[: -(MAX_PATTERN_TOKENS * MIN_REPEATS + 1) : -1]
    if len(backwards) < MIN_LOOP_TOKENS:
        return False
    patterns = np.arange(1, len(backwards) // MIN_REPEATS + 1)
    # Few patterns have the last tokens twice, and only these are compared as a whole.
    for at in range(_COMPARED):
        patterns = patterns[backwards[patterns + at] == backwards[at]]
        if not len(patterns):
            return False
    for pattern in patterns.tolist():
        tokens = pattern * max(MIN_REPEATS, -(-MIN_LOOP_TOKENS // pattern))
        if tokens <= len(backwards) and np.array_equal(
            backwards[pattern:tokens], backwards[: tokens - pattern]
        ):
            return True
    return False
