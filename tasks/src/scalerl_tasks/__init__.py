"""What is trained on: prompt sources, verifiers, difficulty.

What lives here: opening a prompt source (a reasoning-gym task, a JSONL file) and reading it by index;
cutting a held-out set from it; putting a prompt into a template; scoring a completion, in child processes
with limits on what it may use. Everything is deterministic: a digest names a set of prompts for
good.

What never does: torch, tokens, chat templates, the network; which prompt is asked next (the coordinator),
what a score is used for (the trainer). Importing this package imports neither reasoning-gym nor sympy;
opening a source or a verifier imports what that one needs.
"""

from scalerl_tasks.answers import extract_answer
from scalerl_tasks.difficulty import arithmetic_operations
from scalerl_tasks.errors import (
    GradingError,
    JsonlError,
    ParameterError,
    PromptError,
    SourceError,
    SplitError,
    TaskError,
    TemplateError,
    UnknownTaskError,
    VerifierError,
)
from scalerl_tasks.grading.pool import MAX_COMPLETION_CHARACTERS, Graded, GradingPool, PoolCounts
from scalerl_tasks.gym import GymTask, ReasoningGymSource, open_reasoning_gym
from scalerl_tasks.jsonl import MAX_LINE_BYTES, JsonlSource, open_jsonl
from scalerl_tasks.prompts import Prompt, PromptSource, RenderedPrompt, check_template, render_prompt
from scalerl_tasks.sources import (
    Task,
    check_answers,
    open_grading_pool,
    open_source,
    open_task,
    verifier_config,
)
from scalerl_tasks.split import HeldOut, Train, split_held_out
from scalerl_tasks.verifiers import VERIFIERS, Verifier, VerifierConfig, open_verifier

__all__ = [
    "MAX_COMPLETION_CHARACTERS",
    "MAX_LINE_BYTES",
    "VERIFIERS",
    "Graded",
    "GradingError",
    "GradingPool",
    "GymTask",
    "HeldOut",
    "JsonlError",
    "JsonlSource",
    "ParameterError",
    "PoolCounts",
    "Prompt",
    "PromptError",
    "PromptSource",
    "ReasoningGymSource",
    "RenderedPrompt",
    "SourceError",
    "SplitError",
    "Task",
    "TaskError",
    "TemplateError",
    "Train",
    "UnknownTaskError",
    "Verifier",
    "VerifierConfig",
    "VerifierError",
    "arithmetic_operations",
    "check_answers",
    "check_template",
    "extract_answer",
    "open_grading_pool",
    "open_jsonl",
    "open_reasoning_gym",
    "open_source",
    "open_task",
    "open_verifier",
    "render_prompt",
    "split_held_out",
    "verifier_config",
]
