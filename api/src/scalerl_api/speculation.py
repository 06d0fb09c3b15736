"""Speculative decoding of the generators: ``spec.generator.speculation``."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator

from scalerl_api.fields import Model, Quantity, SizeInRange, exactly_one
from scalerl_api.plugins import DrafterPlugin
from scalerl_api.vllm_options import option_name

HistoryQuantity = Annotated[Quantity, AfterValidator(SizeInRange("64Mi", "64Ti"))]

SPECULATION_OPTIONS: Final = (
    *("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens", "-sc"),
    "--additional-config",
)
"""vLLM's options for speculative decoding, and the general option with which the history method is configured."""

MAX_DRAFT_TOKENS: Final = 16
"""Maximum length of a draft, which one forward pass verifies."""
MIN_MEMORY_TOKENS: Final = 4_000_000
MAX_MEMORY_TOKENS: Final = 2_000_000_000
MEMORY_BYTES_PER_TOKEN: Final = 56
"""Memory per token of a past response in a generator: the token, and the index of earlier occurrences of the same text."""


class HistorySpec(Model):
    """Drafts from past responses to the same prompt (RhymeRL, arXiv 2508.18588 [S]); the distribution of the completions does
    not change."""

    store_size: HistoryQuantity = "8Gi"
    """Disk on the run's volume for past responses, at 4 bytes a token; the oldest are deleted first."""
    drafter: DrafterPlugin | None = None
    """What drafts from these responses, of the entry points ``scalerl.drafters``; default: the built-in one."""


class SpeculationSpec(Model):
    """Speculative decoding: several drafted tokens are verified by one forward pass. Exactly one method."""

    history: HistorySpec | None = None
    """Drafts from past responses, which the coordinator stores."""

    rules = (exactly_one("history"),)

    def memory_tokens(self, running_tokens: int) -> int:
        """Tokens of responses that each generator keeps: those that run, as many of the epoch before for the same prompts, and no
        fewer than :data:`MIN_MEMORY_TOKENS`.

        Args:
            running_tokens: maximum number of tokens of the completions that run.
        """
        if self.history is None:
            return 0
        return min(max(2 * running_tokens, MIN_MEMORY_TOKENS), MAX_MEMORY_TOKENS)


def is_speculation_option(argument: str) -> bool:
    """Whether an argument of vLLM's command line configures speculative decoding.

    >>> is_speculation_option("--speculative_config.model=x"), is_speculation_option("--spec")
    (True, False)
    """
    return option_name(argument) in SPECULATION_OPTIONS
