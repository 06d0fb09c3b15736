"""Advice: what raises the asymptote of a curve that has become flat. More devices do not. Pure.

Figures from ScaleRL, arXiv 2510.13786: [P] read in the paper, [S] told by others about it.
"""

from __future__ import annotations

from typing import Final

from scalerl_operator.autoscaling.models import Recipe

LARGE_BATCH: Final = 2048
LONG_CONTEXT: Final = 32_768
NEW_SEGMENT: Final = (
    "a new recipe is a new curve with a later midpoint: compare none before it has passed its own"
)


def advice(recipe: Recipe) -> list[str]:
    """What this recipe leaves to be tried, cheapest first.

    >>> advice(Recipe(batch_completions=2048, context_tokens=32768, fp32_head=True, loss="CISPO"))[0]
    'a larger model: A .610 → .710 with the Scout mixture of experts, Cmid 2,542 → 4,242 GPU-hours (ScaleRL [P])'
    """
    found = []
    if not recipe.fp32_head:
        found.append("recipe.fp32Head: A .52 → .61 (ScaleRL [P])")
    if recipe.loss != "CISPO":
        found.append(
            "recipe.loss CISPO in place of a clipped one: A .520 → .595 against DAPO's (ScaleRL [S])"
        )
    if recipe.batch_completions < LARGE_BATCH:
        found.append(
            f"a batch of {LARGE_BATCH} completions ({recipe.batch_completions} now): A .610 → .645 from 768 to 2048, "
            "with Cmid 2,542 → 10,909 GPU-hours (ScaleRL [P])"
        )
    if recipe.context_tokens < LONG_CONTEXT:
        found.append(
            f"a context of {LONG_CONTEXT} tokens ({recipe.context_tokens} now): A .610 → .645 from 14k to 32k, "
            "with Cmid 2,542 → 11,272 GPU-hours (ScaleRL [P])"
        )
    found.append(
        "a larger model: A .610 → .710 with the Scout mixture of experts, Cmid 2,542 → 4,242 GPU-hours (ScaleRL [P])"
    )
    return [*found, NEW_SEGMENT]
