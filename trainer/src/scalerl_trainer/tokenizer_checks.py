"""Checks the tokenizer in a model's folder: its files, its chat template for each prompt of the run, and its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalerl_api.environment import EnvironmentSpec
from scalerl_api.load import SpecProblem
from scalerl_api.spec import PromptSpec, RunSpec
from scalerl_tasks.environments.tool_calls import tools_of
from scalerl_tasks.errors import TokenizerError, VerifierError
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_tasks.tokenizer_config import TokenizerConfig
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models.files import check_not_lfs, named, read_json

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PLACEHOLDERS = ("image", "img", "audio", "video", "vision")
"""Words in added tokens that stand for other media than text: their ids may be outside a text model's vocabulary."""


def tokenizer_problems(
    folder: Path, spec: RunSpec, config: Mapping[str, Any], where: str
) -> Iterator[SpecProblem]:
    """Problems of the tokenizer in ``folder``.

    Args:
        config: the model's.
        where: the field that names the model.
    """
    if not any((folder / name).is_file() for name in _FILES):
        yield SpecProblem(
            where, f"{folder}: no tokenizer ({', '.join(_FILES)})", "save the tokenizer there too"
        )
        return
    try:
        settings = _read_settings(folder)
    except (ModelError, TokenizerError, OSError) as error:
        yield _unusable(folder, where, error)
        return
    has_end = "eos_token" in settings.special or settings.end_token_ids
    if not has_end and (folder / "tokenizer.json").is_file():
        yield SpecProblem(
            where,
            f"{folder}: the tokenizer has no end-of-sequence token, so no completion could end",
            "set eos_token in tokenizer_config.json",
        )
        return
    tokenizer: ModelTokenizer | None = None
    for prompt, environment, field in _prompts(spec):
        if prompt.format == "Chat" and not (settings.chat_template or prompt.chat_template):
            yield SpecProblem(
                f"spec.{field}.format",
                f"Chat needs a chat template, and the tokenizer in {folder} has none",
                "use format: Raw, give chatTemplate, or a model with a template",
            )
            continue
        try:
            tokenizer = ModelTokenizer(folder, prompt, field, tools_of(environment))
            if environment is not None:
                tokenizer.check_turns()
        except ImportError:  # without torch, a tokenizer is only made from tokenizer.json
            return
        except VerifierError:  # of the environment's parameters, which the checks of tasks report
            continue
        except TokenizerError as error:
            problem = _prompt_problem(field, str(error))
            if problem is None:
                yield _unusable(folder, where, error)
                return
            yield problem
    if tokenizer is not None:
        yield from _vocabulary_problems(folder, tokenizer, config, where)


def _read_settings(folder: Path) -> TokenizerConfig:
    """The tokenizer's settings, after its other files were checked to be readable.

    Raises:
        ModelError, TokenizerError, OSError: one is not.
    """
    for name in _FILES:
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                check_not_lfs(folder / name, file.read(64))
    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json")
    return TokenizerConfig.read(folder)


def _unusable(folder: Path, where: str, error: Exception) -> SpecProblem:
    return SpecProblem(
        where, f"{folder}: {str(error).removeprefix('model: ')}", "save the tokenizer there again"
    )


def _prompts(spec: RunSpec) -> Iterator[tuple[PromptSpec, EnvironmentSpec | None, str]]:
    """The prompt settings of tasks and evaluation sets, each with its environment and its field."""
    for one in spec.task.tasks:
        yield one.section.prompt, one.section.environment, f"{one.field}.prompt"
    for at, of_set in enumerate(spec.evaluation.sets or ()):
        if (task := of_set.task) is not None and (task.prompt or task.environment):
            field = f"evaluation.sets.{at}.task.prompt"
            yield task.prompt or spec.task.prompt, task.environment, field


def _prompt_problem(field: str, error: str) -> SpecProblem | None:
    """The problem of a field of the prompt; None if the error is one of the tokenizer itself."""
    for path in (f"{field}.chatTemplate", field):
        if error.startswith(f"{path}: "):
            return SpecProblem(f"spec.{path}", error.removeprefix(f"{path}: "))
    return None


def _vocabulary_problems(
    folder: Path, tokenizer: ModelTokenizer, config: Mapping[str, Any], where: str
) -> Iterator[SpecProblem]:
    """Tokens of the tokenizer that the model has no embedding for."""
    text = config.get("text_config")
    rows = (text if isinstance(text, Mapping) else config).get("vocab_size")
    if type(rows) is not int:
        return
    outside = {id_: token for token, id_ in tokenizer.vocabulary.items() if id_ >= rows}
    for token in tokenizer.added_tokens:
        if any(word in token.lower() for word in _PLACEHOLDERS):
            outside.pop(tokenizer.vocabulary[token], None)
    if outside:
        shown = named(f"{token!r} ({id_})" for id_, token in outside.items())
        yield SpecProblem(
            where,
            f"{folder}: the tokenizer has {len(outside)} tokens beyond the {rows} of the model's embedding "
            f"(vocab_size in config.json): {shown}",
            "save the tokenizer of this model there, or resize its embedding",
        )
