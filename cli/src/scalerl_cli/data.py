"""``scalerl data``: what a run would read of its data, as the model will see it, and whether its answers can be graded."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from scalerl_api.dataset_source import DatasetSource as DatasetSpec
from scalerl_api.source import EvaluationTaskSpec, ProblemSpec, PromptSpec
from scalerl_api.verifier import CodeVerifier, VerifierSpec
from scalerl_cli.exits import BAD_INPUT, DONE, Refused
from scalerl_cli.inputs import load, problem_sections
from scalerl_cli.output import echo

if TYPE_CHECKING:
    from scalerl_tasks import PromptSource
    from scalerl_tasks.tokenizer import ModelTokenizer

_RUN_FILES = (".yaml", ".yml")
_SHOWN = 3
_MAX_SHOWN_CHARACTERS = 2000
_NUMBER = re.compile(r"[-+]?[$]?\d[\d,]*(?:\.\d+)?%?")
_MEASURED = 20_000
"""Prompts whose lengths are measured."""
_GUESSED = 200
"""Answers from which the verifier of data files is chosen."""


def run_data(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    files: list[Path] = arguments.files
    if len(files) == 1 and files[0].suffix in _RUN_FILES:
        spec = load(files[0]).spec
        given = [one[1:] for one in problem_sections(spec)]
        model = arguments.model or (Path(spec.model.path) if spec.model.path is not None else None)
    else:
        given = [("data", *_of_files(arguments))]
        model = arguments.model
    if model is not None and not model.is_dir():
        raise Refused(
            f"{model}: no such folder; --model, or model.path, is the folder with the model's tokenizer"
        )
    bad = [field for field, section, prompt in given if not _show(field, section, prompt, model, arguments)]
    return BAD_INPUT if bad else DONE


def _of_files(arguments: argparse.Namespace) -> tuple[ProblemSpec, PromptSpec]:
    from scalerl_tasks.tokenizer_config import TokenizerConfig

    columns: dict[str, object] = {}
    labels: dict[str, object] = {}
    for text in arguments.column:
        field, found, expression = text.partition("=")
        if not found:
            raise Refused(
                f"--column {text}: write FIELD=EXPRESSION, such as answer=reward_model.ground_truth"
            )
        (labels if field.startswith("labels.") else columns)[field.removeprefix("labels.")] = expression
    given = {
        "files": [str(file.expanduser().absolute()) for file in arguments.files],
        "columns": {"labels": labels} | columns,
        "filter": {"where": arguments.where},
        **({"answerPattern": arguments.answer_pattern} if arguments.answer_pattern else {}),
    }
    try:
        dataset = DatasetSpec.model_validate(given)
        verifier = VerifierSpec.model_validate({"name": arguments.verifier or "math-verify"})
        has_template = (
            arguments.model is None or TokenizerConfig.read(arguments.model).chat_template is not None
        )
        prompt = PromptSpec(format="Chat" if has_template else "Raw")
        return EvaluationTaskSpec(dataset=dataset, verifier=verifier, prompt=prompt), prompt
    except ValidationError as error:
        found = [(".".join(map(str, one["loc"])), one["msg"], one["input"]) for one in error.errors()]
        raise Refused(*(f"{field}: {text} (got {value!r})" for field, text, value in found)) from error
    except ValueError as error:
        raise Refused(str(error)) from error


def _show(
    field: str, section: ProblemSpec, prompt: PromptSpec, model: Path | None, arguments: argparse.Namespace
) -> bool:
    """Print about one source; returns whether it can be used."""
    import scalerl_tasks as tasks
    from scalerl_tasks.dataset.table_source import description
    from scalerl_tasks.environments.tool_calls import tools_of
    from scalerl_tasks.tokenizer import ModelTokenizer

    echo(f"{field}: {section.source_field}")
    try:
        source: tasks.PromptSource
        if section.dataset is not None:
            source = tasks.open_dataset(section.dataset, None, lambda text: None)
            echo(f"  columns: {', '.join(source.table.info.columns)}")
        else:
            source = tasks.open_source(section)
        for line in description(source):
            echo(f"  {line}")
        tools = tools_of(section.environment)
        tokenizer = None if model is None else ModelTokenizer(model, prompt, f"{field}.prompt", tools)
        shown = min(_SHOWN, len(source))
        for rank in range(shown):
            _show_prompt(source, rank * len(source) // shown, prompt, tokenizer)
        _show_lengths(source, prompt, tokenizer)
        return _check(source, section, arguments)
    except tasks.JsonlRowsError as error:
        for text in error.texts:
            echo(f"{field}: {text}", error=True)
    except (tasks.TaskError, OSError) as error:
        echo(f"{field}: {error}", error=True)
    return False


def _show_prompt(
    source: PromptSource, index: int, prompt: PromptSpec, tokenizer: ModelTokenizer | None
) -> None:
    from scalerl_tasks import DatasetSource, JsonlSource, render_prompt

    one = source[index]
    rendered = render_prompt(one, prompt.template, prompt.system)
    if tokenizer is not None:
        (text,) = tokenizer.texts(tokenizer.encode_prompts([rendered]))
    else:
        messages = [f"[{message['role']}] {message['content']}" for message in rendered.messages]
        text = rendered.user if len(messages) == 1 else "\n".join(messages)
    if len(text) > _MAX_SHOWN_CHARACTERS:
        text = f"{text[:_MAX_SHOWN_CHARACTERS]} … ({len(text):,} characters)"
    place = f", {source.place(index)}" if isinstance(source, DatasetSource | JsonlSource) else ""
    labels = "".join(f", {name} {value}" for name, value in one.labels.items())
    hard = "" if one.difficulty is None else f", difficulty {one.difficulty:g}"
    echo(f"  --- prompt {one.id}{place}{hard}{labels}")
    echo(text)
    answer = one.answer if len(one.answer) <= 200 else f"{one.answer[:200]} …"
    echo(f"  --- answer: {answer}")


def _show_lengths(source: PromptSource, prompt: PromptSpec, tokenizer: ModelTokenizer | None) -> None:
    from scalerl_tasks import render_prompt

    count = min(len(source), _MEASURED)
    chosen = (source[rank * len(source) // count] for rank in range(count))
    rendered = [render_prompt(one, prompt.template, prompt.system) for one in chosen]
    if tokenizer is not None:
        unit, lengths = "tokens", sorted(map(len, tokenizer.encode_prompts(rendered)))
    else:
        unit = "characters (tokens with --model)"
        lengths = sorted(sum(len(message["content"]) for message in one.messages) for one in rendered)
    middle, most, nearly = (lengths[min(count - 1, int(share * count))] for share in (0.5, 0.9, 0.99))
    of = "" if count == len(source) else f" of {count:,} prompts"
    quantiles = f"median {middle:,}, 90 % {most:,}, 99 % {nearly:,}, longest {lengths[-1]:,}"
    echo(f"  length in {unit}{of}: {quantiles}")


def _check(source: PromptSource, section: ProblemSpec, arguments: argparse.Namespace) -> bool:
    import scalerl_tasks as tasks

    info = source.table.info if isinstance(source, tasks.DatasetSource) else None
    given = arguments.files[0].suffix in _RUN_FILES or arguments.verifier is not None
    own_code = all(one.is_own_code for one in section.scoring)
    if info is not None and "answer" not in info.fields and not own_code:
        echo(
            "  answers: none, so only a verifier of your own code can score; or say where they are: columns.answer",
            error=given,
        )
        return not given
    if section.scoring and all(one.http is not None for one in section.scoring):
        echo("  answers: not checked, since a reward service is asked by a run alone; scalerl score asks it")
        return True
    if not given and info is not None and info.programs:
        section = section.model_copy(update={"verifier": VerifierSpec(code=CodeVerifier())})
    elif not given:
        first = [source[i].answer.strip() for i in range(min(_GUESSED, len(source)))]
        numbers = sum(_NUMBER.fullmatch(answer) is not None for answer in first)
        name = "number" if numbers >= 0.95 * len(first) else "math-verify"
        verifier = VerifierSpec.model_validate({"name": name})
        section = section.model_copy(update={"verifier": verifier})
    count, rejected = len(source), tasks.Rejected()

    def progress(text: str) -> None:
        echo(f"  {text}", error=True)

    try:
        tasks.check_answers(source, section, count, progress=progress, rejected=rejected)
    except tasks.AnswersError as error:
        for text in error.texts:
            progress(text)
        return False
    each = "each" if not rejected.rows else f"each of the other {count - len(rejected.rows):,}"
    own = section.own_environment
    titles = " and ".join(one.title for one in (*section.scoring, own) if one is not None)
    named = own is None and all(one.name is not None or one.code is not None for one in section.scoring)
    what = "scores 1 as a reply" if named else "gets a reward as a reply"
    echo(f"  answers: {count:,} checked by {titles}: {each} {what}")
    return True
