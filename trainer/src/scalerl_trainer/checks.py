"""Checks a run before its start for errors that would end it later; read-only, without torch.

- Task: grading works, answers can be graded, prompts leave room for completions, a warm start has solutions.
- Model: its files (:mod:`.model_checks`), attention kernel.
- Memory: of this machine and of its GPUs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from scalerl_api import plugins, registry
from scalerl_api.fields import quantity_bytes
from scalerl_api.load import SpecProblem
from scalerl_api.memory.limits import device_memory_problem, host_memory_problem
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.memory.roles import trainer_rank_bytes
from scalerl_api.memory.trainer_rank import trainer_rank_memory
from scalerl_api.spec import RunSpec, TrainingTask
from scalerl_tasks import (
    DatasetSource,
    EvaluationPrompts,
    JsonlSource,
    Prompt,
    PromptSource,
    Task,
    open_source,
    open_warm_start,
    render_prompt,
    task_problems,
)
from scalerl_tasks.interruption import check_interruption
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.errors import TrainerError
from scalerl_trainer.model_checks import model_problems
from scalerl_trainer.models.files import read_json, stored_tensors

log = logging.getLogger(__name__)

TOO_LONG_FRACTION = 0.01
"""Largest allowed fraction of prompts without room for a completion; also the threshold of the alert ScaleRLSlotsGivenUp."""
_BATCH = 1024
_GIB = 2.0**30


class PrepareError(TrainerError):
    """The run cannot be trained with this spec; each of ``args`` is a problem, which names the field."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


# --- the task --------------------------------------------------------------------------------------------


def check_plugins(spec: RunSpec, *, one_machine: bool) -> None:
    """Check the names of installed packages in the spec, and their parameters.

    Args:
        one_machine: also those that the processes of other images use.

    Raises:
        PrepareError: lists the problems.
    """
    kinds = tuple(registry.Kind) if one_machine else (registry.Kind.LOSS,)
    if found := plugins.problems(spec, kinds, load=True):
        raise PrepareError(*(f"{path}: {problem}" for path, problem in found))


def check_tasks(spec: RunSpec, directory: Path | None = None, *, answers: bool = True) -> None:
    """Check the tasks, the evaluation sets and the file of the warm start, as ``scalerl validate`` does: every row of a file.

    Args:
        spec: the run.
        directory: the run's directory, in which tables of ``task.dataset`` are made.
        answers: also check the reference answers, which may take minutes.

    Raises:
        PrepareError: lists the problems.
        GradingError: no grader could be started.
    """
    if problems := task_problems(spec, directory, answers=answers, progress=log.info):
        raise PrepareError(*map(str, problems))


def check_length(tokenizer: ModelTokenizer, spec: RunSpec) -> None:
    """Check ``recipe.length`` against the tokenizer. Raises ``TokenizerError``."""
    if (interruption := spec.recipe.length.interruption) is not None:
        for most in spec.completion_limits:
            check_interruption(interruption, tokenizer, most)


def check_prompts(
    tokenizer: ModelTokenizer, spec: RunSpec, given: TrainingTask, task: Task, directory: Path | None = None
) -> None:
    """Check that a task's prompts leave room for completions, and that warm-start examples fit a micro-batch.

    Actors skip a prompt that is too long, so a small fraction of such prompts is only a warning. ``directory``: that of the run.

    Raises:
        PrepareError: more than :data:`TOO_LONG_FRACTION` of the prompts are too long (names the first, its tokens and
            the limit), or an example of the warm start does not fit.
        TokenizerError: the chat template refuses a prompt.
    """
    source = open_source(given.section, directory)
    most, limit = spec.recipe.max_completion_tokens, "recipe.maxCompletionTokens"
    if given.max_completion_tokens is not None:
        most, limit = given.max_completion_tokens, f"{given.field}.maxCompletionTokens"
    room = spec.model.context_tokens - most
    too_long: list[tuple[int, int]] = []
    seen = 0
    for batch in _batches(source, given.section.source.prompts_checked):
        lengths = list(map(len, tokenizer.encode_prompts([task.render(prompt) for _, prompt in batch])))
        seen += len(batch)
        too_long += [(index, n) for (index, _), n in zip(batch, lengths, strict=True) if n > room]
        if spec.warm_start is not None and not spec.warm_start.own:
            _check_examples(
                spec, lambda index: f"warmStart: {_place(given, source, index)}", batch, lengths, tokenizer
            )
    if too_long:
        index, tokens = too_long[0]
        longest = max(n for _, n in too_long)
        problem = (
            f"{_place(given, source, index)} has {tokens} tokens, model.contextTokens ({spec.model.context_tokens}) less "
            f"{limit} ({most}) leaves {room}; {len(too_long)} of "
            f"{seen} prompts are too long: raise contextTokens to {longest + most}, lower "
            "maxCompletionTokens, or drop them"
        )
        if len(too_long) > TOO_LONG_FRACTION * seen:
            raise PrepareError(problem)
        log.warning("%s. The run skips them.", problem)


def check_set_prompts(tokenizer: ModelTokenizer, spec: RunSpec, one: EvaluationPrompts) -> None:
    """Check that the tokenizer can encode the prompts of an evaluation set, and that they leave room for completions.

    Actors give up a prompt that is too long, which scores 0 at every point, so a small fraction of such prompts is only a
    warning.

    Raises:
        PrepareError: more than :data:`TOO_LONG_FRACTION` of the prompts are too long, or one cannot be encoded.
        TokenizerError: the chat template refuses a prompt.
    """
    room = spec.model.context_tokens - spec.recipe.max_completion_tokens
    longest = too_long = 0
    for batch in _batches(one.prompts, None):
        prompts = [prompt for _, prompt in batch]
        rendered = [render_prompt(prompt, one.prompt.template, one.prompt.system) for prompt in prompts]
        for prompt, ids in zip(prompts, tokenizer.encode_prompts(rendered), strict=True):
            longest, too_long = max(longest, len(ids)), too_long + (len(ids) > room)
            # Only for a scratch model's tokenizer: another's unknown token may also be its begin-of-text token.
            unknown = tokenizer.unknown_token_id if spec.model.scratch is not None else None
            if unknown is not None and unknown in ids:
                raise PrepareError(
                    f"{one.field}.task: prompt {prompt.id!r} has text that the model's tokenizer has no tokens for: "
                    "raise model.scratch.vocabularySize to 300 or more, or take other problems"
                )
    if too_long:
        problem = (
            f"{one.field}.task: {too_long} of {len(one.prompts)} prompts have more than the {room} tokens that "
            f"model.contextTokens ({spec.model.context_tokens}) less recipe.maxCompletionTokens "
            f"({spec.recipe.max_completion_tokens}) leaves: raise contextTokens to "
            f"{longest + spec.recipe.max_completion_tokens}, lower maxCompletionTokens, or drop them"
        )
        if too_long > TOO_LONG_FRACTION * len(one.prompts):
            raise PrepareError(problem)
        log.warning("%s. They score 0.", problem)


def _check_examples(
    spec: RunSpec,
    place: Callable[[int], str],
    batch: list[tuple[int, Prompt]],
    prompt_tokens: list[int],
    tokenizer: ModelTokenizer,
) -> None:
    solution_tokens = map(len, tokenizer.encode([worked_solution(prompt) for _, prompt in batch]))
    for (index, _), prompt, solution in zip(batch, prompt_tokens, solution_tokens, strict=True):
        if not prompt or not solution:
            raise PrepareError(f"{place(index)}: prompt or solution has no tokens")
        if prompt + solution + 1 > spec.micro_batch_tokens:
            raise PrepareError(
                f"{place(index)} has {prompt} tokens, its solution {solution + 1}: more than "
                f"trainer.microBatchTokens ({spec.micro_batch_tokens}) together; raise it, or shorten the solution"
            )


def check_mid_training_file(
    tokenizer: ModelTokenizer, spec: RunSpec, task: Task, directory: Path | None = None
) -> None:
    """Check that every separate problem of ``warmStart``, with its solution, fits a micro-batch. ``directory``: that of the run.

    Held-out ones are checked too; mid-training drops them.

    Raises:
        PrepareError: a line is invalid (the message names it), or all lines are held out.
        TaskError: the file cannot be read.
    """
    source = open_warm_start(spec, directory)
    if source is None or spec.warm_start is None:
        return
    field = spec.warm_start.own

    def place(index: int) -> str:
        return f"{field}: {source.place(index)}"

    if all(task.train.excludes(source[index]) for index in range(len(source))):
        raise PrepareError(
            f"{field}: every prompt is held out by task.heldOut or evaluation.sets: add others, or leave it out"
        )
    for batch in _batches(source, None):
        lengths = list(map(len, tokenizer.encode_prompts([task.render(prompt) for _, prompt in batch])))
        _check_examples(spec, place, batch, lengths, tokenizer)


def worked_solution(prompt: Prompt) -> str:
    """The prompt's solution for the warm start. Raises ``PrepareError`` without one."""
    try:
        return prompt.worked_solution
    except ValueError as error:
        raise PrepareError(f"warmStart: {error}; leave warmStart out, or take another task") from error


def _batches(source: PromptSource, limit: int | None) -> Iterator[list[tuple[int, Prompt]]]:
    total = len(source)
    count = total if limit is None else min(limit, total)
    indices = iter(rank * total // count for rank in range(count))
    while batch := [(index, source[index]) for index in islice(indices, _BATCH)]:
        yield batch


def _place(given: TrainingTask, source: PromptSource, index: int) -> str:
    """Location of a prompt for a message: spec field, and the file and line or the prompt's id."""
    prompt, field = source[index], f"{given.field}.{given.section.source_field}"
    if isinstance(source, JsonlSource | DatasetSource):
        return f"{field}: {source.place(index)}: prompt {prompt.id!r}"
    return f"{field}: prompt {prompt.id}"


# --- the model -------------------------------------------------------------------------------------------


def check_model(directory: Path, spec: RunSpec, one_machine: bool, *, structure: bool) -> None:
    """Check the model's files (:mod:`.model_checks`), the attention kernel's package, and memory.

    Args:
        one_machine: as in :func:`check_memory`.
        structure: as in :func:`.model_checks.model_problems`.

    Raises:
        PrepareError: the model cannot be used; the message names the field.
    """
    refuse(model_problems(directory, spec, structure=structure))
    if spec.model.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise PrepareError(
            "model.attention: flash_attention_2 needs the package flash-attn, which is not installed: install it, "
            "or use sdpa"
        )
    elements = sum(tensor.elements for tensor in stored_tensors(directory).values())
    size = ModelSize.of_config(read_json(directory / "config.json"), elements)
    if size is not None:
        check_memory("model", size, spec, one_machine)


def refuse(problems: Iterable[SpecProblem]) -> None:
    """Raise ``PrepareError`` with the first of ``problems``, and the number of the others."""
    found = [str(problem).removeprefix("spec.") for problem in problems]
    if found:
        more = f"; and {len(found) - 1} more problem(s) of the model" if len(found) > 1 else ""
        raise PrepareError(found[0] + more)


# --- memory ----------------------------------------------------------------------------------------------


def check_memory(field: str, size: ModelSize, spec: RunSpec, one_machine: bool) -> None:
    """Check the run's estimated memory against this machine's. ``one_machine``: all roles share it.

    Raises:
        PrepareError: there is too little memory; the message has both figures and the fields to change.
    """
    model = f"{field}: {size.parameters / 1e6:,.0f} M parameters"
    host = memory_bytes()
    found = gpu_memory_bytes() if spec.trainer.devices or spec.generator.devices else None
    trainer, generator = (
        quantity_bytes(role.device_memory) if role.device_memory else found
        for role in (spec.trainer, spec.generator)
    )
    problem = device_memory_problem(size, spec, trainer, generator)
    if problem is not None:
        raise PrepareError(f"{model}: {problem.problem}: {problem.advice}")
    for role, memory in (("trainer", trainer), ("generator", generator)):
        if getattr(spec, role).devices and memory is None:
            log.warning(
                "%s.deviceMemory is not set and there is no GPU here: its memory is not checked", role
            )
    if not spec.trainer.devices and (need := trainer_rank_bytes(size, spec)) > host:
        rank = trainer_rank_memory(size, spec)
        raise PrepareError(
            f"{model}: one trainer rank needs about {rank} and {(need - rank.total) / _GIB:.1f} for the copy that checkpoints are "
            f"written from, there are {host / _GIB:.1f} here: choose a smaller model, a higher "
            "trainer.zeroStage, more trainer.replicas, a smaller trainer.microBatchTokens or trainer.activationCheckpointing"
        )
    if one_machine and (problem := host_memory_problem(size, spec, host)) is not None:
        raise PrepareError(f"{model}: {problem.problem}: {problem.advice}")


def memory_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The machine's memory, bytes, or the container's limit if that is lower; ``cgroups`` as for :func:`.launch.usable_cores`."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of versions 2 and 1
        with suppress(OSError, ValueError):  # no such control group, or its value is "max"
            limits.append(int((cgroups / name).read_text()))
    return min(limits)


def gpu_memory_bytes() -> int | None:
    """Memory of the largest GPU that ``nvidia-smi`` lists, bytes; None without a GPU or without ``nvidia-smi``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return max(int(line) for line in done.stdout.split("\n") if line.strip()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
