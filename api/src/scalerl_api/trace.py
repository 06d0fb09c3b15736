"""Lines of ``trace.jsonl``: the events of a run that its simulation needs (``docs/trace.md``).

Times are in seconds of the run, as ``wall_seconds`` of ``metrics.jsonl``: the clock stops while the coordinator does not run.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

FORMAT: Final = 1
"""Version of the format. It increases with a change that earlier readers would misread; new fields are no such change, because
readers ignore unknown fields."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all lines; the field ``kind`` has the type of the line."""


class RunLine(Line, frozen=True, kw_only=True, tag="run"):
    """The run's settings: the first line of a file, repeated after each start of the coordinator."""

    t: float
    format: int
    prompts_per_step: int
    completions_per_prompt: int
    max_completion_tokens: int
    max_staleness_steps: int
    steps_per_batch: int = 0
    """k of PPO-off-policy-k; 0: PipelineRL."""
    concurrency: int
    """Maximum number of completions that one generator samples concurrently."""
    max_draft_tokens: int = 0
    """Maximum draft length of speculative decoding, in tokens; 0 without it."""
    schedule: str = ""
    """``leastLoaded`` or ``byLength``; empty: slot order, to the first generator that requests."""


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
    """Name of the generator; empty if an earlier process of the coordinator gave the lease."""
    leased: float | None = None
    """When the slot was leased; None if an earlier process of the coordinator gave the lease."""
    lease_version: int = -1
    """Weight version of the generator at that time."""
    seconds: float = 0.0
    """Duration from the lease's first request to vLLM to the end of the last completion, measured by the generator."""
    prompt_tokens: int
    lengths: list[int]
    """Tokens of each completion."""
    finish_reasons: list[Literal["stop", "length"]] = []
    version_tokens: dict[int, int] = {}
    """Completion tokens by weight version that sampled them; -1: masked."""
    drafted_tokens: int | None = None
    """Drafted tokens, verified instead of sampled one by one; None without speculative decoding, or if not reported."""
    accepted_tokens: int | None = None
    """Drafted tokens that the policy accepted."""
    refilled: bool = False
    """The group was dropped for equal rewards, and the slot was reissued with another prompt."""


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
