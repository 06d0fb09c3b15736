"""``scalerl score``: what the verifier of a run gives to completions of a file, without a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from scalerl_api.built_in import SERVER
from scalerl_api.process import ENVIRONMENT_URL
from scalerl_api.source import ProblemSpec, PromptSpec
from scalerl_cli.exits import DONE, FAILED, Refused
from scalerl_cli.inputs import load, problem_sections
from scalerl_cli.output import echo

if TYPE_CHECKING:
    from scalerl_tasks import Graded, Prompt, PromptSource

    Group = tuple[Prompt, list[str]]
    """Completions of one prompt, scored together."""


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A line of ``--completions``. With an answer it is a prompt of its own; otherwise ``id`` or ``prompt`` is that of a prompt of
    the run.
    """

    completion: str | None = None
    completions: list[str] | None = None
    id: str | None = None
    prompt: str | None = None
    answer: str | None = None
    metadata: dict[str, Any] = {}


def run_score(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    import scalerl_tasks as tasks

    spec = load(arguments.file).spec
    sections = {name: (section, prompt) for name, _, section, prompt in problem_sections(spec)}
    name = arguments.task or next(iter(sections))
    if name not in sections:
        raise Refused(f"--task {name}: {arguments.file} has {', '.join(sections)}")
    section, prompt = sections[name]
    on_servers = section.environment is not None and section.environment.name == SERVER
    if on_servers and not os.environ.get(ENVIRONMENT_URL):
        raise Refused(
            f"the servers of spec.environment run with a run: start one, and set {ENVIRONMENT_URL} to its address"
        )
    try:
        groups = list(_groups(arguments.completions, section))
        graded = asyncio.run(_score(section, prompt, groups))
    except tasks.TaskError as error:
        raise Refused(str(error)) from error
    return _report(groups, graded)


def _groups(path: Path, section: ProblemSpec) -> Iterator[Group]:
    from scalerl_tasks import Prompt, open_source

    rows = list(_rows(path))
    wanted = {row.id or row.prompt for _, row in rows if row.answer is None}
    found: dict[str, Prompt] = {}
    source: PromptSource | list[Prompt] = open_source(section) if wanted else []
    for prompt in map(source.__getitem__, range(len(source))):
        for key in wanted.intersection((prompt.id, prompt.text)):
            found.setdefault(str(key), prompt)
        if len(found) == len(wanted):
            break
    for number, row in rows:
        if row.answer is not None:
            prompt = Prompt(row.id or f"line-{number}", row.prompt or "", row.answer, metadata=row.metadata)
        elif (known := found.get(row.id or row.prompt or "")) is not None:
            prompt = known
        else:
            raise Refused(
                f"{path}, line {number}: no prompt of the run has {'id' if row.id else 'text'} {(row.id or row.prompt)!r}; give the "
                "line prompt and answer of its own"
            )
        yield prompt, [*([] if row.completion is None else [row.completion]), *(row.completions or [])]


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=Row)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Refused(f'{path}, line {number}: {error}; write {{"id": …, "completion": …}}') from None
        if (row.completion is None and not row.completions) or not (row.id or row.prompt or row.answer):
            raise Refused(
                f"{path}, line {number}: give completion or completions, and the prompt's id or text, or an answer"
            )
        yield number, row
    if not any(line.strip() for line in lines):
        raise Refused(f"{path}: is empty")


async def _score(section: ProblemSpec, prompt: PromptSpec, groups: list[Group]) -> list[list[Graded]]:
    """An environment scores each completion as an episode of one reply."""
    from scalerl_tasks import open_grading_pool
    from scalerl_tasks.environments.protocol import write_replies

    def texts(completions: list[str]) -> list[str]:
        own = section.stepping_environment
        return completions if own is None else [write_replies([completion]) for completion in completions]

    async with open_grading_pool(section, prompt=prompt, show_output=True) as pool:
        return await asyncio.gather(*(pool.score_group(one, texts(replies)) for one, replies in groups))


def _report(groups: list[Group], graded: list[list[Graded]]) -> int:
    """Print a line of JSON for each completion, and a summary to standard error."""
    from scalerl_tasks.verdict import NOT_APPLICABLE

    scored, failed, none = [], 0, 0
    for (prompt, completions), verdicts in zip(groups, graded, strict=True):
        for completion, one in zip(completions, verdicts, strict=True):
            line: dict[str, Any] = {"id": prompt.id, "completion": completion}
            if one.error == NOT_APPLICABLE:
                line["score"], none = None, none + 1
            elif one.verdict is None:
                failed += 1
                line["error"] = one.error
            else:
                scored.append(one.verdict.score)
                line |= {"score": one.verdict.score, **one.verdict.parts}
            echo(json.dumps(line, ensure_ascii=False))
    mean = f", mean score {sum(scored) / len(scored):.4g}" if scored else ""
    lost = f", {failed:,} without a score" if failed else ""
    lost += f", {none:,} to which the verifier does not apply" if none else ""
    echo(f"{len(scored) + failed + none:,} completions of {len(groups):,} groups{mean}{lost}", error=True)
    return FAILED if failed else DONE
