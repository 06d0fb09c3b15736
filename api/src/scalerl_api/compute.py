"""A run's compute in tokens of supervised training, one unit for mid-training and RL.

Interplay (arXiv 2512.07783 [P]): with P parameters, training costs 6 P FLOP per token. RL also samples each token and, with a
reference policy, scores it, each at 2 P FLOP: T_RL = (4/3 + γ/3) · N · r · L, with γ = 1 with a reference policy and 0
without, N prompts, r completions per prompt and L tokens per completion. The budget T is split into T_mid = (1 − β) T and
T_RL = β T.

Prompt tokens count in neither stage: every sequence of either stage has a prompt, so counting them would change the unit
more than the shares.
"""

from __future__ import annotations

from fractions import Fraction

from scalerl_api.recipe import RecipeSpec
from scalerl_api.spec import BudgetSpec

TOKEN_COST = Fraction(4, 3)
"""Cost of a completion token of RL without a reference policy, in tokens of supervised training."""
REFERENCE_COST = Fraction(1, 3)
"""Cost of scoring a completion token by the reference policy, added to :data:`TOKEN_COST`."""


def rl_token_cost(recipe: RecipeSpec) -> Fraction:
    """Cost of a completion token of RL, in tokens of supervised training.

    >>> rl_token_cost(RecipeSpec())
    Fraction(4, 3)
    """
    return TOKEN_COST if recipe.kl.penalty is None else TOKEN_COST + REFERENCE_COST


def supervised_tokens(budget: BudgetSpec) -> int | None:
    """Solution tokens after which mid-training ends; None without a split.

    >>> supervised_tokens(BudgetSpec.model_validate({"maxComputeTokens": 1000, "split": {"beta": "0.2"}}))
    800
    """
    if budget.max_compute_tokens is None or budget.split is None:
        return None
    return max(1, int((1 - Fraction(budget.split.beta)) * budget.max_compute_tokens))


def rl_tokens(budget: BudgetSpec, recipe: RecipeSpec) -> Fraction | None:
    """Completion tokens that remain for RL after mid-training; None without a split.

    >>> budget = BudgetSpec.model_validate({"maxComputeTokens": 1000, "split": {"beta": "0.2"}})
    >>> rl_tokens(budget, RecipeSpec())
    Fraction(150, 1)
    """
    first = supervised_tokens(budget)
    if first is None or budget.max_compute_tokens is None:
        return None
    return (budget.max_compute_tokens - first) / rl_token_cost(recipe)
