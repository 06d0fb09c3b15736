"""Tasks: prompt sources, the held-out split, templates, verifiers, grading.

From a task's spec to prompts and grades::

    spec ──────▶ open_tasks(): each of evaluation.sets with a task, then
    spec.task ─▶ open_task() for the task, or for each task of a mix; Mixture.place() assigns slots to tasks
                   open_source() ─▶ ReasoningGymSource: GymTask.create() ─▶ gym_loader.load_task_classes()
                                 ├▶ JsonlSource: every line checked by _Scan.run()
                                 ├▶ dataset.DatasetSource: see that package
                                 └▶ plugins.open_plugin_source(): of an installed package
                   split_held_out() ─▶ Train, HeldOut (each with a digest)
                   check_template()
    index ─────▶ source[index] ─▶ Prompt ─▶ render_prompt() ─▶ RenderedPrompt
                   tokenizer.ModelTokenizer.encode_prompts() ─▶ token ids ─▶ (the generator)

    task_problems(), before the run ─▶ JsonlSource.problems, check_answers() ─▶ GradingPool.check()

    completions ─▶ GradingPool.score_group()        pool, in the caller's process
                     ForkServer.start(), .fork()    fork server, one process: open_verifier(), audit_guard.install()
                       └─▶ grader.run()             graders, forked, with limits on time and memory
                             guarded() ─▶ Verifier.score(): answers.extraction, see answers
                ◀── Graded(verdict, error) for each completion

Everything is deterministic: equal digests mean equal prompts. The package does not use torch; only :mod:`.dataset.hub`,
:mod:`.grading.http_grader` and the clients of environment servers use the network. The coordinator selects the next prompt. Importing
this package imports neither reasoning-gym, sympy, tokenizers nor transformers; opening a source, a verifier or a tokenizer
imports its dependencies.
"""

from scalerl_tasks.answer_checks import Rejected, check_answers
from scalerl_tasks.answers.extraction import extract_answer
from scalerl_tasks.dataset import DatasetSource, open_dataset
from scalerl_tasks.errors import (
    AnswersError,
    EvaluationSetError,
    GradingError,
    JsonlError,
    JsonlRowsError,
    MixedTaskError,
    ParameterError,
    PromptError,
    SourceError,
    SplitError,
    TaskError,
    TemplateError,
    TokenizerError,
    UnknownTaskError,
    VerifierError,
)
from scalerl_tasks.grading.grading_pool import Graded, GradingPool
from scalerl_tasks.gym import GymTask, ReasoningGymSource, arithmetic_operations
from scalerl_tasks.jsonl import JsonlSource
from scalerl_tasks.mix_proportions import Mixture
from scalerl_tasks.open_graders import open_grading_pool, verifier_config
from scalerl_tasks.prompts import Prompt, PromptSource, RenderedPrompt, check_template, render_prompt
from scalerl_tasks.sources import (
    EvaluationPrompts,
    RunTasks,
    Task,
    open_source,
    open_task,
    open_tasks,
    open_warm_start,
)
from scalerl_tasks.split import Train, split_held_out
from scalerl_tasks.task_checks import task_problems
from scalerl_tasks.verdict import SCORE_RANGE, Verdict
from scalerl_tasks.verifiers import VerifierConfig, open_verifier

__all__ = [
    "SCORE_RANGE",
    "AnswersError",
    "DatasetSource",
    "EvaluationPrompts",
    "EvaluationSetError",
    "Graded",
    "GradingError",
    "GradingPool",
    "GymTask",
    "JsonlError",
    "JsonlRowsError",
    "JsonlSource",
    "MixedTaskError",
    "Mixture",
    "ParameterError",
    "Prompt",
    "PromptError",
    "PromptSource",
    "ReasoningGymSource",
    "Rejected",
    "RenderedPrompt",
    "RunTasks",
    "SourceError",
    "SplitError",
    "Task",
    "TaskError",
    "TemplateError",
    "TokenizerError",
    "Train",
    "UnknownTaskError",
    "Verdict",
    "VerifierConfig",
    "VerifierError",
    "arithmetic_operations",
    "check_answers",
    "check_template",
    "extract_answer",
    "open_dataset",
    "open_grading_pool",
    "open_source",
    "open_task",
    "open_tasks",
    "open_verifier",
    "open_warm_start",
    "render_prompt",
    "split_held_out",
    "task_problems",
    "verifier_config",
]
