"""Speculative decoding of the generators: ``spec.generator.speculation``."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from scalerl_api.fields import AtLeast, AtMost, Model, Quantity, exactly_one

HistoryQuantity = Annotated[Quantity, AfterValidator(AtLeast("64Mi")), AfterValidator(AtMost("64Ti"))]

SPECULATION_OPTIONS: Final = (
    *("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens", "-sc"),
    "--additional-config",
)
"""vLLM's options for speculative decoding, and the general option with which the history method is configured."""

MEMORY_BYTES_PER_TOKEN: Final = 56
"""Memory per token of a past response in a generator: the token, and the index of earlier occurrences of the same text."""


class HistorySpec(Model):
    """Drafts from past responses to the same prompt (RhymeRL, arXiv 2508.18588 [S]); the distribution of the completions does
    not change."""

    max_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 16
    """Maximum length of a draft, which one forward pass verifies."""
    memory_tokens: Annotated[int, Field(ge=65_536, le=2_000_000_000)] = 4_000_000
    """Tokens of past responses that each generator keeps in memory, 56 bytes each."""
    store_size: HistoryQuantity = "8Gi"
    """Disk on the run's volume for past responses, at 4 bytes a token; the oldest are deleted first."""


class SpeculationSpec(Model):
    """Speculative decoding: several drafted tokens are verified by one forward pass. Exactly one method."""

    history: HistorySpec | None = None
    """Drafts from past responses, which the coordinator stores."""

    rules = (exactly_one("history"),)

    @property
    def memory_bytes(self) -> int:
        """Memory for past responses in each generator, in bytes."""
        return 0 if self.history is None else MEMORY_BYTES_PER_TOKEN * self.history.memory_tokens


def is_speculation_option(argument: str) -> bool:
    """Whether an argument of vLLM's command line configures speculative decoding.

    >>> is_speculation_option("--speculative_config={}"), is_speculation_option("--specialize-active-lora")
    (True, False)
    """
    return argument.split("=", 1)[0].replace("_", "-") in SPECULATION_OPTIONS
