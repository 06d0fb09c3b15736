"""The phrase of a forced interruption, which ends a thought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl_tasks.errors import TokenizerError
from scalerl_tasks.thoughts import THOUGHT, THOUGHT_END, ends_inside_thought
from scalerl_tasks.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from scalerl_api.recipe.spec import InterruptionSpec


def check_interruption(
    interruption: InterruptionSpec, tokenizer: ModelTokenizer, max_completion_tokens: int
) -> list[int] | None:
    """Token ids of the phrase of a forced interruption; None if no thought is interrupted, because the tokenizer cannot encode
    the end of a thought, or because the spec sets no range and the default range is impossible for the length budget.

    Args:
        max_completion_tokens: length budget of a completion, in tokens.

    Raises:
        TokenizerError: the phrase does not close the thought, the tokenizer cannot encode it exactly or encodes a part of it as
            an end token, or it leaves no token of the budget for an answer.
    """
    phrase, (_, last) = interruption.phrase, interruption.range(max_completion_tokens)
    field = f"recipe.length.interruption.phrase {phrase!r}"
    if tokenizer.exact_ids(THOUGHT_END) is None:
        return None
    if ends_inside_thought(THOUGHT + phrase):
        raise TokenizerError(f"{field} does not end the thought: add {THOUGHT_END}")
    ids = tokenizer.exact_ids(phrase)
    if ids is None:
        raise TokenizerError(f"{field}: the tokenizer of the model cannot encode it: use other words")
    if ended := sorted(set(ids) & set(tokenizer.stop_token_ids)):
        raise TokenizerError(f"{field} has end tokens of the model in it: {ended}: use other words")
    if last + len(ids) >= max_completion_tokens:
        if interruption.max_tokens is None:
            return None
        raise TokenizerError(
            f"{field}: its {len(ids)} tokens after recipe.length.interruption.maxTokens ({last}) leave no room for an "
            f"answer within recipe.maxCompletionTokens ({max_completion_tokens}): raise that, lower maxTokens, or choose "
            "a shorter phrase or another recipe.length"
        )
    return ids
