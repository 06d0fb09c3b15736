"""Lines of ``trace.jsonl``: what a scheduler has to know of a run (``docs/trace.md``).

Times are seconds of the run: ``wall_seconds`` of ``metrics.jsonl``, which stand still while the coordinator does not run.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

FORMAT: Final = 1
"""Raised by a change that an earlier reader would misread. New fields do not: readers ignore those they do not know."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """A line; ``kind`` says which."""


class RunLine(Line, frozen=True, kw_only=True, tag="run"):
    """The run's settings: the first line of a file, and again after each start of the coordinator."""

    t: float
    format: int
    prompts_per_step: int
    completions_per_prompt: int
    max_completion_tokens: int
    max_staleness_steps: int
    steps_per_batch: int = 0
    """k of PPO-off-policy-k; 0: PipelineRL."""
    concurrency: int
    """Completions that one generator samples at once."""
    max_draft_tokens: int = 0
    """Longest draft of the speculative decoding; 0 without."""
    schedule: str = ""
    """``leastLoaded`` or ``byLength``; empty in traces of earlier releases: slot order, to whoever asks first."""


class GeneratorLine(Line, frozen=True, kw_only=True, tag="generator"):
    """A generator registered, or was lost or replaced."""

    t: float
    name: str
    event: Literal["registered", "lost"]


class GroupLine(Line, frozen=True, kw_only=True, tag="group"):
    """An accepted training group."""

    t: float
    """When it was accepted."""
    slot: int
    step: int
    task: int = 0
    prompt: int
    """Index into the training prompts of the task."""
    generator: str = ""
    """Empty where the lease is of an earlier process of the coordinator, as ``leased``."""
    leased: float | None = None
    lease_version: int = -1
    """Version of the generator's weights then."""
    seconds: float = 0.0
    """From the lease's first request to vLLM to the end of the last completion, as the generator measured it."""
    prompt_tokens: int
    lengths: list[int]
    """Tokens of each completion."""
    finish_reasons: list[Literal["stop", "length"]] = []
    version_tokens: dict[int, int] = {}
    """Completion tokens by the version of the weights that sampled them; -1: masked."""
    drafted_tokens: int | None = None
    """Tokens that were verified instead of sampled one by one; None without speculation, or where it is not reported."""
    accepted_tokens: int | None = None
    """Those of them that the policy sampled too."""
    refilled: bool = False
    """Dropped for equal rewards; the slot is issued again with another prompt."""


class StepLine(Line, frozen=True, kw_only=True, tag="step"):
    """A trained step."""

    t: float
    """When the trainer reported it."""
    step: int
    busy_seconds: float
    trained_tokens: int
    skipped: bool = False


class PublishLine(Line, frozen=True, kw_only=True, tag="publish"):
    """New weights reached the generators."""

    t: float
    version: int


AnyLine = RunLine | GeneratorLine | GroupLine | StepLine | PublishLine

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(AnyLine).decode
